"""veRL on a machine without an accelerator: the platform `VERL_PLATFORM=cpu`, for
trying a config on a laptop and for tests.

Training runs on FSDP2 over gloo, rollouts on vLLM's CPU build, and weights travel
through shared memory. The platform needs the environment of `environment.cpu_env`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import ray
import torch
import torch.distributed
from verl.plugin.platform import PlatformRegistry
from verl.plugin.platform.platform_cuda import PlatformCUDA

from das_adapter.cpu import environment
from das_adapter.patching import patch, when_imported


def _always(answer: Any) -> Callable[..., Any]:
    """Return a function that takes any arguments and returns one answer."""
    return lambda *_, **__: answer


_CUDA_FUNCTIONS = (
    "empty_cache",
    "ipc_collect",
    "reset_peak_memory_stats",
    "reset_accumulated_memory_stats",
    "memory_allocated",
    "memory_reserved",
    "max_memory_allocated",
    "max_memory_reserved",
)
"""Functions of `torch.cuda` that veRL calls on any platform; on a CPU they return 0."""


def _complete_torch_cpu() -> None:
    """Add to `torch.cpu` the functions that veRL calls on the device module of any
    platform, and that it lacks.
    """
    functions = {
        **dict.fromkeys(_CUDA_FUNCTIONS, _always(0)),
        "manual_seed": torch.manual_seed,
        "manual_seed_all": torch.manual_seed,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
    }
    for name, function in functions.items():
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, function)


@patch("torch.distributed:init_process_group", since="2.0")
def start_gloo(stock: Any) -> Any:
    """Without it torch refuses what veRL asks for: "cpu:gloo,<device>:<backend>", which
    on this platform names the CPU twice; and a process that is alone fails where others
    have taken the port that veRL chose when it began to start. Remove this patch when
    veRL lets a platform name its process groups' backend.
    """

    def init_process_group(
        backend: str | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        if os.environ.get("WORLD_SIZE") == "1":
            os.environ["MASTER_PORT"] = "0"  # any that is free
        if backend == "cpu:gloo,cpu:gloo":
            backend = "cpu:gloo"
        return stock(backend, *args, **kwargs)

    return init_process_group


def run_name() -> str:
    """Return a name of this run that no other run on the machine has: Ray's job and the
    port of its cluster. A run may have a Ray cluster of its own, in which it is the
    first job.
    """
    context = ray.get_runtime_context()
    cluster_port = context.gcs_address.rpartition(":")[2]
    return f"{context.get_job_id()}-{cluster_port}"


@patch(
    "verl.workers.rollout.vllm_rollout.vllm_rollout:ServerAdapter.__init__",
    "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.__init__",
    since="0.9",
)
def sync_in_private(stock: Any) -> Any:
    """Without it two runs on one machine take one socket for their weights, which veRL
    names by Ray's job alone: an engine gets the other run's weights, or waits for ever.
    The trainer's end has the name, the server's end makes it of the environment. Remove
    this patch when veRL names its weight sockets by the cluster as well as by the job.
    """

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        os.environ["VERL_RAY_JOB_ID"] = run_name()
        if hasattr(self, "zmq_handle"):
            job_id = ray.get_runtime_context().get_job_id()
            self.zmq_handle = self.zmq_handle.replace(job_id, run_name())

    return init


def install() -> None:
    """Make this process one of a run on a CPU: register the platform, and patch what it
    needs.
    """
    _complete_torch_cpu()
    start_gloo.apply()
    sync_in_private.when_imported()
    PlatformRegistry.register(platform="cpu")(PlatformCPU)
    when_imported(
        "verl.checkpoint_engine.base",
        lambda _: importlib.import_module("das_adapter.cpu.verl_weights"),
    )


class PlatformCPU(PlatformCUDA):
    """One CPU device. Ray's resource "GPU" stands for it: `ray.init(num_gpus=N)` needs
    no hardware.
    """

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = torch.cpu
    set_device = _always(0)
    synchronize = _always(0)
    manual_seed = _always(0)
    manual_seed_all = _always(0)
    set_allocator_settings = _always(0)
    empty_cache = _always(0)
    profiler_start = _always(0)
    profiler_stop = _always(0)
    cudart = _always(0)
    is_available = _always(True)
    is_ipc_supported = _always(False)
    device_count = _always(1)
    current_device = _always(torch.device("cpu"))
    communication_backend_name = _always("gloo")
    ray_noset_envvars = _always([])
    nvtx_range = _always(nullcontext())

    def rollout_env_vars(self) -> dict[str, str]:
        """Return the environment variables that rollout workers get."""
        names = (*environment.cpu_env(), "VLLM_LOGGING_LEVEL")
        return {name: os.environ[name] for name in names if name in os.environ}
