"""When to repeat work that costs time and rarely brings anything; and which rollouts begin at rest."""

from __future__ import annotations


class Backoff:
    """Repeats work after more and more steps, and whenever the batch has become smaller by a tenth."""

    def __init__(self, first: int, most: int) -> None:
        """Wait `first` steps after work that brought nothing, then twice as many, and so on up to `most`; half of
        `first` after work that did."""
        self._first, self._most = first, most
        self.restart()
        self._batch = 0

    def due(self, step: int, batch: int = 0) -> bool:
        """Return whether the work is due, in this step and with so many requests."""
        return step >= self._next or batch < 0.9 * self._batch

    def done(self, step: int, batch: int = 0, again_soon: bool = False) -> None:
        """Note that the work was done, and whether it brought anything."""
        self._batch = batch
        if again_soon:
            self._next, self._wait = step + self._first // 2, self._first
        else:
            self._next, self._wait = step + self._wait, min(2 * self._wait, self._most)

    def restart(self) -> None:
        """Make the work due now."""
        self._wait, self._next = self._first, 0


class Rest:
    """Rollouts that begin at rest: 1, 2, 4, ... 16 of them after each one that lost."""

    MOST = 16

    def __init__(self) -> None:
        self.reason: str | None = None
        """Why this rollout began at rest; None: it did not, or it is over."""
        self._backoff = Backoff(1, self.MOST)
        self._rollout = 0

    def judge(self, lost: str | None, gained: bool) -> bool:
        """Take the end of a rollout: why it has lost, or whether it was worth its time, or neither; one that began at
        rest is not judged. Return whether the next begins at rest that would not have."""
        self._rollout += 1
        began = self.reason is None and lost is not None
        if self.reason is None and (lost or gained):
            self._backoff.done(self._rollout, again_soon=not lost)
            self.reason = lost
        if self._backoff.due(self._rollout):
            self.reason = None
        return began
