"""Which replica a request goes to, and which requests start first (DAS, section 4.2).

Both follow from the predicted end of the rollout. A replica's decode step takes the
time of one round, and a little more for every request and every token in it: the
rollout ends with the longest request, later the more requests there are. Siblings, the
samples of one problem in one step, need fewer rounds on the same replica, where they
draft from each other; the tokens in the forward passes stay as many, since those that
are accepted have been verified.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from das_adapter.config import DasConfig
from das_adapter.core import tuning
from das_adapter.core.length import ExpectedLengths
from das_adapter.core.steps import Floats, Ints

Name = TypeVar("Name", bound=Hashable)
_NONE_BEGUN: Mapping[int, int] = MappingProxyType({})


def predict_rounds(
    problem: int,
    expected: ExpectedLengths,
    siblings: bool,
    growing: float,
    finished: float = 0.0,
) -> float:
    """Predict the decode steps of a response beside so many siblings; `siblings`:
    whether it drafts from them.
    """
    tokens = expected[problem]
    has_history = problem in expected
    growing_texts = tuning.GROWING_SIBLING * growing
    history_texts = tuning.HISTORY_SIBLINGS * has_history
    texts = 1.0 + growing_texts + finished
    texts += history_texts
    doublings = 0.0
    if siblings:
        doublings = math.log2(texts)
    gained_pace = tuning.PACE_PER_DOUBLING * doublings
    pace = tuning.PACE_ALONE + gained_pace
    return tokens / pace


@dataclass
class _Part:
    """Samples of a problem that are on one replica, or will be."""

    samples: int = 0
    rounds: float = 0.0
    """Decode steps that they take; those beyond the replica's slots wait for the
    others.
    """
    work: float = 0.0
    """Decode steps that each sample adds to the time of all."""


Parts = dict[int, _Part]
"""Samples on one replica, by problem."""


class Load(NamedTuple):
    """What a replica has to do, in decode steps."""

    longest: float
    """Rounds of its longest part."""
    work: float
    """Work of all its requests."""


class Replicas(Generic[Name]):
    """Replicas and the samples that they have to write. A group stays together unless
    the rollout ends earlier without.

    When its first sample comes, a group is placed on one replica, or in equal parts on
    two, three, and so on, as long as each division ends the rollout earlier. Work
    counts against a replica only beyond its share of the most that is in flight at
    once, since the groups to come level out what lies below.
    """

    def __init__(
        self,
        names: Iterable[Name] = (),
        siblings: bool = True,
        group: int = 1,
        slots: float = math.inf,
    ) -> None:
        """`siblings`: whether requests draft from theirs; `group`: samples of a problem
        that come at once, where `pick` is not told how many; `slots`: requests that a
        replica runs at once.
        """
        self.expected = ExpectedLengths()
        """Lengths of the responses that are asked for from now on."""
        self.turns = False
        """Whether trajectories have come back for further turns."""
        self._siblings = siblings
        self._group = group
        self._slots = slots
        self._parts: dict[Name, Parts] = {}
        """Parts of groups on each replica."""
        self._loads: dict[Name, Load] = {}
        self._places: dict[int, list[Name]] = {}
        """Replicas of the samples that are still to come, by problem."""
        self._running = Counter[int]()
        """Requests in flight, by problem; `_parts` and `_places` know no other
        problems.
        """
        self._ended: dict[Name, float] = {}
        """When replicas have had requests that ended, since there were none in flight:
        the last one of each.
        """
        self._lent = Counter[Name]()
        """Slots of replicas in which responses are written ahead."""
        self._peak = 0.0
        """Most work that has been in flight in this burst."""
        self._expected = math.inf
        """Most work that is expected in this burst."""
        for name in names:
            self.add(name)

    def set_expected_work(self, work: float) -> None:
        """Set the most work that will be in flight at once, in decode steps. It is
        taken to be endless in the first burst, and in later ones what the burst before
        had; a burst ends when no request is in flight.
        """
        self._expected = work

    def add(self, replica: Name) -> None:
        """Add a replica that joined."""
        self._parts.setdefault(replica, {})
        self._loads.setdefault(replica, Load(0.0, 0.0))

    def remove(self, replica: Name) -> None:
        """Remove a replica that left."""
        self._parts.pop(replica, None)
        self._loads.pop(replica, None)
        for places in self._places.values():
            while replica in places:
                places.remove(replica)

    def pick(self, problem: int, group: int | None = None) -> Name:
        """Choose a replica for a request, and count it there; `group`: samples of its
        problem that come at once, if not `group`.
        """
        places = self._places.get(problem)
        if not places:
            all_samples = group or self._group
            samples = all_samples - self._running[problem]
            samples = max(1, samples)
            places = self._place(problem, samples)
            self._places[problem] = places
        self._begin(problem)
        return places.pop(0)

    def add_request(self, replica: Name, problem: int) -> None:
        """Count a request that has its replica already: the next turn of a
        trajectory.
        """
        self.turns = True
        if replica in self._parts:
            self._begin(problem)
            self._join(replica, problem)

    def remove_request(self, replica: Name, problem: int) -> None:
        """Stop counting a request that ended."""
        self._leave(replica, problem)
        self._ended[replica] = time.monotonic()
        self._running[problem] -= 1
        # samples that have not come by now would be a new group
        if self._running[problem] <= 0:
            del self._running[problem]
            places = self._places.pop(problem, [])
            for place in places:
                self._leave(place, problem)
        if not self._running:
            self._expected = self._peak
            self._peak = 0.0

    def lend(self, max_slots: int) -> list[Name]:
        """Lend at most so many slots for what is written ahead: the replica of each.
        They are on replicas that have nothing left while others go on, where
        trajectories have several turns for `tuning.REPLICA_QUIET_S`. A replica may
        occur several times.
        """
        lent: list[Name] = []
        if not self._running:
            return lent
        idle = self._idle()
        if not idle:
            return lent
        while len(lent) < max_slots:
            replica = min(idle, key=self._lent.__getitem__)
            if self._lent[replica] >= self._slots:
                break
            self._lent[replica] += 1
            lent.append(replica)
        return lent

    def _idle(self) -> list[Name]:
        """Return the replicas that have had nothing to do for long enough."""
        quiet_s = 0.0
        if self.turns:
            quiet_s = tuning.REPLICA_QUIET_S
        quiet_since = time.monotonic() - quiet_s
        idle = []
        for name, parts in self._parts.items():
            ended = self._ended.get(name, math.inf)
            if not parts and ended <= quiet_since:
                idle.append(name)
        return idle

    def give_back(self, replica: Name) -> None:
        """Count a slot that was lent as free again."""
        self._lent[replica] -= 1

    def work(self, problem: int, others: int) -> float:
        """Return what a request adds to the time of all decode steps, in steps, beside
        `others` of its problem.
        """
        steps = predict_rounds(problem, self.expected, self._siblings, others)
        tokens = self.expected[problem]
        of_request = steps / tuning.DOUBLING_REQUESTS
        of_tokens = tokens / tuning.DOUBLING_TOKENS
        of_slot = steps / self._slots
        return max(of_slot, of_request + of_tokens)

    def load(self, replica: Name) -> Load:
        """Compute the rounds of a replica's longest part, and the work of all its
        requests.
        """
        longest = 0.0
        work = 0.0
        for part in self._parts[replica].values():
            longest = max(longest, part.rounds)
            work += part.samples * part.work
        return Load(longest, work)

    def _place(self, problem: int, samples: int) -> list[Name]:
        """Choose the replicas of a group's samples, and count them there."""
        names = list(self._loads)
        loads = np.array(list(self._loads.values()))
        total_work = loads[:, 1].sum()
        group_work = self._whole_work(problem, samples)
        in_flight = group_work + float(total_work)
        self._peak = max(self._peak, in_flight)
        most_work = max(self._expected, self._peak)
        share = most_work / len(names)
        first_end = math.inf
        places = list[Name]()
        last_each = 0
        max_parts = min(samples, len(names))
        for parts in range(1, max_parts + 1):
            each = math.ceil(samples / parts)
            if each == last_each:
                continue
            last_each = each
            part = _Part(
                samples=each,
                rounds=self._rounds(problem, each),
                work=self._whole_work(problem, each),
            )
            end, chosen = _divide(loads, share, part, parts)
            if end >= first_end:
                break
            first_end = end
            places = []
            for index in chosen:
                replica = names[index]
                places += [replica] * each
        places = places[:samples]
        samples_on = Counter(places)
        for replica, count in samples_on.items():
            self._join(replica, problem, count)
        return places

    def _whole_work(self, problem: int, samples: int) -> float:
        """Return the work of so many samples of a problem together."""
        others = samples - 1
        return samples * self.work(problem, others)

    def _begin(self, problem: int) -> None:
        if not self._running:
            self._ended.clear()
        self._running[problem] += 1

    def _join(self, replica: Name, problem: int, samples: int = 1) -> None:
        new = _Part()
        parts = self._parts[replica]
        part = parts.setdefault(problem, new)
        samples += part.samples
        others = samples - 1
        part.samples = samples
        part.rounds = self._rounds(problem, samples)
        part.work = self.work(problem, others)
        self._loads[replica] = self.load(replica)

    def _rounds(self, problem: int, samples: int) -> float:
        """Return the rounds of so many samples of a problem on one replica."""
        others = samples - 1
        rounds = predict_rounds(problem, self.expected, self._siblings, others)
        waves = math.ceil(samples / self._slots)
        waves = max(1, waves)
        return rounds * waves

    def _leave(self, replica: Name, problem: int) -> None:
        parts = self._parts.get(replica, {})
        part = parts.get(problem)
        if part is None:
            return
        part.samples -= 1
        if not part.samples:
            del parts[problem]
        self._loads[replica] = self.load(replica)


def _divide(
    loads: Floats,
    share: float,
    part: _Part,
    num_parts: int,
) -> tuple[float, list[int]]:
    """Put equal parts of a group on as many replicas, where the rollout ends first.

    Args:
        loads: `Load` of each replica, float64 [replicas, 2].
        share: work of a replica that does not count.
        part: one part of the group; its work is that of all its samples.
        num_parts: how many parts there are.

    Returns:
        When the rollout ends, and the indices of the replicas.
    """
    longest, work = loads.T
    longest_after = np.maximum(longest, part.rounds)
    work_after = work + part.work
    ends_after = longest_after + work_after
    by_end = np.argsort(ends_after, kind="stable")
    chosen = by_end[:num_parts]
    excess = np.maximum(0.0, work - share)
    excess_after = np.maximum(0.0, work_after - share)
    ends = longest + excess
    with_part = longest_after + excess_after
    ends[chosen] = with_part[chosen]
    more_work = num_parts * part.work
    mean_more = more_work / len(loads)
    last_end = ends.max()
    end = float(last_end + mean_more)
    return end, chosen.tolist()


@dataclass(frozen=True, eq=False)
class Turn:
    """A turn of a trajectory that a worker has generated, and whose text is in its
    prefix cache.
    """

    problem: int
    prompt: int
    """Tokens of its prompt."""
    text: Ints
    """Token ids of prompt and response."""
    worker: int


def match_next_turns(
    turns: Iterable[Turn],
    problems: Sequence[int],
    prompts: Sequence[Ints],
) -> dict[int, int]:
    """Find the rows of a batch that are next turns of trajectories, and the worker of
    each.

    A row follows the turn of its problem with whose prompt it begins, and with whose
    response it goes on longest; no two rows follow the same one.
    """
    turns_of = defaultdict[int, list[Turn]](list)
    for turn in turns:
        turns_of[turn.problem].append(turn)
    workers: dict[int, int] = {}
    rows = zip(problems, prompts, strict=True)
    for row, (problem, prompt) in enumerate(rows):
        of_problem = turns_of[problem]
        before = _turn_before(of_problem, prompt)
        if before is None:
            continue
        workers[row] = before.worker
        of_problem.remove(before)
    return workers


def _turn_before(turns: Iterable[Turn], prompt: Ints) -> Turn | None:
    """Return the turn with whose prompt a longer prompt begins, and with whose response
    it goes on longest; None: there is none.
    """
    latest = None
    longest = -1
    for turn in turns:
        if turn.prompt >= len(prompt):
            continue
        shared = _shared_tokens(turn.text, prompt)
        if shared >= turn.prompt and shared > longest:
            latest = turn
            longest = shared
    return latest


def _shared_tokens(one: Ints, other: Ints) -> int:
    """Return with how many equal tokens two texts begin."""
    tokens = min(len(one), len(other))
    differ = one[:tokens] != other[:tokens]
    if not differ.any():
        return tokens
    return int(differ.argmax())


def distribute_batch(
    problems: Sequence[int],
    expected: ExpectedLengths,
    workers: int,
    siblings: bool = True,
    slots: float = math.inf,
    begun: Mapping[int, int] = _NONE_BEGUN,
) -> list[list[int]]:
    """Distribute a batch over data-parallel workers, the groups with most to write
    first. On a worker that has more rows than slots the first sample of each group
    leads.

    Args:
        problems: the problem of each row.
        expected: response lengths.
        siblings, slots: see `Replicas`.
        begun: the workers of rows that stay where they are: next turns of trajectories.

    Returns:
        For each worker its rows, in the order in which they start; every row is in
        exactly one list.
    """
    rows_of = defaultdict[int, list[int]](list)
    for row, problem in enumerate(problems):
        rows_of[problem].append(row)

    def tokens(problem: int) -> float:
        samples = len(rows_of[problem])
        return expected[problem] * samples

    longest_first = sorted(rows_of, key=tokens, reverse=True)
    replicas = Replicas(range(workers), siblings, slots=slots)
    replicas.expected = expected
    work = 0.0
    for problem in longest_first:
        samples = len(rows_of[problem])
        sample_work = replicas.work(problem, samples - 1)
        group_work = samples * sample_work
        work += group_work
    replicas.set_expected_work(work)
    shares: list[list[int]] = [[] for _ in range(workers)]
    for row, worker in begun.items():
        replicas.add_request(worker, problems[row])
        shares[worker].append(row)
    largest_group = 1
    for problem in longest_first:
        rows = rows_of[problem]
        samples = len(rows)
        largest_group = max(largest_group, samples)
        for row in rows:
            if row in begun:
                continue
            worker = replicas.pick(problem, samples)
            shares[worker].append(row)
    for share in shares:
        first_leads = siblings and len(share) > slots
        order = StartOrder(first_leads, largest_group)
        order.refresh(expected, 0)
        priorities = {}
        for row in share:
            has_begun = row in begun
            priorities[row] = order.priority(problems[row], has_begun)
        share.sort(key=priorities.__getitem__)
    return shares


class StartOrder:
    """The order in which an engine's waiting requests start: longest first.

    The first sample of each group leads: the others draft from it once it has finished.
    It counts as longer by the rounds that this saves them, which are few where the
    problem has history. Requests of an earlier weight version go before.
    """

    def __init__(self, siblings: bool = True, group: int = 1) -> None:
        """`siblings`: whether requests draft from theirs, else nobody leads; `group`:
        samples of a problem that come at once, more where more of one problem came.
        """
        self._siblings = siblings
        self._group = group
        self._expected = ExpectedLengths()
        self._version = 0
        self._started = Counter[int]()
        """Requests by problem, since the weight sync."""

    def refresh(self, expected: ExpectedLengths | None, version: int) -> None:
        """Set the expected lengths (None: they stay) and the weight version, at a
        weight sync.
        """
        if expected is not None:
            self._expected = expected
        self._version = version
        self._started.clear()

    def priority(self, problem: int, begun: bool = False) -> int:
        """Return the priority of the problem's next request, as vLLM counts it: the
        lowest starts first. A trajectory that has begun goes on as early as the group's
        first sample.
        """
        num_started = self._started[problem]
        others = self._group - 1
        about = (problem, self._expected, self._siblings)
        steps = predict_rounds(*about, others)
        leads = not num_started
        if begun or leads:
            others_behind = others - 1
            steps_behind = predict_rounds(*about, others_behind, finished=1)
            saved_steps = steps - steps_behind
            steps += others * saved_steps
        if not begun:
            num_started += 1
        self._started[problem] = num_started
        self._group = max(self._group, num_started)
        first = self._version * 2**32
        milli_steps = round(1000 * steps)
        return first - milli_steps


def start_order(das: DasConfig, group: int = 1) -> StartOrder | None:
    """Return the order of an engine's requests that the block asks for; None: that of
    their arrival.
    """
    if das.routing != "longest_first":
        return None
    return StartOrder(das.shares_history, group)
