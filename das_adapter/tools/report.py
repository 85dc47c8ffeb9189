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
from das_adapter.tools.advice import Sentence, sentences
from das_adapter.tools.run_series import TrainingStep

MAX_BARS = 2000
"""Maximum number of requests drawn, the last to end."""
TEMPLATE = Path(__file__).with_name("report_page.html")


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
        "draft_tokens": drafted,
        "accepted_tokens": accepted,
        "tokens_per_forward": series.tokens_per_forward(rollouts),
        "verify_waste": (drafted - accepted) / max(1, tokens),
        "time_saved_s": sum(sync.saved for sync in syncs),
        "latency_model_error": sum(errors) / len(errors) if errors else None,
        "stopped": [sync.stopped for sync in syncs if sync.stopped],
    }


def write(rollouts: list[Rollout], out: Path, version: int | None = None) -> Path:
    """Write report.html, and return where it is.

    Args:
        rollouts: of the decision logs.
        out: directory; made if there is none.
        version: the weight version that followed the rollout shown over time; None: the last complete one.

    Raises:
        DasError: there are no rollouts, or the version named is not in the logs.
    """
    from plotly.offline import get_plotlyjs

    versions = sorted({r.version for r in rollouts})
    if not versions:
        raise DasError("report: found no decode step in the logs")
    if version is None:
        version = versions[-1]
    if version not in versions:
        raise DasError(f"report: found no rollout before weight version {version}, allowed: {versions}")
    figures, steps = summary(rollouts), series.by_training_step(rollouts)
    drawn = _figures(rollouts, [r for r in rollouts if r.version == version], steps)
    drawn = {name: data for name, data in drawn.items() if data}
    parts = {
        "SENTENCES": "".join(_lead(sentence, sentence.figure in drawn) for sentence in sentences(rollouts)),
        "COUNTS": "Rollouts: {rollouts:,}; engines: {engines:,}; requests: {requests:,}".format(**figures)
        + f"; das-adapter {__version__}.",
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


def _figures(rollouts: list[Rollout], shown: list[Rollout], steps: Sequence[TrainingStep]) -> dict[str, Any]:
    """Return the numbers that each figure draws, by its name in the template; empty ones are not shown."""
    timeline = series.timeline(shown)
    panels = {
        "by training step": ("training step", [step.acceptance for step in steps if step.acceptance.drafted]),
        "by epoch": ("visit of the problem", series.by_epoch(rollouts)),
        "by source": ("drafted from", series.by_source(rollouts)),
    }
    return {
        "saved": [[s.version, s.tokens_per_forward, s.decode_seconds, s.saved_seconds, s.plain_seconds] for s in steps],
        "acceptance": [[title, axis, rates] for title, (axis, rates) in panels.items() if rates],
        "history": [[s.version, s.history_hits, s.history_tokens] for s in steps if s.history_tokens is not None],
        "timeline": {
            "of": f"before weight version {shown[0].version}" if shown[0].version >= 0 else "at the end of the log",
            "first": max(0, len(timeline["requests"]) - MAX_BARS),
            **timeline,
        },
    }


def _lead(sentence: Sentence, shown: bool) -> str:
    head = f'<a href="#{sentence.figure}">{sentence.head}</a>' if shown else sentence.head
    return f'<p class="lead"><b>{head}:</b> {html.escape(sentence.text)}</p>'


def _alarms(notes: Sequence[tuple[str, str, list[int]]]) -> str:
    said = []
    for kind, reason, versions in notes:
        steps = ", ".join("the end of the log" if version < 0 else str(version) for version in versions)
        said.append(f'<div class="{kind}"><b>Training step {steps}:</b> {html.escape(reason)}</div>')
    if not any(kind == "alarm" for kind, _, _ in notes):
        said.insert(0, '<p class="note">No alarm: nothing in the log sets das/health to 0.</p>')
    return "".join(said)
