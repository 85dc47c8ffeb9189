"""Groups stay together where the rollout ends no later, and a group's first sample
leads.
"""

from __future__ import annotations

import cProfile
import heapq
import itertools
import pstats
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from das_adapter.config import parse
from das_adapter.core import tuning
from das_adapter.core.length import ExpectedLengths
from das_adapter.core.routing import (
    Replicas,
    StartOrder,
    Turn,
    distribute_batch,
    match_next_turns,
    predict_rounds,
    start_order,
)

GROUPS = st.dictionaries(st.integers(0, 19), st.integers(1, 8), min_size=1, max_size=16)
LENGTHS = st.dictionaries(st.integers(0, 19), st.integers(1, 10_000).map(float))


def knowing(
    lengths: dict[int, float], names: Iterable[Any] = (), **about: Any
) -> Replicas[Any]:
    """Replicas for responses of these lengths."""
    replicas = Replicas(names, **about)
    replicas.expected = ExpectedLengths(lengths)
    return replicas


def makespan(
    shares: Sequence[Sequence[int]], problems: Sequence[int], lengths: dict[int, float]
) -> float:
    """The end of a plan by the model: the longest request's rounds, and all work."""
    model = knowing(lengths)
    ends = []
    for rows in shares:
        samples = Counter(problems[row] for row in rows)
        longest = max(
            (
                predict_rounds(p, model.expected, True, n - 1)
                for p, n in samples.items()
            ),
            default=0.0,
        )
        ends.append(longest + sum(model.work(p, n - 1) * n for p, n in samples.items()))
    return max(ends)


@given(
    GROUPS,
    LENGTHS,
    st.integers(1, 5),
    st.integers(1, 40),
    st.randoms(use_true_random=False),
)
@example({0: 7, 1: 8}, {0: 3.0, 1: 3.0}, 5, 1, random.Random(0))
def test_a_plan_has_every_row_once_and_ends_no_later_than_scattered_rows(
    groups: dict[int, int],
    lengths: dict[int, float],
    workers: int,
    slots: int,
    shuffle: random.Random,
) -> None:
    problems = [p for p, n in groups.items() for _ in range(n)]
    shuffle.shuffle(problems)
    shares = distribute_batch(problems, ExpectedLengths(lengths), workers, slots=slots)
    assert len(shares) == workers
    assert sorted(row for rows in shares for row in rows) == list(range(len(problems)))
    # Graham's bound of greedy scheduling, for requests that have no sibling; parts of a
    # group are coarser than rows
    shares = distribute_batch(problems, ExpectedLengths(lengths), workers)
    model = knowing(lengths)
    alone = [predict_rounds(p, model.expected, True, 0) for p in problems]
    work = [model.work(p, 0) for p in problems]
    bound = max(alone) + sum(work) / workers + max(work)
    assert makespan(shares, problems, lengths) <= 1.05 * bound


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_groups_stay_whole_where_there_are_enough_to_balance(workers: int) -> None:
    problems = (
        np.random.default_rng(workers)
        .permutation([p for p in range(8 * workers) for _ in range(8)])
        .tolist()
    )
    shares = distribute_batch(problems, ExpectedLengths(), workers)
    assert sum(len({problems[row] for row in rows}) for rows in shares) == 8 * workers
    scattered = [
        [int(row) for row in rows]
        for rows in np.array_split(np.arange(len(problems)), workers)
    ]
    assert makespan(shares, problems, {}) < 0.98 * makespan(scattered, problems, {})


@pytest.mark.parametrize("workers", [2, 4])
def test_requests_that_come_one_by_one_keep_groups_whole_too(workers: int) -> None:
    rng = np.random.default_rng(workers)
    lengths = {p: float(n) for p, n in enumerate(rng.lognormal(6, 0.5, 8 * workers))}
    arrivals = rng.permutation([p for p in lengths for _ in range(8)]).tolist()
    replicas = knowing(lengths, range(workers), group=8)
    for _ in range(2):  # in the second the work is known
        places = [(replicas.pick(p), p) for p in arrivals]
        # one may be divided to the rollout's good
        assert len(set(places)) <= len(lengths) + 1
        for replica, problem in places:
            replicas.remove_request(replica, problem)
    assert all(replicas.load(replica) == (0, 0) for replica in range(workers))


def test_a_group_is_spread_where_its_work_decides_the_end() -> None:
    # a long request's rounds decide
    assert [len(rows) for rows in distribute_batch([7] * 8, ExpectedLengths(), 2)] == [
        8,
        0,
    ]
    # two waves or one
    assert [
        len(rows) for rows in distribute_batch([7] * 8, ExpectedLengths(), 2, slots=4)
    ] == [
        4,
        4,
    ]
    lengths = {0: 4000.0, 1: 100.0, 2: 100.0}
    problems = [p for p in range(3) for _ in range(16)]
    shares = distribute_batch(problems, ExpectedLengths(lengths), 2, slots=8)
    assert [Counter(problems[row] for row in rows)[0] for rows in shares] == [8, 8]


def test_a_group_does_not_queue_behind_itself_while_replicas_are_idle() -> None:
    replicas = knowing(dict.fromkeys(range(100), 1000.0), range(8), group=3, slots=2)
    sent = [(replicas.pick(p), p) for p in range(40) for _ in range(3)]
    for replica, problem in sent:
        replicas.remove_request(replica, problem)
    # a burst that is smaller than the one before
    homes_of_one = [replicas.pick(99) for _ in range(3)]
    assert max(Counter(homes_of_one).values()) <= 2


def test_without_siblings_worth_anything_only_the_end_counts() -> None:
    lengths = {p: 100.0 for p in range(3)}
    shares = distribute_batch(
        [p for p in range(3) for _ in range(4)],
        ExpectedLengths(lengths),
        2,
        False,
        slots=1,
    )
    assert [len(rows) for rows in shares] == [6, 6]
    replicas = Replicas("ab", False)
    assert Counter(replicas.pick(5, group=1) for _ in range(6)) == {"a": 3, "b": 3}


@pytest.mark.parametrize(
    "group", [1, None], ids=["validation", "prompt_twice_in_a_batch"]
)
def test_more_samples_of_one_problem_make_no_group_larger(group: int | None) -> None:
    def homes(before: int) -> list[int]:
        """Replicas of two groups of 8, after so many samples of a problem were in
        flight.
        """
        replicas = Replicas(range(8), group=8, slots=4)
        for replica in [replicas.pick(0, group) for _ in range(before)]:
            replicas.remove_request(replica, 0)
        replicas.set_expected_work(float("inf"))  # as in a first burst
        return [replicas.pick(problem) for problem in (1, 2) for _ in range(8)]

    assert homes(16) == homes(0)


def test_unknown_problems_count_as_the_mean_of_the_known() -> None:
    assert ExpectedLengths({1: 100.0, 2: 300.0})[3] == 200.0
    (rows,) = distribute_batch([1, 3, 2], ExpectedLengths({1: 100.0, 2: 300.0}), 1)
    assert rows == [2, 1, 0]


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=60))
def test_what_ended_no_longer_counts_and_replicas_may_come_and_go(
    events: list[tuple[int, bool]],
) -> None:
    replicas = Replicas("ab", group=3)
    running: list[tuple[str, int]] = []
    for number, (problem, starts) in enumerate(events):
        if number == 20:
            replicas.add("c")
        if number == 40:
            replicas.remove("a")
        if starts or not running:
            running.append((replicas.pick(problem), problem))
            assert running[-1][0] in (
                "ab" if number < 20 else "abc" if number < 40 else "bc"
            )
        else:
            replicas.remove_request(*running.pop(problem % len(running)))
    for replica, problem in running:
        replicas.remove_request(replica, problem)
    there = "ab" if len(events) <= 20 else "abc" if len(events) <= 40 else "bc"
    assert all(replicas.load(replica) == (0, 0) for replica in there)


@pytest.mark.parametrize("seed", range(30))
def test_a_replica_that_comes_and_goes_at_once_changes_no_choice(seed: int) -> None:
    draw = random.Random(seed)
    workers = draw.randint(2, 4)
    group = draw.randint(1, 4)
    kept, counted_again = (
        Replicas[int | str](range(workers), group=group, slots=4) for _ in range(2)
    )
    kept.expected = counted_again.expected = ExpectedLengths(
        {p: float(draw.randint(1, 10_000)) for p in range(4)}
    )
    running: list[tuple[int | str, int]] = []
    for _ in range(60):
        counted_again.add("new")
        counted_again.remove("new")
        problem = draw.randrange(8)
        event = draw.choice(["pick", "pick", "stay", "done"])
        if event == "done" and running:
            ended = running.pop(problem % len(running))
            kept.remove_request(*ended)
            counted_again.remove_request(*ended)
        elif event == "stay":
            running.append((problem % workers, problem))
            kept.add_request(problem % workers, problem)
            counted_again.add_request(problem % workers, problem)
        else:
            running.append((kept.pick(problem), problem))
            assert counted_again.pick(problem) == running[-1][0]


def test_a_rows_way_into_a_plan_is_as_short_beside_many_workers() -> None:
    def calls(workers: int) -> int:
        profile = cProfile.Profile()
        profile.runcall(
            distribute_batch,
            [p for p in range(512) for _ in range(8)],
            ExpectedLengths({0: 50.0, 1: 2000.0}),
            workers,
        )
        return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]

    assert calls(256) < 1.5 * calls(16)


def test_a_trajectorys_next_turn_counts_where_it_is() -> None:
    replicas = Replicas("ab")
    first = replicas.pick(1)
    replicas.remove_request(first, 1)
    replicas.add_request(first, 1)
    assert replicas.pick(2) != first
    replicas.remove_request(first, 1)
    assert replicas.pick(3) == first


def test_replicas_whose_trajectories_wait_for_a_tool_are_not_lent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replicas = Replicas("ab", slots=2)
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    homes = [replicas.pick(trajectory) for trajectory in range(2)]
    assert homes == [*"ab"]
    replicas.remove_request("a", 0)
    assert replicas.lend(1) == ["a"]  # so far there is no trajectory of several turns
    replicas.give_back("a")
    for _ in range(2):
        replicas.add_request("a", 0)
        replicas.remove_request("a", 0)
        now += tuning.REPLICA_QUIET_S / 2
        assert replicas.lend(1) == []
    now += tuning.REPLICA_QUIET_S / 2
    assert replicas.lend(3) == ["a", "a"]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.data())
def test_next_turns_follow_their_own_texts_and_nothing_else_does(
    responses: list[int], data: Any
) -> None:
    """The samples of a problem are on a worker each; some of their responses are equal,
    and some samples have ended.
    """
    prompt = np.array([7, 7])
    turns = [
        Turn(5, 2, np.append(prompt, [response]), worker)
        for worker, response in enumerate(responses)
    ]
    goes_on = sorted(data.draw(st.sets(st.integers(0, len(responses) - 1))))
    prompts = [np.append(turns[i].text, [9, i]) for i in goes_on]
    workers = match_next_turns(turns, [5] * len(goes_on), prompts)
    assert [responses[workers[row]] for row in range(len(goes_on))] == [
        responses[i] for i in goes_on
    ]
    assert len(set(workers.values())) == len(goes_on)
    # the host has changed the responses
    edited = [np.array([7, 7, 50, i]) for i in goes_on]
    assert len(
        set(match_next_turns(turns, [5] * len(goes_on), edited).values())
    ) == len(goes_on)
    begins_anew = match_next_turns(turns, [5], [prompt])
    of_another = match_next_turns(turns, [6], prompts[:1] or [prompt])
    assert (
        begins_anew
        == of_another
        == match_next_turns(turns, [5], [np.array([7, 8, responses[0], 9])])
        == {}
    )


def test_rows_that_stay_count_where_they_are() -> None:
    shares = distribute_batch(
        [1] * 4 + [2], ExpectedLengths(), 2, begun={0: 1, 1: 0, 3: 1}
    )
    assert {0, 3} <= set(shares[1]) and 1 in shares[0]
    assert sorted(row for rows in shares for row in rows) == list(range(5))
    assert (
        4
        in distribute_batch(
            [1] * 4 + [2], ExpectedLengths(), 2, begun=dict.fromkeys(range(4), 0)
        )[1]
    )


# Which starts first


def end_of(
    rows: Sequence[int], problems: Sequence[int], lengths: dict[int, float], slots: int
) -> float:
    """Rounds until the rows have ended, in their order on so many slots; finished
    siblings count for those that start later.
    """
    expected = ExpectedLengths(lengths)
    ended = defaultdict[int, list[float]](list)
    free = [0.0] * slots
    for row in rows:
        start = heapq.heappop(free)
        problem = problems[row]
        finished = sum(end <= start for end in ended[problem])
        growing = len(ended[problem]) - finished
        end = start + predict_rounds(problem, expected, True, growing, finished)
        ended[problem].append(end)
        heapq.heappush(free, end)
    return max(free)


@given(GROUPS, LENGTHS, st.integers(1, 3))
def test_a_batch_that_fits_in_one_wave_starts_longest_first(
    groups: dict[int, int], lengths: dict[int, float], workers: int
) -> None:
    problems = [p for p, n in groups.items() for _ in range(n)]
    shares = distribute_batch(
        problems, ExpectedLengths(lengths), workers, slots=len(problems)
    )
    expected = ExpectedLengths(lengths)
    for rows in shares:
        tokens = [expected[problems[row]] for row in rows]
        assert tokens == sorted(tokens, reverse=True)
        in_turn = [
            problem for problem, _ in itertools.groupby(problems[row] for row in rows)
        ]
        # nobody leads, among problems of equal length neither
        assert len(in_turn) == len(set(in_turn))


def test_one_sample_of_each_new_problem_leads() -> None:
    problems = [p for p in range(6) for _ in range(4)]
    (rows,) = distribute_batch(problems, ExpectedLengths(), 1, slots=6)
    assert [problems[row] for row in rows[:6]] == list(range(6))
    (rows_off,) = distribute_batch(problems, ExpectedLengths(), 1, False, slots=6)
    assert rows_off == list(range(24))
    assert end_of(rows, problems, {}, 6) < end_of(rows_off, problems, {}, 6)


def test_leaders_do_not_hold_back_much_longer_problems() -> None:
    order = StartOrder(group=8)
    order.refresh(ExpectedLengths({1: 1000.0, 2: 700.0, 3: 100.0}), version=0)
    leader = order.priority(1)
    follower = order.priority(1)
    assert leader < follower < order.priority(3)
    # with history, a leader saves the others little
    assert follower < order.priority(2)


def test_what_has_begun_and_what_is_older_goes_first() -> None:
    order = StartOrder(group=4)
    lead = order.priority(1)
    follow = order.priority(1)
    assert order.priority(1, begun=True) == lead < follow
    order.refresh(ExpectedLengths({2: 1e5}), version=1)
    assert follow < order.priority(2)


def test_the_block_says_who_leads() -> None:
    def made(**block: Any) -> StartOrder | None:
        return start_order(parse(block), group=4)

    on = made()
    assert on is not None and on.priority(1) < on.priority(1)
    # which read no siblings
    for other in (
        made(drafter="ngram"),
        made(history={"scope": "request"}),
    ):
        assert other is not None and other.priority(1) == other.priority(1)
    assert made(routing="host") is None


@pytest.mark.parametrize(("siblings", "group"), [(True, 64), (False, 8)])
def test_a_lone_group_is_spread_once_a_burst_has_shown_that_no_others_come(
    siblings: bool, group: int
) -> None:
    replicas = Replicas(range(2), siblings=siblings, group=group)
    largest = []
    for _ in range(3):
        places = [replicas.pick(1) for _ in range(group)]
        largest.append(max(places.count(replica) for replica in range(2)))
        for replica in places:
            replicas.remove_request(replica, 1)
    assert largest == [group, group // 2, group // 2]
