"""Measure how long decode steps take, from the begin of each to the begin of the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from das_adapter.core.controller import TimedStep


@dataclass(slots=True)
class _Step:
    """A forward pass that only decodes."""

    begin: float
    tokens: int
    req_ids: list[str]
    slots: np.ndarray | None = None
    """int64 [b], like `got`; None until it was sampled."""
    got: np.ndarray | None = None
    drafting_seconds: float = 0.0
    passes: int = 0


class StepTimer:
    """Times the steps that only decode; steps that also read prompts, and pauses, are left out."""

    def __init__(self) -> None:
        self._step: _Step | None = None

    def begin(self, scheduled: Any, now: float) -> TimedStep | None:
        """Begin a step (vLLM's `SchedulerOutput`, seconds), and return the previous one, if it was timed."""
        step, self._step = self._step, None
        counts, new = scheduled.num_scheduled_tokens, scheduled.scheduled_new_reqs
        drafts = scheduled.scheduled_spec_decode_tokens
        if counts and not new and scheduled.total_num_scheduled_tokens == len(counts) + sum(map(len, drafts.values())):
            self._step = _Step(now, scheduled.total_num_scheduled_tokens, list(counts))
        if step is None or step.slots is None or step.got is None:
            return None
        if new and not any(req_id in counts for req_id in step.req_ids):  # a pause without requests lies between them
            return None
        return TimedStep(
            step.slots,
            step.got,
            step.tokens,
            now - step.begin - step.drafting_seconds,
            step.drafting_seconds,
            step.passes,
        )

    def sampled(self, slots: np.ndarray, got: np.ndarray) -> None:
        """Take what the step sampled: slots of its requests and the tokens that each got, int64 [b]."""
        if self._step is not None:
            self._step.slots, self._step.got = slots, got

    def drafted(self, seconds: float, passes: int) -> None:
        """Take the seconds and the forward passes of a model that drafted at the end of the step."""
        if self._step is not None:
            self._step.drafting_seconds, self._step.passes = seconds, passes
