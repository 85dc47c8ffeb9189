"""Keyed-noise sampling of a batch of logits: in C++ on a CPU, in Triton on a GPU.

A token is drawn as ``argmax_v(logits[v] + G(seed, position, v))`` with standard Gumbel
noise ``G`` that is a hash of its key (drafter-invariant verification, arXiv
2408.07978): a draw depends on nothing else, so no drafter can change a token. It is the
noise of vLLM's V2 sampler since 0.31. On a GPU the logits are read from memory once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from das_adapter.core.native import native
from das_adapter.errors import UnsupportedHost

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_BLOCK = 4096
"""Tokens of which a program of the kernel draws one."""


class Keys(NamedTuple):
    """What the noise of some rows is keyed by."""

    seeds: torch.Tensor
    """Seeds of the requests, int64 [rows]."""
    positions: torch.Tensor
    """Positions of the input tokens, int64 [rows]: what is drawn stands one further."""

    def at(self, rows: torch.Tensor | slice) -> Keys:
        """Return the keys of some rows."""
        return Keys(self.seeds[rows], self.positions[rows])


def keyed_sample(logits: torch.Tensor, keys: Keys) -> torch.Tensor:
    """Draw one token per row, int64 [rows]: `argmax_v(logits[v] + G(seed, position,
    v))`; of equals the lowest.

    Args:
        logits: float32 [rows, vocab]; need not be normalised; -inf excludes a token.
        keys: on the logits' device.
    """
    if logits.device.type == "cpu":
        tokens = torch.empty(len(logits), dtype=torch.int64)
        native().keyed_sample(
            logits.detach().contiguous().numpy(),
            keys.seeds.contiguous().numpy(),
            keys.positions.contiguous().numpy(),
            tokens.numpy(),
        )
        return tokens
    if triton is None:
        raise UnsupportedHost(
            f"das.verify.noise='keyed' needs Triton on {logits.device.type}, found none"
        )
    return triton_sample(logits, keys)


if triton is not None:

    @triton.jit
    def _mix(h, word):  # type: ignore[no-untyped-def]
        word *= 0xCC9E2D51
        word = (word << 15) | (word >> 17)
        word *= 0x1B873593
        h ^= word
        h = (h << 13) | (h >> 19)
        return h * 5 + 0xE6546B64

    @triton.jit
    def _gumbel(seed, position, token):  # type: ignore[no-untyped-def]
        # As vLLM's V2 sampler, operation for operation: `murmur3_uniform32` and
        # `_log1p_neg_stable`.
        h = (seed ^ seed).to(tl.uint32)
        h = _mix(h, (seed & 0xFFFFFFFF).to(tl.uint32))
        h = _mix(h, ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32))
        h = _mix(h, (position & 0xFFFFFFFF).to(tl.uint32))
        h = _mix(h, token.to(tl.uint32)) ^ 16
        h ^= h >> 16
        h *= 0x85EBCA6B
        h ^= h >> 13
        h *= 0xC2B2AE35
        h ^= h >> 16
        high = (h >> 16).to(tl.int32).to(tl.float32)
        low = (h & 0xFFFF).to(tl.int32).to(tl.float32)
        u = high * 1.52587890625e-05 + (low + 0.5) * 2.3283064365386963e-10
        series = 1.0 / 8.0
        series = 1.0 / 7.0 + u * series
        series = 1.0 / 6.0 + u * series
        series = 1.0 / 5.0 + u * series
        series = 1.0 / 4.0 + u * series
        series = 1.0 / 3.0 + u * series
        series = 1.0 / 2.0 + u * series
        series = 1.0 + u * series
        direct = tl.log(tl.maximum(1.0 - u, 5.960464477539063e-08))
        return -tl.log(-tl.where(u < 0.25, -u * series, direct))

    @triton.jit(do_not_specialize_on_alignment=["seeds", "positions"])
    def _draw_blocks(  # type: ignore[no-untyped-def]
        logits,  # float32 [rows, vocab]
        stride,  # int: values from one row to the next
        seeds,  # int64 [rows]
        positions,  # int64 [rows]
        scores,  # float32 [rows, blocks]: written
        tokens,  # int64 [rows, blocks]: written
        vocab,  # int
        blocks,  # int
        BLOCK: tl.constexpr,  # tokens of a block
    ):
        """Write down the best score of each block of tokens, and its token."""
        row = tl.program_id(0).to(tl.int64)
        block = tl.program_id(1)
        token = block * BLOCK + tl.arange(0, BLOCK)
        valid = token < vocab
        logit = tl.load(logits + row * stride + token, mask=valid, other=-float("inf"))
        noise = _gumbel(tl.load(seeds + row), tl.load(positions + row), token)
        score = tl.where(valid, logit + noise, -float("inf"))
        # NaN would win at a place that is no token's
        score = tl.where(score == score, score, -float("inf"))
        value, at = tl.max(score, axis=0, return_indices=True)
        tl.store(scores + row * blocks + block, value)
        tl.store(tokens + row * blocks + block, block * BLOCK + at)

    def triton_sample(logits: torch.Tensor, keys: Keys) -> torch.Tensor:
        """Draw as `keyed_sample`, with the kernel for a GPU."""
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        rows, vocab = logits.shape
        blocks = triton.cdiv(vocab, _BLOCK)
        scores = logits.new_empty(rows, blocks)
        tokens = logits.new_empty(rows, blocks, dtype=torch.int64)
        if rows:
            _draw_blocks[(rows, blocks)](
                logits,
                logits.stride(0),
                keys.seeds.contiguous(),
                keys.positions.contiguous(),
                scores,
                tokens,
                vocab,
                blocks,
                BLOCK=_BLOCK,
            )
        best_block = scores.argmax(dim=1, keepdim=True)
        return tokens.gather(1, best_block).squeeze(1)
