from __future__ import annotations

from typing import Any

import pytest

from das_adapter.core.hardware import DEVICES
from das_adapter.core.policy_sizes import policy_sizes, recurrent_state
from das_adapter.core.roofline import Roofline
from das_adapter.errors import DasError
from das_adapter.sim.models import MODELS

NEMOTRON_3_SUPER: dict[str, Any] = {
    "model_type": "nemotron_h",
    "hidden_size": 4096,
    "num_hidden_layers": 88,
    "vocab_size": 131072,
    "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM"
    "*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "n_routed_experts": 512,
    "n_shared_experts": 1,
    "num_experts_per_tok": 22,
    "moe_latent_size": 1024,
    "moe_intermediate_size": 2688,
    "moe_shared_expert_intermediate_size": 5376,
    "tie_word_embeddings": False,
}
QWEN3_NEXT = MODELS["Qwen/Qwen3-Next-80B-A3B"]


@pytest.mark.parametrize(
    ("config", "weights", "of_token"),
    [
        # the tensors of the checkpoint, without its layers for drafting
        (QWEN3_NEXT, 79_674_391_296, 3_874_929_408),
        (NEMOTRON_3_SUPER, 120_668_687_360, 12_770_216_960),
    ],
    ids=["Qwen3-Next", "Nemotron-3-Super"],
)
def test_the_weights_are_those_of_the_checkpoint(
    config: dict[str, Any], weights: int, of_token: int
) -> None:
    sizes = policy_sizes(config)
    embeddings = sizes.hidden * sizes.vocab
    found = sizes.linear + sizes.experts + 2 * embeddings
    assert found == pytest.approx(weights, rel=2e-3)
    assert sizes.of_token + embeddings == pytest.approx(of_token, rel=2e-3)


@pytest.mark.parametrize(
    ("name", "mib"),
    [("Qwen/Qwen3.5-35B-A3B", 61), ("Qwen/Qwen3.5-9B", 49)],
)
def test_a_state_has_a_matrix_for_each_head(name: str, mib: int) -> None:
    state = recurrent_state(MODELS[name])
    assert state is not None
    assert round(state.num_bytes / 2**20) == mib


def test_layers_are_named_or_lettered() -> None:
    lettered = recurrent_state(NEMOTRON_3_SUPER)
    kinds = {"M": "mamba", "E": "moe", "*": "attention"}
    named = [kinds[letter] for letter in NEMOTRON_3_SUPER["hybrid_override_pattern"]]
    assert lettered == recurrent_state({**NEMOTRON_3_SUPER, "layers_block_type": named})
    assert lettered is not None
    assert lettered.layers == 40


def test_a_policy_of_attention_alone_has_no_state() -> None:
    assert policy_sizes(MODELS["Qwen/Qwen3-8B"]).state is None
    assert recurrent_state(MODELS["Qwen/Qwen3-8B"]) is None


def test_another_family_is_refused_by_name() -> None:
    with pytest.raises(DasError, match="found model_type='jamba', allowed: llama, "):
        policy_sizes({"model_type": "jamba"})


def test_a_step_writes_a_state_for_each_token() -> None:
    """And reads one for each request: the drafts of a large batch are no longer
    free.
    """
    roof = Roofline.from_config(QWEN3_NEXT, DEVICES["h100"], tensor_parallel=4)
    state_s = roof.state_bytes / DEVICES["h100"].bandwidth
    without = Roofline.from_config(
        QWEN3_NEXT | {"full_attention_interval": 1, "layer_types": ["full_attention"]},
        DEVICES["h100"],
        tensor_parallel=4,
    )
    assert without.state_bytes == 0

    def drafts_cost(of: Roofline) -> float:
        weights_s = of.weights_s(32 * 4) - of.weights_s(32)
        return float(of.seconds(32, 1000, 3) - of.seconds(32, 1000, 0) - weights_s)

    assert drafts_cost(without) == pytest.approx(0, abs=1e-9)
    assert drafts_cost(roof) == pytest.approx(3 * 32 * state_s)
    model = roof.step_model()
    assert model.request == pytest.approx(state_s)
    assert model.token >= state_s
