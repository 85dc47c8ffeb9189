"""How long an engine's decode step takes: from a fitted line, or from a roofline."""

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
"""Times by requests and by the context tokens that these have together, float64 [n]
each.
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
"""The same between domains."""


class Steps:
    """Step times of an engine. Arguments are of several engines at once, float64
    [engines]; answers are seconds.
    """

    def decode(self, requests: Floats, tokens: Floats, context: Floats) -> Floats:
        """Return the times of steps: requests, tokens in the forward pass (1 and the
        draft of each), tokens of context that all requests have together.
        """
        raise NotImplementedError

    def prefill(self, tokens: Floats) -> Floats:
        """Return the times that reading so many prompt tokens adds."""
        raise NotImplementedError

    def copy_pass(self, requests: Floats, context: Floats) -> Floats:
        """Return the times of one pass of the policy copy."""
        raise NotImplementedError

    def neural_pass(self, share: float | None, drafter: str) -> Seconds:
        """Return the time of a pass of a neural drafter: a share of a plain step; None:
        `PASS_SHARE`.
        """
        raise NotImplementedError

    def _shared_pass(
        self, part: float, read: float | None = None, extra: float = 0.0
    ) -> Seconds:
        """Return a pass that takes a part of a plain step, `read` of what reading the
        context takes, and a constant.
        """

        def seconds(requests: Floats, context: Floats) -> Floats:
            short = self.decode(requests, requests, np.zeros_like(requests))
            reading = self.decode(requests, requests, context) - short
            return np.asarray(
                extra + part * short + (part if read is None else read) * reading
            )

        return seconds


@dataclass(frozen=True)
class Line(Steps):
    """A fitted `StepModel`."""

    model: StepModel

    def decode(self, requests: Floats, tokens: Floats, context: Floats) -> Floats:
        return self.model.seconds(tokens, requests, tokens > requests, context)

    def prefill(self, tokens: Floats) -> Floats:
        return self.model.slope(np.inf) * tokens

    def copy_pass(self, requests: Floats, context: Floats) -> Floats:
        return np.asarray(
            tuning.UNSEEN_PASS * self.model.seconds(requests, requests, False, context)
        )

    def neural_pass(self, share: float | None, drafter: str) -> Seconds:
        return self._shared_pass(PASS_SHARE if share is None else share)


@dataclass(frozen=True)
class Instance(Steps):
    """The roofline of an engine on one or several devices, with what these exchange,
    and the engine's own time.
    """

    roof: Roofline
    """Of one device's share."""
    layers: int
    waits_s: float = 0.0
    """Seconds of a forward pass before the first byte of each exchange arrives."""
    token_s: float = 0.0
    """Seconds of the exchanges for each token."""
    overhead_s: float = 0.0
    """Seconds of each step that no kernel accounts for: scheduling, launches,
    sampling.
    """
    draft_overhead_s: float = 0.0
    """More of them in a step that verifies drafts."""
    pass_overhead_s: float = 0.0
    """Seconds of a drafting model's pass that no kernel accounts for."""
    copy_share: float = 0.25
    """Bytes of the policy copy's linear layers, as a share of the policy's."""

    def decode(self, requests: Floats, tokens: Floats, context: Floats) -> Floats:
        b = np.maximum(requests, 1e-9)
        kernels = (
            self.roof.seconds(requests, context / b, tokens / b - 1.0)
            + self.token_s * tokens
        )
        weights = float(self.roof.weights_s(1))
        host = self.overhead_s + self.draft_overhead_s * (tokens > requests)
        return np.asarray(
            np.where(requests > 0, kernels + self.waits_s, weights) + host
        )

    def prefill(self, tokens: Floats) -> Floats:
        return (
            tokens * self.roof.dense_flops / self.roof.hardware.flops
            + self.token_s * tokens
        )

    def copy_pass(self, requests: Floats, context: Floats) -> Floats:
        passes = self.roof.seconds(
            requests, context / np.maximum(requests, 1e-9), 0.0, self.copy_share
        )
        return passes + self.token_s * requests + self.waits_s + self.pass_overhead_s

    def neural_pass(self, share: float | None, drafter: str) -> Seconds:
        part = PASS_SHARE if share is None else share
        one_layer = "eagle3" in drafter or "mtp" in drafter
        return self._shared_pass(
            part, 1.0 / self.layers if one_layer else part, self.pass_overhead_s
        )


def instance(
    sizes: dict[str, Any], device: Device, devices: int, precision: str, **own: Any
) -> Instance:
    """Return the roofline of a model on so many devices; `own`: further fields of
    `Instance`.
    """
    fast = replace(
        device, flops=device.flops * (device.fp8 if precision == "fp8" else 1.0)
    )
    one = 1.0 if precision == "fp8" else 2.0
    layers = sizes["num_hidden_layers"]
    roof = Roofline.from_config(sizes, fast, devices, one)
    if devices < 2:
        return Instance(roof, layers, **own)
    # two exchanges in each layer: rings of hidden states in 16 bits
    size = 4.0 * sizes["hidden_size"]
    rate, wait = (
        (device.link, HOP_S)
        if devices <= device.domain
        else (min(device.link, NETWORK), HOP_NETWORK_S)
    )
    token_s = 2 * layers * (devices - 1) / devices * size / rate
    return Instance(roof, layers, 2 * layers * wait, token_s, **own)
