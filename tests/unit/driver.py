"""A policy of drafts as every driver calls it, in one call for a test."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from das_adapter.core.policy import DraftPolicy
from das_adapter.core.steps import Candidates, Outcome, Rest, StepPlan

Find = Callable[[np.ndarray, float], Candidates]
"""Looks drafts up, given the most of each request and the least chance."""


def decide(policy: DraftPolicy, outcome: Outcome, find: Find | None = None) -> StepPlan:
    """Take a step, learn from it, and return the drafts of the next; none, where nobody
    drafts. Where a test times no steps, those of any size count as timed.
    """
    if not policy.latency.observed:
        policy.latency.largest_tokens = 10_000
    search = policy.next(outcome)
    plan: StepPlan | Rest = Rest(0, True)
    if not isinstance(search, Rest):
        plan = policy.choose(search, None if find is None else find(*search))
    policy.flush()
    if isinstance(plan, Rest):
        return StepPlan.nothing(len(outcome.slots))
    return plan
