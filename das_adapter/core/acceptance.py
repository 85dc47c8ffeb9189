"""What a draft token is worth: chances calibrated by what came of them, and DAS's acceptance curve per problem."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Chances = npt.NDArray[np.float32]


class Calibration:
    """Turns the survival chances a drafter states into the ones that are observed; one per source of drafts.

    A chance is looked up in one of 32 bins; a bin starts from what it states, worth `PRIOR` observations, and forgets
    half of the past every `MEMORY` of them. The result never falls where the stated chance rises, so that the chances
    within a draft still don't increase.
    """

    BINS, PRIOR, MEMORY = 32, 64.0, 20000.0

    def __init__(self) -> None:
        self._stated: Floats = (np.arange(self.BINS) + 0.5) / self.BINS
        self._tried = np.zeros(self.BINS)
        self._kept = np.zeros(self.BINS)
        self._sum = np.zeros(self.BINS)
        self.shift: Chances = np.zeros(self.BINS, dtype=np.float32)
        """What to add to a stated chance, by its bin, shape (BINS,)."""

    def learn(self, chances: Chances, survived: npt.NDArray[np.bool_]) -> None:
        """Take verified draft tokens: the chance each was stated with, and whether it and all before it were accepted.

        Both of shape (n,).
        """
        at = (chances * self.BINS).astype(np.int64)
        np.minimum(at, self.BINS - 1, out=at)
        self._tried += np.bincount(at, minlength=self.BINS)
        self._kept += np.bincount(at, weights=survived, minlength=self.BINS)
        self._sum += np.bincount(at, weights=chances, minlength=self.BINS)

    def refit(self) -> None:
        """Use what was learned since the last call."""
        over = np.maximum(1.0, self._tried / self.MEMORY)
        for counts in (self._tried, self._kept, self._sum):
            counts /= over
        weight = self._tried + self.PRIOR
        stated = (self._sum + self.PRIOR * self._stated) / weight
        observed = isotonic((self._kept + self.PRIOR * self._stated) / weight, weight)
        self.shift = (observed - stated).astype(np.float32)

    def __call__(self, chances: Chances) -> Chances:
        """Calibrated chances, shape and order as given."""
        at = (chances * self.BINS).astype(np.int64)
        shifted = chances + self.shift.take(at, mode="clip")
        return np.clip(shifted, 1e-3, 1.0, out=shifted)


def isotonic(values: Floats, weights: Floats) -> Floats:
    """The non-decreasing sequence nearest to `values` in weighted squares (pool adjacent violators)."""
    blocks: list[list[float]] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        blocks.append([value, weight, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            v, w, n = blocks.pop()
            last = blocks[-1]
            last[0] = (last[0] * last[1] + v * w) / (last[1] + w)
            last[1] += w
            last[2] += n
    return np.repeat([b[0] for b in blocks], [int(b[2]) for b in blocks])


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
