"""The definition of keyed noise in NumPy: the tests compare the kernels with it.

A token is drawn as ``argmax_v(logits[v] + G(seed, position, v))`` with standard Gumbel
noise ``G`` that is a hash of its key: the noise of vLLM's V2 sampler since 0.31. All
arithmetic is in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def gumbel(
    seeds: np.ndarray,
    positions: np.ndarray,
    tokens: np.ndarray,
    log: Callable[..., np.ndarray] | None = None,
) -> np.ndarray:
    """The noise of some tokens, float32 [rows, tokens]; positions are the input
    tokens'. `log`: natural logarithm of a float32 array, without which it is rounded
    correctly.
    """
    log = log or (lambda x: np.log(x.astype(np.float64)).astype(np.float32))
    u = uniform(hashed(seeds, positions, tokens))
    # G = -log(-log(1 - u)): the winning tail is at u = 0, where float32 resolves most.
    series = np.full_like(u, 1 / 8)
    for d in range(7, 0, -1):
        series = np.float32(1 / d) + u * series
    minus_log1p = np.where(
        u < np.float32(0.25),
        u * series,
        -log(np.maximum(np.float32(1) - u, np.float32(2**-24))),
    )
    return np.asarray(-log(minus_log1p), dtype=np.float32)


def hashed(seeds: np.ndarray, positions: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Murmur3 over the two halves of the seed, the low half of the position, and the
    token, uint32 [rows, tokens].
    """
    with np.errstate(over="ignore"):
        wide = seeds.astype(np.uint64)
        at = positions.astype(np.uint64)
        low = np.uint64(0xFFFFFFFF)
        h = np.zeros(len(wide), dtype=np.uint32)
        for word in (wide & low, wide >> np.uint64(32), at & low):
            h = _mix(h, word.astype(np.uint32))
        h = _mix(h[:, None], tokens.astype(np.uint32)[None, :]) ^ np.uint32(16)
        h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        return h ^ (h >> np.uint32(16))


def uniform(h: np.ndarray) -> np.ndarray:
    """Map hashes to (0, 1]: (h + 1/2) / 2^32, rounded once to float32."""
    high = (h >> np.uint32(16)).astype(np.float32)
    low = (h & np.uint32(0xFFFF)).astype(np.float32)
    return np.asarray(
        high * np.float32(2**-16) + (low + np.float32(0.5)) * np.float32(2**-32)
    )


def _mix(h: np.ndarray, word: np.ndarray) -> np.ndarray:
    word = _rotated(word * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    return _rotated(h ^ word, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def _rotated(x: np.ndarray, bits: int) -> np.ndarray:
    return (x << np.uint32(bits)) | (x >> np.uint32(32 - bits))
