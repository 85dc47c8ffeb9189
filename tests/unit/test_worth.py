"""What an accepted token is worth: no more than a plain round saves."""

from __future__ import annotations

import numpy as np
import pytest

from das_adapter.core.latency import StepModel
from das_adapter.core.worth import token_worth

STEEP = StepModel(base=0.008, token=0.0, bend=0.001, knee=24)
"""Tokens are free up to 24, and dear beyond."""


def worth_of(requests: int, load: float, model: StepModel = STEEP) -> np.ndarray:
    """Return the worth of a token of each of some requests that are alike."""
    alike = np.full(requests, 1.0 / requests)
    return token_worth(
        last=alike,
        pace=np.full(requests, 2.0),
        load=np.full(requests, load),
        request_s=np.zeros(requests),
        model=model,
        drafting_s=0.0,
    )


@pytest.mark.parametrize("load", [0.0, 4.0, 15.0])
def test_rounds_that_drafts_made_dear_are_worth_no_more_than_plain_ones(
    load: float,
) -> None:
    """A token does not seem worth more because the last drafts cost much."""
    assert worth_of(8, load).sum() <= STEEP.plain_step(8) * (1.0 + 1e-9)
    with_price = StepModel(base=0.008, token=0.0, draft=0.12)
    assert worth_of(8, load, with_price).sum() <= 0.008 * (1.0 + 1e-9)


@pytest.mark.parametrize("requests", [24, 25, 32])
def test_all_tokens_together_save_one_plain_round_also_where_times_bend(
    requests: int,
) -> None:
    total = worth_of(requests, 0.0).sum()
    assert total == pytest.approx(STEEP.plain_step(requests), rel=0.05)


def test_a_request_whose_drafts_are_rejected_is_worth_no_more_than_a_plain_token() -> (
    None
):
    """Also where the others leave room up to a plain round."""
    model = StepModel(base=0.01, token=0.001)
    last = np.array([0.0, 0.0, 0.5, 0.5])
    one = np.ones(4)

    def worth(load: np.ndarray) -> np.ndarray:
        return token_worth(last, one, load, np.zeros(4), model, drafting_s=0.0)

    plain_s = worth(np.zeros(4))
    drafted_s = worth(np.array([0.0, 8.0, 0.0, 8.0]))
    assert (drafted_s <= plain_s * (1 + 1e-9)).all()
