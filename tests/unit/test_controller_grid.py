"""The policy of drafts keeps its promise in some cells of the grid of hardware that it
does not expect (benchmarks/controller_grid.py).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from controller_grid import FIXED_BAR, ROLLOUT_BAR, RUN_BAR, Cell, knee, run

# the first two fail where a saved round is priced at a drafted one, or where steps grow
# at once; the last, where what was learned is kept over weight syncs
CELLS = [
    Cell(knee(24, 1.0), "none", 32),
    Cell(knee(48, 1.0), "none", 32),
    Cell(knee(96, 1.0), "none", 8),
    Cell("h20", "none", 32),
    Cell(knee(96, 0.25), "none", 8, "collapse"),
    Cell("h100", "none", 64, "collapse"),
]


def test_no_rollout_is_much_slower_than_plain_decoding_and_runs_keep_up_with_the_best_fixed_length() -> (
    None
):
    of_best_fixed = []
    for cell in CELLS:
        row = run(replace(cell, runner="v1"))
        assert max(row["rollouts"]) <= ROLLOUT_BAR, row
        assert row["of_plain"] <= RUN_BAR, row
        of_best_fixed.append(row["of_best_fixed"])
    assert np.mean(of_best_fixed) <= FIXED_BAR


def test_a_name_says_what_differs_from_the_usual() -> None:
    cell = Cell("h20", "none", 8, runner="v1", syncs=False)
    assert cell.name == "h20, prior none, requests 8, v1, no syncs"
