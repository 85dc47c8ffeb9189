"""Allocate the device's arena: sealed text of the problems that are drafted for, and the texts of requests that have
ended since the weight sync. Pure host bookkeeping."""

from __future__ import annotations

import bisect
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class Words:
    """The free stretches of an array."""

    def __init__(self, size: int) -> None:
        self._free = [(0, size)] if size else []
        """Where free stretches begin and how long they are, in order."""

    @property
    def largest(self) -> int:
        """Length of the largest free stretch."""
        return max((size for _, size in self._free), default=0)

    @property
    def free(self) -> int:
        """Length of all free stretches."""
        return sum(size for _, size in self._free)

    def take(self, size: int) -> int | None:
        """Return where a stretch begins that is the caller's from now on; None: no free stretch is long enough."""
        for i, (at, room) in enumerate(self._free):
            if room >= size:
                self._free[i : i + 1] = [(at + size, room - size)] if room > size else []
                return at
        return None

    def give(self, at: int, size: int) -> None:
        """Take a stretch back."""
        i = bisect.bisect(self._free, (at, 0))
        if i < len(self._free) and self._free[i][0] == at + size:
            size += self._free.pop(i)[1]
        if i and sum(self._free[i - 1]) == at:
            i -= 1
            at, before = self._free.pop(i)
            size += before
        self._free.insert(i, (at, size))


class Tables:
    """What the kernels read of it, as parts of one int64 array, which is copied to the device when it has changed."""

    row_of_slot: Ints
    """By slot, the row of its problem."""
    begin: Ints
    """By slot, tokens before the response."""
    text_at: Ints
    """By text, its offset in the arena."""
    sealed_texts: Ints
    """By row, the offset of its problem's sealed tokens."""
    sealed_places: Ints
    """By row, the offset of their places."""
    sealed_count: Ints
    """By row, the number of places."""
    member_count: Ints
    """By row, the number of its problem's texts."""
    members: Ints
    """By row, `width` entries each, the texts."""

    def __init__(self, slots: int, texts: int, width: int) -> None:
        self.width = width
        self._sizes = {
            "row_of_slot": slots,
            "begin": slots,
            "text_at": texts,
            "sealed_texts": slots,
            "sealed_places": slots,
            "sealed_count": slots,
            "member_count": slots,
            "members": slots * width,
        }
        self.all: Ints = np.zeros(sum(self._sizes.values()), dtype=np.int64)
        vars(self).update(self.parts(self.all))

    def parts(self, array: Any) -> dict[str, Any]:
        """Return the parts by name of an array, or a tensor, that is laid out as `all` is."""
        ends = np.cumsum([0, *self._sizes.values()]).tolist()
        return {name: array[a:b] for name, a, b in zip(self._sizes, ends[:-1], ends[1:], strict=True)}


@dataclass
class Sealed:
    """A problem's sealed text in the arena."""

    at: int
    tokens: int
    places: int

    @property
    def size(self) -> int:
        """Words of it."""
        return self.tokens + self.places


@dataclass
class Problem:
    """A problem with texts in this engine."""

    row: int = -1
    """In the tables; -1: nobody drafts for it."""
    open: list[int] = field(default_factory=list)
    """Slots of its requests, in the order in which they began."""
    closed: list[int] = field(default_factory=list)
    """Texts of those that ended, oldest first."""


@dataclass
class Kept:
    """Where the text of a request that ended goes."""

    slot: int
    text: int
    at: int
    room: int


class Arena:
    """The arena of an engine. A text is numbered by its request's slot, and from `slots` on once that has ended."""

    def __init__(self, words: int, slots: int, closed: int, members: int) -> None:
        """Take so many words of 32 bits for the requests in so many slots, so many texts of ended requests, and the
        newest `members` texts of a problem, which are searched."""
        self.words = Words(words)
        self.tables = Tables(slots, slots + closed, members)
        self.changed = True
        """Whether the tables must be copied to the device."""
        self.short = 0
        """Texts of ended requests and problems' sealed texts for which there was no room."""
        self._size = words
        self._slots, self._members = slots, members
        self._rows = list(range(slots - 1, -1, -1))
        self._numbers = list(range(slots + closed - 1, slots - 1, -1))
        self._problems: dict[int, Problem] = {}
        self._of_slot: dict[int, int] = {}
        self._sealed: OrderedDict[int, Sealed | None] = OrderedDict()
        """By problem, least recently used first; None: there is none, or no room."""
        self._closed: dict[int, tuple[int, int, int]] = {}
        """By number: problem, offset and room."""

    @property
    def used(self) -> int:
        """Words that are taken."""
        return self._size - self.words.free

    @property
    def sealed_tokens(self) -> int:
        """Tokens of sealed text, separators included."""
        return sum(s.tokens for s in self._sealed.values() if s)

    def open(self, slot: int, problem: int, at: int, begin: int) -> None:
        """Take a request that begins in one of vLLM's slots, with its key in the history, the offset of its response
        and the tokens before that."""
        self.close(slot)
        known = self._problems.setdefault(problem, Problem())
        if known.row < 0:
            known.row = self._rows.pop()
        known.open.append(slot)
        self._of_slot[slot] = problem
        tables = self.tables
        tables.row_of_slot[slot], tables.begin[slot], tables.text_at[slot] = known.row, begin, at
        if problem in self._sealed:
            self._sealed.move_to_end(problem)
        self._describe(problem)

    def close(self, slot: int, room: int = 0) -> Kept | None:
        """Take a request that ended, or was preempted; return where its text, of at most `room` tokens, is to be
        copied. None: it is not kept."""
        problem = self._of_slot.pop(slot, None)
        if problem is None:
            return None
        known = self._problems[problem]
        known.open.remove(slot)
        kept = self._keep(slot, problem, known, room) if room > 0 else None
        if not known.open:
            self._rows.append(known.row)
            known.row = -1
            if not known.closed:
                del self._problems[problem]
        self._describe(problem)
        return kept

    def missing(self) -> list[int]:
        """Return the problems that are drafted for and whose sealed text nobody has looked for, in order."""
        return [p for p, known in self._problems.items() if known.open and p not in self._sealed]

    def room(self) -> int:
        """Return the words that a problem's sealed text may take: what the problems that nobody drafts for take is
        free."""
        while self.words.largest < self._size // 4 and self._evict():
            pass
        return self.words.largest

    def seal(self, problem: int, tokens: int, places: int) -> int | None:
        """Take a problem's sealed text, tokens and then places, so many; return its offset. None: it has none, or there
        is no room."""
        at = None
        if tokens:
            while (at := self.words.take(tokens + places)) is None and self._evict():
                pass
            self.short += at is None
        self._sealed[problem] = None if at is None else Sealed(at, tokens, places)
        self._describe(problem)
        return at

    def look_again(self) -> None:
        """Forget that nothing was found of some problems: there may be sealed text of them now."""
        for problem in [problem for problem, sealed in self._sealed.items() if sealed is None]:
            del self._sealed[problem]

    def forget_sealed(self) -> None:
        """Forget all sealed text, at a weight sync; what is drafted for is missing from then on."""
        for sealed in self._sealed.values():
            if sealed:
                self.words.give(sealed.at, sealed.size)
        self._sealed.clear()
        for problem in self._problems:
            self._describe(problem)

    def forget_closed(self) -> None:
        """Forget the texts of requests that ended, at a weight sync."""
        for number, (_, at, room) in self._closed.items():
            self.words.give(at, room)
            self._numbers.append(number)
        self._closed.clear()
        for problem, known in list(self._problems.items()):
            known.closed.clear()
            if known.open:
                self._describe(problem)
            else:
                del self._problems[problem]

    def _keep(self, slot: int, problem: int, known: Problem, room: int) -> Kept | None:
        at = self.words.take(room) if self._numbers else None
        while at is None and self._numbers and self._evict():
            at = self.words.take(room)
        if at is None:
            self.short += bool(self._numbers)
            return None
        number = self._numbers.pop()
        self._closed[number] = problem, at, room
        self.tables.text_at[number] = at
        known.closed.append(number)
        return Kept(slot, number, at, room)

    def _evict(self) -> bool:
        """Give up the sealed text of the problem that was left alone for longest."""
        for problem, sealed in self._sealed.items():
            if not self._problems.get(problem, Problem()).open:
                if sealed:
                    self.words.give(sealed.at, sealed.size)
                del self._sealed[problem]
                return True
        return False

    def _describe(self, problem: int) -> None:
        """Write a problem's row of the tables."""
        self.changed = True
        known = self._problems.get(problem)
        if known is None or known.row < 0:
            return
        tables, row = self.tables, known.row
        texts = [*known.open[::-1], *known.closed[::-1]][: self._members]
        tables.member_count[row] = len(texts)
        tables.members[row * self._members : row * self._members + len(texts)] = texts
        sealed = self._sealed.get(problem)
        tables.sealed_count[row] = sealed.places if sealed else 0
        if sealed:
            tables.sealed_texts[row], tables.sealed_places[row] = sealed.at, sealed.at + sealed.tokens
