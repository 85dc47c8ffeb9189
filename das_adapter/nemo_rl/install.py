"""Makes NeMo-RL use das-adapter's classes. Nothing of NeMo-RL is edited; without an active `das:` block it is stock."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

import wrapt

_VLLM = "nemo_rl.models.generation.vllm"
WORKERS = {
    f"{_VLLM}.vllm_worker.VllmGenerationWorker": "das_adapter.nemo_rl.workers.DasGenerationWorker",
    f"{_VLLM}.vllm_worker_async.VllmAsyncGenerationWorker": "das_adapter.nemo_rl.workers.DasAsyncGenerationWorker",
}
_TRAINERS = {
    "nemo_rl.algorithms.grpo": ("VllmGeneration", "validate"),
    "nemo_rl.algorithms.grpo_sync": ("validate_sync",),
    "nemo_rl.algorithms.ppo": ("VllmGeneration", "validate"),
    "nemo_rl.algorithms.distillation": ("VllmGeneration", "validate"),
    "nemo_rl.algorithms.single_controller": ("VllmGeneration",),
    "nemo_rl.algorithms.single_controller_utils.setup": ("VllmGeneration",),
}
"""What is replaced in the modules that make generations."""

HOST_KEY = "worker_extension_cls_fqn"
"""NeMo-RL's own key of `policy.generation` for a generation worker from outside, in the versions that have it."""

_MARK = "_das_adapter"


def install() -> None:
    """Replace the generation class and its workers, and mark validations. A second call changes nothing."""
    from nemo_rl.distributed import ray_actor_environment_registry as environments
    from nemo_rl.models.generation.vllm import vllm_generation

    if hasattr(vllm_generation, _MARK):
        return
    setattr(vllm_generation, _MARK, True)
    registry = environments.ACTOR_ENVIRONMENT_REGISTRY
    for stock, ours in WORKERS.items():
        registry[ours] = _built_environment(stock) or registry[stock]
    if HOST_KEY not in vllm_generation.VllmConfig.__annotations__:
        _choose_workers(vllm_generation)
    for module, names in _TRAINERS.items():
        wrapt.when_imported(module)(functools.partial(_replace, names=names))


def _built_environment(worker: str) -> str | None:
    """The interpreter of a stock worker's virtual environment, where NeMo-RL's containers have built it: one named
    after our worker would be built anew, without das-adapter."""
    python = Path(os.environ.get("NEMO_RL_VENV_DIR", "venvs")) / worker / "bin" / "python"
    return str(python) if python.exists() else None


def _choose_workers(vllm_generation: Any) -> None:
    """Workers of generations with an active block are ours. Needed up to NeMo-RL 0.6.0; later versions have a key for
    it (NVIDIA-NeMo/RL#3809), which `DasVllmGeneration` sets."""
    from das_adapter.nemo_rl.settings import of_generation

    stock = vllm_generation.resolve_generation_worker_cls

    @functools.wraps(stock)
    def resolve(default_cls: str, config: Any) -> str:
        chosen: str = stock(default_cls, config)
        return WORKERS.get(chosen, chosen) if of_generation(config) is not None else chosen

    vllm_generation.resolve_generation_worker_cls = resolve


def _replace(module: Any, names: tuple[str, ...]) -> None:
    from das_adapter.nemo_rl.generation import DasVllmGeneration, validation

    for name in names:
        stock = getattr(module, name, None)
        if stock is None:
            continue
        if name == "VllmGeneration":
            module.VllmGeneration = DasVllmGeneration
            continue

        def validate(*args: Any, _stock: Any = stock, **kwargs: Any) -> Any:
            with validation():
                return _stock(*args, **kwargs)

        setattr(module, name, functools.wraps(stock)(validate))


def run(script: str, arguments: list[str]) -> None:
    """Run a NeMo-RL entry script, with its arguments, under das-adapter."""
    import runpy

    install()
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")
