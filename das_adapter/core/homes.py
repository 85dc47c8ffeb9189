"""Which node keeps a problem's history: its home."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def homes(problems: npt.ArrayLike, nodes: Sequence[str]) -> npt.NDArray[np.int64]:
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
    found = np.zeros(len(ids), dtype=np.int64)
    highest = np.zeros(len(ids), dtype=np.uint64)
    for index, node in enumerate(nodes):
        name = int.from_bytes(
            hashlib.blake2b(node.encode(), digest_size=8).digest(), "little"
        )
        drawn = _mixed(ids ^ np.uint64(name))
        found[drawn > highest] = index
        highest = np.maximum(highest, drawn)
    return found


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return a hash of 64-bit numbers (the finaliser of SplitMix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
