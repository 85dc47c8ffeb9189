"""Replay recorded rollouts step by step, as the drafter would have seen them."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from das_adapter.config import HistoryConfig
from das_adapter.core.history import WINDOW, HistoryPolicy
from das_adapter.core.index import SuffixIndex
from das_adapter.sim.rollouts import Rollout, steps_of

SOURCES = ("own", "own+siblings", "own+siblings+history")
CLASSES = ("short", "medium", "long")
BUDGETS = (100, 50, 25, 10)
"""Percent of the bytes that the history takes at most."""


@dataclass
class Tally:
    """Draft tokens, and how many of them the recorded responses confirm."""

    rounds: int = 0
    """Forward passes that wrote the responses: each writes what was accepted and one token."""
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    requests: int = 0
    hits: int = 0
    """Requests that began with history of their problem."""

    def figures(self) -> dict[str, float]:
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

    total: Tally = field(default_factory=Tally)
    by_step: dict[int, Tally] = field(default_factory=lambda: defaultdict(Tally))
    by_length: dict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))
    by_visit: dict[int, Tally] = field(default_factory=lambda: defaultdict(Tally))
    """By how often the problem has been seen: the first time, the second, ..."""
    bytes: int = 0
    """The most that the history took."""
    tried: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """Draft tokens by position in the draft, only those whose predecessors were accepted; shape (budget,)."""
    right: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """Those of them that were accepted."""
    bins: np.ndarray = field(default_factory=lambda: np.zeros((20, 3)))
    """Draft tokens by their chance, in 20 equal bins: how many, sum of chances, survivors."""
    draft_seconds: float = 0.0
    extend_seconds: float = 0.0
    seal_seconds: float = 0.0

    def tallies(self, step: int, length: str, visit: int, known: bool) -> tuple[Tally, ...]:
        """Count a request, which has history or not; return the tallies that it belongs to."""
        found = (self.total, self.by_step[step], self.by_length[length], self.by_visit[visit])
        for tally in found:
            tally.requests += 1
            tally.hits += known
        return found

    def figures(self) -> dict[str, Any]:
        count = self.bins[:, 0]
        return {
            **self.total.figures(),
            "by_step": {str(step): t.figures() for step, t in sorted(self.by_step.items())},
            "by_visit": {str(visit): t.figures() for visit, t in sorted(self.by_visit.items())},
            "history_bytes": self.bytes,
            "by_length": {name: self.by_length[name].figures() for name in CLASSES if name in self.by_length},
            "acceptance_by_position": (self.right / np.maximum(self.tried, 1)).tolist(),
            "calibration_error": float(np.abs(self.bins[:, 1] - self.bins[:, 2]).sum() / max(count.sum(), 1)),
            "reliability": [
                {"chance": b[1] / b[0], "survived": b[2] / b[0], "tokens": int(b[0])}
                for b in self.bins.tolist()
                if b[0]
            ],
            "draft_us_per_request": self.draft_seconds / max(self.total.rounds, 1) * 1e6,
            "extend_us_per_request": self.extend_seconds / max(self.total.rounds, 1) * 1e6,
            "seal_seconds": self.seal_seconds,
        }


@dataclass(eq=False)
class Live:
    """A response that is being written again."""

    rollout: Rollout
    handle: int
    tallies: tuple[Tally, ...]
    at: int = 0


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
    policy, with_history = HistoryPolicy(history or HistoryConfig(), window), sources.endswith("history")
    medium, long = np.quantile([len(r.tokens) for r in rollouts], (0.5, 0.9))
    unique, visits = itertools.count(2**32), defaultdict[int, int](int)
    for written in steps_of(sorted(rollouts, key=lambda r: r.problem)):
        step = written[0].step
        for problem in {r.problem for r in written}:
            visits[problem] += 1
        waiting = written[::-1]
        live: list[Live] = []
        while waiting or live:
            while waiting and len(live) < batch:
                r = waiting.pop()
                handle = index.open(next(unique) if sources == "own" else policy.key(r.problem), r.prompt)
                name = CLASSES[int(np.searchsorted((medium, long), len(r.tokens)))]
                tallies = outcome.tallies(step, name, visits[r.problem], known=index.age(handle) is not None)
                live.append(Live(r, handle, tallies))
            advance(index, live, outcome, budget, min_chance)
            for done in [x for x in live if x.at >= len(x.rollout.tokens)]:
                index.close(done.handle, keep=sources != "own")
            live = [x for x in live if x.at < len(x.rollout.tokens)]
        if with_history:
            start = time.perf_counter()
            policy.remember(index, ((r.problem, r.tokens.tobytes(), step) for r in written))
            index.shrink(policy.config.max_bytes)
            outcome.seal_seconds += time.perf_counter() - start
            outcome.bytes = max(outcome.bytes, index.nbytes)
        index.clear_live()
    return outcome


def advance(index: SuffixIndex, live: list[Live], out: Outcome, budget: int, min_chance: float) -> None:
    """Write one round of the responses: the drafts that they confirm, and one token each."""
    handles = np.array([x.handle for x in live])
    budgets = np.array([min(budget, len(x.rollout.tokens) - x.at - 1) for x in live])
    start = time.perf_counter()
    tokens, chances, offsets = index.draft_flat(handles, budgets, min_chance)
    out.draft_seconds += time.perf_counter() - start
    survived = np.zeros(len(tokens), dtype=bool)
    grown = []
    bounds = offsets.tolist()
    for x, begin, end in zip(live, bounds, bounds[1:], strict=False):
        text = x.rollout.tokens
        kept = int(np.argmin(np.append(text[x.at : x.at + end - begin] == tokens[begin:end], False)))
        survived[begin : begin + kept] = True
        out.right[:kept] += 1
        out.tried[: min(kept + 1, end - begin)] += 1
        grown.append(text[x.at : x.at + kept + 1])
        x.at += len(grown[-1])
        for tally in x.tallies:
            tally.rounds += 1
            tally.drafted += end - begin
            tally.accepted += kept
            tally.tokens += len(grown[-1])
    which = np.minimum((chances * 20).astype(int), 19)
    columns: list[np.ndarray] = [np.ones(len(tokens)), chances, survived]
    for column, values in enumerate(columns):
        out.bins[:, column] += np.bincount(which, weights=values, minlength=20)
    joined, ends = np.concatenate(grown), np.cumsum([0, *map(len, grown)])
    start = time.perf_counter()
    index.extend_many(handles, joined, ends)
    out.extend_seconds += time.perf_counter() - start


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
