"""Drafters of simulated engines that need no controller: none, and one of fixed
length.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from das_adapter.core.length import Responses
from das_adapter.sim.requests import Floats, Ints, Requests
from das_adapter.sim.sources import Given
from das_adapter.sim.steps import Seconds


class Ticked(NamedTuple):
    """The result of one step of one engine."""

    engine: int
    rows: Ints
    """Requests that received tokens, [b]."""
    got: Ints
    """Tokens that each received, int64 [b]."""
    carried: Ints
    """Draft tokens that each had in the step, int64 [b]."""
    copied: Ints
    """Those of the policy copy, int64 [b]."""
    tokens: int
    """Tokens in the forward pass, draft tokens included."""
    seconds: float
    timed: bool
    """Whether the step read no prompts."""


class Walk(NamedTuple):
    """How engines go on until their drafter is asked again."""

    source: Given
    steps: Ints | int
    """Maximum number of steps: of each engine, int64 [engines], or of all."""
    least: Floats
    """Logarithm of the chance under which each request's draft ends, float64
    [requests]; inf: no draft.
    """
    limit: Ints
    """Maximum draft tokens of each request, int64 [requests]."""
    seconds: Seconds


class Drafting:
    """Decides on the drafts of running requests: sets their `draft`, `hits`, `copied`
    and `copy_hits`.
    """

    def walk(self, rows: Ints) -> Walk | None:
        """Say how the engines of these running requests may go on without it; None:
        each step must be asked for.
        """
        return None

    def walked(self, steps: Ints) -> None:
        """Note how many steps each engine took by itself, int64 [engines]."""

    def begin(self, rows: Ints) -> None:
        """Take requests that were admitted."""

    def step(self, ticks: list[Ticked]) -> list[float]:
        """Take one step of each of some engines and decide on the drafts of the next;
        return the seconds that this takes each of them.
        """
        raise NotImplementedError

    def end(self, rows: Ints) -> None:
        """Take requests that ended."""

    def sync(self, version: int, rows: Ints, responses: Responses) -> None:
        """Learn from these finished requests, at a weight sync."""


class Fixed(Drafting):
    """A drafter that vLLM runs by itself: the same number of draft tokens for every
    request in every step.
    """

    def __init__(
        self,
        requests: Requests,
        source: Given,
        tokens: int,
        pass_seconds: Seconds | None = None,
        passes: int = 0,
    ) -> None:
        """A draft of `tokens` takes so many `passes` of `pass_seconds`; None: drafting
        takes no time.
        """
        self._requests = requests
        self._source = source
        self._tokens = tokens
        self._pass_seconds = pass_seconds
        self._each = passes

    def walk(self, rows: Ints) -> Walk | None:
        return Walk(
            self._source,
            2**30,
            np.full(len(rows), -np.inf),
            np.full(len(rows), self._tokens),
            self._passes,
        )

    def step(self, ticks: list[Ticked]) -> list[float]:
        rows = np.concatenate([tick.rows for tick in ticks])
        r = self._requests
        offer = self._source.offer(rows, np.minimum(self._tokens, r.room(rows)), 0.0)
        r.draft[rows] = np.diff(offer.offsets)
        r.hits[rows] = offer.hits
        counts = np.array([len(tick.rows) for tick in ticks], dtype=float)
        # as the step read it
        context = [
            float((r.prompt[t.rows] + r.written[t.rows] - t.got).sum()) for t in ticks
        ]
        passes: list[float] = self._passes(counts, np.array(context)).tolist()
        return passes

    def _passes(self, requests: Floats, context: Floats) -> Floats:
        if self._pass_seconds is None:
            return np.zeros_like(requests)
        return self._each * self._pass_seconds(requests, context)


def no_drafts(requests: Requests) -> Fixed:
    """Return a drafter without drafts."""
    return Fixed(requests, Given(requests, [[0.0]], longest=1), 0)
