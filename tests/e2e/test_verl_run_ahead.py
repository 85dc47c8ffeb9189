"""Runs of the veRL trainer on two replicas, of which the one that has nothing left
writes ahead for the next step.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from run_ahead_steps import drafted_ahead, same
from test_verl import DAS, ROOT, TWO_RANKS, checkpoints, steady, steps, train

pytestmark = [pytest.mark.e2e, pytest.mark.long]

FOUR_STEPS = [
    "data.max_response_length=384",
    "data.train_batch_size=4",
    "data.train_max_samples=16",
    "data.val_max_samples=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "trainer.total_training_steps=4",
]
FIGURES = "critic/score/mean", "actor/grad_norm", "actor/pg_loss", "response_length/max"
AHEAD = f"+{DAS}.history.run_ahead=auto"


@dataclass
class Runs:
    """Four steps, in which every problem is met once: off, with the history, and with
    run-ahead.
    """

    off: list[dict[str, Any]]
    history: list[dict[str, Any]]
    ahead: list[dict[str, Any]]
    saved: Path
    """Checkpoints of the latter."""


def run(out: Path, *overrides: str) -> list[dict[str, Any]]:
    found = train(out, *FOUR_STEPS, *TWO_RANKS, *overrides, variables=steady())
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-4000:]
    assert "written ahead" not in found.stdout + found.stderr  # nothing to complain of
    return steps(out)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    subprocess.run(
        [sys.executable, ROOT / "examples/tiny_math/prepare_data.py"],
        check=True,
        capture_output=True,
    )
    out = tmp_path_factory.mktemp("ahead")
    return Runs(
        off=run(out / "off", f"{DAS}.drafter=none", f"+{DAS}.verify.noise=keyed"),
        history=run(out / "history"),
        ahead=run(out / "ahead", AHEAD, *checkpoints(out / "saved")),
        saved=out / "saved",
    )


def test_tokens_rewards_and_gradients_are_the_same(runs: Runs) -> None:
    assert len(runs.off) == 4
    same(runs.off, runs.history, FIGURES)
    same(runs.off, runs.ahead, FIGURES)


def test_requests_draft_what_was_written_ahead_and_repeat_it(runs: Runs) -> None:
    written = drafted_ahead(runs.ahead)
    gained = 0.0
    for step, without in zip(runs.ahead, runs.history, strict=True):
        if step in written:
            gained += step["das/run_ahead_tokens"] * (
                step["das/tokens_per_forward"] - without["das/tokens_per_forward"]
            )
    assert gained > 0


def test_a_resumed_run_reads_the_same_batches(runs: Runs, tmp_path: Path) -> None:
    latest = runs.saved / "latest_checkpointed_iteration.txt"
    latest.write_text("2")
    resumed = run(tmp_path / "resumed", AHEAD, *checkpoints(runs.saved))
    same(resumed, runs.off[2:], FIGURES)
