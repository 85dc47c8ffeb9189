"""Bring sealed text to the device beside the steps: no step waits until it is looked up, and each copies a piece."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from das_adapter.core.index import SuffixIndex
from das_adapter.engine.v2.arena import Arena

PIECE = 2**18
"""Words of 32 bits that are copied in a step: 1 MiB, 0.05 ms of PCIe 4. Only starting a copy takes the host's time."""
AHEAD = 4
"""Problems whose text is made ready, or waits in pinned memory."""
_WHOLE = 2**40
"""Words in which every history fits."""


@dataclass
class Parcel:
    """The sealed text of a problem on its way."""

    problem: int
    rollout: int
    """`Arena.rollout` in which it was ordered."""
    ready: Future[tuple[torch.Tensor, int, bool]]
    """Tokens and places, int32 [n] on the host; how many of these are tokens; whether there is more than fits."""
    at: int | None = None
    """Its offset in the arena; None: it has none yet."""
    copied: int = 0


class Bringer:
    """Brings the sealed text of the problems that are drafted for to an arena."""

    def __init__(self, arena: Arena, words: torch.Tensor, beside: bool) -> None:
        """`words`: the arena's, int32. `beside`: a thread looks the text up, and each step copies a piece; else all
        that is missing is brought at once."""
        self._arena, self._words, self._beside = arena, words, beside
        self._worker = ThreadPoolExecutor(1, "das-bring")  # begins its thread with the first work
        self._parcels: list[Parcel] = []

    def step(self, index: SuffixIndex) -> None:
        """Order what is missing, and copy what is ready: at most `PIECE` words, where that is done beside the steps."""
        arena = self._arena
        self._parcels = [parcel for parcel in self._parcels if parcel.rollout == arena.rollout]
        if arena.unsealed:
            ordered = {parcel.problem for parcel in self._parcels}
            missing = [problem for problem in arena.missing() if problem not in ordered]
            arena.unsealed = bool(missing or ordered)
            for problem in missing[: AHEAD - len(ordered) if self._beside else None]:
                found = self._worker.submit(looked_up, index, problem, arena.room, self._words.is_cuda)
                self._parcels.append(Parcel(problem, arena.rollout, found))
                if not self._beside:
                    self._copy(self._parcels.pop(), _WHOLE)
        left = PIECE
        while left > 0 and self._parcels and self._parcels[0].ready.done():
            parcel = self._parcels[0]
            left -= self._copy(parcel, left)
            if parcel.at is None or parcel.copied == len(parcel.ready.result()[0]):
                self._parcels.pop(0)

    def _copy(self, parcel: Parcel, most: int) -> int:
        """Copy at most so many words of a parcel; return how many. What finds no room is told to the arena."""
        arena, (text, tokens, short) = self._arena, parcel.ready.result()
        if parcel.at is None:
            if len(text) > arena.room:  # texts of requests that ended have taken it
                text, tokens, short = text[:0], 0, True
            arena.short += short
            if not len(text):
                arena.show(parcel.problem, arena.used, 0, 0)
                return 0
            parcel.at = arena.take(len(text))
        count = min(most, len(text) - parcel.copied)
        begin = parcel.at + parcel.copied
        self._words[begin : begin + count].copy_(text[parcel.copied : parcel.copied + count], non_blocking=True)
        parcel.copied += count
        if parcel.copied == len(text):
            arena.show(parcel.problem, parcel.at, tokens, len(text) - tokens)
        return count


def looked_up(index: SuffixIndex, problem: int, room: int, pinned: bool) -> tuple[torch.Tensor, int, bool]:
    """Return a problem's sealed text, tokens and then places, int32 [n], in at most `room` words; how many of these are
    tokens; and whether there is some, but no room for it. Holds no lock of Python while it copies."""
    tokens, places = index.flat(problem, room)
    short = not len(tokens) and len(index.flat(problem, _WHOLE)[0]) > 0
    both = torch.empty(len(tokens) + len(places), dtype=torch.int32, pin_memory=pinned)
    for part, array in ((both[: len(tokens)], tokens), (both[len(tokens) :], places.view(np.int32))):
        part.copy_(torch.from_numpy(array))
    return both, len(tokens), short
