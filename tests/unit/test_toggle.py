"""The on/off switch, the draft-length ladder and the count of time saved."""

from __future__ import annotations

import numpy as np
import pytest

from das_adapter.core.latency import StepModel
from das_adapter.core.toggle import Ladder, Savings, Toggle, seconds_of


def run(toggle: Toggle, *steps: tuple[int, float, bool]) -> list[bool]:
    return [toggle.update(*step) for step in steps]


def test_always_never_switches() -> None:
    toggle = Toggle("always")
    assert run(toggle, (500, 0.1, True), (1, 0.1, False)) == [True, True]


def test_it_turns_on_at_the_margin_and_off_below_one_while_batches_refill() -> None:
    toggle = Toggle("auto")
    refilling = [(8, s, True) for s in (1.04, 1.05, 1.01, 0.99, 1.04, 1.2)]
    assert run(toggle, *refilling) == [False, True, True, False, False, True]


def test_a_batch_that_only_drains_stays_on_once_it_paid() -> None:
    toggle = Toggle("auto")
    run(toggle, *[(64, 1.2, False)] * (Toggle.RAMP + 1))
    assert run(toggle, (60, 0.9, False), (59, 0.5, False)) == [True, True]
    toggle.reset()
    assert run(toggle, (59, 0.9, False)) == [False]


def test_a_ramp_of_arrivals_does_not_hold_it_on() -> None:
    toggle = Toggle("auto")
    assert run(toggle, *((n, 1.5, True) for n in range(1, 8))) == [True] * 7  # few are running yet
    assert run(toggle, *((n, 0.8, True) for n in range(8, 64))) == [False] * 56


def test_a_number_counts_running_requests_with_hysteresis() -> None:
    toggle = Toggle(32)
    assert run(toggle, *((n, 0.0, True) for n in (33, 32, 40, 41, 33))) == [False, True, True, False, False]


def test_the_ladder_needs_two_rollouts_in_a_row_and_ignores_validation() -> None:
    ladder = Ladder((3, 5, 7))
    assert [ladder.observe(95, 100), ladder.observe(95, 100)] == [3, 5]
    assert [ladder.observe(95, 100), ladder.observe(90, 100), ladder.observe(95, 100)] == [5, 5, 5]
    assert ladder.observe(99, 100, validation=True) == 5
    assert ladder.observe(0, 0) == 5
    assert ladder.observe(94, 100) == 7  # the second in a row: what lies between counts nothing
    assert [ladder.observe(100, 100) for _ in range(3)] == [7, 7, 7]
    assert [ladder.observe(85, 100) for _ in range(6)] == [7, 5, 5, 3, 3, 3]


def test_plain_seconds_are_those_of_a_round_by_round_replay() -> None:
    model = StepModel(base=1.0, token=0.1)
    lengths = [3, 7, 7, 20]
    replay = sum(model.step(n, n, False) for n in (sum(x >= r for x in lengths) for r in range(1, 21)))
    assert seconds_of(lengths, 4, model.plain) == pytest.approx(replay)
    assert seconds_of([], 4, model.plain) == 0.0
    assert seconds_of([10, 10, 10, 10], 2, model.plain) == pytest.approx(2 * 10 * model.step(2, 2, False))


def test_a_synchronous_rollout_is_credited_for_the_rounds_it_did_not_need() -> None:
    model = StepModel(base=1.0, token=0.1)
    savings = Savings()
    for _ in range(5):  # two requests, 2 and 4 tokens a step
        savings.step(1.5, 2, 6, True, model)
    savings.finished.append(10)
    plain = 10 * 1.2 + 10 * 1.1
    assert savings.saved(np.array([20]), model) == pytest.approx(plain - 5 * 1.5)


def test_a_pause_of_the_machine_in_a_plain_step_is_nobodys_loss() -> None:
    model = StepModel(base=1.0, token=0.1)
    savings = Savings()
    for pause in (0.0, 7.0):
        savings.step(1.2 + pause, 2, 2, False, model)
    assert savings.saved(np.array([2, 2]), model) == pytest.approx(0.0)


def test_a_refilled_batch_is_credited_by_its_rate() -> None:
    model = StepModel(base=1.0, token=0.1)
    savings = Savings()
    savings.refilled()
    for _ in range(5):
        savings.step(1.5, 2, 6, True, model)
    assert savings.saved(np.array([20, 10]), model) == pytest.approx(5 * (3 * 1.2 - 1.5))
