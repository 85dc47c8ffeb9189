"""Argument checks that the native index and the reference share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.integer[Any]] | Sequence[int]


def token_ids(tokens: Tokens) -> Int32:
    """Token ids as a contiguous int32 array of shape (n,); negative ones are the index's to refuse.

    Raises:
        ValueError: not one-dimensional integers, or a token id that doesn't fit int32.
    """
    if isinstance(tokens, np.ndarray) and tokens.dtype == np.int32 and tokens.ndim == 1:
        return np.ascontiguousarray(tokens)
    wide = integers(tokens, np.int64, "token ids")
    ids = wide.astype(np.int32)
    if (ids != wide).any():
        raise ValueError(f"token id {wide[ids != wide][0]}: token ids are >= 0 and < 2^31")
    return ids


def integers(values: npt.ArrayLike, dtype: type[np.int64], name: str) -> Int64:
    """A contiguous int64 array of shape (n,).

    Raises:
        ValueError: not one-dimensional integers.
    """
    if isinstance(values, np.ndarray) and values.dtype == dtype and values.ndim == 1:
        return np.ascontiguousarray(values)
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{name}: found {array.dtype} of shape {array.shape}, expected integers of shape (n,)")
    return np.ascontiguousarray(array, dtype=dtype)


def problem_id(problem: int) -> int:
    """A problem identity, checked.

    Raises:
        ValueError: it doesn't fit 64 bits without sign.
    """
    if not 0 <= problem < 2**64:
        raise ValueError(f"problem {problem}: allowed: 0 to 2^64 - 1")
    return int(problem)


def check_knobs(max_depth: int, half_life: float) -> None:
    """Raises ValueError where a knob of the index is out of range."""
    if not 8 <= max_depth <= 255:
        raise ValueError(f"max_depth: found {max_depth}, allowed: 8 to 255")
    if not half_life > 0:
        raise ValueError(f"half_life: found {half_life}, allowed: above 0")
