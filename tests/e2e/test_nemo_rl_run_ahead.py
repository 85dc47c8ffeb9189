"""Runs of NeMo-RL's trainer on two workers, of which the one that has nothing left
writes ahead for the next step.
"""

from __future__ import annotations

import itertools
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip(
    "nemo_rl",
    reason="NeMo-RL is not importable: put a checkout of NVIDIA-NeMo/RL on PYTHONPATH",
)
pytest.importorskip("vllm")
import arms
from run_ahead_steps import drafted_ahead, same

pytestmark = [pytest.mark.e2e, pytest.mark.long]
STEADY = Path(__file__).resolve().parents[1] / "contract" / "steady"
FOUR_STEPS = [
    "grpo.max_num_steps=4",
    *("--problems", "16"),
    "grpo.num_prompts_per_step=4",
    "grpo.val_period=2",
    "policy.train_global_batch_size=16",
    "policy.max_total_sequence_length=420",
    "policy.generation.vllm_cfg.async_engine=true",
    "cluster.gpus_per_node=2",
    "checkpointing.enabled=true",
    "checkpointing.metric_name=null",
    "checkpointing.save_period=2",
]
FIGURES = "reward", "loss", "grad_norm", "mean_gen_tokens_per_sample"
AHEAD = [*arms.ARMS["history"], f"{arms.DAS}.history.run_ahead=auto"]


@dataclass
class Runs:
    """Four steps, in which every problem is met once, off and with run-ahead, and the
    last two again, resumed; with run-ahead after a run that was killed in the third
    step, while it wrote the fourth.
    """

    off: arms.Steps
    ahead: arms.Steps
    resumed_off: arms.Steps
    resumed: arms.Steps


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    out = tmp_path_factory.mktemp("ahead")

    def run(name: str, arm: list[str], saved: str) -> arms.Steps:
        steps = arms.run(
            name,
            [*arm, *FOUR_STEPS, f"checkpointing.checkpoint_dir={out / saved}"],
            out,
        )
        # nothing to complain of
        assert "written ahead" not in (out / f"{name}.log").read_text()
        return steps

    with pytest.MonkeyPatch.context() as patch:  # as in test_nemo_rl_runs.py
        where = [str(STEADY), str(STEADY.parent), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, where)))
        whole = [
            run("off", arms.ARMS["off"], "of_off"),
            run("ahead", AHEAD, "of_ahead"),
        ]
        for saved in ("of_off", "of_ahead"):
            shutil.rmtree(out / saved / "step_4")
        resumed_off = run("resumed_off", arms.ARMS["off"], "of_off")
        patch.setenv("DAS_TEST_KILLED_IN", "3")
        with pytest.raises(SystemExit):
            run("killed", AHEAD, "of_ahead")
        assert not (out / "killed.jsonl").exists() or not arms.steps(
            out / "killed.jsonl"
        )
        patch.delenv("DAS_TEST_KILLED_IN")
        rest = [resumed_off, run("resumed", AHEAD, "of_ahead")]
    return Runs(*whole, *rest)


def test_tokens_rewards_and_gradients_are_the_same(runs: Runs) -> None:
    assert len(runs.off) == 4
    same(runs.off, runs.ahead, FIGURES)


def test_requests_draft_what_was_written_ahead_and_repeat_it(runs: Runs) -> None:
    assert drafted_ahead(runs.ahead)


def test_what_is_written_ahead_is_not_in_the_history(runs: Runs) -> None:
    written = 0.0
    for before, step in itertools.pairwise(runs.ahead):
        written += 16 * before["mean_gen_tokens_per_sample"]
        assert step["das/history_tokens"] == pytest.approx(written)


def test_a_run_that_was_killed_while_it_wrote_ahead_is_resumed_as_it_was(
    runs: Runs,
) -> None:
    assert len(runs.resumed) == 2
    assert drafted_ahead(runs.resumed)
    same(runs.resumed_off, runs.resumed, FIGURES)
