"""Whole runs of NeMo-RL's trainers: real Ray, real generation workers, real vLLM, real
refits, a policy that trains.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "nemo_rl",
    reason="NeMo-RL is not importable: put a checkout of NVIDIA-NeMo/RL on PYTHONPATH",
)
pytest.importorskip("vllm")
import arms

pytestmark = pytest.mark.e2e

# Four problems in two steps an epoch; one response in some steps runs into the end of
# the context.
SMALL = [
    "grpo.max_num_steps=4",
    "--problems",
    "4",
    "grpo.num_prompts_per_step=2",
    "policy.train_global_batch_size=8",
    "policy.max_total_sequence_length=80",
    "grpo.val_period=2",
]
PER_STEP = 8
STEADY = Path(__file__).resolve().parents[1] / "contract" / "steady"


@pytest.fixture(scope="module", autouse=True)
def _steady() -> Iterator[None]:
    """What the shipped block decides is the same on every machine: for das-adapter each
    step takes equally long.
    """
    where = [str(STEADY), str(STEADY.parent), os.environ.get("PYTHONPATH", "")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, where)))
        yield


@pytest.fixture(scope="module")
def sync(tmp_path_factory: pytest.TempPathFactory) -> dict[str, arms.Steps]:
    out = tmp_path_factory.mktemp("sync")
    command = [sys.executable, arms.__file__, "--out", str(out), *SMALL]
    subprocess.run([*command, f"{arms.DAS}.routing=least_loaded"], check=True)
    return {name: arms.steps(out / f"{name}.jsonl") for name in arms.ARMS}


def test_training_is_the_same_to_the_last_token_and_the_last_gradient(
    sync: Any,
) -> None:
    off = sync["off"]
    history = sync["history"]
    assert len(off) == len(history) == 4
    for a, b in zip(off, history, strict=True):
        for key in (
            "das/token_hash",
            "reward",
            "loss",
            "grad_norm",
            "truncation_rate",
            "max_gen_tokens_per_sample",
        ):
            assert a[key] == b[key], key


def test_no_response_ends_earlier_than_without_speculation(sync: Any) -> None:
    """The batch has responses that only the end of the context stops: NeMo-RL's clamp
    would cut them earlier.
    """
    assert max(step["truncation_rate"] for step in sync["off"]) > 0


def test_the_weights_advance_with_every_refit(sync: Any) -> None:
    for steps in sync.values():
        versions = [step["das/weight_version"] for step in steps]
        assert versions == sorted(set(versions))
    assert any(step["grad_norm"] > 0 for step in sync["history"])


def test_drafts_are_accepted_from_the_second_epoch_on(sync: Any) -> None:
    assert [step["das/history_hits"] for step in sync["history"]] == [0, 0, 1, 1]
    for step in sync["history"][2:]:
        assert step["das/acceptance_length"] > 1.5
        assert step["vllm/spec_num_accepted_tokens"] > 0
    assert all(step["das/tokens_per_forward"] == 1 for step in sync["off"])


def test_nemo_rls_own_figures_agree_with_ours(sync: Any) -> None:
    for step in sync["history"]:
        assert step["das/health"] == 1
        assert step["vllm/spec_acceptance_length"] == pytest.approx(
            step["das/acceptance_length"], rel=0.05
        )


def test_validation_never_enters_the_history(sync: Any) -> None:
    steps = sync["history"]
    written = 0.0
    for before, step in itertools.pairwise(steps):
        written += PER_STEP * before["mean_gen_tokens_per_sample"]
        assert step["das/history_tokens"] == pytest.approx(written)


def test_the_log_probabilities_are_the_trainers_own(sync: Any) -> None:
    for steps in sync.values():
        assert all(step["token_mult_prob_error"] < 1.001 for step in steps)


@pytest.fixture(scope="module")
def asynchronous(tmp_path_factory: pytest.TempPathFactory) -> arms.Steps:
    out = tmp_path_factory.mktemp("async")
    return arms.run("history", [*arms.ARMS["history"], *SMALL, *arms.ASYNC], out)


@pytest.mark.long
def test_an_asynchronous_run_drafts_while_its_weights_are_updated(
    asynchronous: Any,
) -> None:
    versions = [step["das/weight_version"] for step in asynchronous]
    assert versions == sorted(set(versions))
    assert max(step["das/acceptance_length"] for step in asynchronous[2:]) > 1.2
    assert asynchronous[-1]["das/history_tokens"] > 0
    assert asynchronous[-1]["das/history_hits"] > 0
    assert all(step["das/health"] == 1 for step in asynchronous)


@pytest.mark.long
def test_by_yaml_alone_a_stock_driver_speculates(tmp_path: Path) -> None:
    steps = arms.run(
        "stock", [*arms.ARMS["history"], *SMALL, "--stock-driver"], tmp_path
    )
    assert (
        steps[0]["vllm/spec_num_accepted_tokens"]
        < steps[-1]["vllm/spec_num_accepted_tokens"]
    )
    assert all("das/health" not in step for step in steps)


KEPT = [
    "checkpointing.enabled=true",
    "checkpointing.metric_name=null",
    "checkpointing.save_period=3",
    "grpo.max_num_steps=3",
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, arms.Steps]:
    """A run that saves a checkpoint after its third step, in the second of its
    epochs.
    """
    out = tmp_path_factory.mktemp("saved")
    where = f"checkpointing.checkpoint_dir={out / 'checkpoints'}"
    return out, arms.run("history", [*arms.ARMS["history"], *SMALL, *KEPT, where], out)


@pytest.mark.long
def test_a_resumed_run_drafts_from_its_first_step_and_writes_the_tokens_of_off(
    saved: Any,
) -> None:
    out, before = saved
    where = (  # it is read where `enabled` is false, too
        f"checkpointing.checkpoint_dir={out / 'checkpoints'}"
    )
    off, history = (
        arms.run(f"resumed_{arm}", [*arms.ARMS[arm], *SMALL, where], out)
        for arm in ("off", "history")
    )
    assert len(off) == len(history) == 1  # the fourth step
    for key in ("das/token_hash", "reward", "loss", "grad_norm"):
        assert off[0][key] == history[0][key], key
    first = history[0]
    assert first["das/token_hash"] not in {step["das/token_hash"] for step in before}
    assert first["das/history_hits"] == 1
    assert first["das/history_tokens"] == pytest.approx(
        PER_STEP * sum(s["mean_gen_tokens_per_sample"] for s in before)
    )
    assert first["das/acceptance_length"] > 1.5
    assert first["das/tokens_per_forward"] > before[0]["das/tokens_per_forward"]
    assert off[0]["das/tokens_per_forward"] == 1


@pytest.mark.long
def test_another_run_drafts_from_a_saved_history_from_its_first_step(
    saved: Any,
) -> None:
    out, before = saved
    warm = f"{arms.DAS}.history.load={out / 'checkpoints/step_3/das_history'}"
    [step] = arms.run(
        "warm", [*arms.ARMS["history"], *SMALL, "grpo.max_num_steps=1", warm], out
    )
    assert (before[0]["das/history_hits"], step["das/history_hits"]) == (0, 1)
    assert step["das/token_hash"] == before[0]["das/token_hash"]
    assert step["das/tokens_per_forward"] > before[0]["das/tokens_per_forward"]


@pytest.mark.long
def test_another_tokenizers_history_stops_the_run(saved: Any, tmp_path: Path) -> None:
    foreign = tmp_path / "das_history"
    shutil.copytree(saved[0] / "checkpoints/step_3/das_history", foreign)
    facts = json.loads((foreign / "history.json").read_text())
    (foreign / "history.json").write_text(json.dumps({**facts, "tokenizer": "another"}))
    with pytest.raises(SystemExit, match=r"the refused arm failed"):
        arms.run(
            "refused",
            [*arms.ARMS["history"], *SMALL, f"{arms.DAS}.history.load={foreign}"],
            tmp_path,
        )
    message = (
        f"policy.generation.das.history.load: the history in {str(foreign)!r} was"
        " written with tokenizer 'another'"
    )
    assert message in (tmp_path / "refused.log").read_text()
