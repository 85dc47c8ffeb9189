"""How many draft tokens are accepted: DAS's curve per problem, for a rollout, and the policy copy's rate, per token.
`SuffixIndex` estimates the chance of a token from the history."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.float64]
"""Tokens written, drafted, accepted; drafts, and those whose first token was accepted: float64 [5]."""


@dataclass
class AcceptanceRate:
    """Chance that a draft token is accepted, given that all before it were; what was seen long ago counts less."""

    accepted: float = 16.0
    tried: float = 20.0
    fade: float = 0.999

    def observe(self, drafted: npt.NDArray[np.int64], accepted: npt.NDArray[np.int64]) -> None:
        """Take verified drafts, int64 [drafts]: tokens after the first rejected one do not count as tried."""
        kept = self.fade ** len(drafted)
        self.accepted = self.accepted * kept + float(accepted.sum())
        self.tried = self.tried * kept + float(np.minimum(drafted, accepted + 1).sum())

    def forget(self) -> None:
        """Reduce the counts, at a weight sync, to at most the weight of the assumption at the start."""
        share = min(1.0, AcceptanceRate.tried / self.tried)
        self.accepted, self.tried = share * self.accepted, share * self.tried

    @property
    def rate(self) -> float:
        """The chance, 0 to 1."""
        return self.accepted / self.tried

    def chances(self, length: int) -> npt.NDArray[np.float64]:
        """Return the survival chance of each token of a draft, float64 [length]."""
        return cast("npt.NDArray[np.float64]", self.rate ** np.arange(1, length + 1))


class AcceptanceCurves:
    """DAS's A_i(p) = k_i·l_i·(1 - exp(-alpha_i·p / l_i)) for every problem (section 4.2): tokens of a rollout of l_i
    that are accepted when p are drafted over it.

    alpha·k is the measured acceptance rate of a draft's first token; k then follows from the share of all draft tokens
    that was accepted. A problem is weighted by the tokens it has written, the population by `POPULATION` tokens. The
    paper does not say how it estimates alpha and k.
    """

    POPULATION = 256.0
    PROBLEMS = 2**17
    """Most problems with counts of their own; those not seen for longest are forgotten first."""

    def __init__(self) -> None:
        self._problems: OrderedDict[int, tuple[int, Counts]] = OrderedDict()  # weight syncs before the last visit
        # Before anything is observed: half of the first tokens are accepted, and k is 0.6.
        self._all: tuple[int, Counts] = (0, np.array([100.0, 80.0, 29.0, 40.0, 20.0]))
        self._syncs = 0

    def observe(
        self, problem: int, tokens: int, drafted: int, accepted: int, first_tried: int, first_kept: int
    ) -> None:
        """Take a finished rollout: its tokens, draft tokens verified and accepted, and how many drafts it carried and
        how many of those had their first token accepted."""
        new = np.array([tokens, drafted, accepted, first_tried, first_kept], dtype=float)
        self._problems[problem] = self._added(self._problems.get(problem, (self._syncs, np.zeros(5))), new)
        self._problems.move_to_end(problem)
        if len(self._problems) > self.PROBLEMS:
            self._problems.popitem(last=False)
        self._all = self._added(self._all, new)

    def sync(self) -> None:
        """Note a weight sync: a problem's past loses half its weight when the problem is next visited."""
        self._syncs += 1

    def of(self, problem: int) -> tuple[float, float]:
        """Return (alpha, k) of a problem: alpha·k <= 1, 0 < k < 1."""
        everyone = self._all[1]
        own = self._problems[problem][1] if problem in self._problems else 0.0
        pooled = own + self.POPULATION / max(everyone[0], 1.0) * everyone
        tokens, drafted, accepted, first_tried, first_kept = pooled.tolist()
        first = min(0.99, max(0.01, first_kept / max(first_tried, 1e-9)))
        return solve_curve(first, drafted / tokens, accepted / tokens)

    def _added(self, before: tuple[int, Counts], new: Counts) -> tuple[int, Counts]:
        """Add counts; the first ones after a weight sync halve the weight of the past."""
        syncs, counts = before
        return self._syncs, (1.0 if syncs == self._syncs else 0.5) * counts + new


def solve_curve(first: float, drafted: float, accepted: float) -> tuple[float, float]:
    """Return (alpha, k) of the curve with alpha·k = `first` through (`drafted`, `accepted`), both per rollout token.

    k is at most 0.98: a rollout that is drafted in full still takes some rounds.
    """
    low, high = first * 0.02 + 1e-3, 0.98
    for _ in range(40):
        k = 0.5 * (low + high)
        if k * (1.0 - math.exp(-first / k * drafted)) < accepted:
            low = k
        else:
            high = k
    return first / k, k
