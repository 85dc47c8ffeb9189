"""Bring sealed text to the device beside the steps: no step waits until it is looked up, and each copies a little."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from das_adapter.core.index import SuffixIndex
from das_adapter.engine.v2.arena import Arena

A_STEP = 2**18
"""Words of 32 bits after which a step copies no further text: 1 MiB, 0.05 ms of PCIe 4. Only starting a copy takes the
host's time."""
AHEAD = 4
"""Problems whose text is made ready, or waits in pinned memory."""
_WHOLE = 2**40
"""Words in which every history fits."""

Text = tuple[torch.Tensor, int, bool]
"""A problem's sealed text, tokens and then places, int32 [n] on the host; how many of these are tokens; and whether
there is some, but no room for it."""


class Bringer:
    """Brings the sealed text of the problems that are drafted for to an arena."""

    def __init__(self, arena: Arena, words: torch.Tensor, beside: bool) -> None:
        """`words`: the arena's, int32. `beside`: a thread looks the text up, for which no step waits; else a step
        brings all that is missing."""
        self._arena, self._words, self._beside = arena, words, beside
        self._worker = ThreadPoolExecutor(1, "das-bring")  # begins its thread with the first work
        self._ordered: dict[int, Future[Text]] = {}
        """By problem, what is on its way."""

    def forget(self) -> None:
        """Forget all text of the arena but that of running requests, at a weight sync, and what is on its way."""
        self._arena.forget()
        self._ordered = {}

    def look_again(self) -> None:
        """Forget that nothing was found of some problems, or is on its way: there may be sealed text of them now."""
        self._arena.look_again()
        self._ordered = {}

    def step(self, index: SuffixIndex) -> None:
        """Order what is missing, and copy what is ready."""
        copied = 0
        while copied < A_STEP or not self._beside:
            self._order(index)
            problem = next(iter(self._ordered), None)
            if problem is None or (self._beside and not self._ordered[problem].done()):
                return
            copied += self._copy(problem, *self._ordered.pop(problem).result())

    def _order(self, index: SuffixIndex) -> None:
        arena = self._arena
        if arena.unsealed:
            missing = [problem for problem in arena.missing() if problem not in self._ordered]
            arena.unsealed = bool(missing or self._ordered)
            for problem in missing[: (AHEAD if self._beside else 1) - len(self._ordered)]:
                looks = self._worker.submit(looked_up, index, problem, arena.room, self._words.is_cuda)
                self._ordered[problem] = looks

    def _copy(self, problem: int, text: torch.Tensor, tokens: int, short: bool) -> int:
        """Copy a text; return its words. What finds no room is told to the arena."""
        arena = self._arena
        if len(text) > arena.room:  # texts of requests that ended have taken it
            text, tokens, short = text[:0], 0, True
        arena.short += short
        at = arena.take(len(text))
        self._words[at : at + len(text)].copy_(text, non_blocking=True)
        arena.show(problem, at, tokens, len(text) - tokens)
        return len(text)


def looked_up(index: SuffixIndex, problem: int, room: int, pinned: bool) -> Text:
    """Return a problem's sealed text, in at most `room` words. Holds no lock of Python while it copies."""
    tokens, places = index.flat(problem, room)
    short = not len(tokens) and len(index.flat(problem, _WHOLE)[0]) > 0
    both = torch.empty(len(tokens) + len(places), dtype=torch.int32, pin_memory=pinned)
    for part, array in ((both[: len(tokens)], tokens), (both[len(tokens) :], places.view(np.int32))):
        part.copy_(torch.from_numpy(array))
    return both, len(tokens), short
