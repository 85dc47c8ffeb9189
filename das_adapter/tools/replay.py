"""Replay recorded rollouts step by step, as the drafter would have seen them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from das_adapter.config import HistoryConfig
from das_adapter.core.history import WINDOW, HistoryPolicy
from das_adapter.core.index import SuffixIndex
from das_adapter.sim.rollouts import Rollout, steps_of, written_ahead
from das_adapter.sim.texts import Texts

SOURCES = ("own", "own+siblings", "own+siblings+history")
CLASSES = ("short", "medium", "long")
BUDGETS = (100, 50, 25, 10)
"""Percent of the bytes that the history takes at most."""


@dataclass(frozen=True)
class Tally:
    """What the recorded responses of some requests confirm of their drafts."""

    requests: int
    hits: int
    """Requests that began with history of their problem."""
    tokens: int
    drafted: int
    accepted: int

    @property
    def rounds(self) -> int:
        """Forward passes that wrote the responses: each writes what was accepted and one token."""
        return self.tokens - self.accepted

    def figures(self) -> dict[str, float]:
        """Return the counts and what they are a round, for JSON."""
        rounds = max(self.rounds, 1)
        return {
            "requests": self.requests,
            "hits": self.hits / max(self.requests, 1),
            "rounds": self.rounds,
            "tokens": self.tokens,
            "tokens_per_forward": self.tokens / rounds,
            "accepted_per_round": self.accepted / rounds,
            "drafted_per_round": self.drafted / rounds,
        }


@dataclass(frozen=True)
class Outcome:
    """The result of one replay."""

    bytes: int
    """The most that the history took."""
    total: Tally
    by_step: dict[int, Tally]
    by_length: dict[str, Tally]
    by_visit: dict[int, Tally]
    """By how often the problem has been seen: the first time, the second, ..."""


def replay(
    rollouts: Sequence[Rollout],
    sources: str = SOURCES[-1],
    budget: int = 8,
    history: HistoryConfig | None = None,
    batch: int = 256,
    index: SuffixIndex | None = None,
    window: int = WINDOW,
) -> Outcome:
    """Write the rollouts again, drafting as an engine with this index would have.

    Args:
        rollouts: of any steps; a step's rollouts are written together, `batch` at a time, whole groups first.
        sources: one of `SOURCES`: a request's own text, its siblings' live text, earlier steps' rollouts.
        budget: maximum draft tokens of a request in a round.
        history: what is kept of earlier steps; None: the defaults.
        batch: requests that are live at once, at least 1.
        index: drafts and keeps the history; None: a new one.
        window: visits of a problem that are kept.
    """
    index = SuffixIndex() if index is None else index
    policy, largest = HistoryPolicy(history or HistoryConfig(), window), 0
    steps = steps_of(sorted(rollouts, key=lambda r: r.problem))
    texts = Texts([r for step in steps for r in step])
    lengths, rows = np.diff(texts.ends), np.arange(len(rollouts))
    known, handles, written, drafted, accepted = np.zeros((5, len(rollouts)), np.int64)
    for step in steps:
        (waiting, rows), live = np.split(rows, [len(step)]), rows[:0]
        while len(live) or len(waiting):
            begun, waiting = np.split(waiting, [batch - len(live)])
            for row in begun.tolist():
                r = texts.rollouts[row]
                handles[row] = index.open(
                    2**32 + row if sources == "own" else policy.key(r.problem), r.prompt, ahead=r.ahead
                )
                known[row] = index.age(int(handles[row])) is not None
            live = np.append(live, begun)
            at = written[live]
            tokens, _, offsets = index.draft_flat(handles[live], np.clip(lengths[live] - 1 - at, 0, budget), 0.0)
            hits = texts.agreeing(live, at, tokens, offsets)
            index.extend_many(handles[live], *texts.part(live, at, at + hits + 1))
            written[live] += hits + 1
            drafted[live] += np.diff(offsets)
            accepted[live] += hits
            done = written[live] >= lengths[live]
            for handle in handles[live[done]].tolist():
                index.close(handle, keep=sources != "own")
            live = live[~done]
        if sources.endswith("history"):
            policy.remember(index, ((r.problem, r.tokens.tobytes(), r.step) for r in step))
            index.shrink(policy.config.max_bytes)
            largest = max(largest, index.nbytes)
        index.clear_live()
    return _tallied(steps, np.stack([known, lengths, drafted, accepted]), largest)


def _tallied(steps: list[list[Rollout]], columns: np.ndarray, largest: int) -> Outcome:
    """Add up hits, tokens, drafted and accepted tokens of the requests, int64 [4, requests]."""
    seen, visits = Counter[int](), list[int]()
    for step in steps:
        seen.update({r.problem for r in step})
        visits += [seen[r.problem] for r in step]

    def groups(of: np.ndarray) -> dict[int, Tally]:
        found = ((group, of == group) for group in np.unique(of).tolist())
        return {group: Tally(int(rows.sum()), *map(int, columns[:, rows].sum(axis=1))) for group, rows in found}

    lengths = np.searchsorted(np.quantile(columns[1], (0.5, 0.9)), columns[1])
    return Outcome(
        largest,
        Tally(columns.shape[1], *map(int, columns.sum(axis=1))),
        groups(np.array([r.step for step in steps for r in step])),
        {CLASSES[number]: tally for number, tally in groups(lengths).items()},
        groups(np.array(visits)),
    )


def report(
    rollouts: Sequence[Rollout],
    budget: int = 8,
    history: HistoryConfig | None = None,
    agreement: float | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Replay with all sources; with fewer, to show what each adds; and with less room for the history, to show what
    that costs. Return figures for JSON; `agreement`: also with all responses written ahead, of which each token is the
    same with this chance; `progress` hears what is replayed next."""
    history = history or HistoryConfig()
    outcomes, tallies = {}, {}
    for sources in SOURCES:
        progress(sources)
        outcomes[sources] = replay(rollouts, sources, budget, history)
    whole = outcomes[SOURCES[-1]]
    if agreement is not None:
        progress("written ahead")
        outcomes[f"{SOURCES[-1]}+ahead"] = replay(written_ahead(rollouts, agreement), budget=budget, history=history)
    for percent in BUDGETS:
        progress(f"{percent} % of the history")
        smaller = history.model_copy(update={"max_bytes": whole.bytes * percent // 100})
        tallies[f"{percent}%"] = replay(rollouts, budget=budget, history=smaller).total
    groups: dict[str, dict[Any, Tally]] = {
        "by_source": {sources: outcome.total for sources, outcome in outcomes.items()},
        "by_length": dict(whole.by_length),
        "by_visit": dict(whole.by_visit),
        "by_budget": tallies,
        "by_step": dict(whole.by_step),
    }
    return {
        "rollouts": len(rollouts),
        "problems": len({r.problem for r in rollouts}),
        "steps": len({r.step for r in rollouts}),
        "settings": {"budget": budget, "max_bytes": history.max_bytes},
        "history_bytes": whole.bytes,
        **whole.total.figures(),
        **{kind: {str(name): t.figures() for name, t in group.items()} for kind, group in groups.items()},
    }
