"""What vLLM's attention needs to know about a forward pass that das-adapter runs itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def queries(blocks: torch.Tensor, block_size: int, begins: np.ndarray, ends: np.ndarray) -> dict[str, Any]:
    """Describe a pass that reads positions `begins` to `ends` (exclusive) of some requests, int64 [requests] each: the
    fields of vLLM's `CommonAttentionMetadata`, those of any version. `blocks`: of each request's KV cache, int
    [requests, most blocks], on the device."""
    device, n, counts = blocks.device, len(begins), ends - begins
    starts = np.concatenate([[0], np.cumsum(counts)])
    at, which = (
        torch.from_numpy(x).to(device, non_blocking=True)
        for x in (stretches(begins, counts), np.repeat(np.arange(n), counts))
    )
    slots = blocks[which, at // block_size].long() * block_size + at % block_size

    def on_host(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int32))  # vLLM counts some of them on, each by itself

    return {
        "query_start_loc": on_host(starts).to(device, non_blocking=True),
        "query_start_loc_cpu": on_host(starts),
        "seq_lens": on_host(ends).to(device, non_blocking=True),
        "_seq_lens_cpu": on_host(ends),
        "seq_lens_cpu_upper_bound": on_host(ends),
        "_num_computed_tokens_cpu": on_host(begins),
        "positions": at,
        "num_reqs": n,
        "num_actual_tokens": len(at),
        "max_query_len": int(counts.max()),
        "max_seq_len": int(ends.max()),
        "causal": True,
        "is_prefilling": torch.zeros(n, dtype=torch.bool),
        "block_table_tensor": blocks,
        "slot_mapping": slots,
    }


def stretches(begins: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return begin, begin + 1, ... for each of some stretches, one after the other, int64."""
    before = np.cumsum(counts) - counts
    return np.arange(counts.sum()) + np.repeat(begins - before, counts)
