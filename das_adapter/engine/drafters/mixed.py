"""The drafter `history+self`: each request drafts from its history or from the copy of the policy, whichever is worth
more in this step."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from vllm.config import VllmConfig

from das_adapter.engine.drafters.history import HistoryProposer
from das_adapter.engine.drafters.policy_copy import SelfDrafter, StepClock


class MixedProposer(HistoryProposer):
    """The history's drafts, replaced by the copy's where those bring more."""

    NAME = "history+self"

    def __init__(self, vllm_config: VllmConfig):
        super().__init__(vllm_config)
        self.drafter = SelfDrafter(vllm_config, self.config.self.weights, self.config.keyed)
        self.clock = StepClock(self)
        self._copying = 0.0

    def load_model(self, policy: Any) -> None:
        self.drafter.load(policy)

    def refresh(self, version: int, draft_length: int | None = None, **news: Any) -> dict[str, Any]:
        return self.drafter.refresh(draft_length) | super().refresh(version, **news)

    def stats(self) -> dict[str, Any]:
        return super().stats() | self.drafter.stats()

    def _propose(self, sampled: list[list[int]], lengths: np.ndarray, tokens: np.ndarray) -> list[list[int]]:
        self.clock.begin(sampled)
        if self.carried is not None:  # what came of the copy's drafts says nothing of the history's
            req_ids = self.runner.input_batch.req_ids
            self.carried = [
                0 if req_id in self.drafter.drafted else count
                for req_id, count in zip(req_ids, self.carried, strict=False)
            ]
        found = super()._propose(sampled, lengths, tokens)
        begin = time.perf_counter()
        drafted = np.array([len(draft) for draft in found], dtype=np.int64)
        model, batch = self.controller.times.model, len(found)
        policy = None if model is None else lambda n: model.step(n, batch, True)
        # Nothing is worth more than infinity: tensor-parallel ranks make this call together, whoever has stopped.
        expected = np.full(batch, np.inf) if self.controller.stopped else self._expected(batch)
        own = self.drafter.propose(self, sampled, lengths, tokens, expected, drafted, policy)
        self._copying = time.perf_counter() - begin
        drafts = [mine or theirs for mine, theirs in zip(own, found, strict=True)]
        self.clock.end(drafts)
        return drafts

    def _expected(self, batch: int) -> np.ndarray:
        """Tokens that should be accepted of each row's draft from the history, float64 [batch]."""
        expected = np.zeros(batch)
        if self.offer is not None:
            rows, chances, offsets, keep = self.offer
            total = np.concatenate([[0.0], np.cumsum(chances)])
            expected[rows] = total[offsets[:-1] + keep] - total[offsets[:-1]]
        return expected

    def _finish_step(self, step: Any, seconds: float) -> None:
        super()._finish_step(step, seconds - self._copying)  # the controller's are the policy's steps


class KeyedMixedProposer(MixedProposer):
    """The same drafts, verified with keyed noise: its name tells vLLM's front end that any sampling parameter goes."""
