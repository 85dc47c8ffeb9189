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

from das_adapter.core.acceptance import AcceptanceRate
from das_adapter.core.steps import Chances, Floats, Ints

KINDS = 16
"""Of draft tokens: the odds of each are twice those of the one before."""
EVEN = 4
"""The kind whose odds are at least even; kind 0 has all that are lower than those of
1.
"""
Kinds = npt.NDArray[np.uint8]
_PRIOR = 4.0
"""Tokens of each kind that are assumed at first."""
_DRAFTS, _NEW = 256, 8
"""Drafts of which the outlook is made; those of a step that are taken into it, at
most.
"""
_KEPT = 8
"""Steps for which an outlook is kept."""
_FADE = 0.99
"""What a step leaves of how tokens survived before it."""
_LEVELS = 48
"""Least chances for which the outlook is made, at most."""


class Outlook:
    """What drafts are going to bring, by those of the last steps."""

    def __init__(self, survival: Floats) -> None:
        """`survival`: chance of each token of some drafts to be reached and accepted,
        float64 [drafts, n].
        """
        self.survival = survival.mean(axis=0)
        """Chance of each token on average, float64 [n]."""
        levels = np.unique(survival)
        self._levels = levels[
            np.linspace(0, len(levels) - 1, min(len(levels), _LEVELS))
            .round()
            .astype(int)
        ]
        kept = survival >= np.append(self._levels, np.inf)[:, None, None]
        verified = kept.mean(axis=1)
        accepted = (kept * survival).mean(axis=1)
        self._sums = np.zeros((2, len(kept), survival.shape[1] + 1))
        np.cumsum([verified, accepted], axis=2, out=self._sums[:, :, 1:])
        self._longest = np.count_nonzero(verified, axis=1)

    def tokens_above(self, least: Floats) -> tuple[Floats, Floats, Ints]:
        """Return how many tokens of a draft of each length are verified and accepted on
        average where those end whose chance is under `least`, float64 [b, n + 1] both;
        and how many can be, int64 [b].
        """
        level = np.searchsorted(self._levels, least)
        verified, accepted = self._sums[:, level]
        return verified, accepted, self._longest[level]


@functools.lru_cache(maxsize=256)
def uniform_outlook(rate: float, most: int) -> Outlook:
    """Return what drafts of `most` tokens are going to bring whose tokens all have one
    chance.
    """
    return Outlook(np.power(rate, np.arange(1.0, most + 1.0))[None])


class Confidence:
    """The chance of each kind of token, learned, and the kinds of the last drafts."""

    def __init__(self) -> None:
        odds = 2.0 ** (np.arange(KINDS) - EVEN + 0.5)
        # published drafters are surer than they are right: 0.5 to 1
        start = odds**0.7 / (1.0 + odds**0.7)
        self._kinds = AcceptanceRate(_PRIOR * start, np.full(KINDS, _PRIOR))
        self._drafts: Floats = np.zeros((0, 0))  # survival of their tokens
        # tokens at each place, and at the one before, that survive
        self._survived: Floats = np.zeros((2, 0))
        self.outlook: Outlook | None = None
        """None: nobody has said how sure a model is."""
        self._steps = 0

    @property
    def chances(self) -> Chances:
        """Of a token of each kind to be accepted, given that those before it were,
        float32 [KINDS].
        """
        return np.asarray(self._kinds.rate, dtype=np.float32)

    def record_verified(self, kinds: Kinds, tried: Ints, accepted: Ints) -> None:
        """Learn from drafts: `kinds`, uint8 [b, n], of their tokens, of which so many
        were reached and accepted, int64 [b].
        """
        place = np.arange(kinds.shape[1])
        reached, kept = (
            np.bincount(kinds[place < n[:, None]], minlength=KINDS)
            for n in (tried, accepted)
        )
        self._kinds.add(reached, kept, reached)

    def forget(self) -> None:
        """As `AcceptanceRate.forget`, for each kind."""
        self._kinds.forget()

    def record_drafts(self, kinds: Kinds, most: int) -> None:
        """Take the kinds of a step's drafts, uint8 [b, n], into the outlook, for drafts
        of `most` tokens: those beyond n survive as such tokens of longer drafts did.
        Which tokens were verified says nothing of the others, for those were surer.
        """
        stride = -(-len(kinds) // _NEW)
        known = kinds.shape[1]
        some = kinds[self._steps % stride :: stride]  # others in every step
        if self._drafts.shape[1] != most:
            self._drafts = np.zeros((0, most))
            self._survived = np.zeros((2, most))
        survival = np.ones((len(some), 1 + most))
        self.chances[some].cumprod(axis=1, out=survival[:, 1 : 1 + known])
        tokens = survival.sum(axis=0)
        self._survived *= _FADE
        self._survived[:, :known] += tokens[1 : 1 + known], tokens[:known]
        after, before = self._survived
        usual = (after + _PRIOR * after[0] / before[0]) / (before + _PRIOR)
        survival[:, 1 + known :] = survival[:, [known]] * usual[known:].cumprod()
        self._drafts = np.concatenate([self._drafts, survival[:, 1:]])[-_DRAFTS:]
        if self._steps % _KEPT == 0:
            self.outlook = Outlook(self._drafts)
        self._steps += 1
