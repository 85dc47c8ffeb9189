"""What vLLM's attention needs to know about a forward pass that das-adapter runs itself."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch


class Queries(NamedTuple):
    """A stretch of text of each of some requests, one after the other."""

    positions: torch.Tensor
    """int64 [tokens], on the device."""
    slots: torch.Tensor
    """int64 [tokens]: where their keys and values go."""
    metadata: dict[str, Any]
    """Fields of vLLM's `CommonAttentionMetadata`, those of any version."""


def queries(blocks: torch.Tensor, block_size: int, begins: np.ndarray, ends: np.ndarray) -> Queries:
    """Describe a pass that reads positions `begins` to `ends` (exclusive) of some requests, int64 [requests] each;
    `blocks`: of each request's KV cache, int [requests, most blocks], on the device."""
    device, n, counts = blocks.device, len(begins), ends - begins
    starts = np.concatenate([[0], np.cumsum(counts)])
    who = np.repeat(np.arange(n), counts)
    positions = np.arange(starts[-1]) + (begins - starts[:-1])[who]
    at, which = (torch.from_numpy(x).to(device, non_blocking=True) for x in (positions, who))
    slots = blocks[which, at // block_size].long() * block_size + at % block_size

    def on_host(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int32))  # vLLM counts some of them on, each by itself

    metadata = {
        "query_start_loc": on_host(starts).to(device, non_blocking=True),
        "query_start_loc_cpu": on_host(starts),
        "seq_lens": on_host(ends).to(device, non_blocking=True),
        "_seq_lens_cpu": on_host(ends),
        "seq_lens_cpu_upper_bound": on_host(ends),
        "_num_computed_tokens_cpu": on_host(begins),
        "positions": at,
        "num_reqs": n,
        "num_actual_tokens": len(positions),
        "max_query_len": int(counts.max()),
        "max_seq_len": int(ends.max()),
        "causal": True,
        "is_prefilling": torch.zeros(n, dtype=torch.bool),
        "block_table_tensor": blocks,
        "slot_mapping": slots,
    }
    return Queries(at, slots, metadata)
