"""A user's dump on a cluster: seconds by epoch, and a block to start with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import index_workload as workload
import pytest
import yaml
from click.testing import CliRunner

from das_adapter.cli import main
from das_adapter.config import parse
from das_adapter.sim import pays
from das_adapter.sim.rollouts import RecordedResponse

GROUPS = workload.synthetic(problems=6, samples=4, mean_tokens=60, seed=3)
DUMP = [
    RecordedResponse(r.problem, step, 0, r.prompt, r.tokens)
    for step in range(3)
    for r in GROUPS
]
"""Three epochs that repeat the first."""


def test_history_pays_when_problems_come_back() -> None:
    answer = pays.would_it_pay(
        DUMP, {"hardware": {"gpus": 2}, "pipeline": {"train_s": 2.0}}
    )
    assert list(answer["epochs"]) == ["1", "2", "3"]
    history = [arms["history"] for arms in answer["epochs"].values()]
    ratios = [f["rollout_of_first"] for f in history]
    assert ratios[2] < 0.5 < ratios[0] and history[2]["tokens_per_forward"] > 3
    assert answer["das"]["drafter"] == "history" and parse(answer["das"]) is not None
    assert all(f["step_s"] == pytest.approx(f["rollout_s"] + 2.0) for f in history)


def test_drafts_that_save_little_are_not_recommended() -> None:
    unlike = [
        RecordedResponse(
            i,
            0,
            0,
            r.prompt,
            workload.np.random.default_rng(i).integers(0, 10**6, 60, dtype="int32"),
        )
        for i, r in enumerate(GROUPS)
    ]
    answer = pays.would_it_pay(unlike, {"hardware": {"gpus": 1}})
    assert answer["das"] == {"drafter": "none"}


def test_run_ahead_is_recommended_where_it_saves_more_than_history_alone() -> None:
    met = [
        replace(r, step=r.problem % 3)
        for r in workload.synthetic(problems=12, samples=2, mean_tokens=400, seed=5)
    ]
    large = {"model": "Qwen/Qwen2.5-72B", "hardware": {"gpus": 16, "per_engine": 4}}
    answers = [pays.would_it_pay(met, large, agreement) for agreement in (0.0, 0.9999)]
    for answer in answers:
        assert (
            answer["arms"].keys() == {"off", "history", "ahead"}
            and 0.1 < answer["idle"] < 0.9
        )
        assert all(arms["ahead"]["rollout_s"] > 0 for arms in answer["epochs"].values())
    assert ["history" in answer["das"] for answer in answers] == [False, True]


HYBRID = "Qwen/Qwen3.5-35B-A3B"


def test_states_of_draft_tokens_make_the_batch_smaller() -> None:
    """Where they leave room for few requests, drafts of one token take less time than
    longer ones, and are recommended.
    """
    longer = [
        replace(r, step=step)
        for step in range(2)
        for r in workload.synthetic(problems=12, samples=8, mean_tokens=150, seed=3)
    ]
    settings = {"model": HYBRID, "hardware": {"gpus": 2, "per_engine": 2}}
    roomy = pays.would_it_pay(DUMP, settings)
    assert roomy["state_mib"]["off"] == pytest.approx(30.7, abs=0.1)
    assert roomy["state_mib"]["short"] == 2 * roomy["state_mib"]["off"]
    assert roomy["state_mib"]["history"] == 4 * roomy["state_mib"]["off"]
    assert roomy["das"] == {"drafter": "history"}
    # the KV cache holds the texts of all, and states of a few
    little = pays.would_it_pay(longer, {**settings, "engine": {"kv_tokens": 150_000}})
    ratios = {name: arm["rollout_of_first"] for name, arm in little["arms"].items()}
    assert ratios["short"] < ratios["history"]


def test_the_command_answers_in_seconds_and_with_a_block(tmp_path: Path) -> None:
    rows = [
        {
            "problem_id": str(r.problem),
            "token_ids": [[1, *r.tokens.tolist()]],
            "step": r.step,
            "token_loss_mask": [[0, *[1] * len(r.tokens)]],
        }
        for r in DUMP
    ]
    path = tmp_path / "dump.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    command = ["estimate", str(path), "--hardware", "H100", "--gpus", "2"]
    done = CliRunner().invoke(main, [*command, "--model", "Qwen/Qwen2.5-7B"])
    assert done.exit_code == 0, done.output
    block = yaml.safe_load(done.output.partition("Recommended:\n")[2])
    figures = json.loads(
        CliRunner()
        .invoke(main, [*command, "--model", "Qwen/Qwen2.5-7B", "--json"])
        .stdout
    )
    assert block["das"] == figures["das"]
    assert "--model" in CliRunner().invoke(main, command).output
    off_s = figures["epochs"]["1"]["off"]["rollout_s"]
    assert "Note: no problem comes back" not in done.output
    path.write_text("\n".join(map(json.dumps, rows[: len(GROUPS)])))
    chosen = ["--max-num-seqs", "2"]
    done = CliRunner().invoke(main, [*command, "--model", "Qwen/Qwen2.5-7B", *chosen])
    assert done.exit_code == 0 and "Note: no problem comes back" in done.output, (
        done.output
    )
    figures = json.loads(
        CliRunner()
        .invoke(main, [*command, "--model", "Qwen/Qwen2.5-7B", *chosen, "--json"])
        .stdout
    )
    assert figures["epochs"]["1"]["off"]["rollout_s"] > off_s
    done = CliRunner().invoke(
        main, [*command, "--model", "Qwen/Qwen2.5-7B", "--agreement", "0.9"]
    )
    assert done.exit_code == 0 and "ahead: " in done.output, done.output
    done = CliRunner().invoke(main, [*command, "--model", "Qwen/Qwen2.5-72B"])
    assert done.exit_code == 1 and "hardware.per_engine" in done.output
