"""Top-k and top-p with one algorithm for every number of rows."""

from __future__ import annotations

import torch
from vllm.v1.sample.ops import topk_topp_sampler


def truncate(logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None) -> torch.Tensor:
    """Exclude (-inf) what lies outside top-k and top-p, in place.

    Up to 0.29 vLLM sorts below eight rows and takes a Triton kernel from there on. The two may round a row's
    cumulative probabilities differently, and then what a row keeps would depend on how many rows draft.

    Args:
        logits: float32 [rows, vocab].
        top_k: int32 [rows]; None: no limit.
        top_p: float32 [rows]; None: no limit.
    """
    if (top_k is not None or top_p is not None) and logits.is_cuda and topk_topp_sampler.HAS_TRITON:
        kept: torch.Tensor = topk_topp_sampler.apply_top_k_top_p_triton(logits, top_k, top_p)
        return kept
    return topk_topp_sampler.apply_top_k_top_p(logits, top_k, top_p)
