"""How acceptance depends on the age of what a request drafts from."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

AGES = ("none", "1", "2_4", "older")
"""Weight versions since the newest rollout of a problem: no rollout (only live siblings), up to 1, 2 to 4, more."""


class Staleness:
    """Draft tokens, and those accepted, by the age of the newest rollout of their problem."""

    def __init__(self, window: int):
        self._window = window
        self._version = 0
        self._newest: dict[int, int] = {}
        self._counts = np.zeros((len(AGES), 2), dtype=np.int64)

    def sync(self, version: int, responses: Iterable[tuple[int, int, int]]) -> None:
        """Take the responses since the last weight sync: (problem, tokens, weight version that wrote them)."""
        self._version = version
        for problem, _, written in responses:
            self._newest[problem] = max(written, self._newest.get(problem, written))
        oldest = version - self._window
        self._newest = {problem: written for problem, written in self._newest.items() if written >= oldest}

    def age(self, problem: int) -> int:
        """Return the index into `AGES` for a request that begins."""
        written = self._newest.get(problem)
        return 0 if written is None else 1 + int(np.searchsorted((1, 4), self._version - written))

    def count(self, ages: Iterable[int], drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Add the draft tokens of some requests, and those accepted, int64 [requests] each."""
        np.add.at(self._counts, list(ages), np.stack([drafted, accepted], axis=1))

    def take(self) -> list[list[int]]:
        """Return [drafted, accepted] for each of `AGES`, and start again."""
        taken, self._counts = self._counts.tolist(), np.zeros_like(self._counts)
        return taken
