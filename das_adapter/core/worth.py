"""What an accepted draft token of a request is worth, in seconds.

An accepted token saves its request one round of decoding. Two parts of a round are
saved. The request's own part is what its tokens and its context add to each step. The
rest of the round is saved only if the rollout ends earlier, which the request that ends
last decides:

    worth[i] = own_s[i] + P(i ends last) * rest_of_round_s

The rounds that are saved are those of the present, with their drafts, or plain ones,
where these are cheaper: plain decoding is always possible, so that no saved round is
worth more than a plain one. Else drafts that make rounds dear would make it seem worth
any price to save one.

If each request saves a token, the rollout is one round shorter: so all worths add up to
no more than a plain round, however steep times are at the present batch.
"""

from __future__ import annotations

import numpy as np

from das_adapter.core.latency import StepModel
from das_adapter.core.steps import Floats


def token_worth(
    last: Floats,
    pace: Floats,
    load: Floats,
    request_s: Floats,
    model: StepModel,
    drafting_s: float,
) -> Floats:
    """Return the seconds that an accepted token of each request saves, float64 [b].

    Args:
        last: chance of each request to end last, float64 [b].
        pace: tokens that each gets in a step, lately, float64 [b].
        load: draft tokens that each has in a step, lately, float64 [b].
        request_s: seconds that each adds to a step, its tokens apart, float64 [b].
        model: times of the engine's steps.
        drafting_s: seconds that drafting takes in a step, lately.
    """
    running = float(len(last))
    one_token = np.ones_like(load)
    plain_token_s = model.slope(running)
    plain_rest_s = _rest_of_round(last, one_token, model)
    plain_s = plain_token_s + request_s + last * plain_rest_s

    tokens = 1.0 + load
    token_s = model.slope(float(tokens.sum()))
    own_s = (token_s * tokens + request_s) / pace
    rest_s = _rest_of_round(last, tokens, model) + drafting_s
    expected_pace = float(last @ pace)
    drafted_s = own_s + last * rest_s / expected_pace

    worth_s: Floats = np.minimum(drafted_s, plain_s)
    round_s = model.plain_step(running)
    total_s = float(worth_s.sum())
    if total_s > round_s:
        worth_s *= round_s / total_s
    return worth_s


def _rest_of_round(last: Floats, tokens: Floats, model: StepModel) -> float:
    """Return the seconds of one of the rollout's last rounds that belong to no request:
    the step's time without its tokens and requests.
    """
    squares = float(last @ last)
    # of as many requests with equal chances one would end last
    num_last_requests = 1.0 / squares
    mean_tokens = float(last @ tokens)
    num_last_tokens = num_last_requests * mean_tokens
    drafted = num_last_tokens > num_last_requests
    step_s = model.step(
        tokens=num_last_tokens,
        requests=num_last_requests,
        drafted=drafted,
    )
    token_s = model.slope(num_last_tokens)
    tokens_s = token_s * num_last_tokens
    requests_s = model.request * num_last_requests
    return max(0.0, step_s - tokens_s - requests_s)
