"""CUDA graphs of a model's passes over one token a request: vLLM's graph wrapper and capture sizes, and the buffers
from which the graphs read."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from das_adapter.core.requests import NOBODY
from das_adapter.engine.v1.attention import Queries, queries
from das_adapter.patching import patch

logger = logging.getLogger("das_adapter")


def requests_captured(runner: Any, vllm_config: VllmConfig) -> list[int]:
    """Return the numbers of requests for which vLLM captures full graphs of decode steps; none where the attention
    backend, or the user, allows no such graphs."""
    config = vllm_config.compilation_config
    if runner.device.type != "cuda" or config.cudagraph_mode.decode_mode() != CUDAGraphMode.FULL:
        return []
    return [size for size in config.cudagraph_capture_sizes or () if size <= vllm_config.scheduler_config.max_num_seqs]


def full_graphs(model: Any, vllm_config: VllmConfig) -> Any:
    """Wrap a model, so that its passes are captured and replayed as the forward context says."""
    from vllm.compilation.cuda_graph import CUDAGraphWrapper

    return CUDAGraphWrapper(model, vllm_config, CUDAGraphMode.FULL)


class DecodePasses:
    """A model's passes over one token of each of some requests, replayed as graphs where there is one that is large
    enough. Rows that only fill it up read one token of vLLM's null block, and write there."""

    def __init__(self, runner: Any, vllm_config: VllmConfig, model: Any) -> None:
        """Take vLLM's runner, whose attention groups and block tables are the model's, and the model: it is called
        with token ids and positions, int64 [tokens] each, and returns hidden states."""
        self.sizes: list[int] = []
        """Requests of the graphs captured, rising."""
        self.runner, self.config, self._model = runner, vllm_config, model
        self._graphs: Any = None
        self._buffers: dict[str, torch.Tensor] = {}

    def capture(self, sizes: Sequence[int], wrap: Callable[[Any, VllmConfig], Any] = full_graphs) -> None:
        """Capture a graph for each of these numbers of requests, the largest first, which the others' buffers are a
        part of. Without one the passes are run as they are."""
        if not sizes:
            return
        self._graphs = wrap(self._model, self.config)
        for size in sorted(sizes, reverse=True):
            for mode in (CUDAGraphMode.NONE, CUDAGraphMode.FULL):
                self._replay(size, NOBODY, NOBODY, NOBODY, mode, self.config.model_config.max_model_len)
        self.sizes = sorted(sizes)

    def __call__(self, rows: np.ndarray, ids: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """Return hidden states [requests, width] of rows of the batch after one more token of each; `rows`, and the
        tokens' `ids` and `positions`: int64 [requests]."""
        n = len(rows)
        size = next((size for size in self.sizes if size >= n), None)
        if size is not None:
            hidden: torch.Tensor = self._replay(size, rows, ids, positions, CUDAGraphMode.FULL)
            return hidden[:n]
        device, asked = self.runner.device, self._queries(rows, positions, n)
        with self._context(asked, n, CUDAGraphMode.NONE):
            hidden = self._model(torch.from_numpy(ids).to(device, non_blocking=True), asked[0].positions)
        return hidden

    def _replay(
        self,
        size: int,
        rows: np.ndarray,
        ids: np.ndarray,
        positions: np.ndarray,
        mode: CUDAGraphMode,
        longest: int | None = None,
    ) -> torch.Tensor:
        """Run the pass for `size` requests, the last of which only fill the graph up; `longest`: text for which the
        attention's kernels are chosen, where they are captured."""
        filled = np.zeros(size, dtype=np.int64)
        filled[: len(ids)] = ids
        kept = [self._keep(gid, asked, longest) for gid, asked in enumerate(self._queries(rows, positions, size))]
        tokens = self._buffer("ids", torch.from_numpy(filled).to(self.runner.device, non_blocking=True))
        with self._context(kept, size, mode, BatchDescriptor(num_tokens=size, num_reqs=size, uniform=True)):
            hidden: torch.Tensor = self._graphs(tokens, kept[0].positions)
        return hidden

    def _queries(self, rows: np.ndarray, positions: np.ndarray, size: int) -> list[Queries]:
        """Describe the pass to each attention group, for `size` requests."""
        batch, device, more = self.runner.input_batch, self.runner.device, size - len(rows)
        which = torch.from_numpy(rows).to(device, non_blocking=True)
        begins = np.append(positions, np.zeros(more, dtype=np.int64))
        found = []
        for gid in range(len(self.runner.attn_groups)):
            table = batch.block_table[gid]
            blocks = table.get_device_tensor(max(1, batch.num_reqs))
            blocks = torch.cat([blocks[which], blocks.new_zeros(more, blocks.shape[1])]) if more else blocks[which]
            found.append(queries(blocks, table.block_size, begins, begins + 1))
        return found

    def _keep(self, gid: int, asked: Queries, longest: int | None) -> Queries:
        """Put what is on the device into the buffers from which the graphs read."""
        metadata = {
            name: self._buffer(f"{gid}.{name}", value) if _on_device(name, value) else value
            for name, value in asked.metadata.items()
        }
        metadata["max_seq_len"] = longest or metadata["max_seq_len"]
        positions = metadata["positions"] = self._buffer("positions", asked.positions)
        return Queries(positions, metadata["slot_mapping"], metadata)

    def _buffer(self, name: str, value: torch.Tensor) -> torch.Tensor:
        if name not in self._buffers:
            self._buffers[name] = value.clone()
        part = self._buffers[name][: len(value)]
        return part.copy_(value)

    def _context(
        self, asked: Sequence[Queries], size: int, mode: CUDAGraphMode, descriptor: BatchDescriptor | None = None
    ) -> Any:
        metadata, slots = {}, {}
        for groups, of_group in zip(self.runner.attn_groups, asked, strict=True):
            known = CommonAttentionMetadata.__dataclass_fields__.keys() & of_group.metadata.keys()
            cam = CommonAttentionMetadata(**{name: of_group.metadata[name] for name in known})
            for group in groups:
                metadata.update(dict.fromkeys(group.layer_names, group.get_metadata_builder().build(0, cam)))
                slots.update(dict.fromkeys(group.layer_names, of_group.slots))
        return set_forward_context(
            metadata,
            self.config,
            num_tokens=size,
            cudagraph_runtime_mode=mode,
            batch_descriptor=descriptor,
            slot_mapping=slots,
            skip_compiled=True,
        )


def _on_device(name: str, value: Any) -> bool:
    """Whether a field of the attention's metadata is read by its kernels."""
    return isinstance(value, torch.Tensor) and "cpu" not in name and name not in ("is_prefilling", "positions")


@patch("vllm.v1.worker.gpu_model_runner:GPUModelRunner.capture_model", since="0.24")
def capture_with_policy(stock: Any, passes: DecodePasses) -> Any:
    """Without it a policy copy's passes are launched kernel by kernel, which takes longer than they do. Remove this
    patch when vLLM lets a `custom_class` drafter capture CUDA graphs."""

    @functools.wraps(stock)
    def capture_model(*args: Any, **kwargs: Any) -> Any:
        from vllm.compilation.monitor import set_cudagraph_capturing_enabled
        from vllm.distributed.parallel_state import graph_capture

        taken = stock(*args, **kwargs)
        runner = passes.runner
        sizes = requests_captured(runner, passes.config)
        if not sizes:
            return taken
        try:
            set_cudagraph_capturing_enabled(True)
            with graph_capture(device=runner.device), torch.inference_mode():
                passes.capture(sizes)
        except Exception:
            passes.sizes = []
            logger.exception("das: no CUDA graphs of the policy copy, whose passes take longer without them")
        finally:
            set_cudagraph_capturing_enabled(False)
        return taken

    return capture_model
