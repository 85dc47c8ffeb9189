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
        self._lag = 0
        if timing.kind == "async":
            self._lag = timing.lag
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
        num_ahead = self._lag + 1
        for _ in range(num_ahead):
            self._send(0.0)
        trainer_free = 0.0
        rollout_begin = 0.0
        # seconds of the rollout that an engine was idle before the trainer was free
        idle_s = 0.0
        num_steps = len(self._steps)
        for number in range(num_steps):
            rows = self._next_batch()
            ended_s = self._requests.ended_s[rows]
            last_ended = float(ended_s.max())
            ready = max(trainer_free, last_ended)
            written_s = max(ready - rollout_begin, 1e-12)
            idle_s += self._idle_s(trainer_free, ready)
            ahead_ended = self._write_ahead(trainer_free, ready)
            begin = max(ready, ahead_ended)
            trained = begin + timing.train_s
            self._run_fleet(until=trained)
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

    def _run_fleet(self, until: float = np.inf) -> None:
        """Let the engines step, and record what ends."""
        self._fleet.run(
            until=until,
            slack=self._slack(),
            ended=self._record_ended,
        )

    def _idle_s(self, since: float, until: float) -> float:
        """Return for how long an engine was idle, mean over engines, seconds; it has
        been given nothing since.
        """
        busy_until = np.clip(self._fleet.clock, since, until)
        idle_s = until - busy_until
        return float(idle_s.mean())

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
        problems = step["problem"].tolist()
        order = arrivals(problems, self._router.rng)
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
        all_sent = self._num_sent == len(self._steps)
        if all_sent or not self._ahead:
            return until
        rows = self._rows_to_write_ahead()
        idle_since = np.maximum(fleet.clock, since)
        max_running = len(self._early[0])
        poll_s = tuning.RUN_AHEAD_POLL_S
        first_poll = idle_since.min() + poll_s
        for at in np.arange(first_poll, until, poll_s):
            if not len(rows):
                break
            fleet.run(at)
            idle = np.flatnonzero(idle_since < at)
            engines = self._idle_slots(idle, max_running, len(rows))
            count = len(engines)
            if not count:
                continue
            priorities = np.arange(count)
            fleet.submit(rows[:count], engines, priorities, at)
            rows = rows[count:]
        fleet.run(until)
        fleet.withdraw()
        last_step = fleet.clock.max()
        return float(max(until, last_step))

    def _rows_to_write_ahead(self) -> Ints:
        """Return the unfinished requests that may be written ahead, in their order;
        they are added where they are of a step that is new.
        """
        requests = self._requests
        first_new = self._num_sent + len(self._early)
        end = self._num_sent + tuning.RUN_AHEAD_STEPS
        for step in self._steps[first_new:end]:
            written_ahead = np.full_like(step["problem"], -1)
            early = requests.add(**step, num_ahead=written_ahead)
            self._early.append(early)
        ordered = []
        for early in self._early:
            problems = requests.problem[early]
            order = _first_samples(problems)
            ordered.append(early[order])
        rows = np.concatenate(ordered)
        unfinished = requests.unfinished(rows)
        return rows[unfinished]

    def _idle_slots(self, idle: Ints, max_running: int, num_rows: int) -> Ints:
        """Return the idle engines that the next requests begin on, an entry for each
        request: each time the engine with the fewest, while one has a slot.
        """
        counts = self._fleet.counts
        num_running = int(counts.sum())
        free = max_running - num_running
        num_begun = min(free, num_rows)
        engines = []
        for _ in range(num_begun):
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
            self._run_fleet()
            self._waiting = False
            chosen = self._finished_batch()
        assert chosen is not None
        trained = set(chosen)
        self._groups = _without(self._groups, trained)
        self._finished = _without(self._finished, trained)
        rows = list[int]()
        for group in chosen:
            rows += group.rows
        rows.sort()
        return np.array(rows, dtype=np.int64)

    def _finished_batch(self) -> list[_Group] | None:
        """Return the groups of the next batch: those at the maximum lag, and then those
        that ended first; None: too few have ended.
        """
        batch_size = self._group_counts[self._version]
        if len(self._finished) < batch_size:
            return None
        oldest = self._version - self._lag
        due = list[_Group]()
        for group in self._groups:
            if group.version > oldest:
                continue
            if group.unfinished:
                return None
            due.append(group)
        others = _without(self._finished, set(due))
        batch = due + others
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
        if not self._waiting:
            return False
        return self._finished_batch() is not None

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
        busy_s = self._fleet.busy_s.sum()
        return float(busy_s / num_steps)

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
        self,
        rows: Ints,
        idle: float,
        rollout_s: float,
        step_s: float,
        exposed_s: float,
    ) -> StepResult:
        """Return the result of a step with these requests."""
        requests = self._requests
        return StepResult(
            rollout_s=rollout_s,
            step_s=step_s,
            exposed_s=exposed_s,
            requests=len(rows),
            tokens=_total(requests.num_written, rows),
            forwards=_total(requests.num_forwards, rows),
            drafted=_total(requests.num_drafted, rows),
            accepted=_total(requests.num_accepted, rows),
            preempted=_total(requests.num_preemptions, rows),
            idle=idle,
            ahead=_total(requests.num_ahead, rows),
            visit=float(requests.visit[rows].mean()),
        )


def _total(column: Ints, rows: Ints) -> int:
    """Return the sum of a column over some requests."""
    of_rows = column[rows]
    return int(of_rows.sum())


def _without(groups: list[_Group], dropped: set[_Group]) -> list[_Group]:
    """Return groups but for some, in their order."""
    return [group for group in groups if group not in dropped]


def _first_samples(problems: Ints) -> Ints:
    """Return the order in which the first sample of each problem comes first, then the
    second, and so on. Samples of a problem stand beside each other.
    """
    _, first, group = np.unique(problems, return_index=True, return_inverse=True)
    place = np.arange(len(problems))
    number = place - first[group]
    return np.argsort(number, kind="stable")
