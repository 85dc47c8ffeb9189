"""The drafter `history+self`: each request drafts from its history or from the copy of the policy, whichever is worth
more in this step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.config import VllmConfig

from das_adapter.engine.proposer import HistoryProposer
from das_adapter.engine.self_drafter import SelfDrafter, StepClock


class MixedProposer(HistoryProposer):
    """The history's drafts with their calibrated chances, replaced by the copy's where those bring more."""

    NAME = "history+self"

    def __init__(self, vllm_config: VllmConfig):
        super().__init__(vllm_config)
        self.drafter = SelfDrafter(vllm_config, self.config.self.weights, self.config.keyed)
        self._clock = StepClock(self)

    def load_model(self, policy: Any) -> None:
        self.drafter.load(policy)

    def refresh(self, version: int, trajectories: Sequence[tuple[int, bytes, int]]) -> dict[str, Any]:
        return self.drafter.refresh() | super().refresh(version, trajectories)

    def stats(self) -> dict[str, Any]:
        return super().stats() | self.drafter.stats()

    def _propose(self, sampled: list[list[int]], lengths: np.ndarray, tokens: np.ndarray) -> list[list[int]]:
        self._clock.begin(sampled)
        found = super()._propose(sampled, lengths, tokens)
        expected = np.array([self.expected.get(row, 0.0) for row in range(len(found))])
        drafted = np.array([len(draft) for draft in found], dtype=np.int64)
        own = self.drafter.propose(self, sampled, lengths, tokens, expected, drafted)
        drafts = [mine or theirs for mine, theirs in zip(own, found, strict=True)]
        self._clock.end(drafts)
        return drafts


class KeyedMixedProposer(MixedProposer):
    """The same drafts, verified with keyed noise: its name tells vLLM's front end that any sampling parameter goes."""
