"""`checkpoint_engine.backend: cpu_file`: weights from the trainer to separate rollout
workers on a machine without a GPU, through one file in shared memory per weight sync.
veRL's own backends need an accelerator.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

_NAME = "das_weights_"


@CheckpointEngineRegistry.register("cpu_file")
class FileCheckpointEngine(CheckpointEngine):
    """Rank 0 of the trainer writes a file, the machine's rollout workers read it; each
    weight sync has its own.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, **_: Any):
        self._is_master = is_master
        self._directory: Path | None = None

    def prepare(self) -> dict[str, Any]:
        """Choose the file's directory; all workers learn it from the master's answer.
        What processes that were killed have left goes.
        """
        if not self._is_master:
            return {}
        shared = Path(
            "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
        )
        for left in shared.glob(f"{_NAME}*"):
            if not Path("/proc", left.name.split("_")[2]).exists():
                shutil.rmtree(left, ignore_errors=True)
        return {"path": tempfile.mkdtemp(prefix=f"{_NAME}{os.getpid()}_", dir=shared)}

    @classmethod
    def build_topology(
        cls,
        actor_wg_world_size: int,
        rollout_world_size: int,
        metadata: list[dict[str, Any]],
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Give every worker the directory; see the base class."""
        path = next(m["path"] for m in metadata if m)
        return {"path": [path] * actor_wg_world_size}, {
            "path": [path] * rollout_world_size
        }

    def init_process_group(self, path: str) -> None:
        self._directory = Path(path)

    def finalize(self) -> None:
        if self._is_master and self._directory is not None:
            shutil.rmtree(self._directory)
        self._directory = None

    async def send_weights(
        self,
        weights: Generator[tuple[str, torch.Tensor], None, None],
        global_steps: int | None = None,
    ) -> dict[str, Any]:
        """Write the weights; every rank drains the generator, whose items are
        collective.
        """
        assert self._directory is not None
        tensors = {
            name: weight.detach().contiguous().clone() for name, weight in weights
        }
        if self._is_master:
            save_file(tensors, self._directory / "part")
            (self._directory / "part").rename(self._directory / "weights")
        return {}

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield the weights once they are there."""
        assert self._directory is not None
        while not (self._directory / "weights").exists():
            await asyncio.sleep(0.02)
        for name, weight in load_file(self._directory / "weights").items():
            yield name, weight
