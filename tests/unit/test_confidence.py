"""How sure a model is of its draft tokens: the chances that are learned, what drafts
are going to bring, and the plans that follow.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from das_adapter.core.confidence import EVEN, KINDS, Confidence, Outlook
from das_adapter.core.latency import StepModel
from das_adapter.core.model_drafts import ModelDrafts
from das_adapter.core.planners import DraftCandidates, add_model_drafts
from das_adapter.core.steps import StepPlan

SURE = KINDS - 2
UNSURE = EVEN - 2


def test_a_token_of_greater_odds_is_taken_to_be_likelier_and_then_what_was_seen_counts() -> (
    None
):
    confidence = Confidence()
    assert (np.diff(confidence.chances) > 0).all()
    assert confidence.chances[EVEN - 1] < 0.5 < confidence.chances[EVEN]
    rng = np.random.default_rng(0)
    for _ in range(200):  # a drafter that is far surer than it is right
        kinds = rng.choice([UNSURE, SURE], (8, 4)).astype(np.uint8)
        right = rng.random(kinds.shape) < np.where(kinds == SURE, 0.6, 0.1)
        accepted = np.append(right, np.zeros((8, 1), bool), axis=1).argmin(axis=1)
        confidence.record_verified(kinds, np.minimum(4, accepted + 1), accepted)
    assert confidence.chances[[UNSURE, SURE]] == pytest.approx([0.1, 0.6], abs=0.05)
    before = confidence.chances
    confidence.forget()
    assert confidence.chances == pytest.approx(before)
    confidence.record_verified(
        np.full((40, 1), SURE, np.uint8), np.ones(40, int), np.ones(40, int)
    )
    assert confidence.chances[SURE] > 0.8  # a weight sync lets it change soon


@given(
    hnp.arrays(
        float,
        st.tuples(st.integers(1, 9), st.integers(1, 5)),
        elements=st.floats(0.01, 1.0),
    ),
    st.data(),
)
def test_the_outlook_counts_the_tokens_of_the_drafts_that_were_seen(
    chances: np.ndarray, data: st.DataObject
) -> None:
    survival = chances.cumprod(axis=1)
    levels = st.one_of(st.floats(0.0, 1.2), st.sampled_from(survival.ravel().tolist()))
    least = np.array(data.draw(st.lists(levels, min_size=1, max_size=4)))
    verified, accepted, longest = Outlook(survival).tokens_above(least)
    for row, some in enumerate(least):
        kept = survival >= some
        assert longest[row] == kept.sum(axis=1).max()
        for length in range(survival.shape[1] + 1):
            assert verified[row, length] == pytest.approx(
                kept[:, :length].sum() / len(survival)
            )
            assert accepted[row, length] == pytest.approx(
                (kept * survival)[:, :length].sum() / len(survival)
            )


def test_beyond_what_was_drafted_tokens_survive_as_in_longer_drafts_or_as_the_first() -> (
    None
):
    confidence = Confidence()
    assert confidence.outlook is None
    sure, even = confidence.chances[[SURE, EVEN]].tolist()
    for kinds, beyond in (
        ([SURE, EVEN], sure),
        ([SURE, EVEN, EVEN, EVEN], even),
        ([SURE, EVEN], even),
    ):
        for _ in range(100):  # long enough to forget what was before
            confidence.record_drafts(np.array([kinds] * 3, dtype=np.uint8), 4)
        expected = np.cumprod([sure, even, beyond, beyond])
        assert confidence.outlook.survival == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize("sure", [0, 3])
def test_the_outlook_is_that_of_all_requests_of_a_batch(sure: int) -> None:
    confidence = Confidence()
    kinds = np.full((64, 2), UNSURE, dtype=np.uint8)
    kinds[sure::8] = SURE
    for _ in range(64):
        confidence.record_drafts(kinds, 2)
    assert confidence.outlook.survival == pytest.approx(
        confidence.chances[kinds].cumprod(axis=1).mean(axis=0), rel=0.05
    )


def planned(
    kinds: list[list[int]], worth: list[float], model: StepModel, passes: float = 0.0
) -> StepPlan:
    """Plan for requests of such a worth, with a model whose last drafts were of these
    kinds.
    """
    drafts = ModelDrafts(len(kinds[0]), narrows=False)
    batch = len(worth)
    drafts.set_pass_prior(StepModel(base=passes, token=0.0))
    if kinds[0]:
        drafts.record_token_kinds(np.array(kinds, dtype=np.uint8))
    limits = np.full(batch, len(kinds[0]))
    nobody = np.zeros(batch + 1, dtype=np.int64)
    offer = DraftCandidates(limits, np.zeros(0, np.float32), nobody, drafts, 0.0, True)
    return add_model_drafts(offer, StepPlan.nothing(batch), np.array(worth), model)


def test_as_many_tokens_are_verified_as_are_worth_it_of_longer_drafts() -> None:
    """Half of the drafts end behind one token: those tokens alone are worth more than
    they cost.
    """
    plan = planned(
        [[SURE] * 4, [SURE, UNSURE, SURE, SURE]],
        [1.0] * 8,
        StepModel(base=10.0, token=0.5),
    )
    assert (plan.total, plan.longest) == (8 * (4 + 1) // 2, 4)
    assert (
        planned([[UNSURE] * 4], [1.0] * 8, StepModel(base=10.0, token=0.5)).total == 0
    )


def test_what_is_free_in_a_step_is_given_to_the_surest_tokens() -> None:
    """Tokens of a step cost nothing up to 14, and then nearly what the surest are
    worth.
    """
    free = StepModel(base=10.0, token=0.0, bend=0.9, knee=14.0)
    plan = planned([[SURE, UNSURE], [UNSURE, UNSURE]], [1.0] * 8, free)
    assert (plan.total, plan.longest) == (6, 1)
    assert (
        planned([[SURE, SURE]], [1.0] * 8, StepModel(base=10.0, token=0.0)).total == 16
    )
