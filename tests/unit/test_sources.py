"""Choosing between the history's draft, the policy's copy and none: against brute force, and at the edges."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from das_adapter.core.sources import Acceptance, Line, Probe, choose


def pace(
    counts: tuple[int, ...], expected: np.ndarray, drafted: np.ndarray, a: Acceptance, policy: Line, copy: Line
) -> float:
    """Tokens per second if the copy drafts these counts."""
    tokens = len(counts) + sum(a.expected(c) if c else e for c, e in zip(counts, expected, strict=True))
    verified = len(counts) + sum(c or d for c, d in zip(counts, drafted, strict=True))
    seconds = policy(verified) + sum(copy(sum(c > step for c in counts)) for step in range(max(counts)))
    return float(tokens / seconds)


@given(
    st.lists(st.tuples(st.floats(0, 4), st.integers(0, 5), st.integers(0, 4)), min_size=1, max_size=3),
    st.floats(0.05, 0.99), st.floats(0.01, 1.2), st.floats(0.0, 0.3),
)  # fmt: skip
def test_no_common_length_is_faster(rows: list[tuple[float, int, int]], rate: float, cost: float, slope: float) -> None:
    expected = np.array([min(e, d) for e, d, _ in rows])
    drafted, room = np.array([d for _, d, _ in rows]), np.array([r for *_, r in rows])
    a, policy, copy = Acceptance(rate * 100, 100), Line(1.0, slope), Line(cost)
    counts = choose(expected, drafted, room, a, policy, copy, range(1, 5))
    assert (counts <= room).all()
    chosen = pace(tuple(counts), expected, drafted, a, policy, copy)
    nobody = pace((0,) * len(rows), expected, drafted, a, policy, copy)
    assert chosen >= nobody * (1 - 1e-9)
    for length in range(1, 5):
        own = np.minimum(room, length)
        own = np.where(a.expected(own) > expected, own, 0)
        assert chosen >= pace(tuple(own), expected, drafted, a, policy, copy) * (1 - 1e-9)


def test_one_request_alone_gets_the_best_length_of_all() -> None:
    for rate, cost in itertools.product((0.3, 0.7, 0.95), (0.05, 0.3, 0.9)):
        a, policy, copy = Acceptance(rate * 100, 100), Line(1.0, 0.02), Line(cost)
        none = np.zeros(1)
        counts = choose(none, none.astype(int), np.array([8]), a, policy, copy, range(1, 9))
        paces = [pace((k,), none, none.astype(int), a, policy, copy) for k in range(9)]
        assert counts[0] == int(np.argmax(paces))


def test_a_sure_match_beats_the_copy_and_no_match_leaves_it_to_the_copy() -> None:
    a, policy, copy = Acceptance(90, 100), Line(1.0, 0.01), Line(0.05)
    counts = choose(np.array([7.5, 0.0]), np.array([8, 0]), np.array([20, 20]), a, policy, copy, range(1, 6))
    assert counts[0] == 0
    assert counts[1] > 0


def test_what_the_history_brings_elsewhere_is_not_given_away_for_less() -> None:
    """A step without a match, in a text whose other steps get 9 tokens each: six tokens for three times the time."""
    a, policy, copy, none = Acceptance(99, 100), Line(1.0), Line(0.4), np.zeros(1)
    asked = none, none.astype(int), np.array([9]), a, policy, copy, [5]
    assert choose(*asked, pace=1.2).tolist() == [5]
    assert choose(*asked, pace=9.0).tolist() == [0]


def test_a_copy_as_slow_as_the_policy_drafts_nothing() -> None:
    a, none = Acceptance(50, 100), np.zeros(4)
    counts = choose(none, none.astype(int), np.full(4, 9), a, Line(1.0), Line(1.0), range(1, 6))
    assert not counts.any()


def test_where_replicas_agreed_on_a_length_it_is_that_or_nothing() -> None:
    none, room = np.zeros(3), np.array([9, 9, 1])
    for rate, wanted in ((99, [7, 7, 1]), (5, [0, 0, 0])):
        counts = choose(none, none.astype(int), room, Acceptance(rate, 100), Line(1.0), Line(0.4), [7])
        assert counts.tolist() == wanted


def test_a_line_is_learned_and_outliers_leave_it_alone() -> None:
    line = Line(1.0)
    for i in range(200):
        line.observe(i % 20 + 1, 0.5 + 0.1 * (i % 20 + 1))
    line.observe(3, 100.0)
    assert line(5) == pytest.approx(1.0, abs=0.15)
    assert line(20) == pytest.approx(2.5, abs=0.25)


def test_a_line_seen_at_one_place_only_stays_finite() -> None:
    line = Line(1.0, 0.5)
    for _ in range(50):
        line.observe(4, 2.0)
    assert line(4) == pytest.approx(2.0, rel=0.05)
    assert 0 <= line.base <= 2.0


def test_acceptance_counts_only_what_was_tried() -> None:
    a = Acceptance(0.0, 0.0, fade=1.0)
    a.observe(5, 5)
    a.observe(5, 2)
    assert (a.accepted, a.tried) == (7, 8)
    assert a.expected(1) == pytest.approx(7 / 8)
    assert a.expected(0) == 0
    assert Acceptance(10, 10).expected(6) == pytest.approx(6, rel=1e-6)


def test_a_weight_sync_keeps_the_rate_and_lets_it_change_soon() -> None:
    a = Acceptance()
    for _ in range(500):
        a.observe(4, 4)
    before = a.rate
    a.forget()
    assert a.rate == pytest.approx(before) and a.tried <= Acceptance.tried
    for _ in range(20):
        a.observe(4, 0)
    assert a.rate < 0.6


def test_what_does_not_seem_to_pay_is_looked_at_ever_more_rarely_until_the_batch_shrinks() -> None:
    probe = Probe()
    due = [step for step in range(1200) if probe.due(16, False)]
    assert np.diff(due).tolist() == [16, 32, 64, 128, 256, 256, 256]
    assert [step for step in range(20) if probe.due(8, False)] == [7]
    assert not any(probe.due(8, True) for _ in range(100))
