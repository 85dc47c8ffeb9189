"""Whole runs of NeMo-RL's trainers: real Ray, real generation workers, real vLLM, real refits, a policy that trains."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nemo_rl", reason="NeMo-RL is not importable: put a checkout of NVIDIA-NeMo/RL on PYTHONPATH")
pytest.importorskip("vllm")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples/nemo_rl"))
import arms  # noqa: E402
import cpu_async  # noqa: E402

pytestmark = pytest.mark.e2e

# Four problems in two steps an epoch; one response in some steps runs into the end of the context.
SMALL = ["grpo.max_num_steps=4", "--problems", "4", "grpo.num_prompts_per_step=2", "policy.train_global_batch_size=8",
         "policy.max_total_sequence_length=80", "grpo.val_period=2"]  # fmt: skip
PER_STEP = 8


@pytest.fixture(scope="module")
def sync(tmp_path_factory: pytest.TempPathFactory) -> dict[str, arms.Steps]:
    out = tmp_path_factory.mktemp("sync")
    return {
        "off": arms.run("off", [*arms.ARMS["off"], *SMALL], out),
        "history": arms.run(
            "history", [*arms.ARMS["history"], *SMALL, "++policy.generation.das.routing.policy=least_loaded"], out
        ),
    }


def test_training_is_the_same_to_the_last_token_and_the_last_gradient(sync: Any) -> None:
    off, history = sync["off"], sync["history"]
    assert len(off) == len(history) == 4
    for a, b in zip(off, history, strict=True):
        for key in ("das/token_hash", "reward", "loss", "grad_norm", "truncation_rate", "max_gen_tokens_per_sample"):
            assert a[key] == b[key], key


def test_no_response_ends_earlier_than_without_speculation(sync: Any) -> None:
    """The batch has responses that only the end of the context stops: NeMo-RL's clamp would cut them earlier."""
    assert max(step["truncation_rate"] for step in sync["off"]) > 0


def test_the_weights_advance_with_every_refit(sync: Any) -> None:
    for steps in sync.values():
        versions = [step["das/weight_version"] for step in steps]
        assert versions == sorted(set(versions))
    assert all(step["grad_norm"] > 0 for step in sync["history"])


def test_drafts_are_accepted_from_the_second_epoch_on(sync: Any) -> None:
    for step in sync["history"][2:]:
        assert step["das/acceptance_length"] > 1.5
        assert step["vllm/spec_num_accepted_tokens"] > 0
    assert all(step["das/tokens_per_forward"] == 1 for step in sync["off"])


def test_nemo_rls_own_figures_agree_with_ours(sync: Any) -> None:
    for step in sync["history"]:
        assert step["das/health"] == 1
        assert step["vllm/spec_acceptance_length"] == pytest.approx(step["das/acceptance_length"], rel=0.05)


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
    return arms.run("history", [*arms.ARMS["history"], *SMALL, *cpu_async.ASYNC], out)


def test_an_asynchronous_run_drafts_while_its_weights_are_updated(asynchronous: Any) -> None:
    versions = [step["das/weight_version"] for step in asynchronous]
    assert versions == sorted(set(versions))
    assert max(step["das/acceptance_length"] for step in asynchronous[2:]) > 1.2
    assert asynchronous[-1]["das/history_tokens"] > 0
    assert all(step["das/health"] == 1 for step in asynchronous)


def test_by_yaml_alone_a_stock_driver_speculates(tmp_path: Path) -> None:
    steps = arms.run("stock", [*arms.ARMS["history"], *SMALL, "--stock-driver"], tmp_path)
    assert steps[0]["vllm/spec_num_accepted_tokens"] < steps[-1]["vllm/spec_num_accepted_tokens"]
    assert all("das/health" not in step for step in steps)
