"""What a controller is told of a decode step, and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Chances = npt.NDArray[np.float32]
HistoryDrafts = Callable[[Ints, float], tuple[Chances, Ints]]
"""Drafts from the history: most tokens of each request int64 [b] and the chance under
which a draft ends go in; out come survival chances float32 [n], request after request,
and offsets int64 [b + 1]: request i's are `chances[o[i]:o[i + 1]]`.
"""


class Decoded(NamedTuple):
    """What a decode step brought; arrays int64 [b], request by request."""

    slots: Ints
    got: Ints
    """Tokens."""
    carried: Ints | None
    """Draft tokens that were verified; None if no request carried a draft."""
    by_model: Ints | None
    """How many of these a model drafted."""
    room: Ints
    """Draft tokens that still fit before the request's end."""
    steps: int = 1
    """Decode steps since the last call; more where a simulation leaves some out."""
    context: Ints | None = None
    """Tokens of each request's text, prompt included; None: not known, and step times
    that depend on it are taken to have none.
    """
    kinds: npt.NDArray[np.uint8] | None = None
    """Of the model's draft tokens, see `core.confidence`, uint8 [b, n]; None: nobody
    says.
    """


class TimedStep(NamedTuple):
    """What a decode step took. Steps that also read prompts are not timed."""

    slots: Ints
    got: Ints
    """Tokens that each request got, int64 [b]."""
    tokens: int
    """In the policy's forward pass, draft tokens included."""
    seconds: float
    """From its begin to that of the next, without `drafting_seconds`."""
    drafting_seconds: float = 0.0
    """Of the model that drafts, at its end."""
    passes: int = 0
    """Forward passes of that model."""
    context: int = 0
    """Tokens of context that all requests have together."""
    asked: bool = True
    """False: a baseline step, without drafts, at whose end no drafter was asked."""

    @property
    def drafted(self) -> bool:
        """Whether it verified draft tokens."""
        return self.tokens > len(self.slots)


class Search(NamedTuple):
    """What to look for, before it is known what there is."""

    limits: Ints
    """Most tokens of each request, int64 [b]."""
    floor: float
    """Chance under which a draft ends."""


class StepPlan(NamedTuple):
    """The drafts of the next step."""

    history: Ints
    """Tokens of each request's draft from the history to verify, int64 [b]."""
    model: Ints
    """Tokens of a model's draft to verify for each request, instead, int64 [b]; on
    average, where the device chooses among longer drafts.
    """
    gain: float = 0.0
    """Seconds: worth of all draft tokens minus what drafting and verifying them
    costs.
    """
    passes_s: float = 0.0
    """Seconds of the model's passes."""
    longest: int = 0
    """Tokens of the model's longest draft, where that is more than is verified."""

    @classmethod
    def nothing(cls, requests: int) -> StepPlan:
        """Return a plan without drafts."""
        return cls(*np.zeros((2, requests), dtype=np.int64))

    @property
    def total(self) -> int:
        """Draft tokens of all requests."""
        # NumPy's take longer for few requests
        return sum(self.history.tolist()) + sum(self.model.tolist())
