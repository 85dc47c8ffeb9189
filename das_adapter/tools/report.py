"""`das-adapter report`: a run's decision logs as plots and a summary."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from das_adapter.core.length import LengthClass
from das_adapter.errors import DasError

_COLOURS = {LengthClass.SHORT: "tab:green", LengthClass.MEDIUM: "tab:orange", LengthClass.LONG: "tab:red"}


@dataclass
class Rollout:
    """What happened between two weight syncs in one engine; see `engine.decisions` for the columns."""

    source: str
    version: int = -1
    """Weight version that followed; -1: the log ends before it."""
    steps: list[list[Any]] = field(default_factory=list)
    """begin, requests, tokens, draft tokens, accepted, seconds, predicted"""
    requests: list[list[Any]] = field(default_factory=list)
    """problem, length class, begin, end, tokens, draft tokens, accepted"""
    tried: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    saved: float = 0.0
    stopped: str | None = None


def read(directory: Path) -> list[Rollout]:
    """Every rollout of the decision logs in a directory or under it, in the order of their beginning.

    Raises:
        DasError: there is no log, or a line that is none of ours.
    """
    paths = sorted(directory.rglob("decisions-*.jsonl"))
    if not paths:
        raise DasError(f"report: no decisions-*.jsonl under {directory}: set das.log_dir in the run's config")
    rollouts = [rollout for path in paths for rollout in _rollouts(path)]
    return sorted((r for r in rollouts if r.steps), key=lambda r: float(r.steps[0][0]))


def _rollouts(path: Path) -> Iterator[Rollout]:
    current = Rollout(path.name)
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            kind, *values = json.loads(line)
            if kind == "s":
                current.steps.append(values)
            elif kind == "r":
                current.requests.append(values)
            elif kind == "a":
                current.tried, current.kept = values
            elif kind == "v":
                current.version, _, _, current.saved, current.stopped = values
                yield current
                current = Rollout(path.name)
            elif kind != "run":
                raise ValueError(f"unknown kind {kind!r}")
        except ValueError as error:
            raise DasError(f"report: {path}, line {number}: {error}") from None
    yield current


def summary(rollouts: list[Rollout]) -> dict[str, Any]:
    """Figures over all rollouts, as plain numbers."""
    steps = np.array([s[:6] for r in rollouts for s in r.steps], dtype=float)
    predicted = np.array([s[6] or np.nan for r in rollouts for s in r.steps], dtype=float)
    drafted = steps[:, 3] > 0
    requests = [q for r in rollouts for q in r.requests]
    error = np.abs(predicted / steps[:, 5] - 1)
    return {
        "rollouts": len(rollouts),
        "engines": len({r.source for r in rollouts}),
        "requests": len(requests),
        "decode_steps": len(steps),
        "decode_seconds": float(steps[:, 5].sum()),
        "drafted_steps": int(drafted.sum()),
        "draft_tokens": int(steps[:, 3].sum()),
        "accepted_tokens": int(steps[:, 4].sum()),
        "verify_waste": float((steps[:, 3].sum() - steps[:, 4].sum()) / max(1.0, steps[:, 2].sum())),
        "time_saved_s": float(sum(r.saved for r in rollouts)),
        "latency_model_error": None if np.isnan(error).all() else float(np.nanmean(np.minimum(error, 1))),
        "stopped": [r.stopped for r in rollouts if r.stopped],
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
        raise DasError(f"report: found no rollout before weight version {version}; there are {versions}")
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
    """A bar per request, the last to end on top: who makes the tail, and was drafted for."""
    start = min(r.steps[0][0] for r in rollouts)
    bars = sorted((q for r in rollouts for q in r.requests), key=lambda q: float(q[3]))
    for row, (_, kind, begin, end, tokens, _, accepted) in enumerate(bars):
        colour = _COLOURS[LengthClass(kind)]
        axis.barh(row, end - begin, left=begin - start, color=colour, alpha=0.35, height=0.9)
        axis.barh(row, (end - begin) * accepted / max(1, tokens), left=begin - start, color=colour, height=0.9)
    for kind, colour in _COLOURS.items():
        axis.barh(0, 0, color=colour, label=kind.name.lower())
    axis.set(xlabel="seconds", ylabel="request", title="Requests by end; filled: share of tokens from drafts")
    axis.legend(loc="lower right")


def _steps(axis: Any, rollouts: list[Rollout]) -> None:
    """Requests and draft tokens in each step over time."""
    start = min(r.steps[0][0] for r in rollouts)
    right = axis.twinx()
    for rollout in rollouts:
        at = np.array([s[0] for s in rollout.steps]) - start
        axis.step(at, [s[1] for s in rollout.steps], color="tab:blue")
        right.plot(at, [s[3] for s in rollout.steps], ".", color="tab:orange", markersize=3)
        right.plot(at, [s[4] for s in rollout.steps], ".", color="tab:green", markersize=3)
    axis.set(xlabel="seconds", title="Blue: requests; orange: draft tokens; green: accepted")
    axis.set_ylabel("requests", color="tab:blue")
    right.set_ylabel("draft tokens in a step")
    axis.set_ylim(bottom=0)
    right.set_ylim(bottom=0)


def _acceptance(axis: Any, rollouts: list[Rollout]) -> None:
    """Share of draft tokens accepted, by how long the response was already."""
    tried = np.sum([r.tried for r in rollouts if r.tried], axis=0)
    kept = np.sum([r.kept for r in rollouts if r.kept], axis=0)
    octaves = np.flatnonzero(tried)
    axis.bar(range(len(octaves)), kept[octaves] / tried[octaves], color="tab:green")
    axis.set_xticks(range(len(octaves)), [f"{2**o}" for o in octaves], rotation=45)
    axis.set(xlabel="tokens of the response so far, from", ylabel="share of draft tokens accepted", ylim=(0, 1))


def _latency(axis: Any, rollouts: list[Rollout]) -> None:
    """Predicted against measured step times."""
    steps = [s for r in rollouts for s in r.steps if s[6]]
    for drafted, colour, name in ((False, "tab:blue", "plain"), (True, "tab:orange", "drafted")):
        points = np.array([(s[5], s[6]) for s in steps if (s[3] > 0) == drafted]) * 1e3
        if len(points):
            axis.plot(points[:, 0], points[:, 1], ".", color=colour, markersize=3, label=name, alpha=0.5)
    if steps:
        top = float(np.percentile([s[5] for s in steps], 99.5)) * 1.2e3
        axis.plot([0, top], [0, top], color="grey", linewidth=1)
        axis.set(xlim=(0, top), ylim=(0, top))
        axis.legend()
    axis.set(xlabel="measured step time, ms", ylabel="predicted, ms")
