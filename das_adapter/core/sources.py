"""Which source drafts for whom: the history, a copy of the policy, or nobody, by tokens per second of the whole batch.

A batch's step takes the policy's forward pass, plus a forward pass of the copy for each token that it drafts: the
speed-up is L / (γ·T_D/T_T + T_V/T_T), as in EfficientRollout (arXiv 2606.18967).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]


@dataclass
class Line:
    """seconds = base + slope * tokens, fitted to observations that fade; until there are some, what it was told."""

    base: float
    slope: float = 0.0
    fade: float = 0.98
    _sums: Float64 = field(default_factory=lambda: np.zeros(5))

    def observe(self, tokens: int, seconds: float) -> None:
        """Take one step's time in; what takes more than four times as long as expected is somebody else's doing."""
        weight = self._sums[0]
        if weight > 5:
            seconds = min(seconds, 4 * self(tokens))
        self._sums *= self.fade
        self._sums += (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        n, x, y, xx, xy = self._sums
        spread = xx - x * x / n
        self.slope = max(0.0, (xy - x * y / n) / spread) if spread > 0.1 * n else min(self.slope, y / max(x, 1e-9))
        self.base = max(0.0, (y - self.slope * x) / n)

    @property
    def seen(self) -> bool:
        """Whether anything was observed."""
        return bool(self._sums[0])

    def __call__(self, tokens: float) -> float:
        return self.base + self.slope * tokens


@dataclass
class Acceptance:
    """Chance that a token of the copy is accepted, given that all before it were; drafts that fade."""

    accepted: float = 16.0
    tried: float = 20.0
    fade: float = 0.999

    def observe(self, drafted: int, accepted: int) -> None:
        """Take one verified draft in: the tokens after the first rejected one were not tried."""
        self.accepted = self.accepted * self.fade + accepted
        self.tried = self.tried * self.fade + min(drafted, accepted + 1)

    def forget(self) -> None:
        """A weight sync: what is known counts for no more than the assumption at the start did."""
        share = min(1.0, Acceptance.tried / self.tried)
        self.accepted, self.tried = share * self.accepted, share * self.tried

    @property
    def rate(self) -> float:
        return self.accepted / self.tried

    def expected(self, drafted: npt.ArrayLike) -> Float64:
        """Tokens accepted of drafts of these lengths."""
        a = min(self.rate, 1.0 - 1e-9)
        return np.asarray(a * (1.0 - a ** np.asarray(drafted, dtype=float)) / (1.0 - a))


@dataclass
class Probe:
    """When to draft although it does not seem to pay: what a pass of the copy costs is known from other batches only.

    After `FIRST` steps without a draft, then twice as many, at most `LAST`; anew when the batch has shrunk by a tenth.
    """

    FIRST, LAST = 8, 256

    _idle: int = 0
    _wait: int = FIRST
    _batch: int = 0

    def due(self, batch: int, drafted: bool) -> bool:
        """One step: requests in it, and whether any is drafted for."""
        if drafted or batch < 0.9 * self._batch:
            self._idle, self._wait, self._batch = 0, self.FIRST, batch
        self._batch = max(self._batch, batch)
        self._idle += not drafted
        if self._idle < self._wait:
            return False
        self._idle, self._wait = 0, min(2 * self._wait, self.LAST)
        return True


def choose(
    expected: Float64,
    drafted: Int64,
    room: Int64,
    acceptance: Acceptance,
    policy: Callable[[float], float],
    copy: Line,
    lengths: Iterable[int],
    pace: float = 0.0,
) -> Int64:
    """How many tokens the copy should draft for each request.

    A step is good if it brings more tokens than its time brings elsewhere: where the history carries most of a text,
    the copy's passes have to bring more than where there is none.

    Args:
        expected: [batch] tokens of the history's draft that should be accepted; 0 without one.
        drafted: [batch] tokens of that draft.
        room: [batch] most tokens that may be drafted.
        acceptance: of the copy's tokens.
        policy: seconds of a step of the policy that verifies so many tokens.
        copy: seconds of a forward pass of the copy over so many requests.
        lengths: that the copy's drafts may have, of which one is chosen.
        pace: tokens per second that such a batch gets lately.

    Returns:
        int64 [batch]; 0: the history's draft, if there is one, stands.
    """
    batch = len(expected)
    nobody = np.zeros(batch, dtype=np.int64)
    choices = [(nobody, batch + expected.sum(), policy(batch + drafted.sum()))]
    for length in lengths:
        counts = np.minimum(room, length)
        own = acceptance.expected(counts)
        counts = np.where((counts > 0) & (own > expected), counts, 0)
        tokens = batch + np.where(counts, own, expected).sum()
        drafting = sum(copy(int(np.count_nonzero(counts > step))) for step in range(int(counts.max(initial=0))))
        choices.append((counts, tokens, policy(batch + np.where(counts, counts, drafted).sum()) + drafting))
    pace = max(pace, *(tokens / seconds for _, tokens, seconds in choices))
    return max(choices, key=lambda choice: choice[1] - pace * choice[2])[0]
