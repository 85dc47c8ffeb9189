"""A history beside a drafting model on a modelled engine: together they are at least as
fast as the better alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from modelled import EngineV1, Text

from das_adapter.config import DasConfig
from das_adapter.core.latency import StepModel
from das_adapter.core.length import RESPONSE
from das_adapter.core.model_drafts import ModelDrafts
from das_adapter.core.policy import DraftPolicy

MEMORY_BOUND = StepModel(base=0.03, token=0.0, bend=0.0004, knee=32)
COMPUTE_BOUND = StepModel(base=0.034, token=0.0, bend=0.00135, knee=4)
PASS = StepModel(base=0.002, token=0.00002)


class Covered(Text):
    """A text of which a history has some stretches of 20 tokens."""

    def __init__(self, *drawn: Any, found: np.ndarray) -> None:
        """`found`: whether the history has each token, bool [n]."""
        super().__init__(*drawn, unknown=0.0)
        self.blind = 0
        self._found = found

    def draft(self) -> np.ndarray:
        return super().draft() if self._found[self.at] else self.told[:0]


def rollout(
    policy: DraftPolicy,
    lengths: np.ndarray,
    truth: StepModel,
    chance: float,
    coverage: float,
    seed: int,
    rate: float = 0.6,
    of_pass: StepModel = PASS,
) -> float:
    """Seconds of a rollout; in `coverage` of the stretches of 20 tokens the history has
    drafts, whose tokens survive with `chance`, a model's with `rate`. Coverage 0: there
    is no history.
    """
    rng = np.random.default_rng(seed)
    texts = []
    for length in lengths.tolist():
        found = np.repeat(rng.random(length // 20 + 2) < coverage, 20)
        text = Covered(rng, length, (1.0 - chance,), found=found)
        text.model_right = rng.random(length + 40) < rate
        texts.append(text)
    engine = EngineV1(policy, truth, longest=int(lengths.max()), one_pass=of_pass)
    return engine.rollout(0, texts, sync=False)


def second(
    lengths: np.ndarray,
    truth: StepModel,
    chance: float,
    coverage: float,
    with_model: bool,
) -> float:
    """Seconds of the second of two rollouts."""
    drafts = ModelDrafts(5, narrows=False) if with_model else None
    policy = DraftPolicy(DasConfig(), longest_response=2048, drafts=drafts)
    for version in (1, 2):
        seconds = rollout(policy, lengths, truth, chance, coverage, version)
        policy.weight_sync(
            np.array([(i, int(n), version) for i, n in enumerate(lengths)], RESPONSE)
        )
    return seconds


@pytest.mark.parametrize("truth", [MEMORY_BOUND, COMPUTE_BOUND])
@pytest.mark.parametrize(("chance", "coverage"), [(0.9, 0.6), (0.6, 0.3)])
@pytest.mark.parametrize("batch", [1, 8, 32])
def test_two_sources_are_at_least_as_fast_as_the_better(
    truth: StepModel, chance: float, coverage: float, batch: int
) -> None:
    lengths = np.clip(
        np.random.default_rng(batch).lognormal(5.3, 0.45, batch), 64, 500
    ).astype(int)
    both = second(lengths, truth, chance, coverage, True)
    alone = (
        second(lengths, truth, chance, coverage, False),
        second(lengths, truth, chance, 0.0, True),
    )
    assert both <= 1.02 * min(alone)
    if batch == 1 or (truth is MEMORY_BOUND and batch == 8):
        assert both < 0.99 * min(alone)


def rollouts(
    count: int, lengths: np.ndarray, truth: StepModel, reading: float
) -> tuple[str, list[float]]:
    """Rollouts with a model that reads prompts for `reading` seconds, beside a history:
    in which of them it rests (s), and the seconds of each.
    """
    drafts = ModelDrafts(5, narrows=False)
    policy = DraftPolicy(DasConfig(), longest_response=2048, drafts=drafts)
    rests = ""
    seconds = list[float]()
    for version in range(count):
        rests += "s" if policy.model_rests else "-"
        read = 0.0 if policy.model_rests else reading
        policy.timed_drafting(read)
        seconds.append(read + rollout(policy, lengths, truth, 0.6, 0.3, version))
        policy.weight_sync(
            np.array([(i, int(n), version) for i, n in enumerate(lengths)], RESPONSE)
        )
        policy.weight_sync(np.zeros(0, RESPONSE))  # nothing lies between them
    return rests, seconds


def test_a_model_that_reads_prompts_for_longer_than_it_saves_rests_and_the_history_goes_on() -> (
    None
):
    lengths = np.full(32, 300)
    alone = second(lengths, COMPUTE_BOUND, 0.6, 0.3, False)
    rests, seconds = rollouts(9, lengths, COMPUTE_BOUND, 0.05 * alone)
    assert rests == "-s-ss-sss"
    assert seconds[-1] == pytest.approx(alone, rel=0.01)
    assert sum(seconds) < 1.02 * 9 * alone


def test_a_model_that_saves_more_than_its_prompts_take_never_rests() -> None:
    lengths = np.full(1, 300)
    alone = second(lengths, MEMORY_BOUND, 0.6, 0.3, False)
    assert rollouts(6, lengths, MEMORY_BOUND, 0.1 * alone)[0] == "------"
    assert rollouts(6, np.full(32, 300), COMPUTE_BOUND, 0.005 * alone)[0] == "------"
