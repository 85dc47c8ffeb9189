"""Budgets against brute force: DAS's optimum for a rollout, the split of one step, and who decides the makespan."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from das_adapter.core.budget import accepted, allocate, class_budgets, drafts_needed, makespan_weights, plan
from das_adapter.core.latency import StepModel
from das_adapter.core.length import LengthClass


def long_tail(count: int = 64) -> np.ndarray:
    return np.minimum(np.random.default_rng(0).lognormal(8.0, 0.8, count), 16000.0)


def simulate(length: float, per_round: float, alpha: float, k: float) -> int:
    """Rounds of a request that drafts `per_round` tokens a round and accepts as the curve says, token by token."""
    rounds, written, drafted, got = 0, 0.0, 0.0, 0.0
    while written < length - 1e-9:
        drafted += per_round
        total = float(accepted(np.array([drafted]), np.array([length]), np.array([alpha]), np.array([k]))[0])
        written += 1.0 + total - got
        got, rounds = total, rounds + 1
    return rounds


@pytest.mark.parametrize(("length", "rounds", "alpha", "k"), [(16000, 4805, 1.0, 0.7), (900, 500, 0.6, 0.5),
                                                              (3000, 2999, 0.9, 0.9)])  # fmt: skip
def test_the_budget_reaches_the_rounds_it_promises(length: int, rounds: int, alpha: float, k: float) -> None:
    arrays = [np.array([float(x)]) for x in (length, alpha, k)]
    drafts = drafts_needed(rounds, *arrays)
    assert length - accepted(drafts, *arrays)[0] == pytest.approx(rounds)
    assert simulate(length, float(drafts[0]) / rounds, alpha, k) == pytest.approx(rounds, abs=1.0)


def test_no_budget_for_who_ends_in_time_and_no_end_to_it_where_the_ceiling_forbids() -> None:
    arrays = np.array([100.0, 1000.0]), np.array([1.0, 1.0]), np.array([0.7, 0.7])
    assert drafts_needed(300.5, *arrays)[0] == 0.0
    assert np.isfinite(drafts_needed(300.5, *arrays)[1])
    assert np.isinf(drafts_needed(300.0, *arrays)[1])  # feasible only above 1000 · (1 - 0.7)


@pytest.mark.parametrize("ratio", [0.0005, 0.002, 0.01, 0.05, 0.2])
def test_the_plan_is_the_best_of_all_round_counts(ratio: float) -> None:
    lengths = long_tail()
    alpha, k = np.full(64, 1.0), np.full(64, 0.7)
    found = plan(lengths, alpha, k, 1.0, ratio)

    def cost(rounds: float) -> float:
        return rounds + ratio * float(np.sum(np.minimum(lengths, rounds) + drafts_needed(rounds, lengths, alpha, k)))

    grid = np.linspace(float(np.max(lengths * 0.3)) + 1e-3, float(lengths.max()), 20000)
    assert cost(found.rounds) <= min(map(cost, grid)) * (1 + 1e-6)
    assert np.all(found.drafts[lengths <= found.rounds] == 0.0)


def test_dearer_tokens_mean_shorter_drafts_for_fewer_requests() -> None:
    lengths = long_tail()
    alpha, k = np.full(64, 1.0), np.full(64, 0.7)
    plans = [plan(lengths, alpha, k, 1.0, ratio) for ratio in (0.0005, 0.002, 0.01, 0.05, 0.2)]
    per_round = [p.drafts[lengths.argmax()] / p.rounds for p in plans]
    share = [np.mean(p.drafts > 0) for p in plans]
    assert per_round == sorted(per_round, reverse=True)
    assert share == sorted(share, reverse=True)
    assert per_round[0] > 15
    assert per_round[-1] < 1.5


def test_classes_get_none_a_third_and_all() -> None:
    classes = np.array([LengthClass.LONG, LengthClass.SHORT, LengthClass.MEDIUM])
    assert class_budgets(classes, 24).tolist() == [24, 0, 8]


MODELS = [
    StepModel(base=10.0, token=0.3),
    StepModel(base=10.0, token=0.0, bend=0.5, knee=6),
    StepModel(base=10.0, token=0.6, bend=-0.5, knee=5, draft=0.2),  # dear at first, cheap beyond
]


@settings(max_examples=150)
@given(
    st.lists(st.lists(st.floats(0.015625, 1.0, width=32), max_size=3), min_size=1, max_size=4),
    st.lists(st.floats(0.0, 2.0), min_size=4, max_size=4),
    st.sampled_from(MODELS),
)
def test_the_split_of_a_step_is_the_best_of_all_splits(
    chances: list[list[float]], worth: list[float], model: StepModel
) -> None:
    drafts = [sorted(c, reverse=True) for c in chances]
    value = np.array(worth[: len(drafts)])
    requests = len(drafts)

    def gain(keep: tuple[int, ...]) -> float:
        total = requests + sum(keep)
        extra = model.step(total, requests, sum(keep) > 0) - model.step(requests, requests, False)
        return sum(v * sum(d[:m]) for v, d, m in zip(value, drafts, keep, strict=True)) - extra

    best = max(gain(keep) for keep in itertools.product(*(range(len(d) + 1) for d in drafts)))
    flat = np.array([c for d in drafts for c in d], dtype=np.float32)
    found = allocate(flat, np.cumsum([0, *map(len, drafts)]), value, model)
    assert gain(tuple(found.keep.tolist())) == pytest.approx(best, abs=1e-4)
    assert max(found.gain, 0.0) == pytest.approx(best, abs=1e-4)


def test_makespan_weights_are_the_chances_to_end_last() -> None:
    rng = np.random.default_rng(3)
    edges = np.geomspace(1, 4000, 64)
    scales = np.array([200.0, 800.0, 900.0, 1500.0, 50.0])
    pace = np.array([1.0, 1.0, 2.0, 2.5, 1.0])
    draws = scales[:, None] * rng.lognormal(0.0, 0.35, (5, 200000))
    cdf = np.stack([np.searchsorted(np.sort(d), edges, side="right") / d.size for d in draws])
    cdf[:, -1] = 1.0
    written = np.array([20.0, 100.0, 100.0, 150.0, 20.0])
    found = makespan_weights(cdf, edges, written, pace)
    left = [(d[d > w][:20000] - w) / p for d, w, p in zip(draws, written, pace, strict=True)]
    least = min(map(len, left))
    last = np.argmax(np.stack([x[:least] for x in left]), axis=0)
    assert found == pytest.approx(np.bincount(last, minlength=5) / least, abs=0.05)
    assert found.sum() == pytest.approx(1.0)


def test_a_request_alone_decides() -> None:
    assert makespan_weights(np.ones((1, 64)), np.geomspace(1, 10, 64), np.array([3.0]), np.ones(1)).tolist() == [1.0]
