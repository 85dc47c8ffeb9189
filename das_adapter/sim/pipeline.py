"""How a run's rollouts, its training and its weight syncs follow each other.

`sync`: one after the other, on the same devices. `one_step_off`: the next rollout runs beside training, on devices of
its own. `async`: requests keep running across weight syncs; the trainer takes what has finished, and nothing older than
`lag` weight versions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from das_adapter.core.length import RESPONSE
from das_adapter.sim.config import PipelineBlock
from das_adapter.sim.fleet import Fleet
from das_adapter.sim.requests import Floats, Ints, Requests
from das_adapter.sim.routing import Router, arrivals
from das_adapter.sim.workload import Workload


@dataclass
class StepResult:
    """Times and counts of a step of the run."""

    rollout_s: float
    """From the first request of the step to the last response; `async`: from one batch to the next."""
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
    busy_share: float
    """Share of the engines' time in which they had requests."""
    spans: list[tuple[float, float]]
    """Begin and end of each step's rollout."""

    def running(self, step: int) -> tuple[Floats, Ints]:
        """Return seconds since the rollout began, and the requests that run then, for a plot."""
        begin, end = self.spans[step]
        begun, ended = self.requests.begun, self.requests.ended
        mine = (ended > begin) & (begun < end)
        at = np.linspace(begin, end, 400)
        there = np.searchsorted(np.sort(begun[mine]), at, side="right")
        gone = np.searchsorted(np.sort(ended[mine]), at, side="right")
        return at - begin, (there - gone).astype(np.int64)


def run(
    fleet: Fleet,
    workload: Workload,
    router: Router,
    pipeline: PipelineBlock,
    progress: Callable[[int], None] | None = None,
) -> Run:
    """Simulate a run on fresh engines; `progress` receives after each step how many are done."""
    told = progress or (lambda _: None)
    if pipeline.kind == "async":
        return _Continuous(fleet, workload, router, pipeline).run(told)
    return _in_turns(fleet, workload, router, pipeline, told)


def _in_turns(
    fleet: Fleet, workload: Workload, router: Router, timing: PipelineBlock, progress: Callable[[int], None]
) -> Run:
    requests, found, spans = fleet.requests, list[StepResult](), list[tuple[float, float]]()
    trained = [0.0, 0.0]  # when training on the step before, and on the one before that, ends
    now = 0.0
    for number in range(len(workload.steps)):
        rows = _send(fleet, workload, router, number, number, now)
        fleet.run()
        end = float(fleet.clock.max())
        router.done(requests, rows)
        if number + 1 < len(workload.steps):
            _sync(fleet, router, number + 1, rows)
        spans.append((now, end))
        if timing.kind == "sync":
            step_s = end - now + timing.train_s + timing.sync_s
            found.append(_result(requests, rows, end - now, step_s, end - now))
            now += step_s
        else:  # the next rollout has the weights of the step before this one
            began = max(end, trained[-1])
            exposed, before = max(0.0, end - trained[-1]), trained[-1]
            trained.append(began + timing.train_s)
            found.append(_result(requests, rows, end - now, trained[-1] - before, exposed))
            now = max(end, before) + timing.sync_s
        fleet.clock[:] = np.maximum(fleet.clock, now)
        progress(number + 1)
    return Run(found, requests, _busy(fleet, spans), spans)


@dataclass
class _Group:
    """The samples of a problem that were sent together and not trained on yet."""

    version: int
    rows: list[int]
    left: int
    """Samples that are still being written."""


class _Continuous:
    """Requests that keep running across weight syncs, and a trainer that takes whole groups."""

    def __init__(self, fleet: Fleet, workload: Workload, router: Router, timing: PipelineBlock) -> None:
        self._fleet, self._workload, self._router, self._timing = fleet, workload, router, timing
        self._groups: dict[int, _Group] = {}  # by number
        self._group_of: dict[int, int] = {}
        self._finished: list[int] = []  # groups, in the order of their end
        self._since: list[Ints] = []  # rows that ended since the last weight sync
        self._sent = self._version = 0
        self._size = 0  # groups of a step
        self._waiting = False  # whether the trainer waits for a batch

    def run(self, progress: Callable[[int], None]) -> Run:
        fleet, timing, requests = self._fleet, self._timing, self._fleet.requests
        found, spans = list[StepResult](), list[tuple[float, float]]()
        for _ in range(self._timing.lag + 1):
            self._send(0.0)
        free = 0.0
        for number in range(len(self._workload.steps)):
            rows = self._take()
            ready, last = float(requests.ended[rows].max()), free
            begin = max(free, ready)
            fleet.run(until=begin + timing.train_s, slack=_slack(fleet), ended=self._ended)
            free = begin + timing.train_s + timing.sync_s
            found.append(_result(requests, rows, begin - last, free - last, max(0.0, ready - last)))
            spans.append((last, free))
            fleet.pause(begin + timing.train_s, timing.sync_s)
            self._version = number + 1
            _sync(fleet, self._router, self._version, np.concatenate([np.zeros(0, np.int64), *self._since]))
            self._since.clear()
            self._send(free)
            progress(number + 1)
        return Run(found, requests, _busy(fleet, spans), spans)

    def _send(self, at: float) -> None:
        """Send the next step's requests, if there are any."""
        if self._sent == len(self._workload.steps):
            return
        rows = _send(self._fleet, self._workload, self._router, self._sent, self._version, at)
        self._sent += 1
        first, names = len(self._group_of), dict[int, int]()
        for row, problem in zip(rows.tolist(), self._fleet.requests.problem[rows].tolist(), strict=True):
            name = names.setdefault(problem, first + len(names))
            group = self._groups.setdefault(name, _Group(self._version, [], 0))
            group.rows.append(row)
            group.left += 1
            self._group_of[row] = name
        self._size = self._size or len(names)

    def _take(self) -> Ints:
        """Wait for the next batch; return its requests, which the trainer takes."""
        chosen = self._wanted()
        if chosen is None:
            self._waiting = True
            self._fleet.run(slack=_slack(self._fleet), ended=self._ended)
            self._waiting, chosen = False, self._wanted()
        assert chosen is not None
        taken = set(chosen)
        self._finished = [name for name in self._finished if name not in taken]
        return np.array(sorted(row for name in chosen for row in self._groups.pop(name).rows), dtype=np.int64)

    def _wanted(self) -> list[int] | None:
        """Return the groups of the next batch: those at the maximum lag, and then those that ended first; None: too few
        have ended."""
        enough = min(self._size, len(self._groups))
        due = {name: group for name, group in self._groups.items() if group.version <= self._version - self._timing.lag}
        if len(self._finished) < enough or any(group.left for group in due.values()):
            return None
        return [*due, *(name for name in self._finished if name not in due)][:enough]

    def _ended(self, rows: Ints) -> bool:
        self._since.append(rows)
        self._router.done(self._fleet.requests, rows)
        for row in rows.tolist():
            group = self._groups[self._group_of[row]]
            group.left -= 1
            if not group.left:
                self._finished.append(self._group_of[row])
        return self._waiting and self._wanted() is not None


def _slack(fleet: Fleet) -> float:
    """A step's time: nobody hears of a response before the step after it."""
    steps = fleet.step_count.sum()
    return float(fleet.busy_s.sum() / steps) if steps else 0.0


def _send(fleet: Fleet, workload: Workload, router: Router, number: int, version: int, at: float) -> Ints:
    step, requests = workload.steps[number], fleet.requests
    rows = requests.add(**step)
    requests.version[rows] = version
    rows = rows[arrivals(step["problem"].tolist(), router.rng)]
    engines, priorities = router.send(requests, rows)
    fleet.submit(rows, engines, priorities, at)
    return rows


def _sync(fleet: Fleet, router: Router, version: int, rows: Ints) -> None:
    """Let drafters and router learn from finished requests, and forget the prompts of the older policy."""
    requests, drafting = fleet.requests, fleet.drafting
    learned = np.zeros(len(rows), RESPONSE)
    learned["problem"], learned["tokens"] = requests.problem[rows], requests.length[rows]
    learned["version"] = requests.version[rows]
    drafting.sync(version, rows, learned)
    router.sync(version, learned, drafting.moments, drafting.capacity)
    fleet.forget_prompts()


def _result(requests: Requests, rows: Ints, rollout_s: float, step_s: float, exposed_s: float) -> StepResult:
    counts = {
        name: int(getattr(requests, name)[rows].sum()) for name in ("forwards", "drafted", "accepted", "preempted")
    }
    tokens, visit = int(requests.written[rows].sum()), float(requests.visit[rows].mean())
    return StepResult(rollout_s, step_s, exposed_s, len(rows), tokens, visit=visit, **counts)


def _busy(fleet: Fleet, spans: list[tuple[float, float]]) -> float:
    seconds = sum(end - begin for begin, end in spans) * fleet.engines
    return float(fleet.busy_s.sum() / seconds) if seconds else 0.0
