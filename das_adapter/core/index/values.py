"""Argument checks that the native index and the reference share."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.integer[Any]] | Sequence[int]


class Drafting(Protocol):
    """Drafts that a thread of the index makes."""

    def result(self) -> tuple[Int32, Float32, Int64]:
        """Wait for them, once; return what `SuffixIndex.draft_flat` does."""


class Number:
    """A number of the native index, read from `_core` of its owner, under `_lock` where that has one."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, kind: type) -> int:
        with getattr(owner, "_lock", contextlib.nullcontext()):
            return int(getattr(owner._core, self._name))


class Shrunk(NamedTuple):
    """What went to keep a byte budget."""

    tokens: int
    thinned: int
    """Problems of which the stretches that few of their rollouts have went."""
    dropped: int
    """Problems that went whole."""


def token_ids(tokens: Tokens) -> Int32:
    """Return token ids as a contiguous int32 array of shape (n,); ValueError: they are not one-dimensional integers of
    32 bits."""
    if isinstance(tokens, np.ndarray) and tokens.dtype == np.int32 and tokens.ndim == 1:
        return np.ascontiguousarray(tokens)
    wide = integers(tokens, "token ids")
    ids = wide.astype(np.int32)
    if (ids != wide).any():
        raise ValueError(f"token id: found {wide[ids != wide][0]}, which does not fit 32 bits")
    return ids


def integers(values: npt.ArrayLike, name: str) -> Int64:
    """Return integers as a contiguous int64 array of shape (n,); ValueError: they are not one-dimensional integers."""
    if isinstance(values, np.ndarray) and values.dtype == np.int64 and values.ndim == 1:
        return np.ascontiguousarray(values)
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{name}: found {array.dtype} of shape {array.shape}, expected integers of shape (n,)")
    return np.ascontiguousarray(array, dtype=np.int64)


def problem_id(problem: int) -> int:
    """Return a problem's identity; ValueError: it doesn't fit an unsigned 64-bit integer."""
    if not 0 <= problem < 2**64:
        raise ValueError(f"problem: found {problem}, allowed: 0 to 2^64 - 1")
    return int(problem)


def check_knobs(max_depth: int, half_life: float = 1.0) -> None:
    """Refuse a knob of the index that is out of range, with a ValueError."""
    if not 8 <= max_depth <= 255:
        raise ValueError(f"max_depth: found {max_depth}, allowed: 8 to 255")
    if not half_life > 0:
        raise ValueError(f"half_life: found {half_life}, allowed: above 0")


def visits(window: int | None) -> int:
    """Return how many visits a problem keeps, None: all; ValueError: below 1."""
    if window is None:
        return 2**63
    if window < 1:
        raise ValueError(f"window: found {window}, allowed: 1 or more")
    return window


def shrink(core: Any, max_bytes: int, threads: int) -> Shrunk:
    """Call a native index's `shrink`; ValueError: `max_bytes` is negative."""
    if max_bytes < 0:
        raise ValueError(f"max_bytes: found {max_bytes}, allowed: 0 or more")
    return Shrunk(*core.shrink(max_bytes, threads))
