"""DAS's acceptance curve, fitted from counts."""

from __future__ import annotations

import numpy as np
import pytest

from das_adapter.core.acceptance import AcceptanceCurve, solve_curve


@pytest.mark.parametrize(("alpha", "k"), [(0.6, 0.7), (1.2, 0.5), (1.0, 0.95)])
def test_the_curve_is_recovered_from_its_own_counts(alpha: float, k: float) -> None:
    drafted = 1.5
    found = solve_curve(alpha * k, drafted, k * (1 - np.exp(-alpha * drafted)))
    assert found == pytest.approx((alpha, k), rel=1e-3)


def observed(
    curve: AcceptanceCurve, alpha: float, k: float, rollouts: int = 8
) -> tuple[float, float]:
    """Count rollouts that accept by a curve, and return what is fitted to them."""
    tokens = 2000
    drafted = 3000
    kept = k * tokens * (1 - np.exp(-alpha * drafted / tokens))
    drafts = tokens - kept
    curve.counts += rollouts * np.array([drafted, kept, drafts, alpha * k * drafts])
    return curve.fitted()


def test_what_was_counted_is_fitted_and_forgotten_after_some_weight_syncs() -> None:
    curve = AcceptanceCurve()
    alpha, k = curve.fitted()
    assert (alpha * k, k) == pytest.approx((0.5, 0.6), abs=0.02)
    first = observed(curve, 1.0, 0.9)
    assert first == pytest.approx((1.0, 0.9), abs=0.05)
    for _ in range(500):  # of rollouts without drafts
        curve.sync()
    assert curve.fitted() == pytest.approx(first)
    assert observed(curve, 1.0, 0.4) == pytest.approx((1.0, 0.4), abs=0.05)
