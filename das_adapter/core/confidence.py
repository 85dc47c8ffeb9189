"""How sure a model is of the tokens that it drafts, and what that says of them: with it
each request's draft ends where it is no longer worth verifying (the
confidence-scheduled verification of DSpark, learned from the run itself).

A drafter gives the token that it drafts a probability q. Tokens are of a kind by the
odds q / (1 - q), and what share of each kind is accepted is counted. Tokens are drawn
with the policy's noise, whatever is verified: to look at the very token, and not only
at the distribution that it was drawn from, is lossless here.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from das_adapter.core import tuning
from das_adapter.core.acceptance import AcceptanceRate
from das_adapter.core.steps import Chances, Floats, Ints

KINDS = 16
"""Kinds of draft tokens: the odds of each are twice those of the one before."""
EVEN = 4
"""The kind whose odds are at least even; kind 0 has all that are lower than those of
kind 1.
"""
Kinds = npt.NDArray[np.uint8]


class Outlook:
    """The tokens that drafts are expected to bring, by those of the last steps."""

    def __init__(self, survival: Floats) -> None:
        """`survival`: chance of each token of some drafts to be reached and accepted,
        float64 [drafts, n].
        """
        self.survival = survival.mean(axis=0)
        """Chance of each token on average, float64 [n]."""
        chances = np.unique(survival)
        num_levels = min(len(chances), tuning.OUTLOOK_LEVELS)
        places = np.linspace(0, len(chances) - 1, num_levels).round()
        self._levels = chances[places.astype(int)]
        """Chances under which drafts may end, rising, float64 [levels]."""
        thresholds = np.append(self._levels, np.inf)
        kept = survival >= thresholds[:, None, None]
        verified = kept.mean(axis=1)
        accepted = (kept * survival).mean(axis=1)
        tokens = survival.shape[1]
        self._sums = np.zeros((2, len(thresholds), tokens + 1))
        """Mean tokens verified, and accepted, of the first n, float64 [2, levels + 1,
        n + 1].
        """
        np.cumsum([verified, accepted], axis=2, out=self._sums[:, :, 1:])
        self._longest = np.count_nonzero(verified, axis=1)
        """Tokens of the longest draft that is left, int64 [levels + 1]."""

    def tokens_above(self, min_chance: Floats) -> tuple[Floats, Floats, Ints]:
        """Return what is left of drafts that end where the chance is under one of
        each request's, float64 [b].

        Returns:
            Tokens verified and accepted on average of a draft of each length, float64
            [b, n + 1] both, and the most that can be, int64 [b].
        """
        level = np.searchsorted(self._levels, min_chance)
        verified, accepted = self._sums[:, level]
        return verified, accepted, self._longest[level]


@functools.lru_cache(maxsize=256)
def uniform_outlook(rate: float, max_tokens: int) -> Outlook:
    """Return what drafts of so many tokens are going to bring whose tokens all have one
    chance.
    """
    places = np.arange(1.0, max_tokens + 1.0)
    survival = np.power(rate, places)
    return Outlook(survival[None])


class Confidence:
    """The chance of each kind of token, learned, and the kinds of the last drafts."""

    def __init__(self) -> None:
        odds = 2.0 ** (np.arange(KINDS) - EVEN + 0.5)
        # published drafters are surer than they are right
        odds_accepted = odds**tuning.CONFIDENCE_SLOPE
        chances = odds_accepted / (1.0 + odds_accepted)
        prior = tuning.CONFIDENCE_PRIOR_TOKENS
        self._kinds = AcceptanceRate(prior * chances, np.full(KINDS, prior))
        self._drafts: Floats = np.zeros((0, 0))
        """Survival chances of the tokens of the last drafts, float64 [drafts, n]."""
        self._survived: Floats = np.zeros((2, 0))
        """Tokens at each place that survive, and of those at the place before, float64
        [2, n].
        """
        self.outlook: Outlook | None = None
        """The outlook of the next drafts; None: nobody has said how sure a model is."""
        self._steps = 0

    @property
    def chances(self) -> Chances:
        """Chances of a token of each kind to be accepted, given that those before it
        were, float32 [KINDS].
        """
        return np.asarray(self._kinds.rate, dtype=np.float32)

    def record_verified(self, kinds: Kinds, tried: Ints, accepted: Ints) -> None:
        """Learn from drafts.

        Args:
            kinds: of their tokens, uint8 [b, n].
            tried, accepted: how many of these were reached, and accepted, int64 [b].
        """
        place = np.arange(kinds.shape[1])
        reached = kinds[place < tried[:, None]]
        kept = kinds[place < accepted[:, None]]
        num_reached = np.bincount(reached, minlength=KINDS)
        num_kept = np.bincount(kept, minlength=KINDS)
        self._kinds.add(num_reached, num_kept, num_reached)

    def forget(self) -> None:
        """Reduce the counts of each kind, as `AcceptanceRate.forget` does."""
        self._kinds.forget()

    def record_drafts(self, kinds: Kinds, max_tokens: int) -> None:
        """Add a step's drafts to the outlook: tokens beyond theirs survive as such
        tokens of longer drafts did. Which tokens were verified says nothing of the
        others, for those were surer.

        Args:
            kinds: of the drafts' tokens, uint8 [b, n].
            max_tokens: length of the outlook's drafts.
        """
        if self._drafts.shape[1] != max_tokens:
            self._drafts = np.zeros((0, max_tokens))
            self._survived = np.zeros((2, max_tokens))
        # other drafts in every step
        stride = -(-len(kinds) // tuning.OUTLOOK_NEW_DRAFTS)
        some = kinds[self._steps % stride :: stride]
        known = kinds.shape[1]
        survival = np.ones((len(some), 1 + max_tokens))
        self.chances[some].cumprod(axis=1, out=survival[:, 1 : 1 + known])
        self._count_survival(survival.sum(axis=0), known)
        rates = self._survival_rates()
        last = survival[:, [known]]
        survival[:, 1 + known :] = last * rates[known:].cumprod()
        drafts = np.concatenate([self._drafts, survival[:, 1:]])
        self._drafts = drafts[-tuning.OUTLOOK_DRAFTS :]
        if self._steps % tuning.OUTLOOK_STEPS == 0:
            self.outlook = Outlook(self._drafts)
        self._steps += 1

    def _count_survival(self, tokens: Floats, known: int) -> None:
        """Count tokens at places 0 to `known`; place 0 is before the first."""
        self._survived *= tuning.SURVIVAL_KEPT
        self._survived[0, :known] += tokens[1 : 1 + known]
        self._survived[1, :known] += tokens[:known]

    def _survival_rates(self) -> Floats:
        """Return the chance of a token at each place, given the one before it, float64
        [n].
        """
        after, before = self._survived
        first = after[0] / before[0]
        prior = tuning.CONFIDENCE_PRIOR_TOKENS
        return np.asarray((after + prior * first) / (before + prior))
