"""`das-adapter report`: a run's decision logs as three sentences, as figures, and as
one page, which needs no network.

The page is a static template, in which plotly draws the figures that are put into it as
JSON.
"""

from __future__ import annotations

import html
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from das_adapter import __version__
from das_adapter.errors import DasError
from das_adapter.protocol.decision_log import LoggedRollout
from das_adapter.reports import run_series as series

TEMPLATE = Path(__file__).with_name("report_page.html")
MAJORITY = 0.5
"""Share of the requests or of the time above which a report advises about it."""
LOW_ACCEPTANCE = 0.3
"""Share of a neural drafter's tokens that are accepted, under which its weights are
probably not the policy's.
"""


def write(logged: list[LoggedRollout], out: Path, name: str = "") -> Path:
    """Write report.html about the rollouts of the decision logs into a directory, made
    if there is none; return where it is. The last complete rollout is shown over time.
    `name`: of the run.

    Raises:
        DasError: there are no rollouts of training.
    """
    from plotly.offline import get_plotlyjs

    rollouts = training(logged)
    drawn = {name: data for name, data in _figures(rollouts).items() if data}
    data = json.dumps(drawn, default=np.ndarray.tolist)
    title = f"Rollouts of {name}" if name else "Rollouts under das-adapter"
    parts = {
        "TITLE": html.escape(title),
        "SENTENCES": _paragraphs(sentences(logged)),
        "RUN": html.escape(_run(rollouts)),
        "COUNTS": _counts(rollouts),
        "ALARMS": _alarms(series.notes(rollouts)),
        "DATA": data.replace("<", "\\u003c"),
        "PLOTLY": get_plotlyjs(),
    }
    page = TEMPLATE.read_text(encoding="utf-8")
    for name, part in parts.items():
        page = page.replace(f"<!--{name}-->", part)
    out.mkdir(parents=True, exist_ok=True)
    file = out / "report.html"
    file.write_text(page, encoding="utf-8")
    return file


def training(logged: list[LoggedRollout]) -> list[LoggedRollout]:
    """Return what of the logs belongs to training.

    Raises:
        DasError: nothing does.
    """
    rollouts = series.without_validation(logged)
    if not rollouts:
        raise DasError("report: found no decode step of a training rollout in the logs")
    return rollouts


def _run(rollouts: Sequence[LoggedRollout]) -> str:
    """Say what ran, and when."""
    said = []
    for run in dict.fromkeys(rollout.run for rollout in rollouts):
        if run is not None:
            versions = f"das-adapter {run.das_adapter}, vLLM {run.vllm}"
            said.append(f"{run.model}, drafter {run.drafter}, {versions}")
    times = [step.begin for rollout in rollouts for step in rollout.steps]
    first, last = (
        time.strftime("%Y-%m-%d %H:%M", time.gmtime(at))
        for at in (min(times), max(times))
    )
    return "; ".join([*said, f"from {first} to {last} UTC"]) + "."


def _paragraphs(said: Sequence[tuple[str, str]]) -> str:
    """Return sentences as HTML, each under its head."""
    found = ""
    for head, text in said:
        found += f'<p class="lead"><b>{head}:</b> {html.escape(text)}</p>'
    return found


def _counts(rollouts: Sequence[LoggedRollout]) -> str:
    """Say how much the log holds."""
    counts = {
        "Rollouts": len(rollouts),
        "engines": len({rollout.source for rollout in rollouts}),
        "requests": len(series.requests_of(rollouts)),
    }
    parts = [f"{name}: {count:,}" for name, count in counts.items()]
    return f"{'; '.join(parts)}; page made by das-adapter {__version__}."


def _figures(rollouts: list[LoggedRollout]) -> dict[str, Any]:
    """Return the numbers that each figure draws, by its name in the template; empty
    ones are not shown.
    """
    steps = [step for step in series.by_training_step(rollouts) if step["version"] >= 0]
    by_step = [step["acceptance"] for step in steps if step["acceptance"].drafted]
    panels = [
        ["by training step", "training step", by_step],
        ["by epoch", "visit of the problem", series.by_epoch(rollouts)],
    ]
    by_source = series.by_source(rollouts)
    if len(by_source) > 1:
        panels.append(["by source", "drafted from", by_source])
    return {
        "saved": steps,
        "acceptance": [panel for panel in panels if panel[-1]],
        "history": [step for step in steps if step["history_tokens"] is not None],
        "timeline": series.timeline(rollouts),
    }


def _alarms(notes: Sequence[tuple[str, str, list[int]]]) -> str:
    """Return alarms and notes as HTML, with the training steps of each."""
    said = []
    alarmed = False
    for kind, reason, versions in notes:
        alarmed = alarmed or kind == "alarm"
        steps = ", ".join(_name_of_step(version) for version in versions)
        head = f"<b>Training step {steps}:</b>"
        said.append(f'<div class="{kind}">{head} {html.escape(reason)}</div>')
    if not alarmed:
        none = "No alarm: nothing in the log sets das/health to 0."
        said.insert(0, f'<p class="note">{none}</p>')
    return "".join(said)


def _name_of_step(version: int) -> str:
    if version >= 0:
        return str(version)
    return "the end of the log"


def sentences(logged: Sequence[LoggedRollout]) -> list[tuple[str, str]]:
    """Say what drafts saved in training, where time was lost, what to change, and apart
    from that what validations took, each under its head; `logged`: rollouts of a run,
    one or more.
    """
    rollouts = series.without_validation(logged)
    each = series.by_training_step(rollouts)
    decode_s = sum(step["decode_seconds"] for step in each)
    saved_s = sum(step["saved_seconds"] for step in each)
    plain_s = sum(step["plain_seconds"] for step in each)
    plain_share = plain_s / max(decode_s, 1e-9)
    pace = series.tokens_per_forward(rollouts)
    saved = _saved(rollouts, saved_s, decode_s)
    lost = ", ".join(_lost(rollouts, plain_share))
    change = _change(rollouts, saved_s, plain_share)
    said = [
        ("Saved", f"{saved}; a request got {pace:.2f} tokens from a forward pass."),
        ("Lost", f"{lost}."),
        ("To change", change),
    ]
    apart = series.validation(logged)
    if apart:
        said.append(
            (
                "Validation",
                f"{apart['requests']:,} requests in {apart['seconds']:,.1f} s of"
                f" decoding, {apart['tokens_per_forward']:.2f} tokens from a forward"
                " pass; in none of the other figures.",
            )
        )
    return said


def _saved(rollouts: Sequence[LoggedRollout], saved_s: float, decode_s: float) -> str:
    """Say what drafts saved of the decoding time."""
    whole_s = saved_s + decode_s
    if saved_s > 0:
        share = saved_s / whole_s
        return f"about {saved_s:,.1f} s of {whole_s:,.1f} s of decoding ({share:.0%})"
    if _compared(rollouts):
        cost = f"drafts cost {-saved_s:,.1f} s beside {whole_s:,.1f} s of decoding"
        return f"nothing; {cost}"
    return "not known before the first weight sync"


def _compared(rollouts: Sequence[LoggedRollout]) -> bool:
    """Say whether a rollout has ended, so that it is known what drafts saved."""
    return any(rollout.end for rollout in rollouts)


def _lost(rollouts: Sequence[LoggedRollout], plain_share: float) -> list[str]:
    """Say where time was lost.

    Args:
        plain_share: share of the decoding time in steps without drafts.
    """
    said = [f"{plain_share:.0%} of the decoding time passed in steps without drafts"]
    steps = series.steps_of(rollouts)
    drafted = sum(step.drafted for step in steps)
    if drafted:
        accepted = sum(step.accepted for step in steps)
        rejected = 1 - accepted / drafted
        said.append(f"{rejected:.0%} of the draft tokens were rejected")
    requests = _counted(rollouts, "history_requests")
    if requests:
        missed = 1 - _counted(rollouts, "history_hits") / requests
        said.append(
            f"{missed:.0%} of the requests began without history of their problem"
        )
    return said


def _counted(rollouts: Sequence[LoggedRollout], name: str) -> int:
    """Return the sum of a counter."""
    return sum(counts.get(name, 0) for counts in series.counts_of(rollouts))


def _change(
    rollouts: Sequence[LoggedRollout], saved_s: float, plain_share: float
) -> str:
    """Return the first advice that fits."""
    notes = series.notes(rollouts)
    alarms = [reason for kind, reason, _ in notes if kind == "alarm"]
    if alarms:
        return f"begin with the alarm: {alarms[-1]}."
    for rate in series.by_source(rollouts):
        if rate.kind == "neural drafter" and rate.share < LOW_ACCEPTANCE:
            return (
                f"das.draft.weights: trainer; {rate.share:.0%} of the neural drafter's"
                " tokens were accepted."
            )
    first_share = _first_visit_share(rollouts)
    if first_share > MAJORITY:
        return (
            f"nothing yet: {first_share:.0%} of the requests were the first of their"
            " problem; later ones draft better."
        )
    if saved_s <= 0 and _compared(rollouts):
        return "drafts do not pay here: `drafter: none` decodes as the host does alone."
    if plain_share > MAJORITY:
        return (
            f"fewer requests an engine: {_plain_load(rollouts):.0f} ran in steps"
            " without drafts, for which drafts do not pay."
        )
    if not _compared(rollouts):
        return "nothing yet: it is known after the first weight sync."
    return "nothing: drafts saved more than the rejected ones cost."


def _first_visit_share(rollouts: Sequence[LoggedRollout]) -> float:
    """Return the share of the requests that were of the first visit of their
    problem.
    """
    visits = series.by_visit(rollouts)
    num_requests = sum(len(requests) for requests in visits.values())
    return len(visits.get(1, ())) / max(1, num_requests)


def _plain_load(rollouts: Sequence[LoggedRollout]) -> float:
    """Return the requests of a step without drafts, mean."""
    steps = series.steps_of(rollouts)
    plain = [step.requests for step in steps if not step.drafted]
    return sum(plain) / max(1, len(plain))
