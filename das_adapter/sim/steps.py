"""How long an engine's decode step takes: from a fitted line, from a measured sweep, or from a roofline."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from das_adapter.core import latency
from das_adapter.core.hardware import Device, Hardware
from das_adapter.core.latency import StepModel
from das_adapter.core.model_drafts import UNSEEN_PASS
from das_adapter.core.roofline import Roofline
from das_adapter.errors import DasError
from das_adapter.sim.hardware import all_reduce_seconds, all_to_all_seconds

Floats = npt.NDArray[np.float64]
PASS_SHARE = 0.05
"""Time of a pass of a neural drafter, as a share of a plain step, where it is neither given nor measured."""


class Steps(Protocol):
    """Step times of an engine. Arguments are of several engines at once, float64 [engines]; answers are seconds."""

    def decode(self, requests: Floats, tokens: Floats, context: Floats) -> Floats:
        """Return the times of steps: requests, tokens in the forward pass (1 and the draft of each), tokens of context
        that all requests have together."""
        ...

    def prefill(self, tokens: Floats) -> Floats:
        """Return the times that reading so many prompt tokens adds."""
        ...

    def copy_pass(self, requests: Floats, context: Floats) -> Floats:
        """Return the times of one pass of the policy copy."""
        ...


@dataclass(frozen=True)
class Line:
    """A fitted `StepModel`, such as a calibration's."""

    model: StepModel
    passes: StepModel | None = None
    """Of the model that drafts; None: not measured."""
    copy_share: float = UNSEEN_PASS
    """Time of a pass of the policy copy, of a step without drafts, where passes were not measured."""
    prefill_share: float = 1.0
    """Time of a prompt token, of a token in a large step."""

    def decode(self, requests: Floats, tokens: Floats, context: Floats) -> Floats:
        """See `Steps`."""
        return self.model.seconds(tokens, requests, tokens > requests, context)

    def prefill(self, tokens: Floats) -> Floats:
        """See `Steps`."""
        return np.asarray(self.prefill_share * self.model.slope(np.inf) * tokens)

    def copy_pass(self, requests: Floats, context: Floats) -> Floats:
        """See `Steps`."""
        if self.passes is not None:
            return self.passes.seconds(requests, requests, False, context)
        return np.asarray(self.copy_share * self.model.seconds(requests, requests, False, context))


@dataclass(frozen=True)
class Instance:
    """The roofline of an engine on one or several devices, with what it exchanges, and the engine's own time."""

    roof: Roofline
    """Of one device's share."""
    device: Device | None = None
    devices: int = 1
    hidden: int = 0
    layers: int = 0
    overhead_s: float = 0.0
    """Seconds of each step that no kernel accounts for: scheduling, launches, sampling."""
    draft_overhead_s: float = 0.0
    """More of them in a step that verifies drafts."""
    copy_share: float = 0.25
    """Bytes of the policy copy's linear layers, of the policy's."""
    pass_overhead_s: float = 0.0
    """Seconds of a pass of the policy copy that no kernel accounts for."""
    sent_bytes: float = 0.0
    """Bytes that a token's hidden state takes on its way to its experts and back, where only these are spread over the
    devices; 0: layers are."""
    overlap: bool = False
    """Whether what is exchanged hides behind the kernels, as far as it takes no longer; the waits do not."""

    def decode(self, requests: Floats, tokens: Floats, context: Floats) -> Floats:
        """See `Steps`."""
        b = np.maximum(requests, 1e-9)
        kernels = self.roof.seconds(requests, context / b, tokens / b - 1.0)
        host = self.overhead_s + self.draft_overhead_s * (tokens > requests)
        return np.asarray(np.where(requests > 0, self._exchanged(kernels, tokens), self._weights()) + host)

    def prefill(self, tokens: Floats) -> Floats:
        """See `Steps`."""
        seconds = tokens * self.roof.dense_flops / self.roof.hardware.flops
        return self._exchanged(seconds, tokens) - self._exchange(np.zeros(1))

    def copy_pass(self, requests: Floats, context: Floats) -> Floats:
        """See `Steps`."""
        b = np.maximum(requests, 1e-9)
        passes = self.roof.drafts(requests, context / b, self.copy_share)
        return np.asarray(self._exchanged(passes, requests) + self.pass_overhead_s)

    def _exchanged(self, kernels: Floats, tokens: Floats) -> Floats:
        """Seconds of kernels with the exchange of so many tokens."""
        waits, whole = self._exchange(np.zeros(1)), self._exchange(tokens)
        return np.asarray(np.maximum(kernels, whole - waits) + waits if self.overlap else kernels + whole)

    def _weights(self) -> float:
        return float(self.roof.read_bytes(1)) / self.roof.hardware.bandwidth

    def _exchange(self, tokens: Floats) -> Floats:
        """Two exchanges in each layer: all-reduces of the hidden states, or the way to the experts and that back."""
        if self.devices < 2 or self.device is None:
            return np.zeros_like(tokens)
        spread = all_to_all_seconds if self.sent_bytes else all_reduce_seconds
        size = self.sent_bytes / self.devices / 2 if self.sent_bytes else 2.0 * self.hidden
        none = spread(self.device, self.devices, 0.0)
        byte = spread(self.device, self.devices, 1e9) - none
        return np.asarray(2 * self.layers * (none + byte * 1e-9 * size * tokens))


def instance(
    sizes: dict[str, Any],
    device: Device,
    devices: int,
    precision: str,
    overhead_s: float = 0.0,
    draft_overhead_s: float = 0.0,
    pass_overhead_s: float = 0.0,
    data_parallel: bool = False,
    overlap: bool = False,
    **fitted: float,
) -> Instance:
    """Return the roofline of a model on so many devices; `precision`: `bf16` or `fp8`; `data_parallel`, `fitted`: as in
    `Roofline.of`.

    Raises:
        DasError: attention can't be data-parallel, since there are no experts to spread.
    """
    fast = Hardware(device.speed.bandwidth, device.speed.flops * (device.fp8 if precision == "fp8" else 1.0))
    one = 1.0 if precision == "fp8" else 2.0
    roof = Roofline.of(sizes, fast, devices, one, data_parallel, **fitted)
    if data_parallel and not roof.expert_bytes:
        raise DasError("hardware.attention: found 'data', allowed for a model without experts: 'tensor'")
    sent = sizes["num_experts_per_tok"] * sizes["hidden_size"] * (one + 2.0) if data_parallel else 0.0
    return Instance(
        roof,
        device,
        devices,
        sizes["hidden_size"],
        sizes["num_hidden_layers"],
        overhead_s,
        draft_overhead_s,
        pass_overhead_s=pass_overhead_s,
        sent_bytes=sent,
        overlap=overlap,
    )


@dataclass(frozen=True)
class Sweep:
    """Measured step times over a full grid of requests, mean context and draft tokens, with what lies between
    interpolated: linearly in context and drafts, and in requests; beyond the grid its last piece goes on."""

    requests: Floats
    """Rising, float64 [b]."""
    context: Floats
    """Rising, float64 [s]."""
    drafts: Floats
    """Rising from 0, float64 [d]."""
    seconds: Floats
    """float64 [b, s, d]."""
    passes: Floats | None = None
    """Of the model that drafts, float64 [b, s]; None: not measured."""
    token_s: float = 1e-5
    """Of a prompt token."""

    def decode(self, requests: Floats, tokens: Floats, context: Floats) -> Floats:
        """See `Steps`."""
        b = np.maximum(requests, 1e-9)
        grid = [self.requests, self.context, self.drafts]
        found = _interpolate(grid, self.seconds, np.stack([requests, context / b, tokens / b - 1.0]))
        return np.where(requests > 0, found, self.seconds.min())

    def prefill(self, tokens: Floats) -> Floats:
        """See `Steps`."""
        return np.asarray(self.token_s * tokens)

    def copy_pass(self, requests: Floats, context: Floats) -> Floats:
        """See `Steps`."""
        if self.passes is None:
            raise DasError(
                "steps: found no passes of the model that drafts in the sweep or calibration, which the "
                "drafter needs (das-adapter calibrate --drafter)"
            )
        b = np.maximum(requests, 1e-9)
        return _interpolate([self.requests, self.context], self.passes, np.stack([requests, context / b]))


def _interpolate(grid: list[Floats], values: Floats, points: Floats) -> Floats:
    """Interpolate `values` on a grid at points [dimensions, n], linearly in each dimension; beyond the first points of
    the grid the value stays, beyond the last ones the line goes on."""
    corners: list[tuple[npt.NDArray[np.int64], Floats]] = []
    for axis, at in zip(grid, points, strict=True):
        if len(axis) == 1:
            corners.append((np.zeros(len(at), np.int64), np.zeros(len(at))))
            continue
        low = np.clip(np.searchsorted(axis, at, side="right") - 1, 0, len(axis) - 2)
        corners.append((low, np.maximum((at - axis[low]) / (axis[low + 1] - axis[low]), 0.0)))
    total = np.zeros(points.shape[1])
    for corner in range(2 ** len(grid)):
        weight, place = np.ones(points.shape[1]), []
        for dimension, (low, share) in enumerate(corners):
            upper = corner >> dimension & 1
            weight = weight * (share if upper else 1.0 - share)
            place.append(np.minimum(low + upper, len(grid[dimension]) - 1))
        total += weight * values[tuple(place)]
    return total


def read_calibration(path: str) -> Line | Sweep:
    """Read the file of `das-adapter calibrate`: its samples where they fill a grid, else its fitted line; and its model
    of the drafting model's passes, where they were measured.

    Raises:
        DasError: no such file.
    """
    found = latency.read_calibration(path, "steps.file")
    try:
        rows = json.loads(Path(path).read_text())["samples"]
        cells = {(r["requests"], r["context"], r["drafts"]): r["seconds"] for r in rows}
    except (ValueError, KeyError, TypeError) as error:
        raise DasError(
            f"steps.file={path!r}: found {error!r}, expected a file that das-adapter calibrate wrote"
        ) from None
    sweep = _sweep(cells)
    if sweep is None:
        return Line(found.steps, found.passes)
    passes = None
    if found.passes is not None:
        b, s = sweep.requests[:, None], sweep.context
        passes = found.passes.seconds(b, b, False, b * s)
    return replace(sweep, passes=passes, token_s=found.steps.slope(np.inf))


def read_sweep(path: str) -> Sweep:
    """Read a sweep in CSV: EfficientRollout's columns `batch, seq, gamma, mode, mean_ms`, with the modes
    `target_decode` (plain), `target_verify` and `drafter_decode`.

    Raises:
        DasError: no such file, or no full grid.
    """
    cells: dict[tuple[float, float, float], float] = {}
    passes: dict[tuple[float, float], list[float]] = {}
    try:
        with Path(path).open() as file:
            for row in csv.DictReader(file):
                batch, seq, gamma = float(row["batch"]), float(row["seq"]), float(row["gamma"])
                seconds = float(row["mean_ms"]) * 1e-3
                if batch < 1:
                    continue
                if row["mode"] == "target_decode":
                    cells[batch, seq, 0.0] = seconds
                elif "verify" in row["mode"]:
                    cells[batch, seq, gamma] = seconds
                elif "draft" in row["mode"]:
                    passes.setdefault((batch, seq), []).append(seconds)
    except (OSError, KeyError, ValueError) as error:
        raise DasError(
            f"steps.sweep: found {path!r}, expected a CSV with batch, seq, gamma, mode, mean_ms: {error!r}"
        ) from None
    sweep = _sweep(cells)
    if sweep is None:
        raise DasError(f"steps.sweep: found {path!r}, whose cells do not fill a grid")
    if passes:
        copy = np.array([[np.mean(passes[b, s]) for s in sweep.context] for b in sweep.requests])
        sweep = replace(sweep, passes=copy)
    return sweep


def _sweep(cells: dict[tuple[float, float, float], float]) -> Sweep | None:
    """The largest full grid of cells, whose drafts are those that any pair of requests and context has; None if it has
    no drafts."""
    axes = [np.array(sorted({key[i] for key in cells}), dtype=float) for i in range(3)]
    drafts = [d for d in axes[2] if all((b, s, d) in cells for b in axes[0] for s in axes[1])]
    if len(drafts) < 2 or drafts[0] != 0:
        return None
    values = np.array([[[cells[b, s, d] for d in drafts] for s in axes[1]] for b in axes[0]])
    return Sweep(axes[0], axes[1], np.array(drafts), values)


def neural_pass(steps: Steps, share: float | None, drafter: str) -> Callable[[Floats, Floats], Floats]:
    """Return the time of a pass of a neural drafter, by requests and context.

    Args:
        steps: of the policy.
        share: of a plain step; None: as measured, else `PASS_SHARE`.
        drafter: as in the block of a run; EAGLE-3 and MTP read the context of one layer.
    """
    if share is None and isinstance(steps, Line | Sweep) and steps.passes is not None:
        return steps.copy_pass
    part = PASS_SHARE if share is None else share
    extra, read = 0.0, part
    if part and isinstance(steps, Instance):
        extra = steps.pass_overhead_s
        read = 1.0 / steps.layers if "eagle3" in drafter or "mtp" in drafter else part

    def seconds(requests: Floats, context: Floats) -> Floats:
        short = steps.decode(requests, requests, np.zeros_like(requests))
        return np.asarray(extra + part * short + read * (steps.decode(requests, requests, context) - short))

    return seconds
