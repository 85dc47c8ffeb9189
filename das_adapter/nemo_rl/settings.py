"""Read the `das:` block of a NeMo-RL config, and refuse what it excludes there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from das_adapter import compat
from das_adapter.config import DasConfig, block_of, check_files, parse
from das_adapter.errors import ConfigError
from das_adapter.protocol.engine_args import refuse_arguments

GENERATION = "policy.generation"
_VLLM = "nemo_rl.models.generation.vllm"
WORKERS = {
    f"{_VLLM}.vllm_worker.VllmGenerationWorker": "das_adapter.nemo_rl.workers.DasGenerationWorker",
    f"{_VLLM}.vllm_worker_async.VllmAsyncGenerationWorker": "das_adapter.nemo_rl.workers.DasAsyncGenerationWorker",
}
HOST_KEY = "worker_extension_cls_fqn"
"""NeMo-RL's own key of `policy.generation` for a generation worker from outside, in the versions that have it."""
BLOCK = f"{GENERATION}.das"
ADDITIONAL = f"{GENERATION}.vllm_kwargs.additional_config"
STEP = "_das_step"
"""Key of `policy.generation`, set at the start: training step of the checkpoint from which the run resumes, else 0."""
FACTS = "_das_facts"
"""Key of `policy.generation`, set at the start of a run whose history is saved: the fields of `service.checkpoint`'s
`Facts`."""


def of_generation(generation: Mapping[str, Any]) -> DasConfig | None:
    """Return the block of a generation config (`policy.generation`); None leaves NeMo-RL as it is.

    The engine reads the block from `vllm_kwargs.additional_config.das`, where the overlay puts it too; one of the two
    places is enough, and both must agree.
    """
    block = block_of(generation, GENERATION)
    engine = block_of(_vllm_kwargs(generation).get("additional_config"), ADDITIONAL)
    if block is not None and engine is not None and parse(block) != parse(engine):
        raise ConfigError(f"{BLOCK} and {ADDITIONAL}.das differ: set the latter to ${{{BLOCK}}}, or remove it")
    return parse(engine if block is None else block)


def check(generation: Mapping[str, Any]) -> DasConfig | None:
    """Refuse, before a worker is started, a block that is wrong or contradicts the rest of the generation config.

    Raises:
        ConfigError: names the key, what was found and what is allowed.
        UnsupportedHost: NeMo-RL lacks a symbol that das-adapter needs.
    """
    das = of_generation(generation)
    if das is None:
        return None
    if generation.get("backend", "vllm") != "vllm":
        raise ConfigError(f"{BLOCK}: found {GENERATION}.backend={generation['backend']!r}, allowed: 'vllm'")
    refuse_arguments(das, BLOCK, f"{GENERATION}.vllm_kwargs", _vllm_kwargs(generation))
    stages = (generation.get("vllm_cfg") or {}).get("pipeline_parallel_size") or 1
    if das.drafter != "none" and stages > 1:
        raise ConfigError(
            f"{BLOCK}.drafter={das.drafter!r}: found {GENERATION}.vllm_cfg.pipeline_parallel_size={stages}, allowed: 1"
        )
    if generation.get("quant_cfg") is not None:
        raise ConfigError(
            f"{BLOCK}: found {GENERATION}.quant_cfg={generation['quant_cfg']!r}, whose workers take the place of "
            "das-adapter's; allowed: null"
        )
    check_files(das)
    compat.require("nemo_rl")
    return das


def _vllm_kwargs(generation: Mapping[str, Any]) -> Mapping[str, Any]:
    return generation.get("vllm_kwargs") or {}
