"""How a run's rollouts, its training and its weight syncs follow each other.

`sync`: one after the other, on the same devices. `one_step_off`: the next rollout runs beside training, on devices of
its own. `async`: requests keep running across weight syncs; the trainer takes what has finished, and nothing older than
`lag` weight versions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from das_adapter.core.length import RESPONSE, Responses
from das_adapter.core.siblings import Moments
from das_adapter.sim.drafting import Controlled
from das_adapter.sim.fleet import Fleet
from das_adapter.sim.requests import Requests
from das_adapter.sim.routing import Router, arrivals
from das_adapter.sim.workload import Workload

Ints = npt.NDArray[np.int64]
Kind = Literal["sync", "one_step_off", "async"]


@dataclass(frozen=True)
class Timing:
    """What a step takes beside its rollout, seconds."""

    train_s: float = 0.0
    """Rewards, log-probabilities and the update."""
    sync_s: float = 0.0
    """Weight sync."""


@dataclass
class StepResult:
    """What a step of the run came to."""

    rollout_s: float
    """From the first request of the step to the last response; `async`: from one batch to the next."""
    step_s: float
    exposed_s: float
    """Part of the step in which the trainer waited for responses."""
    requests: int = 0
    tokens: int = 0
    forwards: int = 0
    """Request forwards: one request's part in one forward pass."""
    drafted: int = 0
    accepted: int = 0
    preempted: int = 0
    visit: float = 0.0
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
    spans: list[tuple[float, float]] = field(default_factory=list)
    """Begin and end of each step's rollout."""

    def running(self, step: int, points: int = 400) -> tuple[npt.NDArray[np.float64], Ints]:
        """Return seconds since the rollout began, and the requests that run then, for a plot."""
        begin, end = self.spans[step]
        begun, ended = self.requests.begun, self.requests.ended
        mine = (ended > begin) & (begun < end)
        at = np.linspace(begin, end, points)
        there = np.searchsorted(np.sort(begun[mine]), at, side="right")
        gone = np.searchsorted(np.sort(ended[mine]), at, side="right")
        return at - begin, (there - gone).astype(np.int64)


def responses(requests: Requests, rows: Ints) -> Responses:
    """Return finished requests as the controllers and the router hear of them."""
    found = np.zeros(len(rows), RESPONSE)
    found["problem"], found["tokens"] = requests.problem[rows], requests.length[rows]
    found["version"] = requests.version[rows]
    return found


def run(
    fleet: Fleet,
    workload: Workload,
    router: Router,
    kind: Kind = "sync",
    timing: Timing = Timing(),
    lag: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Run:
    """Simulate a run.

    Args:
        fleet: fresh engines.
        workload: the requests.
        router: where they go.
        kind: see above.
        timing: of the other parts of a step.
        lag: `async`: most weight versions between sending a request and training on it.
        progress: hears after each step how many are done.
    """
    simulate = _continuous if kind == "async" else _in_turns
    return simulate(fleet, workload, router, kind, timing, lag, progress or (lambda _: None))


def _in_turns(
    fleet: Fleet,
    workload: Workload,
    router: Router,
    kind: Kind,
    timing: Timing,
    lag: int,
    progress: Callable[[int], None],
) -> Run:
    requests, found, spans = fleet.requests, list[StepResult](), list[tuple[float, float]]()
    trained = [0.0, 0.0]  # when training on the step before, and on the one before that, ends
    now = 0.0
    for number in range(workload.steps):
        rows = _send(fleet, workload, router, number, number, now)
        fleet.run()
        end = float(fleet.clock.max())
        router.done(requests, rows)
        if number + 1 < workload.steps:
            _sync(fleet, router, number + 1, rows)
        spans.append((now, end))
        if kind == "sync":
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


def _continuous(
    fleet: Fleet,
    workload: Workload,
    router: Router,
    kind: Kind,
    timing: Timing,
    lag: int,
    progress: Callable[[int], None],
) -> Run:
    requests, found, spans = fleet.requests, list[StepResult](), list[tuple[float, float]]()
    batches: list[Ints] = []  # of rows, as they were sent
    groups: dict[int, list[int]] = {}  # rows of each group, by its number
    group_of: dict[int, int] = {}
    finished: list[int] = []  # groups that ended and were not taken, in the order of their end
    since: list[Ints] = []  # rows that ended since the last weight sync
    ages: dict[int, int] = {}  # weight version of each group that was not taken

    def send(version: int, at: float) -> None:
        if len(batches) < workload.steps:
            rows = _send(fleet, workload, router, len(batches), version, at)
            batches.append(rows)
            names: dict[int, int] = {}
            for row, problem in zip(rows.tolist(), requests.problem[rows].tolist(), strict=True):
                name = names.setdefault(problem, len(groups))
                if name not in groups:
                    ages[name], groups[name] = version, []
                group_of[row] = name
                groups[name].append(row)

    left: dict[int, int] = {}

    def wanted(version: int) -> list[int] | None:
        """The groups that the trainer takes: the oldest, and then those that ended first; None: too few have ended."""
        enough = min(size, len(ages))
        if len(finished) < enough:
            return None
        due = [name for name, age in ages.items() if age <= version - lag]
        if any(left[name] for name in due):
            return None
        others = set(due)
        return (due + [name for name in finished if name not in others])[:enough]

    def ended(rows: Ints) -> bool:
        since.append(rows)
        router.done(requests, rows)
        for row in rows.tolist():
            name = group_of[row]
            left[name] -= 1
            if not left[name]:
                finished.append(name)
        return chosen is None and wanted(version) is not None

    free, version, chosen = 0.0, 0, None
    for _ in range(lag + 1):
        send(0, 0.0)
    size = len(set(requests.problem[batches[0]].tolist()))  # groups of a step
    last = 0.0
    for number in range(workload.steps):
        version = number
        left.update({name: len(rows) for name, rows in groups.items() if name not in left})
        chosen = wanted(version)
        if chosen is None:
            fleet.run(slack=_slack(fleet), ended=ended)
            chosen = wanted(version)
        assert chosen is not None
        rows = np.array(sorted(row for name in chosen for row in groups[name]), dtype=np.int64)
        ready = float(requests.ended[rows].max())
        begin = max(free, ready)
        taken = set(chosen)
        finished[:] = [name for name in finished if name not in taken]
        for name in chosen:
            del ages[name]
        fleet.run(until=begin + timing.train_s, slack=_slack(fleet), ended=ended)
        free = begin + timing.train_s + timing.sync_s
        found.append(_result(requests, rows, begin - last, free - last, max(0.0, ready - last)))
        spans.append((last, free))
        last = free
        fleet.pause(begin + timing.train_s, timing.sync_s)
        _sync(fleet, router, version + 1, np.concatenate([np.zeros(0, np.int64), *since]))
        since.clear()
        send(version + 1, free)
        progress(number + 1)
    return Run(found, requests, _busy(fleet, spans), spans)


def _slack(fleet: Fleet) -> float:
    """A step's time: nobody hears of a response before the step after it."""
    steps = fleet.step_count.sum()
    return float(fleet.busy_s.sum() / steps) if steps else 0.0


def _send(fleet: Fleet, workload: Workload, router: Router, number: int, version: int, at: float) -> Ints:
    step, requests = workload.step(number), fleet.requests
    rows = requests.add(step.problem, step.visit, step.text, step.prompt, step.length, step.most)
    requests.version[rows] = version
    rows = rows[arrivals(step.problem.tolist(), router.rng)]
    engines, priorities = router.send(requests, rows)
    fleet.submit(rows, engines, priorities, at)
    return rows


def _sync(fleet: Fleet, router: Router, version: int, rows: Ints) -> None:
    learned = responses(fleet.requests, rows)
    drafting = fleet.drafting
    drafting.sync(version, rows, learned)
    if isinstance(drafting, Controlled):
        router.sync(version, learned, drafting.moments, drafting.capacity)
    else:
        router.sync(version, learned, Moments(), None)
    fleet.forget_prompts()


def _result(requests: Requests, rows: Ints, rollout_s: float, step_s: float, exposed_s: float) -> StepResult:
    r = requests
    return StepResult(
        rollout_s,
        step_s,
        exposed_s,
        len(rows),
        int(r.written[rows].sum()),
        int(r.forwards[rows].sum()),
        int(r.drafted[rows].sum()),
        int(r.accepted[rows].sum()),
        int(r.preempted[rows].sum()),
        float(r.visit[rows].mean()),
    )


def _busy(fleet: Fleet, spans: list[tuple[float, float]]) -> float:
    seconds = sum(end - begin for begin, end in spans) * fleet.engines
    return float(fleet.busy_s.sum() / seconds) if seconds else 0.0
