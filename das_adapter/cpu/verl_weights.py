"""`checkpoint_engine.backend: cpu_file`: weights from the trainer to separate rollout workers on a machine without a
GPU, through one file in shared memory per weight sync. veRL's own backends need an accelerator."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

_SHARED_MEMORY = "/dev/shm"


@CheckpointEngineRegistry.register("cpu_file")
class FileCheckpointEngine(CheckpointEngine):
    """Rank 0 of the trainer writes a file, the machine's rollout workers read it; each weight sync has its own."""

    def __init__(self, bucket_size: int, is_master: bool = False, **_: Any):
        self._is_master = is_master
        self._path: Path | None = None

    def prepare(self) -> dict[str, Any]:
        """Choose the file; all workers learn its name from the master's answer."""
        if not self._is_master:
            return {}
        directory = _SHARED_MEMORY if os.path.isdir(_SHARED_MEMORY) else None
        return {"path": tempfile.mkdtemp(prefix="das_weights_", dir=directory)}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Give every worker the path, all that it needs to know; see the base class."""
        path = next(m["path"] for m in metadata if m)
        return {"path": [path] * actor_wg_world_size}, {"path": [path] * rollout_world_size}

    def init_process_group(self, path: str) -> None:
        """Take the directory of this weight sync."""
        self._path = Path(path)

    def finalize(self) -> None:
        """Remove what the master wrote."""
        if self._is_master and self._path is not None:
            for file in self._path.iterdir():
                file.unlink()
            self._path.rmdir()
        self._path = None

    async def send_weights(
        self, weights: Generator[tuple[str, torch.Tensor], None, None], global_steps: int | None = None
    ) -> dict[str, Any]:
        """Write the weights; every rank drains the generator, whose items are collective."""
        assert self._path is not None
        tensors = {name: weight.detach().contiguous().clone() for name, weight in weights}
        if self._is_master:
            save_file(tensors, self._path / "part")
            (self._path / "part").rename(self._path / "weights")
        return {}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield the weights once they are there."""
        assert self._path is not None
        while not (self._path / "weights").exists():
            await asyncio.sleep(0.02)
        for name, weight in load_file(self._path / "weights").items():
            yield name, weight
