"""Recorded rollouts are read in every format, and replayed as an engine would have
drafted.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import index
import index_workload as workload
import numpy as np
import pytest
from click.testing import CliRunner
from history import UNLIMITED
from index import accepted
from index_drafters import Ours
from replay import replay

from das_adapter.config import HistoryConfig
from das_adapter.errors import DasError
from das_adapter.sim.rollouts import RecordedResponse, read

POEM = list(range(11, 51))
TOKENIZER = Path(__file__).parents[2] / "examples" / "tiny_math" / "policy"


def rollout(step: int, tokens: list[int], problem: int = 0) -> RecordedResponse:
    return RecordedResponse(
        problem, step, 0, np.array([1, 2], np.int32), np.array(tokens, np.int32)
    )


def write(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


# Reading


def test_verl_s_dump_is_read_step_by_step(tmp_path: Path) -> None:
    for step in (1, 2):
        rows = [
            {
                "input": "1+2=",
                "output": f"{step}{i}",
                "gts": "3",
                "score": 0.0,
                "step": step,
            }
            for i in range(2)
        ]
        write(
            tmp_path / f"{step}.jsonl",
            *rows,
            {"input": "2+2=", "output": "4", "step": step},
        )
    found = read(tmp_path, str(TOKENIZER))
    assert [(r.step, r.problem) for r in found] == [
        (1, 0),
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 0),
        (2, 1),
    ]
    assert len({r.prompt.tobytes() for r in found}) == 2
    with pytest.raises(DasError, match="--tokenizer"):
        read(tmp_path)


def test_nemo_rl_s_dump_needs_no_tokenizer(tmp_path: Path) -> None:
    row = {
        "content": [["a", "b"]],
        "token_ids": [[5, 6, 7, 8, 0, 0]],
        "token_loss_mask": [[0, 0, 1, 1, 0, 0]],
        "input_lengths": [4],
        "idx": 0,
    }
    write(tmp_path / "train_data_step7.jsonl", row)
    # is of no training step
    write(tmp_path / "val_data_step7.jsonl", {"content": ["2+2="], "rewards": 1.0})
    (one,) = read(tmp_path)
    assert (one.step, one.prompt.tolist(), one.tokens.tolist()) == (7, [5, 6], [7, 8])


def test_only_a_newline_ends_a_line_of_a_dump(tmp_path: Path) -> None:
    """veRL writes texts as they are: in JSON, U+2028, U+2029 and U+0085 are characters
    like others.
    """
    row = {"input": "1+2=", "output": "3\u20284\u20295\u00856", "step": 1}
    (tmp_path / "1.jsonl").write_text(
        json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    (one,) = read(tmp_path, str(TOKENIZER))
    assert one.step == 1 and len(one.tokens) >= 4


def test_arrays_are_read(tmp_path: Path) -> None:
    path = tmp_path / "r.npz"
    np.savez(
        path,
        ids=np.arange(6),
        offsets=[0, 2, 2, 6],
        problem=[0, 0, 1],
        step=[0, 0, 1],
        prompt_ids=[9, 8, 7],
        prompt_offsets=[0, 1, 3],
    )
    found = [
        (r.problem, r.step, r.prompt.tolist(), r.tokens.tolist()) for r in read(path)
    ]
    assert found == [(0, 0, [9], [0, 1]), (1, 1, [8, 7], [2, 3, 4, 5])]


def test_responses_of_several_policies_are_read(tmp_path: Path) -> None:
    rows = [
        {"problem_id": "a", "problem": "1+2=", "response": "3", "run": run, "step": s}
        for run, s in (("x", 0), ("y", 9))
    ]
    (tmp_path / "traces.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = read(tmp_path / "traces.jsonl", str(TOKENIZER))
    assert [(r.problem, r.run, r.step) for r in found] == [(0, 0, 0), (0, 1, 9)]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("not json", "1.jsonl: found text that is neither JSON nor a table"),
        ('{"other": 1}', "1.jsonl:2: no rollout"),
        ("[1]", "1.jsonl: found JSON whose row 1 is 1"),
        ('{"token_ids": [1, 2]}', "1.jsonl:2: no rollout"),
    ],
)
def test_what_is_no_rollout_is_named_with_its_line(
    tmp_path: Path, text: str, named: str
) -> None:
    path = tmp_path / "1.jsonl"
    path.write_text("\n" + text)
    with pytest.raises(DasError, match=re.escape(named)):
        read(path, str(TOKENIZER))


def test_a_file_of_a_dump_to_which_nothing_was_written_is_left_out(
    tmp_path: Path,
) -> None:
    row = {"token_ids": [1, 2], "token_loss_mask": [0, 1]}
    (tmp_path / "1.jsonl").write_text(json.dumps(row))
    (tmp_path / "2.jsonl").touch()
    assert len(read(tmp_path)) == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("gone.jsonl", None),
        ("r.npz", b"no archive"),
        ("r.npz", b"PK\x03\x04"),
        ("1.jsonl", b"\xff\xfe\x00"),
    ],
)
def test_a_file_that_can_t_be_read_is_named(
    tmp_path: Path, name: str, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DasError, match=name):
        read(tmp_path / name, str(TOKENIZER))


def test_a_dump_without_responses_is_refused(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_text("")
    with pytest.raises(DasError, match="found an empty file"):
        read(tmp_path / "1.jsonl")
    (tmp_path / "1.jsonl").write_text(
        '{"token_ids": [1, 2], "token_loss_mask": [0, 1], "step": "x"}'
    )
    with pytest.raises(DasError, match=r"1\.jsonl:1: no rollout"):
        read(tmp_path / "1.jsonl")
    np.savez(tmp_path / "r.npz", ids=np.arange(6))
    with pytest.raises(DasError, match="offsets, problem"):
        read(tmp_path / "r.npz")


# Replaying


def test_what_earlier_steps_wrote_is_drafted_in_later_ones() -> None:
    found = replay([rollout(0, POEM), rollout(1, POEM)])
    assert found.by_visit[1].rounds == found.by_visit[1].tokens == len(POEM)
    # 40 tokens: eight drafted and one more, each time
    assert found.by_visit[2].rounds == 5
    assert found.total.tokens == 2 * len(POEM)


def test_what_was_written_ahead_is_drafted_at_the_first_visit() -> None:
    assert (
        replay([replace(rollout(0, POEM), ahead=np.array(POEM, np.int32))]).total.rounds
        == 5
    )


def test_a_visit_outside_the_window_is_not_drafted_from() -> None:
    other = [rollout(step, [99], problem=step) for step in range(1, 40)]
    visits = [rollout(0, POEM), *other, rollout(40, POEM[::-1]), rollout(41, POEM)]
    assert replay(visits, window=1).by_visit[3].rounds == len(POEM)
    # the newer visit's beginning is tried first
    assert replay(visits, window=2).by_visit[3].rounds == 6


def test_visits_and_hits_are_counted_by_problem() -> None:
    epochs = [rollout(step, POEM, problem=step % 3) for step in range(9)] + [
        rollout(9, POEM, problem=3)
    ]
    found = replay(epochs, window=1)
    assert {visit: (t.requests, t.hits) for visit, t in found.by_visit.items()} == {
        1: (4, 0),
        2: (3, 3),
        3: (3, 3),
    }
    assert (found.total.requests, found.total.hits) == (10, 6)
    assert found.by_visit[2].rounds == 3 * 5


def test_a_smaller_history_is_thinned_out_and_all_problems_still_hit() -> None:
    rollouts = workload.synthetic(problems=6, samples=6, mean_tokens=150)
    rollouts = [
        RecordedResponse(r.problem, epoch * 6 + r.problem, 0, r.prompt, r.tokens)
        for epoch in (0, 1)
        for r in rollouts
    ]
    whole = replay(rollouts)
    smaller = [
        replay(
            rollouts,
            history=UNLIMITED.model_copy(
                update={"max_bytes": whole.bytes * percent // 100}
            ),
        ).by_visit[2]
        for percent in (100, 50, 25, 10)
    ]
    assert {tally.hits for tally in smaller} == {whole.by_visit[2].hits} == {36}
    accepted = [tally.accepted for tally in smaller]
    assert (
        accepted == sorted(accepted, reverse=True)
        and accepted[0] == whole.by_visit[2].accepted
    )
    assert accepted[-1] > whole.by_visit[1].accepted
    assert replay(rollouts, history=HistoryConfig(max_bytes=2**16)).bytes <= 2**16


# Measuring


@pytest.mark.parametrize("setting", workload.SETTINGS)
def test_a_drafter_writes_the_whole_of_every_target(setting: str) -> None:
    rollouts = workload.synthetic(problems=3, samples=3, mean_tokens=60)
    rollouts += [
        RecordedResponse(r.problem, 1, 0, r.prompt, r.tokens) for r in rollouts
    ]
    found = workload.groups(rollouts)
    assert len(found) == 6
    figures = accepted(Ours(), found, setting, 8, at_once=4)
    assert figures["rounds"] * figures["tokens_per_forward"] == pytest.approx(
        sum(len(g.target) for g in found)
    )
    assert 0 < figures["accepted"] <= 8


def test_the_bench_measures_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        index, "mapping", functools.partial(index.mapping, 20_000, 4, 4)
    )
    monkeypatch.setattr(index, "cost", functools.partial(index.cost, steps=2))
    monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", None)
    rollouts = workload.synthetic(problems=2, samples=3, mean_tokens=80)
    arrays = {
        name: np.array([getattr(r, name) for r in rollouts])
        for name in ("problem", "step", "run")
    }
    lengths = [len(r.tokens) for r in rollouts]
    ids = np.concatenate([r.tokens for r in rollouts])
    np.savez(tmp_path / "made.npz", ids=ids, offsets=np.cumsum([0, *lengths]), **arrays)
    out = CliRunner().invoke(
        index.main, ["--traces", str(tmp_path), "--out", str(tmp_path / "index.json")]
    )
    assert out.exit_code == 0, out.output
    figures = json.loads((tmp_path / "index.json").read_text())
    assert "arctic-inference" in figures["skipped"]["arctic"]
    assert set(figures["work"]["made"]["accepted"]) == {"growing", "finished"}
    assert set(figures["work"]["made"]["accepted"]["growing"]) == {"ours"}
    # five versions of four problems
    assert figures["mapping"]["tokens"] == 5 * 4 * 1250
