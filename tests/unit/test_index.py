"""What a caller of the suffix index may rely on."""

from __future__ import annotations

import itertools
import resource
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from own_history import OwnHistory

from das_adapter.core import tuning
from das_adapter.core.index import SuffixIndex
from das_adapter.core.index.values import Shrunk

POEM = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]


def drafted(index: SuffixIndex, handle: int, budget: int = 8) -> list[int]:
    return index.draft([handle], [budget], 0.0)[0][0].tolist()


def sealed(*trajectories: list[int]) -> OwnHistory:
    index = OwnHistory()
    for ids in trajectories:
        index.add(1, ids, 0)
    index.seal()
    return index


# What is drafted


def test_an_earlier_response_is_drafted_from_its_first_token() -> None:
    index = sealed(POEM)
    assert drafted(index, index.open(1, [3, 4])) == POEM[:8]


def test_a_repeated_sequence_is_drafted_again() -> None:
    index = SuffixIndex()
    handle = index.open(1, [], prefix=POEM + POEM[:3])
    assert drafted(index, handle, 5) == POEM[3:8]


def test_a_loop_is_drafted_as_far_as_it_was_written() -> None:
    index = SuffixIndex()
    handle = index.open(1, [], prefix=[5, 6, 7] * 10)
    assert drafted(index, handle, 12) == [5, 6, 7] * 4


def test_the_prompt_is_drafted_from() -> None:
    index = SuffixIndex()
    handle = index.open(1, POEM, prefix=[99, 13, 14])
    assert drafted(index, handle, 4) == [15, 16, 17, 18]


def test_a_match_may_begin_in_the_prompt_and_end_in_the_response() -> None:
    index = SuffixIndex()
    handle = index.open(1, [21, 22, 23, 24, 30, 22, 23, 25, 40, 21, 22], prefix=[23])
    assert drafted(index, handle, 1) == [24]


def test_the_longest_match_decides() -> None:
    index = sealed([1, 2, 3, 4, 50], [9, 4, 60], [8, 4, 60], [7, 4, 60])
    assert drafted(index, index.open(1, [], prefix=[2, 3, 4]), 1) == [50]


def test_the_majority_decides_among_equal_matches() -> None:
    index = sealed([3, 4, 50], [3, 4, 60], [3, 4, 50])
    assert drafted(index, index.open(1, [], prefix=[3, 4]), 1) == [50]


def test_newer_visits_count_more_however_many_versions_lie_between() -> None:
    index = OwnHistory()
    for version, token in ((0, 50), (0, 50), (500, 60), (501, 60)):
        index.add(1, [3, 4, token], version)
        index.add(2, [3, 4, 50], version)
    index.seal()
    # 256 + 235 to 2 * 215
    assert drafted(index, index.open(1, [], prefix=[3, 4]), 1) == [60]
    index.add(1, [3, 4, 50], 0)
    index.add(1, [3, 4, 50], 0)
    index.seal()
    assert drafted(index, index.open(1, [], prefix=[3, 4]), 1) == [50]


def test_the_age_of_the_history_is_that_of_its_newest_text() -> None:
    index = OwnHistory()
    handle = index.open(1, [])
    assert index.age(handle) is None
    for problem, version in ((1, 3), (1, 5), (2, 9)):
        index.add(problem, POEM, version)
    index.seal()
    assert [index.age(index.open(problem, [])) for problem in (1, 2, 3)] == [4, 0, None]
    index.close(handle)
    with pytest.raises(ValueError, match="not open"):
        index.age(handle)


def test_one_differing_token_does_not_lose_the_place() -> None:
    index = sealed(POEM)
    # 99 was never followed by anything
    handle = index.open(1, [], prefix=[11, 12, 13, 99])
    assert drafted(index, handle, 3) == [15, 16, 17]


def test_a_live_sibling_is_drafted_from_as_it_grows() -> None:
    index = SuffixIndex()
    first = index.open(1, [3])
    second = index.open(1, [3])
    assert drafted(index, second) == []
    index.extend(first, [11, 12, 13])
    index.extend(second, [11])
    assert drafted(index, second) == [12, 13]
    index.extend(first, [14])
    assert drafted(index, second) == [12, 13, 14]


def test_siblings_do_not_draft_from_each_others_prompts() -> None:
    index = SuffixIndex()
    index.open(1, POEM)
    handle = index.open(1, [], prefix=[13, 14])
    assert drafted(index, handle) == []


@pytest.mark.parametrize("keep", [True, False])
def test_a_closed_request_is_drafted_from_only_if_kept(keep: bool) -> None:
    index = SuffixIndex()
    first = index.open(1, [])
    second = index.open(1, [])
    index.extend(first, POEM)
    index.close(first, keep=keep)
    assert drafted(index, second, 20) == (POEM if keep else [])


def test_clear_live_forgets_the_closed_and_keeps_the_open() -> None:
    index = SuffixIndex()
    closed, still_open, third = (index.open(1, []) for _ in range(3))
    index.extend(closed, [1, 2, 3])
    index.extend(still_open, [4, 5, 6])
    index.close(closed)
    index.clear_live()
    assert drafted(index, third, 20) == [4, 5, 6]
    index.extend(still_open, [7])
    assert drafted(index, third, 20) == [4, 5, 6, 7]
    assert drafted(index, index.open(1, [], prefix=[1, 2]), 20) == []


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 3), max_size=20), min_size=1, max_size=6),
    st.lists(st.lists(st.integers(10, 13), max_size=20), min_size=1, max_size=6),
)
def test_another_problems_text_is_never_drafted(
    low: list[list[int]], high: list[list[int]]
) -> None:
    index = OwnHistory()
    for ids_low, ids_high in zip(low, high, strict=False):
        index.add(1, ids_low, 0)
        index.add(2, ids_high, 0)
    index.seal()
    requests = [index.open(1, low[0], low[-1]), index.open(2, high[0], high[-1])]
    in_low, in_high = index.draft(requests, [30, 30], 0.0)[0]
    assert (in_low < 10).all()
    assert (in_high >= 10).all()


def test_staged_trajectories_are_drafted_from_after_the_seal() -> None:
    index = OwnHistory()
    index.add(1, POEM, 0)
    handle = index.open(1, [])
    assert drafted(index, handle) == []
    index.seal()
    assert drafted(index, handle) == POEM[:8]


# Budgets and chances


@settings(max_examples=80)
@given(
    st.lists(
        st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=8
    ),
    st.lists(st.integers(-1, 40), min_size=3, max_size=3),
    st.sampled_from([0.0, 0.05, 0.3]),
)
def test_budgets_are_kept_and_chances_fall(
    history: list[list[int]], budgets: list[int], min_chance: float
) -> None:
    index = OwnHistory()
    for ids in history:
        index.add(1, ids, 0)
    index.seal()
    handles = [
        index.open(1, history[0], ids[: len(ids) // 2]) for ids in (history * 3)[:3]
    ]
    none = np.zeros(3, dtype=np.int64)
    text = np.zeros((1, 0), np.int32)
    looking = index.draft_rows(
        np.array(handles), text, none, none, none, np.array(budgets), min_chance
    )
    tokens, chances, offsets = looking.result()
    assert (tokens.dtype, chances.dtype, offsets.dtype) == (
        np.int32,
        np.float32,
        np.int64,
    )
    assert offsets[0] == 0 and offsets[-1] == len(tokens) == len(chances)
    for budget, a, b in zip(budgets, offsets, offsets[1:], strict=False):
        assert 0 <= b - a <= max(budget, 0)
        assert (np.diff(chances[a:b]) <= 0).all()
        assert (
            (chances[a:b] > 0)
            & (chances[a:b] <= 1)
            & (chances[a:b] >= np.float32(min_chance))
        ).all()


@pytest.mark.parametrize(
    ("right", "low", "high"), [(True, 0.9, 1.0), (False, 0.0, 0.1)]
)
def test_chances_follow_what_requests_went_on_with(
    right: bool, low: float, high: float
) -> None:
    index = sealed(POEM)
    for _ in range(600):
        handle = index.open(1, [])
        index.draft([handle], [1], 0.0)
        index.extend(handle, [11 if right else 12])
        index.close(handle, keep=False)
    chance = index.draft([index.open(1, [])], [1], 0.0)[1][0][0]
    assert low <= chance <= high


def test_what_a_source_is_worth_is_learned_of_each() -> None:
    """What others wrote turns out right here; that says nothing of what a request
    repeats of itself.
    """

    def chance(index: SuffixIndex, problem: int, written: list[int]) -> float:
        return float(index.draft([index.open(problem, [], written)], [1], 0.0)[1][0][0])

    fresh = sealed(POEM)
    learned = sealed(POEM)
    for _ in range(100):
        handle = learned.open(1, [])
        learned.draft([handle], [1], 0.0)
        learned.extend(handle, POEM[:1])
        learned.close(handle, keep=False)
    # a longer match than any so far
    assert chance(learned, 1, POEM[:6]) > chance(fresh, 1, POEM[:6]) + 0.1
    assert chance(learned, 2, [*POEM[:6], *POEM[:5]]) == chance(
        fresh, 2, [*POEM[:6], *POEM[:5]]
    )


# What is kept


def test_the_window_counts_a_problem_s_own_visits() -> None:
    index = OwnHistory()
    for version in (0, 100, 200):
        index.add(1, [version, 1, 2], version)
        index.add(1, [version, 3], version)
        index.add(2, POEM, version + 1)
        index.seal(window=2)
    assert index.tokens == 2 * 5 + 2 * len(POEM)
    assert drafted(index, index.open(1, [], prefix=[99, 0])) == []
    assert drafted(index, index.open(1, [], prefix=[99, 100]))[0] in (1, 3)
    for version in range(300, 320):  # a problem that does not come back loses nothing
        index.add(2, POEM, version)
        index.seal(window=2)
    assert drafted(index, index.open(1, [], prefix=[99, 100]))[0] in (1, 3)


def test_what_arrives_late_counts_as_its_own_visit() -> None:
    index = OwnHistory()
    for version in (5, 9, 7, 5, 3, 9):
        index.add(1, [version, 1, 2], version)
        index.seal(window=2)
    assert index.tokens == 3 * 3  # of version 7 once, of 9 twice


def rollouts(problem: int, samples: int = 8, length: int = 160) -> list[list[int]]:
    """Rollouts of which half is passages that most have, each somewhere else, and half
    is their own.
    """
    rng = np.random.default_rng(problem)
    passages = rng.integers(1000, 2000, (length // 40, 20))
    own = rng.integers(2000, 4000, (samples, length // 40, 20))
    texts = [
        [p for pair in zip(rng.permutation(passages), mine, strict=True) for p in pair]
        for mine in own
    ]
    return [np.concatenate(text).tolist() for text in texts]


def visited(index: OwnHistory, problems: range, version: int = 0) -> None:
    for problem in problems:
        for ids in rollouts(problem):
            index.add(problem, ids, version)
        index.seal()


def thinned(index: OwnHistory, max_bytes: int) -> Shrunk:
    shrunk = index.store.shrink(max_bytes)
    index.refresh()
    return shrunk


def test_thinned_out_a_problem_keeps_what_its_rollouts_share() -> None:
    index = OwnHistory()
    visited(index, range(1, 2))
    tokens = index.tokens
    max_bytes = index.nbytes // 3
    shrunk = thinned(index, max_bytes)
    assert (shrunk.thinned, shrunk.dropped, shrunk.tokens) == (
        1,
        0,
        tokens - index.tokens,
    )
    assert max_bytes // 2 < index.nbytes <= max_bytes
    text = rollouts(1)[0]
    right = []
    for i in range(10, len(text) - 1):
        draft = drafted(index, index.open(1, [], prefix=text[:i]), 1)
        right.append(draft == [text[i]])
    shared = np.less(text, 2000)
    # not where a passage begins
    assert np.mean(np.array(right)[(shared[9:-2] & shared[10:-1])]) > 0.95


def test_a_stretch_is_not_taken_for_a_beginning() -> None:
    index = OwnHistory()
    visited(index, range(1, 2))
    index.shrink(index.nbytes // 4)
    beginnings = {ids[0] for ids in rollouts(1)}
    handle = index.open(1, [])
    assert set(drafted(index, handle, 1)) <= beginnings


def test_above_the_budget_every_problem_keeps_something() -> None:
    index = OwnHistory()
    visited(index, range(20), version=3)
    for share in (4, 2):
        index.shrink(index.nbytes // share)
        assert index.problems == 20
        for problem in range(20):
            handle = index.open(problem, [])
            assert index.age(handle) == 0
            index.close(handle, keep=False)


def test_a_step_more_than_the_budget_costs_about_a_step() -> None:
    index = OwnHistory()
    visited(index, range(10))
    budget = index.nbytes
    tokens = index.tokens
    visited(index, range(10, 11), version=1)
    index.shrink(budget)
    assert budget * 3 / 4 < index.nbytes <= budget
    assert index.tokens > 0.75 * tokens
    visited(index, range(11, 12), version=2)
    before = index.tokens
    assert thinned(index, budget).thinned <= 3  # not all of them again
    assert index.tokens > 0.75 * before


def test_where_not_all_can_keep_something_those_not_seen_for_longest_go() -> None:
    index = OwnHistory()
    for version, problem in enumerate([4, 1, 3, 2, 4]):
        visited(index, range(problem, problem + 1), version)
    max_bytes = 600 + 2 * tuning.CPP_PROBLEM_BYTES
    shrunk = thinned(index, max_bytes)
    assert (shrunk.thinned, shrunk.dropped) == (2, 2)
    assert index.nbytes <= max_bytes
    assert [
        index.age(index.open(problem, [])) is not None for problem in (1, 2, 3, 4)
    ] == [False, True, False, True]
    assert thinned(index, 0).dropped == 2
    assert (index.tokens, index.nbytes, index.problems) == (0, 0, 0)


def test_sealed_text_takes_at_most_8_bytes_per_token() -> None:
    rng = np.random.default_rng(0)
    index = OwnHistory()
    for problem in range(10):
        for _ in range(8):
            index.add(problem, rng.integers(0, 1000, 200), 0)
    index.seal()
    assert index.tokens == 16000
    assert index.nbytes <= 8 * index.tokens


# Odd input


def test_empty_things_are_fine() -> None:
    index = OwnHistory()
    index.add(1, [], 0)
    index.seal()
    index.seal()
    assert (index.tokens, index.problems, index.nbytes, *index.store.shrink(0)) == (
        0,
    ) * 7
    handle = index.open(1, [])
    index.extend(handle, [])
    assert drafted(index, handle) == []
    assert drafted(index, index.open(2, [5, 6])) == []
    assert index.draft([handle], [0])[0][0].tolist() == []
    assert index.draft([], []) == ([], [])
    index.close(handle)
    index.clear_live()


def test_an_unknown_handle_is_named() -> None:
    index = SuffixIndex()
    handle = index.open(1, [])
    index.close(handle)
    calls = [
        lambda: index.extend(handle, [1]),
        lambda: index.draft([handle], [1]),
        lambda: index.close(handle),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"request handle {handle}: not open"):
            call()


def test_a_refused_batch_changes_nothing() -> None:
    index = SuffixIndex()
    first = index.open(1, [])
    second = index.open(1, [])
    texts = np.array([[1, 2, 3], [4, -7, 6]], np.int32)

    def draft_rows(*given: list[int]) -> None:
        handles, rows, *others = map(np.array, given)
        index.draft_rows(handles, texts, rows, *others, 0.0)

    with pytest.raises(ValueError, match="not open"):
        draft_rows([first, 99], [0, 0], [0, 0], [1, 1], [4, 4])
    with pytest.raises(ValueError, match="-7"):
        draft_rows([first, second], [0, 1], [0, 0], [3, 2], [4, 4])
    with pytest.raises(ValueError, match="budgets"):
        draft_rows([first, second], [0, 0], [0, 0], [1, 1], [4])
    stretches = [
        [[0], [0], [1]],
        [[0, 2], [0, 0], [1, 1]],
        [[0, 1], [0, 2], [1, 1]],
        [[0, -1], [0, 0], [1, 1]],
        [[0, 1], [-1, 0], [1, 1]],
        [[0, 1], [0, 0], [4, 1]],
    ]
    for rows, begins, ends in stretches:
        with pytest.raises(ValueError, match="rows, begins, ends"):
            draft_rows([first, second], rows, begins, ends, [4, 4])
    assert drafted(index, second) == []


@pytest.mark.parametrize("requests", [3, 40])
def test_drafts_of_a_thread_are_those_of_the_index(requests: int) -> None:
    rng = np.random.default_rng(0)
    texts = rng.integers(0, 9, (50, 200)).astype(np.int32)
    lengths = np.zeros(requests, dtype=np.int64)
    one = SuffixIndex()
    other = SuffixIndex()
    handles = [
        np.array([index.open(i // 2, [1, 2]) for i in range(requests)])
        for index in (one, other)
    ]
    rows = rng.permutation(50)[:requests]
    budgets = rng.integers(0, 17, requests)
    found = 0
    while lengths.max() < 180:
        new = rng.integers(0, 8, requests)
        looking = one.draft_rows(
            handles[0], texts, rows, lengths, lengths + new, budgets, 0.0
        )
        for handle, row, at, count in zip(handles[1], rows, lengths, new, strict=True):
            other.extend(handle, texts[row, at : at + count])
        lengths += new
        ours = looking.result()
        theirs = other.draft(handles[1], budgets, 0.0)
        assert all(
            np.array_equal(a, np.concatenate(b))
            for a, b in zip(ours, theirs, strict=False)
        )
        assert np.diff(ours[2]).tolist() == [*map(len, theirs[0])]
        found += len(ours[0])
    assert found > 100
    drafts = [[9]] * 50
    looking.put(rows, np.full(requests, 2), 5, drafts)
    for row, begin, end in zip(rows, ours[2], ours[2][1:], strict=False):
        assert drafts.pop(row) == [
            min(token, 5) for token in ours[0][begin : min(end, begin + 2)].tolist()
        ]
        drafts.insert(row, [9])
    assert drafts == [[9]] * 50


@pytest.mark.parametrize("requests", [3, 40])
def test_what_is_called_after_a_drafting_has_begun_comes_after_it(
    requests: int,
) -> None:
    index = sealed(POEM)
    text = np.array([POEM], dtype=np.int32)
    handles = np.array([index.open(1, []) for _ in range(requests)])
    zeros = np.zeros(requests, dtype=np.int64)
    budgets = np.full(requests, 4)
    looking = index.draft_rows(handles, text, zeros, zeros, zeros + 3, budgets, 0.0)
    index.extend(handles[0], [99])
    index.close(handles[1], keep=False)
    tokens, _, offsets = looking.result()
    assert [tokens[a:b].tolist() for a, b in itertools.pairwise(offsets)] == [
        POEM[3:7]
    ] * requests
    with pytest.raises(ValueError, match="not open"):
        index.draft_rows(handles, text, zeros, zeros, zeros, budgets)
    assert drafted(index, handles[0]) != POEM[3:]  # it was extended
    assert drafted(index, handles[2]) == POEM[3:]


FEW_THREADS = """
import resource
from pathlib import Path
import numpy as np
from das_adapter.core.index import SuffixIndex

index = SuffixIndex()
handles, zeros = np.array([index.open(1, []) for _ in range(8)]), np.zeros(8, dtype=np.int64)
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**29,) * 2)
found = index.draft_rows(handles, np.array([[3, 4, 3]], np.int32), zeros, zeros, zeros + 3, zeros + 1, 0.0)
print(found.result()[0].tolist())
"""


def test_where_the_system_gives_no_thread_the_work_is_done_without() -> None:
    """A thread's stack is 1 GiB there, and half of it fits into the address space."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_STACK, (2**30,) * 2)

    arguments = [sys.executable, "-c", FEW_THREADS]
    done = subprocess.run(
        arguments, capture_output=True, text=True, check=False, preexec_fn=limit
    )
    assert (done.returncode, done.stdout) == (0, f"{[4] * 8}\n"), done.stderr


@pytest.mark.parametrize("tokens", [[1, -2], [2**23], np.array([3, -1], np.int32)])
def test_what_is_no_token_id_is_refused(tokens: list[int]) -> None:
    index = OwnHistory()
    with pytest.raises(ValueError, match="token id"):
        index.add(1, tokens, 0)
    with pytest.raises(ValueError, match="token id"):
        index.open(1, tokens)
    with pytest.raises(ValueError, match="token id"):
        index.open(1, [], prefix=tokens)
    with pytest.raises(ValueError, match="token id"):
        index.extend(index.open(1, []), tokens)


@pytest.mark.parametrize("problem", [-1, 2**64])
def test_a_problem_id_is_64_bits(problem: int) -> None:
    with pytest.raises(TypeError, match="incompatible"):
        OwnHistory().add(problem, [1], 0)
    with pytest.raises(TypeError, match="incompatible"):
        OwnHistory().open(problem, [1])


def test_a_version_has_32_bits() -> None:
    index = OwnHistory()
    index.add(1, POEM, -(2**31))
    with pytest.raises(ValueError, match=f"version: found {2**31}, allowed: 32 bits"):
        index.add(1, POEM, 2**31)


def test_budgets_and_handles_must_pair_up() -> None:
    index = SuffixIndex()
    with pytest.raises(ValueError, match="budgets"):
        index.draft([index.open(1, [])], [1, 2])
