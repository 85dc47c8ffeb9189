"""NeMo-RL's engine worker on a machine without an accelerator, for trying a config on a
laptop and for tests.

`nemo_rl_process.prepare` goes into every process before NeMo-RL is imported,
`CpuWorker` into `vllm_kwargs.worker_cls`. Ray's resource "GPU" stands for a place to
generate in: `ray.init(num_gpus=N)` needs no hardware.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from das_adapter.cpu.nemo_rl_process import REFIT_SOCKETS, prepare

prepare()  # an engine's own process comes here first, for CpuWorker

from nemo_rl.models.generation.vllm import vllm_backend  # noqa: E402
from vllm.v1.worker.cpu_worker import CPUWorker  # noqa: E402

from das_adapter.cpu import environment, vllm_fixes  # noqa: E402

os.environ[environment.WEIGHT_SYNC] = "1"
vllm_fixes.prepare(None)


class CpuWorker(vllm_backend.VllmInternalWorkerExtension, CPUWorker):
    """vLLM's CPU worker with NeMo-RL's refit protocol: weights come as bytes instead of
    as CUDA IPC handles.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)

        def tensor_of_bytes(data: bytes, _: Any) -> torch.Tensor:
            return torch.frombuffer(bytearray(data), dtype=torch.uint8)

        vllm_backend.rebuild_cuda_tensor_from_ipc = tensor_of_bytes

    def bind_numa(self) -> bool:
        """Bind nothing: NeMo-RL binds by the GPU."""
        return False

    def report_device_id(self) -> str:
        """Return the name that stands in the address of this replica's socket."""
        sockets = os.environ.get(REFIT_SOCKETS, "das-cpu")
        return f"{sockets}-{self.vllm_config.model_config.seed}"

    def init_collective(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: without NCCL, a replica of its own gets its weights over the
        socket as well.
        """

    def update_weights_from_collective(self, *_: Any) -> bool:
        """Take the weights over the socket."""
        return bool(self.update_weights_via_ipc_zmq())

    def _synchronize_before_ipc_data_ack(self) -> None:
        """Do nothing: there is no CUDA stream to wait for."""
