"""The weight sync `checkpoint_engine.backend: cpu_file`, from the trainer to separate
rollout workers on a machine without a GPU. Weights go through one file in shared memory
per weight sync; veRL's own backends need an accelerator.
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

_PREFIX = "das_weights_"
"""Beginning of the directory's name; the id of the process that made it follows."""
_POLL_S = 0.02
"""How often a rollout worker looks for the file."""


@CheckpointEngineRegistry.register("cpu_file")
class FileCheckpointEngine(CheckpointEngine):
    """Rank 0 of the trainer writes a file, the machine's rollout workers read it; each
    weight sync has its own.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, **_: Any):
        self._is_master = is_master
        self._directory: Path | None = None

    def prepare(self) -> dict[str, Any]:
        """Choose the file's directory, and remove directories of processes that were
        killed. All workers learn the directory from the master's answer.
        """
        if not self._is_master:
            return {}
        shared = Path("/dev/shm")
        if not shared.is_dir():
            shared = Path(tempfile.gettempdir())
        for directory in shared.glob(f"{_PREFIX}*"):
            process = directory.name.split("_")[2]
            if not Path("/proc", process).exists():
                shutil.rmtree(directory, ignore_errors=True)
        prefix = f"{_PREFIX}{os.getpid()}_"
        return {"path": tempfile.mkdtemp(prefix=prefix, dir=shared)}

    @classmethod
    def build_topology(
        cls,
        actor_wg_world_size: int,
        rollout_world_size: int,
        metadata: list[dict[str, Any]],
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Give every worker the directory; see the base class."""
        path = next(answer["path"] for answer in metadata if answer)
        trainers = {"path": [path] * actor_wg_world_size}
        rollout_workers = {"path": [path] * rollout_world_size}
        return trainers, rollout_workers

    def init_process_group(self, path: str) -> None:
        """Note the directory."""
        self._directory = Path(path)

    def finalize(self) -> None:
        """Remove the directory, where this process has made it."""
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
        tensors = {}
        for name, weight in weights:
            tensors[name] = weight.detach().contiguous().clone()
        if self._is_master:
            part = self._directory / "part"
            save_file(tensors, part)
            part.rename(self._directory / "weights")
        return {}

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield the weights once they are there."""
        assert self._directory is not None
        file = self._directory / "weights"
        while not file.exists():
            await asyncio.sleep(_POLL_S)
        for name, weight in load_file(file).items():
            yield name, weight
