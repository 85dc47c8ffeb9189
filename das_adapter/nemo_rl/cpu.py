"""NeMo-RL on a machine without an accelerator: for trying a config on a laptop and for tests.

`prepare` goes into every process before NeMo-RL is imported, `CpuWorker` into `vllm_kwargs.worker_cls`. Ray's resource
"GPU" stands for a place to generate in: `ray.init(num_gpus=N)` needs no hardware.
"""

from __future__ import annotations

import os
import sys
import typing
from typing import Any

import torch
import typing_extensions
import wrapt

REFIT_SOCKETS = "DAS_CPU_REFIT_SOCKETS"
"""Environment variable: prefix of the sockets over which the trainer sends weights; a replica adds its seed."""


def prepare() -> None:
    """Adapt this process; a second call changes nothing. A `worker_process_setup_hook` for `ray.init`."""
    _typed_dicts()
    _no_nvtx()
    wrapt.when_imported("vllm.engine.arg_utils")(_no_sleep_mode)
    wrapt.when_imported("nemo_rl.distributed.ray_actor_environment_registry")(_one_environment)
    wrapt.when_imported("nemo_rl.models.generation.vllm.vllm_worker")(_leave_vllm_alone)


def _typed_dicts() -> None:
    """On Python below 3.12 pydantic refuses NeMo-RL's config classes: it wants the TypedDict of typing_extensions."""
    if sys.version_info < (3, 12):
        typing.TypedDict = typing_extensions.TypedDict  # type: ignore[misc]


def _no_nvtx() -> None:
    """NeMo-RL marks ranges for the CUDA profiler, and a CPU build of torch raises on them."""
    if not torch.cuda.is_available():
        torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None


def _no_sleep_mode(arg_utils: Any) -> None:
    """NeMo-RL switches vLLM's sleep mode on, which the CPU platform refuses at start; `sleep` itself does nothing."""
    stock = arg_utils.EngineArgs.create_model_config
    if hasattr(stock, "_das_adapter") or torch.cuda.is_available():
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
    if not torch.cuda.is_available():
        environments = registry.ACTOR_ENVIRONMENT_REGISTRY
        environments.update(dict.fromkeys(environments, sys.executable))


prepare()  # an engine's own process imports this module for CpuWorker, before anything of NeMo-RL

from nemo_rl.models.generation.vllm import vllm_backend  # noqa: E402
from vllm.v1.worker.cpu_worker import CPUWorker  # noqa: E402

from das_adapter.engine import cpu  # noqa: E402
from das_adapter.nemo_rl.engine import OwnHistory  # noqa: E402

cpu.apply(reload_weights=True)


class CpuWorker(OwnHistory, vllm_backend.VllmInternalWorkerExtension, CPUWorker):
    """vLLM's CPU worker with NeMo-RL's refit protocol: weights come as bytes instead of as CUDA IPC handles."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        vllm_backend.rebuild_cuda_tensor_from_ipc = lambda data, _: torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def bind_numa(self) -> bool:
        return False

    def report_device_id(self) -> str:
        return f"{os.environ.get(REFIT_SOCKETS, 'das-cpu')}-{self.vllm_config.model_config.seed}"

    def init_collective(self, *args: Any, **kwargs: Any) -> None:
        """There is no NCCL: a replica of its own gets its weights over the socket as well."""

    def update_weights_from_collective(self) -> bool:
        return bool(self.update_weights_via_ipc_zmq())

    def _synchronize_before_ipc_data_ack(self) -> None: ...
