"""A saved history is exported as rows on which a drafter is trained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("ray")
pytest.importorskip("datasets")
pytest.importorskip("torch")
import datasets
import torch

from das_adapter.cli import main
from das_adapter.core.index.store import HistoryStore
from das_adapter.core.length import RESPONSE
from das_adapter.errors import DasError
from das_adapter.reports import training_rows
from das_adapter.reports.training_rows import export
from das_adapter.service import checkpoint
from das_adapter.service.prompts import Prompts

FACTS = {"scope": "problem", "tokenizer": "0123456789abcdef"}
Texts = list[tuple[int, int, list[int]]]
"""Problem, weight version and token ids of responses."""
TEXTS: Texts = [
    (1, 1, [10, 11, 12]),
    (2, 1, [20, 21]),
    (1, 2, [13, 11]),
    (1, 2, [14]),
    (3, 2, [30]),
    (2, 4, [22, 23, 24, 25]),
]
PROMPTS = {1: [1, 1], 2: [2]}


def save(
    folder: Path,
    texts: Texts = TEXTS,
    prompts: dict[int, list[int]] = PROMPTS,
    scope: str = "problem",
    max_bytes: int = 2**30,
) -> Path:
    """Save the history of a run on one node in a checkpoint; return that."""

    def save_parts(index: Path) -> int:
        with HistoryStore(folder / "store", others_tokens=1000) as store:
            for version in sorted({version for _, version, _ in texts}):
                for problem, own_version, tokens in texts:
                    if own_version == version:
                        store.add(problem, tokens, version)
                store.seal()
            while store.nbytes > max_bytes:
                store.shrink(max_bytes)
            store.save(index / "0")
        kept = Prompts(folder / "kept", 2**20)
        rows = [
            (key, np.array(ids, np.int32).tobytes()) for key, ids in prompts.items()
        ]
        kept.add(rows)
        kept.save(checkpoint.prompts_file(index / "0"))
        return 1

    step = folder / "global_step_4"
    step.mkdir(parents=True)
    facts = {**FACTS, "scope": scope}
    lengths = np.array([(1, 3, 1)], RESPONSE)
    checkpoint.write(step / checkpoint.NAME, facts, lengths, save_parts)
    return step


def rows_of(out: Path) -> list[tuple[list[int], list[int]]]:
    rows = datasets.load_from_disk(str(out)).with_format(None)
    assert rows["seq_len"] == [len(ids) for ids in rows["input_ids"]]
    return list(zip(rows["input_ids"], rows["loss_mask"], strict=True))


ROWS = [
    ([1, 1, 10, 11, 12], [0, 0, 1, 1, 1]),
    ([1, 1, 13, 11], [0, 0, 1, 1]),
    ([1, 1, 14], [0, 0, 1]),
    ([2, 20, 21], [0, 1, 1]),
    ([2, 22, 23, 24, 25], [0, 1, 1, 1, 1]),
]


def test_a_row_is_a_prompt_and_a_response_of_which_the_response_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = save(tmp_path)
    monkeypatch.setattr(training_rows, "_BATCH_TOKENS", 4)  # several batches
    exported = export(step, tmp_path / "a" / "rows")
    assert rows_of(tmp_path / "a" / "rows") == ROWS
    assert exported == (5, 2, 8, 12, 1, 0)
    frequencies = torch.load(tmp_path / "a" / "rows" / "token_freq.pt")
    assert frequencies[11] == 2 and frequencies[20] == 1 and 1 not in frequencies
    export(step / checkpoint.NAME, tmp_path / "b")
    assert rows_of(tmp_path / "b") == ROWS
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["rows"]


@pytest.mark.parametrize(
    ("limits", "chosen"),
    [
        ({"visits": 1}, [1, 2, 4]),
        ({"visits": 2}, [0, 1, 2, 3, 4]),
        ({"max_tokens": 12}, [0, 1, 2, 3, 4]),
        ({"max_tokens": 11}, [0, 1, 2, 4]),
        ({"max_tokens": 9}, [1, 2, 3, 4]),
        ({"max_tokens": 7}, [1, 2, 4]),
        ({"max_tokens": 3}, [1, 2]),
        ({"visits": 1, "max_tokens": 100}, [1, 2, 4]),
    ],
)
def test_a_limit_takes_the_newest_visits(
    tmp_path: Path, limits: dict[str, int], chosen: list[int]
) -> None:
    export(save(tmp_path), tmp_path / "rows", **limits)
    assert rows_of(tmp_path / "rows") == [ROWS[number] for number in chosen]


def test_what_has_no_beginning_any_more_is_left_out(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 99, 100).tolist()
    texts: Texts = []
    for version in range(1, 9):
        own = rng.integers(100, 10_000, 100).tolist()
        texts.append((1, version, [*own, *shared, *own[::-1]]))
    exported = export(save(tmp_path, texts, max_bytes=1980), tmp_path / "rows")
    assert exported.stretches > 0
    for ids, mask in rows_of(tmp_path / "rows"):
        response = ids[2:]
        assert ids[:2] == [1, 1] and mask == [0, 0] + [1] * len(response)
        assert any(text[: len(response)] == response for _, _, text in texts)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"texts": []}, "FOLDER: found no response that has a prompt"),
        ({"prompts": {}}, "3 problems without a prompt"),
        ({"scope": "global"}, "found history.scope 'global'.*allowed: 'problem'"),
    ],
)
def test_a_history_without_rows_is_refused(
    tmp_path: Path, wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(DasError, match=message):
        export(save(tmp_path, **wrong), tmp_path / "rows")
    assert not list(tmp_path.glob("rows*"))


def test_the_command_names_what_is_wrong_with_its_arguments(tmp_path: Path) -> None:
    step = save(tmp_path)
    out = tmp_path / "rows"

    def call(*arguments: Any) -> Any:
        command = ["history", "export", "--out", *map(str, arguments)]
        return CliRunner().invoke(main, command)

    answer = call(out, step, "--json")
    assert json.loads(answer.output)["rows"] == 5
    assert "left out: 1 prompts" in call(tmp_path / "more", step).output
    for arguments, said in {
        (out, step): f"--out: found '{out}', allowed: a new directory",
        (tmp_path / "x", tmp_path): "found no history in",
        (tmp_path / "x", step / "none"): "does not exist",
        (tmp_path / "x", step, "--tokens", 0): "0 is not in the range x>=1",
        (tmp_path / "x", step, "--visits", "two"): "'two' is not a valid integer",
    }.items():
        answer = call(*arguments)
        assert answer.exit_code and said in answer.output
    part = step / checkpoint.NAME / checkpoint.INDEX / "0"
    part.write_bytes(part.read_bytes()[:-1])
    answer = call(tmp_path / "x", step)
    assert answer.exit_code == 1 and "FOLDER: found no history in" in answer.output


READ = """
import sys
from pathlib import Path
import torch
from speculators.train.data import ArrowDataset, CollateFn
from speculators.train.distributed_batch_sampler import (
    MultipackDistributedBatchSamplerV2 as Sampler,
)
from speculators.models.eagle3.data import shift_batch

class States:
    \"\"\"The policy's hidden states of each row, of two layers and the last.\"\"\"

    def __init__(self, rows):
        self.rows = rows

    def get_cached(self, number):
        ids = self.rows.data[number]["input_ids"]
        return {"token_ids": ids, "hidden_states": torch.ones(len(ids), 3, 4)}

rows = ArrowDataset(16, sys.argv[1])
rows.transfer = States(rows)
assert len(rows) == 5
collate = CollateFn(16, 4, num_target_layers=2, preprocess=shift_batch)
seen = 0
for numbers in Sampler(16, rows.approx_lengths, 1, 0):
    batch = collate([rows[int(number)] for number in numbers])
    assert batch["input_ids"].dtype == torch.int64
    assert batch["error_records"] == 0
    seen += int(batch["loss_mask"].sum())
assert seen == 12, seen
print("read")
"""


def test_speculators_trains_on_the_rows_as_they_are(tmp_path: Path) -> None:
    installed = Path(sys.prefix) / "speculators"
    if not installed.is_dir():
        pytest.skip(f"speculators is not in {installed}: make check puts it there")
    export(save(tmp_path), tmp_path / "rows")
    path = os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path / "rows")],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "read\n", done.stderr
