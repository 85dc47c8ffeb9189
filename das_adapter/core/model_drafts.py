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

from das_adapter.core import tuning
from das_adapter.core.acceptance import AcceptanceRate
from das_adapter.core.confidence import Confidence, Outlook, uniform_outlook
from das_adapter.core.latency import StepModel, StepTimes
from das_adapter.core.steps import Bools, Floats, Ints, TokenKinds


class ModelDrafts:
    """How long a model's passes take and how many of its tokens are accepted, learned
    from the engine's own steps.
    """

    def __init__(
        self,
        max_draft_tokens: int,
        narrows: bool = True,
        passes_every_step: int = 0,
        follows: bool = False,
        parallel: bool = False,
        lengths: Sequence[int] | None = None,
    ) -> None:
        """
        Args:
            max_draft_tokens: tokens of a draft, at most.
            narrows: whether a pass is only for the requests whose drafts are not
                complete.
            passes_every_step: passes in every step, with drafts or without.
            follows: whether the model reads in a pass what the policy verifies, also
                where the history has drafted that.
            parallel: whether one pass drafts all tokens.
            lengths: lengths that its drafts may have, rising, `max_draft_tokens` among
                them; None: any.
        """
        self.max_draft_tokens = max_draft_tokens
        self.narrows = narrows
        self.passes_every_step = passes_every_step
        self.follows = follows
        self._parallel = parallel
        all_lengths = lengths or range(1, max_draft_tokens + 1)
        self._lengths = [n for n in all_lengths if n <= max_draft_tokens]
        self.context = 0.0
        """Tokens of context that a request of the batch has, on average."""
        self.passes = StepTimes(min_step_kinds=1)
        self.acceptance = AcceptanceRate()
        self.confidence = Confidence()
        self.counts = np.zeros(2, dtype=np.int64)
        """The model's tokens that were verified in training rollouts, and those of them
        that were accepted, since the counts were set to 0, int64 [2].
        """
        self.passes_made = 0
        """Forward passes of the model since the counts were set to 0."""

    def sync(self) -> None:
        """Forget most of the acceptance at a weight sync, which changes the policy."""
        self.acceptance.forget()
        self.confidence.forget()
        self.passes.fit()

    def record_verified(
        self,
        drafted: Ints,
        got: Ints,
        worth_s: Floats,
        training: Bools,
        token_kinds: TokenKinds | None = None,
    ) -> float:
        """Learn from a step, and return the seconds that accepted tokens saved.

        Args:
            drafted: the model's tokens in each request's draft, int64 [b].
            got: tokens that each request got, int64 [b].
            worth_s: seconds that a token of each request is worth, float64 [b].
            training: whether each belongs to a training rollout, bool [b].
            token_kinds: `Confidence` in each token, uint8 [b, n].
        """
        by_model = drafted > 0
        tried = drafted[by_model]
        accepted = np.minimum(tried, got[by_model] - 1)
        self.acceptance.observe(tried, accepted)
        if token_kinds is not None:
            reached = np.minimum(tried, accepted + 1)
            self.confidence.record_verified(token_kinds[by_model], reached, accepted)
        counted = training[by_model]
        self.counts += tried @ counted, accepted @ counted
        return float(accepted @ worth_s[by_model])

    def set_pass_prior(self, passes: StepModel | None) -> None:
        """Assume what a pass costs by a roofline; None: it is not known."""
        self.passes = StepTimes(passes, min_step_kinds=1)

    def record_pass(
        self,
        requests: int,
        seconds: float,
        context: float = 0.0,
    ) -> None:
        """Record the time of one forward pass; `context`: tokens of context that all
        its requests have together.
        """
        self.passes.add(
            tokens=requests,
            requests=requests,
            drafted=False,
            seconds=seconds,
            context=context,
        )
        self.passes.keep_fitted()

    def record_token_kinds(self, token_kinds: TokenKinds) -> None:
        """Record the `Confidence` in each token of a step's drafts, uint8 [b, n]."""
        self.confidence.record_drafts(token_kinds, self.max_draft_tokens)

    @property
    def outlook(self) -> Outlook:
        """The tokens that its drafts are expected to bring: where nobody says how sure
        it is, all have one chance.
        """
        if self.confidence.outlook is not None:
            return self.confidence.outlook
        rate = round(self.acceptance.rate, 3)
        return uniform_outlook(rate, self.max_draft_tokens)

    def lengths_above(self, min_chance: float) -> Sequence[int]:
        """Return the lengths that drafts may have; none whose last token survives with
        less than this chance.
        """
        survival = self.outlook.survival
        lengths = []
        for length in self._lengths:
            last = length - 1
            if survival[last] >= min_chance:
                lengths.append(length)
        return lengths

    def draft_length(self, tokens: int) -> int:
        """Return how many tokens it drafts for each request where so many are
        wanted.
        """
        if not tokens:
            return 0
        for length in self._lengths:
            if length >= tokens:
                return length
        return min(self.max_draft_tokens, tokens)

    def passes_for(self, tokens: int) -> int:
        """Return in how many passes it drafts so many tokens for each request."""
        if self._parallel:
            return min(tokens, 1)
        return self.draft_length(tokens)

    def passes_s(self, drafted: Ints, plain_s: float) -> float:
        """Return what the passes take that draft so many tokens for each request, shape
        (b,), beyond those of every step; `plain_s`: seconds of a plain step.
        """
        longest = int(drafted.max(initial=0))
        all_passes = self.passes_for(longest)
        passes = range(self.passes_every_step, all_passes)
        if not self.passes.known:
            pass_s = tuning.UNSEEN_PASS * plain_s
            return pass_s * len(passes)
        model = self.passes.model.at_context(self.context)
        seconds = 0.0
        for number in passes:
            num_made = number if self.narrows else 0
            is_incomplete = drafted > num_made
            requests = int(np.count_nonzero(is_incomplete))
            seconds += model.plain_step(requests)
        return seconds

    def may_pay_untried(self, plain_s: float) -> bool:
        """Return whether it may be worth its passes, which only its first drafts can
        say; `plain_s`: seconds of a plain step.
        """
        if self.acceptance.known:
            return False
        one_token = np.ones(1, dtype=np.int64)
        passes_s = self.passes_s(one_token, plain_s)
        return passes_s < plain_s
