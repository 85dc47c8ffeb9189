"""The plan for the drafts of a step on vLLM's V2 runner, and its way from the worker
that chooses it to the workers that draft.

    worker      `StepPlanner` chooses a plan when a step's output is on the host
      |         attribute `das_plan` of vLLM's ModelRunnerOutput
    scheduler   `PlanLookup` cuts it to the room of the step that is scheduled next;
      |         vLLM's field `num_spec_tokens_to_schedule` has its plain number,
      |         attribute `das_plan` of vLLM's SchedulerOutput has the plan
    workers     `plan_of` reads it, once, when the step begins; all parts that draft
                and verify have the same `PlanInForce`

The number of draft tokens of a step is drafted at the end of that step; the step after
it verifies them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count, repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from das_adapter.core.steps import Floats, Ints
from das_adapter.errors import DasError

ATTRIBUTE = "das_plan"
"""Attribute of vLLM's `ModelRunnerOutput` and `SchedulerOutput` that has a plan."""


@dataclass(frozen=True)
class DraftPlan:
    """How many tokens are drafted at the end of a step, and how many of them are
    verified.
    """

    num_draft_tokens: int = 0
    """Tokens that are drafted for each request."""
    num_model_tokens: int = 0
    """Those that a model drafts, where nothing better is in the history."""
    looks_up: bool = True
    """Whether it is looked up what the history has."""
    chances: npt.NDArray[np.float32] | None = None
    """Chance of each kind of token that a model drafts (`core.confidence`) to be
    accepted, given those before it; None: the policy of drafts does not choose.
    """
    budget: int = 0
    """Draft tokens of all requests that the next step verifies, where each request has
    its own number; 0: all have the same.
    """
    req_ids: Sequence[str] = ()
    """Requests that the budget is for."""
    limits: Ints = field(
        default_factory=lambda: np.zeros(0, dtype=np.int64),
    )
    """Most draft tokens of each of these, int64 [requests]."""
    worth: Floats = field(
        default_factory=lambda: np.zeros(0),
    )
    """Worth of a token of each of these as a share of the greatest, float64
    [requests].
    """
    error: str | None = None
    """Why vLLM's scheduler asks for no drafts any more; None: nothing has failed
    there.
    """

    @property
    def silent(self) -> bool:
        """Whether nothing is drafted or looked for."""
        return self.num_draft_tokens == 0 and not self.looks_up

    def at_most(self, tokens: int) -> DraftPlan:
        """Return the same plan with at most so many tokens for each request."""
        if tokens >= self.num_draft_tokens:
            return self
        return replace(self, num_draft_tokens=tokens)

    def limits_and_worth(
        self,
        req_ids: Sequence[str],
    ) -> tuple[Ints, Floats, int]:
        """Return the `limits` and the `worth` of a step's requests, and the number of
        those that have joined since the plan was made: a token of these is worth as
        much as the most valuable one.
        """
        if self.req_ids == req_ids:
            return self.limits, self.worth, 0
        numbered = zip(self.req_ids, count(), strict=False)
        places = dict(numbered)
        # Requests that have joined are read from behind the last place.
        planned_places = map(places.get, req_ids, repeat(-1))
        num_requests = len(req_ids)
        rows = np.fromiter(planned_places, np.int64, num_requests)
        limits = np.append(self.limits, self.num_draft_tokens)
        worth = np.append(self.worth, 1.0)
        has_joined = rows < 0
        joined = int(np.count_nonzero(has_joined))
        return limits[rows], worth[rows], joined


SILENCE = DraftPlan(looks_up=False)
"""A plan by which nothing is drafted or looked for."""


@dataclass
class PlanInForce:
    """The plan of the present step, which all parts of a worker share."""

    plan: DraftPlan | None = None
    """None: as many tokens are drafted as there can be."""

    @property
    def num_draft_tokens(self) -> int | None:
        """Tokens that are drafted for each request; None: as many as there can be."""
        if self.plan is None:
            return None
        return self.plan.num_draft_tokens

    @property
    def looks_up(self) -> bool:
        """Whether it is looked up what the history has."""
        return self.plan is None or self.plan.looks_up


def plan_of(scheduled: Any) -> DraftPlan:
    """Return the plan of a step (vLLM's `SchedulerOutput`).

    Raises:
        DasError: the plan was lost between vLLM's scheduler and this worker, or it is
            not that of the step.
    """
    scheduled_tokens = scheduled.num_spec_tokens_to_schedule
    plan = getattr(scheduled, ATTRIBUTE, None)
    if plan is None:
        raise DasError(
            "the plan for the drafts was lost between vLLM's scheduler and the worker:"
            f" a step asks for {scheduled_tokens} draft tokens without one"
        )
    if plan.num_draft_tokens != scheduled_tokens:
        raise DasError(
            f"the plan for the drafts of a step has {plan.num_draft_tokens} draft"
            f" tokens, vLLM's scheduler asks for {scheduled_tokens}: it is that of"
            " another step"
        )
    found: DraftPlan = plan
    return found
