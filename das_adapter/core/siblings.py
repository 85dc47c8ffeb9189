"""What siblings, the other samples of a problem in a step, are worth to a request that drafts from them."""

from __future__ import annotations

import math
import operator
from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

PRIOR_REQUESTS = 32
"""Finished requests that weigh as much as what siblings are taken to be worth before."""


class Moments(NamedTuple):
    """Sums over finished requests; x: `Worth.doublings`, y: tokens from a forward pass."""

    requests: float = 0.0
    x: float = 0.0
    xx: float = 0.0
    y: float = 0.0
    xy: float = 0.0

    @classmethod
    def of(cls, x: float, y: float, requests: float = 1.0) -> Moments:
        """Return the sums over equal requests."""
        return cls(requests, requests * x, requests * x * x, requests * y, requests * x * y)

    def __add__(self, other: Moments) -> Moments:  # type: ignore[override]
        return Moments(*map(operator.add, self, other))

    def faded(self, share: float) -> Moments:
        """Return this share of the sums."""
        return Moments(*(share * value for value in self))


@dataclass(frozen=True)
class Worth:
    """Tokens that a request gets from a forward pass, by the siblings it can draft from: they grow with the logarithm
    of the siblings' text. The defaults lie between those of recorded rollouts (`benchmarks/results/routing.md`)."""

    alone: float = 1.8
    """Tokens without siblings."""
    doubling: float = 0.5
    """Tokens that twice the text adds."""
    growing: float = 0.2
    """What a sibling that is being written counts for, in finished ones."""
    history: float = 8.0
    """What a problem's history counts for, in finished siblings."""

    def tokens(self, growing: float, finished: float = 0.0, known: bool = False) -> float:
        """Return the tokens from a forward pass beside so many siblings; `known`: the problem has history."""
        return self.alone + self.doubling * self.doublings(growing, finished, known)

    def doublings(self, growing: float, finished: float, known: bool) -> float:
        """Return how often the text to draft from doubles, beside so many siblings."""
        return math.log2(1.0 + self.growing * growing + finished + self.history * known)

    def fitted(self, seen: Moments) -> Worth:
        """Return what siblings are worth by a run's own requests, starting from this: as if `PRIOR_REQUESTS` had been
        seen alone and as many beside seven finished siblings, with a share of the accepted tokens that the run's own
        requests tell, since those may all have had as many siblings. Where siblings are to count for nothing, they stay
        so."""
        if not self.doubling:
            return self
        points = [(x, self.alone + self.doubling * x - 1.0) for x in (0.0, 3.0)]
        before = PRIOR_REQUESTS * sum(accepted for _, accepted in points)
        expected = (self.alone - 1.0) * seen.requests + self.doubling * seen.x
        share = max(0.0, before + seen.y - seen.requests) / (before + expected)
        prior = (Moments.of(x, 1.0 + share * accepted, PRIOR_REQUESTS) for x, accepted in points)
        n, x, xx, y, xy = sum(prior, seen)
        doubling = max(0.0, (n * xy - x * y) / (n * xx - x * x))
        return replace(self, alone=max(1.0, (y - doubling * x) / n), doubling=doubling)


NO_SIBLINGS = Worth(doubling=0.0)
"""For a drafter that does not draft from siblings."""


class Siblings:
    """An engine's count of what siblings turn out to be worth."""

    def __init__(self) -> None:
        self._growing: Counter[int] = Counter()
        self._finished: Counter[int] = Counter()
        self._moments = Moments()

    def begin(self, problem: int) -> int:
        """Take a request that begins, and return how many of its siblings have finished."""
        self._growing[problem] += 1
        return self._finished[problem]

    def end(self, problem: int, finished: int, known: bool, tokens: float, forwards: float) -> None:
        """Take a request that ended, with what `begin` returned, whether its problem has history, and the tokens and
        forward passes that it got."""
        self._growing[problem] -= 1
        alongside = self._growing[problem] + max(0, self._finished[problem] - finished)
        self._finished[problem] += 1
        if forwards > 0:
            self._moments += Moments.of(Worth().doublings(alongside, finished, known), tokens / forwards)

    def clear(self) -> None:
        """Forget the finished siblings, at a weight sync."""
        self._finished.clear()
        self._growing = +self._growing

    def take(self) -> Moments:
        """Return what was counted since the last call."""
        taken, self._moments = self._moments, Moments()
        return taken
