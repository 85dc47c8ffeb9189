"""DAS's acceptance curve per problem. What each draft token's chance is, the drafter says (`SuffixIndex`)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np


@dataclass
class _Sums:
    tokens: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0
    first_tried: float = 0.0
    first_kept: float = 0.0


class AcceptanceCurves:
    """DAS's A_i(p) = k_i·l_i·(1 - exp(-alpha_i·p / l_i)) for every problem (section 4.2): tokens of a rollout of l_i
    that are accepted when p are drafted over it.

    alpha·k is the acceptance rate of a draft's first token, counted; k then follows from the share that was accepted in
    all. A problem counts with what it has written, the population with `POPULATION` tokens. The paper does not say how
    it estimates them.
    """

    POPULATION = 256.0

    def __init__(self) -> None:
        self._problems: defaultdict[int, _Sums] = defaultdict(_Sums)
        # Until something is seen: half of the first tokens, and a ceiling of 0.6.
        self._all = _Sums(tokens=100.0, drafted=80.0, accepted=29.0, first_tried=40.0, first_kept=20.0)

    def observe(
        self, problem: int, tokens: int, drafted: int, accepted: int, first_tried: int, first_kept: int
    ) -> None:
        """Take a finished rollout: its tokens, draft tokens verified and accepted, and how many drafts it carried and
        how many of those had their first token accepted."""
        for sums in (self._problems[problem], self._all):
            sums.tokens += tokens
            sums.drafted += drafted
            sums.accepted += accepted
            sums.first_tried += first_tried
            sums.first_kept += first_kept

    def forget(self) -> None:
        """A weight sync: the past counts half."""
        for problem, sums in list(self._problems.items()):
            if sums.tokens < 1.0:
                del self._problems[problem]
        for sums in (*self._problems.values(), self._all):
            for name in vars(sums):
                setattr(sums, name, 0.5 * getattr(sums, name))

    def of(self, problem: int) -> tuple[float, float]:
        """(alpha, k) of a problem: alpha·k <= 1, 0 < k < 1."""
        everyone = self._all
        own = self._problems.get(problem) or _Sums()
        share = self.POPULATION / max(everyone.tokens, 1.0)

        def pooled(name: str) -> float:
            value: float = getattr(own, name) + share * getattr(everyone, name)
            return value

        tokens = pooled("tokens")
        first = min(0.99, max(0.01, pooled("first_kept") / max(pooled("first_tried"), 1e-9)))
        return solve_curve(first, pooled("drafted") / tokens, pooled("accepted") / tokens)


def solve_curve(first: float, drafted: float, accepted: float) -> tuple[float, float]:
    """(alpha, k) of the curve with alpha·k = `first` through (`drafted`, `accepted`), both per token of the rollout.

    k is at most 0.98: a rollout that is drafted in full still takes some rounds.
    """
    low, high = first * 0.02 + 1e-3, 0.98
    for _ in range(40):
        k = 0.5 * (low + high)
        if k * (1.0 - np.exp(-first / k * drafted)) < accepted:
            low = k
        else:
            high = k
    return first / k, k
