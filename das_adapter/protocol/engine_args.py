"""What a host must pass to vLLM so that an engine speculates as a `das:` block says. Imports no vLLM."""

from __future__ import annotations

from typing import Any

from das_adapter.config import DasConfig

SETTINGS_KEY = "das"
"""Key of vLLM's `additional_config` under which every engine process finds the `das:` block."""

PROBLEM_ARG, SEED_ARG, RECORD_ARG, START_ARG = "das_problem", "das_seed", "das_record", "das_start"
"""Keys of `SamplingParams.extra_args`: 64-bit identity of the problem, seed of the keyed noise, whether the text may
serve as history (0 for validation), and where the trajectory's text begins that is in no history yet, in tokens of the
prompt: what a resumed request has written already and a tool's answer lie behind it (default: the prompt's end).
Flat integers, so that the OpenAI server's `vllm_xargs` can carry them."""

_PROPOSERS = {
    "history": "drafters.history.{Keyed}HistoryProposer",
    "self": "drafters.policy_copy.{Keyed}SelfProposer",
    "history+self": "drafters.mixed.{Keyed}MixedProposer",
}


def engine_args(config: DasConfig | None) -> dict[str, Any]:
    """Engine arguments (`vllm.LLM(**args)`, `AsyncEngineArgs`) of a `das:` block.

    Args:
        config: what `das_adapter.config.parse` returned; None gives no arguments: stock vLLM.

    Returns:
        `additional_config`, and `speculative_config` where a drafter drafts. The engine's process must have the
        environment `engine_env(config)`.
    """
    if config is None:
        return {}
    args: dict[str, Any] = {"additional_config": {SETTINGS_KEY: config.to_dict()}}
    tokens = config.num_draft_tokens
    if config.own:
        args["speculative_config"] = {
            "method": "custom_class",
            "model": f"das_adapter.engine.{_PROPOSERS[config.drafter].format(Keyed='Keyed' if config.keyed else '')}",
            "num_speculative_tokens": tokens,
        }
    elif config.neural:
        draft = config.draft
        args["speculative_config"] = {"method": config.drafter, "num_speculative_tokens": tokens, **draft.options}
        if draft.model is not None:
            args["speculative_config"]["model"] = draft.model
    elif config.drafter == "ngram":
        args["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": tokens,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 5,
        }
    return args


def engine_env(config: DasConfig | None) -> dict[str, str]:
    """Environment of the engine processes: samplers and drafters of das-adapter live in vLLM's V1 model runner."""
    return {} if config is None else {"VLLM_USE_V2_MODEL_RUNNER": "0"}
