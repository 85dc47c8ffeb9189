"""When to repeat work that costs time and rarely brings anything; and which rollouts
are at rest.
"""

from __future__ import annotations

import math


class Backoff:
    """Repeats work after more and more steps, and whenever the batch has become smaller
    by a tenth.
    """

    def __init__(self, first: int, most: int) -> None:
        """Wait `first` steps after work that brought nothing, then twice as many, and
        so on up to `most`; half of `first` after work that did.
        """
        self._first = first
        self._most = most
        self.restart()
        self._batch = 0

    def due(self, step: int, batch: int = 0) -> bool:
        """Return whether the work is due, in this step and with so many requests."""
        return self.due_in(step, batch) <= 0

    def due_in(self, step: int, batch: int = 0) -> int:
        """Return after how many steps the work is due."""
        return 0 if batch < 0.9 * self._batch else max(0, self._next - step)

    def done(
        self,
        step: int,
        batch: int = 0,
        again_soon: bool = False,
        max_wait: float = math.inf,
    ) -> None:
        """Note that the work was done. `again_soon`: whether it brought anything;
        `max_wait`: steps that it is worth waiting for at most.
        """
        self._batch = batch
        if again_soon:
            self._next, self._wait = step + self._first // 2, self._first
        else:
            wait = math.ceil(min(self._wait, max(self._first, max_wait)))
            self._next, self._wait = step + wait, min(2 * wait, self._most)

    def restart(self) -> None:
        """Make the work due now."""
        self._wait = self._first
        self._next = 0


class RolloutRest:
    """Rollouts at rest: 1, 2, 4 and then 8 of them after each one that lost more than
    the last ones had saved.
    """

    MOST = 8
    FADE = 0.8
    """What a rollout saved counts for by so much less with each rollout after it: about
    five are in the balance. One that was unlucky among those that gain is no reason to
    rest.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        """Why this rollout is at rest; None: it is not."""
        # rollouts at rest: that are left; after the next loss
        self._left = 0
        self._next = 1
        self._balance = 0.0  # seconds

    def judge_rollout(self, lost: str | None, saved: float | None) -> bool:
        """Take the end of a rollout: why it has lost, if it has, and the seconds that
        it saved, None: not known; one at rest is not judged. Return whether the next is
        at rest that would not have been.
        """
        if self.reason is not None:
            self._left -= 1
            self.reason = self.reason if self._left else None
            return False
        if saved is not None:
            self._balance = self.FADE * self._balance + saved
            if lost is None:
                self._next = 1
            elif self._balance < 0:
                self.reason, self._left, self._next = (
                    lost,
                    self._next,
                    min(2 * self._next, self.MOST),
                )
        return self.reason is not None
