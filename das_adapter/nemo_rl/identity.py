"""The label of a request. NeMo-RL gives its generation only token ids, so the first turn's prompt is a problem's
identity."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from das_adapter.core.identity import FirstTurns, request_seed
from das_adapter.protocol.label import Label

LABELS = "das_labels"
"""Key of a NeMo-RL generation batch: the `Label` of each row."""


class Labeller:
    """Labels requests. The n-th request of a problem gets the same seed in every run that asks in the same order."""

    def __init__(self, run_seed: int, source: int = 0, resumed: int = 0):
        """
        Args:
            run_seed: `verify.seed`.
            source: tells labellers apart that count the same problems independently (HTTP servers of two workers).
            resumed: training step from which the run resumes; what was drawn before that is not drawn again.
        """
        self._run_seed = run_seed
        self._resumed = resumed
        self._source = source
        self._first_turns = FirstTurns()
        self._drawn: Counter[tuple[int, bool]] = Counter()

    def label(self, prompt: Any, validate: bool) -> Label:
        """Label a request.

        Args:
            prompt: token ids, without padding.
            validate: whether its text must stay out of the history.
        """
        problem = self._first_turns.problem(np.asarray(prompt, dtype=np.int32))
        number = self._drawn[problem, validate]
        self._drawn[problem, validate] += 1
        seed = request_seed(self._run_seed, problem, self._resumed, -1 - number if validate else number, self._source)
        return Label(problem, seed, record=not validate)
