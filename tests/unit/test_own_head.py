"""What is made of runs with a head that was trained on the run's own rollouts."""

from __future__ import annotations

import random
from pathlib import Path

import make_drafters
import own_head
import pytest
import torch


def figures(tokens_per_forward: list[float], hashes: str = "abc") -> dict[str, list]:
    return {
        "response_length_mean": [100.0, 10.0, 10.0],
        "tokens_per_forward": tokens_per_forward,
        "token_hash": list(hashes),
    }


def test_tokens_per_forward_weigh_each_step_by_its_passes() -> None:
    arms = {"history": figures([1.0, 2.0, 5.0]), "own": figures([2.0] * 3, "abx")}
    found = own_head.summary(arms)
    assert found["history"]["tokens_per_forward"] == pytest.approx(120 / 107)
    assert found["history"]["by_third"] == [1.0, 2.0, 5.0]
    assert found["own"]["tokens_per_forward"] == 2.0
    assert found["own"]["steps_with_same_tokens"] == 2


def test_the_first_run_and_the_later_steps_share_no_problem(tmp_path: Path) -> None:
    import pandas as pd

    first, new = own_head.write_data(tmp_path, problems=8, new=12)
    problems = [
        {row["problem"] for row in pd.read_parquet(path)["extra_info"]}
        for path in (first, new)
    ]
    assert [len(each) for each in problems] == [8, 12]
    assert not problems[0] & problems[1]


def test_batches_of_exported_rows_have_all_responses_of_like_length(
    tmp_path: Path,
) -> None:
    datasets = pytest.importorskip("datasets")
    lengths = [3, 9, 4, 8, 3, 10]
    rows = {
        "input_ids": [[n] * n for n in lengths],
        "loss_mask": [[0] + [1] * (n - 1) for n in lengths],
        "seq_len": lengths,
    }
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "rows")
    batches = make_drafters.exported(tmp_path / "rows", 0, 12, random.Random(0))
    seen: list[int] = []
    for ids, mask in (next(batches) for _ in range(3)):
        assert ids.shape == mask.shape and ids.dtype == torch.int64
        own = (ids > 0).sum(1)
        assert torch.equal(mask.sum(1), own - 1.0)
        assert int(own.max()) - int(own.min()) <= 6
        seen += own.tolist()
    assert sorted(seen) == sorted(lengths), "each epoch has every row once"
