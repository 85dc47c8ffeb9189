"""The two ways to share out the draft tokens of a step: each request has its own length, or all have the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from das_adapter.core.budget import Allocation, Chances, Ints, Worth, allocate
from das_adapter.core.latency import StepModel
from das_adapter.core.model_drafts import ModelDrafts, ModelPlan

_FREE = StepModel(base=0.0, token=0.0)


@dataclass(frozen=True)
class Offer:
    """What there is to draft in a step of b requests."""

    limits: Ints
    """Most tokens of each request, shape (b,)."""
    chances: Chances
    offsets: Ints
    """The history's drafts: survival chance of each token, shape (n,); request i's are `chances[o[i]:o[i + 1]]`."""
    drafts: ModelDrafts | None
    """Of the model that drafts as well; None: none does."""
    floor: float
    """Chance under which a draft ends."""
    cut: bool
    """Whether tokens that are worth less than they cost are left out; else budgets are fixed."""


def own_lengths(offer: Offer, worth: Worth, model: StepModel) -> ModelPlan:
    """Give each request the draft tokens that are worth more than they cost, from the history or from the model; under
    fixed budgets all of them, and say what that gains. `model`: what a step costs."""
    found, drafts = allocate(offer.chances, offer.offsets, worth, model, offer.cut), offer.drafts
    if drafts is None:
        return ModelPlan(np.zeros_like(offer.limits), found.keep, found.total, found.gain, 0.0)
    return _with_model(offer, drafts, found, worth, model)


def one_length(offer: Offer, worth: Worth, model: StepModel, lengths: Sequence[int]) -> ModelPlan:
    """Give all requests the one of the `lengths`, rising, that is worth most; under fixed budgets the one that these
    need. Where there is a model, it drafts for all or for nobody: then each request has the better draft of both."""
    running, found = len(offer.limits), np.diff(offer.offsets)
    nothing, plain = np.zeros_like(offer.limits), model.step(running, running, False)
    best = ModelPlan(nothing, nothing, 0, 0.0, 0.0)
    drafts = offer.drafts
    theirs, begins = (offer.chances, offer.offsets) if drafts is None else drafts.offer(offer.limits)
    there = np.maximum(found, np.diff(begins))
    needed = alike(np.minimum(offer.limits, there), lengths).max(initial=0)
    for length in lengths:
        if length > needed or (length < needed and not offer.cut):
            continue
        total, same = running * length, np.full_like(offer.limits, length)
        verified = model.step(running + total, running, True) - plain
        saved = worth.of_kept(offer.chances, offer.offsets, np.minimum(found, length))
        for by_model in (False,) if drafts is None else (False, True):
            passes = 0.0
            if drafts is not None:  # where the history drafts, the model still reads what was drafted, in a pass
                passes = drafts.seconds(np.minimum(same, drafts.most if by_model else 1), plain)
            if by_model:
                saved = np.maximum(saved, worth.of_kept(theirs, begins, np.minimum(np.diff(begins), length)))
            gain = float(saved.sum()) - passes - verified
            if gain > best.gain or not offer.cut:
                drafted, keep = (same, nothing) if by_model else (nothing, same)
                best = ModelPlan(drafted, keep, total, gain, passes)
    return best


def everything(offer: Offer) -> ModelPlan:
    """Verify all that there is; the model drafts for the requests for which it brings more tokens."""
    all_of_it = np.diff(offer.offsets)
    total, nothing = len(offer.chances), np.zeros_like(all_of_it)
    if offer.drafts is None:
        return ModelPlan(nothing, all_of_it, total, 0.0, 0.0)
    one = Worth(np.ones(len(all_of_it)), np.zeros(len(all_of_it)), np.zeros(len(all_of_it)))
    return _with_model(offer, offer.drafts, Allocation(all_of_it, total, 0.0), one, _FREE)


def alike(keep: Ints, lengths: Sequence[int]) -> Ints:
    """Give all requests the shortest of the lengths that is enough for each."""
    most = keep.max(initial=0)
    return np.full_like(keep, next((n for n in lengths if n >= most), most) if most else 0)


def first(slots: Ints, able: npt.NDArray[np.bool_], count: float) -> npt.NDArray[np.bool_]:
    """Return which requests have the lowest slots among those that are able, bool [b]; `count`, rounded up, of them."""
    ranks = np.argsort(np.argsort(np.where(able, slots, 2**30)))
    return able & (ranks < count)


def _with_model(offer: Offer, drafts: ModelDrafts, found: Allocation, worth: Worth, model: StepModel) -> ModelPlan:
    lengths = drafts.lengths(offer.floor)
    if not offer.cut:  # the longest, gain or not
        lengths, found = lengths[-1:], found._replace(gain=-np.inf if not found.total else found.gain)
    theirs = worth.of_kept(offer.chances, offer.offsets, found.keep)
    return drafts.plan(found, theirs, worth, offer.limits, model, lengths, offer.cut)
