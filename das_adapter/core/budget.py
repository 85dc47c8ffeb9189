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

UNLIMITED = 2**62
"""Draft tokens of a step where there is no limit."""


def drafts_needed(
    rounds: float,
    lengths: Floats,
    alpha: float,
    k: float,
) -> Floats:
    """Return p_i*(N): draft tokens with which a rollout of l tokens ends within N
    rounds; 0 where l <= N (equation 7).

    It solves l - A(p) = N with A(p) = k·l·(1 - exp(-alpha·p/l)), the tokens accepted of
    p drafted. Infinite where that has no solution: for N <= l·(1 - k).
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        rounds_share = rounds / lengths
        saved_share = 1.0 - rounds_share
        left = 1.0 - saved_share / k
        positive_left = np.maximum(left, 1e-300)
        log_left = np.log(positive_left)
        drafts = -lengths / alpha * log_left
    is_solvable = left > 0.0
    solution = np.where(is_solvable, drafts, np.inf)
    ends_anyway = lengths <= rounds
    return np.where(ends_anyway, 0.0, solution)


def plan_rollout(
    lengths: Floats,
    alpha: float,
    k: float,
    base: float,
    token: float,
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
        is_longer = lengths > rounds
        longer = lengths[is_longer]
        rounds_share = rounds / longer
        left = k - 1.0 + rounds_share
        accepted_per_draft = np.maximum(alpha * left, 1e-12)
        drafts_per_round = 1.0 / accepted_per_draft
        saved_tokens = np.sum(1.0 - drafts_per_round)
        saved_tokens_s = token * saved_tokens
        slope = base + saved_tokens_s
        if slope < 0.0:
            low = rounds
        else:
            high = rounds
    drafts = drafts_needed(high, lengths, alpha, k)
    return high, drafts


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
    alpha, k = curve
    token_s = max(model.slope(running), 1e-9)
    tokens_s = token_s * running
    plain_s = model.plain_step(running)
    base_s = max(plain_s - tokens_s, 1e-9)
    rounds, drafts = plan_rollout(
        lengths=lengths,
        alpha=alpha,
        k=k,
        base=base_s,
        token=token_s,
    )
    drafts_per_round = drafts / rounds
    return np.minimum(drafts_per_round, max_draft_tokens)


def prefix_worth(
    worth_s: Floats,
    chances: Chances,
    offsets: Ints,
    *keep: Ints,
) -> list[Floats]:
    """Return the expected worth of the first `keep` tokens of each draft, seconds [b],
    for each of several; see `allocate`.
    """
    begins = offsets[:-1]
    ends = offsets[1:]
    num_tokens = ends - begins
    token_worth_s = worth_s.repeat(num_tokens)
    tokens_s = chances * token_worth_s
    # of the first n tokens of all requests, n from 0
    sums_s = np.append(0.0, np.cumsum(tokens_s))
    before_s = sums_s[begins]
    kept_s = []
    for num_kept in keep:
        ends_of_kept = begins + num_kept
        with_kept_s = sums_s[ends_of_kept]
        kept_s.append(with_kept_s - before_s)
    return kept_s


def allocate(
    chances: Chances,
    offsets: Ints,
    worth_s: Floats,
    model: StepModel,
    by_worth: bool = True,
    max_total: int = UNLIMITED,
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
        worth_s: seconds that an accepted token of each request saves, shape (b,).
        model: what the step costs.
        by_worth: False: keep all tokens, and return what that gains.
        max_total: the most tokens that are kept by their worth.
    """
    requests = len(worth_s)
    no_model_drafts = np.zeros(requests, dtype=np.int64)
    if by_worth:
        keep = np.empty(requests, dtype=np.int64)
        costs = model.native_costs(requests)
        gain = native().allocate(chances, offsets, worth_s, costs, max_total, keep)
        return StepPlan(keep, no_model_drafts, gain)
    keep = np.diff(offsets)
    (saved_s,) = prefix_worth(worth_s, chances, offsets, keep)
    total_saved_s = float(saved_s.sum())
    verifying_s = model.verifying_s(requests, len(chances))
    gain = total_saved_s - verifying_s
    return StepPlan(keep, no_model_drafts, gain)


def makespan_weights(
    cdf: Floats,
    edges: Floats,
    lengths: Floats,
) -> Floats:
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
    shortest = lengths.min()
    most_to_come = float(edges[-1] - shortest)
    longest = max(1.0, most_to_come) + 1.0
    last_exponent = math.log(longest)
    exponents = np.linspace(0.0, last_exponent, tuning.MAKESPAN_POINTS)
    to_come = np.exp(exponents)
    # chance of each request to have ended after so many tokens, [b, points]
    points = lengths[:, None] + to_come
    ended = chance_ended_by(cdf, edges, lengths, points)
    positive = np.maximum(ended, 1e-12)
    log_ended = np.log(positive)
    log_all_ended = log_ended.sum(axis=0)
    log_others_ended = log_all_ended - log_ended
    others_ended = np.exp(log_others_ended)
    ends_here = np.diff(ended, axis=1, prepend=0.0)
    ends_last_here = ends_here * others_ended
    ends_last_here = np.maximum(ends_last_here, 0.0)
    chances: Floats = ends_last_here.sum(axis=1) + 1e-9
    return chances / chances.sum()
