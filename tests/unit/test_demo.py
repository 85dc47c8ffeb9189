"""What the demo makes of its arms' figures."""

from __future__ import annotations

import io
import json
from pathlib import Path

import demo
import pytest
from rich.console import Console

from das_adapter.protocol.metrics import Counters, RolloutClock
from das_adapter.protocol.metrics import figures as reported


def figures(rollout_s: list[float], token_hash: str = "abcabcabc") -> dict[str, list]:
    steps = len(rollout_s)
    return {
        "rollout_s": rollout_s,
        "token_hash": list(token_hash),
        "reward": [0.5] * steps,
        "of_stock": [None, *[1.0] * (steps - 1)],
    }


def test_an_arm_is_compared_by_epoch_and_over_the_last_third():
    off = figures([4.0, 1.0, 1.0] * 3)
    arm = figures([4.0, 1.0, 1.0, 2.0, 1.0, 0.0, 1.0, 0.5, 0.0], token_hash="abcabcabx")
    (against,) = demo.compare({"off": off, "arm": arm}, epochs=3).values()
    assert against["rollout_ratio_by_epoch"] == [1.0, 0.5, 0.25]
    assert against["rollout_ratio_last_third"] == 0.25
    assert against["rollout_ratio"] == pytest.approx(10.5 / 18)
    assert against["steps_with_same_tokens"] == 8


def test_the_outcome_is_said_as_a_speed_up():
    off = figures([2.0] * 9)
    arm = figures([2.0] * 6 + [1.0, 1.25, 0.75])
    (against,) = demo.compare({"off": off, "arm": arm}, epochs=9).values()
    assert demo.outcome(against, epochs=9, steps=9) == (
        "the same tokens in 9 of 9 steps; rollouts 2.0x as fast as off over the last"
        " third (1.6x to 2.7x by epoch)"
    )


def test_what_das_says_of_stock_is_held_against_what_was_measured():
    off = figures([2.0] * 3)
    arm = figures([2.0, 1.9, 1.0])
    (against,) = demo.compare({"off": off, "arm": arm}, epochs=3).values()
    shares = against["claimed_of_measured"]
    assert shares == [None, pytest.approx(2 / 1.9), 2.0]


def test_with_little_memory_runs_follow_each_other_and_it_is_said():
    arms = ["off", "history"]
    for available_gb, at_once, said in (
        (16.0, [arms], []),
        (10.0, [["off"], ["history"]], ["10 GB", "about 15 GB", "one after the other"]),
        (4.0, [["off"], ["history"]], ["4 GB", "Warning: one run takes about 7.5 GB"]),
    ):
        console = Console(file=io.StringIO(), width=1000)
        assert demo.arms_at_once(arms, available_gb, console) == at_once
        text = console.file.getvalue()
        assert bool(text) == bool(said)
        assert all(part in text for part in said)
        assert ("Warning" in text) == (available_gb < 7.5)


def test_without_the_arm_off_there_is_nothing_to_compare_with():
    assert demo.compare({"history": figures([1.0] * 9)}, epochs=3) == {}


def test_an_arm_names_the_model_runner_that_its_engines_report(tmp_path: Path):
    report = {
        **Counters().read_and_reset(),
        **RolloutClock().read_and_reset(),
        "model_runner": 2,
    }
    arm = object.__new__(demo.Arm)
    arm.metrics = tmp_path / "arm.jsonl"
    arm.metrics.write_text(json.dumps({"step": 1, "data": reported([report])}) + "\n")
    assert arm.runner() == "V2"


def test_tokens_per_forward_of_an_epoch_weigh_a_step_by_its_passes():
    arm = {
        "response_length_mean": [100.0, 10.0, 10.0],
        "tokens_per_forward": [1.0, 10.0, 10.0],
    }
    assert demo.tokens_per_forward(arm, epochs=1) == [pytest.approx(120 / 102)]


def test_without_strict_products_nothing_else_of_the_environment_changes(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    strict = demo.environment_of(False)
    loose = demo.environment_of(True)
    assert strict.pop("MKL_CBWR") == "AUTO,STRICT"
    assert strict == loose
