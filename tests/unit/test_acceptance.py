"""DAS's acceptance curve, fitted from counts."""

from __future__ import annotations

import numpy as np
import pytest

from das_adapter.core.acceptance import AcceptanceCurves, solve_curve


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


def test_a_curve_is_forgotten_by_visits() -> None:
    curves = AcceptanceCurves()
    for _ in range(8):
        curves.observe(1, 2000, 3000, 1700, 1000, 900)
    first = curves.of(1)
    for _ in range(500):  # weight syncs of an epoch without the problem
        curves.sync()
    assert curves.of(1) == first
    for _ in range(4):
        curves.sync()
        curves.observe(1, 2000, 3000, 300, 1000, 200)
    assert curves.of(1)[1] < 0.5 * first[1]


def test_the_problems_not_seen_for_longest_have_no_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AcceptanceCurves, "PROBLEMS", 2)
    curves = AcceptanceCurves()
    for problem in (1, 2, 1, 3):
        curves.observe(problem, 2000, 3000, 1700 if problem == 2 else 300, 1000, 900 if problem == 2 else 200)
    assert curves.of(2) == curves.of(99) != curves.of(1)
