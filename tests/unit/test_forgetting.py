"""What was learned of drafts counts little after a weight sync."""

from __future__ import annotations

import numpy as np
import pytest

from das_adapter.core import tuning
from das_adapter.core.native import native


def test_a_collapse_is_noticed_soon_after_a_weight_sync() -> None:
    acceptance = native().Acceptance()
    kind = np.array([100], dtype=np.uint16)
    for _ in range(2 * tuning.CPP_MEMORY_TOKENS):
        acceptance.learn(kind, np.array([True]))
    before = float(acceptance.chances(kind)[0])
    acceptance.forget()
    assert float(acceptance.chances(kind)[0]) == pytest.approx(before, abs=0.05)
    for _ in range(2 * tuning.CPP_SYNC_TOKENS):
        acceptance.learn(kind, np.array([False]))
    assert float(acceptance.chances(kind)[0]) < 0.4


def test_unknown_kinds_and_columns_of_other_lengths_are_refused() -> None:
    acceptance = native().Acceptance()
    with pytest.raises(ValueError, match="no such kind"):
        acceptance.chances(np.array([60_000], dtype=np.uint16))
    with pytest.raises(ValueError, match="differ in length"):
        acceptance.learn(np.zeros(2, dtype=np.uint16), np.array([True]))
