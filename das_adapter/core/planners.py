"""The two ways to share out the draft tokens of a step: each request has its own
length, or all have the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from das_adapter.core.budget import allocate, prefix_worth
from das_adapter.core.latency import StepModel
from das_adapter.core.model_drafts import ModelDrafts
from das_adapter.core.steps import Chances, Floats, Ints, StepPlan

_FREE = StepModel(base=0.0, token=0.0)


class DraftCandidates(NamedTuple):
    """What there is to draft in a step of b requests."""

    limits: Ints
    """Most tokens of each request, shape (b,)."""
    chances: Chances
    offsets: Ints
    """The history's drafts: survival chance of each token, shape (n,); request i's are
    `chances[o[i]:o[i + 1]]`.
    """
    drafter: ModelDrafts | None
    """Of the model that drafts as well; None: none does."""
    min_chance: float
    """Chance under which a draft ends."""
    by_worth: bool
    """Whether tokens that are worth less than they cost are left out; else budgets are
    fixed.
    """


def plan_own_lengths(
    candidates: DraftCandidates, worth: Floats, model: StepModel
) -> StepPlan:
    """Give each request the draft tokens that are worth more than they cost, from the
    history or from the model; under fixed budgets all of them, and say what that gains.
    `worth`, `model`: see `allocate`.
    """
    found = allocate(
        candidates.chances, candidates.offsets, worth, model, candidates.by_worth
    )
    running = len(worth)
    # it reads in a pass what is verified
    if candidates.drafter is not None and candidates.drafter.follows and found.total:
        passes = candidates.drafter.passes_s(
            np.ones(running, dtype=np.int64), model.step(running, running, False)
        )
        found = found._replace(gain=found.gain - passes, passes_s=passes)
    return add_model_drafts(candidates, found, worth, model)


def plan_one_length(
    candidates: DraftCandidates, worth: Floats, model: StepModel, lengths: Sequence[int]
) -> StepPlan:
    """Give all requests the one of the `lengths`, rising, that is worth most; under
    fixed budgets the one that these need. Where there is a model, it drafts for all or
    for nobody: then each request has the better draft of both.
    """
    running = len(candidates.limits)
    found = candidates.offsets[1:] - candidates.offsets[:-1]
    drafts = candidates.drafter
    nothing = np.zeros_like(candidates.limits)
    plain = model.step(running, running, False)
    best = StepPlan(nothing, nothing)
    mine = nothing
    theirs = np.zeros((running, 1))
    if drafts is not None:
        mine = np.minimum(candidates.limits, drafts.max_draft_tokens)
        theirs = worth[:, None] * np.append(0.0, drafts.outlook.survival.cumsum())
    needed = shortest_sufficient_length(
        np.minimum(candidates.limits, np.maximum(found, mine)), lengths
    )
    tried = [n for n in lengths if n <= needed and (n == needed or candidates.by_worth)]
    kept = prefix_worth(
        worth,
        candidates.chances,
        candidates.offsets,
        *(np.minimum(found, n) for n in tried),
    )
    for length, saved in zip(tried, kept, strict=True):
        verified = model.step(running * (1 + length), running, True) - plain
        for by_model in (False,) if drafts is None else (False, True):
            passes = 0.0
            # where the history drafts, a model that follows reads what was drafted, in
            # a pass
            if drafts is not None:
                each = (
                    min(length, drafts.max_draft_tokens)
                    if by_model
                    else int(drafts.follows)
                )
                passes = drafts.passes_s(np.full_like(candidates.limits, each), plain)
            if by_model:
                saved = np.maximum(
                    saved, theirs[np.arange(running), np.minimum(mine, length)]
                )
            gain = float(np.add.reduce(saved)) - passes - verified
            if gain > best.gain or not candidates.by_worth:
                same = np.full_like(candidates.limits, length)
                best = StepPlan(
                    *((nothing, same) if by_model else (same, nothing)), gain, passes
                )
    return best


def plan_everything(candidates: DraftCandidates) -> StepPlan:
    """Verify all that there is; the model drafts for the requests for which it brings
    more tokens.
    """
    found = np.diff(candidates.offsets)
    nothing = np.zeros_like(found)
    return add_model_drafts(
        candidates, StepPlan(found, nothing), np.ones(len(found)), _FREE
    )


def shortest_sufficient_length(keep: Ints, lengths: Sequence[int]) -> int:
    """Return the shortest of the lengths that is enough for each request."""
    most = int(np.maximum.reduce(keep, initial=0))
    return next((n for n in lengths if n >= most), most) if most else 0


def add_model_drafts(
    candidates: DraftCandidates, found: StepPlan, worth: Floats, model: StepModel
) -> StepPlan:
    """Let the model draft, equally many tokens at most, for the requests for which it
    is worth more than what was `found`, which stands where that gains nothing; under
    fixed budgets the longest, gain or not, for those for which it is worth more.
    Arguments as in `plan_own_lengths`.
    """
    drafts = candidates.drafter
    batch = len(worth)
    best = found
    if drafts is None:
        return found
    lengths = drafts.lengths_above(candidates.min_chance)
    if not candidates.by_worth:
        lengths = lengths[-1:]
        best = found._replace(gain=found.gain if len(candidates.chances) else -np.inf)
    (theirs,) = prefix_worth(
        worth, candidates.chances, candidates.offsets, found.history
    )
    slope = model.slope(batch + found.total)
    steep = model.slope(np.inf)
    room = model.knee - batch
    plan = _priced(
        candidates, drafts, found.history, theirs, worth, model, lengths, slope
    )
    if (
        plan is not None
        and candidates.by_worth
        and drafts.confidence.outlook
        and found.total < room < plan.total
    ):
        dear = _priced(
            candidates, drafts, found.history, theirs, worth, model, lengths, steep
        )
        if dear is not None and dear.gain > plan.gain:
            plan = dear
            if (
                free := int(room) - dear.total
            ) > 0:  # tokens that are worth less cost nothing up to there
                more = (
                    np.minimum(dear.longest * (dear.history == 0), candidates.limits)
                    - dear.model
                )
                shares = np.rint(more.cumsum() * min(1.0, free / max(1, more.sum())))
                plan = dear._replace(
                    model=dear.model + np.diff(shares, prepend=0.0).astype(np.int64)
                )
    return plan if plan is not None and plan.gain > best.gain else best


def _priced(
    candidates: DraftCandidates,
    drafts: ModelDrafts,
    history: Ints,
    theirs: Floats,
    worth: Floats,
    model: StepModel,
    lengths: Sequence[int],
    price: float,
) -> StepPlan | None:
    """Return the best plan whose drafts of a model have one of the `lengths` and are
    verified as far as their tokens are worth a price in seconds; None: nobody gets one.
    `theirs`: what each request's tokens from the history are worth, float64 [b].
    """
    if not lengths:
        return None
    batch = len(worth)
    # chance of tokens worth verifying
    least = price / np.maximum(worth, 1e-12) if candidates.by_worth else np.zeros(batch)
    verified, accepted, longest = drafts.outlook.tokens_above(least)
    drafted = np.minimum(
        np.minimum(candidates.limits, longest)[:, None],
        np.array(lengths, dtype=np.int64),
    )
    verified = np.take_along_axis(verified, drafted, 1)
    accepted = np.take_along_axis(accepted, drafted, 1)
    value = worth[:, None] * accepted
    chosen = (drafted > 0) & (
        value - price * verified > (theirs - price * history)[:, None]
    )
    asked = np.where(chosen, drafted, 0)
    plain = model.step(batch, batch, False)
    saved = np.add.reduce(np.where(chosen, value, theirs[:, None])).tolist()
    tokens = (
        np.add.reduce(np.where(chosen, verified, history[:, None])).round().tolist()
    )
    passes = [drafts.passes_s(column, plain) for column in asked.T]
    costs = (model.step(batch + n, batch, n > 0) - plain for n in tokens)
    gains = [
        value - cost - own
        for value, cost, own in zip(saved, costs, passes, strict=True)
    ]
    best = max(range(len(gains)), key=gains.__getitem__)
    if not asked[:, best].any():
        return None
    mine = chosen[:, best]
    whole = np.diff(np.cumsum(mine * verified[:, best]).round(), prepend=0.0).astype(
        np.int64
    )
    return StepPlan(
        np.where(mine, 0, history),
        whole,
        gains[best],
        passes[best],
        int(asked[:, best].max()),
    )
