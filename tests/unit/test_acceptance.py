"""What drafts turn out to be worth: recalibrated chances, and DAS's curve fitted from counts."""

from __future__ import annotations

import numpy as np
import pytest

from das_adapter.core.acceptance import AcceptanceCurves, Calibration, isotonic, solve_curve


def test_overconfident_chances_are_brought_down_to_what_is_observed() -> None:
    rng = np.random.default_rng(0)
    calibration = Calibration()
    stated = rng.uniform(0, 1, 60000).astype(np.float32)
    calibration.learn(stated, rng.random(60000) < stated**2)
    calibration.refit()
    probe = np.linspace(0.05, 1.0, 50, dtype=np.float32)
    assert calibration(probe) == pytest.approx(probe**2, abs=0.04)


def test_before_it_has_learned_a_chance_is_what_it_states() -> None:
    probe = np.linspace(0.01, 1.0, 99, dtype=np.float32)
    calibration = Calibration()
    assert calibration(probe) == pytest.approx(probe)
    calibration.refit()
    assert calibration(probe) == pytest.approx(probe, abs=1e-6)


def test_it_follows_a_change() -> None:
    calibration = Calibration()
    stated = np.full(20000, 0.5, dtype=np.float32)
    calibration.learn(stated, np.ones(20000, dtype=bool))
    calibration.refit()
    for _ in range(6):
        calibration.learn(stated, np.zeros(20000, dtype=bool))
        calibration.refit()
    assert calibration(stated[:1])[0] < 0.1


def test_isotonic_is_the_nearest_rising_sequence() -> None:
    assert isotonic(np.array([1.0, 3.0, 2.0, 4.0]), np.ones(4)).tolist() == [1.0, 2.5, 2.5, 4.0]
    assert isotonic(np.array([3.0, 2.0, 1.0]), np.array([1.0, 1.0, 2.0])) == pytest.approx([1.75] * 3)


@pytest.mark.parametrize(("alpha", "k"), [(0.6, 0.7), (1.2, 0.5), (1.0, 0.95)])
def test_the_curve_is_recovered_from_its_own_counts(alpha: float, k: float) -> None:
    drafted = 1.5
    found = solve_curve(alpha * k, drafted, k * (1 - np.exp(-alpha * drafted)))
    assert found == pytest.approx((alpha, k), rel=1e-3)


def test_problems_keep_their_own_curve_and_strangers_get_the_populations() -> None:
    curves = AcceptanceCurves()

    def rollout(problem: int, alpha: float, k: float) -> None:
        tokens, drafted, drafts = 2000, 3000, 1000
        kept = k * tokens * (1 - np.exp(-alpha * drafted / tokens))
        curves.observe(problem, tokens, drafted, int(kept), drafts, int(alpha * k * drafts))

    for problem in range(10):
        rollout(problem, 1.0, 0.4)
    for _ in range(8):
        rollout(77, 1.0, 0.9)
    alpha, k = curves.of(77)
    assert k == pytest.approx(0.9, abs=0.05)
    assert alpha * k == pytest.approx(0.9, abs=0.05)
    assert curves.of(3)[1] == pytest.approx(0.45, abs=0.08)
    assert curves.of(3)[1] < curves.of(12345)[1] < curves.of(77)[1]
    assert all(0 < k_ < 1 and a * k_ <= 1 for a, k_ in map(curves.of, range(100)))
