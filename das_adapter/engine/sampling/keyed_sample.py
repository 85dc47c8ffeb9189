"""Keyed-noise sampling of a batch of logits: in C++ on a CPU, in Triton where it is installed, else in PyTorch.

All three compute the noise that `das_adapter.core.noise` defines.
"""

from __future__ import annotations

import numpy as np
import torch

from das_adapter._native import keyed_sample as _native_sample

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_BLOCK = 1024


def keyed_sample(logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Draw one token per row: `argmax_v(logits[v] + G(key, v))`.

    Args:
        logits: float32 [rows, vocab]; need not be normalised; -inf excludes a token.
        keys: int64 [rows], the bits of `core.noise.row_keys`, on the logits' device.

    Returns:
        int64 [rows]; ties go to the lowest token.
    """
    if logits.device.type == "cpu":
        out = torch.empty(logits.shape[0], dtype=torch.int64)
        _native_sample(logits.detach().contiguous().numpy(), keys.contiguous().numpy().view(np.uint64), out.numpy())
        return out
    if triton is not None:
        return _triton_sample(logits.contiguous(), keys)
    return torch_sample(logits, keys)


def torch_sample(logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Draw as `keyed_sample`, in plain PyTorch: for devices without Triton, and to test the kernels against."""
    mask = 0xFFFFFFFF
    k0, k1 = (keys & mask)[:, None], ((keys >> 32) & mask)[:, None]
    tokens = torch.arange(logits.shape[1], device=logits.device)[None, :]
    h = _finalise(_finalise(((tokens * 0x9E3779B1) + k0) & mask) ^ k1)
    gumbel = -torch.log(-torch.log1p(-((h.double() + 0.5) * 2.0**-32)))
    return (logits.double() + gumbel).argmax(dim=-1)


def _finalise(h: torch.Tensor) -> torch.Tensor:
    mask = 0xFFFFFFFF
    h = _times(h ^ (h >> 16), 0x21F0AAAD) & mask
    h = _times(h ^ (h >> 15), 0x735A2D97) & mask
    return h ^ (h >> 15)


def _times(h: torch.Tensor, factor: int) -> torch.Tensor:
    return h * factor  # both below 2^32: the low 32 bits survive int64 wrap-around


if triton is not None:

    @triton.jit
    def _mix(h):  # type: ignore[no-untyped-def]
        h = (h ^ (h >> 16)) * 0x21F0AAAD
        h = (h ^ (h >> 15)) * 0x735A2D97
        return h ^ (h >> 15)

    @triton.jit
    def _best_of_block(logits, keys, scores, winners, vocab, blocks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        row, block = tl.program_id(0), tl.program_id(1)
        key = tl.load(keys + row).to(tl.uint64, bitcast=True)
        k0, k1 = (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32)
        token = block * BLOCK + tl.arange(0, BLOCK)
        valid = token < vocab
        logit = tl.load(logits + row.to(tl.int64) * vocab + token, mask=valid, other=-float("inf"))
        h = _mix(_mix(token.to(tl.uint32) * 0x9E3779B1 + k0) ^ k1)
        u = (h.to(tl.float64) + 0.5) * 2.3283064365386963e-10
        # -log1p(-u) = -log(1 - u); below 2^-20 its series is exact to float64
        e = tl.where(u < 9.5367431640625e-07, u + 0.5 * u * u, -tl.log(1.0 - u))
        score = tl.where(valid, logit.to(tl.float64) - tl.log(e), -float("inf"))
        best, at = tl.max(score, axis=0, return_indices=True)
        tl.store(scores + row * blocks + block, best)
        tl.store(winners + row * blocks + block, block * BLOCK + at)

    def _triton_sample(logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        rows, vocab = logits.shape
        blocks = triton.cdiv(vocab, _BLOCK)
        scores = torch.empty(rows, blocks, dtype=torch.float64, device=logits.device)
        winners = torch.empty(rows, blocks, dtype=torch.int64, device=logits.device)
        _best_of_block[(rows, blocks)](logits, keys, scores, winners, vocab, blocks, BLOCK=_BLOCK)
        return winners.gather(1, scores.argmax(dim=1, keepdim=True)).squeeze(1)
