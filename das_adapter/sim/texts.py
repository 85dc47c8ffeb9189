"""The rollouts that are written again: their tokens in one array, and drafts compared
with them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from das_adapter.core.index.values import Int32
from das_adapter.sim.requests import Ints
from das_adapter.sim.rollouts import Rollout


class Texts:
    """Recorded responses, one after the other. A response is named by its row."""

    def __init__(self, rollouts: Sequence[Rollout]) -> None:
        self.rollouts = rollouts
        self.ends: Ints = np.cumsum(
            [0, *(len(r.tokens) for r in rollouts)], dtype=np.int64
        )
        """Where each response begins, int64 [rows + 1]."""
        self.tokens: Int32 = np.concatenate(
            [np.zeros(0, np.int32), *(r.tokens for r in rollouts)]
        )

    def agreeing(self, rows: Ints, at: Ints, drafts: Int32, offsets: Ints) -> Ints:
        """Return how many tokens of each draft `drafts[offsets[i]:offsets[i + 1]]` the
        response confirms that has `at` tokens already, int64 [n]. No draft may pass its
        response's end.
        """
        counts = np.diff(offsets)
        place = np.arange(len(drafts)) - np.repeat(offsets[:-1], counts)
        wrong = self.tokens[ragged(self.ends[rows] + at, counts)] != drafts
        found = counts.copy()
        np.minimum.at(
            found, np.repeat(np.arange(len(rows)), counts)[wrong], place[wrong]
        )
        return found


def ragged(starts: Ints, counts: Ints) -> Ints:
    """Return the indices start, start + 1, ... of each run, one run after the other."""
    offsets = offsets_of(counts)
    return np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], counts)


def offsets_of(counts: Ints) -> Ints:
    """Return where each of several runs begins, and the end of the last."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
