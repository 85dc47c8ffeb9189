"""What a decode step reads and computes of a policy, from its Hugging Face config: the
weights of its linear layers and experts, and a request's recurrent state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from das_adapter.errors import DasError

DENSE = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"})
DELTANET = frozenset(
    {
        "qwen3_next",
        "qwen3_5",
        "qwen3_5_text",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
    }
)
MAMBA2 = frozenset({"nemotron_h"})
FAMILIES = DENSE | DELTANET | MAMBA2
"""Model types of Hugging Face configs whose sizes are read."""

PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Layers of Nemotron-H, by the letters of `hybrid_override_pattern`."""


@dataclass(frozen=True)
class RecurrentState:
    """The recurrent state of a request, in all layers together."""

    layers: int
    """Layers that have one."""
    recurrence: int
    """Values of a layer's recurrence."""
    convolution: int
    """Values of a layer's convolution."""

    @property
    def num_bytes(self) -> int:
        """Bytes with float32 for the recurrence and 16 bits for the convolution, which
        Qwen3.5 and Nemotron-H have by default.
        """
        return self.layers * (4 * self.recurrence + 2 * self.convolution)


@dataclass(frozen=True)
class PolicySizes:
    """Numbers of weights, and the shapes of attention and recurrent state."""

    hidden: int
    vocab: int
    tied: bool
    """Whether the head is the input embeddings."""
    linear: int
    """Weights of the linear layers that every token passes, without the head."""
    attention_layers: int
    heads: int
    kv_heads: int
    head_width: int
    experts: int = 0
    """Weights of all routed experts."""
    chosen_share: float = 0.0
    """Share of them that a token passes."""
    state: RecurrentState | None = None
    """None: the policy has no recurrent layers."""

    @property
    def of_token(self) -> float:
        """Weights that a token passes, head included."""
        chosen = self.chosen_share * self.experts
        return self.linear + chosen + self.hidden * self.vocab


def policy_sizes(config: Mapping[str, Any]) -> PolicySizes:
    """Return the sizes of a decoder (`config.json` as a mapping; of a multimodal policy
    its `text_config`). A config without `model_type` is read as one of `DENSE`.

    Raises:
        KeyError: the config lacks a size.
        DasError: its `model_type` is not in `FAMILIES`.
    """
    family = config.get("model_type")
    if family in DELTANET:
        return _deltanet(config)
    if family in MAMBA2:
        return _nemotron(config)
    if family and family not in DENSE:
        raise DasError(
            f"found model_type={family!r}, allowed: {', '.join(sorted(FAMILIES))}, or"
            " none where the layers are as theirs"
        )
    return _dense(config)


def recurrent_state(config: Mapping[str, Any]) -> RecurrentState | None:
    """Return the recurrent state of a policy with Gated DeltaNet or Mamba2 of a family
    in `FAMILIES`; None: it has none that is known.
    """
    family = config.get("model_type")
    try:
        if family in DELTANET:
            return _deltanet_state(config)
        if family in MAMBA2:
            return _mamba_state(config)
    except (KeyError, TypeError, AttributeError):
        return None
    return None


def _dense(config: Mapping[str, Any]) -> PolicySizes:
    """Return the sizes of attention and a feed-forward network, or experts, in every
    layer.
    """
    layers = config["num_hidden_layers"]
    hidden = config["hidden_size"]
    shape = _attention(config)
    num_experts = config.get("num_experts") or config.get("num_local_experts") or 0
    expert_width = config.get("moe_intermediate_size")
    inner_width = expert_width or config["intermediate_size"]
    feed_forward = 3 * hidden * inner_width
    of_layer = _attention_weights(hidden, shape)
    if not num_experts:
        of_layer += feed_forward
    return PolicySizes(
        **_embeddings(config),
        **shape,
        **_experts(config, layers * num_experts * feed_forward, num_experts),
        linear=layers * of_layer,
        attention_layers=layers,
    )


def _deltanet(config: Mapping[str, Any]) -> PolicySizes:
    """Return the sizes of Qwen3-Next, Qwen3.5 and Qwen3.6: Gated DeltaNet in most
    layers, gated attention in the others.
    """
    layers = config["num_hidden_layers"]
    hidden = config["hidden_size"]
    shape = _attention(config)
    gate = hidden * shape["heads"] * shape["head_width"]
    state = _deltanet_state(config)
    value_heads = config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = value_heads * config["linear_value_head_dim"]
    # queries, keys, values, their gate, two numbers a head; back from the values
    recurrent = hidden * (2 * keys + 2 * values + 2 * value_heads) + values * hidden
    attention_layers = layers - state.layers
    linear = state.layers * recurrent
    linear += attention_layers * (_attention_weights(hidden, shape) + gate)
    num_experts = config.get("num_experts") or 0
    expert = 0
    if num_experts:
        shared_width = config.get("shared_expert_intermediate_size") or 0
        # the router and the shared expert, with its gate
        linear += layers * hidden * (num_experts + 3 * shared_width + 1)
        expert = 3 * hidden * config["moe_intermediate_size"]
    else:
        linear += layers * 3 * hidden * config["intermediate_size"]
    return PolicySizes(
        **_embeddings(config),
        **shape,
        **_experts(config, layers * num_experts * expert, num_experts),
        linear=linear,
        attention_layers=attention_layers,
        state=state,
    )


def _nemotron(config: Mapping[str, Any]) -> PolicySizes:
    """Return the sizes of Nemotron-H and Nemotron-3: layers of Mamba2, of attention, of
    feed-forward networks with two matrices, and of such experts.
    """
    hidden = config["hidden_size"]
    shape = _attention(config)
    state = _mamba_state(config)
    kinds = _nemotron_layers(config)
    heads = config["mamba_num_heads"]
    inner = heads * config["mamba_head_dim"]
    groups = 2 * config["n_groups"] * config["ssm_state_size"]
    mamba = hidden * (2 * inner + groups + heads) + inner * hidden
    attention_layers = kinds.count("attention")
    linear = state.layers * mamba
    linear += attention_layers * _attention_weights(hidden, shape)
    if "mlp" in kinds:
        linear += kinds.count("mlp") * 2 * hidden * config["intermediate_size"]
    expert_layers = kinds.count("moe")
    num_experts = 0
    expert = 0
    if expert_layers:
        num_experts = config["n_routed_experts"]
        num_shared = config.get("n_shared_experts") or 0
        shared_width = config.get("moe_shared_expert_intermediate_size") or 0
        # the router and the shared experts
        linear += expert_layers * hidden * (num_experts + 2 * num_shared * shared_width)
        # Nemotron-3 Super's experts are narrower than its layers
        latent = config.get("moe_latent_size") or hidden
        if latent != hidden:
            linear += expert_layers * 2 * hidden * latent
        expert = 2 * latent * config["moe_intermediate_size"]
    return PolicySizes(
        **_embeddings(config),
        **shape,
        **_experts(config, expert_layers * num_experts * expert, num_experts),
        linear=linear,
        attention_layers=attention_layers,
        state=state,
    )


def _experts(
    config: Mapping[str, Any], weights: int, num_experts: int
) -> dict[str, Any]:
    """Return the weights of all routed experts, of so many in each layer, and the share
    that a token passes; nothing where there are none.
    """
    if not num_experts:
        return {}
    share = config["num_experts_per_tok"] / num_experts
    return {"experts": weights, "chosen_share": share}


def _embeddings(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "hidden": config["hidden_size"],
        "vocab": config["vocab_size"],
        "tied": bool(config.get("tie_word_embeddings")),
    }


def _attention(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the heads of an attention layer, and their width."""
    heads = config["num_attention_heads"]
    return {
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_width": config.get("head_dim") or config["hidden_size"] // heads,
    }


def _attention_weights(hidden: int, shape: Mapping[str, int]) -> int:
    projections = 2 * shape["heads"] + 2 * shape["kv_heads"]
    return hidden * shape["head_width"] * projections


def _deltanet_state(config: Mapping[str, Any]) -> RecurrentState:
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    layers = (config.get("layer_types") or ()).count("linear_attention")
    if not layers:
        every = config.get("full_attention_interval", 4)
        layers = config["num_hidden_layers"] * (every - 1) // every
    return RecurrentState(
        layers=layers,
        recurrence=values * config["linear_key_head_dim"],
        convolution=(2 * keys + values) * (config["linear_conv_kernel_dim"] - 1),
    )


def _mamba_state(config: Mapping[str, Any]) -> RecurrentState:
    inner = config["mamba_num_heads"] * config["mamba_head_dim"]
    channels = inner + 2 * config["n_groups"] * config["ssm_state_size"]
    return RecurrentState(
        layers=_nemotron_layers(config).count("mamba"),
        recurrence=inner * config["ssm_state_size"],
        convolution=channels * (config["conv_kernel"] - 1),
    )


def _nemotron_layers(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of each layer: "mamba", "attention", "mlp" or "moe"."""
    named = config.get("layers_block_type")
    if named:
        return list(named)
    return [PATTERN[letter] for letter in config["hybrid_override_pattern"]]
