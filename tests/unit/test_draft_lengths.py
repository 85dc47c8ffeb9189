"""The draft length of the next steps on vLLM's V2 runner: a rollout that lost is followed by silence."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")
from das_adapter.config import parse
from das_adapter.core.stock import TRIAL_STEPS
from das_adapter.protocol.messages import Refresh
from das_adapter.protocol.metrics import Counters

DRAFTED, PLAIN_S = 3, 0.01
IDS = [f"request {i}" for i in range(4)]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`engine.v2.lengths`, which a vLLM without that runner can import but for one class that it does not need."""
    manager = SimpleNamespace(AdaptiveVerificationManager=object)
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu.spec_decode.adaptive_verification", manager)
    yield importlib.import_module("das_adapter.engine.v2.lengths")
    for name in ("lengths", "admission"):
        sys.modules.pop(f"das_adapter.engine.v2.{name}", None)


class Offer:
    """Three tokens for each request, at hand at once."""

    arrived = True

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        return np.full(len(IDS), DRAFTED), np.full((len(IDS), DRAFTED), 0.5, dtype=np.float32)

    def modelled(self, _: Any) -> set[str]:
        return set()


class Engine:
    """Takes ten milliseconds for a step, and what the test says for one with drafts, of which one is accepted."""

    def __init__(self, module: Any) -> None:
        self._module = module
        model = SimpleNamespace(max_model_len=4096, get_vocab_size=lambda: 100, enforce_eager=True, quantization=None)
        config = parse({"drafter": "history"})
        assert config is not None
        vllm_config = SimpleNamespace(model_config=model, compilation_config=SimpleNamespace(cudagraph_mode=None))
        self.lengths = module.DraftLengths(config, vllm_config, Counters())
        self.wanting, self.now, self._rollouts = False, 0.0, 0
        stock = self.lengths.controller.plan

        def plan(*args: Any) -> Any:
            found = stock(*args)
            return SimpleNamespace(history=np.full(len(found.history), DRAFTED * self.wanting), model=found.model)

        self.lengths.controller.plan = plan

    def rollout(self, steps: int, drafted_s: float, silent_steps: int = 0) -> list[bool]:
        """Return which steps carried drafts; none is wanted in the first few."""
        self._rollouts += 1
        ids = [f"{req_id} of {self._rollouts}" for req_id in IDS]
        carried, wanted = [], 0
        for number in range(steps):
            self.wanting = number >= silent_steps
            begun = (
                [self._module.Begun(req_id, i, 8, 4000, 8, True) for i, req_id in enumerate(ids)] if number == 0 else []
            )
            drafts = DRAFTED if wanted else 0
            offer = Offer() if wanted or self.wanting else None
            scheduled, drafted = (dict.fromkeys(ids, count) for count in (1 + drafts, drafts))
            step = self._module.Step(
                begun, frozenset(), False, scheduled, drafted, number > 0, self.now, offer, req_ids=ids
            )
            self.now += drafted_s if drafts else PLAIN_S
            carried.append(bool(drafts))
            wanted = self.lengths.output(step, [[1] * (2 if drafts else 1)] * len(ids), self.now)
        return carried

    def sync(self) -> str | None:
        silent: str | None = self.lengths.stats()["silent"]
        self.lengths.refresh(Refresh(version=self._rollouts))
        return silent


def test_a_rollout_that_lost_is_followed_by_silence_until_a_trial_gains(module: Any) -> None:
    engine = Engine(module)
    first = engine.rollout(160, drafted_s=4 * PLAIN_S, silent_steps=40)
    assert engine.sync() is None and sum(first) > 100
    assert "drafting lost a whole rollout" in engine.lengths.stats()["silent"]
    gaining = engine.rollout(6 * TRIAL_STEPS, drafted_s=1.1 * PLAIN_S)
    assert not any(gaining[:TRIAL_STEPS]) and all(gaining[2 * TRIAL_STEPS :])
    assert engine.sync() is None
