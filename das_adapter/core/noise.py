"""Noise keyed by (request seed, position): the sample depends on nothing else, so no drafter can change a token.

A token is drawn as ``argmax_v(logits[v] + G(key, v))`` with standard Gumbel noise ``G`` that is a hash of the row's
key and the token (Gumbel-max; drafter-invariant verification, arXiv 2408.07978). A draft token is accepted iff it
equals that token, which happens with probability ``p(draft token)``, as in rejection sampling of a point mass.

``csrc/keyed_noise.cpp`` and ``das_adapter/engine/sampling/keyed_sample.py`` compute the same hash.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt64 = npt.NDArray[np.uint64]


def row_keys(seeds: UInt64, positions: npt.NDArray[np.int64]) -> UInt64:
    """Return the keys of rows that sample the token at `positions` (0 = first prompt token) of requests with `seeds`.

    Args:
        seeds: uint64 [rows].
        positions: int64 [rows], the index of the sampled token in its sequence.

    Returns:
        uint64 [rows]; distinct (seed, position) pairs give independent keys (SplitMix64 finaliser).
    """
    with np.errstate(over="ignore"):
        x = _mix(seeds) + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        return _mix(x)


def _mix(x: UInt64) -> UInt64:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: UInt64 = x ^ (x >> np.uint64(31))
    return mixed


def gumbel(keys: UInt64, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Compute the noise itself, float64 [rows, tokens]. The compiled samplers are tested against this definition."""
    k0, k1 = (keys & np.uint64(0xFFFFFFFF)).astype(np.uint32), (keys >> np.uint64(32)).astype(np.uint32)
    with np.errstate(over="ignore"):
        h = tokens.astype(np.uint32)[None, :] * np.uint32(0x9E3779B1) + k0[:, None]
        h = _finalise(_finalise(h) ^ k1[:, None])
    return np.asarray(-np.log(-np.log1p(-((h.astype(np.float64) + 0.5) * 2.0**-32))))


def _finalise(h: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x21F0AAAD)
    h = (h ^ (h >> np.uint32(15))) * np.uint32(0x735A2D97)
    return h ^ (h >> np.uint32(15))
