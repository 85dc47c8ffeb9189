"""`das-adapter report`: a run's decision logs as a page, plots and a summary."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from das_adapter.core.length import LengthClass
from das_adapter.errors import DasError
from das_adapter.protocol.decision_log import Rollout
from das_adapter.sim import rollouts as dumps
from das_adapter.tools import report_page, run_series

BLUE, ORANGE, GREY, INK = "#2a6f97", "#e07b1a", "#c3c9d1", "#22303c"
CLASSES = {LengthClass.SHORT: "#9ecae1", LengthClass.MEDIUM: "#4292c6", LengthClass.LONG: "#08519c"}


def summary(rollouts: list[Rollout], waits: Mapping[int, float] | None = None) -> dict[str, Any]:
    """Sum up all rollouts, as plain numbers; `waits`: seconds that training waited for those of each step."""
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
        "exposed_generation_s": sum(waits.values()) if waits else None,
        "latency_model_error": sum(errors) / len(errors) if errors else None,
        "stopped": [sync.reason for sync in syncs if sync.state in ("stopped", "failed")],
    }


def write(
    rollouts: list[Rollout],
    out: Path,
    version: int | None = None,
    written: Sequence[dumps.Rollout] | None = None,
    waits: Mapping[int, float] | None = None,
) -> list[Path]:
    """Write report.html, summary.json and the plots; those over time show one rollout, the last complete one if none
    is named.

    Args:
        rollouts: of the decision logs.
        out: directory; made if there is none.
        version: the weight version that followed the rollout shown over time.
        written: the rollouts' text, for the similarity of epochs; None: it is not known.
        waits: of `decision_log.read_waits`.

    Raises:
        DasError: the version named is not in the logs, or a plotting package is missing.
    """
    if missing := [name for name in ("matplotlib", "plotly") if importlib.util.find_spec(name) is None]:
        raise DasError(f"report: found no {' and no '.join(missing)}: pip install 'das-adapter[plot]'")
    versions = sorted({r.version for r in rollouts})
    if version is None:
        version = versions[-1]
    if version not in versions:
        raise DasError(f"report: found no rollout before weight version {version}, allowed: {versions}")
    shown = [r for r in rollouts if r.version == version]
    out.mkdir(parents=True, exist_ok=True)
    figures = summary(rollouts, waits)
    (out / "summary.json").write_text(json.dumps(figures, indent=2) + "\n")
    plots = {"timeline": _timeline, "steps": _steps, "acceptance": _acceptance, "latency": _latency}
    similarity = None if written is None else run_series.similarity(written)
    report_page.write(out / "report.html", rollouts, shown, figures, similarity, waits)
    files = [out / "report.html", out / "summary.json"]
    for name, draw in plots.items():
        files.append(out / f"{name}.png")
        _figure(files[-1], draw, rollouts if name in ("acceptance", "latency") else shown)
    return files


def _figure(path: Path, draw: Any, rollouts: list[Rollout]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    draw(figure.subplots(), rollouts)
    figure.savefig(path, dpi=150)


def _timeline(axis: Any, rollouts: list[Rollout]) -> None:
    """Draw a bar per request, the last to end on top: which requests form the tail, and what share was drafted."""
    start = run_series.begin(rollouts)
    for row, bar in enumerate(run_series.requests_of(rollouts)):
        colour, width = CLASSES[LengthClass(bar.length_class)], bar.end - bar.begin
        axis.barh(row, width, left=bar.begin - start, color=colour, alpha=0.35, height=0.9)
        axis.barh(row, width * bar.accepted / max(1, bar.tokens), left=bar.begin - start, color=colour, height=0.9)
    for kind, colour in CLASSES.items():
        axis.barh(0, 0, color=colour, label=f"predicted {kind.name.lower()}")
    axis.set(xlabel="seconds", ylabel="requests by end", title="Requests; filled: share of tokens from drafts")
    axis.legend(loc="lower right")


def _steps(axis: Any, rollouts: list[Rollout]) -> None:
    """Draw the running requests and the draft tokens of decode steps over time."""
    over = run_series.timeline(rollouts)
    right, bins = axis.twinx(), {"width": np.diff(over.bins), "align": "edge"}
    right.bar(over.bins[:-1], over.accepted, color=ORANGE, label="accepted", **bins)
    right.bar(over.bins[:-1], over.rejected, bottom=over.accepted, color=GREY, label="rejected", **bins)
    axis.step(over.at, over.running, where="post", color=BLUE)
    axis.set(xlabel="seconds", title="Running requests, and draft tokens per decode step", zorder=2)
    axis.patch.set_visible(False)
    axis.set_ylabel("running requests", color=BLUE)
    right.set_ylabel("draft tokens per decode step")
    right.legend(loc="upper right")
    axis.set_ylim(bottom=0)


def _acceptance(axis: Any, rollouts: list[Rollout]) -> None:
    """Draw the share of draft tokens accepted, by the length of the response so far."""
    rates = run_series.by_length(rollouts)
    axis.bar([rate.kind for rate in rates], [100 * rate.share for rate in rates], color=ORANGE)
    axis.set(xlabel="tokens of the response so far, from", ylabel="draft tokens accepted, %", ylim=(0, 100))
    axis.set_title("Acceptance by length so far")


def _latency(axis: Any, rollouts: list[Rollout]) -> None:
    """Draw predicted over measured step times."""
    steps = [s for r in rollouts for s in r.steps if s.predicted]
    for drafted, colour, name in ((False, BLUE, "without drafts"), (True, ORANGE, "with drafts")):
        points = np.array([(s.seconds, s.predicted) for s in steps if (s.drafted > 0) == drafted]) * 1e3
        if len(points):
            axis.plot(points[:, 0], points[:, 1], ".", color=colour, markersize=3, label=name, alpha=0.5)
    if steps:
        top = float(np.percentile([s.seconds for s in steps], 99.5)) * 1.2e3
        axis.plot([0, top], [0, top], color=INK, linewidth=1)
        axis.set(xlim=(0, top), ylim=(0, top))
        axis.legend()
    axis.set(xlabel="measured step time, ms", ylabel="predicted step time, ms", title="Step times")
