"""What is known of a policy before it is loaded, from its own config.json: recurrent
layers, beside which drafts are short or refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from das_adapter import compat
from das_adapter.config import DasConfig
from das_adapter.core.policy_sizes import recurrent_state
from das_adapter.engine.recurrent import most_draft_tokens
from das_adapter.errors import ConfigError

DELTANET = "Gated DeltaNet"
MAMBA2 = "Mamba2"
SHORT_CONVOLUTIONS = "short convolutions"
MAMBA1 = "Mamba1"
LINEAR_ATTENTION = "linear attention"
DELTA_ATTENTION = "Kimi Delta Attention"
RECURRENT = {
    "Qwen3_5ForCausalLM": DELTANET,
    "Qwen3_5ForConditionalGeneration": DELTANET,
    "Qwen3_5MoeForCausalLM": DELTANET,
    "Qwen3_5MoeForConditionalGeneration": DELTANET,
    "Qwen3NextForCausalLM": DELTANET,
    "OlmoHybridForCausalLM": DELTANET,
    "NemotronHForCausalLM": MAMBA2,
    "NemotronH_Nano_VL_V2": MAMBA2,
    "FalconH1ForCausalLM": MAMBA2,
    "GraniteMoeHybridForCausalLM": MAMBA2,
    "Mamba2ForCausalLM": MAMBA2,
    "Zamba2ForCausalLM": MAMBA2,
    "Lfm2ForCausalLM": SHORT_CONVOLUTIONS,
    "Lfm2MoeForCausalLM": SHORT_CONVOLUTIONS,
    "Lfm2VlForConditionalGeneration": SHORT_CONVOLUTIONS,
    "MambaForCausalLM": MAMBA1,
    "FalconMambaForCausalLM": MAMBA1,
    "JambaForCausalLM": MAMBA1,
    "BailingMoeV2_5ForCausalLM": LINEAR_ATTENTION,
    "MiniMaxText01ForCausalLM": LINEAR_ATTENTION,
    "MiniMaxM1ForCausalLM": LINEAR_ATTENTION,
    "KimiLinearForCausalLM": DELTA_ATTENTION,
    "BailingMoeV3ForCausalLM": DELTA_ATTENTION,
}
"""Kinds of recurrent layers, by Hugging Face's architecture."""
NAMES = {
    r"Qwen3\.[56]": "Qwen3_5ForConditionalGeneration",
    r"Qwen3-Next": "Qwen3NextForCausalLM",
    r"Nemotron-3|Nemotron-H|Nemotron-Nano-\d+B-v2": "NemotronHForCausalLM",
    r"LFM2": "Lfm2ForCausalLM",
    r"Falcon-H1": "FalconH1ForCausalLM",
    r"granite-4": "GraniteMoeHybridForCausalLM",
    r"Jamba": "JambaForCausalLM",
    r"falcon-mamba": "FalconMambaForCausalLM",
    r"MiniMax-(Text-01|M1)": "MiniMaxText01ForCausalLM",
    r"Kimi-Linear": "KimiLinearForCausalLM",
}
"""Architectures by what a model's name has in it: without its config.json nothing else
tells.
"""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of a config.json that count routed experts."""
DRAFTED = (DELTANET, MAMBA2, SHORT_CONVOLUTIONS)
"""Kinds beside which drafts can stand; engines find the layers themselves
(`engine.recurrent`).
"""


class Policy(NamedTuple):
    """A policy with recurrent layers."""

    architecture: str
    kind: str
    """Of its recurrent layers, see `RECURRENT`."""
    state_mib: float | None
    """MiB of one state of a request, all layers together; None: not known."""

    @property
    def multimodal(self) -> bool:
        """Whether it is loaded with a vision tower."""
        name = self.architecture
        return name.endswith("ForConditionalGeneration") or "_VL" in name


def read(model: str) -> dict[str, Any] | None:
    """Return the config.json of a model: of a directory, or of a name on the Hub that
    is in the cache here; None: it is not here.
    """
    path = Path(model) / "config.json"
    if not path.is_file():
        try:
            from huggingface_hub import try_to_load_from_cache
            from huggingface_hub.errors import HFValidationError
        except ImportError:
            return None
        try:
            cached = try_to_load_from_cache(model, "config.json")
        except HFValidationError:
            return None
        if not isinstance(cached, str):
            return None
        path = Path(cached)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None
    return content if isinstance(content, dict) else None


def has_experts(content: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of a policy with routed experts."""
    text = {**content, **(content.get("text_config") or {})}
    return any(text.get(key) for key in EXPERTS)


def has_mrope(content: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of a policy with multimodal rotary
    positions.
    """
    text = {**content, **(content.get("text_config") or {})}
    for key in ("rope_scaling", "rope_parameters"):
        if "mrope_section" in (text.get(key) or {}):
            return True
    return False


def recurrent(content: Mapping[str, Any]) -> Policy | None:
    """Return what a config.json says of a policy with recurrent layers; None: it has
    none that are known.
    """
    for architecture in content.get("architectures") or ():
        kind = RECURRENT.get(architecture)
        if kind is not None:
            text = {**content, **(content.get("text_config") or {})}
            state = recurrent_state(text)
            mib = None if state is None else state.num_bytes / 2**20
            return Policy(architecture, kind, mib)
    return None


def named(model: str) -> Policy | None:
    """Return what a model's name says of a policy with recurrent layers; None: it names
    no family that has some.
    """
    for pattern, architecture in NAMES.items():
        if re.search(pattern, model, re.IGNORECASE):
            return Policy(architecture, RECURRENT[architecture], None)
    return None


def beside_policy(
    das: DasConfig, policy: Policy, v1: str | None
) -> tuple[DasConfig, str]:
    """Return the block as engines take it beside a policy with recurrent layers, and
    what that costs; `v1`: why they run vLLM's V1 model runner, None: they run V2.

    Raises:
        ConfigError: they refuse it.
    """
    found = f"{policy.architecture}, a policy with recurrent state ({policy.kind})"
    refused = f"das.drafter={das.drafter!r} does not work with {found}"
    if policy.kind not in DRAFTED:
        raise ConfigError(f"{refused}; allowed: das.drafter='none'")
    if das.copies_policy:
        raise ConfigError(f"{refused}; das.drafter='history' does")
    if das.neural and das.controlled and policy.multimodal:
        raise ConfigError(
            f"{refused}, which is multimodal; das.drafter='history' does, and"
            " das.budget='unlimited' with das.speculate='always'"
        )
    if das.controlled and v1 is not None:
        raise ConfigError(
            f"{refused} on vLLM's V1 model runner (V2 runs it, from vLLM"
            f" {compat.V2_RUNNER.oldest} on), which engines run: {v1}"
        )
    most = most_draft_tokens(das, found)
    if policy.state_mib is not None:
        each = policy.state_mib
        found += (
            f": {each:.0f} MiB of state a request, and as much for each of {most} draft"
            f" tokens, {each * (1 + most):.0f} MiB in all (float32, over all"
            " tensor-parallel ranks)"
        )
    return das.model_copy(update={"max_draft_tokens": most}), found
