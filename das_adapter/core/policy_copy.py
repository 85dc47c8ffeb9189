"""Which requests the policy copy drafts for, by what its drafts cost and gain (EfficientRollout, arXiv
2606.18967).

A draft of γ tokens takes γ forward passes of the copy before the policy verifies it: the speed-up is
L / (γ·T_D/T_T + T_V/T_T) with the acceptance length L (section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from das_adapter.core.acceptance import AcceptanceRate
from das_adapter.core.budget import Allocation, Worth
from das_adapter.core.latency import StepModel, StepTimes

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

UNSEEN_PASS = 0.4
"""Time of a pass of the copy before one was timed, as a share of the policy's decode step."""


class CopyPlan(NamedTuple):
    """One step's draft tokens where the copy may draft as well."""

    copy: Ints
    """Tokens that the copy drafts for each request, shape (b,)."""
    keep: Ints
    """Tokens of each request's other draft to verify, shape (b,); 0 where the copy drafts."""
    total: int
    """Sum of both."""
    gain: float
    """Seconds: worth of all draft tokens minus what drafting and verifying them costs."""
    passes_s: float
    """Seconds of the copy's passes."""


class CopyDrafts:
    """How long the copy's passes take and how many of its tokens are accepted, learned from the engine's own steps."""

    def __init__(self, most: int) -> None:
        """`most`: tokens it drafts for a request in a step at most."""
        self.most = most
        self.agreed: int | None = None
        """Length of every draft, where the replicas have agreed on one (`Ladder`)."""
        self.passes = StepTimes(kinds=1)
        self.acceptance = AcceptanceRate()

    def sync(self) -> None:
        """Forget most of the acceptance at a weight sync, which quantises the copy again."""
        self.acceptance.forget()
        self.passes.fit()

    def timed_pass(self, requests: int, seconds: float) -> None:
        """Take the time of one forward pass of the copy."""
        self.passes.add(requests, requests, False, seconds)
        self.passes.keep_fitted()

    def lengths(self, least_chance: float) -> Sequence[int]:
        """Return the lengths that drafts may have; none whose last token survives with less than this chance."""
        lengths = range(1, self.most + 1) if self.agreed is None else [self.agreed]
        return [length for length in lengths if self.acceptance.rate**length >= least_chance]

    def seconds(self, drafted: Ints, plain: float) -> float:
        """Return the time of the passes that draft so many tokens for each request, shape (b,); `plain`: a step's."""
        model, longest = self.passes.model, int(drafted.max(initial=0))
        requests = [int(np.count_nonzero(drafted > step)) for step in range(longest)]
        return UNSEEN_PASS * plain * longest if model is None else sum(model.step(n, n, False) for n in requests)

    def plan(
        self, found: Allocation, theirs: Floats, worth: Worth, limits: Ints, model: StepModel, lengths: Sequence[int]
    ) -> CopyPlan:
        """Let the copy draft, at one of the lengths, for the requests for which it is worth more than their other
        draft.

        Args:
            found: what is verified without the copy; it stands where no length gains more.
            theirs: expected worth of what is kept of each request's other draft, shape (b,).
            worth: of accepted tokens.
            limits: most draft tokens of each request, shape (b,).
            model: what the policy's step costs.
            lengths: see above.
        """
        batch, nobody = len(limits), np.zeros_like(limits)
        best = CopyPlan(nobody, found.keep, found.total, found.gain, 0.0)
        mine = worth.of_drafts(self.acceptance.chances(max(lengths, default=0)))
        slope, plain = model.slope(batch + found.total), model.step(batch, batch, False)
        for length in lengths:
            drafted = np.minimum(limits, length)
            value = mine[np.arange(batch), drafted]
            chosen = (drafted > 0) & (value - slope * drafted > theirs - slope * found.keep)
            if not chosen.any():
                continue
            drafted, keep = np.where(chosen, drafted, 0), np.where(chosen, 0, found.keep)
            total, passes = int(drafted.sum() + keep.sum()), self.seconds(drafted, plain)
            cost = model.step(batch + total, batch, True) - plain + passes
            gain = float(np.where(chosen, value, theirs).sum()) - cost
            if gain > best.gain:
                best = CopyPlan(drafted, keep, total, gain, passes)
        return best
