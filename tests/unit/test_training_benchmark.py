"""What `benchmarks/training.py` makes of its arms' rewards."""

from __future__ import annotations

import pytest
import training


def figures(reward: list[float], hashes: str) -> dict[str, list]:
    return {"reward": reward, "token_hash": list(hashes)}


def test_arms_are_compared_step_by_step_and_epoch_by_epoch() -> None:
    off = figures([0.1, 0.3, 0.5, 0.7], "abcd")
    same = training.compare(off, figures([0.1, 0.3, 0.5, 0.7], "abcd"), epoch=2)
    assert same["steps_with_same_reward"] == same["steps_with_same_tokens"] == 4
    assert same["epochs_apart_rms"] == 0.0
    seeded = training.compare(off, figures([0.3, 0.3, 0.5, 0.3], "abxy"), epoch=2)
    assert seeded["steps_with_same_reward"] == seeded["steps_with_same_tokens"] == 2
    assert seeded["reward"] == pytest.approx(0.35)
    assert seeded["reward_by_quarter"] == [0.3, 0.3, 0.5, 0.3]
    assert seeded["epochs_apart_rms"] == pytest.approx(((0.1**2 + 0.2**2) / 2) ** 0.5)


def test_an_arm_of_fewer_steps_is_compared_with_the_first_ones() -> None:
    found = training.compare(
        figures([0.5, 0.5, 0.9, 0.9], "abcd"), figures([0.5, 0.3], "ax"), epoch=2
    )
    assert found["steps_with_same_tokens"] == 1
    assert found["epochs_apart_rms"] == pytest.approx(0.1)
