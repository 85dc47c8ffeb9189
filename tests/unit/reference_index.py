"""The suffix index in plain Python: the tests compare `SuffixIndex` with it. It is quadratic and has no files."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from das_adapter.core.index.errors import UnknownHandle
from das_adapter.core.index.values import (
    Float32,
    Int32,
    Int64,
    Shrunk,
    Tokens,
    check_knobs,
    integers,
    problem_id,
    token_ids,
    visits,
)

START = -1  # stands before the first token of every response
GAP = -2  # stands before a stretch of a response of which what came before is not there
LEAST = 256  # bytes that a problem keeps before whole problems are dropped
SIZES, CONTEXT, COUNTED, WORTH = (2, 4, 8), 8, 128, 64  # see csrc/suffix_thin.hpp
MAX_TOKEN = 2**23 - 1
MOST = 16  # places that one search of a text visits (live text: per gram size)
SURE = 8  # places that differ in the last token are searched only below this strength of a match
BEYOND = 3  # at most so many tokens beyond a differing one count
GRAMS = (4, 2, 1)  # live text is searched for this many equal last tokens
OWN, SIBLING, PROMPT = 512, 256, 64  # weights of the sources; the newest history has a sibling's
VOTES = [(i + 1) ** 6 for i in range(200)]
PRIOR, DOUBT, MEMORY = 40.0, 8.0, 2**13  # weights of a kind's prior, of a source's, and of the past at most, tokens


Kind = tuple[bool, int, int, int]  # whether only its own text, share of the votes, strength, number of places


@dataclass
class Trajectory:
    text: list[int]  # START or GAP, then the response or a stretch of it
    version: int
    count: int = 1  # rollouts that it stands for
    known: int = 0  # tokens at its beginning that are only context

    @property
    def places(self) -> range:
        """Positions whose next token is a continuation."""
        return range(self.known, len(self.text) - 1)


@dataclass(eq=False)
class Request:
    problem: int
    prompt: list[int]
    text: list[int] = field(default_factory=lambda: [START])
    drafted: list[tuple[int, Kind]] = field(default_factory=list)
    is_open: bool = True


@dataclass
class Candidate:
    following: list[int]
    strength: int
    weight: int
    own: bool


Found = tuple[list[int], list[int], int, int, int, bool]
"""Context, text, position of its last token there, match, weight, whether it is the request's own."""


class ReferenceIndex:
    """See `SuffixIndex`: the same calls give the same drafts and chances."""

    def __init__(self, max_depth: int = 64, half_life: float = 8.0) -> None:
        check_knobs(max_depth, half_life)
        self.max_depth = max_depth
        self._fading = [max(1, int(SIBLING * 2.0 ** (-age / half_life) + 0.5)) for age in range(256)]
        self._staged: dict[int, list[Trajectory]] = {}
        self._history: dict[int, list[Trajectory]] = {}
        self._newest: int | None = None
        self._live: dict[int, list[tuple[Request, int]]] = {}  # places in the order of their arrival
        self._requests: dict[int, Request] = {}
        self._next_handle = 1
        self._kinds: dict[Kind, list[int]] = {}  # [accepted, tried]
        self._sources = {own: [0.0, 0.0, 0.0] for own in (True, False)}  # accepted, tried, and expected of the kinds

    # History

    def add(self, problem: int, tokens: Tokens, version: int) -> None:
        ids = _checked(tokens)
        if ids:
            self._staged.setdefault(problem_id(problem), []).append(Trajectory([START, *ids], version))

    def seal(self, window: int | None = None) -> None:
        most = visits(window)
        for problem, added in self._staged.items():
            trajectories = self._history.setdefault(problem, [])
            trajectories.extend(added)
            kept = sorted({t.version for t in trajectories})[-most:]
            self._newest = max([t.version for t in added] + ([] if self._newest is None else [self._newest]))
            self._history[problem] = [t for t in trajectories if t.version in kept]
        self._staged = {}

    def shrink(self, max_bytes: int) -> Shrunk:
        sizes = {problem: _nbytes(trajectories) for problem, trajectories in self._history.items()}
        before, dropped, thinned = self.tokens, 0, 0
        if sum(sizes.values()) <= max_bytes:
            return Shrunk(0, 0, 0)
        last = {problem: (max(t.version for t in ts), problem) for problem, ts in self._history.items()}
        order = sorted(last, key=lambda p: last[p])
        while sum(min(sizes[p], LEAST) for p in order) > max_bytes:
            del self._history[order.pop(0)]
            dropped += 1
        order.sort(key=lambda p: (sizes[p], last[p]))
        level = below = 0
        for i, problem in enumerate(order):
            level = (max_bytes - below) // (len(order) - i)
            if level <= sizes[problem]:
                break
            below += sizes[problem]
        total, to = sum(sizes[p] for p in order), level // 4 * 3
        while total > max_bytes:
            problem = order.pop()
            total -= sizes[problem] - to
            self._history[problem] = _Thinning(self._history[problem]).to(to)
            thinned += 1
            if not self._history[problem]:
                del self._history[problem]
        return Shrunk(before - self.tokens, thinned, dropped)

    def refresh(self, store: ReferenceIndex) -> None:
        """As an attached `SuffixIndex`: take over what a store has sealed."""
        self._history = {problem: list(trajectories) for problem, trajectories in store._history.items()}
        self._newest = store._newest

    @property
    def nbytes(self) -> int:
        """Per problem 7.25 bytes per token, in whole samples of 32 places and words of 8, and what `_nbytes` adds."""
        return sum(map(_nbytes, self._history.values()))

    @property
    def tokens(self) -> int:
        return sum(len(t.places) for ts in self._history.values() for t in ts)

    @property
    def problems(self) -> int:
        return len(self._history)

    # Live requests

    def open(self, problem: int, prompt_ids: Tokens, prefix: Tokens = ()) -> int:
        request = Request(problem_id(problem), _checked(prompt_ids))
        ids = _checked(prefix)
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        self._requests[handle] = request
        self.extend(handle, ids)
        return handle

    def extend(self, handle: int, ids: Tokens) -> None:
        request, tokens = self._request(handle), _checked(ids)
        for token, (drafted, kind) in zip(tokens, request.drafted, strict=False):
            self._learn(kind, token == drafted)
            if token != drafted:
                break
        if tokens:
            request.drafted = []
        for token in tokens:
            self._live.setdefault(request.problem, []).append((request, len(request.text) - 1))
            request.text.append(token)

    def extend_many(self, handles: npt.ArrayLike, flat_tokens: Tokens, offsets: npt.ArrayLike) -> None:
        ends = integers(offsets, "offsets").tolist()
        for i, handle in enumerate(integers(handles, "handles").tolist()):
            self.extend(handle, flat_tokens[ends[i] : ends[i + 1]])

    def close(self, handle: int, keep: bool = True) -> None:
        request = self._request(handle)
        del self._requests[handle]
        request.is_open = False
        if not keep:
            self._forget(lambda r: r is not request)

    def clear_live(self) -> None:
        self._forget(lambda r: r.is_open)

    def age(self, handle: int) -> int | None:
        versions = [t.version for t in self._history.get(self._request(handle).problem, [])]
        return self._newest - max(versions) if versions and self._newest is not None else None

    # Drafting

    def draft(
        self, handles: npt.ArrayLike, budgets: npt.ArrayLike, min_chance: float = 0.15
    ) -> tuple[list[Int32], list[Float32]]:
        requests = [self._request(h) for h in integers(handles, "handles").tolist()]
        limits = integers(budgets, "budgets").tolist()
        drafts = [self._draft(r, limit, min_chance) for r, limit in zip(requests, limits, strict=True)]
        return [np.array(d[0], np.int32) for d in drafts], [np.array(d[1], np.float32) for d in drafts]

    def draft_flat(
        self, handles: npt.ArrayLike, budgets: npt.ArrayLike, min_chance: float = 0.15
    ) -> tuple[Int32, Float32, Int64]:
        drafts, chances = self.draft(handles, budgets, min_chance)
        offsets = np.cumsum([0] + [len(d) for d in drafts])
        return (
            np.concatenate([np.zeros(0, np.int32), *drafts]),
            np.concatenate([np.zeros(0, np.float32), *chances]),
            offsets.astype(np.int64),
        )

    def _draft(self, request: Request, budget: int, min_chance: float) -> tuple[list[int], list[float]]:
        request.drafted = []
        tokens: list[int] = []
        chances: list[float] = []
        if budget <= 0:
            return tokens, chances
        candidates, searched = self._gather(request), 0
        chance = 1.0
        for step in range(budget + 1):
            polls = _poll(candidates, step - searched)
            if not polls and step > searched:
                candidates, searched = self._gather(request), step
                polls = _poll(candidates, 0)
            if not polls:
                break
            votes = {token: sum(v for v, _, _ in poll) for token, poll in polls.items()}
            token = min(votes, key=lambda t: (-votes[t], t))
            share, strength = votes[token] / sum(votes.values()), max(s for _, s, _ in polls[token])
            kind = (all(own for _, _, own in polls[token]), *_kind(share, strength, len(polls[token])))
            request.drafted.append((token, kind))
            chance *= self._chance(kind)
            if step == budget or chance < min_chance:
                break
            tokens.append(token)
            chances.append(max(chance, float(np.finfo(np.float32).tiny)))
            candidates = [c for c in candidates if c.following[step - searched : step - searched + 1] == [token]]
        return tokens, chances

    def _gather(self, request: Request) -> list[Candidate]:
        draft = [token for token, _ in request.drafted]
        response, whole = request.text + draft, request.prompt + request.text[1:] + draft
        candidates = [
            Candidate(text[i + 1 :], self._strength(context, text[: i + 1], length), weight, own)
            for context, text, i, length, weight, own in self._search(request, response, whole)
        ]
        if len(response) >= 2 and all(c.strength < SURE for c in candidates):
            candidates += [
                Candidate(text[i + 2 :], min(length, BEYOND) - 1, weight, own)
                for _, text, i, length, weight, own in self._search(request, response[:-1], whole[:-1])
                if text[i + 1] != response[-1]
            ]
        return candidates

    def _search(self, request: Request, response: list[int], whole: list[int]) -> Iterator[Found]:
        trajectories = self._history.get(request.problem, [])
        versions = {t.version for t in trajectories}
        ages = {v: sum(newer > v for newer in versions) for v in versions}
        sealed = [(t.text, i, self._weight(ages[t.version])) for t in trajectories for i in t.places]
        yield from ((*found, False) for found in self._nearest(sealed, response))
        yield from self._latest(request, response)
        prompt = Trajectory([START, *request.prompt], 0)
        of_prompt = self._nearest([(prompt.text, i, PROMPT) for i in prompt.places], whole)
        yield from ((*found, True) for found in of_prompt)

    def _nearest(
        self, places: list[tuple[list[int], int, int]], context: list[int]
    ) -> Iterator[tuple[list[int], list[int], int, int, int]]:
        """The longest matches among places (text, position of the last context token, weight), oldest place first."""
        keys = [tuple(text[i::-1][: self.max_depth]) for text, i, _ in places]
        order = sorted(range(len(places)), key=lambda p: (keys[p], -p))
        here = bisect.bisect_left([keys[p] for p in order], tuple(context[::-1][: self.max_depth]))
        found = []
        for rank, p in enumerate(order):
            length = _agreement(context, places[p][0][: places[p][1] + 1], self.max_depth)
            distance = rank - here if rank >= here else here - 1 - rank
            found.append((-length, rank < here, distance, p))
        for minus, _, _, p in sorted(found)[:MOST]:
            if minus:
                text, i, weight = places[p]
                yield context, text, i, -minus, weight

    def _latest(self, request: Request, context: list[int]) -> Iterator[Found]:
        """The latest live places with equal last tokens, more of them first."""
        found, above = 0, None
        for size in GRAMS:
            if 2 * found >= MOST:
                break
            gram = _gram(context, size)
            alike = [
                p for p in reversed(self._live.get(request.problem, [])) if _gram(p[0].text[: p[1] + 1], size) == gram
            ]
            for r, i in alike[:MOST]:
                if above is None or _gram(r.text[: i + 1], above) != _gram(context, above):
                    found += 1
                    length = _agreement(context, r.text[: i + 1], self.max_depth)
                    yield context, r.text, i, length, OWN if r is request else SIBLING, r is request
            above = size

    def _weight(self, age: int) -> int:
        return self._fading[min(age, len(self._fading) - 1)]

    def _strength(self, context: list[int], place: list[int], length: int) -> int:
        beyond = 0
        if length < min(self.max_depth, len(context), len(place)):
            if place[-1 - length] >= 0:
                beyond = _agreement(context[: -1 - length], place[: -1 - length], BEYOND)
        return 2 * length + beyond

    # What happened to earlier drafts

    def _chance(self, kind: Kind) -> float:
        accepted, tried, expected = self._sources[kind[0]]
        better = (accepted + DOUBT) / (tried - accepted + DOUBT) * ((tried - expected + DOUBT) / (expected + DOUBT))
        odds = _start(kind) * better
        accepted, tried = self._kinds.get(kind, (0, 0))
        return (accepted + PRIOR * (odds / (1 - _start(kind) + odds))) / (tried + PRIOR)

    def _learn(self, kind: Kind, accepted: bool) -> None:
        cell, source = self._kinds.setdefault(kind, [0, 0]), self._sources[kind[0]]
        cell[:] = [cell[0] + accepted, cell[1] + 1]
        source[:] = [source[0] + accepted, source[1] + 1, source[2] + _start(kind)]
        if cell[1] >= MEMORY:
            cell[:] = [cell[0] // 2, cell[1] // 2]
        if source[1] >= MEMORY:
            source[:] = [x / 2 for x in source]

    # Housekeeping

    def _request(self, handle: int) -> Request:
        if handle not in self._requests:
            raise UnknownHandle(handle)
        return self._requests[handle]

    def _forget(self, kept: Callable[[Request], bool]) -> None:
        for problem, places in list(self._live.items()):
            self._live[problem] = [(r, i) for r, i in places if kept(r)]


def _checked(tokens: Tokens) -> list[int]:
    ids: list[int] = token_ids(tokens).tolist()
    for i, token in enumerate(ids):
        if not 0 <= token <= MAX_TOKEN:
            raise ValueError(f"token id {token} at position {i}: token ids are 0 to {MAX_TOKEN}")
    return ids


def _agreement(context: list[int], place: list[int], most: int) -> int:
    """Equal tokens at the ends of two texts."""
    length = 0
    while length < min(len(context), len(place), most) and context[-1 - length] == place[-1 - length]:
        length += 1
    return length


def _gram(text: list[int], size: int) -> list[int]:
    return [START] * (size - len(text)) + text[-size:]


def _kind(share: float, strength: int, count: int) -> tuple[int, int, int]:
    return (
        sum(share >= s for s in (0.3, 0.5, 0.7, 0.85, 0.95, 0.99, 1.0)),
        sum(strength >= s for s in (3, 5, 8, 12, 18, 32, 64)),
        (count > 1) + (count > 3),
    )


def _start(kind: Kind) -> float:
    _, share, strength, count = kind
    return int(PRIOR / (1 + math.exp(3 - 0.4 * share - 0.3 * strength - 0.65 * count)) + 0.5) / PRIOR


def _poll(candidates: list[Candidate], step: int) -> dict[int, list[tuple[int, int, bool]]]:
    """For each token that candidates go on with at `step`: (votes, strength, own) of each of them."""
    polls: dict[int, list[tuple[int, int, bool]]] = {}
    for c in candidates:
        if len(c.following) > step:
            strength = min(c.strength + 2 * step, len(VOTES) - 1)
            polls.setdefault(c.following[step], []).append((VOTES[strength] * c.weight, strength, c.own))
    return polls


def _nbytes(trajectories: list[Trajectory]) -> int:
    """8 bytes for each run of texts with one version and count, 7.25 for a token that is drafted, 3 for other ones."""
    kinds = [(t.version, t.count) for t in trajectories]
    runs = sum(i == 0 or kinds[i - 1] != kind for i, kind in enumerate(kinds))
    places, tokens = sum(len(t.places) for t in trajectories), sum(len(t.text) for t in trajectories) + 1
    return -(-(8 * runs + 8 * -(-places // 32) + 4 * places + 3 * tokens) // 8) * 8


_Way = tuple[int, list[int]]
"""The most gained up to a token, and what is taken for it."""


class _Thinning:
    """Keeps the stretches of a problem's trajectories that are worth most for their bytes, each once."""

    def __init__(self, trajectories: list[Trajectory]) -> None:
        self._all = trajectories
        self._grams = [
            {i + 1: [(*t.text[: i + 1][-size:], t.text[i + 1]) for size in SIZES] for i in t.places}
            for t in trajectories
        ]
        self._shared: list[Counter[tuple[int, ...]]] = [Counter() for _ in SIZES]
        for t, grams in zip(trajectories, self._grams, strict=True):
            for size, shared in enumerate(self._shared):
                shared.update(dict.fromkeys((g[size] for g in grams.values()), t.count))

    def to(self, max_bytes: int) -> list[Trajectory]:
        room = max_bytes
        while True:
            self._select(room)
            kept = self._kept()
            if not kept or _nbytes(kept) <= max_bytes:
                return kept
            room -= min(room, _nbytes(kept) - max_bytes)

    def _select(self, room: int) -> None:
        self._taken: list[set[int]] = [set() for _ in self._all]
        self._covered: list[set[tuple[int, ...]]] = [set() for _ in SIZES]
        self._left = 4 * room  # in quarters of a byte
        price = WORTH * sum(max(shared.values()) for shared in self._shared)
        while price and self._left >= 29:
            for number in reversed(range(len(self._all))):
                for i in self._worthwhile(number, price):
                    self._take(number, i)
            price = price * 3 // 4

    def _worthwhile(self, number: int, price: int) -> list[int]:
        """Tokens not yet taken of the stretches that together exceed the price of their bytes by most."""
        grams, taken, never = self._grams[number], self._taken[number], -(2**62)
        worth, seen = dict.fromkeys(grams, 0), list(map(set, self._covered))
        for i in sorted(grams.keys() - taken):
            for size, gram in enumerate(grams[i]):
                worth[i] += 0 if gram in seen[size] else WORTH * self._shared[size][gram]
                seen[size].add(gram)
        outside: _Way = (0, [])
        inside: _Way = (never, [])
        for i in range(1, len(self._all[number].text)):
            head = price * self._head(i)
            begun, gone_on = outside[0], inside[0]
            if i not in taken:
                begun -= head
            elif i - 1 not in taken:
                gone_on += head
            gained, before = (begun, outside[1]) if begun > gone_on else (gone_on, inside[1])
            left = inside if inside[0] > outside[0] else outside
            outside = (never, []) if i in taken else left
            if i not in grams:
                inside = (never, [])
            elif i in taken:
                inside = (gained, before)
            else:
                inside = (gained + 29 * (worth[i] - price), [*before, i])
        return (inside if inside[0] > outside[0] else outside)[1]

    def _take(self, number: int, i: int) -> None:
        taken = self._taken[number]
        cost = 29 + (0 if i - 1 in taken else self._head(i)) - (self._head(i + 1) if i + 1 in taken else 0)
        if cost <= self._left:
            self._left -= cost
            taken.add(i)
            for covered, gram in zip(self._covered, self._grams[number][i], strict=True):
                covered.add(gram)

    @staticmethod
    def _head(i: int) -> int:
        """What a stretch that begins there takes besides its tokens, in quarters of a byte."""
        return 12 * (1 + min(CONTEXT, i - 1))

    def _kept(self) -> list[Trajectory]:
        kept, run, kind = [], -1, None
        for t, grams, taken in zip(self._all, self._grams, self._taken, strict=True):
            run, kind = run + (kind != (t.version, t.count)), (t.version, t.count)
            for begin in sorted(i for i in taken if i - 1 not in taken):
                end = begin
                while end in taken:
                    end += 1
                first = max(1, begin - CONTEXT)
                before = t.text[0] if first == 1 else GAP
                mean = sum(self._shared[-1][grams[i][-1]] for i in range(begin, end)) // (end - begin)
                count = _power(min(mean, COUNTED))
                kept.append((run, Trajectory([before, *t.text[first:end]], t.version, count, begin - first)))
        return [t for _, t in sorted(kept, key=lambda found: (found[0], found[1].count))]


def _power(number: int) -> int:
    """The greatest power of two up to a number."""
    return 1 << number.bit_length() - 1
