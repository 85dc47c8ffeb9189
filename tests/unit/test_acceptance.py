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
