"""`vllm serve` with `DAS_CONFIG`, driven over HTTP by a trainer that knows nothing of das-adapter."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")
sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "vllm"))
import stub_trainer
from serving import ARMS

pytestmark = pytest.mark.hosts

# Without the controller, whose decisions depend on how long steps take.
HISTORY = {"drafter": "history", "budget": "unlimited", "speculate": "always"}


def test_a_trainer_gets_the_same_tokens_and_the_history_follows_its_updates(tmp_path: Path) -> None:
    off, on = (stub_trainer.run(das, tmp_path / das["drafter"], steps=2) for das in (ARMS["off"], HISTORY))
    tokens = [rollout["tokens"] for rollout in off["rollouts"]]
    assert [rollout["tokens"] for rollout in on["rollouts"]] == tokens
    assert tokens[0] != tokens[1]
    first, second = on["metrics"]
    written = sum(len(text) for group in tokens[0] for text in group)
    assert first["das_history_tokens"] == 0
    assert second["das_history_tokens"] >= written
    assert second["das_history_hits"] == 1.0
    assert second["das_health"] == 1.0
