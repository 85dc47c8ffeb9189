"""The device's arena: sealed text of the problems that are drafted for and of all
problems, and the texts of requests that have ended, until the weight sync. Sealed text
is brought to it beside the steps: no step waits until it is looked up, and each copies
a little.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from das_adapter.core.index import OTHERS, SuffixIndex
from das_adapter.core.steps import Ints

MAX_COPIED_WORDS = 2**18
"""Words of 32 bits after which a step copies no further text: 1 MiB, 0.05 ms of PCIe 4.
Only starting a copy takes the host's time.
"""
MAX_ORDERED = 4
"""Problems whose text is made ready, or waits in pinned memory."""
_OTHERS_SHARE = 8
"""Part of the arena that texts of all problems may take: one of so many."""
_WHOLE = 2**40
"""Words in which every history fits."""


class SealedText(NamedTuple):
    """A problem's sealed text on the host."""

    words: torch.Tensor
    """Its tokens and then their places, int32 [n]."""
    num_tokens: int
    """How many of these are tokens."""
    lacks_room: bool
    """Whether there is some, but no room for it: then it has no words."""


class Tables:
    """What the kernels read of the arena, as parts of one int64 array, which is copied
    to the device when it has changed.
    """

    begin: Ints
    """Tokens before the response, by slot."""
    text_at: Ints
    """Offset of each text in the arena."""
    sealed_texts: Ints
    """Offset of the sealed tokens of the request's problem, by slot."""
    sealed_places: Ints
    """Offset of the places of these tokens, by slot."""
    sealed_count: Ints
    """Number of these places, by slot."""
    others: Ints
    """Of the sealed texts that all problems share: offset of the tokens, offset of
    their places, number of these.
    """
    member_count: Ints
    """Number of the texts of the request's problem, by slot."""
    members: Ints
    """Numbers of these texts, `width` entries for each slot."""

    def __init__(self, slots: int, texts: int, width: int) -> None:
        """`slots`: of requests; `texts`: in all; `width`: texts that a request searches
        at most.
        """
        self.width = width
        self._sizes = {
            "begin": slots,
            "text_at": texts,
            "sealed_texts": slots,
            "sealed_places": slots,
            "sealed_count": slots,
            "others": 4,  # an even number: what follows stays aligned
            "member_count": slots,
            "members": slots * width,
        }
        size = sum(self._sizes.values())
        self.all: Ints = np.zeros(size, dtype=np.int64)
        parts = self.parts(self.all)
        self.begin = parts["begin"]
        self.text_at = parts["text_at"]
        self.sealed_texts = parts["sealed_texts"]
        self.sealed_places = parts["sealed_places"]
        self.sealed_count = parts["sealed_count"]
        self.others = parts["others"]
        self.member_count = parts["member_count"]
        self.members = parts["members"]

    def parts(self, array: Any) -> dict[str, Any]:
        """Return the parts by name of an array, or a tensor, that is laid out as `all`
        is.
        """
        parts = {}
        begin = 0
        for name, size in self._sizes.items():
            end = begin + size
            parts[name] = array[begin:end]
            begin = end
        return parts


@dataclass
class Problem:
    """A problem with texts in this engine."""

    open: list[int] = field(default_factory=list)
    """Slots of its requests, in the order in which they began."""
    closed: list[int] = field(default_factory=list)
    """Texts of those that ended, oldest first."""
    sealed: SealedPart | None = None
    """Where its sealed text lies; None: nobody has looked for it."""


class SealedPart(NamedTuple):
    """The part of the arena in which a problem's sealed text lies."""

    at: int
    """Offset of its tokens, behind which their places stand."""
    num_tokens: int
    """Its tokens; 0: none was found."""
    num_places: int


@dataclass
class Kept:
    """Where the text of a request that ended goes."""

    text: int
    """Number of the text."""
    at: int
    """Offset in the arena."""
    room: int
    """Tokens that it has at most."""


class Arena:
    """The arena of an engine. A text is numbered by its request's slot, and from
    `slots` on once that has ended.
    """

    def __init__(
        self,
        words: torch.Tensor,
        slots: int,
        closed: int,
        members: int,
        beside: bool,
    ) -> None:
        """Allocate `words`, int32, for the requests in so many slots, and so many texts
        of ended requests. A request searches its own text and the newest ones of its
        problem, `members` in all. `beside`: a thread looks sealed text up, for which no
        step waits; else a step brings all that is missing.
        """
        self.tables = Tables(
            slots=slots,
            texts=slots + closed,
            width=members,
        )
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
        self._others: SealedPart | None = None
        """Where texts of all problems lie; None: nobody has looked for them."""
        self._problems: dict[int, Problem] = {}
        self._of_slot: dict[int, int] = {}
        # begins its thread with the first work
        self._worker = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="das-bring",
        )
        self._ordered: dict[int, Future[SealedText]] = {}
        """Sealed text on its way, by problem."""

    @property
    def room(self) -> int:
        """Words that are free."""
        size = len(self.words)
        return size - self.used

    @property
    def lacks(self) -> bool:
        """Whether sealed text is missing or on its way, so that there is something to
        do for `copy_sealed`.
        """
        is_ordered = len(self._ordered) > 0
        return self.unsealed or is_ordered

    def open(self, slot: int, problem: int, at: int, begin: int) -> None:
        """Take a request that begins in one of vLLM's slots, with its key in the
        history, the offset of its response and the tokens before that.
        """
        self.close(slot)
        new = Problem()
        known = self._problems.setdefault(problem, new)
        known.open.append(slot)
        if known.sealed is None:
            self.unsealed = True
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
        problem = self._of_slot.pop(slot)
        known = self._problems[problem]
        known.open.remove(slot)
        kept = None
        if room > 0:
            kept = self._keep(known, room)
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
        in_order = self._of_slot.values()
        missing = []
        for problem in dict.fromkeys(in_order):
            known = self._problems[problem]
            if known.sealed is None:
                missing.append(problem)
        return missing

    def forget_missing(self) -> None:
        """Forget that nothing was found of some problems, or is on its way: there may
        be sealed text of them now.
        """
        for known in self._problems.values():
            sealed = known.sealed
            if sealed is not None and sealed.num_tokens == 0:
                known.sealed = None
        self.unsealed = True
        self._ordered = {}

    def forget(self) -> None:
        """Forget all sealed text, what is on its way, and the text of requests that
        ended, at a weight sync.
        """
        self.used = 0
        self.short = 0
        self._others = None
        self.tables.others.fill(0)
        self.changed = True
        self._texts = self._slots
        self.unsealed = True
        self._ordered = {}
        every_problem = list(self._problems)
        for problem in every_problem:
            known = self._problems[problem]
            if not known.open:
                del self._problems[problem]
                continue
            known.closed = []
            known.sealed = None
            self._describe(known)

    def copy_sealed(self, index: SuffixIndex) -> None:
        """Order the sealed text that is missing, and copy what is ready."""
        num_copied = 0
        while num_copied < MAX_COPIED_WORDS or not self._beside:
            self._order(index)
            if not self._ordered:
                return
            problem = next(iter(self._ordered))
            ordered = self._ordered[problem]
            if self._beside and not ordered.done():
                return
            del self._ordered[problem]
            text = ordered.result()
            num_copied += self.put(
                problem,
                words=text.words,
                num_tokens=text.num_tokens,
                lacks_room=text.lacks_room,
            )

    def put(
        self,
        problem: int,
        words: torch.Tensor,
        num_tokens: int,
        lacks_room: bool = False,
    ) -> int:
        """Copy a problem's sealed text, see `SealedText`, and have it searched; return
        the number of its words.
        """
        if len(words) > self.room:  # texts of requests that ended have taken it
            words = words[:0]
            num_tokens = 0
            lacks_room = True
        self.short += lacks_room
        size = len(words)
        at = self._allocate(size)
        part = self.words[at : self.used]
        part.copy_(words, non_blocking=True)
        sealed = SealedPart(
            at=at,
            num_tokens=num_tokens,
            num_places=size - num_tokens,
        )
        if problem == OTHERS:
            self._others = sealed
            self.tables.others[:3] = (at, at + num_tokens, sealed.num_places)
            self.changed = True
            return size
        known = self._problems.get(problem)
        if known is not None:
            known.sealed = sealed
            self._describe(known)
        return size

    def _order(self, index: SuffixIndex) -> None:
        """Have sealed text that is missing looked up, of a few problems at a time."""
        if not self.unsealed:
            return
        wanted = self.missing()
        if self._others is None and index.has_others:
            wanted.insert(0, OTHERS)
        missing = []
        for problem in wanted:
            if problem not in self._ordered:
                missing.append(problem)
        num_ordered = len(self._ordered)
        self.unsealed = bool(missing) or num_ordered > 0
        max_ordered = 1
        if self._beside:
            max_ordered = MAX_ORDERED
        num_free = max_ordered - num_ordered
        for problem in missing[:num_free]:
            self._ordered[problem] = self._worker.submit(
                look_up_sealed,
                index=index,
                problem=problem,
                room=self.room,
                pinned=self.words.is_cuda,
            )

    def _allocate(self, size: int) -> int:
        """Return the offset of a new part of the arena."""
        at = self.used
        self.used += size
        return at

    def _keep(self, known: Problem, room: int) -> Kept | None:
        """Allocate a text of a request that ended; None: there is no room for it."""
        max_texts = len(self.tables.text_at)
        if self._texts == max_texts:
            return None
        if room > self.room:
            self.short += 1
            return None
        text = self._texts
        self._texts += 1
        at = self._allocate(room)
        self.tables.text_at[text] = at
        known.closed.append(text)
        return Kept(text=text, at=at, room=room)

    def _describe(self, known: Problem) -> None:
        """Write down in the tables what the requests of a problem search."""
        self.changed = True
        tables = self.tables
        width = tables.width
        oldest_first = known.closed + known.open
        newest_first = oldest_first[::-1]
        texts = newest_first[:width]
        num_texts = len(texts)
        slots = np.array(known.open, dtype=np.int64)
        members = tables.members.reshape(-1, width)
        members[slots, :num_texts] = texts
        tables.member_count[slots] = num_texts
        # each request drafts from its own text, also where that is not among the newest
        older = slots[:-width]
        members[older, -1] = older
        sealed = known.sealed
        if sealed is None:
            sealed = SealedPart(at=0, num_tokens=0, num_places=0)
        tables.sealed_texts[slots] = sealed.at
        tables.sealed_places[slots] = sealed.at + sealed.num_tokens
        tables.sealed_count[slots] = sealed.num_places


def look_up_sealed(
    index: SuffixIndex,
    problem: int,
    room: int,
    pinned: bool,
) -> SealedText:
    """Return a problem's sealed text, in at most `room` words, or that of all problems.
    Holds no lock of Python while it copies.
    """
    most = room
    if problem == OTHERS:
        most = room // _OTHERS_SHARE
    tokens, places = index.flat(problem, most)
    num_tokens = len(tokens)
    num_places = len(places)
    lacks_room = False
    if num_tokens == 0 and problem != OTHERS:
        every_token, _ = index.flat(problem, _WHOLE)
        num_wanted = len(every_token)
        lacks_room = num_wanted > 0
    words = torch.empty(
        num_tokens + num_places,
        dtype=torch.int32,
        pin_memory=pinned,
    )
    token_words = words[:num_tokens]
    flat_tokens = torch.from_numpy(tokens)
    token_words.copy_(flat_tokens)
    place_words = words[num_tokens:]
    flat_places = torch.from_numpy(places.view(np.int32))
    place_words.copy_(flat_places)
    return SealedText(
        words=words,
        num_tokens=num_tokens,
        lacks_room=lacks_room,
    )
