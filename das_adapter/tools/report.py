"""`das-adapter report`: a run's decision logs as three sentences, as figures, and as
one page, which needs no network.

The page is a static template, in which plotly draws the figures that are put into it as
JSON.
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
from das_adapter.protocol.decision_log import LoggedRollout
from das_adapter.tools import run_series as series

TEMPLATE = Path(__file__).with_name("report_page.html")
MOST = 0.5
"""A share that is most of something."""
LOW = 0.3
"""Share of a neural drafter's tokens, under which its weights are probably not the
policy's.
"""


def write(rollouts: list[LoggedRollout], out: Path) -> Path:
    """Write report.html about the rollouts of the decision logs into a directory, made
    if there is none; return where it is. The last complete rollout is shown over time.

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
            f'<p class="lead"><b>{head}:</b> {html.escape(text)}</p>'
            for head, text in sentences(rollouts)
        ),
        "COUNTS": (
            "; ".join(f"{name}: {count:,}" for name, count in counted.items())
            + f"; das-adapter {__version__}."
        ),
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


def _figures(rollouts: list[LoggedRollout]) -> dict[str, Any]:
    """Return the numbers that each figure draws, by its name in the template; empty
    ones are not shown.
    """
    steps = [step for step in series.by_training_step(rollouts) if step["version"] >= 0]
    panels = {
        "by training step": (
            "training step",
            [step["acceptance"] for step in steps if step["acceptance"].drafted],
        ),
        "by epoch": ("visit of the problem", series.by_epoch(rollouts)),
        "by source": ("drafted from", series.by_source(rollouts)),
    }
    return {
        "saved": steps,
        "acceptance": [
            [title, axis, rates] for title, (axis, rates) in panels.items() if rates
        ],
        "history": [step for step in steps if step["history_tokens"] is not None],
        "timeline": series.timeline(rollouts),
    }


def _alarms(notes: Sequence[tuple[str, str, list[int]]]) -> str:
    said = []
    for kind, reason, versions in notes:
        steps = ", ".join(
            "the end of the log" if version < 0 else str(version)
            for version in versions
        )
        said.append(
            f'<div class="{kind}"><b>Training step {steps}:</b>'
            f" {html.escape(reason)}</div>"
        )
    if not any(kind == "alarm" for kind, _, _ in notes):
        said.insert(
            0, '<p class="note">No alarm: nothing in the log sets das/health to 0.</p>'
        )
    return "".join(said)


def sentences(rollouts: Sequence[LoggedRollout]) -> list[tuple[str, str]]:
    """Say what drafts saved, where time was lost, and what to change, each under its
    head; `rollouts`: of a run, one or more.
    """
    steps = [step for r in rollouts for step in r.steps]
    each = series.by_training_step(rollouts)
    seconds, gain, idle = (
        sum(s[f"{name}_seconds"] for s in each) for name in ("decode", "saved", "plain")
    )
    if gain > 0:
        saved = (
            f"about {gain:,.1f} s of {seconds + gain:,.1f} s of decoding"
            f" ({gain / (seconds + gain):.0%})"
        )
    elif any(r.end for r in rollouts):
        saved = (
            f"nothing; drafts cost {-gain:,.1f} s beside {seconds + gain:,.1f} s of"
            " decoding"
        )
    else:
        saved = "not known before the first weight sync"
    plain = [s for s in steps if not s.drafted]
    drafted = sum(s.drafted for s in steps)
    idle /= max(seconds, 1e-9)
    lost = [f"{idle:.0%} of the decoding time passed in steps without drafts"]
    if drafted:
        lost.append(
            f"{1 - sum(s.accepted for s in steps) / drafted:.0%} of the draft tokens"
            " were rejected"
        )
    if requests := _counted(rollouts, "requests"):
        hits = _counted(rollouts, "hits") / requests
        lost.append(
            f"{1 - hits:.0%} of the requests began without history of their problem"
        )
    pace = series.tokens_per_forward(rollouts)
    load = sum(s.requests for s in plain) / max(1, len(plain))
    change = _change(rollouts, gain, load if idle > MOST else None)
    return [
        ("Saved", f"{saved}; a request got {pace:.2f} tokens from a forward pass."),
        ("Lost", f"{', '.join(lost)}."),
        ("To change", change),
    ]


def _counted(rollouts: Sequence[LoggedRollout], name: str) -> int:
    return sum(c.get(f"history_{name}", 0) for r in rollouts for c in r.counts)


def _change(rollouts: Sequence[LoggedRollout], gain: float, load: float | None) -> str:
    """Return the first advice that fits; `load`: requests of a step without drafts,
    where most time passed in these.
    """
    if alarms := [
        reason for kind, reason, _ in series.notes(rollouts) if kind == "alarm"
    ]:
        return f"begin with the alarm: {alarms[-1]}."
    for rate in series.by_source(rollouts):
        if rate.kind == "neural drafter" and rate.share < LOW:
            return (
                f"das.draft.weights: trainer; {rate.share:.0%} of the neural drafter's"
                " tokens were accepted."
            )
    visits = series.by_visit(rollouts)
    first = len(visits.get(1, ())) / max(1, sum(map(len, visits.values())))
    if first > MOST:
        return (
            f"nothing yet: {first:.0%} of the requests were the first of their problem;"
            " later ones draft better."
        )
    if gain <= 0 and any(r.end for r in rollouts):
        return "drafts do not pay here: `drafter: none` decodes as the host does alone."
    if load is not None:
        return (
            f"fewer requests an engine: {load:.0f} ran in steps without drafts, for"
            " which drafts do not pay."
        )
    return "nothing: drafts are accepted and pay."
