"""vLLM's memory pools on a CPU, so that its own sleep takes there what it takes on a
GPU.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass
class Memory:
    """What a pool has given for a tensor."""

    storage: weakref.ref[Any]
    tag: str
    author: str
    """Module of vLLM or of das-adapter that asked for it."""
    backup: torch.Tensor | None = None

    @property
    def all(self) -> torch.Tensor:
        """Its bytes; none once it was freed."""
        storage = self.storage()
        return (
            torch.empty(0, dtype=torch.uint8).set_(storage)
            if storage
            else torch.empty(0)
        )


class Pools(TorchDispatchMode):
    """Stands for vLLM's allocator (`vllm.device_allocator.MemAllocator`): from `sleep`
    on, what a pool has given is lost; what was to be kept comes back with `wake_up`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[int, Memory] = {}
        """By address."""
        self._tag = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        there = set(map(_address, tree_leaves((args, kwargs))))
        result = func(*args, **(kwargs or {}))
        for found in tree_leaves(result):
            if (at := _address(found)) and at not in there:
                self.given[at] = Memory(
                    weakref.ref(found.untyped_storage()), self._tag, _author()
                )
        return result

    @contextlib.contextmanager
    def use_memory_pool(self, tag: str) -> Iterator[None]:
        """As `CuMemAllocator.use_memory_pool`; of pools within each other the inner one
        gives.
        """
        outer = self._tag
        self._tag = tag
        try:
            with self:
                yield
        finally:
            self._tag = outer

    def sleep(self, offload_tags: Sequence[str]) -> None:
        """As `CuMemAllocator.sleep`. The cache comes back empty: attention on a CPU
        multiplies what it masks by 0.
        """
        for memory in self.given.values():
            memory.backup = memory.all.clone() if memory.tag in offload_tags else None
            memory.all.fill_(0 if memory.tag == "kv_cache" else 255)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """As `CuMemAllocator.wake_up`."""
        for memory in self.given.values():
            deferred = (
                tags is not None
                and memory.tag in ("weights", "kv_cache")
                and memory.tag not in tags
            )
            if memory.backup is not None and not deferred:
                memory.all.copy_(memory.backup)
                memory.backup = None

    def authors(self) -> list[str]:
        """Return the modules of das-adapter that have memory of a pool."""
        return sorted(
            {
                m.author
                for m in self.given.values()
                if len(m.all) and m.author.startswith("das_adapter.")
            }
        )


def _address(value: Any) -> int:
    return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else 0


def _author() -> str:
    frame: Any = sys._getframe()
    while frame is not None:
        name: str = frame.f_globals.get("__name__", "")
        if name.startswith(("vllm.", "das_adapter.")):
            return name
        frame = frame.f_back
    return ""


def lend() -> Pools:
    """Let a CPU engine take its weights and its cache from pools, and sleep as a GPU
    engine does.
    """
    import vllm.device_allocator
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    pools: Any = Pools()
    Worker._maybe_get_memory_pool_context = lambda _, tag: pools.use_memory_pool(tag)
    vllm.device_allocator.get_mem_allocator_instance = lambda: pools
    CPUWorker.sleep = Worker.sleep
    CPUWorker.wake_up = Worker.wake_up
    torch.accelerator.synchronize = lambda *_: None
    torch.accelerator.get_memory_info = lambda *_: (0, 0)
    return pools  # type: ignore[no-any-return]
