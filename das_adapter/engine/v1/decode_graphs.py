"""CUDA graphs of a model's passes over one token a request: vLLM's graph wrapper and capture sizes, and the buffers
from which the graphs read."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from das_adapter.core.requests import NOBODY
from das_adapter.engine.v1.attention import queries
from das_adapter.patching import patch


class DecodePasses:
    """A model's passes over one token of each of some requests, replayed as graphs where there is one that is large
    enough. Rows that only fill it up read one token of vLLM's null block, and write there."""

    def __init__(self, runner: Any, vllm_config: VllmConfig, model: Any) -> None:
        """Take vLLM's runner, whose attention groups and block tables are the model's, and the model: it is called
        with token ids and positions, int64 [tokens] each, and returns hidden states."""
        self.sizes: list[int] = []
        """Requests of the graphs captured, rising."""
        self.runner, self.config, self._model = runner, vllm_config, model
        self._buffers: dict[str, torch.Tensor] = {}
        """From which the passes read, by name."""

    def capture(self, sizes: Sequence[int]) -> None:
        """Capture a graph for each of these numbers of requests, the largest first. Without one the passes are run as
        they are."""
        self._model = CUDAGraphWrapper(self._model, self.config, CUDAGraphMode.FULL)
        for size in sorted(sizes, reverse=True):
            for mode in (CUDAGraphMode.NONE, CUDAGraphMode.FULL):
                self._run(size, NOBODY, NOBODY, NOBODY, mode, self.config.model_config.max_model_len)
        self.sizes = sorted(sizes)

    def __call__(self, rows: np.ndarray, ids: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """Return hidden states [requests, width] of rows of the batch after one more token of each; `rows`, and the
        tokens' `ids` and `positions`: int64 [requests]."""
        n = len(rows)
        size = next((size for size in self.sizes if size >= n), None)
        mode = CUDAGraphMode.NONE if size is None else CUDAGraphMode.FULL
        return self._run(size or n, rows, ids, positions, mode)[:n]

    def _run(
        self,
        size: int,
        rows: np.ndarray,
        ids: np.ndarray,
        positions: np.ndarray,
        mode: CUDAGraphMode,
        longest: int | None = None,
    ) -> torch.Tensor:
        """Run the pass for `size` requests, the last of which only fill a graph up; `longest`: text for which the
        attention's kernels are chosen, where they are captured."""
        filled, begins = np.zeros((2, size), dtype=np.int64)
        filled[: len(ids)], begins[: len(ids)] = ids, positions
        device, batch = self.runner.device, self.runner.input_batch
        which = torch.from_numpy(rows).to(device, non_blocking=True)
        metadata, slots = {}, {}
        for gid, groups in enumerate(self.runner.attn_groups):
            table = batch.block_table[gid]
            blocks = table.get_device_tensor(max(1, batch.num_reqs))
            blocks = torch.cat([blocks[which], blocks.new_zeros(size - len(rows), blocks.shape[1])])
            asked = queries(blocks, table.block_size, begins, begins + 1)
            for name, value in asked.items():
                if isinstance(value, torch.Tensor) and "cpu" not in name and name != "is_prefilling":
                    asked[name] = self._buffer(f"{gid}.{name}", value)  # the attention's kernels read it
            asked["max_seq_len"] = longest or asked["max_seq_len"]
            known = CommonAttentionMetadata.__dataclass_fields__.keys() & asked.keys()
            cam = CommonAttentionMetadata(**{name: asked[name] for name in known})
            for group in groups:
                metadata.update(dict.fromkeys(group.layer_names, group.get_metadata_builder().build(0, cam)))
                slots.update(dict.fromkeys(group.layer_names, asked["slot_mapping"]))
        tokens = self._buffer("ids", torch.from_numpy(filled).to(device, non_blocking=True))
        with set_forward_context(
            metadata,
            self.config,
            num_tokens=size,
            cudagraph_runtime_mode=mode,
            batch_descriptor=BatchDescriptor(num_tokens=size, num_reqs=size, uniform=True),
            slot_mapping=slots,
            skip_compiled=True,
        ):
            hidden: torch.Tensor = self._model(tokens, asked["positions"])
        return hidden

    def _buffer(self, name: str, value: torch.Tensor) -> torch.Tensor:
        if name not in self._buffers:
            most = self.config.scheduler_config.max_num_seqs + 1
            self._buffers[name] = value.new_zeros(most, *value.shape[1:])
        part = self._buffers[name][: len(value)]
        return part.copy_(value)


@patch("vllm.v1.worker.gpu_model_runner:GPUModelRunner.capture_model", since="0.24")
def capture_with_policy(stock: Any, passes: DecodePasses) -> Any:
    """Without it a policy copy's passes are launched kernel by kernel, which takes longer than they do. Remove this
    patch when vLLM lets a `custom_class` drafter capture CUDA graphs."""

    @functools.wraps(stock)
    def capture_model(*args: Any, **kwargs: Any) -> Any:
        from vllm.compilation.monitor import set_cudagraph_capturing_enabled
        from vllm.distributed.parallel_state import graph_capture

        taken = stock(*args, **kwargs)
        runner, config = passes.runner, passes.config.compilation_config
        if runner.device.type != "cuda" or config.cudagraph_mode.decode_mode() != CUDAGraphMode.FULL:
            return taken  # the attention's backend, or the user, allows no full graphs of decode steps
        most = passes.config.scheduler_config.max_num_seqs
        try:
            set_cudagraph_capturing_enabled(True)
            with graph_capture(device=runner.device), torch.inference_mode():
                passes.capture([size for size in config.cudagraph_capture_sizes or () if size <= most])
        finally:
            set_cudagraph_capturing_enabled(False)
        return taken

    return capture_model
