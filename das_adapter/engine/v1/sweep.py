"""A drafter for measuring step times: in turns, it drafts a given number of arbitrary tokens for every request."""

from __future__ import annotations

from typing import Any

import numpy as np

from das_adapter.engine.v1.proposer import Proposer


class SweepDrafter(Proposer):
    """Drafts token 1: verification costs the same whether a draft is accepted or not, so the tokens don't matter."""

    turns: tuple[int, ...] = (0,)
    """Draft tokens per request, step after step."""
    samples: list[tuple[int, float, int, float]] = []  # noqa: RUF012 - read and replaced by a sweep's one engine
    """Of every step that only decoded: requests, mean tokens of context, draft tokens per request, seconds."""

    def time_step(self, scheduled: Any, now: float) -> None:
        """Take a sample."""
        step = self.timer.begin(scheduled, now)
        if step is not None:
            requests = len(step.slots)
            drafted, rest = divmod(step.tokens - requests, requests)
            if not rest:
                self.samples.append((requests, step.context / requests, drafted, step.seconds))

    def begin_drafts(self, sampled: list[list[int]], lengths: np.ndarray, tokens: np.ndarray) -> list[list[int]]:
        """Draft as many tokens as this step's turn says."""
        known = lengths[: len(sampled)].astype(np.int64)
        got = np.array([len(new) for new in sampled], dtype=np.int64)
        self.timer.sampled(known, got, int(known.sum()))
        turn = self.turns[self.engine.counters.steps % len(self.turns)]
        room = np.where(got > 0, np.clip(self._max_model_len - known - 1, 0, turn), 0)
        return [[1] * count for count in room.tolist()]
