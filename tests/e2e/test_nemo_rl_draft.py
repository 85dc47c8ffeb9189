"""NeMo-RL's online training of a drafter (`policy.draft`): a whole run in which the
drafter trains and drafts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

pytest.importorskip(
    "nemo_rl",
    reason="NeMo-RL is not importable: put a checkout of NVIDIA-NeMo/RL on PYTHONPATH",
)
pytest.importorskip("vllm")
import torch
from seen_drafter import SEEN
from test_nemo_rl_runs import SMALL, _steady, arms  # noqa: F401

pytestmark = [pytest.mark.e2e, pytest.mark.long]
STEPS = 10
RUN = [*SMALL, f"grpo.max_num_steps={STEPS}", "grpo.val_period=0"]
SAVED = [
    "checkpointing.enabled=true",
    "checkpointing.metric_name=null",
    "checkpointing.save_period=1",
]
MAKE = (
    Path(__file__).resolve().parents[2] / "examples" / "tiny_math" / "make_drafters.py"
)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of an EAGLE-3 head that has hardly been trained."""
    out = tmp_path_factory.mktemp("drafters")
    subprocess.run(
        [sys.executable, MAKE, out, "--steps", "1"], check=True, capture_output=True
    )
    return out / "eagle3"


def drafting(head: Path) -> list[str]:
    return [
        f"{arms.DAS}.drafter=eagle3",
        f"{arms.DAS}.draft.model={head}",
        f"{arms.DAS}.draft.weights=trainer",
    ]


def trained(head: Path) -> list[str]:
    return [
        "policy.draft.enabled=true",
        f"policy.draft.model_name={head}",
        "policy.draft.loss_weight=1.0",
    ]


@pytest.fixture(scope="module")
def off(tmp_path_factory: pytest.TempPathFactory) -> arms.Steps:
    """No drafter is trained, and none drafts."""
    return arms.run("off", [*arms.ARMS["off"], *RUN], tmp_path_factory.mktemp("off"))


@pytest.fixture(scope="module")
def eagle3(
    head: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[arms.Steps, Path]:
    """The drafter is trained, arrives at each refit and drafts; a checkpoint after each
    step, what the engine has after each refit in `seen`.
    """
    out = tmp_path_factory.mktemp("eagle3")
    (out / "seen").mkdir()
    saved = [
        *SAVED,
        "checkpointing.keep_top_k=99",
        f"checkpointing.checkpoint_dir={out}",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SEEN, str(out / "seen"))
        patch.setenv(
            "PYTHONPATH",
            os.pathsep.join([str(Path(__file__).parent), os.environ["PYTHONPATH"]]),
        )
        worker = "policy.generation.vllm_kwargs.worker_cls=seen_drafter.SeenDrafter"
        return (
            arms.run(
                "eagle3", [*drafting(head), *trained(head), *RUN, *saved, worker], out
            ),
            out,
        )


def test_a_drafter_that_trains_and_drafts_leaves_the_policys_training_as_it_was(
    off: Any, eagle3: Any
) -> None:
    assert len(off) == len(eagle3[0]) == STEPS
    for a, b in zip(off, eagle3[0], strict=True):
        for key in ("das/token_hash", "reward", "loss", "grad_norm"):
            assert a[key] == b[key], key
        assert b["token_mult_prob_error"] < 1.001


def test_a_drafter_that_trains_becomes_better(eagle3: Any) -> None:
    """From the first epoch of two steps to the last: on the same problems."""
    steps = eagle3[0]
    assert all(
        step["das/health"] == 1 and step["draft_grad_norm"] > 0 for step in steps
    )
    for first, last in zip(steps[:2], steps[-2:], strict=True):
        assert last["draft_loss"] < 0.9 * first["draft_loss"]
        assert last["das/acceptance_length"] > first["das/acceptance_length"]


def of_engine(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Name and stack a head's weights as vLLM does."""
    layer = "model.layers.0"
    stacks = {
        "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "mlp.gate_up_proj": ("gate_proj", "up_proj"),
    }
    found = {}
    for name, weight in weights.items():
        name = name.replace("midlayer", "layers.0")
        found[name if name.startswith("lm_head") else f"model.{name}"] = weight
    for stack, parts in stacks.items():
        block = stack.split(".")[0]
        found[f"{layer}.{stack}.weight"] = torch.cat(
            [found.pop(f"{layer}.{block}.{part}.weight") for part in parts]
        )
    return found


def test_after_each_refit_the_engine_has_the_trainers_drafter(
    eagle3: Any, head: Path
) -> None:
    out = eagle3[1]
    sent = [load_file(head / "model.safetensors")]
    for step in range(1, STEPS):
        weights = torch.load(out / f"step_{step}/policy/weights")
        sent.append(
            {
                n.removeprefix("draft."): w
                for n, w in weights.items()
                if n.startswith("draft.")
            }
        )
    for refit, expected in enumerate(map(of_engine, sent)):
        seen = load_file(out / f"seen/{refit}.safetensors")
        for name, weight in expected.items():
            # vLLM pads the vocabulary
            assert torch.equal(seen[name][: len(weight)], weight), (
                refit,
                name,
            )


def test_a_refit_without_the_drafters_weights_is_named(
    head: Path, tmp_path: Path
) -> None:
    steps = arms.run(
        "unsent", [*drafting(head), *SMALL, "grpo.max_num_steps=2"], tmp_path
    )
    assert [step["das/health"] for step in steps] == [0, 0]
    assert "brought no weight of the drafter" in (tmp_path / "unsent.log").read_text()
