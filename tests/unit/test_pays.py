"""A user's dump on a cluster: seconds by epoch, and a block to start with."""

from __future__ import annotations

import json
from pathlib import Path

import index_workload as workload
import pytest
import yaml
from click.testing import CliRunner

from das_adapter.cli import main
from das_adapter.config import parse
from das_adapter.errors import DasError
from das_adapter.sim import pays
from das_adapter.sim.rollouts import Rollout

GROUPS = workload.synthetic(problems=6, samples=4, mean_tokens=60, seed=3)
DUMP = [Rollout(r.problem, step, 0, r.prompt, r.tokens) for step in range(3) for r in GROUPS]
"""Three epochs that repeat the first."""


def test_history_pays_when_problems_come_back() -> None:
    answer = pays.would_it_pay(DUMP, "h100", "Qwen/Qwen2.5-7B", gpus=2, other_s=0.0)
    ratios = [epoch.on_s / epoch.off_s for epoch in answer.epochs]
    assert [epoch.number for epoch in answer.epochs] == [1, 2, 3]
    assert ratios[2] < 0.5 < ratios[0] and answer.epochs[2].tokens_per_forward > 3
    assert answer.block["drafter"] == "history" and parse(answer.block) is not None
    assert all(e.on_step_s == e.on_s for e in answer.epochs)
    assert set(answer.assumed) == set(pays.ASSUMED) and not set(answer.assumed) & set(answer.arms)


def test_drafts_that_save_little_are_not_recommended() -> None:
    unlike = [
        Rollout(i, 0, 0, r.prompt, workload.np.random.default_rng(i).integers(0, 10**6, 60, dtype="int32"))
        for i, r in enumerate(GROUPS)
    ]
    answer = pays.would_it_pay(unlike, "h100", "Qwen/Qwen2.5-7B", gpus=1)
    assert answer.block == {"drafter": "none"} and answer.settings["other_s_estimated"]
    assert "one step" in str(pays.check(unlike)) and pays.check(DUMP) is None


@pytest.mark.parametrize("option", ["--batch", "--min-chance", "--max-num-seqs", "--gpus"])
def test_an_option_without_effect_is_refused(option: str, tmp_path: Path) -> None:
    without = option in ("--max-num-seqs", "--gpus")
    hardware = [] if without else ["--hardware", "H100", "--model", "Qwen/Qwen2.5-7B"]
    done = CliRunner().invoke(main, ["replay", str(tmp_path), option, "8", *hardware])
    assert done.exit_code == 2 and f"{option}: no effect with{'out' * without} --hardware" in done.output


def test_a_sample_of_problems_stands_for_all() -> None:
    tokens = sum(len(r.tokens) for r in DUMP)
    kept, copies = pays.sample(DUMP, tokens // 3)
    assert copies == 3 and len({r.problem for r in kept}) == 2 and {r.step for r in kept} == {0, 1, 2}
    assert pays.sample(DUMP, tokens) == (DUMP, 1)
    with pytest.raises(DasError, match="allowed: 1 or more"):
        pays.sample(DUMP, 0)
    answer = pays.would_it_pay(kept, "h100", "Qwen/Qwen2.5-7B", gpus=2, copies=copies)
    assert answer.runs["off"].steps[0].requests == copies * 8
    assert answer.settings["drafts"] == "from a trace"


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
    path, out, picture = tmp_path / "dump.jsonl", tmp_path / "out.json", tmp_path / "running.svg"
    path.write_text("\n".join(map(json.dumps, rows)))
    command = ["replay", str(path), "--hardware", "H100", "--gpus", "2", "--json", str(out), "--plot", str(picture)]
    done = CliRunner().invoke(main, [*command, "--model", "Qwen/Qwen2.5-7B"])
    assert done.exit_code == 0, done.output
    block = yaml.safe_load(done.output.partition("Recommended:\n")[2])
    assert block["das"] == json.loads(out.read_text())["das"] and picture.exists()
    assert "--model" in CliRunner().invoke(main, command).output
    chosen = ["--budget", "3", "--max-bytes", "64MiB", "--max-num-seqs", "2"]
    done = CliRunner().invoke(main, [*command, "--model", "Qwen/Qwen2.5-7B", *chosen])
    assert done.exit_code == 0, done.output
    figures = json.loads(out.read_text())
    assert figures["das"]["history"] == {"max_bytes": "64MiB"} and "history, at most 8" not in figures["arms"]
    assert figures["das"]["max_draft_tokens"] == 3 and figures["settings"]["max_num_seqs"] == 2
    assert max(epoch["tokens_per_forward"] for epoch in figures["epochs"]) <= 4
    done = CliRunner().invoke(main, [*command, "--model", "Qwen/Qwen2.5-72B"])
    assert done.exit_code == 1 and "hardware.per_engine" in done.output
