"""Whole rollouts beside steps in which no drafter is asked: on a modelled engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from das_adapter.config import DasConfig
from das_adapter.core.latency import StepModel
from das_adapter.core.stock import LEAST_STEPS, TRIAL_SHARE, TRIAL_STEPS, StockGuard, UnaskedStep

PLAIN = StepModel(base=0.010, token=0.0001)


def rollout(
    guard: StockGuard,
    asking: float,
    pace: float = 1.0,
    requests: int = 8,
    tokens: int = 256,
    noise: float = 0.0,
    read: float = 0.0,
) -> tuple[float, int]:
    """Decode equally long requests; a step in which the drafter is asked takes `asking` times a plain one's time, and
    brings `pace` tokens from the second such step on. `read`: seconds of a token of context. Return the seconds and the
    steps in which nobody was asked."""
    rng = np.random.default_rng(tokens)
    written, seconds, unasked, drafted = 0.0, 0.0, 0, False
    slots = np.arange(requests)
    while written < tokens:
        context = int(requests * written)
        plain = PLAIN.step(requests, requests, False) * (1.0 + noise * rng.standard_normal()) + read * context
        asked = guard.ask(requests, drafted)
        took = plain * asking if asked or drafted else plain
        got = int(pace) if drafted else 1
        if asked:
            guard.asked(slots, np.full(requests, got), took, drafted, None, context)
        elif not drafted:
            guard.unasked(UnaskedStep(requests, took, context))
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


def test_a_drafter_that_loses_is_asked_again_after_more_and_more_rollouts() -> None:
    guard, silent = StockGuard(), ""
    for _ in range(40):
        silent += "s" if guard.silent else "-"
        rollout(guard, asking=1.08)
        guard.sync()
        assert guard.sync() is None  # nothing lies between them
    assert silent.startswith("-s-ss-ssss-ssssssss-" + 16 * "s" + "-")
    while guard.silent:
        rollout(guard, asking=1.08)
        guard.sync()
    rollout(guard, asking=1.3, pace=4)
    assert guard.sync() is None
    rollout(guard, asking=1.08)
    assert guard.sync()
    rollout(guard, asking=1.08)
    guard.sync()
    assert guard.silent is None  # after one: the drafter had been worth its time


def test_what_a_drafter_takes_beside_prompts_counts() -> None:
    guard = StockGuard()
    seconds = rollout(guard, asking=1.0)[0]
    guard.beside(0.01 * seconds)
    assert guard.sync() is None
    guard.beside(0.06 * rollout(guard, asking=1.0)[0])
    assert guard.sync()


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
def test_a_rollout_that_costs_what_stock_costs_has_not_lost(noise: float) -> None:
    guard = StockGuard()
    for tokens in range(200, 600, 20):
        rollout(guard, asking=1.0, tokens=tokens, noise=noise)
        assert guard.sync() is None


def test_a_rollout_that_gains_goes_on_drafting_and_is_rarely_sampled() -> None:
    guard = StockGuard()
    rollout(guard, asking=1.0)  # without drafts
    assert type(guard.take()["of_stock"]) is float
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


def silent_guard(requests: int) -> StockGuard:
    """A guard that has lost a rollout, and then a trial of so many requests."""
    guard = StockGuard()
    rollout(guard, asking=1.08, requests=requests)
    guard.sync()
    assert not any(guard.ask(requests, False) for _ in range(TRIAL_STEPS - 1))
    assert guard.ask(requests, False)
    for _ in range(TRIAL_STEPS + 1):
        guard.asked(np.arange(requests), np.ones(requests, dtype=int), 0.02, False, None)
    assert guard.idle
    return guard


def steps_until_asked(guard: StockGuard, requests: int) -> int:
    """Take steps of 0.02 s without drafts until the drafter is asked, and return how many."""
    for step in range(10_000):
        if guard.ask(requests, False):
            return step
        guard.unasked(UnaskedStep(requests, 0.02))
    return 10_000


def test_what_trials_lose_is_a_hundredth_of_the_time() -> None:
    lost = (TRIAL_STEPS + 1) * (0.02 - PLAIN.step(64, 64, False))
    steps = steps_until_asked(silent_guard(64), 64)
    assert 0.02 * (steps + TRIAL_STEPS + 1) == pytest.approx(lost / TRIAL_SHARE, rel=0.1)


def test_a_batch_half_as_large_is_tried_sooner() -> None:
    half, more = (steps_until_asked(silent_guard(64), requests) for requests in (32, 40))
    assert half == pytest.approx(more / 2, rel=0.1)


@pytest.mark.parametrize("asking", [1.0, 1.15])
def test_reading_a_long_context_is_no_loss_of_the_drafter(asking: float) -> None:
    guard = StockGuard()
    rollout(guard, asking, tokens=200, read=1e-6)  # most samples are of short texts
    guard.sync()
    guard.silent = None
    rollout(guard, asking, pace=1.0 if asking == 1.0 else 1.1, tokens=4000, read=1e-6)
    assert bool(guard.sync()) == (asking > 1.0)


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
    guard = StockGuard.of(DasConfig(calibration=str(file)))
    assert guard is not None
    rollout(guard, asking=1.0)
    assert guard.of_stock() == pytest.approx(PLAIN.step(8, 8, False) / 0.008, abs=0.01)
    assert guard.sync() is None  # it is the engine that is slow, not its drafts
    assert guard.slow == "decode steps took 1.35 of those of the calibration's stock engine"
    rollout(guard, asking=1.3, pace=4)
    guard.sync()
    assert guard.slow is None


@pytest.mark.parametrize("speculate", ["always", 32])
def test_the_user_decides_where_the_block_says_when(speculate: Any) -> None:
    assert StockGuard.of(DasConfig(speculate=speculate)) is None
