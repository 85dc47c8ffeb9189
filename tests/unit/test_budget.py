"""Budgets against brute force: DAS's optimum for a rollout, the allocation of one step,
and the makespan weights.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from das_adapter.core import tuning
from das_adapter.core.budget import (
    allocate,
    das_budgets,
    drafts_needed,
    makespan_weights,
    plan_rollout,
)
from das_adapter.core.latency import StepModel


def accepted(
    drafted: np.ndarray, lengths: np.ndarray, alpha: float, k: float
) -> np.ndarray:
    """Tokens accepted of p drafted over a rollout of l (DAS, section 4.2): A(p) =
    k·l·(1 - exp(-alpha·p/l)).
    """
    return k * lengths * (1.0 - np.exp(-alpha * drafted / lengths))


def long_tail(count: int = 64) -> np.ndarray:
    return np.minimum(np.random.default_rng(0).lognormal(8.0, 0.8, count), 16000.0)


def simulate(length: float, per_round: float, alpha: float, k: float) -> int:
    """Rounds of a request that drafts `per_round` tokens a round and accepts as the
    curve says, token by token.
    """
    rounds = 0
    written = 0.0
    drafted = 0.0
    got = 0.0
    while written < length - 1e-9:
        drafted += per_round
        total = float(accepted(np.array([drafted]), np.array([length]), alpha, k)[0])
        written += 1.0 + total - got
        got = total
        rounds = rounds + 1
    return rounds


@pytest.mark.parametrize(
    ("length", "rounds", "alpha", "k"),
    [(16000, 4805, 1.0, 0.7), (900, 500, 0.6, 0.5), (3000, 2999, 0.9, 0.9)],
)
def test_the_budget_reaches_the_rounds_it_promises(
    length: int, rounds: int, alpha: float, k: float
) -> None:
    arrays = np.array([float(length)]), alpha, k
    drafts = drafts_needed(rounds, *arrays)
    assert length - accepted(drafts, *arrays)[0] == pytest.approx(rounds)
    assert simulate(length, float(drafts[0]) / rounds, alpha, k) == pytest.approx(
        rounds, abs=1.0
    )


def test_no_budget_for_who_ends_in_time_and_no_end_to_it_where_the_ceiling_forbids() -> (
    None
):
    arrays = np.array([100.0, 1000.0]), 1.0, 0.7
    assert drafts_needed(300.5, *arrays)[0] == 0.0
    assert np.isfinite(drafts_needed(300.5, *arrays)[1])
    # feasible only above 1000 · (1 - 0.7)
    assert np.isinf(drafts_needed(300.0, *arrays)[1])


@pytest.mark.parametrize("ratio", [0.0005, 0.002, 0.01, 0.05, 0.2])
def test_the_plan_is_the_best_of_all_round_counts(ratio: float) -> None:
    lengths = long_tail()
    alpha = 1.0
    k = 0.7
    planned, drafts = plan_rollout(lengths, alpha, k, 1.0, ratio)

    def cost(rounds: float) -> float:
        return rounds + ratio * float(
            np.sum(
                np.minimum(lengths, rounds) + drafts_needed(rounds, lengths, alpha, k)
            )
        )

    grid = np.linspace(float(np.max(lengths * 0.3)) + 1e-3, float(lengths.max()), 20000)
    assert cost(planned) <= min(map(cost, grid)) * (1 + 1e-6)
    assert np.all(drafts[lengths <= planned] == 0.0)


def test_dearer_tokens_mean_shorter_drafts_for_fewer_requests() -> None:
    lengths = long_tail()
    alpha = 1.0
    k = 0.7
    plans = [
        plan_rollout(lengths, alpha, k, 1.0, ratio)
        for ratio in (0.0005, 0.002, 0.01, 0.05, 0.2)
    ]
    per_round = [drafts[lengths.argmax()] / rounds for rounds, drafts in plans]
    share = [np.mean(drafts > 0) for _, drafts in plans]
    assert per_round == sorted(per_round, reverse=True)
    assert share == sorted(share, reverse=True)
    assert per_round[0] > 15
    assert per_round[-1] < 1.5


def test_whoever_decides_the_end_is_drafted_for() -> None:
    lengths = np.array([100.0, 900.0, 1000.0])
    curve = (1.0, 0.7)
    model = StepModel(base=10.0, token=0.1)
    budgets = das_budgets(lengths, curve, model, 24)
    assert budgets[0] == 0.0 and 0.0 < budgets[1] < budgets[2] < 24.0
    alone = das_budgets(lengths[:1], curve, model, 24)
    assert alone[0] > 1.0


MODELS = [
    StepModel(base=10.0, token=0.3),
    StepModel(base=10.0, token=0.0, bend=0.5, knee=6),
    StepModel(
        base=10.0, token=0.6, bend=-0.5, knee=5, draft=0.2
    ),  # dear at first, cheap beyond
    StepModel(
        base=10.0, token=0.3, draft=0.1, sizes=(1, 2, 4, 8)
    ),  # in steps, up to the largest size
    StepModel(
        base=10.0, token=0.0, launch=0.5, sizes=(1, 2, 3)
    ),  # free, up to the largest size
    StepModel(
        base=10.0,
        token=0.3,
        draft=0.1,
        launch=0.2,
        sizes=(1, 2, 3, 4, 6, 8),
        drafted_sizes=(2, 5, 8),
    ),
]


@settings(max_examples=150)
@given(
    st.lists(
        st.lists(st.floats(0.015625, 1.0, width=32), max_size=3), min_size=1, max_size=4
    ),
    st.lists(st.floats(0.0, 3.0), min_size=4, max_size=4),
    st.sampled_from(MODELS),
)
def test_the_split_of_a_step_is_the_best_of_all_splits(
    chances: list[list[float]], worth: list[float], model: StepModel
) -> None:
    drafts = [sorted(c, reverse=True) for c in chances]
    requests = len(drafts)
    values = [
        [c * accepted for c in draft]
        for draft, accepted in zip(drafts, worth, strict=False)
    ]

    def gain(keep: tuple[int, ...]) -> float:
        total = requests + sum(keep)
        extra = model.step(total, requests, sum(keep) > 0) - model.step(
            requests, requests, False
        )
        return sum(sum(v[:m]) for v, m in zip(values, keep, strict=True)) - extra

    best = max(
        gain(keep) for keep in itertools.product(*(range(len(d) + 1) for d in drafts))
    )
    flat = np.array([c for d in drafts for c in d], dtype=np.float32)
    found = allocate(
        flat, np.cumsum([0, *map(len, drafts)]), np.array(worth[:requests]), model
    )
    kept = tuple(found.history.tolist())
    assert gain(kept) == pytest.approx(best, abs=1e-4)
    assert max(found.gain, 0.0) == pytest.approx(best, abs=1e-4)


@pytest.mark.parametrize(("step", "most"), [(0.0027, 512), (0.025, 128 + 8 * 128)])
def test_drafts_leave_the_cuda_graphs_only_where_they_are_worth_the_launches(
    step: float, most: int
) -> None:
    model = StepModel(
        base=step, token=0.0, launch=tuning.LAUNCH_S, sizes=(*range(8, 513, 8),)
    )
    chances = np.tile(np.float32(0.6) ** np.arange(1, 9), 128).astype(np.float32)
    found = allocate(chances, np.arange(129) * 8, np.full(128, step / 128), model)
    assert 128 + found.total == most


def test_makespan_weights_are_the_chances_to_end_last() -> None:
    rng = np.random.default_rng(3)
    edges = np.geomspace(1, 4000, 64)
    scales = np.array([200.0, 800.0, 900.0, 1500.0, 50.0])
    draws = scales[:, None] * rng.lognormal(0.0, 0.35, (5, 200000))
    cdf = np.stack(
        [np.searchsorted(np.sort(d), edges, side="right") / d.size for d in draws]
    )
    cdf[:, -1] = 1.0
    written = np.array([20.0, 100.0, 100.0, 850.0, 20.0])
    found = makespan_weights(cdf, edges, written)
    left = [d[d > w][:20000] - w for d, w in zip(draws, written, strict=True)]
    least = min(map(len, left))
    left = np.stack([x[:least] for x in left])
    chance = np.bincount(np.argmax(left, axis=0), minlength=5) / least
    assert found == pytest.approx(chance, abs=0.05)
    assert found.sum() == pytest.approx(1.0)


def test_a_request_that_ends_anywhere_is_the_last_where_it_outlasts_the_other() -> None:
    """One ends in any octave, the other in one of the upper half of them: the first
    ends last with a chance of a quarter.
    """
    edges = np.geomspace(1, 4096, 64)
    share = np.linspace(0, 1, 64)
    cdf = np.stack([share, np.maximum(0.0, 2 * share - 1)])
    found = makespan_weights(cdf, edges, np.zeros(2))
    assert found == pytest.approx([0.25, 0.75], abs=0.02)


def test_a_budget_is_that_of_the_rollouts_optimum_for_each_round() -> None:
    """With steps of 10 ms, and 1 ms for each token in them."""
    lengths = long_tail(8)
    model = StepModel(base=0.01, token=0.001)
    rounds, drafts = plan_rollout(lengths, alpha=0.9, k=0.7, base=0.01, token=0.001)
    found = das_budgets(lengths, (0.9, 0.7), model, 1000)
    assert 0 < found.max() < 1000
    assert found == pytest.approx(drafts / rounds)


def test_who_gets_ahead_of_equals_decides_the_end_no_more() -> None:
    edges = np.geomspace(1, 1000, 64)
    cdf = np.tile((edges >= 100).astype(float), (8, 1))
    written = np.full(8, 40.0)
    assert makespan_weights(cdf, edges, written) == pytest.approx(np.full(8, 1 / 8))
    written[0] += 16
    assert makespan_weights(cdf, edges, written)[0] < 0.2 / 8


def test_a_request_alone_decides() -> None:
    assert makespan_weights(
        np.ones((1, 64)), np.geomspace(1, 10, 64), np.array([3.0])
    ).tolist() == [1.0]
