"""The time of an engine's decode step: from a fitted line, or from a roofline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from das_adapter.core import tuning
from das_adapter.core.hardware import Device
from das_adapter.core.latency import StepModel
from das_adapter.core.roofline import Roofline
from das_adapter.sim.requests import Floats

Seconds = Callable[[Floats, Floats], Floats]
"""Times of steps or passes, by requests and by the context tokens that these have
together, float64 [n] each.
"""
PASS_SHARE = 0.05
"""Time of a pass of a neural drafter, as a share of a plain step, where it is not
given.
"""
NETWORK = 50e9
"""Bytes per second of a device between NVLink domains: 400 Gb/s, NVIDIA's reference
design for HGX systems.
"""
HOP_S = 8e-6
"""Seconds before the first byte of an all-reduce inside a domain arrives (NCCL's tree
over NVLink, small messages).
"""
HOP_NETWORK_S = 25e-6
"""Seconds before the first byte of an all-reduce between domains arrives."""


class Steps:
    """Step times of an engine. Arguments are of several engines at once, float64
    [engines]; results are seconds.
    """

    def decode(self, requests: Floats, tokens: Floats, context: Floats) -> Floats:
        """Return the times of steps.

        Args:
            requests: requests that each engine decodes.
            tokens: tokens in the forward pass, one and the draft of each request.
            context: tokens of context that all of its requests have together.
        """
        raise NotImplementedError

    def prefill(self, tokens: Floats) -> Floats:
        """Return the times that reading so many prompt tokens adds."""
        raise NotImplementedError

    def copy_pass(self, requests: Floats, context: Floats) -> Floats:
        """Return the times of one pass of the policy copy."""
        raise NotImplementedError

    def neural_pass(self, share: float | None, drafter: str) -> Seconds:
        """Return the time of a pass of a neural drafter, which takes a share of a plain
        step; None: `PASS_SHARE`.
        """
        raise NotImplementedError

    def _shared_pass(
        self,
        share: float,
        context_share: float,
        extra_s: float = 0.0,
    ) -> Seconds:
        """Return the time of a pass that takes a share of a plain step, another share
        of what reading the context takes, and a constant.
        """

        def seconds(requests: Floats, context: Floats) -> Floats:
            no_context = np.zeros_like(requests)
            short_s = self.decode(requests, requests, no_context)
            whole_s = self.decode(requests, requests, context)
            reading_s = whole_s - short_s
            shared_s = extra_s + share * short_s
            context_s = context_share * reading_s
            return np.asarray(shared_s + context_s)

        return seconds


@dataclass(frozen=True)
class Line(Steps):
    """Step times of a fitted `StepModel`."""

    model: StepModel

    def decode(self, requests: Floats, tokens: Floats, context: Floats) -> Floats:
        drafted = tokens > requests
        return self.model.seconds(tokens, requests, drafted, context)

    def prefill(self, tokens: Floats) -> Floats:
        token_s = self.model.slope(np.inf)
        return token_s * tokens

    def copy_pass(self, requests: Floats, context: Floats) -> Floats:
        plain_s = self.model.seconds(requests, requests, False, context)
        pass_s = tuning.UNSEEN_PASS * plain_s
        return np.asarray(pass_s)

    def neural_pass(self, share: float | None, drafter: str) -> Seconds:
        if share is None:
            share = PASS_SHARE
        return self._shared_pass(share, share)


@dataclass(frozen=True)
class Instance(Steps):
    """Step times by the roofline of an engine on one or several devices, with what
    these exchange, and the engine's own time.
    """

    roof: Roofline
    """Roofline of one device's share."""
    layers: int
    """Layers of the model."""
    waits_s: float = 0.0
    """Seconds of a forward pass before the first byte of each exchange arrives."""
    token_s: float = 0.0
    """Seconds of the exchanges for each token."""
    overhead_s: float = 0.0
    """Seconds of each step that no kernel accounts for: scheduling, launches,
    sampling.
    """
    draft_overhead_s: float = 0.0
    """Further seconds of a step that verifies drafts."""
    pass_overhead_s: float = 0.0
    """Seconds of a drafting model's pass that no kernel accounts for."""
    copy_share: float = 0.25
    """Bytes of the policy copy's linear layers, as a share of the policy's."""

    def decode(self, requests: Floats, tokens: Floats, context: Floats) -> Floats:
        count = np.maximum(requests, 1e-9)
        context_each = context / count
        tokens_each = tokens / count
        drafts_each = tokens_each - 1.0
        kernels_s = self.roof.seconds(requests, context_each, drafts_each)
        exchange_s = self.token_s * tokens
        kernels_s = kernels_s + exchange_s
        # without a request, a forward pass still reads the weights
        weights_s = float(self.roof.weights_s(1))
        has_requests = requests > 0
        busy_s = kernels_s + self.waits_s
        device_s = np.where(has_requests, busy_s, weights_s)
        drafted = tokens > requests
        verification_s = self.draft_overhead_s * drafted
        host_s = self.overhead_s + verification_s
        return np.asarray(device_s + host_s)

    def prefill(self, tokens: Floats) -> Floats:
        flops = tokens * self.roof.dense_flops
        kernels_s = flops / self.roof.hardware.flops
        exchange_s = self.token_s * tokens
        return kernels_s + exchange_s

    def copy_pass(self, requests: Floats, context: Floats) -> Floats:
        count = np.maximum(requests, 1e-9)
        context_each = context / count
        kernels_s = self.roof.seconds(
            requests,
            context_each,
            0.0,
            self.copy_share,
        )
        exchange_s = self.token_s * requests
        device_s = kernels_s + exchange_s + self.waits_s
        return device_s + self.pass_overhead_s

    def neural_pass(self, share: float | None, drafter: str) -> Seconds:
        if share is None:
            share = PASS_SHARE
        context_share = share
        reads_as_layer = "eagle3" in drafter or "mtp" in drafter
        if reads_as_layer:
            # of all layers that read the context it has one
            context_share = 1.0 / self.layers
        return self._shared_pass(
            share,
            context_share,
            extra_s=self.pass_overhead_s,
        )


def instance(
    sizes: dict[str, Any],
    device: Device,
    devices: int,
    precision: str,
    **own: Any,
) -> Instance:
    """Return the step times of a model on so many devices.

    Args:
        sizes: as `models.sizes` returns them.
        devices: devices of one engine.
        precision: `bf16` or `fp8`.
        own: further fields of `Instance`.
    """
    speed_up = 1.0
    weight_bytes = 2.0
    if precision == "fp8":
        speed_up = device.fp8
        weight_bytes = 1.0
    flops = device.flops * speed_up
    fast = replace(device, flops=flops)
    layers = sizes["num_hidden_layers"]
    roof = Roofline.from_config(sizes, fast, devices, weight_bytes)
    if devices < 2:
        return Instance(roof, layers, **own)
    if devices <= device.domain:
        rate = device.link
        hop_s = HOP_S
    else:
        rate = min(device.link, NETWORK)
        hop_s = HOP_NETWORK_S
    # two exchanges in each layer: rings of hidden states in 16 bits
    num_exchanges = 2 * layers
    exchanged_bytes = 4.0 * sizes["hidden_size"]
    ring_share = num_exchanges * (devices - 1) / devices
    token_s = ring_share * exchanged_bytes / rate
    return Instance(
        roof=roof,
        layers=layers,
        waits_s=num_exchanges * hop_s,
        token_s=token_s,
        **own,
    )
