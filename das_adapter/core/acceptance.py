"""How many draft tokens are accepted: DAS's curve, for a rollout, and the rate of a
model that drafts, per token. `SuffixIndex` estimates the chance of a token from the
history.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from das_adapter.core import tuning
from das_adapter.core.steps import Ints


@dataclass
class AcceptanceRate:
    """Chance that a draft token is accepted, given that all before it were; what was
    seen long ago counts less. With arrays it has the chances of several kinds of
    tokens.
    """

    accepted: Any = tuning.RATE_PRIOR_ACCEPTED
    """Draft tokens that were accepted, counts that fade."""
    tried: Any = tuning.RATE_PRIOR_TOKENS
    """Draft tokens that were accepted or the first of their draft that was not."""
    fade: float = tuning.RATE_KEPT
    """Share of the counts that is left after a draft."""

    def observe(self, drafted: Ints, accepted: Ints) -> None:
        """Count verified drafts, int64 [drafts]: tokens after the first rejected one do
        not count as tried.
        """
        reached = accepted + 1
        tried = np.minimum(drafted, reached)
        self.add(
            tried=int(tried.sum()),
            accepted=int(accepted.sum()),
            drafts=len(drafted),
        )

    def add(self, tried: Any, accepted: Any, drafts: Any) -> None:
        """Count so many tokens of so many drafts."""
        kept = self.fade**drafts
        accepted_before = self.accepted * kept
        tried_before = self.tried * kept
        self.accepted = accepted_before + accepted
        self.tried = tried_before + tried

    def forget(self) -> None:
        """Reduce the counts, at a weight sync, to those that make the rate known."""
        known_share = tuning.RATE_KNOWN_TOKENS / self.tried
        share = np.minimum(1.0, known_share)
        self.accepted = share * self.accepted
        self.tried = share * self.tried

    @property
    def known(self) -> bool:
        """Whether the rate was seen, not assumed."""
        return bool(self.tried >= tuning.RATE_KNOWN_TOKENS)

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
        self.counts = np.array(tuning.CURVE_PRIOR_COUNTS)
        """Draft tokens, accepted tokens, drafts, and drafts whose first token was
        accepted, float64 [4].
        """

    def sync(self) -> None:
        """Reduce the weight of the past, at a weight sync."""
        drafts = self.counts[2]
        if drafts > tuning.CURVE_FADING_DRAFTS:
            self.counts *= tuning.CURVE_KEPT

    def fitted(self) -> tuple[float, float]:
        """Return (alpha, k): alpha·k <= 1, 0 < k < 1."""
        drafted, accepted, drafts, first_accepted = self.counts.tolist()
        tokens = drafts + accepted
        first_rate = first_accepted / drafts
        first_rate = max(0.01, first_rate)
        first_rate = min(0.99, first_rate)
        return solve_curve(
            first=first_rate,
            drafted=drafted / tokens,
            accepted=accepted / tokens,
        )


def solve_curve(
    first: float,
    drafted: float,
    accepted: float,
) -> tuple[float, float]:
    """Return (alpha, k) of the curve with alpha·k = `first` through (`drafted`,
    `accepted`), both per rollout token.

    Bisection finds the k at which A(p) = k·(1 - exp(-first/k · p)) is `accepted` for
    p = `drafted`.
    """
    low = first * 0.02 + 1e-3
    high = tuning.CURVE_MAX_SHARE
    for _ in range(40):
        k = 0.5 * (low + high)
        alpha = first / k
        rejected_share = math.exp(-alpha * drafted)
        on_curve = k * (1.0 - rejected_share)
        if on_curve < accepted:
            low = k
        else:
            high = k
    return first / k, k
