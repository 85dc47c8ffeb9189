"""What a host must pass to vLLM so that an engine speculates as a `das:` block says.
Imports no vLLM.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from das_adapter import compat
from das_adapter.config import DasConfig
from das_adapter.errors import ConfigError

SETTINGS_KEY = "das"
"""Key of vLLM's `additional_config` under which every engine process finds the `das:`
block.
"""
REFRESHER = "das_refresher"
"""Key of `additional_config`: `host` where a host labels requests, harvests
trajectories and refreshes the engine at weight syncs; without it the engine does so
itself (`das_adapter.engine.alone`).
"""
RUN_KEY = "das_run"
"""Key of `additional_config`: what `RUN_VARIABLE` said, for workers that do not inherit
the environment.
"""
CONFIG_VARIABLE = "DAS_CONFIG"
"""Environment variable: the `das:` block of engines whose `additional_config` has none,
see `config.read`.
"""
RUN_VARIABLE = "DAS_RUN"
"""Environment variable: engines of a node that have no host share a history where this
names the same run.
"""
DRAFTER = "das_adapter.engine.v1.proposer.Proposer"
"""The class that vLLM's V1 runner loads as proposer where none of vLLM's drafts."""
RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
"""vLLM's environment variable that chooses its model runner."""
_MOST_LIKELY = (
    "parallel_drafting",
    "use_heterogeneous_vocab",
    "use_local_argmax_reduction",
)
"""Options of vLLM's drafters with which they draft their most likely tokens, in some
version.
"""
_DRAWN = {"draft_sample_method": "probabilistic"}
"""With it vLLM's drafters draw their tokens, and its rejection sampler knows with which
probabilities.
"""


def needs_v1(config: DasConfig) -> str | None:
    """Say why an engine must run vLLM's V1 model runner; None: it may run V2, where
    vLLM's own choice is V2.
    """
    if config.drafter == "ngram":
        return (
            "das.drafter='ngram' needs it; on V2 `history` drafts from the request's"
            " own text as well"
        )
    if config.uses_history and config.by_model and not config.keyed:
        return (
            "on V2 drafts of two sources are verified by das.verify.noise=keyed alone"
        )
    if os.environ.get(RUNNER_VARIABLE) == "0":
        return f"{RUNNER_VARIABLE}=0 in the environment"
    installed = compat.version("vllm")
    if installed is None:
        return None  # as in NeMo-RL's driver: its engines have one, and ask again
    installed_numbers = compat.numbers(installed)
    oldest = compat.V2_RUNNER.oldest
    if config.method == "draft_model":
        oldest = compat.V2_NEURAL.oldest
    if installed_numbers < compat.numbers(oldest):
        return f"vLLM {installed} is older than {oldest}"
    needed = compat.V2_RUNNER
    if config.neural:
        needed = compat.V2_NEURAL
    elif config.copies_policy:
        needed = compat.V2_COPY
    if installed_numbers < compat.numbers(needed.oldest):
        needed = compat.V2_RUNNER
    missing = compat.missing(needed)
    if missing:
        names = ", ".join(map(str, missing))
        return f"vLLM {installed} lacks {names}"
    return None


def refuse_variable(block: str) -> None:
    """Refuse, with a ConfigError, a block in the environment of a host's run: a run
    whose own config has none, or other engines than those of its rollouts, would
    speculate as without a host; `block`: key of the run's own block.
    """
    value = os.environ.get(CONFIG_VARIABLE)
    if value:
        raise ConfigError(
            f"{CONFIG_VARIABLE}: found {value!r:.100}, allowed: not set, because"
            f" {block} has the run's block"
        )


def refuse_arguments(
    das: DasConfig, block: str, place: str, given: Mapping[str, Any]
) -> None:
    """Refuse, with a ConfigError, a host's own engine arguments that contradict a
    block.

    Args:
        block, place: keys of the block and of the arguments in the run's config.
        given: the arguments.
    """
    additional = given.get("additional_config")
    if additional is not None and not isinstance(additional, Mapping):
        raise ConfigError(
            f"{place}.additional_config: found {additional!r}, expected a mapping"
        )
    if das.uses_history and das.history.scope == "trusted":
        raise ConfigError(
            f"{block}.history.scope: found 'trusted', which is for engines whose"
            " requests no host labels"
        )
    if das.drafter != "none" and given.get("speculative_config"):
        raise ConfigError(
            f"{block}.drafter={das.drafter!r} and {place}.speculative_config both"
            " choose a drafter: remove one of them"
        )
    if das.controlled and needs_v1(das) and given.get("async_scheduling"):
        raise ConfigError(
            f"{block}.drafter={das.drafter!r}: found {place}.async_scheduling=True,"
            " which vLLM's V1 runner refuses: remove it"
        )


def engine_args(
    config: DasConfig | None, additional: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the engine arguments (`vllm.LLM(**args)`, `AsyncEngineArgs`) of a host's
    `das:` block; none without one.

    They are `additional_config`, with what a host has there already: all else the
    plug-in adds where the engine's config is made.
    """
    if config is None:
        return {}
    with_block = dict(additional or {})
    with_block[SETTINGS_KEY] = config.to_dict()
    with_block[REFRESHER] = "host"
    return {"additional_config": with_block}


def v1_speculative_config(config: DasConfig) -> dict[str, Any] | None:
    """Return vLLM's `speculative_config` of a block for the V1 runner; None where
    nothing drafts.
    """
    if config.drafter == "none":
        return None
    drafter = {"method": "custom_class", "model": DRAFTER}
    if config.neural:
        drafter = _neural(config)
    return {
        "num_speculative_tokens": config.num_draft_tokens,
        **drafter,
    }


def v2_speculative_config(config: DasConfig) -> dict[str, Any] | None:
    """Return vLLM's `speculative_config` of a block for the V2 runner: a neural
    drafter's, or that of the look-up drafter whose place das-adapter's takes; with the
    draft lengths that graphs are captured for, where the controller chooses among them.
    None where nothing drafts.
    """
    if config.drafter == "none":
        return None
    drafter: dict[str, Any] = {
        "method": "ngram_gpu",
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 5,
    }
    if config.neural:
        drafter = _neural(config)
    elif config.copies_policy and not config.keyed:
        drafter |= _DRAWN
    speculative = {
        "num_speculative_tokens": config.num_draft_tokens,
        **drafter,
    }
    if config.in_every_step:
        return speculative
    longest_first = sorted(draft_lengths(config), reverse=True)
    of_batch_sizes = []
    for number, length in enumerate([*longest_first, 0], 1):
        entry = (number, number, length)
        of_batch_sizes.append(entry)
    speculative["num_speculative_tokens_per_batch_size"] = of_batch_sizes
    return speculative


def _neural(config: DasConfig) -> dict[str, Any]:
    """Return vLLM's `speculative_config` of a neural drafter, but for its length."""
    options = config.draft.options
    drafter: dict[str, Any] = {"method": config.method}
    drafts_most_likely = any(map(options.get, _MOST_LIKELY))
    if not config.keyed and not drafts_most_likely:
        drafter |= _DRAWN
    # Hosts load no weights (`load_format: dummy`), and an EAGLE-3, DFlash or DSpark
    # head of which vLLM has read none shares the policy's output layer, which may have
    # more rows than its own.
    shares_output_layer = config.method == "eagle3" or config.parallel
    if shares_output_layer:
        drafter["draft_load_config"] = {"load_format": "auto"}
    drafter |= options
    if config.draft.model is not None:
        drafter["model"] = config.draft.model
    return drafter


def draft_lengths(config: DasConfig) -> tuple[int, ...]:
    """Return the draft lengths that the steps of an engine on the V2 runner have,
    beside 0.
    """
    lengths = {config.num_draft_tokens}
    if config.by_model:
        lengths.add(config.model_tokens)
    longest = max(lengths)
    for length in (1, 2, 4, 8, 16, 32, 64):
        if length < longest:
            lengths.add(length)
    return tuple(sorted(lengths))
