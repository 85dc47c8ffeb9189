"""The draft-length ladder of EfficientRollout (section 3.4, algorithm 1)."""

from __future__ import annotations

RAISE_AT, LOWER_AT = 0.94, 0.85
"""Shares of accepted draft tokens from which the length rises, and up to which it falls."""
PERSISTENCE = 2
"""Rollouts in a row that must agree."""


class Ladder:
    """Draft length in rungs, the same for all replicas: longer when nearly everything is accepted, shorter when not.
    Decided where all replicas' counts come together, once per training rollout."""

    def __init__(self, rungs: tuple[int, ...]) -> None:
        self._rungs = rungs
        self._rung = self._up = self._down = 0

    @property
    def length(self) -> int:
        """Draft tokens per round."""
        return self._rungs[self._rung]

    def observe(self, accepted: int, drafted: int) -> int:
        """Take the counts of one rollout, summed over all replicas, and return the draft length for the next. A rollout
        without drafts changes nothing."""
        if drafted <= 0:
            return self.length
        rate = accepted / drafted
        self._up = self._up + 1 if rate >= RAISE_AT else 0
        self._down = self._down + 1 if rate <= LOWER_AT else 0
        if self._up >= PERSISTENCE:
            self._rung, self._up = min(self._rung + 1, len(self._rungs) - 1), 0
        elif self._down >= PERSISTENCE:
            self._rung, self._down = max(self._rung - 1, 0), 0
        return self.length
