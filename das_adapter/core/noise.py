"""Noise keyed by (request seed, position, token): a draw depends on nothing else, so no drafter can change a token.

A token is drawn as ``argmax_v(logits[v] / temperature + G(seed, position, v))`` with standard Gumbel noise ``G`` that
is a hash of its key (Gumbel-max; drafter-invariant verification, arXiv 2408.07978). A draft token is accepted iff it
equals that token, which happens with probability ``p(draft token)``, as in rejection sampling of a point mass.

This is the noise of vLLM's V2 sampler since 0.31: a request with a seed gets the same tokens from it. All arithmetic
is in float32; equal scores go to the lowest token. ``csrc/keyed_noise.cpp`` and
``das_adapter/engine/v1/keyed_sample.py`` compute the same, apart from the last bit of a device's logarithm.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float32]


def gumbel(
    seeds: Ints, positions: Ints, tokens: Ints, log: Callable[[Floats], Floats] = lambda x: _rounded_log(x)
) -> Floats:
    """Compute the noise of some tokens, float32 [rows, tokens].

    Args:
        seeds: int64 [rows], of the requests.
        positions: int64 [rows], of each row's *input* token: the token that is drawn stands at the next position.
        tokens: int64 [tokens].
        log: natural logarithm of a float32 array; the default rounds correctly.
    """
    u = uniform(hashed(seeds, positions, tokens))
    # G = -log(-log(1 - u)): the winning tail is at u = 0, where float32 resolves most.
    series = np.full_like(u, 1 / 8)
    for d in range(7, 0, -1):
        series = np.float32(1 / d) + u * series
    minus_log1p = np.where(u < np.float32(0.25), u * series, -log(np.maximum(np.float32(1) - u, np.float32(2**-24))))
    return np.asarray(-log(minus_log1p), dtype=np.float32)


def hashed(seeds: Ints, positions: Ints, tokens: Ints) -> Words:
    """Return the hashes of (seed, position, token), uint32 [rows, tokens]: Murmur3 over the two halves of the seed,
    the low half of the position, and the token."""
    with np.errstate(over="ignore"):
        seeds64, positions64 = seeds.astype(np.uint64), positions.astype(np.uint64)
        low = np.uint64(0xFFFFFFFF)
        h = np.zeros(len(seeds64), dtype=np.uint32)
        for word in (seeds64 & low, seeds64 >> np.uint64(32), positions64 & low):
            h = _mix(h, word.astype(np.uint32))
        h = _mix(h[:, None], tokens.astype(np.uint32)[None, :]) ^ np.uint32(16)
        h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        return h ^ (h >> np.uint32(16))


def uniform(h: Words) -> Floats:
    """Map hashes to (0, 1]: (h + 1/2) / 2^32, rounded once to float32."""
    high, low = (h >> np.uint32(16)).astype(np.float32), (h & np.uint32(0xFFFF)).astype(np.float32)
    return np.asarray(high * np.float32(2**-16) + (low + np.float32(0.5)) * np.float32(2**-32))


def _mix(h: Words, word: Words) -> Words:
    word = _rotated(word * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    return _rotated(h ^ word, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def _rotated(x: Words, bits: int) -> Words:
    return (x << np.uint32(bits)) | (x >> np.uint32(32 - bits))


def _rounded_log(x: Floats) -> Floats:
    return np.log(x.astype(np.float64)).astype(np.float32)
