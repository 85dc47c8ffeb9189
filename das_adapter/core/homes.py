"""Which node keeps a problem's history: its home."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from das_adapter.core.steps import Ints

UInt64 = npt.NDArray[np.uint64]


def homes(problems: npt.ArrayLike, nodes: Sequence[str]) -> Ints:
    """Return each problem's home by rendezvous hashing (Thaler and Ravishankar, 1998):
    every node draws a number for the problem, and the highest wins. When a node comes
    or goes, only the problems that it wins or had won move.

    Args:
        problems: 64-bit identities, [n].
        nodes: names of the nodes, at least one.

    Returns:
        Indices into `nodes`, int64 [n].
    """
    ids = np.asarray(problems, dtype=np.uint64)
    num_problems = len(ids)
    homes_of = np.zeros(num_problems, dtype=np.int64)
    highest = np.zeros(num_problems, dtype=np.uint64)
    for index, node in enumerate(nodes):
        mixed = ids ^ _node_number(node)
        drawn = _hash_numbers(mixed)
        wins = drawn > highest
        homes_of[wins] = index
        highest = np.maximum(highest, drawn)
    return homes_of


def _node_number(node: str) -> np.uint64:
    """Return a hash of a node's name."""
    name = node.encode()
    digest = hashlib.blake2b(name, digest_size=8)
    content = digest.digest()
    number = int.from_bytes(content, "little")
    return np.uint64(number)


def _hash_numbers(x: UInt64) -> UInt64:
    """Return a hash of 64-bit numbers (the finaliser of SplitMix64)."""
    x = _fold(x, 30)
    x = x * np.uint64(0xBF58476D1CE4E5B9)
    x = _fold(x, 27)
    x = x * np.uint64(0x94D049BB133111EB)
    return _fold(x, 31)


def _fold(x: UInt64, num_bits: int) -> UInt64:
    """Return numbers with their upper bits mixed into the lower ones."""
    shift = np.uint64(num_bits)
    upper = x >> shift
    return x ^ upper
