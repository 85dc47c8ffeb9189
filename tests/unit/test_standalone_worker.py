"""A worker of an engine without a host: what it does when it seals texts, and what at a
weight sync.
"""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm import SamplingParams

from das_adapter.config import parse
from das_adapter.core import tuning
from das_adapter.engine.requests import LiveRequest
from das_adapter.engine.settings import history_name
from das_adapter.engine.v1.worker import HostWorkerState
from das_adapter.engine.worker import WorkerState
from das_adapter.protocol.engine_args import RUN_KEY, SETTINGS_KEY
from das_adapter.protocol.messages import Refresh, Refreshed


class Writer(WorkerState):
    """A worker whose requests have ended with these texts behind a prompt of three
    tokens.
    """

    def __init__(self, texts: dict[str, list[int]], **params: Any) -> None:
        super().__init__(
            None, parse({"drafter": "eagle3", "draft": {"model": "a head"}}), None
        )
        self.texts = texts
        self.params = SamplingParams(max_tokens=6, stop_token_ids=[9], **params)
        self.lengths: list[int] = []

    def response(self, req_id: str) -> LiveRequest:
        told = SimpleNamespace(prompt_token_ids=[1, 2, 3], sampling_params=self.params)
        return replace(LiveRequest.of(req_id, told, 100), text=self.texts[req_id])

    def refresh(self, message: Refresh) -> Refreshed:
        self.lengths += message.responses["tokens"].tolist()
        return super().refresh(message)

    def learnt(self) -> list[int]:
        """What lengths the engine learns at a weight sync."""
        self.stand_alone(None, "no history")
        self.standalone.weights_changed()
        self.begin_standalone(
            SimpleNamespace(
                finished_req_ids=sorted(self.texts), total_num_scheduled_tokens=1
            )
        )
        return self.lengths


class Worker(WorkerState):
    """A worker whose requests have ended with ten tokens each."""

    def response(self, req_id: str) -> Any:
        return SimpleNamespace(text=[0] * 10, record=False, is_of_tokens=True)


@pytest.fixture(autouse=True)
def first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "vllm.distributed.get_tp_group", lambda: SimpleNamespace(rank_in_group=0)
    )


def test_no_length_is_learnt_from_a_response_that_was_aborted() -> None:
    texts = {
        "aborted": [4, 5],
        "stopped": [4, 9],
        "drafted beyond": [4, 9, 5, 5],
        "full": [4] * 6,
    }
    assert Writer(texts).learnt() == [4, 6, 2]
    strings = {"stop": ["."], "detokenize": True}
    assert Writer({"stopped by the front end": [4, 5]}, **strings).learnt() == [2]


def test_weights_that_a_trainer_did_not_send_are_missed_at_a_weight_sync_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "MAX_LIVE_TOKENS", 5)
    state = Worker(
        None,
        parse(
            {"drafter": "eagle3", "draft": {"model": "a head", "weights": "trainer"}}
        ),
        None,
    )
    state.stand_alone(None, "no history")
    step = SimpleNamespace(finished_req_ids={"a"}, total_num_scheduled_tokens=1)
    state.begin_standalone(step)
    assert state.standalone is not None and state.counters.alarm is None
    state.standalone.weights_changed()
    for _ in range(2):  # the second step seals the text of the first
        state.begin_standalone(step)
        assert "brought no weight of the drafter" in str(state.counters.alarm)


def test_a_weight_sync_is_no_part_of_the_step_that_follows() -> None:
    class Synced(HostWorkerState):
        at = 0.0

        def refresh(self, message: Refresh) -> Refreshed:
            self.at = time.perf_counter()
            return super().refresh(message)

    state = Synced(SimpleNamespace(), parse({"drafter": "ngram"}))
    state.stand_alone(None, "no history")
    state.standalone.weights_changed()
    state.begin_step(
        SimpleNamespace(finished_req_ids=set(), total_num_scheduled_tokens=1)
    )
    assert 0.0 < state.at < state.began


def test_a_sync_that_fails_is_made_up_for_by_the_next() -> None:
    class Failing(Worker):
        refreshed = 0

        def refresh(self, message: Refresh) -> Refreshed:
            self.refreshed += 1
            if self.refreshed == 1:
                raise RuntimeError("out of memory")
            self.counters.error = None
            return super().refresh(message)

    state = Failing(None, parse({"drafter": "ngram"}), None)
    state.stand_alone(None, "no history")
    step = SimpleNamespace(finished_req_ids=set(), total_num_scheduled_tokens=1)
    for error in ("RuntimeError('out of memory')", None):
        assert state.call("refresh", {}) == {}
        state.begin_standalone(step)
        assert (state.counters.error, state.standalone is not None) == (error, True)
    assert state.refreshed == 2


def test_a_history_that_all_problems_share_lies_apart() -> None:
    names = {}
    for scope in ("problem", "trusted", "global"):
        block = {"history": {"scope": scope}}
        names[scope] = history_name(
            SimpleNamespace(additional_config={RUN_KEY: "run", SETTINGS_KEY: block})
        )
    assert names["problem"] == names["trusted"] != names["global"]


@pytest.mark.parametrize(
    ("tokens", "embeddings", "kept"),
    [([1, 2, 3], None, True), (None, [0.0] * 3, False), ([1, 2, 3], [0.0] * 3, False)],
)
def test_the_response_to_embeddings_is_no_text_of_the_history(
    tokens: Any, embeddings: Any, kept: bool
) -> None:
    """Nobody can draft from it, on either runner."""

    class Embedded(Writer):
        def response(self, req_id: str) -> LiveRequest:
            told = SimpleNamespace(
                prompt_token_ids=tokens,
                prompt_embeds=embeddings,
                sampling_params=self.params,
            )
            return replace(LiveRequest.of(req_id, told, 100), text=self.texts[req_id])

    worker = Embedded({"stopped": [4, 9]})
    assert worker.learnt() == ([2] if kept else [])
