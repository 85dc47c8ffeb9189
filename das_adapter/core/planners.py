"""The two ways to share out the draft tokens of a step: each request has its own
length, or all have the same.

A request's draft comes from the history or from the model that drafts, never from both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from das_adapter.core.budget import UNLIMITED, allocate, prefix_worth
from das_adapter.core.latency import StepModel
from das_adapter.core.model_drafts import ModelDrafts
from das_adapter.core.steps import Chances, Floats, Ints, StepPlan

_FREE = StepModel(base=0.0, token=0.0)


class DraftCandidates(NamedTuple):
    """The tokens that could be drafted in a step of b requests."""

    max_tokens: Ints
    """Maximum draft tokens of each request, int64 [b]."""
    chances: Chances
    """Survival chances of the history's draft tokens, float32 [n], request after
    request.
    """
    offsets: Ints
    """Bounds of each request in `chances`, int64 [b + 1]: request i's are
    `chances[offsets[i]:offsets[i + 1]]`.
    """
    drafter: ModelDrafts | None
    """The model that drafts as well; None: none does."""
    min_chance: float
    """Survival chance under which a draft ends."""
    by_worth: bool
    """Whether tokens that are worth less than they cost are left out; else budgets are
    fixed.
    """
    max_total: int = UNLIMITED
    """Maximum draft tokens of all requests, where budgets are not fixed."""

    @property
    def history_tokens(self) -> Ints:
        """Number of each request's draft tokens from the history, int64 [b]."""
        ends = self.offsets[1:]
        begins = self.offsets[:-1]
        return ends - begins


def plan_own_lengths(
    candidates: DraftCandidates, worth_s: Floats, model: StepModel
) -> StepPlan:
    """Give each request the draft tokens that are worth more than they cost, from the
    history or from the model; under fixed budgets all of them, and say what that gains.

    Args:
        candidates: what could be drafted.
        worth_s: seconds that an accepted token of each request saves, float64 [b].
        model: what a step costs.
    """
    plan = allocate(
        candidates.chances,
        candidates.offsets,
        worth_s,
        model,
        candidates.by_worth,
        candidates.max_total,
    )
    drafter = candidates.drafter
    if drafter is not None and drafter.follows and plan.total:
        # the model reads in one pass what is verified of the history's drafts
        running = len(worth_s)
        one_each = np.ones(running, dtype=np.int64)
        plain_s = model.plain_step(running)
        passes_s = drafter.passes_s(one_each, plain_s)
        gain = plan.gain - passes_s
        plan = plan._replace(gain=gain, passes_s=passes_s)
    return add_model_drafts(candidates, plan, worth_s, model)


def plan_one_length(
    candidates: DraftCandidates,
    worth_s: Floats,
    model: StepModel,
    lengths: Sequence[int],
) -> StepPlan:
    """Give all requests the one of the `lengths`, rising, that gains most; under fixed
    budgets the one that these need. Where there is a model, it drafts for all or for
    nobody: then each request has the better draft of both. Other arguments as in
    `plan_own_lengths`.
    """
    max_tokens = candidates.max_tokens
    drafter = candidates.drafter
    by_worth = candidates.by_worth
    running = len(max_tokens)
    rows = np.arange(running)
    none = np.zeros_like(max_tokens)
    plain_s = model.plain_step(running)
    history_tokens = candidates.history_tokens
    model_tokens = none
    # seconds that a draft's first n tokens save, [b, n + 1]
    model_worth = np.zeros((running, 1))
    if drafter is not None:
        model_tokens = np.minimum(max_tokens, drafter.max_draft_tokens)
        accepted = drafter.outlook.survival.cumsum()
        accepted_of_first = np.append(0.0, accepted)
        model_worth = worth_s[:, None] * accepted_of_first

    longer = np.maximum(history_tokens, model_tokens)
    drafted = np.minimum(max_tokens, longer)
    needed = shortest_sufficient_length(drafted, lengths)
    tried = []
    for length in lengths:
        if by_worth and running * length > candidates.max_total:
            break
        if length == needed or (by_worth and length < needed):
            tried.append(length)
    kept = [np.minimum(history_tokens, length) for length in tried]
    history_worth = prefix_worth(
        worth_s,
        candidates.chances,
        candidates.offsets,
        *kept,
    )

    passes_s_of_history = 0.0
    if drafter is not None and drafter.follows:
        # a model that follows reads in one pass what the history drafts
        one_each = np.ones_like(max_tokens)
        passes_s_of_history = drafter.passes_s(one_each, plain_s)

    best = StepPlan(none, none)
    for length, history_s in zip(tried, history_worth, strict=True):
        same = np.full_like(max_tokens, length)
        shares = [(same, none, history_s, passes_s_of_history)]
        if drafter is not None:
            made = np.minimum(same, drafter.max_draft_tokens)
            made_s = drafter.passes_s(made, plain_s)
            usable = np.minimum(model_tokens, length)
            model_s = model_worth[rows, usable]
            better_s = np.maximum(history_s, model_s)
            shares.append((none, same, better_s, made_s))
        num_verified = running * length
        verifying_s = model.verifying_s(running, num_verified)
        for history, by_model, worth_of_each_s, passes_s in shares:
            total_worth_s = float(np.add.reduce(worth_of_each_s))
            gain = total_worth_s - passes_s - verifying_s
            if gain > best.gain or not by_worth:
                best = StepPlan(history, by_model, gain=gain, passes_s=passes_s)
    return best


def plan_everything(candidates: DraftCandidates) -> StepPlan:
    """Verify all that there is; the model drafts for the requests for which it brings
    more tokens.
    """
    history_tokens = candidates.history_tokens
    none = np.zeros_like(history_tokens)
    from_history = StepPlan(history_tokens, none)
    equal_worth = np.ones(len(history_tokens))
    return add_model_drafts(candidates, from_history, equal_worth, _FREE)


def shortest_sufficient_length(tokens: Ints, lengths: Sequence[int]) -> int:
    """Return the shortest of the lengths that holds each request's draft, int64 [b];
    the longest draft where none does.
    """
    longest = int(np.maximum.reduce(tokens, initial=0))
    if not longest:
        return 0
    for length in lengths:
        if length >= longest:
            return length
    return longest


def add_model_drafts(
    candidates: DraftCandidates,
    from_history: StepPlan,
    worth_s: Floats,
    model: StepModel,
) -> StepPlan:
    """Let the model draft, equally many tokens at most, for the requests for which it
    is worth more than the history's drafts. These stand where that gains nothing; under
    fixed budgets the model drafts as many tokens as it can, gain or not. Other
    arguments as in `plan_own_lengths`.
    """
    if candidates.drafter is None:
        return from_history
    if not candidates.by_worth and not len(candidates.chances):
        from_history = from_history._replace(gain=-np.inf)
    choice = _ModelChoice(candidates, candidates.drafter, from_history, worth_s, model)
    plan = choice.plan_across_knee()
    if plan is not None and plan.gain > from_history.gain:
        return plan
    return from_history


class _ModelChoice:
    """The choice of the requests for which the model drafts, and of the length of its
    drafts, beside what was found in the history.

    A draft token costs little up to the knee of the step's time, and more beyond it:

        price(n) = token            in a step of n < knee tokens
                   token + bend     in a larger one
    """

    def __init__(
        self,
        candidates: DraftCandidates,
        drafter: ModelDrafts,
        from_history: StepPlan,
        worth_s: Floats,
        model: StepModel,
    ) -> None:
        self._max_tokens = candidates.max_tokens
        self._by_worth = candidates.by_worth
        self._max_total = candidates.max_total
        self._drafter = drafter
        self._worth_s = worth_s
        self._model = model
        self._history = from_history
        (self._history_worth,) = prefix_worth(
            worth_s,
            candidates.chances,
            candidates.offsets,
            from_history.history,
        )
        self._lengths = drafter.lengths_above(candidates.min_chance)
        if not self._by_worth:
            self._lengths = self._lengths[-1:]

    def plan_across_knee(self) -> StepPlan | None:
        """Return the plan that gains most; None: the model drafts for nobody.

        Tokens are priced as in a step of the history's drafts alone. If the plan then
        crosses the knee, they are priced as beyond it, and what is free up to the knee
        is filled up with tokens that are worth less.
        """
        running = len(self._worth_s)
        history_tokens = self._history.total
        num_tokens = running + history_tokens
        room = self._model.knee - running
        flat_price = self._model.slope(num_tokens)
        plan = self._plan_at(flat_price)
        knows_tokens = self._drafter.confidence.outlook is not None
        if plan is None or not self._by_worth or not knows_tokens:
            return plan
        crosses_knee = history_tokens < room < plan.total
        if not crosses_knee:
            return plan
        steep_price = self._model.slope(np.inf)
        steep = self._plan_at(steep_price)
        if steep is None or steep.gain <= plan.gain:
            return plan
        free = min(int(room), self._max_total) - steep.total
        if free <= 0:
            return steep
        return self._fill_up(steep, free)

    def _plan_at(self, price: float) -> StepPlan | None:
        """Return the plan that gains most where the model's drafts have one of the
        lengths, and end before tokens that are worth less than a price in seconds;
        None: the model drafts for nobody.
        """
        if not self._lengths:
            return None
        running = len(self._worth_s)
        worth_s = self._worth_s[:, None]
        min_chance = np.zeros(running)
        if self._by_worth:
            min_chance = price / np.maximum(self._worth_s, 1e-12)
        outlook = self._drafter.outlook
        remaining = outlook.tokens_above(min_chance)

        # for each request and each of the lengths, [b, lengths]
        lengths = np.array(self._lengths, dtype=np.int64)
        max_made = np.minimum(self._max_tokens, remaining.longest)
        made = np.minimum(max_made[:, None], lengths)
        verified = np.take_along_axis(remaining.verified, made, 1)
        accepted = np.take_along_axis(remaining.accepted, made, 1)
        verified_s = price * verified
        model_worth = worth_s * accepted
        model_gain = model_worth - verified_s
        history_worth = self._history_worth[:, None]
        history_tokens = self._history.history[:, None]
        history_s = price * history_tokens
        history_gain = history_worth - history_s
        is_made = made > 0
        is_better = model_gain > history_gain
        by_model = is_made & is_better
        made = np.where(by_model, made, 0)
        saved = np.where(by_model, model_worth, history_worth)
        tokens = np.where(by_model, verified, history_tokens)

        # for each of the lengths
        saved_s = np.add.reduce(saved).tolist()
        sums = np.add.reduce(tokens)
        num_tokens = sums.round().tolist()
        plain_s = self._model.plain_step(running)
        passes_s = []
        gains = []
        for column, num_draft_tokens in enumerate(num_tokens):
            made_here = made[:, column]
            verifying_s = self._model.verifying_s(running, num_draft_tokens)
            own_s = self._drafter.passes_s(made_here, plain_s)
            gain = saved_s[column] - verifying_s - own_s
            if self._by_worth and num_draft_tokens > self._max_total:
                gain = -np.inf
            passes_s.append(own_s)
            gains.append(gain)
        best = gains.index(max(gains))
        made_best = made[:, best]
        if not made_best.any():
            return None
        chosen = by_model[:, best]
        verified_best = chosen * verified[:, best]
        return StepPlan(
            history=np.where(chosen, 0, self._history.history),
            model=_rounded(verified_best),
            gain=gains[best],
            passes_s=passes_s[best],
            longest=int(made_best.max()),
        )

    def _fill_up(self, plan: StepPlan, free: int) -> StepPlan:
        """Verify so many tokens more of the drafts that the model makes anyway."""
        by_model = plan.history == 0
        longest = plan.longest * by_model
        made = np.minimum(longest, self._max_tokens)
        unverified = made - plan.model
        num_unverified = max(1, unverified.sum())
        share = min(1.0, free / num_unverified)
        sums = unverified.cumsum() * share
        whole_sums = np.rint(sums)
        more = _differences(whole_sums)
        verified = plan.model + more
        return plan._replace(model=verified)


def _rounded(tokens: Floats) -> Ints:
    """Round mean numbers of tokens so that their sum is rounded too, int64 [b]."""
    sums = np.cumsum(tokens)
    whole_sums = sums.round()
    return _differences(whole_sums)


def _differences(sums: Floats) -> Ints:
    """Return the numbers that have these sums, int64 [b]."""
    numbers = np.diff(sums, prepend=0.0)
    return numbers.astype(np.int64)
