"""When to repeat work that costs time and rarely brings anything; and which rollouts
are at rest.
"""

from __future__ import annotations

import math

from das_adapter.core import tuning


class Backoff:
    """Repeats work after more and more steps, and whenever the batch has become smaller
    by a tenth.
    """

    def __init__(self, first: int, longest: int) -> None:
        """Wait `first` steps after work that brought nothing, then twice as many, and
        so on up to `longest`; half of `first` after work that did.
        """
        self._first = first
        self._longest = longest
        self.restart()
        self._batch = 0

    def due(self, step: int, batch: int = 0) -> bool:
        """Return whether the work is due, in this step and with so many requests."""
        return self.due_in(step, batch) <= 0

    def due_in(self, step: int, batch: int = 0) -> int:
        """Return after how many steps the work is due."""
        if batch < tuning.SMALLER_BATCH * self._batch:
            return 0
        return max(0, self._next - step)

    def done(
        self,
        step: int,
        batch: int = 0,
        again_soon: bool = False,
        max_wait: float = math.inf,
    ) -> None:
        """Record that the work was done. `again_soon`: whether it brought anything;
        `max_wait`: steps that it is worth waiting for at most.
        """
        self._batch = batch
        if again_soon:
            self._next = step + self._first // 2
            self._wait = self._first
            return
        bound = max(self._first, max_wait)
        wait = math.ceil(min(self._wait, bound))
        self._next = step + wait
        self._wait = min(2 * wait, self._longest)

    def restart(self) -> None:
        """Make the work due now."""
        self._wait = self._first
        self._next = 0


class RolloutRest:
    """Rollouts at rest: 1, 2, 4 and then 8 of them after each one that lost more than
    the last ones had saved.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        """Why this rollout is at rest; None: it is not."""
        self._left = 0
        """Rollouts at rest that are left."""
        self._next = 1
        """Rollouts at rest after the next loss."""
        self._balance_s = 0.0
        """Seconds that the last rollouts saved."""

    def judge_rollout(self, lost: str | None, saved_s: float | None) -> bool:
        """Judge a rollout that ended, unless it was at rest. Return whether the next is
        at rest that would not have been.

        Args:
            lost: why it has lost, if it has.
            saved_s: seconds that it saved; None: not known.
        """
        if self.reason is not None:
            self._left -= 1
            if not self._left:
                self.reason = None
            return False
        if saved_s is None:
            return False
        self._balance_s = tuning.REST_BALANCE_KEPT * self._balance_s + saved_s
        if lost is None:
            self._next = 1
            return False
        if self._balance_s >= 0:
            return False
        self.reason = lost
        self._left = self._next
        self._next = min(2 * self._next, tuning.REST_ROLLOUTS)
        return True
