"""How many draft tokens a request gets: DAS's optimum for a whole rollout (section
4.2), and the same trade-off for one decode step.
"""

from __future__ import annotations

import math

import numpy as np

from das_adapter.core import tuning
from das_adapter.core.latency import StepModel
from das_adapter.core.length import chance_ended_by
from das_adapter.core.native import native
from das_adapter.core.steps import Chances, Floats, Ints, StepPlan


def drafts_needed(rounds: float, lengths: Floats, alpha: float, k: float) -> Floats:
    """Return p_i*(N): draft tokens with which a rollout of l tokens ends within N
    rounds; 0 where l <= N (equation 7).

    It solves l - A(p) = N with A(p) = k·l·(1 - exp(-alpha·p/l)), the tokens accepted of
    p drafted. Infinite where that has no solution: for N <= l·(1 - k).
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        saved_share = 1.0 - rounds / lengths
        left = 1.0 - saved_share / k
        log_left = np.log(np.maximum(left, 1e-300))
        drafts = -lengths / alpha * log_left
    solvable = np.where(left > 0.0, drafts, np.inf)
    return np.where(lengths <= rounds, 0.0, solvable)


def plan_rollout(
    lengths: Floats, alpha: float, k: float, base: float, token: float
) -> tuple[float, Floats]:
    """Compute the budgets that minimise a rollout's time, c_base·N +
    c_tok·sum_i(min(l_i, N) + p_i*(N)): decode rounds until the last request ends, and
    each request's draft tokens in all.

    Convex in N while alpha·k <= 1, so that bisection on its derivative finds the
    minimum.

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
        longer = lengths[lengths > rounds]
        accepted_per_draft = alpha * (k - 1.0 + rounds / longer)
        drafts_per_round = 1.0 / np.maximum(accepted_per_draft, 1e-12)
        saved_tokens = np.sum(1.0 - drafts_per_round)
        slope = base + token * saved_tokens
        if slope < 0.0:
            low = rounds
        else:
            high = rounds
    return high, drafts_needed(high, lengths, alpha, k)


def das_budgets(
    lengths: Floats,
    curve: tuple[float, float],
    model: StepModel,
    max_draft_tokens: int,
) -> Floats:
    """Return DAS's draft tokens of each request in a round, p_i*/N*, shape (b,): none
    for those that end within N* rounds anyway.

    Args:
        lengths, curve: see `plan_rollout`; (alpha, k).
        model: what a step costs.
        max_draft_tokens: of a request in a step.
    """
    running = len(lengths)
    token = max(model.slope(running), 1e-9)
    tokens_s = token * running
    base = max(model.plain_step(running) - tokens_s, 1e-9)
    rounds, drafts = plan_rollout(lengths, *curve, base, token)
    return np.minimum(drafts / rounds, max_draft_tokens)


def prefix_worth(
    worth: Floats, chances: Chances, offsets: Ints, *keep: Ints
) -> list[Floats]:
    """Return the expected worth of the first `keep` tokens of each draft, seconds [b],
    for each of several; see `allocate`.
    """
    begins = offsets[:-1]
    ends = offsets[1:]
    tokens_s = chances * worth.repeat(ends - begins)
    sums_s = np.concatenate([[0.0], np.cumsum(tokens_s)])
    before_s = sums_s[begins]
    return [sums_s[begins + kept] - before_s for kept in keep]


def allocate(
    chances: Chances,
    offsets: Ints,
    worth: Floats,
    model: StepModel,
    by_worth: bool = True,
) -> StepPlan:
    """Keep the draft tokens that are worth more than they cost in the step that all
    kept tokens make up.

    A request's chances do not increase along its draft, so the tokens of greatest value
    are always a prefix of each draft, and the best set of m tokens is the m of greatest
    value: the best m gives the optimum for any cost. Where drafts take a step beyond
    the largest CUDA graph, they must also be worth the launches of its kernels.

    Args:
        chances: survival chance of each draft token, shape (n,), requests one after the
            other.
        offsets: shape (b + 1,); request i's are `chances[offsets[i]:offsets[i + 1]]`.
        worth: seconds that an accepted token of each request saves, shape (b,).
        model: what the step costs.
        by_worth: False: keep all tokens, and return what that gains.
    """
    requests = len(worth)
    no_model_drafts = np.zeros(requests, dtype=np.int64)
    if by_worth:
        keep = np.empty(requests, dtype=np.int64)
        costs = model.native_costs(requests)
        gain = native().allocate(chances, offsets, worth, costs, keep)
        return StepPlan(keep, no_model_drafts, gain)
    keep = np.diff(offsets)
    (saved,) = prefix_worth(worth, chances, offsets, keep)
    gain = float(saved.sum()) - model.verifying_s(requests, len(chances))
    return StepPlan(keep, no_model_drafts, gain)


def makespan_weights(cdf: Floats, edges: Floats, lengths: Floats) -> Floats:
    """Return the chance of each request to be the last one of the batch, shape (b,),
    summing to 1.

    It is the derivative of the expected number of rounds left with respect to that
    request's own. All requests are taken to write at the same pace: at its present
    pace, a request that is drafted for would look nearly done, and lose its drafts
    again.

    Args:
        cdf: shape (b, g): distribution of each request's length at `edges`.
        edges: shape (g,), in geometric steps from 1.
        lengths: tokens written so far, shape (b,).
    """
    longest = max(1.0, float(edges[-1] - lengths.min())) + 1.0
    exponents = np.linspace(0.0, math.log(longest), tuning.MAKESPAN_POINTS)
    to_come = np.exp(exponents)
    # chance of each request to have ended after so many tokens, [b, points]
    ended = chance_ended_by(cdf, edges, lengths, lengths[:, None] + to_come)
    log_ended = np.log(np.maximum(ended, 1e-12))
    others_ended = np.exp(log_ended.sum(axis=0) - log_ended)
    ends_here = np.diff(ended, axis=1, prepend=0.0)
    is_last = np.maximum(ends_here * others_ended, 0.0)
    chances: Floats = is_last.sum(axis=1) + 1e-9
    return chances / chances.sum()
