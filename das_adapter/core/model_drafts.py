"""Which requests a model drafts for, by what its drafts cost and gain: the policy copy
(EfficientRollout, arXiv 2606.18967), or a neural drafter.

A draft of γ tokens takes γ forward passes of the model, or one, before the policy
verifies it: the speed-up is S = L / (γ·T_D/T_T + T_V/T_T) with the acceptance length L
(section 3). Where all requests are worth the same, the gain of a plan over the time of
its step is S - 1. Before the first step a roofline gives the times, and the first
drafts L.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from das_adapter.core import tuning
from das_adapter.core.acceptance import AcceptanceRate
from das_adapter.core.confidence import Confidence, Kinds, Outlook, uniform_outlook
from das_adapter.core.latency import StepModel, StepTimes
from das_adapter.core.steps import Floats, Ints


class ModelDrafts:
    """How long a model's passes take and how many of its tokens are accepted, learned
    from the engine's own steps.
    """

    def __init__(
        self,
        most: int,
        narrows: bool = True,
        passes_every_step: int = 0,
        follows: bool = False,
        parallel: bool = False,
        lengths: Sequence[int] | None = None,
    ) -> None:
        """
        Args:
            most: tokens of a draft.
            narrows: whether a pass is only for the requests whose drafts are not
                complete.
            passes_every_step: passes in every step, with drafts or without.
            follows: whether the model reads in a pass what the policy verifies, also
                where the history has drafted that.
            parallel: whether one pass drafts all tokens.
            lengths: lengths that its drafts may have, rising, `most` among them; None:
                any.
        """
        self.max_draft_tokens = most
        self.narrows = narrows
        self.passes_every_step = passes_every_step
        self.follows = follows
        self._parallel = parallel
        self._lengths = [n for n in lengths or range(1, most + 1) if n <= most]
        self.context = 0.0
        """Of a request of the batch, tokens, on average."""
        self.passes = StepTimes(kinds=1)
        self.acceptance = AcceptanceRate()
        self.confidence = Confidence()
        self.counts = np.zeros(2, dtype=np.int64)
        """Its tokens that were verified in training rollouts, and those accepted, since
        somebody took the counts.
        """
        self.passes_made = 0
        """Forward passes since then."""

    def sync(self) -> None:
        """Forget most of the acceptance at a weight sync, which changes the policy."""
        self.acceptance.forget()
        self.confidence.forget()
        self.passes.fit()

    def record_verified(
        self,
        drafted: Ints,
        got: Ints,
        worth: Floats,
        training: npt.NDArray[np.bool_],
        kinds: Kinds | None = None,
    ) -> float:
        """Learn from a step, and return the seconds that accepted tokens saved. Shapes
        (b,): the model's tokens in each request's draft, the tokens that each got, what
        one is worth in seconds, and who belongs to a training rollout; and (b, n): the
        `Confidence` in each token.
        """
        mine = drafted > 0
        tried = drafted[mine]
        accepted = np.minimum(drafted[mine], got[mine] - 1)
        self.acceptance.observe(tried, accepted)
        if kinds is not None:
            self.confidence.record_verified(
                kinds[mine], np.minimum(tried, accepted + 1), accepted
            )
        self.counts += tried @ training[mine], accepted @ training[mine]
        return float(accepted @ worth[mine])

    def set_pass_prior(self, passes: StepModel | None) -> None:
        """Take what a pass costs by a roofline; None: it is not known."""
        self.passes = StepTimes(passes, kinds=1)

    def record_pass(self, requests: int, seconds: float, context: float = 0.0) -> None:
        """Take the time of one forward pass; `context`: tokens of context that all its
        requests have together.
        """
        self.passes.add(requests, requests, False, seconds, context)
        self.passes.keep_fitted()

    def record_draft_kinds(self, kinds: Kinds) -> None:
        """Take the `Confidence` in each token of a step's drafts, uint8 [b, n]."""
        self.confidence.record_drafts(kinds, self.max_draft_tokens)

    @property
    def outlook(self) -> Outlook:
        """What its drafts are going to bring: where nobody says how sure it is, all are
        alike.
        """
        return self.confidence.outlook or uniform_outlook(
            round(self.acceptance.rate, 3), self.max_draft_tokens
        )

    def lengths_above(self, least_chance: float) -> Sequence[int]:
        """Return the lengths that drafts may have; none whose last token survives with
        less than this chance.
        """
        return [
            length
            for length in self._lengths
            if self.outlook.survival[length - 1] >= least_chance
        ]

    def draft_length(self, tokens: int) -> int:
        """Return how many tokens it drafts for each request where so many are
        wanted.
        """
        return (
            min(
                self.max_draft_tokens,
                next((n for n in self._lengths if n >= tokens), tokens),
            )
            if tokens
            else 0
        )

    def passes_for(self, tokens: int) -> int:
        """Return in how many passes it drafts so many tokens for each request."""
        return min(tokens, 1) if self._parallel else self.draft_length(tokens)

    def passes_s(self, drafted: Ints, plain: float) -> float:
        """Return what the passes take that draft so many tokens for each request, shape
        (b,), beyond those of every step; `plain`: a step of the policy.
        """
        passes = range(
            self.passes_every_step, self.passes_for(int(drafted.max(initial=0)))
        )
        if not self.passes.known:
            return tuning.UNSEEN_PASS * plain * len(passes)
        model = self.passes.model.at_context(self.context)
        requests = [
            int(np.count_nonzero(drafted > (step if self.narrows else 0)))
            for step in passes
        ]
        return sum(model.step(n, n, False) for n in requests)

    def may_pay_untried(self, plain: float) -> bool:
        """Return whether it may be worth its passes, which only its first drafts can
        tell; `plain` as in `passes_s`.
        """
        return (
            not self.acceptance.known
            and self.passes_s(np.ones(1, dtype=np.int64), plain) < plain
        )
