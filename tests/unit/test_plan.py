"""A plan that is lost, or that is another step's, is found when the step begins."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from das_adapter.engine.plan import ATTRIBUTE, SILENCE, DraftPlan, plan_of
from das_adapter.errors import DasError


def scheduled(tokens: int, plan: DraftPlan | None) -> SimpleNamespace:
    step = SimpleNamespace(num_spec_tokens_to_schedule=tokens)
    if plan is not None:
        setattr(step, ATTRIBUTE, plan)
    return step


def test_the_plan_of_a_step_is_that_with_its_number_of_draft_tokens() -> None:
    plan = DraftPlan(4, budget=9, req_ids=["a", "b"], limits=np.array([4, 5]))
    assert plan_of(scheduled(4, plan)) is plan
    assert plan_of(scheduled(0, SILENCE)) is SILENCE


def test_a_plan_that_was_lost_is_named() -> None:
    with pytest.raises(DasError, match=r"was lost .* asks for 4 draft tokens"):
        plan_of(scheduled(4, None))


@pytest.mark.parametrize("tokens", [0, 3, 5])
def test_a_plan_of_another_step_is_named(tokens: int) -> None:
    with pytest.raises(DasError, match=rf"has 4 draft tokens.* asks for {tokens}"):
        plan_of(scheduled(tokens, DraftPlan(4)))


def test_a_plan_that_is_cut_is_the_same_but_for_its_number() -> None:
    plan = DraftPlan(4, 2, budget=9, req_ids=["a"])
    assert plan.at_most(8) is plan
    cut = plan.at_most(3)
    assert (cut.num_draft_tokens, cut.num_model_tokens, cut.budget) == (3, 2, 9)
