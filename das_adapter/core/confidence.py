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
import math
from typing import NamedTuple

import numpy as np

from das_adapter.core import tuning
from das_adapter.core.acceptance import AcceptanceRate
from das_adapter.core.steps import Chances, Floats, Ints, TokenKinds

KINDS = 16
"""Kinds of draft tokens: the odds of each are twice those of the one before."""
EVEN = 4
"""The kind whose odds are at least even; kind 0 has all that are lower than those of
kind 1.
"""


class Remaining(NamedTuple):
    """What is left of the drafts of b requests, which end where a chance is too low."""

    verified: Floats
    """Tokens verified on average of a draft of each length, float64 [b, n + 1]."""
    accepted: Floats
    """Tokens accepted on average of a draft of each length, float64 [b, n + 1]."""
    longest: Ints
    """The most tokens that can be verified, int64 [b]."""


class Outlook:
    """The tokens that drafts are expected to bring, by those of the last steps."""

    def __init__(self, survival: Floats) -> None:
        """`survival`: chance of each token of some drafts to be reached and accepted,
        float64 [drafts, n].
        """
        self.survival = survival.mean(axis=0)
        """Chance of each token on average, float64 [n]."""
        self._levels = _some_values(survival, tuning.OUTLOOK_LEVELS)
        """Chances under which drafts may end, rising, float64 [levels]."""
        min_chances = np.append(self._levels, np.inf)
        # for each level, draft and token: [levels + 1, drafts, n]
        is_verified = survival >= min_chances[:, None, None]
        verified_survival = is_verified * survival
        # of each token on average: [levels + 1, n]
        verified = is_verified.mean(axis=1)
        accepted = verified_survival.mean(axis=1)
        self._verified = _sums_of_first(verified)
        """Mean tokens verified of the first n, float64 [levels + 1, n + 1]."""
        self._accepted = _sums_of_first(accepted)
        """Mean tokens accepted of the first n, float64 [levels + 1, n + 1]."""
        self._longest = np.count_nonzero(verified, axis=1)
        """Tokens of the longest draft that is left, int64 [levels + 1]."""

    def tokens_above(self, min_chance: Floats) -> Remaining:
        """Return what is left of drafts that end where the chance is under one of
        each request's, float64 [b].
        """
        level = np.searchsorted(self._levels, min_chance)
        return Remaining(
            verified=self._verified[level],
            accepted=self._accepted[level],
            longest=self._longest[level],
        )


def _some_values(values: Floats, count: int) -> Floats:
    """Return so many of the different values at most, evenly spread, rising."""
    different = np.unique(values)
    last = len(different) - 1
    num_places = min(len(different), count)
    places = np.linspace(0, last, num_places)
    indices = places.round().astype(int)
    return different[indices]


def _sums_of_first(values: Floats) -> Floats:
    """Return the sums of the first 0 to n values of each row, float64 [rows, n + 1]."""
    rows, columns = values.shape
    sums = np.zeros((rows, columns + 1))
    np.cumsum(values, axis=1, out=sums[:, 1:])
    return sums


@functools.lru_cache(maxsize=256)
def uniform_outlook(rate: float, max_tokens: int) -> Outlook:
    """Return what drafts of so many tokens are going to bring whose tokens all have one
    chance.
    """
    places = np.arange(1.0, max_tokens + 1.0)
    survival = np.power(rate, places)
    one_draft = survival[None]
    return Outlook(one_draft)


class Confidence:
    """The chance of each kind of token, learned, and the kinds of the last drafts."""

    def __init__(self) -> None:
        token_kinds = np.arange(KINDS)
        doublings = token_kinds - EVEN + 0.5
        odds = 2.0**doublings
        # published drafters are surer than they are right
        odds_accepted = odds**tuning.CONFIDENCE_SLOPE
        chances = odds_accepted / (1.0 + odds_accepted)
        num_prior = tuning.CONFIDENCE_PRIOR_TOKENS
        self._rates = AcceptanceRate(
            accepted=num_prior * chances,
            tried=np.full(KINDS, num_prior),
        )
        """Acceptance of the tokens of each kind."""
        self._drafts: Floats = np.zeros((0, 0))
        """Survival chances of the tokens of the last drafts, float64 [drafts, n]."""
        self._survived: Floats = np.zeros(0)
        """Tokens at each place that survive, float64 [n]."""
        self._reached: Floats = np.zeros(0)
        """Tokens at the place before each that survive, float64 [n]."""
        self.outlook: Outlook | None = None
        """The outlook of the next drafts; None: nobody has said how sure a model is."""
        self._steps = 0

    @property
    def chances(self) -> Chances:
        """Chances of a token of each kind to be accepted, given that those before it
        were, float32 [KINDS].
        """
        rates = self._rates.rate
        return np.asarray(rates, dtype=np.float32)

    def record_verified(
        self,
        token_kinds: TokenKinds,
        tried: Ints,
        accepted: Ints,
    ) -> None:
        """Learn from drafts.

        Args:
            token_kinds: of their tokens, uint8 [b, n].
            tried, accepted: how many of these were reached, and accepted, int64 [b].
        """
        num_tried = _count_kinds(token_kinds, tried)
        num_accepted = _count_kinds(token_kinds, accepted)
        self._rates.add(num_tried, num_accepted, num_tried)

    def forget(self) -> None:
        """Reduce the counts of each kind, as `AcceptanceRate.forget` does."""
        self._rates.forget()

    def record_drafts(self, token_kinds: TokenKinds, max_tokens: int) -> None:
        """Add a step's drafts to the outlook: tokens beyond theirs survive as such
        tokens of longer drafts did. Which tokens were verified says nothing of the
        others, for those were surer.

        Args:
            token_kinds: of the drafts' tokens, uint8 [b, n].
            max_tokens: length of the outlook's drafts.
        """
        if self._drafts.shape[1] != max_tokens:
            self._drafts = np.zeros((0, max_tokens))
            self._survived = np.zeros(max_tokens)
            self._reached = np.zeros(max_tokens)
        # other drafts in every step
        num_drafts, num_known = token_kinds.shape
        stride = math.ceil(num_drafts / tuning.OUTLOOK_NEW_DRAFTS)
        first = self._steps % stride
        some = token_kinds[first::stride]
        # place 0 is before the first token, and survives
        shape = len(some), 1 + max_tokens
        survival = np.ones(shape)
        known = survival[:, 1 : 1 + num_known]
        unknown = survival[:, 1 + num_known :]
        chances = self.chances[some]
        chances.cumprod(axis=1, out=known)
        tokens = survival.sum(axis=0)
        self._count_survival(tokens, num_known)
        last = survival[:, [num_known]]
        rates = self._survival_rates()
        rates_beyond = rates[num_known:].cumprod()
        np.multiply(last, rates_beyond, out=unknown)
        new = survival[:, 1:]
        drafts = np.concatenate([self._drafts, new])
        self._drafts = drafts[-tuning.OUTLOOK_DRAFTS :]
        if self._steps % tuning.OUTLOOK_STEPS == 0:
            self.outlook = Outlook(self._drafts)
        self._steps += 1

    def _count_survival(self, tokens: Floats, num_known: int) -> None:
        """Count tokens at places 0 to `num_known`; place 0 is before the first."""
        self._survived *= tuning.SURVIVAL_KEPT
        self._reached *= tuning.SURVIVAL_KEPT
        here = tokens[1 : 1 + num_known]
        before = tokens[:num_known]
        self._survived[:num_known] += here
        self._reached[:num_known] += before

    def _survival_rates(self) -> Floats:
        """Return the chance of a token at each place, given the one before it, float64
        [n].
        """
        first_rate = self._survived[0] / self._reached[0]
        num_prior = tuning.CONFIDENCE_PRIOR_TOKENS
        prior = num_prior * first_rate
        survived = self._survived + prior
        reached = self._reached + num_prior
        return np.asarray(survived / reached)


def _count_kinds(token_kinds: TokenKinds, tokens: Ints) -> Ints:
    """Return how many tokens of each kind are among the first `tokens`, int64 [b], of
    each draft, int64 [KINDS].
    """
    place = np.arange(token_kinds.shape[1])
    num_tokens = tokens[:, None]
    is_counted = place < num_tokens
    counted = token_kinds[is_counted]
    return np.bincount(counted, minlength=KINDS)
