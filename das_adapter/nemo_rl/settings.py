"""Reading the `das:` block out of a NeMo-RL config, and what it excludes there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from das_adapter import compat
from das_adapter.config import DasConfig, parse
from das_adapter.errors import ConfigError

BLOCK = "policy.generation.das"
REFRESHER = "das_refresher"
"""Key of vLLM's `additional_config`: `host` where the generation worker brings the engine's history up to date after a
refit; without it the engine's own worker does (`das_adapter.nemo_rl.engine`)."""


def of_generation(generation: Mapping[str, Any]) -> DasConfig | None:
    """The block of a generation config (`policy.generation`); None leaves NeMo-RL as it is.

    The engine reads the block from `vllm_kwargs.additional_config.das`, where the overlay puts it too; one of the two
    places is enough, and both must agree.
    """
    block, engine = generation.get("das"), (_vllm_kwargs(generation).get("additional_config") or {}).get("das")
    if block is not None and engine is not None and parse(block) != parse(engine):
        raise ConfigError(
            f"{BLOCK} and policy.generation.vllm_kwargs.additional_config.das differ: "
            "set the latter to ${policy.generation.das}, or remove it"
        )
    return parse(engine if block is None else block)


def check(generation: Mapping[str, Any]) -> DasConfig | None:
    """Refuse, before a worker is started, a block that is wrong or contradicts the rest of the generation config.

    Raises:
        ConfigError: names the key, what was found and what is allowed.
        UnsupportedHost: NeMo-RL lacks a symbol we stand on.
    """
    das = of_generation(generation)
    if das is None:
        return None
    if generation.get("backend", "vllm") != "vllm":
        raise ConfigError(f"{BLOCK}: found policy.generation.backend={generation['backend']!r}, allowed: 'vllm'")
    if das.drafter != "none" and _vllm_kwargs(generation).get("speculative_config"):
        raise ConfigError(
            f"{BLOCK}.drafter={das.drafter!r} and policy.generation.vllm_kwargs.speculative_config both choose a "
            "drafter: remove one of them"
        )
    if das.history.persist is not None:
        raise ConfigError(f"{BLOCK}.history.persist: found {das.history.persist!r}; allowed under NeMo-RL: null")
    if generation.get("quant_cfg") is not None:
        raise ConfigError(
            f"{BLOCK}: found policy.generation.quant_cfg, whose workers replace ours; allowed: quant_cfg: null"
        )
    compat.require("nemo_rl")
    return das


def _vllm_kwargs(generation: Mapping[str, Any]) -> Mapping[str, Any]:
    return generation.get("vllm_kwargs") or {}
