"""The draft-length ladder of EfficientRollout (section 3.4, algorithm 1)."""

from __future__ import annotations


class Ladder:
    """Draft length in rungs, the same for all replicas: longer when nearly everything is accepted, shorter when not
    (EfficientRollout, algorithm 1). Decided where all replicas' counts come together, once per training rollout."""

    def __init__(
        self, rungs: tuple[int, ...], raise_at: float = 0.94, lower_at: float = 0.85, persistence: int = 2
    ) -> None:
        """`persistence`: rollouts in a row that must agree."""
        assert rungs and list(rungs) == sorted(set(rungs)), rungs
        self.rungs, self.raise_at, self.lower_at, self.persistence = rungs, raise_at, lower_at, persistence
        self.rung = 0
        self._up = self._down = 0

    @property
    def length(self) -> int:
        """Draft tokens per round."""
        return self.rungs[self.rung]

    def observe(self, accepted: int, drafted: int, validation: bool = False) -> int:
        """Take the counts of one rollout, summed over all replicas, and return the draft length for the next. A
        validation, or a rollout without drafts, changes nothing."""
        if validation or drafted <= 0:
            return self.length
        rate = accepted / drafted
        self._up = self._up + 1 if rate >= self.raise_at else 0
        self._down = self._down + 1 if rate <= self.lower_at else 0
        if self._up >= self.persistence:
            self.rung, self._up = min(self.rung + 1, len(self.rungs) - 1), 0
        elif self._down >= self.persistence:
            self.rung, self._down = max(self.rung - 1, 0), 0
        return self.length
