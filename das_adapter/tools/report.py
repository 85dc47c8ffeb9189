"""`das-adapter report`: a run's decision logs as plots and a summary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from das_adapter.core.length import LengthClass
from das_adapter.errors import DasError
from das_adapter.protocol.decision_log import Acceptance, Rollout

_COLOURS = {LengthClass.SHORT: "tab:green", LengthClass.MEDIUM: "tab:orange", LengthClass.LONG: "tab:red"}


def summary(rollouts: list[Rollout]) -> dict[str, Any]:
    """Sum up all rollouts, as plain numbers."""
    steps = [step for rollout in rollouts for step in rollout.steps]
    tokens, drafted = sum(s.tokens for s in steps), sum(s.drafted for s in steps)
    accepted = sum(s.accepted for s in steps)
    errors = [min(1.0, abs(s.predicted / s.seconds - 1)) for s in steps if s.predicted]
    syncs = [r.end for r in rollouts if r.end is not None]
    return {
        "rollouts": len(rollouts),
        "engines": len({r.source for r in rollouts}),
        "requests": sum(len(r.requests) for r in rollouts),
        "decode_steps": len(steps),
        "decode_seconds": sum(s.seconds for s in steps),
        "drafted_steps": sum(s.drafted > 0 for s in steps),
        "draft_tokens": drafted,
        "accepted_tokens": accepted,
        "verify_waste": (drafted - accepted) / max(1, tokens),
        "time_saved_s": sum(sync.saved for sync in syncs),
        "latency_model_error": sum(errors) / len(errors) if errors else None,
        "stopped": [sync.stopped for sync in syncs if sync.stopped],
    }


def write(rollouts: list[Rollout], out: Path, version: int | None = None) -> list[Path]:
    """Write summary.json and the plots; those over time show one rollout, the last complete one if none is named.

    Raises:
        DasError: the version named is not in the logs.
    """
    versions = sorted({r.version for r in rollouts})
    if version is None:
        version = versions[-1]
    if version not in versions:
        raise DasError(f"report: found no rollout before weight version {version}, allowed: {versions}")
    shown = [r for r in rollouts if r.version == version]
    out.mkdir(parents=True, exist_ok=True)
    (out / "summary.json").write_text(json.dumps(summary(rollouts), indent=2) + "\n")
    plots = {"timeline": _timeline, "steps": _steps, "acceptance": _acceptance, "latency": _latency}
    written = [out / "summary.json"]
    for name, draw in plots.items():
        written.append(out / f"{name}.png")
        _figure(written[-1], draw, rollouts if name in ("acceptance", "latency") else shown)
    return written


def _figure(path: Path, draw: Any, rollouts: list[Rollout]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    draw(axis, rollouts)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _timeline(axis: Any, rollouts: list[Rollout]) -> None:
    """Draw a bar per request, the last to end on top: which requests form the tail, and what share was drafted."""
    start = min(r.steps[0].begin for r in rollouts)
    bars = sorted((q for r in rollouts for q in r.requests), key=lambda request: request.end)
    for row, bar in enumerate(bars):
        colour, width = _COLOURS[LengthClass(bar.length_class)], bar.end - bar.begin
        axis.barh(row, width, left=bar.begin - start, color=colour, alpha=0.35, height=0.9)
        axis.barh(row, width * bar.accepted / max(1, bar.tokens), left=bar.begin - start, color=colour, height=0.9)
    for kind, colour in _COLOURS.items():
        axis.barh(0, 0, color=colour, label=kind.name.lower())
    axis.set(xlabel="seconds", ylabel="request", title="Requests by end; filled: share of tokens from drafts")
    axis.legend(loc="lower right")


def _steps(axis: Any, rollouts: list[Rollout]) -> None:
    """Draw the requests and draft tokens of each step over time."""
    start = min(r.steps[0].begin for r in rollouts)
    right = axis.twinx()
    for rollout in rollouts:
        at = np.array([s.begin for s in rollout.steps]) - start
        axis.step(at, [s.requests for s in rollout.steps], color="tab:blue")
        right.plot(at, [s.drafted for s in rollout.steps], ".", color="tab:orange", markersize=3)
        right.plot(at, [s.accepted for s in rollout.steps], ".", color="tab:green", markersize=3)
    axis.set(xlabel="seconds", title="Blue: requests; orange: draft tokens; green: accepted")
    axis.set_ylabel("requests", color="tab:blue")
    right.set_ylabel("draft tokens in a step")
    axis.set_ylim(bottom=0)
    right.set_ylim(bottom=0)


def _acceptance(axis: Any, rollouts: list[Rollout]) -> None:
    """Draw the share of draft tokens accepted, by the length of the response so far."""
    drafted, accepted = np.sum([r.acceptance for r in rollouts if r.acceptance] or [Acceptance([0], [0])], axis=0)
    octaves = np.flatnonzero(drafted)
    axis.bar(range(len(octaves)), accepted[octaves] / drafted[octaves], color="tab:green")
    axis.set_xticks(range(len(octaves)), [f"{2**o}" for o in octaves], rotation=45)
    axis.set(xlabel="tokens of the response so far, from", ylabel="share of draft tokens accepted", ylim=(0, 1))


def _latency(axis: Any, rollouts: list[Rollout]) -> None:
    """Draw predicted over measured step times."""
    steps = [s for r in rollouts for s in r.steps if s.predicted]
    for drafted, colour, name in ((False, "tab:blue", "plain"), (True, "tab:orange", "drafted")):
        points = np.array([(s.seconds, s.predicted) for s in steps if (s.drafted > 0) == drafted]) * 1e3
        if len(points):
            axis.plot(points[:, 0], points[:, 1], ".", color=colour, markersize=3, label=name, alpha=0.5)
    if steps:
        top = float(np.percentile([s.seconds for s in steps], 99.5)) * 1.2e3
        axis.plot([0, top], [0, top], color="grey", linewidth=1)
        axis.set(xlim=(0, top), ylim=(0, top))
        axis.legend()
    axis.set(xlabel="measured step time, ms", ylabel="predicted, ms")
