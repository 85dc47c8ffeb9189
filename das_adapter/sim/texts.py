"""The recorded responses that are written again: their tokens in one array, and drafts
compared with them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from das_adapter.core.index.values import Int32
from das_adapter.sim.requests import Ints, int_zeros
from das_adapter.sim.rollouts import RecordedResponse


class Texts:
    """Recorded responses, one after the other. A response is named by its row."""

    def __init__(self, responses: Sequence[RecordedResponse]) -> None:
        self.responses = responses
        texts = [response.tokens for response in responses]
        lengths = [len(text) for text in texts]
        self.ends: Ints = np.cumsum([0, *lengths], dtype=np.int64)
        """Begin of each response, and the end of the last, int64 [rows + 1]."""
        self.tokens: Int32 = np.concatenate([np.zeros(0, np.int32), *texts])

    def agreeing(self, rows: Ints, at: Ints, drafts: Int32, offsets: Ints) -> Ints:
        """Return how many tokens of each draft `drafts[offsets[i]:offsets[i + 1]]` the
        response confirms that has `at` tokens already, int64 [n]. No draft may pass its
        response's end.
        """
        counts = np.diff(offsets)
        draft_of = np.repeat(np.arange(len(rows)), counts)
        position = np.arange(len(drafts)) - offsets[draft_of]
        written = self.tokens[ragged(self.ends[rows] + at, counts)]
        wrong = written != drafts
        # a draft agrees up to its first wrong token
        agreeing = counts.copy()
        np.minimum.at(agreeing, draft_of[wrong], position[wrong])
        return agreeing


def ragged(starts: Ints, counts: Ints) -> Ints:
    """Return the indices start, start + 1, ... of each run, one run after the other."""
    offsets = offsets_of(counts)
    shifts = np.repeat(starts - offsets[:-1], counts)
    return np.arange(offsets[-1]) + shifts


def offsets_of(counts: Ints) -> Ints:
    """Return where each of several runs begins, and the end of the last."""
    return np.concatenate([int_zeros(1), np.cumsum(counts)])
