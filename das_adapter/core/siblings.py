"""What siblings turn out to be worth: an engine counts its requests by the siblings that they could draft from."""

from __future__ import annotations

from collections import Counter

from das_adapter.core.routing import Moments, Worth


class Siblings:
    """Finished requests of an engine: the tokens that each got from a forward pass, beside its siblings."""

    def __init__(self) -> None:
        self._growing: Counter[int] = Counter()
        self._finished: Counter[int] = Counter()
        self._moments = Moments()

    def begin(self, problem: int) -> int:
        """Take a request that begins, and return how many of its siblings have finished."""
        self._growing[problem] += 1
        return self._finished[problem]

    def end(self, problem: int, finished: int, known: bool, tokens: float, forwards: float) -> None:
        """Take a request that ended.

        Args:
            problem: its problem.
            finished: what `begin` returned.
            known: whether the problem has history.
            tokens, forwards: that it got, and took part in.
        """
        self._growing[problem] -= 1
        alongside = self._growing[problem] + max(0, self._finished[problem] - finished)
        self._finished[problem] += 1
        if forwards > 0:
            self._moments += Moments.of(Worth().doublings(alongside, finished, known), tokens / forwards)

    def clear(self) -> None:
        """Forget the finished siblings, at a weight sync."""
        self._finished.clear()
        self._growing = +self._growing

    def take(self) -> Moments:
        """Return what was counted since the last call."""
        taken, self._moments = self._moments, Moments()
        return taken
