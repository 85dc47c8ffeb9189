"""A drafter for measuring step times: in turns, it drafts a given number of arbitrary tokens for every request."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.config import VllmConfig

from das_adapter.engine.drafters.base import Drafter
from das_adapter.engine.drafters.timing import StepTimer


class SweepDrafter(Drafter):
    """Drafts token 1: verification costs the same whether a draft is accepted or not, so the tokens don't matter."""

    turns: tuple[int, ...] = (0,)
    """Draft tokens per request, step after step."""
    samples: list[tuple[int, float, int, float]] = []  # noqa: RUF012 - read and replaced by the one engine of a sweep
    """Of every step that only decoded: requests, mean tokens of context, draft tokens per request, seconds."""

    def __init__(self, vllm_config: VllmConfig):
        super().__init__(vllm_config)
        self._timer = StepTimer()

    def _begin_step(self, scheduled: Any, now: float) -> None:
        step = self._timer.begin(scheduled, now)
        if step is not None:
            requests = len(step.slots)
            drafted, rest = divmod(step.tokens - requests, requests)
            if not rest:
                self.samples.append((requests, float(step.slots.mean()), drafted, step.seconds))

    def _propose(self, sampled: list[list[int]], lengths: np.ndarray, tokens: np.ndarray) -> list[list[int]]:
        # The timer's slots hold the requests' context lengths here, because there is no controller.
        self._timer.sampled(lengths[: len(sampled)].copy(), np.array([len(new) for new in sampled]))
        drafts = self.turns[self.counters.steps % len(self.turns)]
        return [[1] * max(0, min(drafts, self._max_model_len - int(length) - 1)) if new else []
                for new, length in zip(sampled, lengths, strict=False)]  # fmt: skip
