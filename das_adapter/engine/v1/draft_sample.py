"""Draw draft tokens as the policy's sampler will draw: with the same noise, the tokens agree most often."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.sampler import _SAMPLING_EPS

from das_adapter.engine.v1.keyed_sample import Keys, divide, keyed_sample
from das_adapter.engine.v1.truncation import truncate


def draw(logits: torch.Tensor, keys: Keys, sampling: Any, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Draw one token a row, int64 [rows], with the temperature, top-k, top-p and noise of the policy's sampler.

    Args:
        logits: [rows, vocab] of the drafter.
        sampling: vLLM's SamplingMetadata of the batch.
        rows: int64 [rows], the rows of the batch; None: all of them.
    """
    if sampling.all_greedy:
        return logits.argmax(dim=-1)
    temperature, top_k, top_p = (
        x if x is None or rows is None else x[rows] for x in (sampling.temperature, sampling.top_k, sampling.top_p)
    )
    if top_k is None and top_p is None:
        return keyed_sample(logits, temperature, keys).tokens
    greedy = temperature < _SAMPLING_EPS
    scaled = divide(logits.to(torch.float32, copy=True), temperature)
    drawn = keyed_sample(truncate(scaled, top_k, top_p), None, keys).tokens
    return drawn if sampling.all_random else torch.where(greedy, logits.argmax(dim=-1), drawn)
