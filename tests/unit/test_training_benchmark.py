"""What `benchmarks/training.py` makes of its arms' rewards."""

from __future__ import annotations

import pytest
import training


def figures(reward: list[float], hashes: str) -> dict[str, list]:
    return {"reward": reward, "token_hash": list(hashes)}


def test_arms_are_compared_step_by_step_and_epoch_by_epoch() -> None:
    off = figures([0.1, 0.3, 0.5, 0.7], "abcd")
    arms = {"off": off, "history": figures([0.1, 0.3, 0.5, 0.7], "abcd"), "seed": figures([0.3, 0.3, 0.5, 0.3], "abxy")}
    found = training.compare(arms, epoch=2)
    assert found["history"]["steps_with_same_reward"] == found["history"]["steps_with_same_tokens"] == 4
    assert found["history"]["epochs_apart_rms"] == 0.0
    assert found["seed"]["steps_with_same_reward"] == found["seed"]["steps_with_same_tokens"] == 2
    assert found["seed"]["reward_by_quarter"] == [0.3, 0.3, 0.5, 0.3]
    assert found["seed"]["epochs_apart_rms"] == pytest.approx(((0.1**2 + 0.2**2) / 2) ** 0.5)
