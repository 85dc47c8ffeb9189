"""How many draft tokens a request gets: DAS's optimum for a whole rollout (section 4.2), its three classes (4.3), and
the same trade-off for one decode step."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from das_adapter.core.latency import StepModel
from das_adapter.core.length import LengthClass, beyond
from das_adapter.core.native import native
from das_adapter.core.steps import Chances, Ints, StepPlan

Floats = npt.NDArray[np.float64]
CLASS_SHARE = {LengthClass.SHORT: 0.0, LengthClass.MEDIUM: 1 / 3, LengthClass.LONG: 1.0}
"""Share of the largest budget that a class gets. DAS calls them none, moderate and aggressive, without numbers."""


def drafts_needed(rounds: float, lengths: Floats, alpha: float, k: float) -> Floats:
    """Return p_i*(N): draft tokens with which a rollout of l tokens ends within N rounds; 0 where l <= N (equation 7).

    It solves l - A(p) = N with A(p) = k·l·(1 - exp(-alpha·p/l)), the tokens accepted of p drafted. Infinite where that
    has no solution: for N <= l·(1 - k).
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        left = 1.0 - (1.0 - rounds / lengths) / k
        p = np.where(left > 0.0, -lengths / alpha * np.log(np.maximum(left, 1e-300)), np.inf)
    return np.where(lengths <= rounds, 0.0, p)


def plan_rollout(lengths: Floats, alpha: float, k: float, base: float, token: float) -> tuple[float, Floats]:
    """Compute the budgets that minimise a rollout's time, c_base·N + c_tok·sum_i(min(l_i, N) + p_i*(N)): decode rounds
    until the last request ends, and each request's draft tokens in all.

    Convex in N while alpha·k <= 1, so that bisection on its derivative finds the minimum.

    Args:
        lengths: tokens each request is going to write, shape (b,).
        alpha, k: the acceptance curve; alpha·k is clamped to 1.
        base, token: seconds of a step, and of a token in it.
    """
    alpha = min(alpha, 1.0 / k)
    high = float(np.max(lengths))
    low = high * (1.0 - k)
    for _ in range(30):
        rounds = 0.5 * (low + high)
        longer = lengths > rounds
        per_round = alpha * (k - 1.0 + rounds / lengths[longer])
        slope = base + token * np.sum(1.0 - 1.0 / np.maximum(per_round, 1e-12))
        if slope < 0.0:
            low = rounds
        else:
            high = rounds
    return high, drafts_needed(high, lengths, alpha, k)


def das_budgets(
    lengths: Floats, curve: tuple[float, float], classes: Ints, model: StepModel | None, most: int
) -> Floats:
    """Return DAS's draft tokens of each request in a round, p_i*/N*, shape (b,): none for those that end within N*
    rounds anyway. Before it is known what steps cost, each gets its class's share (section 4.3).

    Args:
        lengths, curve: see `plan_rollout`; (alpha, k).
        classes: `LengthClass` of each, shape (b,).
        model: what a step costs; None: not known.
        most: draft tokens of a request in a step.
    """
    if model is None:
        return np.array([round(CLASS_SHARE[c] * most) for c in LengthClass], dtype=float)[classes]
    running = len(lengths)
    token = max(model.slope(running), 1e-9)
    base = max(model.step(running, running, False) - token * running, 1e-9)
    rounds, drafts = plan_rollout(lengths, *curve, base, token)
    return np.minimum(drafts / rounds, most)


class Worth(NamedTuple):
    """Seconds that accepting draft tokens saves, by request: own + tail·exp(-fade·j) for token j = 0, 1, ... of a
    draft."""

    own: Floats
    """What the request's own part in a step costs, shape (b,)."""
    tail: Floats
    """By how much the rollout ends earlier, shape (b,)."""
    fade: Floats
    """How fast `tail` decreases along a draft, shape (b,): a request that gets ahead no longer decides the end."""

    def of_drafts(self, chances: Floats) -> Floats:
        """Return the expected worth of drafts by length, shape (b, n + 1); all requests share the chances, (n,)."""
        place = np.arange(len(chances))
        tokens = chances * (self.own[:, None] + self.tail[:, None] * np.exp(-self.fade[:, None] * place))
        return np.concatenate([np.zeros((len(self.own), 1)), np.cumsum(tokens, axis=1)], axis=1)

    def of_tokens(self, chances: Chances, offsets: Ints) -> Floats:
        """Return the expected worth of each token, shape (n,), of `allocate`'s drafts."""
        drafted = offsets[1:] - offsets[:-1]
        place = np.arange(len(chances)) - offsets[:-1].repeat(drafted)
        own, tail, fade = (part.repeat(drafted) for part in self)
        return chances * (own + tail * np.exp(-fade * place))

    def of_kept(self, chances: Chances, offsets: Ints, *keep: Ints) -> list[Floats]:
        """Return the expected worth of the first `keep` tokens of each draft, shape (b,), for each of several; see
        `allocate`."""
        total = np.concatenate([[0.0], np.cumsum(self.of_tokens(chances, offsets))])
        begins = offsets[:-1]
        return [total[begins + kept] - total[begins] for kept in keep]


def allocate(chances: Chances, offsets: Ints, worth: Worth, model: StepModel, cut: bool = True) -> StepPlan:
    """Keep the draft tokens that are worth more than they cost in the step that all kept tokens make up.

    Neither a request's chances nor their worth increase along its draft, so the tokens of greatest value are always a
    prefix of each draft, and the best set of m tokens is the m of greatest value: the best m gives the optimum for any
    cost.

    Args:
        chances: survival chance of each draft token, shape (n,), requests one after the other.
        offsets: shape (b + 1,); request i's are `chances[offsets[i]:offsets[i + 1]]`.
        worth: of the tokens.
        model: what the step costs.
        cut: False: keep all tokens, and return what that gains.
    """
    requests, counts, kept = len(worth.own), np.arange(len(chances) + 1), None
    costs = model.seconds(requests + counts, requests, counts > 0) - model.step(requests, requests, False)
    if cut:
        keep = np.empty(requests, dtype=np.int64)
        gain, kept = native().allocate(chances, offsets, *worth, costs, keep)
    else:
        keep, gain = np.diff(offsets), float(worth.of_tokens(chances, offsets).sum()) - float(costs[-1])
    return StepPlan(keep, np.zeros(requests, dtype=np.int64), gain, kept=kept)


AHEAD, POINTS = 16.0, 32
"""Tokens of progress over which it is measured how the chance to be the last request fades; numbers of tokens to come
at which the requests' lengths are compared."""


def makespan_weights(cdf: Floats, edges: Floats, lengths: Floats) -> tuple[Floats, Floats]:
    """Return the chance of each request to be the last one of the batch, shape (b,), summing to 1; and how fast it
    fades with each token that the request gets ahead of the others, shape (b,).

    The chance is the derivative of the expected number of rounds left with respect to that request's own. All requests
    are taken to write at the same pace: at its present pace, a request that is drafted for would look nearly done, and
    lose its drafts again.

    Args:
        cdf: shape (b, g): distribution of each request's length at `edges`.
        edges: shape (g,), in geometric steps from 1.
        lengths: tokens written so far, shape (b,).
    """
    if len(lengths) == 1:
        return np.ones(1), np.zeros(1)
    longest = max(1.0, float(edges[-1] - lengths.min())) + 1.0
    to_come = np.exp(np.linspace(0.0, math.log(longest), POINTS))
    at = lengths[:, None] + np.concatenate([to_come, to_come + AHEAD])[None, :]
    done, ahead = np.split(beyond(cdf, edges, lengths, at), 2, axis=1)
    log = np.log(np.maximum(done, 1e-12))
    others = np.exp(log.sum(axis=0)[None, :] - log)
    now, then = (np.maximum(np.diff(x, axis=1, prepend=0.0) * others, 0.0).sum(axis=1) + 1e-9 for x in (done, ahead))
    return now / now.sum(), np.clip(np.log(now / then) / AHEAD, 0.0, 1.0)
