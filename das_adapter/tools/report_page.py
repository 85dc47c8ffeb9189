"""The page that `das-adapter report` writes: the run's figures as JSON in a static template that plotly draws, in one
HTML file that needs no network."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from das_adapter import __version__
from das_adapter.core.length import LengthClass
from das_adapter.protocol.decision_log import Rollout
from das_adapter.tools import run_series as series
from das_adapter.tools.run_series import Alarm, Rate, TrainingStep

MAX_BARS = 2000
"""Maximum number of requests drawn, the last to end."""
MAX_POINTS = 3000
"""Maximum number of decode steps drawn where each is a point."""
TEMPLATE = Path(__file__).with_name("report_page.html")
COUNTED = ("rollout", "engine", "request")


def write(
    path: Path,
    rollouts: list[Rollout],
    shown: list[Rollout],
    summary: dict[str, Any],
    similarity: npt.NDArray[np.float64] | None = None,
    waits: Mapping[int, float] | None = None,
) -> None:
    """Write the page.

    Args:
        path: of the page.
        rollouts: all of the run.
        shown: those drawn over time.
        summary: of `report.summary`.
        similarity: of `run_series.similarity`; None: the rollouts' text is not known.
        waits: seconds that training waited for rollouts, by training step.

    Raises:
        ImportError: plotly is not installed.
    """
    from plotly.offline import get_plotlyjs

    steps = series.by_training_step(rollouts)
    data = {name: found for name, found in _figures(rollouts, shown, steps, similarity, waits).items() if found}
    counts = (f"{summary[f'{name}s']:,} {name}{'s' * (summary[f'{name}s'] != 1)}" for name in COUNTED)
    parts = {
        "COUNTS": "{} of {}, {}; das-adapter {}.".format(*counts, __version__),
        "TILES": "".join(
            f'<div class="tile"><b>{html.escape(figure)}</b>{html.escape(meaning)}</div>'
            for figure, meaning in _tiles(rollouts, steps, summary, waits)
        ),
        "ALARMS": _alarms(series.alarms(rollouts)),
        "DATA": json.dumps(data, default=np.ndarray.tolist).replace("<", "\\u003c"),
        "PLOTLY": get_plotlyjs(),
    }
    page = TEMPLATE.read_text(encoding="utf-8")
    for name, part in parts.items():
        page = page.replace(f"<!--{name}-->", part)
    path.write_text(page, encoding="utf-8")


def _figures(
    rollouts: list[Rollout],
    shown: list[Rollout],
    steps: Sequence[TrainingStep],
    similarity: npt.NDArray[np.float64] | None,
    waits: Mapping[int, float] | None,
) -> dict[str, Any]:
    """Return the numbers that each figure draws, by its name in the template; empty ones are not shown."""
    start, requests = series.begin(shown), series.requests_of(shown)
    decoded = [s for r in rollouts for s in r.steps if s.predicted]
    ages = (
        Rate("> 256" if r.kind == "older" else r.kind.replace("_", " to "), *r[1:]) for r in series.by_age(rollouts)
    )
    panels = {
        "by training step": ("training step", [step.acceptance for step in steps if step.acceptance.drafted]),
        "by epoch": ("visit of the problem", series.by_epoch(rollouts)),
        "by age of the history": ("weight versions since the newest rollout", list(ages)),
        "by source": ("drafted from", series.by_source(rollouts)),
        "by length so far": ("tokens of the response, from", series.by_length(rollouts)),
    }
    return {
        "timeline": {
            "of": f"before weight version {shown[0].version}" if shown[0].version >= 0 else "at the end of the log",
            "first": max(0, len(requests) - MAX_BARS),
            "requests": [
                [LengthClass(q.length_class).name.lower(), q.begin - start, q.end - start, q.tokens, q.accepted]
                for q in requests
            ],
            **series.timeline(shown)._asdict(),
        },
        "acceptance": [[title, axis, rates] for title, (axis, rates) in panels.items() if rates],
        "saved": [[s.version, s.tokens_per_forward, s.decode_seconds, s.saved_seconds] for s in steps],
        "history": [[s.version, s.history_hits, s.history_tokens] for s in steps if s.history_tokens is not None],
        "waits": list((waits or {}).items()),
        "latency": [
            [[1e3 * s.seconds, 1e3 * (s.predicted or 0.0)] for s in points[:: 1 + len(points) // MAX_POINTS]]
            for points in ([s for s in decoded if (s.drafted > 0) == drafted] for drafted in (False, True))
        ],
        "similarity": similarity is not None and np.where(np.isnan(similarity), -1, 100 * similarity).tolist(),
    }


def _tiles(
    rollouts: list[Rollout], steps: Sequence[TrainingStep], summary: dict[str, Any], waits: Mapping[int, float] | None
) -> Iterable[tuple[str, str]]:
    decoded = [s for r in rollouts for s in r.steps]
    forwards = max(1, sum(s.requests for s in decoded))
    seconds, saved = summary["decode_seconds"], summary["time_saved_s"]
    yield f"{1 + sum(s.accepted for s in decoded) / forwards:.2f}", "tokens per forward pass"
    yield f"{summary['accepted_tokens'] / max(1, summary['draft_tokens']):.0%}", "of draft tokens accepted"
    yield f"{saved:,.0f} s", f"saved of {seconds + saved:,.0f} s of decoding (estimate)"
    if waits:
        yield f"{sum(waits.values()) / len(waits):,.1f} s", "waited for rollouts in a training step, mean"
    hits = [step.history_hits for step in steps if step.history_hits is not None]
    if hits:
        yield f"{hits[-1]:.0%}", "of requests began with history, in the last step"
    if summary["latency_model_error"] is not None:
        yield f"{summary['latency_model_error']:.0%}", "mean error of predicted step times"


def _alarms(alarms: Sequence[Alarm]) -> str:
    if not alarms:
        return '<p class="fine">No alarm: nothing in the log sets das/health to 0.</p>'
    return "".join(
        f'<div class="alarm"><b>Training {_ranges(alarm.versions)}:</b> {html.escape(alarm.reason)}</div>'
        for alarm in alarms
    )


def _ranges(versions: Sequence[int]) -> str:
    """Name training steps: `step 3`, or `steps 3 to 5, 9`."""
    runs: list[list[int]] = []
    for version in versions:
        if runs and version == runs[-1][1] + 1:
            runs[-1][1] = version
        else:
            runs.append([version, version])
    names = ["the end of the log" if b < 0 else f"{a}" if a == b else f"{a} to {b}" for a, b in runs]
    return ("steps " if len(versions) > 1 else "step ") + ", ".join(names)
