"""How a run's rollouts, its training and its weight syncs follow each other.

Requests keep running across weight syncs; the trainer takes groups that have finished,
and nothing older than `lag` weight versions. Without a lag, which is `sync`, rollout
and training follow each other.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from das_adapter.core import tuning
from das_adapter.core.length import RESPONSE
from das_adapter.sim.config import PipelineBlock
from das_adapter.sim.fleet import Fleet
from das_adapter.sim.requests import Ints, Requests
from das_adapter.sim.routing import Router, arrivals
from das_adapter.sim.workload import Workload


@dataclass
class StepResult:
    """Times and counts of a step of the run."""

    rollout_s: float
    """From the first request of the step to the last response; with a lag: from one
    batch to the next.
    """
    step_s: float
    exposed_s: float
    """Part of the step in which the trainer waited for responses."""
    requests: int
    tokens: int
    forwards: int
    """Request forwards: one request's part in one forward pass."""
    drafted: int
    accepted: int
    preempted: int
    idle: float
    """Share of the rollout for which an engine had nothing left, mean."""
    ahead: int
    """Tokens that were written ahead of its requests."""
    visit: float
    """How often its problems had been visited before, mean."""

    @property
    def tokens_per_forward(self) -> float:
        """Tokens that a request gets from a forward pass."""
        return self.tokens / max(self.forwards, 1)


@dataclass
class Run:
    """A simulated run: its steps, and its engines' requests with their times."""

    steps: list[StepResult]
    requests: Requests


@dataclass(eq=False)
class _Group:
    """The samples of a problem that were sent together and not trained on yet."""

    version: int
    rows: list[int]
    left: int = 0  # samples that are still being written


class Pipeline:
    """Engines that write, and a trainer that takes whole groups."""

    def __init__(
        self,
        fleet: Fleet,
        workload: Workload,
        router: Router,
        timing: PipelineBlock,
        ahead: bool,
    ) -> None:
        """`ahead`: without a lag, engines that have nothing left write what the next
        steps' requests begin with.
        """
        self._fleet = fleet
        self._workload = workload
        self._router = router
        self._timing = timing
        self._lag = timing.lag if timing.kind == "async" else 0
        self._ahead = ahead and not self._lag
        # rows that are written ahead: of each of the next steps one for each request
        self._early = deque[Ints]()
        self._groups: list[_Group] = []  # in the order in which they were sent
        self._group_of: dict[int, _Group] = {}  # by row
        self._finished: list[_Group] = []  # in the order of their end
        self._since: list[Ints] = []  # rows that ended since the last weight sync
        self._sent = self._version = 0
        self._sizes: list[int] = []  # groups of each step that was sent
        self._waiting = False  # whether the trainer waits for a batch

    def run(self) -> Run:
        """Simulate a run on fresh engines."""
        fleet = self._fleet
        timing = self._timing
        requests = self._fleet.requests
        found = list[StepResult]()
        for _ in range(self._lag + 1):
            self._send(0.0)
        free = since = idle_s = 0.0  # since: the rollout began
        for number in range(len(self._workload.steps)):
            rows = self._take()
            ready = max(free, float(requests.ended[rows].max()))
            last = free
            idle = (idle_s + self._idle_s(last, ready)) / max(ready - since, 1e-12)
            begin = max(ready, self._write_ahead(last, ready))
            trained = begin + timing.train_s
            fleet.run(until=trained, slack=self._slack(), ended=self._ended)
            free = trained + timing.sync_s
            found.append(
                _result(
                    requests, rows, (begin - since, free - last, ready - last), idle
                )
            )
            since, idle_s = (
                (begin, self._idle_s(begin, trained)) if self._lag else (free, 0.0)
            )
            fleet.pause(trained, timing.sync_s)
            self._version = number + 1
            self._sync()
            self._send(free)
        return Run(found, requests)

    def _idle_s(self, since: float, until: float) -> float:
        """Return for how long an engine had nothing left, mean; it has been given
        nothing since.
        """
        return float((until - np.clip(self._fleet.clock, since, until)).mean())

    def _send(self, at: float) -> None:
        """Send the next step's requests, if there are any."""
        if self._sent == len(self._workload.steps):
            return
        step = self._workload.steps[self._sent]
        requests = self._fleet.requests
        rows = requests.add(**step)
        requests.version[rows] = self._version
        if self._early:
            requests.ahead[rows] = requests.written[self._early.popleft()]
        rows = rows[arrivals(step["problem"].tolist(), self._router.rng)]
        engines, priorities = self._router.send(requests, rows)
        self._fleet.submit(rows, engines, priorities, at)
        self._sent += 1
        groups: dict[int, _Group] = {}
        for row, problem in zip(
            rows.tolist(), requests.problem[rows].tolist(), strict=True
        ):
            group = self._group_of[row] = groups.setdefault(
                problem, _Group(self._version, [])
            )
            group.rows.append(row)
            group.left += 1
        self._groups += groups.values()
        self._sizes.append(len(groups))

    def _write_ahead(self, since: float, until: float) -> float:
        """Let engines that have nothing left since some time write what the next steps'
        requests begin with, up to the end of this one's; return when the last of their
        steps has ended. As in a run, no more is written at once than a step has
        requests, the next step first, and of a step first samples of all problems
        first.
        """
        fleet = self._fleet
        requests = self._fleet.requests
        if not self._ahead or self._sent == len(self._workload.steps):
            return until
        for step in self._workload.steps[
            self._sent + len(self._early) : self._sent + tuning.RUN_AHEAD_STEPS
        ]:
            self._early.append(
                requests.add(**step, ahead=np.full(len(step["problem"]), -1))
            )
        rows = np.concatenate(
            [early[_first_samples(requests.problem[early])] for early in self._early]
        )
        rows = rows[requests.written[rows] < requests.length[rows]]
        idle_since = np.maximum(fleet.clock, since)
        most = len(self._early[0])
        poll_s = tuning.RUN_AHEAD_POLL_S
        for at in np.arange(idle_since.min() + poll_s, until, poll_s):
            if not len(rows):
                break
            fleet.run(at)
            count = fleet.counts
            idle = np.flatnonzero(idle_since < at)
            begun = []
            for row in rows[: max(0, most - int(count.sum()))]:
                engine = idle[count[idle].argmin()]
                if count[engine] == fleet.slots:
                    break
                count[engine] += 1
                begun.append((row, engine))
            if begun:
                first, engines = np.array(begun).T
                rows = rows[len(first) :]
                fleet.submit(first, engines, np.arange(len(first)), at)
        fleet.run(until)
        fleet.withdraw()
        return float(max(until, fleet.clock.max()))

    def _take(self) -> Ints:
        """Wait for the next batch; return its requests, which the trainer takes."""
        chosen = self._wanted()
        if chosen is None:
            self._waiting = True
            self._fleet.run(slack=self._slack(), ended=self._ended)
            self._waiting, chosen = False, self._wanted()
        assert chosen is not None
        taken = set(chosen)
        self._groups, self._finished = (
            [g for g in of if g not in taken] for of in (self._groups, self._finished)
        )
        return np.array(
            sorted(row for group in chosen for row in group.rows), dtype=np.int64
        )

    def _wanted(self) -> list[_Group] | None:
        """Return the groups of the next batch: those at the maximum lag, and then those
        that ended first; None: too few have ended.
        """
        enough = self._sizes[self._version]
        due = [
            group
            for group in self._groups
            if group.version <= self._version - self._lag
        ]
        if len(self._finished) < enough or any(group.left for group in due):
            return None
        late = set(due)
        return [*due, *(group for group in self._finished if group not in late)][
            :enough
        ]

    def _ended(self, rows: Ints) -> bool:
        self._since.append(rows)
        self._router.done(self._fleet.requests, rows)
        for row in rows.tolist():
            group = self._group_of[row]
            group.left -= 1
            if not group.left:
                self._finished.append(group)
        return self._waiting and self._wanted() is not None

    def _slack(self) -> float:
        """Return a step's time: nobody hears of a response before the step after it;
        without a lag all wait for all.
        """
        fleet = self._fleet
        steps = self._fleet.step_count.sum()
        if self._lag == 0:
            return np.inf
        return float(fleet.busy_s.sum() / steps) if steps else 0.0

    def _sync(self) -> None:
        """Let drafters and router learn from finished requests."""
        requests = self._fleet.requests
        rows = np.sort(np.concatenate([np.zeros(0, np.int64), *self._since]))
        learned = np.zeros(len(rows), RESPONSE)
        learned["problem"] = requests.problem[rows]
        learned["tokens"] = requests.length[rows]
        learned["version"] = requests.version[rows]
        self._fleet.drafting.sync(self._version, rows, learned)
        self._router.sync(self._version, learned)
        self._since.clear()


def _first_samples(problems: Ints) -> Ints:
    """Return the order in which the first sample of each problem comes first, then the
    second, and so on.
    """
    _, first, group = np.unique(problems, return_index=True, return_inverse=True)
    return np.argsort(np.arange(len(problems)) - first[group], kind="stable")


def _result(
    requests: Requests, rows: Ints, times: tuple[float, float, float], idle: float
) -> StepResult:
    names = ("forwards", "drafted", "accepted", "preempted", "ahead")
    counts = {name: int(getattr(requests, name)[rows].sum()) for name in names}
    tokens = int(requests.written[rows].sum())
    visit = float(requests.visit[rows].mean())
    return StepResult(*times, len(rows), tokens, idle=idle, visit=visit, **counts)
