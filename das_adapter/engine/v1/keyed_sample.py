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
        seeds = self.seeds[rows]
        positions = self.positions[rows]
        return Keys(seeds, positions)


def keyed_sample(logits: torch.Tensor, keys: Keys) -> torch.Tensor:
    """Draw one token per row, int64 [rows]: `argmax_v(logits[v] + G(seed, position,
    v))`; of equals the lowest.

    Args:
        logits: float32 [rows, vocab]; need not be normalised; -inf excludes a token.
        keys: on the logits' device.
    """
    if logits.device.type == "cpu":
        logits = logits.detach().contiguous()
        seeds = keys.seeds.contiguous()
        positions = keys.positions.contiguous()
        rows = len(logits)
        tokens = torch.empty(rows, dtype=torch.int64)
        native().keyed_sample(
            logits.numpy(),
            seeds.numpy(),
            positions.numpy(),
            tokens.numpy(),
        )
        return tokens
    if triton is None:
        device = logits.device.type
        raise UnsupportedHost(
            f"das.verify.noise='keyed' needs Triton on {device}, found none"
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
        h *= 5
        return h + 0xE6546B64

    @triton.jit
    def _gumbel(  # type: ignore[no-untyped-def]
        seed,  # int64
        position,  # int64
        token,  # int [tokens]
    ):
        # As vLLM's V2 sampler, operation for operation: `murmur3_uniform32` and
        # `_log1p_neg_stable`.
        nothing = seed ^ seed
        h = nothing.to(tl.uint32)
        low_seed = seed & 0xFFFFFFFF
        word = low_seed.to(tl.uint32)
        h = _mix(h, word)
        high_seed = seed >> 32
        high_seed &= 0xFFFFFFFF
        word = high_seed.to(tl.uint32)
        h = _mix(h, word)
        low_position = position & 0xFFFFFFFF
        word = low_position.to(tl.uint32)
        h = _mix(h, word)
        word = token.to(tl.uint32)
        h = _mix(h, word)
        h ^= 16
        h ^= h >> 16
        h *= 0x85EBCA6B
        h ^= h >> 13
        h *= 0xC2B2AE35
        h ^= h >> 16
        high_bits = h >> 16
        high_int = high_bits.to(tl.int32)
        high = high_int.to(tl.float32)
        low_bits = h & 0xFFFF
        low_int = low_bits.to(tl.int32)
        low = low_int.to(tl.float32)
        high_part = high * 1.52587890625e-05
        low_middle = low + 0.5
        low_part = low_middle * 2.3283064365386963e-10
        u = high_part + low_part
        series = 1.0 / 8.0
        series = 1.0 / 7.0 + u * series
        series = 1.0 / 6.0 + u * series
        series = 1.0 / 5.0 + u * series
        series = 1.0 / 4.0 + u * series
        series = 1.0 / 3.0 + u * series
        series = 1.0 / 2.0 + u * series
        series = 1.0 + u * series
        rest = 1.0 - u
        rest = tl.maximum(rest, 5.960464477539063e-08)
        direct = tl.log(rest)
        is_small = u < 0.25
        by_series = -u * series
        log_rest = tl.where(is_small, by_series, direct)
        exponential = -log_rest
        return -tl.log(exponential)

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
        row = tl.program_id(0)
        row = row.to(tl.int64)
        block = tl.program_id(1)
        first_token = block * BLOCK
        token = first_token + tl.arange(0, BLOCK)
        valid = token < vocab
        excluded = -float("inf")
        row_logits = logits + row * stride
        token_logits = row_logits + token
        logit = tl.load(token_logits, mask=valid, other=excluded)
        seed = tl.load(seeds + row)
        position = tl.load(positions + row)
        noise = _gumbel(seed, position, token)
        noisy = logit + noise
        score = tl.where(valid, noisy, excluded)
        # NaN would win at a place that is no token's
        is_number = score == score
        score = tl.where(is_number, score, excluded)
        value, at = tl.max(score, axis=0, return_indices=True)
        row_scores = scores + row * blocks
        tl.store(row_scores + block, value)
        row_tokens = tokens + row * blocks
        block_tokens = row_tokens + block
        tl.store(block_tokens, first_token + at)

    def triton_sample(logits: torch.Tensor, keys: Keys) -> torch.Tensor:
        """Draw as `keyed_sample`, with the kernel for a GPU."""
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        rows, vocab = logits.shape
        blocks = triton.cdiv(vocab, _BLOCK)
        shape = (rows, blocks)
        scores = logits.new_empty(shape)
        tokens = logits.new_empty(shape, dtype=torch.int64)
        if rows:
            draw_blocks = _draw_blocks[shape]
            draw_blocks(
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
        best_tokens = tokens.gather(1, best_block)
        return best_tokens.squeeze(1)
