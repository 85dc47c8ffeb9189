"""What a run's decision logs come to in three sentences: what was saved, where it was lost, what to change."""

from __future__ import annotations

from collections.abc import Sequence

from das_adapter.protocol.decision_log import Rollout
from das_adapter.tools import run_series as series

MOST = 0.5
"""A share that is most of something."""
LOW = 0.3
"""Share of a neural drafter's tokens, under which its weights are probably not the policy's."""


def sentences(rollouts: Sequence[Rollout]) -> list[tuple[str, str]]:
    """Say what drafts saved, where time was lost, and what to change, each under its head; `rollouts`: of a run, one or
    more."""
    steps = [step for r in rollouts for step in r.steps]
    seconds, gain = sum(s.seconds for s in steps), sum(r.end.saved for r in rollouts if r.end)
    if gain > 0:
        saved = f"about {gain:,.1f} s of {seconds + gain:,.1f} s of decoding ({gain / (seconds + gain):.0%})"
    elif any(r.end for r in rollouts):
        saved = f"nothing; drafts cost {-gain:,.1f} s beside {seconds + gain:,.1f} s of decoding"
    else:
        saved = "not known before the first weight sync"
    plain, drafted = [s for s in steps if not s.drafted], sum(s.drafted for s in steps)
    idle = sum(s.seconds for s in plain) / max(seconds, 1e-9)
    lost = [f"{idle:.0%} of the decoding time passed in steps without drafts"]
    if drafted:
        lost.append(f"{1 - sum(s.accepted for s in steps) / drafted:.0%} of the draft tokens were rejected")
    if requests := _counted(rollouts, "requests"):
        hits = _counted(rollouts, "hits") / requests
        lost.append(f"{1 - hits:.0%} of the requests began without history of their problem")
    pace, load = series.tokens_per_forward(rollouts), sum(s.requests for s in plain) / max(1, len(plain))
    change = _change(rollouts, gain, load if idle > MOST else None)
    return [
        ("Saved", f"{saved}; a request got {pace:.2f} tokens from a forward pass."),
        ("Lost", f"{', '.join(lost)}."),
        ("To change", change),
    ]


def _counted(rollouts: Sequence[Rollout], name: str) -> int:
    return sum(c.get(f"history_{name}", 0) for r in rollouts for c in r.counts)


def _change(rollouts: Sequence[Rollout], gain: float, load: float | None) -> str:
    """Return the first advice that fits; `load`: requests of a step without drafts, where most time passed in these."""
    if alarms := [reason for kind, reason, _ in series.notes(rollouts) if kind == "alarm"]:
        return f"begin with the alarm: {alarms[-1]}."
    for rate in series.by_source(rollouts):
        if rate.kind == "neural drafter" and rate.share < LOW:
            return f"das.draft.weights: trainer; {rate.share:.0%} of the neural drafter's tokens were accepted."
    visits = series.by_visit(rollouts)
    first = len(visits.get(1, ())) / max(1, sum(map(len, visits.values())))
    if first > MOST:
        return f"nothing yet: {first:.0%} of the requests were the first of their problem; later ones draft better."
    if gain <= 0 and any(r.end for r in rollouts):
        return "drafts do not pay here: `drafter: none` decodes as the host does alone."
    if load is not None:
        return f"fewer requests an engine: {load:.0f} ran in steps without drafts, for which drafts do not pay."
    return "nothing: drafts are accepted and pay."
