"""`das-adapter report`: a run's decision logs as figures and one page, which needs no network.

The page is a static template, in which plotly draws the figures that are put into it as JSON.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from das_adapter import __version__
from das_adapter.errors import DasError
from das_adapter.protocol.decision_log import Rollout
from das_adapter.tools import run_series as series
from das_adapter.tools.advice import sentences

MAX_BARS = 2000
"""Maximum number of requests drawn, the last to end."""
TEMPLATE = Path(__file__).with_name("report_page.html")


def write(rollouts: list[Rollout], out: Path) -> Path:
    """Write report.html about the rollouts of the decision logs into a directory, made if there is none; return where
    it is. The last complete rollout is shown over time.

    Raises:
        DasError: there are no rollouts.
    """
    from plotly.offline import get_plotlyjs

    if not rollouts:
        raise DasError("report: found no decode step in the logs")
    counted = {
        "Rollouts": len(rollouts),
        "engines": len({r.source for r in rollouts}),
        "requests": sum(len(r.requests) for r in rollouts),
    }
    drawn = {name: data for name, data in _figures(rollouts).items() if data}
    parts = {
        "SENTENCES": "".join(
            f'<p class="lead"><b>{head}:</b> {html.escape(text)}</p>' for head, text in sentences(rollouts)
        ),
        "COUNTS": "; ".join(f"{name}: {count:,}" for name, count in counted.items()) + f"; das-adapter {__version__}.",
        "ALARMS": _alarms(series.notes(rollouts)),
        "DATA": json.dumps(drawn, default=np.ndarray.tolist).replace("<", "\\u003c"),
        "PLOTLY": get_plotlyjs(),
    }
    page = TEMPLATE.read_text(encoding="utf-8")
    for name, part in parts.items():
        page = page.replace(f"<!--{name}-->", part)
    out.mkdir(parents=True, exist_ok=True)
    file = out / "report.html"
    file.write_text(page, encoding="utf-8")
    return file


def _figures(rollouts: list[Rollout]) -> dict[str, Any]:
    """Return the numbers that each figure draws, by its name in the template; empty ones are not shown."""
    steps = [step for step in series.by_training_step(rollouts) if step["version"] >= 0]
    panels = {
        "by training step": ("training step", [step["acceptance"] for step in steps if step["acceptance"].drafted]),
        "by epoch": ("visit of the problem", series.by_epoch(rollouts)),
        "by source": ("drafted from", series.by_source(rollouts)),
    }
    return {
        "saved": steps,
        "acceptance": [[title, axis, rates] for title, (axis, rates) in panels.items() if rates],
        "history": [step for step in steps if step["history_tokens"] is not None],
        "timeline": _timeline(rollouts),
    }


def _timeline(rollouts: list[Rollout]) -> dict[str, Any]:
    """Return the numbers of the last rollout in which a request ended; empty: none has, the run began just now."""
    versions = [r.version for r in rollouts if r.requests]
    if not versions:
        return {}
    last = max(versions)
    timeline = series.timeline([r for r in rollouts if r.version == last])
    of = f"before weight version {last}" if last >= 0 else "at the end of the log"
    return {"of": of, "first": max(0, len(timeline["requests"]) - MAX_BARS), **timeline}


def _alarms(notes: Sequence[tuple[str, str, list[int]]]) -> str:
    said = []
    for kind, reason, versions in notes:
        steps = ", ".join("the end of the log" if version < 0 else str(version) for version in versions)
        said.append(f'<div class="{kind}"><b>Training step {steps}:</b> {html.escape(reason)}</div>')
    if not any(kind == "alarm" for kind, _, _ in notes):
        said.insert(0, '<p class="note">No alarm: nothing in the log sets das/health to 0.</p>')
    return "".join(said)
