"""Types of the arguments and results of the native index."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.integer[Any]] | Sequence[int]
FilePath = str | os.PathLike[str]
ALL = 2**63 - 1
"""More visits than a problem has."""


class Number:
    """A number of the native index, read from `_core` of its owner, under `_lock` where
    that has one.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, owner_type: type) -> int:
        lock = getattr(owner, "_lock", contextlib.nullcontext())
        with lock:
            return int(getattr(owner._core, self._name))


class Shrunk(NamedTuple):
    """The effect of one slice of thinning a history out to a byte budget."""

    tokens: int
    """Tokens that went."""
    thinned: int
    """Problems of which the stretches that few of their rollouts have went, or the
    oldest visits.
    """
    dropped: int
    """Problems that went whole."""
    kept: int
    """Tokens that the thinned problems keep."""


def tokens_of(tokens: Tokens) -> Int32:
    """Return token ids as a contiguous int32 array of shape (n,)."""
    return np.ascontiguousarray(tokens, dtype=np.int32)


def integers(values: npt.ArrayLike) -> Int64:
    """Return integers as a contiguous int64 array."""
    return np.ascontiguousarray(values, dtype=np.int64)
