"""Replay recorded rollouts step by step, as the drafter would have seen them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from das_adapter.config import HistoryConfig
from das_adapter.core.history import WINDOW, HistoryPolicy
from das_adapter.core.index import SuffixIndex
from das_adapter.sim.requests import Requests
from das_adapter.sim.rollouts import Rollout, steps_of
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


@dataclass
class Outcome:
    """The result of one replay."""

    tried: np.ndarray
    """Draft tokens by position in the draft, only those whose predecessors were accepted; shape (budget,)."""
    right: np.ndarray
    """Those of them that were accepted."""
    bins: np.ndarray = field(default_factory=lambda: np.zeros((20, 3)))
    """Draft tokens by their chance, in 20 equal bins: how many, sum of chances, survivors."""
    bytes: int = 0
    """The most that the history took."""
    total: Tally = Tally(0, 0, 0, 0, 0)
    by_step: dict[int, Tally] = field(default_factory=dict)
    by_length: dict[str, Tally] = field(default_factory=dict)
    by_visit: dict[int, Tally] = field(default_factory=dict)
    """By how often the problem has been seen: the first time, the second, ..."""

    def drafted(self, chances: np.ndarray, offsets: np.ndarray, hits: np.ndarray) -> None:
        """Count a round's drafts: their tokens' chances, where each begins, and how many of its tokens are right."""
        counts = np.diff(offsets)
        place = np.arange(len(chances)) - np.repeat(offsets[:-1], counts)
        survived, reached = place < np.repeat(hits, counts), place <= np.repeat(hits, counts)
        self.right += np.bincount(place[survived], minlength=len(self.right))
        self.tried += np.bincount(place[reached], minlength=len(self.tried))
        which = np.minimum((chances * 20).astype(int), 19)
        for column, values in enumerate((np.ones(len(chances)), chances, survived)):
            self.bins[:, column] += np.bincount(which, weights=values, minlength=20)

    def figures(self) -> dict[str, Any]:
        """Return the tallies and what the chances are worth, for JSON."""
        count = self.bins[:, 0]
        return {
            **self.total.figures(),
            "by_step": {str(step): t.figures() for step, t in self.by_step.items()},
            "by_visit": {str(visit): t.figures() for visit, t in self.by_visit.items()},
            "history_bytes": self.bytes,
            "by_length": {name: t.figures() for name, t in self.by_length.items()},
            "acceptance_by_position": (self.right / np.maximum(self.tried, 1)).tolist(),
            "calibration_error": float(np.abs(self.bins[:, 1] - self.bins[:, 2]).sum() / max(count.sum(), 1)),
            "reliability": [
                {"chance": b[1] / b[0], "survived": b[2] / b[0], "tokens": int(b[0])}
                for b in self.bins.tolist()
                if b[0]
            ],
        }


def replay(
    rollouts: Sequence[Rollout],
    sources: str = SOURCES[-1],
    budget: int = 8,
    min_chance: float = 0.0,
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
        min_chance: as in `SuffixIndex.draft_flat`.
        history: what is kept of earlier steps; None: the defaults.
        batch: requests that are live at once, at least 1.
        index: drafts and keeps the history; None: a new one.
        window: visits of a problem that are kept.
    """
    index = SuffixIndex() if index is None else index
    outcome = Outcome(tried=np.zeros(budget), right=np.zeros(budget))
    policy, visits = HistoryPolicy(history or HistoryConfig(), window), Counter[int]()
    steps, visit = steps_of(sorted(rollouts, key=lambda r: r.problem)), list[int]()
    for written in steps:
        visits.update({r.problem for r in written})
        visit += [visits[r.problem] for r in written]
    texts, requests = Texts([r for step in steps for r in step]), Requests()
    problems, lengths = np.array([r.problem for r in texts.rollouts]), np.diff(texts.ends)
    waiting = requests.add(problem=problems, visit=np.array(visit), length=lengths, most=lengths)
    handles, known = np.zeros(len(rollouts), np.int64), np.zeros(len(rollouts), bool)
    for written in steps:
        (rows, waiting), live = np.split(waiting, [len(written)]), waiting[:0]
        while len(live) or len(rows):
            begun, rows = np.split(rows, [batch - len(live)])
            for row in begun.tolist():
                r = texts.rollouts[row]
                handles[row] = index.open(2**32 + row if sources == "own" else policy.key(r.problem), r.prompt)
                known[row] = index.age(int(handles[row])) is not None
            live = np.append(live, begun)
            at = requests.written[live]
            tokens, chances, offsets = index.draft_flat(
                handles[live], np.minimum(budget, requests.room(live)), min_chance
            )
            hits = texts.agreeing(live, at, tokens, offsets)
            index.extend_many(handles[live], *texts.part(live, at, at + hits + 1))
            outcome.drafted(chances, offsets, hits)
            requests.written[live] += hits + 1
            requests.drafted[live] += np.diff(offsets)
            requests.accepted[live] += hits
            done = requests.written[live] >= requests.length[live]
            for handle in handles[live[done]].tolist():
                index.close(handle, keep=sources != "own")
            live = live[~done]
        if sources.endswith("history"):
            policy.remember(index, ((r.problem, r.tokens.tobytes(), r.step) for r in written))
            index.shrink(policy.config.max_bytes)
            outcome.bytes = max(outcome.bytes, index.nbytes)
        index.clear_live()
    _tally(outcome, requests, np.array([r.step for r in texts.rollouts]), known)
    return outcome


def _tally(outcome: Outcome, requests: Requests, steps: np.ndarray, known: np.ndarray) -> None:
    columns = np.stack([known, requests.length, requests.drafted, requests.accepted])

    def groups(of: np.ndarray) -> dict[int, Tally]:
        found = ((group, of == group) for group in np.unique(of).tolist())
        return {group: Tally(int(rows.sum()), *map(int, columns[:, rows].sum(axis=1))) for group, rows in found}

    outcome.total = groups(np.zeros_like(steps))[0]
    outcome.by_step, outcome.by_visit = groups(steps), groups(requests.visit)
    lengths = np.searchsorted(np.quantile(requests.length, (0.5, 0.9)), requests.length)
    outcome.by_length = {CLASSES[number]: tally for number, tally in groups(lengths).items()}


def report(
    rollouts: Sequence[Rollout],
    budget: int = 8,
    min_chance: float = 0.0,
    history: HistoryConfig | None = None,
    batch: int = 256,
) -> dict[str, Any]:
    """Replay with all sources; with fewer, to show what each adds; and with less room for the history, to show what
    that costs. Return figures for JSON."""
    history = history or HistoryConfig()
    everything = SOURCES[-1]
    outcomes = {s: replay(rollouts, s, budget, min_chance, history, batch) for s in SOURCES}
    whole = outcomes[everything]
    by_budget = {}
    for percent in BUDGETS:
        smaller = history.model_copy(update={"max_bytes": whole.bytes * percent // 100})
        by_budget[f"{percent}%"] = replay(rollouts, everything, budget, min_chance, smaller, batch).total.figures()
    return {
        "rollouts": len(rollouts),
        "problems": len({r.problem for r in rollouts}),
        "steps": len({r.step for r in rollouts}),
        "settings": {
            "budget": budget,
            "min_chance": min_chance,
            "max_bytes": history.max_bytes,
            "batch": batch,
        },
        **whole.figures(),
        "by_source": {s: o.total.figures() for s, o in outcomes.items()},
        "by_budget": by_budget,
    }


def plot(figures: dict[str, Any], path: str | Path) -> None:
    """Plot tokens per forward by step, source and length, acceptance by position, and the chances' reliability.

    Raises:
        ImportError: matplotlib is not installed (extra `plot`).
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), layout="constrained")
    (by_step, by_source, by_length), (by_position, reliability, counts) = figure.subplots(2, 3)
    steps = figures["by_step"]
    by_step.plot([int(s) for s in steps], [f["tokens_per_forward"] for f in steps.values()], marker="o")
    by_step.set(title="by step", xlabel="step", ylabel="tokens per forward", ylim=(1, None))
    for axes, key in ((by_source, "by_source"), (by_length, "by_length")):
        axes.bar(list(figures[key]), [f["tokens_per_forward"] for f in figures[key].values()])
        axes.set(title=key.replace("_", " "), ylabel="tokens per forward", ylim=(1, None))
        axes.tick_params(axis="x", labelsize=8)
    positions = figures["acceptance_by_position"]
    by_position.bar(range(1, len(positions) + 1), positions)
    by_position.set(title="acceptance by draft position", xlabel="position", ylabel="accepted of those reached")
    points = figures["reliability"]
    reliability.plot([0, 1], [0, 1], color="grey", linewidth=1)
    reliability.plot([p["chance"] for p in points], [p["survived"] for p in points], marker="o")
    reliability.set(title=f"chances: error {figures['calibration_error']:.3f}", xlabel="estimated", ylabel="survived")
    counts.bar([p["chance"] for p in points], [p["tokens"] for p in points], width=0.04)
    counts.set(title="draft tokens by chance", xlabel="estimated")
    figure.savefig(path, dpi=120)
