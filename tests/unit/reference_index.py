"""The suffix index in plain Python: the tests compare the drafts of `SuffixIndex` with
it. It is quadratic, has no files, and thins nothing out.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from das_adapter.core.tuning import (
    CPP_AHEAD_CHANCE,
    CPP_BEYOND_TOKENS,
    CPP_COUNT_STEPS,
    CPP_DEPTH_TOKENS,
    CPP_HALF_LIFE_VISITS,
    CPP_LIVE_FOUND_TOKENS,
    CPP_LIVE_GRAM_TOKENS,
    CPP_LIVE_TRIM_TOKENS,
    CPP_MEMORY_TOKENS,
    CPP_MOST_STRENGTH,
    CPP_NEEDED_LIVE_PLACES,
    CPP_OTHERS_CHANCE,
    CPP_OWN_WEIGHT,
    CPP_PLACES_PER_SEARCH,
    CPP_PRIOR_COUNT,
    CPP_PRIOR_OFFSET,
    CPP_PRIOR_SHARE,
    CPP_PRIOR_STRENGTH,
    CPP_PRIOR_TOKENS,
    CPP_PROMPT_WEIGHT,
    CPP_SHARE_STEPS,
    CPP_SIBLING_WEIGHT,
    CPP_SOURCE_PRIOR_TOKENS,
    CPP_STRENGTH_STEPS,
    CPP_SURE_STRENGTH,
    CPP_VOTE_POWER,
)

START = -1  # stands before the first token of every response
VOTES = [(i + 1) ** CPP_VOTE_POWER for i in range(CPP_MOST_STRENGTH + 1)]

OTHERS = -1
"""The problem whose texts are those of all problems."""

# source, share of the votes, strength, number of places
Kind = tuple[str, int, int, int]
AHEAD: Kind = ("ahead", -1, -1, -1)


@dataclass
class Trajectory:
    text: list[int]  # START, then the response
    version: int

    @property
    def places(self) -> range:
        """Positions whose next token is a continuation."""
        return range(len(self.text) - 1)


@dataclass(eq=False)
class Request:
    problem: int
    prompt: list[int]
    text: list[int] = field(default_factory=lambda: [START])
    drafted: list[tuple[int, Kind]] = field(default_factory=list)
    is_open: bool = True
    # empty once it has written something else, or all of it
    ahead: list[int] = field(default_factory=list)
    found_from: int = 0  # places before are found no more


@dataclass
class Candidate:
    following: list[int]
    strength: int
    weight: int
    own: bool


Found = tuple[list[int], list[int], int, int, int, bool]
"""Context, text, position of its last token there, match, weight, whether it is the
request's own.
"""


class ReferenceIndex:
    """See `SuffixIndex`: the same calls give the same drafts and chances."""

    def __init__(self, others_tokens: int = 0) -> None:
        self._others_tokens = others_tokens
        self.forget_shares()
        self._fading = [
            max(1, int(CPP_SIBLING_WEIGHT * 2.0 ** (-age / CPP_HALF_LIFE_VISITS) + 0.5))
            for age in range(256)
        ]
        self.window = 2**31
        self._staged: dict[int, list[Trajectory]] = {}
        self._history: dict[int, list[Trajectory]] = {}
        self._live: dict[
            int, list[tuple[Request, int]]
        ] = {}  # places in the order of their arrival
        self._requests: dict[int, Request] = {}
        self._kinds: dict[Kind, list[int]] = {}  # [accepted, tried]
        # accepted, tried, and expected of the kinds
        self._sources = {s: [0.0, 0.0, 0.0] for s in ("own", "problem", "others")}

    # History

    def add(self, problem: int, tokens: list[int], version: int) -> None:
        if not tokens:
            return
        text = Trajectory([START, *tokens], version)
        if self._shares(len(tokens), version):
            self._staged.setdefault(OTHERS, []).append(text)
        self._staged.setdefault(problem, []).append(text)

    def _shares(self, tokens: int, version: int) -> bool:
        newest, share, arrived, taken = self._share
        most = self._others_tokens // 2
        if version > newest:
            share = most / arrived if arrived > most else 1.0
            newest, arrived, taken = version, 0, 0
        takes = taken <= share * arrived and taken + tokens <= most
        self._share = (newest, share, arrived + tokens, taken + takes * tokens)
        return takes

    def forget_shares(self) -> None:
        self._share = (-(2**31), 1.0, 0, 0)  # version, share, tokens arrived, taken

    def seal(self) -> None:
        for problem, added in self._staged.items():
            trajectories = [*self._history.get(problem, []), *added]
            versions = sorted({t.version for t in trajectories})
            kept = versions[-self.window :]
            if problem == OTHERS:
                kept = versions
                if sum(len(t.places) for t in trajectories) > self._others_tokens:
                    most = self._others_tokens // 4 * 3
                    kept = _newest_fitting(trajectories, most)
            self._history[problem] = [t for t in trajectories if t.version in kept]
        self._staged = {}

    def refresh(self, store: ReferenceIndex) -> None:
        """As an attached `SuffixIndex`: take over what a store has sealed."""
        self._history = dict(store._history)

    @property
    def tokens(self) -> int:
        return sum(
            len(t.places) for p, ts in self._history.items() if p != OTHERS for t in ts
        )

    @property
    def problems(self) -> int:
        return len(self._history.keys() - {OTHERS})

    # Live requests

    def open(
        self,
        problem: int,
        prompt_ids: list[int],
        prefix: list[int],
        ahead: Sequence[int] = (),
    ) -> int:
        self._write(Request(problem, [], is_open=False), ahead)
        handle = len(self._requests) + 1
        self._requests[handle] = Request(problem, prompt_ids, ahead=[*ahead])
        self.extend(handle, prefix)
        return handle

    def extend(self, handle: int, tokens: list[int]) -> None:
        request = self._requests[handle]
        for token, (drafted, kind) in zip(tokens, request.drafted, strict=False):
            self._learn(kind, token == drafted)
            if token != drafted:
                break
        if tokens:
            request.drafted = []
        rest = request.ahead[len(request.text) - 1 :]
        if len(tokens) >= len(rest) or rest[: len(tokens)] != tokens:
            request.ahead = []
        self._write(request, tokens)

    def close(self, handle: int, keep: bool) -> None:
        request = self._requests[handle]
        request.is_open = False
        if not keep:
            self._forget(lambda r: r is not request)

    def clear_live(self) -> None:
        self._forget(lambda r: r.is_open)

    # Drafting

    def draft(
        self, handles: list[int], budgets: list[int], min_chance: float
    ) -> tuple[list[list[int]], list[list[float]]]:
        drafts = [
            self._draft(self._requests[h], limit, min_chance)
            for h, limit in zip(handles, budgets, strict=True)
        ]
        return [tokens for tokens, _ in drafts], [chances for _, chances in drafts]

    def _draft(
        self, request: Request, budget: int, min_chance: float
    ) -> tuple[list[int], list[float]]:
        request.drafted = []
        tokens: list[int] = []
        chances: list[float] = []
        if budget <= 0:
            return tokens, chances
        chance = 1.0
        ahead = request.ahead[len(request.text) - 1 :]
        for token in ahead[: budget + 1]:
            request.drafted.append((token, AHEAD))
            chance *= self._chance(AHEAD)
            if len(tokens) == budget or chance < min_chance:
                return tokens, chances
            tokens.append(token)
            chances.append(_narrow(chance))
        candidates = self._gather(request)
        others: list[Candidate] = []
        searched = others_searched = len(ahead)
        asked_others = False
        for step in range(len(ahead), budget + 1):
            best = self._elected(candidates, step - searched)
            if best is None and step > searched:
                candidates = self._gather(request)
                searched = step
                best = self._elected(candidates, 0)
            if best is None or best[0] < CPP_OTHERS_CHANCE:
                other = self._elected(others, step - others_searched, others=True)
                is_new = not asked_others or step > others_searched
                if other is None and is_new:
                    others = self._gather_others(request)
                    others_searched = step
                    asked_others = True
                    other = self._elected(others, 0, others=True)
                if other is not None and (best is None or other[0] > best[0]):
                    best = other
            if best is None:
                break
            own_chance, token, kind = best
            request.drafted.append((token, kind))
            chance *= own_chance
            if step == budget or chance < min_chance:
                break
            tokens.append(token)
            chances.append(_narrow(chance))
            candidates = _voters(candidates, step - searched, token)
            others = _voters(others, step - others_searched, token)
        return tokens, chances

    def _elected(
        self, candidates: list[Candidate], step: int, others: bool = False
    ) -> tuple[float, int, Kind] | None:
        """The token with the most votes: its chance, itself, its kind."""
        polls = _poll(candidates, step)
        if not polls:
            return None
        votes = {token: sum(v for v, _, _ in poll) for token, poll in polls.items()}
        token = min(votes, key=lambda t: (-votes[t], t))
        share = votes[token] / sum(votes.values())
        strength = max(s for _, s, _ in polls[token])
        source = "own" if all(own for _, _, own in polls[token]) else "problem"
        if others:
            source = "others"
        kind = (source, *_kind(share, strength, len(polls[token])))
        return self._chance(kind), token, kind

    def _gather_others(self, request: Request) -> list[Candidate]:
        context = request.text + [token for token, _ in request.drafted]
        shared = self._history.get(OTHERS, [])
        places = [(t.text, i, 1) for t in shared for i in t.places]
        found = []
        for _, text, i, length, weight in self._nearest(places, context):
            strength = self._strength(context, text[: i + 1], length)
            found.append(Candidate(text[i + 1 :], strength, weight, False))
        return found

    def _gather(self, request: Request) -> list[Candidate]:
        draft = [token for token, _ in request.drafted]
        response = request.text + draft
        whole = request.prompt + request.text[1:] + draft
        candidates = [
            Candidate(
                text[i + 1 :],
                self._strength(context, text[: i + 1], length),
                weight,
                own,
            )
            for context, text, i, length, weight, own in self._search(
                request, response, whole
            )
        ]
        if len(response) >= 2 and all(
            c.strength < CPP_SURE_STRENGTH for c in candidates
        ):
            candidates += [
                Candidate(
                    text[i + 2 :], min(length, CPP_BEYOND_TOKENS) - 1, weight, own
                )
                for _, text, i, length, weight, own in self._search(
                    request, response[:-1], whole[:-1]
                )
                if text[i + 1] != response[-1]
            ]
        return candidates

    def _search(
        self, request: Request, response: list[int], whole: list[int]
    ) -> Iterator[Found]:
        trajectories = self._history.get(request.problem, [])
        versions = {t.version for t in trajectories}
        ages = {v: sum(newer > v for newer in versions) for v in versions}
        sealed = [
            (t.text, i, self._weight(ages[t.version]))
            for t in trajectories
            for i in t.places
        ]
        yield from ((*found, False) for found in self._nearest(sealed, response))
        yield from self._latest(request, response)
        prompt = Trajectory([START, *request.prompt], 0)
        of_prompt = self._nearest(
            [(prompt.text, i, CPP_PROMPT_WEIGHT) for i in prompt.places], whole
        )
        yield from ((*found, True) for found in of_prompt)

    def _nearest(
        self, places: list[tuple[list[int], int, int]], context: list[int]
    ) -> Iterator[tuple[list[int], list[int], int, int, int]]:
        """The longest matches among places (text, position of the last context token,
        weight), oldest place first.
        """
        keys = [tuple(text[i::-1][:CPP_DEPTH_TOKENS]) for text, i, _ in places]
        order = sorted(range(len(places)), key=lambda p: (keys[p], -p))
        here = bisect.bisect_left(
            [keys[p] for p in order], tuple(context[::-1][:CPP_DEPTH_TOKENS])
        )
        found = []
        for rank, p in enumerate(order):
            length = _agreement(
                context, places[p][0][: places[p][1] + 1], CPP_DEPTH_TOKENS
            )
            distance = rank - here if rank >= here else here - 1 - rank
            found.append((-length, rank < here, distance, p))
        for minus, _, _, p in sorted(found)[:CPP_PLACES_PER_SEARCH]:
            if minus:
                text, i, weight = places[p]
                yield context, text, i, -minus, weight

    def _latest(self, request: Request, context: list[int]) -> Iterator[Found]:
        """The latest live places with equal last tokens, more of them first."""
        found = 0
        above = None
        for size in CPP_LIVE_GRAM_TOKENS:
            if found >= CPP_NEEDED_LIVE_PLACES:
                break
            gram = _gram(context, size)
            places = reversed(self._live.get(request.problem, []))
            alike = (
                (r, i)
                for r, i in places
                if i >= r.found_from
                and _gram(r.text[max(0, i + 1 - size) : i + 1], size) == gram
            )
            for r, i in itertools.islice(alike, CPP_PLACES_PER_SEARCH):
                if above is None or _gram(r.text[: i + 1], above) != _gram(
                    context, above
                ):
                    found += 1
                    length = _agreement(context, r.text[: i + 1], CPP_DEPTH_TOKENS)
                    yield (
                        context,
                        r.text,
                        i,
                        length,
                        CPP_OWN_WEIGHT if r is request else CPP_SIBLING_WEIGHT,
                        r is request,
                    )
            above = size

    def _weight(self, age: int) -> int:
        return self._fading[min(age, len(self._fading) - 1)]

    def _strength(self, context: list[int], place: list[int], length: int) -> int:
        beyond = 0
        if length < min(CPP_DEPTH_TOKENS, len(context), len(place)):
            if place[-1 - length] >= 0:
                beyond = _agreement(
                    context[: -1 - length], place[: -1 - length], CPP_BEYOND_TOKENS
                )
        return 2 * length + beyond

    # What happened to earlier drafts

    def _chance(self, kind: Kind) -> float:
        if kind == AHEAD:
            accepted, tried = self._kinds.get(kind, (0, 0))
            return (accepted + CPP_PRIOR_TOKENS * CPP_AHEAD_CHANCE) / (
                tried + CPP_PRIOR_TOKENS
            )
        accepted, tried, expected = self._sources[kind[0]]
        better = (
            (accepted + CPP_SOURCE_PRIOR_TOKENS)
            / (tried - accepted + CPP_SOURCE_PRIOR_TOKENS)
            * (
                (tried - expected + CPP_SOURCE_PRIOR_TOKENS)
                / (expected + CPP_SOURCE_PRIOR_TOKENS)
            )
        )
        odds = _start(kind) * better
        accepted, tried = self._kinds.get(kind, (0, 0))
        return (accepted + CPP_PRIOR_TOKENS * (odds / (1 - _start(kind) + odds))) / (
            tried + CPP_PRIOR_TOKENS
        )

    def _learn(self, kind: Kind, accepted: bool) -> None:
        cell = self._kinds.setdefault(kind, [0, 0])
        cell[:] = [cell[0] + accepted, cell[1] + 1]
        if kind == AHEAD:
            cell[:] = [x // 2 for x in cell] if cell[1] >= CPP_MEMORY_TOKENS else cell
            return
        source = self._sources[kind[0]]
        source[:] = [source[0] + accepted, source[1] + 1, source[2] + _start(kind)]
        if cell[1] >= CPP_MEMORY_TOKENS:
            cell[:] = [cell[0] // 2, cell[1] // 2]
        if source[1] >= CPP_MEMORY_TOKENS:
            source[:] = [x / 2 for x in source]

    # Housekeeping

    def _write(self, request: Request, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._live.setdefault(request.problem, []).append(
                (request, len(request.text) - 1)
            )
            request.text.append(token)
        if len(request.text) > request.found_from + CPP_LIVE_TRIM_TOKENS:
            request.found_from = len(request.text) - CPP_LIVE_FOUND_TOKENS

    def _forget(self, kept: Callable[[Request], bool]) -> None:
        for problem, places in list(self._live.items()):
            self._live[problem] = [(r, i) for r, i in places if kept(r)]


def _voters(candidates: list[Candidate], step: int, token: int) -> list[Candidate]:
    return [c for c in candidates if c.following[step : step + 1] == [token]]


def _newest_fitting(trajectories: list[Trajectory], most: int) -> set[int]:
    """Versions, the newest at least, that have at most so many tokens together."""
    kept: set[int] = set()
    total = 0
    for version in sorted({t.version for t in trajectories}, reverse=True):
        total += sum(len(t.text) for t in trajectories if t.version == version)
        if kept and total > most:
            break
        kept.add(version)
    return kept


def _narrow(chance: float) -> float:
    return float(np.float32(max(chance, float(np.finfo(np.float32).tiny))))


def _agreement(context: list[int], place: list[int], most: int) -> int:
    """Equal tokens at the ends of two texts."""
    length = 0
    while (
        length < min(len(context), len(place), most)
        and context[-1 - length] == place[-1 - length]
    ):
        length += 1
    return length


def _gram(text: list[int], size: int) -> list[int]:
    return [START] * (size - len(text)) + text[-size:]


def _kind(share: float, strength: int, count: int) -> tuple[int, int, int]:
    return (
        sum(share >= s for s in CPP_SHARE_STEPS),
        sum(strength >= s for s in CPP_STRENGTH_STEPS),
        sum(count >= s for s in CPP_COUNT_STEPS),
    )


def _start(kind: Kind) -> float:
    _, share, strength, count = kind
    logit = (
        CPP_PRIOR_OFFSET
        - CPP_PRIOR_SHARE * share
        - CPP_PRIOR_STRENGTH * strength
        - CPP_PRIOR_COUNT * count
    )
    accepted = int(CPP_PRIOR_TOKENS / (1 + math.exp(logit)) + 0.5)
    return accepted / CPP_PRIOR_TOKENS


def _poll(
    candidates: list[Candidate], step: int
) -> dict[int, list[tuple[int, int, bool]]]:
    """For each token that candidates go on with at `step`: (votes, strength, own) of
    each of them.
    """
    polls: dict[int, list[tuple[int, int, bool]]] = {}
    for c in candidates:
        if len(c.following) > step:
            strength = min(c.strength + 2 * step, len(VOTES) - 1)
            polls.setdefault(c.following[step], []).append(
                (VOTES[strength] * c.weight, strength, c.own)
            )
    return polls
