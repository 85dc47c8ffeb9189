"""The device's arena: sealed text of the problems that are drafted for, and the texts
of requests that have ended, until the weight sync. Sealed text is brought to it beside
the steps: no step waits until it is looked up, and each copies a little.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from das_adapter.core.index import SuffixIndex
from das_adapter.core.steps import Ints

A_STEP = 2**18
"""Words of 32 bits after which a step copies no further text: 1 MiB, 0.05 ms of PCIe 4.
Only starting a copy takes the host's time.
"""
AHEAD = 4
"""Problems whose text is made ready, or waits in pinned memory."""
_WHOLE = 2**40
"""Words in which every history fits."""

Text = tuple[torch.Tensor, int, bool]
"""A problem's sealed text, tokens and then places, int32 [n] on the host; how many of
these are tokens; and whether there is some, but no room for it.
"""


class Tables:
    """What the kernels read of it, as parts of one int64 array, which is copied to the
    device when it has changed.
    """

    begin: Ints
    """By slot, tokens before the response."""
    text_at: Ints
    """By text, its offset in the arena."""
    sealed_texts: Ints
    """By slot, the offset of its problem's sealed tokens."""
    sealed_places: Ints
    """By slot, the offset of their places."""
    sealed_count: Ints
    """By slot, the number of places."""
    member_count: Ints
    """By slot, the number of its problem's texts."""
    members: Ints
    """By slot, `width` entries each, the texts."""

    def __init__(self, slots: int, texts: int, width: int) -> None:
        self.width = width
        self._sizes = dict.fromkeys(Tables.__annotations__, slots) | {
            "text_at": texts,
            "members": slots * width,
        }
        self.all: Ints = np.zeros(sum(self._sizes.values()), dtype=np.int64)
        vars(self).update(self.parts(self.all))

    def parts(self, array: Any) -> dict[str, Any]:
        """Return the parts by name of an array, or a tensor, that is laid out as `all`
        is.
        """
        ends = np.cumsum([0, *self._sizes.values()]).tolist()
        return {
            name: array[a:b]
            for name, a, b in zip(self._sizes, ends[:-1], ends[1:], strict=True)
        }


@dataclass
class Problem:
    """A problem with texts in this engine."""

    open: list[int] = field(default_factory=list)
    """Slots of its requests, in the order in which they began."""
    closed: list[int] = field(default_factory=list)
    """Texts of those that ended, oldest first."""
    sealed: tuple[int, int, int] | None = None
    """Offset, tokens and places of its sealed text; None: nobody has looked for it."""


@dataclass
class Kept:
    """Where the text of a request that ended goes: its number, its offset in the arena,
    and its most tokens.
    """

    text: int
    at: int
    room: int


class Arena:
    """The arena of an engine. A text is numbered by its request's slot, and from
    `slots` on once that has ended.
    """

    def __init__(
        self, words: torch.Tensor, slots: int, closed: int, members: int, beside: bool
    ) -> None:
        """Allocate `words`, int32, for the requests in so many slots, and so many texts
        of ended requests. A request searches its own text and the newest ones of its
        problem, `members` in all. `beside`: a thread looks sealed text up, for which no
        step waits; else a step brings all that is missing.
        """
        self.tables = Tables(slots, slots + closed, members)
        self.changed = True
        """Whether the tables must be copied to the device."""
        self.short = 0
        """Texts of ended requests and problems' sealed texts for which there was no
        room since the weight sync.
        """
        self.unsealed = False
        """Whether there may be problems that are `missing`."""
        self.words = words
        self.used = 0
        self._beside = beside
        self._slots = slots
        self._texts = slots
        self._problems: dict[int, Problem] = {}
        self._of_slot: dict[int, int] = {}
        # begins its thread with the first work
        self._worker = ThreadPoolExecutor(1, "das-bring")
        self._ordered: dict[int, Future[Text]] = {}
        """By problem, sealed text on its way."""

    @property
    def room(self) -> int:
        """Words that are free."""
        return len(self.words) - self.used

    @property
    def lacks(self) -> bool:
        """Whether sealed text is missing or on its way, so that there is something to
        `bring`.
        """
        return self.unsealed or bool(self._ordered)

    def open(self, slot: int, problem: int, at: int, begin: int) -> None:
        """Take a request that begins in one of vLLM's slots, with its key in the
        history, the offset of its response and the tokens before that.
        """
        self.close(slot)
        known = self._problems.setdefault(problem, Problem())
        known.open.append(slot)
        self.unsealed = self.unsealed or known.sealed is None
        self._of_slot[slot] = problem
        self.tables.begin[slot] = begin
        self.tables.text_at[slot] = at
        self._describe(known)

    def close(self, slot: int, room: int = 0) -> Kept | None:
        """Take a request that ended, or was preempted; return where its text, of at
        most `room` tokens, is to be copied. None: it is not kept.
        """
        if slot not in self._of_slot:
            return None
        known = self._problems[self._of_slot.pop(slot)]
        known.open.remove(slot)
        kept = self._keep(known, room) if room > 0 else None
        self._describe(known)
        return kept

    def add(self, problem: int, tokens: int) -> Kept | None:
        """Take a text of so many tokens that was written ahead for a request of a
        problem, one that has begun; return where it goes, as a text of a request that
        ended. None: it is not kept.
        """
        known = self._problems[problem]
        kept = self._keep(known, tokens)
        self._describe(known)
        return kept

    def missing(self) -> list[int]:
        """Return the problems that are drafted for and whose sealed text nobody has
        looked for, in order.
        """
        drafted = dict.fromkeys(self._of_slot.values())
        return [
            problem for problem in drafted if self._problems[problem].sealed is None
        ]

    def look_again(self) -> None:
        """Forget that nothing was found of some problems, or is on its way: there may
        be sealed text of them now.
        """
        for known in self._problems.values():
            if known.sealed and not known.sealed[1]:
                known.sealed = None
        self.unsealed = True
        self._ordered = {}

    def forget(self) -> None:
        """Forget all sealed text, what is on its way, and the text of requests that
        ended, at a weight sync.
        """
        self.used, self.short, self._texts = 0, 0, self._slots
        self.unsealed = True
        self._ordered = {}
        self._problems = {
            problem: known for problem, known in self._problems.items() if known.open
        }
        for known in self._problems.values():
            known.closed = []
            known.sealed = None
            self._describe(known)

    def bring(self, index: SuffixIndex) -> None:
        """Order what is missing, and copy what is ready."""
        copied = 0
        while copied < A_STEP or not self._beside:
            self._order(index)
            problem = next(iter(self._ordered), None)
            if problem is None or (self._beside and not self._ordered[problem].done()):
                return
            copied += self.put(problem, *self._ordered.pop(problem).result())

    def put(
        self, problem: int, text: torch.Tensor, tokens: int, short: bool = False
    ) -> int:
        """Copy a problem's sealed text, a `Text`, and have it searched; return its
        words.
        """
        if len(text) > self.room:  # texts of requests that ended have taken it
            text = text[:0]
            tokens = 0
            short = True
        self.short += short
        at = self._take(len(text))
        self.words[at : at + len(text)].copy_(text, non_blocking=True)
        if known := self._problems.get(problem):
            known.sealed = at, tokens, len(text) - tokens
            self._describe(known)
        return len(text)

    def _order(self, index: SuffixIndex) -> None:
        if self.unsealed:
            missing = [
                problem for problem in self.missing() if problem not in self._ordered
            ]
            self.unsealed = bool(missing or self._ordered)
            for problem in missing[
                : (AHEAD if self._beside else 1) - len(self._ordered)
            ]:
                looks = self._worker.submit(
                    looked_up, index, problem, self.room, self.words.is_cuda
                )
                self._ordered[problem] = looks

    def _take(self, size: int) -> int:
        at = self.used
        self.used = self.used + size
        return at

    def _keep(self, known: Problem, room: int) -> Kept | None:
        if self._texts == len(self.tables.text_at):
            return None
        if room > self.room:
            self.short += 1
            return None
        kept = Kept(self._texts, self._take(room), room)
        self._texts += 1
        self.tables.text_at[kept.text] = kept.at
        known.closed.append(kept.text)
        return kept

    def _describe(self, known: Problem) -> None:
        self.changed = True
        tables = self.tables
        slots = np.array(known.open, dtype=np.int64)
        texts = [*known.open[::-1], *known.closed[::-1]][: tables.width]
        tables.member_count[slots] = len(texts)
        rows = tables.members.reshape(-1, tables.width)
        older = slots[: -tables.width]
        rows[slots, : len(texts)] = texts
        rows[older, -1] = (
            older  # not among the newest, but each request drafts from its own text
        )
        at, tokens, places = known.sealed or (0, 0, 0)
        tables.sealed_texts[slots] = at
        tables.sealed_places[slots] = at + tokens
        tables.sealed_count[slots] = places


def looked_up(index: SuffixIndex, problem: int, room: int, pinned: bool) -> Text:
    """Return a problem's sealed text, in at most `room` words. Holds no lock of Python
    while it copies.
    """
    tokens, places = index.flat(problem, room)
    short = not len(tokens) and len(index.flat(problem, _WHOLE)[0]) > 0
    both = torch.empty(len(tokens) + len(places), dtype=torch.int32, pin_memory=pinned)
    for part, array in (
        (both[: len(tokens)], tokens),
        (both[len(tokens) :], places.view(np.int32)),
    ):
        part.copy_(torch.from_numpy(array))
    return both, len(tokens), short
