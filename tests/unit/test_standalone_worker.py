"""A worker of an engine without a host: what it does when it seals texts, and what at a weight sync."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from das_adapter.config import parse
from das_adapter.engine import alone
from das_adapter.engine.worker import WorkerState


class Worker(WorkerState):
    """A worker whose requests have ended with ten tokens each."""

    def response(self, req_id: str) -> Any:
        return SimpleNamespace(text=[0] * 10, record=False)


def test_weights_that_a_trainer_did_not_send_are_missed_at_a_weight_sync_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.distributed.get_tp_group", lambda: SimpleNamespace(rank_in_group=0))
    monkeypatch.setattr(alone, "MOST_LIVE_TOKENS", 5)
    state = Worker(None, parse({"drafter": "eagle3", "draft": {"model": "a head", "weights": "trainer"}}), None)
    state.stand_alone(None, "no history")
    step = SimpleNamespace(finished_req_ids={"a"}, total_num_scheduled_tokens=1)
    state.begin_standalone(step)
    assert state.standalone is not None and state.counters.alarm is None
    state.standalone.weights_changed()
    for _ in range(2):  # the second step seals the text of the first
        state.begin_standalone(step)
        assert "brought no weight of the drafter" in str(state.counters.alarm)
