"""Recorded rollouts written again, step by step, as an engine with some history would
have drafted them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from own_history import OwnHistory

from das_adapter.config import HistoryConfig
from das_adapter.core.history import HistoryRules
from das_adapter.core.tuning import HISTORY_WINDOW
from das_adapter.sim.rollouts import RecordedResponse, steps_of
from das_adapter.sim.texts import Texts

LIVE = 256
"""Requests that are live at once."""


@dataclass(frozen=True)
class Tally:
    """Draft tokens of some requests that their recorded responses confirm."""

    requests: int
    hits: int
    """Requests that began with history of their problem."""
    tokens: int
    accepted: int

    @property
    def rounds(self) -> int:
        """Forward passes that wrote the responses: each writes what was accepted and
        one token.
        """
        return self.tokens - self.accepted


@dataclass(frozen=True)
class Outcome:
    """The result of a replay."""

    bytes: int
    """The most that the history took."""
    total: Tally
    by_visit: dict[int, Tally]
    """Counts by visit of the problem: the first, the second, ..."""


def replay(
    rollouts: Sequence[RecordedResponse],
    budget: int = 8,
    history: HistoryConfig | None = None,
    index: OwnHistory | None = None,
    window: int = HISTORY_WINDOW,
) -> Outcome:
    """Write the rollouts again, drafting as an engine with this index would have.

    Args:
        rollouts: of any steps; a step's rollouts are written together, `LIVE` at a
            time, whole groups first.
        budget: maximum draft tokens of a request in a round.
        history: what is kept of earlier steps; None: the defaults.
        index: drafts and keeps the history; None: a new one.
        window: visits of a problem that are kept.
    """
    index = OwnHistory() if index is None else index
    policy = HistoryRules(history or HistoryConfig(), window)
    largest = 0
    steps = steps_of(sorted(rollouts, key=lambda r: r.problem))
    texts = Texts([r for step in steps for r in step])
    flat = texts.tokens[None]
    lengths = np.diff(texts.ends)
    rows = np.arange(len(rollouts))
    known, handles, written, accepted = np.zeros((4, len(rollouts)), np.int64)
    for step in steps:
        (waiting, rows), live = np.split(rows, [len(step)]), rows[:0]
        while len(live) or len(waiting):
            begun, waiting = np.split(waiting, [LIVE - len(live)])
            for row in begun.tolist():
                r = texts.responses[row]
                handles[row] = index.open(
                    policy.key(r.problem), r.prompt, ahead=r.ahead
                )
                known[row] = index.age(int(handles[row])) is not None
            live = np.append(live, begun)
            at = written[live]
            budgets = np.clip(lengths[live] - 1 - at, 0, budget)
            none = live * 0
            tokens, _, offsets = index.draft_rows(
                handles[live], flat, none, none, none, budgets, 0.0
            ).result()
            hits = texts.agreeing(live, at, tokens, offsets)
            written[live] += hits + 1
            begins = texts.ends[live]
            index.draft_rows(
                handles[live], flat, none, begins + at, begins + written[live], none
            )
            accepted[live] += hits
            done = written[live] >= lengths[live]
            for handle in handles[live[done]].tolist():
                index.close(handle)
            live = live[~done]
        for r in step:
            index.add(policy.key(r.problem), r.tokens, r.step)
        index.seal(policy.window)
        index.shrink(policy.config.max_bytes)
        largest = max(largest, index.nbytes)
        index.clear_live()
    seen = Counter[int]()
    visits = list[int]()
    for step in steps:
        seen.update({r.problem for r in step})
        visits += [seen[r.problem] for r in step]
    columns = np.stack([known, lengths, accepted])
    visit = np.array(visits)

    def tally(some: np.ndarray) -> Tally:
        return Tally(int(some.sum()), *map(int, columns[:, some].sum(axis=1)))

    return Outcome(
        largest,
        tally(visit > 0),
        {number: tally(visit == number) for number in np.unique(visit).tolist()},
    )
