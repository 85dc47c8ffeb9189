"""How long an engine's decode step takes: from a fitted line, from a roofline, or from a measured sweep."""

from __future__ import annotations

import csv
import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from das_adapter.core.hardware import Device, Hardware
from das_adapter.core.latency import StepModel
from das_adapter.core.model_drafts import UNSEEN_PASS
from das_adapter.core.roofline import Roofline
from das_adapter.errors import DasError
from das_adapter.sim.requests import Floats

Seconds = Callable[[Floats, Floats], Floats]
"""Times by requests and by the context tokens that these have together, float64 [n] each."""
PASS_SHARE = 0.05
"""Time of a pass of a neural drafter, as a share of a plain step, where it is neither given nor measured."""
PROMPT_S = 1e-5
"""Seconds of a prompt token beside a measured sweep."""
NETWORK = 50e9
"""Bytes per second of a device between NVLink domains: 400 Gb/s, NVIDIA's reference design for HGX systems."""
HOP_S = 8e-6
"""Seconds before the first byte of an all-reduce inside a domain arrives (NCCL's tree over NVLink, small messages)."""
HOP_NETWORK_S = 25e-6
"""The same between domains."""


class Steps:
    """Step times of an engine. Arguments are of several engines at once, float64 [engines]; answers are seconds."""

    passes: Any = None
    """Times of the passes of the model that drafts; None: not measured."""

    def decode(self, requests: Floats, tokens: Floats, context: Floats) -> Floats:
        """Return the times of steps: requests, tokens in the forward pass (1 and the draft of each), tokens of context
        that all requests have together."""
        raise NotImplementedError

    def prefill(self, tokens: Floats) -> Floats:
        """Return the times that reading so many prompt tokens adds."""
        raise NotImplementedError

    def copy_pass(self, requests: Floats, context: Floats) -> Floats:
        """Return the times of one pass of the policy copy."""
        raise NotImplementedError

    def neural_pass(self, share: float | None, drafter: str) -> Seconds:
        """Return the time of a pass of a neural drafter: a share of a plain step; None: as measured, else
        `PASS_SHARE`."""
        if share is None and self.passes is not None:
            return self.copy_pass
        return self._shared_pass(PASS_SHARE if share is None else share)

    def _shared_pass(self, part: float, read: float | None = None, extra: float = 0.0) -> Seconds:
        """Return a pass that takes a part of a plain step, `read` of what reading the context takes, and a constant."""

        def seconds(requests: Floats, context: Floats) -> Floats:
            short = self.decode(requests, requests, np.zeros_like(requests))
            reading = self.decode(requests, requests, context) - short
            return np.asarray(extra + part * short + (part if read is None else read) * reading)

        return seconds


@dataclass(frozen=True)
class Line(Steps):
    """A fitted `StepModel`, such as a calibration's."""

    model: StepModel
    passes: StepModel | None = None
    """Of the model that drafts; None: not measured."""

    def decode(self, requests: Floats, tokens: Floats, context: Floats) -> Floats:
        return self.model.seconds(tokens, requests, tokens > requests, context)

    def prefill(self, tokens: Floats) -> Floats:
        return self.model.slope(np.inf) * tokens

    def copy_pass(self, requests: Floats, context: Floats) -> Floats:
        model, share = (self.model, UNSEEN_PASS) if self.passes is None else (self.passes, 1.0)
        return np.asarray(share * model.seconds(requests, requests, False, context))


@dataclass(frozen=True)
class Instance(Steps):
    """The roofline of an engine on one or several devices, with what these exchange, and the engine's own time."""

    roof: Roofline
    """Of one device's share."""
    layers: int
    waits_s: float = 0.0
    """Seconds of a forward pass before the first byte of each exchange arrives."""
    token_s: float = 0.0
    """Seconds of the exchanges for each token."""
    overlap: bool = False
    """Whether the exchanges hide behind the kernels, as far as they take no longer; the waits do not."""
    overhead_s: float = 0.0
    """Seconds of each step that no kernel accounts for: scheduling, launches, sampling."""
    draft_overhead_s: float = 0.0
    """More of them in a step that verifies drafts."""
    pass_overhead_s: float = 0.0
    """Seconds of a drafting model's pass that no kernel accounts for."""
    copy_share: float = 0.25
    """Bytes of the policy copy's linear layers, as a share of the policy's."""

    def decode(self, requests: Floats, tokens: Floats, context: Floats) -> Floats:
        b = np.maximum(requests, 1e-9)
        kernels = self._with_exchange(self.roof.seconds(requests, context / b, tokens / b - 1.0), tokens)
        weights = float(self.roof.read_bytes(1)) / self.roof.hardware.bandwidth
        host = self.overhead_s + self.draft_overhead_s * (tokens > requests)
        return np.asarray(np.where(requests > 0, kernels + self.waits_s, weights) + host)

    def prefill(self, tokens: Floats) -> Floats:
        return self._with_exchange(tokens * self.roof.dense_flops / self.roof.hardware.flops, tokens)

    def copy_pass(self, requests: Floats, context: Floats) -> Floats:
        passes = self.roof.drafts(requests, context / np.maximum(requests, 1e-9), self.copy_share)
        return self._with_exchange(passes, requests) + self.waits_s + self.pass_overhead_s

    def neural_pass(self, share: float | None, drafter: str) -> Seconds:
        part = PASS_SHARE if share is None else share
        one_layer = "eagle3" in drafter or "mtp" in drafter
        return self._shared_pass(part, 1.0 / self.layers if one_layer else part, self.pass_overhead_s)

    def _with_exchange(self, kernels: Floats, tokens: Floats) -> Floats:
        exchange = self.token_s * tokens
        return np.asarray(np.maximum(kernels, exchange) if self.overlap else kernels + exchange)


def instance(
    sizes: dict[str, Any], device: Device, devices: int, precision: str, data_parallel: bool = False, **own: Any
) -> Instance:
    """Return the roofline of a model on so many devices; `own`: further fields of `Instance`.

    Raises:
        DasError: attention can't be data-parallel, since there are no experts to spread.
    """
    fast = Hardware(device.speed.bandwidth, device.speed.flops * (device.fp8 if precision == "fp8" else 1.0))
    one, layers = (1.0 if precision == "fp8" else 2.0), sizes["num_hidden_layers"]
    roof = Roofline.of(sizes, fast, devices, one, data_parallel)
    if data_parallel and not roof.expert_bytes:
        raise DasError("hardware.attention: found 'data', allowed for a model without experts: 'tensor'")
    if devices < 2:
        return Instance(roof, layers, **own)
    # two exchanges in each layer: rings of hidden states in 16 bits, or tokens on the way to their experts and back
    to_experts = sizes.get("num_experts_per_tok", 0) * (one + 2.0) / devices / 2
    size = sizes["hidden_size"] * (to_experts if data_parallel else 4.0)
    rate, wait = (device.link, HOP_S) if devices <= device.domain else (min(device.link, NETWORK), HOP_NETWORK_S)
    token_s = 2 * layers * (devices - 1) / devices * size / rate
    return Instance(roof, layers, 2 * layers * wait, token_s, **own)


@dataclass(frozen=True)
class Sweep(Steps):
    """Step times measured over a full grid of requests, mean context and draft tokens, interpolated linearly; past the
    grid its last piece continues. Prompts are read at `PROMPT_S` a token."""

    grid: list[Floats]
    """Requests [b], context [s] and draft tokens [d], each rising, the last from 0."""
    seconds: Floats
    """float64 [b, s, d]."""
    passes: Floats
    """Of the model that drafts, float64 [b, s]."""

    def decode(self, requests: Floats, tokens: Floats, context: Floats) -> Floats:
        b = np.maximum(requests, 1e-9)
        weights = map(_corners, self.grid, (requests, context / b, tokens / b - 1.0))
        found = np.einsum("bsd,bn,sn,dn->n", self.seconds, *weights)
        return np.where(requests > 0, found, self.seconds.min())

    def prefill(self, tokens: Floats) -> Floats:
        return PROMPT_S * tokens

    def copy_pass(self, requests: Floats, context: Floats) -> Floats:
        b = np.maximum(requests, 1e-9)
        return np.asarray(np.einsum("bs,bn,sn->n", self.passes, *map(_corners, self.grid, (requests, context / b))))


def _corners(axis: Floats, at: Floats) -> Floats:
    """Return the weight of each point of a rising axis in a linear interpolation, [axis, n]; before the first point the
    value stays, beyond the last one the line goes on."""
    low = np.clip(np.searchsorted(axis, at, side="right") - 1, 0, len(axis) - 2)
    share = np.maximum((at - axis[low]) / (axis[low + 1] - axis[low]), 0.0)
    weights, each = np.zeros((len(axis), len(at))), np.arange(len(at))
    weights[low, each], weights[low + 1, each] = 1.0 - share, share
    return weights


def read_sweep(path: str) -> Sweep:
    """Read a sweep in CSV: EfficientRollout's columns `batch, seq, gamma, mode, mean_ms`, with the modes
    `target_decode` (plain), `target_verify` and `drafter_decode`. Cells beyond the largest full grid are left out.

    Raises:
        DasError: no such file, or no full grid.
    """
    cells: dict[tuple[float, float, float], float] = {}
    passes: defaultdict[tuple[float, float], list[float]] = defaultdict(list)
    try:
        with Path(path).open() as file:
            for row in csv.DictReader(file):
                batch, seq, gamma, seconds = (float(row[name]) for name in ("batch", "seq", "gamma", "mean_ms"))
                if "draft" in row["mode"]:
                    passes[batch, seq].append(seconds * 1e-3)
                elif batch >= 1 and row["mode"] in ("target_decode", "target_verify"):
                    cells[batch, seq, 0.0 if row["mode"] == "target_decode" else gamma] = seconds * 1e-3
    except (OSError, KeyError, ValueError) as error:
        raise DasError(
            f"steps.file: found {path!r}, expected a CSV with batch, seq, gamma, mode, mean_ms: {error!r}"
        ) from None
    b, s, d = (np.array(sorted({key[i] for key in cells}), dtype=float) for i in range(3))
    d = np.array([x for x in d if all((*cell, x) in cells for cell in itertools.product(b, s))])
    if len(d) < 2 or d[0] != 0 or not all(cell in passes for cell in itertools.product(b, s)):
        raise DasError(f"steps.file: found {path!r}, whose cells do not fill a grid")
    values = np.array([[[cells[x, y, z] for z in d] for y in s] for x in b])
    return Sweep([b, s, d], values, np.array([[np.mean(passes[x, y]) for y in s] for x in b]))
