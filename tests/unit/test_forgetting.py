"""What was learned of drafts counts little after a weight sync."""

from __future__ import annotations

from types import SimpleNamespace

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


def test_a_device_forgets_as_much_as_the_host() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton.language")
    device_index = pytest.importorskip("das_adapter.engine.v2.device_index")
    kept = tuning.CPP_SYNC_TOKENS
    cells = [[8000, 6000], [kept, 90], [3, 2], [0, 0]]
    sources = [[8000.0, 6000.0, 5000.0], [0.0, 0.0, 0.0]]
    index = SimpleNamespace(
        cells=torch.tensor(cells, dtype=torch.int32),
        sources=torch.tensor(sources, dtype=torch.float64),
        _kept=kept,
    )
    device_index.DeviceIndex.forget_chances(index)
    assert index.cells.tolist() == [[kept, 75], [kept, 90], [3, 2], [0, 0]]
    assert index.sources.tolist() == [[100.0, 75.0, 62.5], [0.0, 0.0, 0.0]]


def test_drafts_before_a_weight_sync_count_as_a_few_in_the_average() -> None:
    live = pytest.importorskip("das_adapter.engine.v2.live")
    texts = live.LiveTexts(4, {})
    texts.persistence[0] = tuning.CPP_FORECAST_BATCHES
    texts.forget_drafts()
    assert texts.persistence[0] == tuning.FORECAST_KEPT_BATCHES
