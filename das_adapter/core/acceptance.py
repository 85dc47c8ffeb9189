"""How many draft tokens are accepted: DAS's curve, for a rollout, and the rate of a
model that drafts, per token. `SuffixIndex` estimates the chance of a token from the
history.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt


@dataclass
class AcceptanceRate:
    """Chance that a draft token is accepted, given that all before it were; what was
    seen long ago counts less. At first it is assumed to be 0.8, which counts as two
    tokens: a model's own first drafts decide. With arrays it is that of several kinds
    of tokens.
    """

    accepted: Any = 1.6
    tried: Any = 2.0
    fade: float = 0.999
    KNOWN: ClassVar = 20.0
    """Tokens that make it known; what a weight sync leaves counts as no more."""

    def observe(
        self, drafted: npt.NDArray[np.int64], accepted: npt.NDArray[np.int64]
    ) -> None:
        """Take verified drafts, int64 [drafts]: tokens after the first rejected one do
        not count as tried.
        """
        self.add(
            int(np.minimum(drafted, accepted + 1).sum()),
            int(accepted.sum()),
            len(drafted),
        )

    def add(self, tried: Any, accepted: Any, drafts: Any) -> None:
        """Take so many tokens of so many drafts."""
        kept = self.fade**drafts
        self.accepted, self.tried = (
            self.accepted * kept + accepted,
            self.tried * kept + tried,
        )

    def forget(self) -> None:
        """Reduce the counts, at a weight sync, to those of `KNOWN` tokens."""
        share = np.minimum(1.0, self.KNOWN / self.tried)
        self.accepted, self.tried = share * self.accepted, share * self.tried

    @property
    def known(self) -> bool:
        """Whether it was seen, not assumed."""
        return bool(self.tried >= self.KNOWN)

    @property
    def rate(self) -> Any:
        """The chance, 0 to 1."""
        return self.accepted / self.tried


class AcceptanceCurve:
    """DAS's A(p) = k·l·(1 - exp(-alpha·p / l)) (section 4.2): tokens of a rollout of l
    that are accepted when p are drafted over it.

    alpha·k is the measured acceptance rate of a draft's first token; k then follows
    from the share of all draft tokens that was accepted. Only the tokens of steps that
    carried drafts count: the others say nothing of what would have been accepted, and
    would make the curve look as if it ended early. The paper has a curve for each
    problem, and does not say how it estimates it; here all share one.
    """

    def __init__(self) -> None:
        # Before anything is observed: half of the first tokens are accepted, and k is
        # 0.6.
        self.counts = np.array([160.0, 38.0, 40.0, 20.0])
        """Tokens drafted, accepted; drafts, and those whose first token was accepted:
        float64 [4].
        """

    def sync(self) -> None:
        """Halve the weight of the past, at a weight sync."""
        if self.counts[2] > 80.0:
            self.counts *= 0.5

    def fitted(self) -> tuple[float, float]:
        """Return (alpha, k): alpha·k <= 1, 0 < k < 1."""
        drafted, accepted, drafts, hit = self.counts.tolist()
        tokens = drafts + accepted
        return solve_curve(
            min(0.99, max(0.01, hit / drafts)), drafted / tokens, accepted / tokens
        )


def solve_curve(first: float, drafted: float, accepted: float) -> tuple[float, float]:
    """Return (alpha, k) of the curve with alpha·k = `first` through (`drafted`,
    `accepted`), both per rollout token.

    k is at most 0.98: a rollout that is drafted in full still takes some rounds.
    """
    low = first * 0.02 + 1e-3
    high = 0.98
    for _ in range(40):
        k = 0.5 * (low + high)
        if k * (1.0 - math.exp(-first / k * drafted)) < accepted:
            low = k
        else:
            high = k
    return first / k, k
