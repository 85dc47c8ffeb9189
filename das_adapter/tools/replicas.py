"""Replay recorded rollouts over several replicas: what routing, leaders and siblings are worth."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from das_adapter.core.history import WINDOW
from das_adapter.core.index import SuffixIndex
from das_adapter.core.length import RESPONSE, Expected, LengthLog
from das_adapter.core.routing import CAPACITY, Replicas, StartOrder
from das_adapter.core.siblings import NO_SIBLINGS, Worth
from das_adapter.sim.rollouts import Rollout, steps_of
from das_adapter.sim.routing import arrivals as in_order
from das_adapter.tools.replay import Live, Outcome, Tally, advance

Place = Callable[[Sequence[Rollout], Expected], list[int]]
"""Gives a step's requests, in the order in which they arrive, their replicas."""

ROUTINGS = ("scattered", "together", "leaders")


@dataclass
class Figures:
    """The result of a replay; rounds and time are added up over the steps."""

    rounds: int = 0
    """Of all requests: forward passes that wrote the responses."""
    accepted: int = 0
    longest: int = 0
    """Rounds of the replica that needed most, by step."""
    makespan: float = 0.0
    """Time of the replica that ended last, by step, in rounds of a single request."""
    parts: float = 0.0
    """Replicas that a group was on, mean."""

    def to_dict(self) -> dict[str, float]:
        return {**vars(self), "accepted_per_round": self.accepted / max(self.rounds, 1)}


class Router:
    """Places requests as the host's balancer does: `together` with what siblings are worth, else each by itself."""

    def __init__(self, count: int, group: int, slots: float, together: bool) -> None:
        self._together = together
        self._replicas = Replicas(range(count), Worth() if together else NO_SIBLINGS, group, slots)

    def __call__(self, arrivals: Sequence[Rollout], expected: Expected) -> list[int]:
        self._replicas.learn(expected)
        group = None if self._together else 1
        homes = [self._replicas.pick(r.problem, expected[r.problem], r.problem in expected, group) for r in arrivals]
        for r, home in zip(arrivals, homes, strict=True):
            self._replicas.done(home, r.problem)
        return homes


def replay(
    rollouts: Sequence[Rollout],
    count: int,
    place: Place,
    leaders: bool = False,
    slots: int | None = None,
    eager: bool = False,
    shared: bool = False,
    budget: int = 8,
    seed: int = 0,
) -> Figures:
    """Write the rollouts again on several replicas, which have the history in common and the live text each for itself.

    Args:
        rollouts: of any steps; a step's rollouts are written together.
        count: replicas.
        place: which of them a request goes to.
        leaders: whether the first sample of a group on a replica leads.
        slots: requests that a replica runs at once; None: all.
        eager: whether a replica fills its slots as requests arrive, before it orders those that wait.
        shared: whether the replicas have the live text in common, too.
        budget: most draft tokens of a request in a round.
        seed: of the order of arrival.
    """
    rng = np.random.default_rng(seed)
    indices = [SuffixIndex() for _ in range(1 if shared else count)]
    lengths, group = LengthLog(), max(map(len, _groups(rollouts)))
    figures, outcome = Figures(), _outcome(budget)
    steps = steps_of(rollouts)
    for number, step in enumerate(steps):
        expected = Expected(lengths.predictions())
        arrivals = [step[i] for i in in_order((r.problem for r in step), rng)]
        homes = place(arrivals, expected)
        figures.parts += len({(r.problem, home) for r, home in zip(arrivals, homes, strict=True)}) / len(
            {r.problem for r in step}
        )
        ends, rounds = np.zeros(count), np.zeros(count, dtype=int)
        waiting: list[list[Rollout]] = []
        for replica in range(count):
            mine = [r for r, home in zip(arrivals, homes, strict=True) if home == replica]
            order = StartOrder(Worth() if leaders else NO_SIBLINGS, group)
            order.refresh(expected, number)
            priorities = [order.priority(r.problem) for r in mine]
            first = slots or 0 if eager else 0
            later = sorted(range(first, len(mine)), key=priorities.__getitem__)
            waiting.append([mine[i] for i in (*range(min(first, len(mine))), *later)][::-1])
        live: list[list[Live]] = [[] for _ in range(count)]
        while any(waiting) or any(live):
            for replica in range(count):
                index = indices[replica % len(indices)]
                while waiting[replica] and len(live[replica]) < (slots or len(step)):
                    r = waiting[replica].pop()
                    live[replica].append(Live(r, index.open(r.problem, r.prompt), (outcome.total,)))
                if running := live[replica]:
                    ends[replica] += 1.0 + len(running) / CAPACITY.requests
                    rounds[replica] += 1
                    advance(index, running, outcome, budget, 0.0)
                    for done in [x for x in running if x.at >= len(x.rollout.tokens)]:
                        index.close(done.handle)
                        running.remove(done)
        figures.longest += int(rounds.max())
        figures.makespan += float(ends.max())
        for index in indices:
            for r in step:
                index.add(r.problem, r.tokens, number)
            index.seal(WINDOW)
            index.clear_live()
        lengths.add(np.array([(r.problem, len(r.tokens), number) for r in step], RESPONSE))
    figures.parts /= len(steps)
    figures.rounds, figures.accepted = outcome.total.rounds, outcome.total.accepted
    return figures


def siblings(rollouts: Sequence[Rollout], budget: int = 8, most: int = 100) -> dict[str, float]:
    """Return draft tokens accepted per round by the siblings that a response can draft from: so many that grow with it,
    and so many that have finished. One response of each group is written, of `most` groups at most."""
    tallies: defaultdict[str, Tally] = defaultdict(Tally)
    groups = _groups(rollouts)
    for target, *others in groups[:: -(-len(groups) // most)]:
        for state, number in itertools.product(("growing", "finished"), (0, 1, 3, 7)):
            if number > len(others):
                continue
            index, tally, outcome = SuffixIndex(), tallies[f"{state} {number}"], _outcome(budget)
            first = Live(target, index.open(0, target.prompt), (tally,))
            live = [first]
            for other in others[:number]:
                live.append(Live(other, index.open(0, other.prompt), ()))
                if state == "finished":
                    index.extend(live[-1].handle, other.tokens)
                    index.close(live.pop().handle)
            while first in live:
                advance(index, live, outcome, budget, 0.0)
                live = [x for x in live if x.at < len(x.rollout.tokens)]
    return {name: t.tokens / t.rounds - 1 for name, t in tallies.items()}


def report(
    rollouts: Sequence[Rollout], counts: Iterable[int], slots: int | None = None, budget: int = 8, orders: int = 3
) -> dict[str, Any]:
    """Replay over so many replicas by each of `ROUTINGS`, and with one index for all; return figures for JSON, means
    over several orders of arrival."""
    group = max(map(len, _groups(rollouts)))
    found: dict[str, Any] = {"slots": slots, "orders": orders, "siblings": siblings(rollouts, budget), "replicas": {}}
    for count in counts:
        arms: dict[str, list[dict[str, float]]] = defaultdict(list)
        for seed, arm in itertools.product(range(orders), (*ROUTINGS, "one index")):
            router = Router(count, group, slots or math.inf, together=arm != "scattered")
            figures = replay(rollouts, count, router, arm == "leaders", slots, False, arm == "one index", budget, seed)
            arms[arm].append(figures.to_dict())
        found["replicas"][str(count)] = {
            arm: {key: float(np.mean([f[key] for f in rows])) for key in rows[0]} for arm, rows in arms.items()
        }
    return found


def _outcome(budget: int) -> Outcome:
    return Outcome(tried=np.zeros(budget), right=np.zeros(budget))


def _groups(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """The siblings: responses of one problem, step and run."""
    groups: dict[tuple[int, int, int], list[Rollout]] = {}
    for r in rollouts:
        groups.setdefault((r.problem, r.step, r.run), []).append(r)
    return list(groups.values())
