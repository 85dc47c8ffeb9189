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


class EngineStep(NamedTuple):
    """The result of one step of one engine."""

    engine: int
    rows: Ints
    """Requests that received tokens, [b]."""
    got: Ints
    """Tokens that each received, int64 [b]."""
    carried: Ints
    """Draft tokens that each had in the step, int64 [b]."""
    copied: Ints
    """Draft tokens of `carried` that the policy copy or a neural drafter made, int64
    [b].
    """
    tokens: int
    """Tokens in the forward pass, draft tokens included."""
    seconds: float
    """Time of the step."""
    timed: bool
    """Whether the step read no prompts."""


class FreeSteps(NamedTuple):
    """Steps that engines take until their drafter is asked again."""

    source: Given
    """Source of the drafts of these steps."""
    steps: Ints | int
    """Maximum number of steps: of each engine, int64 [engines], or of all."""
    log_min_chance: Floats
    """Logarithm of the chance under which each request's draft ends, float64
    [requests]; inf: no draft.
    """
    max_draft_tokens: Ints
    """Maximum draft tokens of each request, int64 [requests]."""
    seconds: Seconds
    """Time of the drafter's own work in each of these steps."""


class Drafting:
    """A drafter that sets `draft`, `hits`, `copied` and `copy_hits` of running
    requests.
    """

    def free_steps(self, rows: Ints) -> FreeSteps | None:
        """Return the steps that the engines of these running requests may take without
        asking; None: they must ask in each step.
        """
        return None

    def record_free_steps(self, steps: Ints) -> None:
        """Record how many steps each engine took without asking, int64 [engines]."""

    def begin(self, rows: Ints) -> None:
        """Begin to draft for requests that were admitted."""

    def step(self, results: list[EngineStep]) -> list[float]:
        """Learn from one step of each of some engines and decide on the drafts of the
        next; return the seconds that this takes each of them.
        """
        raise NotImplementedError

    def end(self, rows: Ints) -> None:
        """Forget requests that ended."""

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
        """Draft `tokens` in so many `passes` of `pass_seconds`; None: drafting takes no
        time.
        """
        self._requests = requests
        self._source = source
        self._tokens = tokens
        self._pass_seconds = pass_seconds
        self._num_passes = passes

    def free_steps(self, rows: Ints) -> FreeSteps | None:
        count = len(rows)
        return FreeSteps(
            source=self._source,
            steps=2**30,
            log_min_chance=np.full(count, -np.inf),
            max_draft_tokens=np.full(count, self._tokens),
            seconds=self._draft_seconds,
        )

    def step(self, results: list[EngineStep]) -> list[float]:
        requests = self._requests
        rows = np.concatenate([result.rows for result in results])
        room = requests.room(rows)
        limits = np.minimum(self._tokens, room)
        offer = self._source.offer(rows, limits, 0.0)
        requests.num_draft_tokens[rows] = np.diff(offer.offsets)
        requests.num_draft_hits[rows] = offer.hits
        counts = list[float]()
        contexts = list[float]()
        for result in results:
            count = len(result.rows)
            # as the step read it
            context = requests.context(result.rows) - result.got
            context_tokens = context.sum()
            counts.append(float(count))
            contexts.append(float(context_tokens))
        seconds = self._draft_seconds(np.array(counts), np.array(contexts))
        return [float(value) for value in seconds]

    def _draft_seconds(self, requests: Floats, context: Floats) -> Floats:
        if self._pass_seconds is None:
            return np.zeros_like(requests)
        pass_s = self._pass_seconds(requests, context)
        return self._num_passes * pass_s


def no_drafts(requests: Requests) -> Fixed:
    """Return a drafter without drafts."""
    nothing = Given(requests, [[0.0]], longest=1)
    return Fixed(requests, nothing, tokens=0)
