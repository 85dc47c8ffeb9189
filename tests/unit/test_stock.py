"""Whole rollouts beside steps in which no drafter is asked: on a modelled engine."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from das_adapter.config import ToggleConfig
from das_adapter.core.latency import StepModel
from das_adapter.core.stock import LEAST_STEPS, TRIAL_STEPS, StockGuard, UnaskedStep

PLAIN = StepModel(base=0.010, token=0.0001)


def rollout(
    guard: StockGuard, asking: float, pace: float = 1.0, requests: int = 8, tokens: int = 256, noise: float = 0.0
) -> tuple[float, int]:
    """Decode equally long requests; a step in which the drafter is asked takes `asking` times a plain one's time, and
    brings `pace` tokens from the second such step on. Return the seconds and the steps in which nobody was asked."""
    rng = np.random.default_rng(tokens)
    written, seconds, unasked, drafted = 0.0, 0.0, 0, False
    slots = np.arange(requests)
    while written < tokens:
        plain = PLAIN.step(requests, requests, False) * (1.0 + noise * rng.standard_normal())
        asked = guard.ask(requests, drafted)
        took = plain * asking if asked or drafted else plain
        got = int(pace) if drafted else 1
        if asked:
            guard.asked(slots, np.full(requests, got), took, drafted, None)
        elif not drafted:
            guard.unasked(UnaskedStep(requests, took))
        unasked += not asked
        written, seconds, drafted = written + got, seconds + took, asked and pace > 1
    for slot in slots.tolist():
        guard.close(slot)
    return seconds, unasked


def test_a_rollout_that_lost_is_followed_by_one_without_drafts() -> None:
    guard = StockGuard()
    assert rollout(guard, asking=1.08)[1] > 8  # some steps show what it takes without asking
    assert guard.of_stock() == pytest.approx(1.08, abs=0.01)
    news = guard.sync()
    assert news == guard.silent
    assert "drafting lost a whole rollout" in (news or "")
    seconds, unasked = rollout(guard, asking=1.08)
    assert unasked > 180
    assert seconds < 1.02 * 256 * PLAIN.step(8, 8, False)
    assert guard.sync() is None  # nothing new
    assert guard.silent is not None


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
def test_a_rollout_that_costs_what_stock_costs_has_not_lost(noise: float) -> None:
    guard = StockGuard()
    for tokens in range(200, 600, 20):
        rollout(guard, asking=1.0, tokens=tokens, noise=noise)
        assert guard.sync() is None


def test_a_rollout_that_gains_goes_on_drafting_and_is_rarely_sampled() -> None:
    guard = StockGuard()
    rollout(guard, asking=1.0)  # without drafts
    guard.sync()
    unasked = rollout(guard, asking=1.3, pace=4, tokens=1000)[1]
    assert unasked <= 1
    assert guard.of_stock() == pytest.approx(1.3 / 4, abs=0.03)
    assert guard.sync() is None


def test_a_trial_that_gains_time_ends_the_silence() -> None:
    guard = StockGuard()
    rollout(guard, asking=1.08)
    guard.sync()
    assert guard.silent
    seconds, unasked = rollout(guard, asking=1.3, pace=4, tokens=1000)  # the problems have come back
    assert not guard.silent
    assert unasked <= TRIAL_STEPS + 2
    assert seconds < 0.4 * 1000 * PLAIN.step(8, 8, False)


def test_a_batch_half_as_large_is_tried_soon() -> None:
    guard = StockGuard()
    rollout(guard, asking=1.08)
    guard.sync()
    assert not any(guard.ask(64, False) for _ in range(TRIAL_STEPS - 1))
    assert guard.ask(64, False)
    for _ in range(TRIAL_STEPS + 1):
        guard.asked(np.arange(64), np.ones(64, dtype=int), 0.02, False, None)
    assert guard.idle
    assert not any(guard.ask(40, False) for _ in range(TRIAL_STEPS))
    assert guard.ask(32, False)


def test_what_a_pause_of_the_machine_takes_is_nobodys_loss() -> None:
    guard = StockGuard()
    rollout(guard, asking=1.0)
    slots, one = np.arange(8), np.ones(8, dtype=int)
    guard.asked(slots, one, 9.0, False, PLAIN.step(8, 8, False))
    assert guard.sync() is None


def test_a_few_steps_are_held_against_nobody() -> None:
    guard = StockGuard()
    rollout(guard, asking=1.5, tokens=LEAST_STEPS // 2)
    assert guard.compare() is None
    assert guard.sync() is None


def test_a_synchronous_rollout_is_credited_with_the_rounds_of_its_longest_request() -> None:
    guard = StockGuard()
    rollout(guard, asking=1.0)
    guard.sync()
    slots, got = np.arange(8), np.ones(8, dtype=int)
    got[0] = 8  # the longest alone is drafted for, and ends with the others
    for _ in range(100):
        guard.asked(slots, got, 0.02, True, None)
    compared = guard.compare()
    assert compared is not None
    assert compared.plain == pytest.approx(100 * PLAIN.step(8, 8, False) + 700 * PLAIN.step(1, 1, False), rel=0.1)


def test_stock_is_what_a_calibration_says(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps({"line": PLAIN.to_dict(), "stock": {"line": {"base": 0.008, "token": 0.0}}}))
    guard = StockGuard.of(ToggleConfig(calibration=str(file)))
    assert guard is not None
    rollout(guard, asking=1.0)
    assert guard.of_stock() == pytest.approx(PLAIN.step(8, 8, False) / 0.008, abs=0.01)
    assert guard.sync() is None  # it is the engine that is slow, not its drafts
    assert guard.slow == "decode steps took 1.35 of those of the calibration's stock engine"
    rollout(guard, asking=1.3, pace=4)
    guard.sync()
    assert guard.slow is None


@pytest.mark.parametrize("mode", ["off", "threshold"])
def test_the_user_decides_with_other_toggles(mode: str) -> None:
    assert StockGuard.of(ToggleConfig(mode=mode)) is None
