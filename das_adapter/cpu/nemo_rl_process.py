"""Changes that every process of a NeMo-RL run without an accelerator needs before
NeMo-RL is imported. This module imports little.
"""

from __future__ import annotations

import sys
import typing
from typing import Any

import typing_extensions

from das_adapter.patching import patch, when_imported

REFIT_SOCKETS = "DAS_CPU_REFIT_SOCKETS"
"""Environment variable: prefix of the sockets over which the trainer sends weights; a
replica adds its seed.
"""


def prepare() -> None:
    """Adapt this process; a second call changes nothing. It serves `ray.init` as
    `worker_process_setup_hook`.
    """
    # pydantic refuses NeMo-RL's config classes: it wants typing_extensions' TypedDict
    if sys.version_info < (3, 12):
        typing.TypedDict = typing_extensions.TypedDict
    for fix in (ignore_ranges, leave_sleep_mode_off, leave_vllm_alone):
        fix.when_imported()
    when_imported(
        "nemo_rl.distributed.ray_actor_environment_registry", _one_environment
    )


@patch("torch.cuda.nvtx:range_push", "torch.cuda.nvtx:range_pop", since="2.0")
def ignore_ranges(stock: Any) -> Any:
    """Without it a CPU build of torch raises: NeMo-RL marks ranges for the CUDA
    profiler. Remove this patch when NeMo-RL marks ranges on CUDA alone.
    """
    return lambda *_: None


@patch("vllm.engine.arg_utils:EngineArgs.create_model_config", since="0.24")
def leave_sleep_mode_off(stock: Any) -> Any:
    """Without it the CPU platform refuses to start: NeMo-RL switches vLLM's sleep mode
    on. `sleep` itself does nothing. Remove this patch when NeMo-RL leaves vLLM's sleep
    mode off where the platform has none.
    """

    def create_model_config(self: Any) -> Any:
        self.enable_sleep_mode = False
        return stock(self)

    return create_model_config


@patch("nemo_rl.models.generation.vllm.vllm_worker:_apply_vllm_patches", since="0.6.0")
def leave_vllm_alone(stock: Any) -> Any:
    """Without it NeMo-RL's workers rewrite source files of the vLLM they find
    installed, for engines over several GPUs; here that may be a vLLM that others use as
    well. Remove this patch when NeMo-RL no longer rewrites vLLM's source files.
    """
    return lambda *_, **__: None


def _one_environment(registry: Any) -> None:
    """Run every kind of actor in this environment; NeMo-RL would build a uv environment
    for each.
    """
    environments = registry.ACTOR_ENVIRONMENT_REGISTRY
    environments.update(dict.fromkeys(environments, sys.executable))
