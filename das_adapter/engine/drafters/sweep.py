"""A drafter for measuring step times: it drafts so many arbitrary tokens for everyone, by turns."""

from __future__ import annotations

from typing import Any

import numpy as np

from das_adapter.engine.drafters.history import KeyedHistoryProposer, _Step


class SweepProposer(KeyedHistoryProposer):
    """Verification costs the same whether a draft is accepted or not, so the tokens don't matter."""

    turns: tuple[int, ...] = (0,)
    """Draft tokens per request, step after step."""
    samples: list[tuple[int, float, int, float]] = []  # noqa: RUF012 - read and replaced by the one engine of a sweep
    """Of every step that only decoded: requests, mean tokens of context, draft tokens per request, seconds."""

    def _propose(self, sampled: list[list[int]], lengths: np.ndarray, tokens: np.ndarray) -> list[list[int]]:
        if self._step is not None:
            self._step.slots = lengths[: len(sampled)].copy()
            self._step.got = np.array([len(new) for new in sampled])
        drafts = self.turns[self.counters.steps % len(self.turns)]
        return [[1] * max(0, min(drafts, self._max_model_len - int(length) - 1)) if new else []
                for new, length in zip(sampled, lengths, strict=False)]  # fmt: skip

    def _finish_step(self, step: _Step, seconds: float) -> None:
        assert step.slots is not None
        requests = len(step.req_ids)
        drafted, rest = divmod(step.tokens - requests, requests)
        if not rest:
            self.samples.append((requests, float(step.slots.mean()), drafted, seconds))

    def stats(self) -> dict[str, Any]:
        """Nothing: no history, no decisions."""
        return {}
