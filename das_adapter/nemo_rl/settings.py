"""Read the `das:` block of a NeMo-RL config, refuse keys that contradict it, and name
the keys of NeMo-RL's that are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from das_adapter import compat
from das_adapter.config import DasConfig, block_of, check_files, parse
from das_adapter.config_errors import check_host
from das_adapter.core.identity import MediaHashes
from das_adapter.protocol.engine_args import refuse_arguments, refuse_variable

GENERATION = "policy.generation"
_VLLM = "nemo_rl.models.generation.vllm"
WORKERS = {
    f"{_VLLM}.vllm_worker.VllmGenerationWorker": (
        "das_adapter.nemo_rl.workers.DasGenerationWorker"
    ),
    f"{_VLLM}.vllm_worker_async.VllmAsyncGenerationWorker": (
        "das_adapter.nemo_rl.workers.DasAsyncGenerationWorker"
    ),
}
"""NeMo-RL's workers, and those of das-adapter that take their places."""
BLOCK = f"{GENERATION}.das"
GRPO = "nemo_rl.algorithms.grpo"
_WITHOUT_FIGURES = (
    "nemo_rl.algorithms.distillation",
    "nemo_rl.algorithms.single_controller_utils.setup",
)
"""Algorithms whose trainers ask their generation for no figures."""
LABELS = "das_labels"
"""Key of a NeMo-RL generation batch: the `Label` of each row. NeMo-RL gives its
generation only prompts, so the first turn's prompt is a problem's identity
(`protocol.label.Labeller`).
"""
MEDIA = ("vllm_images", "vllm_audios", "vllm_videos")
"""Keys of a NeMo-RL generation batch whose rows belong to a problem and leave only
place holders in its prompt.
"""
STEP = "_das_step"
"""Key of `policy.generation`, set at the start: training step of the checkpoint from
which the run resumes, else 0.
"""
SAMPLES = "_das_samples"
"""Key of `policy.generation`, set at the start: samples of a prompt in a training
step.
"""
FACTS = "_das_facts"
"""Key of `policy.generation`, set at the start of a run whose history is saved:
`service.checkpoint.Facts`.
"""
_hashes = MediaHashes()
"""Hashes of media that were seen. NeMo-RL copies the images for each sample of a
problem, and sends single samples of an asynchronous engine.
"""


def of_generation(generation: Mapping[str, Any]) -> DasConfig | None:
    """Return the block of a generation config (`policy.generation`); None leaves
    NeMo-RL as it is.
    """
    return parse(block_of(generation, GENERATION))


def check(generation: Mapping[str, Any]) -> DasConfig | None:
    """Refuse, before a worker is started, a block that is wrong or contradicts the rest
    of the generation config, and one in the environment, also where the config has
    none.

    Raises:
        ConfigError: names the key, what was found and what is allowed.
        UnsupportedHost: NeMo-RL lacks a symbol that das-adapter needs.
    """
    refuse_variable(BLOCK)
    das = of_generation(generation)
    if das is None:
        return None
    backend = generation.get("backend", "vllm")
    check_host(BLOCK, f"{GENERATION}.backend", backend, "vllm")
    given = generation.get("vllm_kwargs") or {}
    refuse_arguments(das, BLOCK, f"{GENERATION}.vllm_kwargs", given)
    # the workers of these keys would take the place of das-adapter's
    for key in ("quant_cfg", "worker_extension_cls_fqn"):
        check_host(BLOCK, f"{GENERATION}.{key}", generation.get(key), None)
    if das.drafter != "none":
        check_host(
            BLOCK,
            f"{GENERATION}.vllm_cfg.pipeline_parallel_size",
            _parallel_size(generation, "pipeline"),
            1,
        )
    check_files(das)
    compat.require("nemo_rl")
    return das


def data_parallel_size(generation: Mapping[str, Any]) -> int:
    """Return how many workers are data-parallel ranks of one vLLM engine: those that
    share its experts.
    """
    expert_ranks = _parallel_size(generation, "expert")
    tensor_ranks = _parallel_size(generation, "tensor")
    return max(1, expert_ranks // tensor_ranks)


def engine_arguments(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine arguments that NeMo-RL makes of `policy.generation`, beside
    those under `vllm_kwargs`, as far as a drafter may not work with them.
    """
    return {
        "tensor_parallel_size": _parallel_size(generation, "tensor"),
        "pipeline_parallel_size": _parallel_size(generation, "pipeline"),
        "data_parallel_size": data_parallel_size(generation),
        "enable_expert_parallel": _parallel_size(generation, "expert") > 1,
    }


def _parallel_size(generation: Mapping[str, Any], kind: str) -> int:
    """Return how many ranks a kind of parallelism has: tensor, expert or pipeline."""
    vllm_cfg = generation.get("vllm_cfg") or {}
    size = vllm_cfg.get(f"{kind}_parallel_size")
    return int(size or 1)


def logs_figures(algorithm: str, config: Any) -> bool:
    """Return whether the trainer of an algorithm, NeMo-RL's module, asks its generation
    for a step's figures.
    """
    if algorithm in _WITHOUT_FIGURES:
        return False
    ppo = getattr(config, "ppo", None)
    async_ppo = getattr(ppo, "async_ppo", None)
    return not getattr(async_ppo, "enabled", False)


def samples_of(config: Any) -> int:
    """Return how many samples of a prompt a training step has, by the config of any of
    NeMo-RL's algorithms.
    """
    num_samples = 1
    for name in ("grpo", "ppo", "distillation"):
        section = getattr(config, name, None)
        given = getattr(section, "num_generations_per_prompt", 1)
        num_samples = max(num_samples, given)
    return num_samples


def run_ahead_obstacle(algorithm: str, config: Any) -> str | None:
    """Return why nothing can be written ahead in a run of an algorithm, NeMo-RL's
    module, with a config; None where nothing prevents it.
    """
    if algorithm != GRPO:
        return (
            "of NeMo-RL's algorithms it is grpo alone that shows its next batch, not"
            f" {algorithm}"
        )
    if config.grpo.async_grpo.enabled:
        return "rollout and training do not take turns"
    if (config.data_plane or {}).get("enabled"):
        return (
            "with data_plane the rollouts are in an actor that does not know the next"
            " batch"
        )
    if not config.policy["generation"]["vllm_cfg"].get("async_engine"):
        return (
            "vllm_cfg.async_engine=false: a synchronous engine answers a worker's batch"
            " in one call"
        )
    if config.env.get("should_use_nemo_gym"):
        return "NeMo-Gym's requests come past the driver"
    if config.grpo.use_dynamic_sampling:
        return "the next batch depends on the rollouts of this one"
    if config.data.get("use_multiple_dataloader"):
        return "data.custom_dataloader chooses each batch"
    return None


def media_of(data: Mapping[str, Any], rows: int) -> list[list[str]]:
    """Return the hashes of the images, sound and video of each row of a generation
    batch.
    """
    hashes_by_row: list[list[str]] = []
    for row in range(rows):
        items: list[Any] = []
        for key in MEDIA:
            if key in data:
                items += data[key][row] or ()
        hashes = _hashes.hash_row(items) if items else []
        hashes_by_row.append(hashes)
    return hashes_by_row
