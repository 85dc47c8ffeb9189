"""The order of a run's rollouts, its training and its weight syncs.

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
from das_adapter.sim.requests import Ints, Requests, int_zeros
from das_adapter.sim.routing import Router, arrivals
from das_adapter.sim.workload import Workload


@dataclass
class StepResult:
    """Times and counts of a step of the run."""

    rollout_s: float
    """Time from the first request of the step to the last response; with a lag: from
    one batch to the next.
    """
    step_s: float
    """Time of the whole step, with training and weight sync."""
    exposed_s: float
    """Time of the step in which the trainer waited for responses."""
    requests: int
    tokens: int
    forwards: int
    """Request forwards: one request's part in one forward pass."""
    drafted: int
    accepted: int
    preempted: int
    idle: float
    """Share of the rollout for which an engine was idle, mean over engines."""
    ahead: int
    """Tokens that were written ahead of its requests."""
    visit: float
    """Number of times that its problems had been visited before, mean over requests."""

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
    """Weight version at which it was sent."""
    rows: list[int]
    unfinished: int = 0
    """Samples that are still being written."""


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
        self._requests = fleet.requests
        self._steps = workload.steps
        self._router = router
        self._timing = timing
        self._lag = timing.lag if timing.kind == "async" else 0
        self._ahead = ahead and not self._lag
        # rows that are written ahead: of each of the next steps one for each request
        self._early = deque[Ints]()
        # in the order in which they were sent
        self._groups = list[_Group]()
        self._group_of_row: dict[int, _Group] = {}
        # in the order of their end
        self._finished = list[_Group]()
        # rows that ended since the last weight sync
        self._unlearned = list[Ints]()
        self._num_sent = 0
        self._version = 0
        # groups of each step that was sent
        self._group_counts = list[int]()
        # whether the trainer waits for a batch
        self._waiting = False

    def run(self) -> Run:
        """Simulate a run on fresh engines."""
        fleet = self._fleet
        timing = self._timing
        results = list[StepResult]()
        for _ in range(self._lag + 1):
            self._send(0.0)
        trainer_free = 0.0
        rollout_begin = 0.0
        # seconds of the rollout that an engine was idle before the trainer was free
        idle_s = 0.0
        for number in range(len(self._steps)):
            rows = self._next_batch()
            ended_s = self._requests.ended_s[rows]
            ready = max(trainer_free, float(ended_s.max()))
            written_s = max(ready - rollout_begin, 1e-12)
            idle_s += self._idle_s(trainer_free, ready)
            ahead_ended = self._write_ahead(trainer_free, ready)
            begin = max(ready, ahead_ended)
            trained = begin + timing.train_s
            fleet.run(until=trained, slack=self._slack(), ended=self._record_ended)
            synced = trained + timing.sync_s
            result = self._result(
                rows,
                idle=idle_s / written_s,
                rollout_s=begin - rollout_begin,
                step_s=synced - trainer_free,
                exposed_s=ready - trainer_free,
            )
            results.append(result)
            trainer_free = synced
            if self._lag:
                rollout_begin = begin
                idle_s = self._idle_s(begin, trained)
            else:
                rollout_begin = synced
                idle_s = 0.0
            fleet.pause(trained, timing.sync_s)
            self._version = number + 1
            self._sync()
            self._send(synced)
        return Run(results, self._requests)

    def _idle_s(self, since: float, until: float) -> float:
        """Return for how long an engine was idle, mean over engines, seconds; it has
        been given nothing since.
        """
        busy_until = np.clip(self._fleet.clock, since, until)
        return float((until - busy_until).mean())

    def _send(self, at: float) -> None:
        """Send the next step's requests, if there are any."""
        if self._num_sent == len(self._steps):
            return
        requests = self._requests
        step = self._steps[self._num_sent]
        rows = requests.add(**step)
        requests.version[rows] = self._version
        if self._early:
            early = self._early.popleft()
            requests.num_ahead[rows] = requests.num_written[early]
        order = arrivals(step["problem"].tolist(), self._router.rng)
        rows = rows[order]
        engines, priorities = self._router.send(requests, rows)
        self._fleet.submit(rows, engines, priorities, at)
        self._num_sent += 1
        self._add_groups(rows)

    def _add_groups(self, rows: Ints) -> None:
        """Group the requests of a step by problem, in the order of their arrival."""
        groups: dict[int, _Group] = {}
        problems = self._requests.problem[rows].tolist()
        for row, problem in zip(rows.tolist(), problems, strict=True):
            if problem not in groups:
                groups[problem] = _Group(self._version, [])
            group = groups[problem]
            group.rows.append(row)
            group.unfinished += 1
            self._group_of_row[row] = group
        self._groups += groups.values()
        self._group_counts.append(len(groups))

    def _write_ahead(self, since: float, until: float) -> float:
        """Let engines that have been idle since some time write what the next steps'
        requests begin with, up to the end of this one's; return when the last of their
        steps has ended.

        As in a run, no more is written at once than a step has requests, the next step
        first, and of a step first samples of all problems first.
        """
        fleet = self._fleet
        if not self._ahead or self._num_sent == len(self._steps):
            return until
        rows = self._rows_to_write_ahead()
        idle_since = np.maximum(fleet.clock, since)
        max_running = len(self._early[0])
        first_poll = idle_since.min() + tuning.RUN_AHEAD_POLL_S
        for at in np.arange(first_poll, until, tuning.RUN_AHEAD_POLL_S):
            if not len(rows):
                break
            fleet.run(at)
            idle = np.flatnonzero(idle_since < at)
            engines = self._idle_slots(idle, max_running, len(rows))
            count = len(engines)
            if count:
                fleet.submit(rows[:count], engines, np.arange(count), at)
                rows = rows[count:]
        fleet.run(until)
        fleet.withdraw()
        return float(max(until, fleet.clock.max()))

    def _rows_to_write_ahead(self) -> Ints:
        """Return the unfinished requests that may be written ahead, in their order;
        they are added where they are of a step that is new.
        """
        requests = self._requests
        first = self._num_sent + len(self._early)
        for step in self._steps[first : self._num_sent + tuning.RUN_AHEAD_STEPS]:
            written_ahead = np.full_like(step["problem"], -1)
            early = requests.add(**step, num_ahead=written_ahead)
            self._early.append(early)
        ordered = []
        for early in self._early:
            order = _first_samples(requests.problem[early])
            ordered.append(early[order])
        rows = np.concatenate(ordered)
        return rows[requests.unfinished(rows)]

    def _idle_slots(self, idle: Ints, max_running: int, num_rows: int) -> Ints:
        """Return the idle engines that the next requests begin on, an entry for each
        request: each time the engine with the fewest, while one has a slot.
        """
        counts = self._fleet.counts
        free = max_running - int(counts.sum())
        engines = []
        for _ in range(min(free, num_rows)):
            fewest = counts[idle].argmin()
            engine = idle[fewest]
            if counts[engine] == self._fleet.slots:
                break
            counts[engine] += 1
            engines.append(engine)
        return np.array(engines, dtype=np.int64)

    def _next_batch(self) -> Ints:
        """Wait for the next batch; return its requests, on which the trainer trains."""
        chosen = self._finished_batch()
        if chosen is None:
            self._waiting = True
            self._fleet.run(slack=self._slack(), ended=self._record_ended)
            self._waiting = False
            chosen = self._finished_batch()
        assert chosen is not None
        trained = set(chosen)
        self._groups = _without(self._groups, trained)
        self._finished = _without(self._finished, trained)
        rows = list[int]()
        for group in chosen:
            rows += group.rows
        return np.array(sorted(rows), dtype=np.int64)

    def _finished_batch(self) -> list[_Group] | None:
        """Return the groups of the next batch: those at the maximum lag, and then those
        that ended first; None: too few have ended.
        """
        batch_size = self._group_counts[self._version]
        oldest = self._version - self._lag
        due = [group for group in self._groups if group.version <= oldest]
        if len(self._finished) < batch_size:
            return None
        if any(group.unfinished for group in due):
            return None
        batch = due + _without(self._finished, set(due))
        return batch[:batch_size]

    def _record_ended(self, rows: Ints) -> bool:
        """Record requests that ended; return whether the trainer waited for them."""
        self._unlearned.append(rows)
        self._router.done(self._requests, rows)
        for row in rows.tolist():
            group = self._group_of_row[row]
            group.unfinished -= 1
            if not group.unfinished:
                self._finished.append(group)
        return self._waiting and self._finished_batch() is not None

    def _slack(self) -> float:
        """Return the seconds within which engines step together: a step's time, since
        no engine learns of a response before the step after it; without a lag all wait
        for all.
        """
        if self._lag == 0:
            return np.inf
        num_steps = self._fleet.step_count.sum()
        if num_steps == 0:
            return 0.0
        return float(self._fleet.busy_s.sum() / num_steps)

    def _sync(self) -> None:
        """Let drafters and router learn from finished requests."""
        requests = self._requests
        ended = np.concatenate([int_zeros(0), *self._unlearned])
        rows = np.sort(ended)
        responses = np.zeros(len(rows), RESPONSE)
        responses["problem"] = requests.problem[rows]
        responses["tokens"] = requests.num_output_tokens[rows]
        responses["version"] = requests.version[rows]
        self._fleet.drafting.sync(self._version, rows, responses)
        self._router.sync(self._version, responses)
        self._unlearned.clear()

    def _result(
        self, rows: Ints, idle: float, rollout_s: float, step_s: float, exposed_s: float
    ) -> StepResult:
        """Return the result of a step with these requests."""
        requests = self._requests
        return StepResult(
            rollout_s=rollout_s,
            step_s=step_s,
            exposed_s=exposed_s,
            requests=len(rows),
            tokens=int(requests.num_written[rows].sum()),
            forwards=int(requests.num_forwards[rows].sum()),
            drafted=int(requests.num_drafted[rows].sum()),
            accepted=int(requests.num_accepted[rows].sum()),
            preempted=int(requests.num_preemptions[rows].sum()),
            idle=idle,
            ahead=int(requests.num_ahead[rows].sum()),
            visit=float(requests.visit[rows].mean()),
        )


def _without(groups: list[_Group], dropped: set[_Group]) -> list[_Group]:
    """Return groups but for some, in their order."""
    return [group for group in groups if group not in dropped]


def _first_samples(problems: Ints) -> Ints:
    """Return the order in which the first sample of each problem comes first, then the
    second, and so on. Samples of a problem stand beside each other.
    """
    _, first, group = np.unique(problems, return_index=True, return_inverse=True)
    number = np.arange(len(problems)) - first[group]
    return np.argsort(number, kind="stable")
