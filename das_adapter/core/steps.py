"""What a policy of drafts is told of a decode step, and what it answers.

The calls of one step, of every driver (`core/policy.py`):

    outcome  ->  next    ->  Rest, or Search
    found    ->  choose  ->  Rest, or StepPlan
                 flush       (the driver has time: the policy learns)
    TimedStep -> timed       (the next step has begun: how long this one took)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Chances = npt.NDArray[np.float32]
TokenKinds = npt.NDArray[np.uint8]
"""Kinds of draft tokens; see `core.confidence`."""
Candidates = tuple[Chances, Ints]
"""Drafts of b requests from the history: the chance of each token to be reached and
accepted, float32 [n], request after request, and offsets, int64 [b + 1]. The chances of
request i are `chances[offsets[i] : offsets[i + 1]]`.
"""


class Outcome(NamedTuple):
    """What a decode step brought to its requests; arrays int64 [b]."""

    slots: Ints
    got: Ints
    """Tokens that each request got."""
    carried: Ints | None
    """Draft tokens that were verified; None: no request carried a draft."""
    by_model: Ints | None
    """Verified draft tokens that a model drafted."""
    room: Ints
    """Draft tokens that still fit before each request's end."""
    steps: int = 1
    """Decode steps in which this was brought, one token to each request in each of
    them if there are several.
    """
    context: Ints | None = None
    """Tokens of each request's text, prompt included; None: not known, and step times
    that depend on it are taken to have none.
    """
    token_kinds: TokenKinds | None = None
    """Kinds of the model's draft tokens, see `core.confidence`, uint8 [b, n]; None:
    nobody says how sure the model was.
    """
    unseen: Ints | None = None
    """Tokens that each request has got beside these, in steps that a simulation left
    out.
    """
    left_out: int = 0
    """Number of those steps."""


class TimedStep(NamedTuple):
    """What a decode step took. Steps that also read prompts are not timed."""

    slots: Ints
    got: Ints
    """Tokens that each request got, int64 [b]."""
    tokens: int
    """Tokens in the policy's forward pass, draft tokens included."""
    seconds: float
    """Seconds from its begin to that of the next, without `drafting_seconds`."""
    drafting_seconds: float = 0.0
    """Seconds of the model that drafts, at its end."""
    passes: int = 0
    """Forward passes of that model."""
    context: int = 0
    """Tokens of context that all requests have together."""
    asked: bool = True
    """False: a baseline step, without drafts, at whose end no drafter was asked."""
    steps: int | None = None
    """Number of baseline steps of the same requests whose seconds and context these
    are; they are counted, and nothing is learned from them. None: it is one step.
    """

    @property
    def drafted(self) -> bool:
        """Whether it verified draft tokens."""
        requests = len(self.slots)
        return self.tokens > requests


class Rest(NamedTuple):
    """Nobody drafts for the next step."""

    steps: int
    """Steps after this one for which no drafter is asked, as far as can be said now."""
    asked: bool
    """Whether a drafter was asked; where none was, a step without drafts is a baseline
    step.
    """


class Search(NamedTuple):
    """What to look for, before it is known what there is."""

    max_tokens: Ints
    """Most draft tokens of each request, int64 [b]."""
    min_chance: float
    """Survival chance under which a draft ends."""


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
    budget: int = 0
    """Draft tokens of all requests that are verified where the device chooses whose."""
    weights: Floats = np.zeros(0)
    """Weight of an accepted token of each request, float64 [b], where the device
    chooses: the seconds that it saves, or 1 where budgets are fixed.
    """

    @classmethod
    def nothing(cls, requests: int) -> StepPlan:
        """Return a plan without drafts."""
        history = np.zeros(requests, dtype=np.int64)
        model = np.zeros(requests, dtype=np.int64)
        return cls(history, model)

    @property
    def total(self) -> int:
        """Draft tokens of all requests."""
        # NumPy's sums take longer for few requests
        of_history = sum(self.history.tolist())
        of_model = sum(self.model.tolist())
        return of_history + of_model
