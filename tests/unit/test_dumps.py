"""Dumped rollouts as users have them, and what `das-adapter estimate` says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from das_adapter.cli import main
from das_adapter.sim import pays, rollouts
from das_adapter.sim.rollouts import RecordedResponse, read

TOOL = "<tool_response>\nrow 0: price 4659\n</tool_response>"
OWN = 'I will add.\n<tool_call>\n{"name": "calculator"}\n</tool_call>'
END = "The total is 308."


@pytest.fixture
def _bytes_are_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        rollouts, "_tokenizer", lambda name: lambda text: list(text.encode())
    )


def written(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def text(response: RecordedResponse) -> str:
    return bytes(response.tokens.tolist()).decode()


def estimated(path: Path, *options: str) -> Any:
    command = ["estimate", str(path), "--hardware", "RTX 4090", "--gpus", "1"]
    model = ["--model", "Qwen/Qwen3-4B-Instruct-2507", "--tokenizer", "bytes"]
    return CliRunner().invoke(main, [*command, *model, *options])


@pytest.mark.usefixtures("_bytes_are_tokens")
@pytest.mark.parametrize(
    "row",
    [
        {"input": "1+2=", "output": "3"},
        {"problem": "1+2=", "response": "3"},
        {"prompt": "1+2=", "response": "3", "reward": 1.0},
        {"prompt": "1+2=", "completion": "3", "advantage": 0.1},
        {"prompt": "1+2=", "completion_ids": [51]},
        {"problem": 7, "prompt": "1+2=", "response": "3"},
        {"prompt_ids": list(b"1+2="), "response_ids": [51]},
        {
            "prompt": [{"role": "user", "content": "1+2="}],
            "completion": [{"role": "assistant", "content": "3"}],
        },
    ],
)
def test_a_row_of_prompt_and_response_is_read_under_the_names_that_it_has(
    row: dict[str, Any], tmp_path: Path
) -> None:
    (response,) = read(written(tmp_path / "a.jsonl", row | {"step": 4}), "bytes")
    assert text(response) == "3" and bytes(response.prompt.tolist()) == b"1+2="
    assert response.step == 4


@pytest.mark.usefixtures("_bytes_are_tokens")
def test_the_completions_that_trl_logs_are_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for step in (1, 2):
        rows = [{"step": step, "prompt": "1+2=", "completion": "3", "advantage": 0.1}]
        table = pyarrow.Table.from_pylist(rows)
        parquet.write_table(table, tmp_path / f"completions_{step:05}.parquet")
    found = read(tmp_path, "bytes")
    assert [(each.step, text(each)) for each in found] == [(1, "3"), (2, "3")]


@pytest.mark.usefixtures("_bytes_are_tokens")
@pytest.mark.parametrize(
    "dumped",
    [
        f"{OWN}\nuser\n{TOOL}\nassistant\n{END}",
        f"{OWN}<|im_end|>\n<|im_start|>user\n{TOOL}<|im_end|>\n<|im_start|>assistant\n{END}",
        f"{OWN}{TOOL}{TOOL}{END}",
    ],
)
def test_what_tools_wrote_is_no_text_of_the_policy(dumped: str, tmp_path: Path) -> None:
    rows = [{"input": "?", "output": output} for output in (dumped, OWN)]
    used, unused = read(written(tmp_path / "1.jsonl", *rows), "bytes")
    kept = text(used).replace("<|im_end|>", "").replace("\n<|im_start|>user\n", "")
    assert kept == OWN + END
    assert text(unused) == OWN and unused.tool_characters == 0
    assert used.tool_characters >= len(TOOL)
    said = " ".join(pays.doubts([used, unused]))
    assert "characters of tools (<tool_response>) in 1 responses are left out" in said


@pytest.mark.usefixtures("_bytes_are_tokens")
def test_a_response_that_the_context_ends_within_a_tools_text_keeps_its_own(
    tmp_path: Path,
) -> None:
    row = {"input": "?", "output": f"{OWN}\nuser\n<tool_response>\nrow 0: pri"}
    (response,) = read(written(tmp_path / "1.jsonl", row), "bytes")
    assert text(response) == OWN


@pytest.mark.usefixtures("_bytes_are_tokens")
def test_the_command_says_what_it_read_and_what_makes_its_answer_doubtful(
    tmp_path: Path,
) -> None:
    letters = np.random.default_rng(0).integers(32, 127, (4, 400))
    rows = [
        {"step": step, "prompt": f"{problem}", "response": bytes(content).decode()}
        for (step, problem), content in zip(
            [(1, 1), (1, 2), (2, 1), (2, 2)], letters.astype("uint8"), strict=True
        )
    ]
    done = estimated(written(tmp_path / "a.jsonl", *rows))
    assert done.exit_code == 0, done.output
    assert (
        "Read rollouts: 4; problems: 2; steps: 2; tokens: 1,600." in done.output
        and "Note: 4 responses are few" in done.output
    )
    assert "repeat themselves" not in done.output
    loops = [row | {"response": "We are given a disk. " * 40} for row in rows]
    done = estimated(written(tmp_path / "b.jsonl", *loops), "--json")
    found = json.loads(done.stdout)
    assert found["read"]["rollouts"] == 4
    assert "4 of 4 responses repeat themselves over and over" in found["doubts"][1]


def test_many_responses_that_do_not_repeat_themselves_leave_no_doubt() -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 50_000, (pays.FEW_RESPONSES, 200)).astype(np.int32)
    responses = [
        RecordedResponse(i, 0, 0, text[:0], text) for i, text in enumerate(ids)
    ]
    assert pays.doubts(responses) == []
    assert len(pays.doubts(responses[1:])) == 1


def test_a_folder_above_the_dumps_is_no_dump(tmp_path: Path) -> None:
    below = tmp_path / "exp_001"
    below.mkdir()
    written(below / "train_data_step1.jsonl", {"input": "1", "output": "2"})
    done = estimated(tmp_path)
    said = " ".join(done.output.split())
    assert f"no .jsonl or .parquet of rollouts here, but in {below}" in said


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"a": 1, "b": 2}, "found the fields a, b, needed: one of input, problem, "),
        (
            {"prompt": "x", "output": None},
            "found the fields prompt, output, needed: one of output, ",
        ),
        (
            {"prompt": "x", "output": "y", "step": "z"},
            "found step='z', expected a number",
        ),
        ({"prompt": "x", "output": [[1]]}, "found [1], expected a message or a token"),
        (
            {"prompt": 5, "output": "y"},
            "found the fields prompt, output, needed: one of input, ",
        ),
    ],
)
@pytest.mark.usefixtures("_bytes_are_tokens")
def test_a_row_that_is_no_rollout_is_named_with_its_fields(
    row: dict[str, Any], words: str, tmp_path: Path
) -> None:
    good = {"prompt": "x", "output": "y"}
    done = estimated(written(tmp_path / "a.jsonl", good, row))
    said = " ".join(done.output.split())
    assert done.exit_code == 1 and f"a.jsonl:2: no rollout: {words}" in said, said
