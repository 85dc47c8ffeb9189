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
        no_text = np.zeros(0, np.int32)
        self.tokens: Int32 = np.concatenate([no_text, *texts])

    def agreeing(
        self,
        rows: Ints,
        at: Ints,
        drafts: Int32,
        offsets: Ints,
    ) -> Ints:
        """Return how many tokens of each draft `drafts[offsets[i]:offsets[i + 1]]` the
        response confirms that has `at` tokens already, int64 [n]. No draft may pass its
        response's end.
        """
        counts = np.diff(offsets)
        numbers = np.arange(len(rows))
        draft_of = np.repeat(numbers, counts)
        place = np.arange(len(drafts))
        position = place - offsets[draft_of]
        begins = self.ends[rows] + at
        places_in_texts = ragged(begins, counts)
        written = self.tokens[places_in_texts]
        wrong = written != drafts
        # a draft agrees up to its first wrong token
        agreeing = counts.copy()
        wrong_drafts = draft_of[wrong]
        np.minimum.at(agreeing, wrong_drafts, position[wrong])
        return agreeing


def ragged(starts: Ints, counts: Ints) -> Ints:
    """Return the indices start, start + 1, ... of each run, one run after the other."""
    offsets = offsets_of(counts)
    begins = offsets[:-1]
    shifts = np.repeat(starts - begins, counts)
    total = offsets[-1]
    return np.arange(total) + shifts


def offsets_of(counts: Ints) -> Ints:
    """Return where each of several runs begins, and the end of the last."""
    zero = int_zeros(1)
    ends = np.cumsum(counts)
    return np.concatenate([zero, ends])
