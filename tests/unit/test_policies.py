"""What `das-adapter config` says of a policy before it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from das_adapter.config import DasConfig, parse
from das_adapter.errors import ConfigError
from das_adapter.reports import configs, policies

QWEN = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "layer_types": ["linear_attention"] * 30 + ["full_attention"] * 10,
    },
}
"""Of Qwen3.5-35B-A3B."""
NEMOTRON = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "hybrid_override_pattern": "M" * 23 + "E" * 23 + "*" * 6,
}
"""Of Nemotron-3-Nano-30B."""


@pytest.fixture(autouse=True)
def any_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of other tests in this process may have chosen V1."""
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)


def block(**keys: Any) -> DasConfig:
    """A block that drafts."""
    found = parse(keys)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("content", "kind", "mib"),
    [(QWEN, policies.DELTANET, 61), (NEMOTRON, policies.MAMBA2, 47)],
)
def test_states_have_the_size_that_vllm_gives_them(
    content: dict[str, Any], kind: str, mib: int
) -> None:
    policy = policies.recurrent(content)
    assert policy is not None and policy.state_mib is not None
    assert policy.kind == kind
    assert round(policy.state_mib) == mib


def test_a_directory_says_how_short_drafts_are_and_what_they_cost(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    das, said = configs.with_policy(block(), str(tmp_path), {})
    assert das is not None and das.num_draft_tokens == 3
    assert "Gated DeltaNet): 61 MiB of state a request" in said
    assert "3 draft tokens, 246 MiB in all" in said
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert configs.with_policy(block(), str(tmp_path), {}) == (block(), "")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        configs.with_policy(block(), str(tmp_path), {})


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Qwen/Qwen3.5-9B", policies.DELTANET),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", policies.MAMBA2),
        ("LiquidAI/LFM2-1.2B", policies.SHORT_CONVOLUTIONS),
        ("Qwen/Qwen3-8B", None),
        ("nvidia/Llama-3_3-Nemotron-Super-49B-v1", None),
    ],
)
def test_without_its_config_a_policy_is_known_by_its_name(
    name: str, kind: str | None
) -> None:
    policy = policies.named(name)
    assert (policy and policy.kind) == kind
    das, said = configs.with_policy(block(), name, {})
    assert das is not None
    if kind is None:
        assert said.startswith(f"not known: the config.json of {name} is not here")
    else:
        assert kind in said and das.num_draft_tokens == 3


@pytest.mark.parametrize(
    ("keys", "name", "v1", "why"),
    [
        ({}, "ai21labs/AI21-Jamba-1.5", None, r"Mamba1\); allowed: das.drafter='none'"),
        ({"drafter": "self"}, "Qwen/Qwen3.5-9B", None, "das.drafter='history' does"),
        ({"drafter": "mtp"}, "Qwen/Qwen3.5-9B", None, "multimodal; .*'history' does"),
        ({}, "Qwen/Qwen3.5-9B", "it is old", "on vLLM's V1 model runner.*: it is old"),
        (
            {"max_draft_tokens": 8},
            "Qwen/Qwen3.5-9B",
            None,
            r"max_draft_tokens: found 8, allowed with Qwen3_5.*: at most 7",
        ),
    ],
)
def test_what_an_engine_would_refuse_is_refused(
    keys: dict[str, Any], name: str, v1: str | None, why: str
) -> None:
    policy = policies.named(name)
    assert policy is not None
    with pytest.raises(ConfigError, match=why):
        policies.beside_policy(block(**keys), policy, v1)
    off = parse({"drafter": "none", "verify": {"noise": "keyed"}})
    assert configs.with_policy(off, name, {}) == (off, "")


def test_a_layer_for_mtp_is_allowed_where_positions_allow_it() -> None:
    policy = policies.named("Qwen/Qwen3-Next-80B-A3B-Instruct")
    assert policy is not None
    das, _ = policies.beside_policy(block(drafter="history+mtp"), policy, None)
    assert das.num_draft_tokens == 3
