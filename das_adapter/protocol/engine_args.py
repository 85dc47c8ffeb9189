"""What a host must pass to vLLM so that an engine speculates as a `das:` block says. Imports no vLLM."""

from __future__ import annotations

from typing import Any

from das_adapter.config import DasConfig

SETTINGS_KEY = "das"
"""Key of vLLM's `additional_config` under which every engine process finds the `das:` block."""
DRAFTER = "das_adapter.engine.drafters.controlled.ControlledDrafter"
"""The class that vLLM loads as proposer where das-adapter itself drafts."""


def engine_args(config: DasConfig | None) -> dict[str, Any]:
    """Return the engine arguments (`vllm.LLM(**args)`, `AsyncEngineArgs`) of a `das:` block.

    Args:
        config: what `das_adapter.config.parse` returned; None gives no arguments: stock vLLM.

    Returns:
        `additional_config`, and `speculative_config` where a drafter drafts. The engine's process must have the
        environment `engine_env(config)`.
    """
    if config is None:
        return {}
    speculative: dict[str, Any] = {"num_speculative_tokens": config.num_draft_tokens}
    if config.controlled:
        speculative |= {"method": "custom_class", "model": DRAFTER}
    elif config.neural:
        speculative |= {"method": config.drafter, **config.draft.options}
        if config.draft.model is not None:
            speculative["model"] = config.draft.model
    elif config.drafter == "ngram":
        speculative |= {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5}
    args: dict[str, Any] = {"additional_config": {SETTINGS_KEY: config.to_dict()}}
    return args if config.drafter == "none" else args | {"speculative_config": speculative}


def engine_env(config: DasConfig | None) -> dict[str, str]:
    """Return the engine processes' environment: das-adapter's samplers and drafters need vLLM's V1 model runner."""
    return {} if config is None else {"VLLM_USE_V2_MODEL_RUNNER": "0"}
