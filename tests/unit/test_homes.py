"""Every problem has one home among the nodes, and keeps it."""

from __future__ import annotations

import numpy as np
import pytest

from das_adapter.core.homes import homes

PROBLEMS = np.random.default_rng(0).integers(0, 2**64, 20_000, dtype=np.uint64)
NODES = [f"das_history:01000000:{i:056x}" for i in range(9)]


def test_each_node_is_home_to_its_share_of_the_problems() -> None:
    counts = np.bincount(homes(PROBLEMS, NODES[:8]), minlength=8)
    assert np.all(np.abs(counts - 2500) < 5 * np.sqrt(2500))
    consecutive = np.bincount(homes(range(8000), NODES[:8]), minlength=8)
    assert np.all(np.abs(consecutive - 1000) < 5 * np.sqrt(1000))


@pytest.mark.parametrize("gone", [0, 4, 8])
def test_only_the_problems_of_a_node_that_comes_or_goes_move(gone: int) -> None:
    left = NODES[:gone] + NODES[gone + 1 :]
    before = homes(PROBLEMS, NODES)
    after = homes(PROBLEMS, left)
    stayed = before != gone
    assert np.array_equal(
        np.array(NODES)[before[stayed]], np.array(left)[after[stayed]]
    )
    assert len(np.unique(after[~stayed])) == 8  # its own spread over all others


def test_the_order_of_the_nodes_does_not_matter() -> None:
    shuffled = NODES[::-1]
    assert np.array_equal(
        np.array(NODES)[homes(PROBLEMS, NODES)],
        np.array(shuffled)[homes(PROBLEMS, shuffled)],
    )
    assert homes([], NODES).tolist() == []
