"""When to repeat work that costs time and rarely changes anything."""

from __future__ import annotations


class Backoff:
    """Repeats work after more and more steps, and whenever the batch has become smaller by a tenth."""

    def __init__(self, first: int, most: int) -> None:
        """Wait `first` steps, then twice as many, and so on up to `most`."""
        self._first, self._most = first, most
        self._wait, self._next, self._batch = first, 0, 0

    def due(self, step: int, batch: int) -> bool:
        """Return whether the work is due, in this step and with so many requests."""
        return step >= self._next or batch < 0.9 * self._batch

    def done(self, step: int, batch: int, again_soon: bool) -> None:
        """Note that the work was done; `again_soon`: begin with the first wait again."""
        self._wait = self._first if again_soon else min(2 * self._wait, self._most)
        self._next, self._batch = step + self._wait, batch

    def restart(self) -> None:
        """Make the work due now."""
        self._wait, self._next = self._first, 0
