"""`das-adapter report`: a run's decision logs as a summary and one page, which needs no network.

The page is a static template, in which plotly draws the figures that are put into it as JSON.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from das_adapter import __version__
from das_adapter.core.length import LengthClass
from das_adapter.errors import DasError
from das_adapter.protocol.decision_log import Rollout
from das_adapter.sim import rollouts as dumps
from das_adapter.tools import run_series as series
from das_adapter.tools.run_series import Alarm, Rate, TrainingStep

MAX_BARS = 2000
"""Maximum number of requests drawn, the last to end."""
MAX_POINTS = 3000
"""Maximum number of decode steps drawn where each is a point."""
TEMPLATE = Path(__file__).with_name("report_page.html")
COUNTED = ("rollout", "engine", "request")


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
        "stopped": [sync.stopped for sync in syncs if sync.stopped],
    }


def write(
    rollouts: list[Rollout],
    out: Path,
    version: int | None = None,
    written: Sequence[dumps.Rollout] | None = None,
    waits: Mapping[int, float] | None = None,
) -> list[Path]:
    """Write report.html and summary.json.

    Args:
        rollouts: of the decision logs.
        out: directory; made if there is none.
        version: the weight version that followed the rollout shown over time; None: the last complete one.
        written: the rollouts' text, for the similarity of epochs; None: it is not known.
        waits: of `decision_log.read_waits`.

    Raises:
        DasError: the version named is not in the logs, or plotly is missing.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise DasError("report: found no plotly: pip install 'das-adapter[plot]'") from None
    versions = sorted({r.version for r in rollouts})
    if version is None:
        version = versions[-1]
    if version not in versions:
        raise DasError(f"report: found no rollout before weight version {version}, allowed: {versions}")
    figures, steps = summary(rollouts, waits), series.by_training_step(rollouts)
    drawn = _figures(rollouts, [r for r in rollouts if r.version == version], steps, waits)
    if written is not None:
        similarity = series.similarity(written)
        drawn["similarity"] = np.where(np.isnan(similarity), -1, 100 * similarity).tolist()
    counts = (f"{figures[f'{name}s']:,} {name}{'s' * (figures[f'{name}s'] != 1)}" for name in COUNTED)
    parts = {
        "COUNTS": "{} of {}, {}; das-adapter {}.".format(*counts, __version__),
        "TILES": "".join(
            f'<div class="tile"><b>{html.escape(figure)}</b>{html.escape(meaning)}</div>'
            for figure, meaning in _tiles(rollouts, steps, figures, waits)
        ),
        "ALARMS": _alarms(series.alarms(rollouts)),
        "DATA": json.dumps({k: v for k, v in drawn.items() if v}, default=np.ndarray.tolist).replace("<", "\\u003c"),
        "PLOTLY": get_plotlyjs(),
    }
    page = TEMPLATE.read_text(encoding="utf-8")
    for name, part in parts.items():
        page = page.replace(f"<!--{name}-->", part)
    out.mkdir(parents=True, exist_ok=True)
    files = [out / "report.html", out / "summary.json"]
    files[0].write_text(page, encoding="utf-8")
    files[1].write_text(json.dumps(figures, indent=2) + "\n")
    return files


def _figures(
    rollouts: list[Rollout],
    shown: list[Rollout],
    steps: Sequence[TrainingStep],
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
