"""What every process of a NeMo-RL run without an accelerator needs before NeMo-RL is imported. Imports little."""

from __future__ import annotations

import sys
import typing
from typing import Any

import typing_extensions
import wrapt

REFIT_SOCKETS = "DAS_CPU_REFIT_SOCKETS"
"""Environment variable: prefix of the sockets over which the trainer sends weights; a replica adds its seed."""


def prepare() -> None:
    """Adapt this process; a second call changes nothing. A `worker_process_setup_hook` for `ray.init`."""
    _typed_dicts()
    wrapt.when_imported("torch.cuda.nvtx")(_no_nvtx)
    wrapt.when_imported("vllm.engine.arg_utils")(_no_sleep_mode)
    wrapt.when_imported("nemo_rl.distributed.ray_actor_environment_registry")(_one_environment)
    wrapt.when_imported("nemo_rl.models.generation.vllm.vllm_worker")(_leave_vllm_alone)


def _typed_dicts() -> None:
    """On Python below 3.12 pydantic refuses NeMo-RL's config classes: it wants the TypedDict of typing_extensions."""
    if sys.version_info < (3, 12):
        typing.TypedDict = typing_extensions.TypedDict  # type: ignore[misc]


def _no_nvtx(nvtx: Any) -> None:
    """NeMo-RL marks ranges for the CUDA profiler, and a CPU build of torch raises on them."""
    nvtx.range_push = nvtx.range_pop = lambda *_: None


def _no_sleep_mode(arg_utils: Any) -> None:
    """NeMo-RL switches vLLM's sleep mode on, which the CPU platform refuses at start; `sleep` itself does nothing."""
    stock = arg_utils.EngineArgs.create_model_config
    if hasattr(stock, "_das_adapter"):
        return

    def create_model_config(self: Any) -> Any:
        self.enable_sleep_mode = False
        return stock(self)

    create_model_config._das_adapter = True  # type: ignore[attr-defined]
    arg_utils.EngineArgs.create_model_config = create_model_config


def _leave_vllm_alone(vllm_worker: Any) -> None:
    """NeMo-RL's workers rewrite source files of the vLLM they find installed, for engines over several GPUs; here that
    may be a vLLM that others use as well."""
    vllm_worker._apply_vllm_patches = lambda *_, **__: None


def _one_environment(registry: Any) -> None:
    """NeMo-RL builds a uv environment per kind of actor; here all of them run in this one."""
    environments = registry.ACTOR_ENVIRONMENT_REGISTRY
    environments.update(dict.fromkeys(environments, sys.executable))
