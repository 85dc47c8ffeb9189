"""How many draft tokens, for whom, and from where: the one protocol of a decode step.

An accepted token saves its request one token. What that is worth depends on whether the
request decides when the rollout ends (`core/worth.py`). A draft token costs what it
adds to the step, and, where a model drafts it, a pass of the model.

Every driver (the engine on vLLM's V1 and V2 runners, a simulated engine, the tests)
calls the same methods in the same order. Two requests, of which the second joins later:

    slot = policy.begin(...)            the first joins
    policy.next(outcome)                a step brought it a token: what to look for
    policy.choose(search, candidates)   what was found: the drafts of the next step
    policy.flush()                      the driver has time: the policy learns
    policy.timed(step)                  the next step has begun
    slot = policy.begin(...)            the second joins
    policy.next(outcome) ...            a step brought tokens to both
    policy.end(slot)                    the first has ended
    policy.weight_sync(responses)       the rollout is over
    policy.figures()                    what is told of it

`next` and `choose` answer with `Rest` where nobody drafts. The policy reads no clock,
and nobody reaches through it: the step counter, looks, probes and rests are its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from das_adapter.config import Budget, DasConfig
from das_adapter.core import tuning
from das_adapter.core.acceptance import AcceptanceCurve
from das_adapter.core.account import Account, State
from das_adapter.core.backoff import Backoff
from das_adapter.core.budget import das_budgets, makespan_weights
from das_adapter.core.latency import StepModel, StepTimes
from das_adapter.core.length import LengthModel, Responses, classes, expected_remaining
from das_adapter.core.model_drafts import ModelDrafts
from das_adapter.core.plain_time import PlainTime
from das_adapter.core.planners import (
    DraftCandidates,
    plan_everything,
    plan_one_length,
    plan_own_lengths,
    shortest_sufficient_length,
)
from das_adapter.core.requests import RequestTable
from das_adapter.core.steps import (
    Candidates,
    Chances,
    Floats,
    Ints,
    Outcome,
    Rest,
    Search,
    StepPlan,
    TimedStep,
)
from das_adapter.core.worth import token_worth

GOLDEN = 0.618034
"""Successive multiples of it are spread evenly between whole numbers."""
_NEVER = -(2**30)
_NO_CHANCES: Chances = np.zeros(0, dtype=np.float32)


def fixed_min_chance(budget: Budget) -> float:
    """Return the chance under which a draft ends, as far as that never changes."""
    if budget == "optimal":
        return tuning.LEAST_CHANCE
    if budget == "unlimited":
        return 0.0
    return tuning.FIXED_CHANCE


class EndedRequest(NamedTuple):
    """What the policy knows of a request when it ends."""

    length_class: int
    """`LengthClass`."""
    written: int
    """Tokens of its response."""
    drafted: int
    """Draft tokens that were verified."""
    accepted: int


class _Rules(NamedTuple):
    """What a policy decides by."""

    always: bool
    """Whether nothing is asked but the fixed budgets."""
    budget: Budget
    min_chance: float
    """Survival chance under which a draft ends."""


class DraftPolicy:
    """The policy of one engine. A live request has a slot from `begin` to `end`."""

    def __init__(
        self,
        config: DasConfig,
        longest_response: int,
        prior: StepModel | None = None,
        drafts: ModelDrafts | None = None,
        lengths: Sequence[int] | None = None,
        sizes: tuple[int, ...] = (),
        look_steps: int = 1,
    ) -> None:
        """
        Args:
            config: the `das:` block.
            longest_response: tokens of the longest response that there can be.
            prior: times of steps until the engine's own steps give some; see
                `StepTimes`.
            drafts: figures of the model that drafts; None: none does.
            lengths: draft lengths to choose from, rising, where all requests of a step
                have the same; None: each has its own.
            sizes: tokens for which the engine has CUDA graphs; see `StepModel`.
            look_steps: see `Account`.
        """
        times = StepTimes(prior, sizes=sizes)
        plain_time = PlainTime(times, sizes)
        self._account = Account(plain_time, config.speculate, look_steps)
        self._lengths = LengthModel(longest_response)
        self.drafts = drafts
        """Figures of the model that drafts; None: none does."""
        self._requests = RequestTable()
        self._longest_draft = config.num_draft_tokens
        is_fixed = config.budget != "optimal"
        self._rules = _Rules(
            always=is_fixed and config.speculate == "always",
            budget=config.budget,
            min_chance=fixed_min_chance(config.budget),
        )
        self._rules_of_block = self._rules
        """The rules of the block, while a rehearsal has others."""
        self._looks_up = config.looked_up is not None
        self._rehearsing = False
        """Whether drafts are tried, and nothing is learned."""
        self._common_lengths = lengths
        self._device_chooses = False
        """Whether a device chooses whose drafts are verified."""
        self._curve = AcceptanceCurve()
        self._running = 0
        """Requests that have begun and not ended."""
        self._arrived = False
        """Whether one began since drafts were last considered."""
        self._last_end = _NEVER
        """Step in which a request ended last."""
        self._last_refill = _NEVER
        """Step in which a request took another's place last."""
        self._replan = Backoff(tuning.REPLAN_FIRST_STEPS, tuning.REPLAN_STEPS)
        self._min_chance = tuning.LEAST_CHANCE
        """Survival chance under which no token is worth its price."""
        self._model = self.latency.model
        """Times of steps at the context of the present batch."""
        self._drafting_s = 0.0
        """Seconds that drafting took in a step, lately."""
        self._unlearned: tuple[Outcome, bool] | None = None
        """The last outcome, and whether a drafter was asked; None: it was learned
        from.
        """

    # Requests

    def begin(
        self,
        problem: int,
        written: int,
        longest: int,
        record: bool = True,
    ) -> int:
        """Give a request that joins a slot, and return it.

        Args:
            problem: the problem that it is about.
            written: tokens of its response that are there already.
            longest: the most tokens that its response can have.
            record: whether it belongs to a training rollout.
        """
        lengths = self._lengths
        cdf = lengths.cdf(problem).copy()
        last = np.searchsorted(lengths.edges, longest)
        cdf[last:] = 1.0
        if not self._running:
            # Another batch (a validation's, say), not one that refills.
            self._begin_batch()
        elif self._last_end >= 0:
            self._last_refill = self._account.step
        self._arrived = True
        self._running += 1
        table = self._requests
        slot = table.open(written, cdf)
        so_far = np.array([float(written)])
        one_row = cdf[None, :]
        first = classes(one_row, lengths.edges, so_far, lengths.bounds)
        table.first_class[slot] = first[0]
        table.record[slot] = record
        return slot

    def end(self, slot: int) -> EndedRequest:
        """Free the slot of a request that has ended; return what is known of it."""
        self.flush()
        table = self._requests
        account = self._account
        account.time.end_request(slot)
        self._last_end = account.step
        self._running -= 1
        table.close(slot)
        return EndedRequest(
            length_class=int(table.length_class[slot]),
            written=int(table.written[slot]),
            drafted=int(table.drafted[slot]),
            accepted=int(table.accepted[slot]),
        )

    def weight_sync(self, responses: Responses) -> None:
        """Judge the rollout that a weight sync ends, learn the lengths of its finished
        responses, and begin the next.
        """
        self.flush()
        self._lengths.observe(responses)
        self._lengths.refit()
        self._curve.sync()
        self.latency.fit()
        model_may_rest = False
        if self.drafts is not None:
            model_may_rest = not self.drafts.passes_every_step
        self._account.sync(model_may_rest)
        if self.drafts is not None:
            self.drafts.sync()
        self._begin_batch()

    # A decode step

    def next(self, outcome: Outcome) -> Search | Rest:
        """Take what a decode step brought, and say what to look for, for the next; or
        that nobody drafts for it.
        """
        self.flush()
        slots = outcome.slots
        running = len(slots)
        account = self._account
        num_steps = outcome.steps + outcome.left_out
        account.advance(num_steps)
        has_drafts = outcome.carried is not None
        asked = account.asks(running, has_drafts)
        self._unlearned = outcome, asked
        if outcome.unseen is not None:
            self._requests.written[slots] += outcome.unseen
        looks = asked and running > 0 and account.looks(running)
        if not looks:
            return Rest(account.rest_steps(running), asked)
        mean_context = 0.0
        if outcome.context is not None:
            all_context = sum(outcome.context.tolist())
            mean_context = all_context / running
        self._model = self.latency.model.at_context(mean_context)
        if self.drafts is not None:
            self.drafts.context = mean_context
        max_tokens = self._max_draft_tokens(slots, outcome.room, outcome.context)
        min_chance = self._rules.min_chance
        if self._rules.budget == "optimal" and not account.due("drafted"):
            min_chance = self._min_chance
        return Search(max_tokens, min_chance)

    def choose(
        self, search: Search, candidates: Candidates | None = None
    ) -> StepPlan | Rest:
        """Choose the drafts of the next step among what was found in the history; None:
        nothing was looked up.
        """
        assert self._unlearned is not None
        outcome, _ = self._unlearned
        slots = outcome.slots
        running = len(slots)
        self._arrived = False
        chances = _NO_CHANCES
        offsets = np.zeros(running + 1, dtype=np.int64)
        if candidates is not None:
            chances, offsets = candidates
        drafter = self.drafts
        if self._account.model_rest.reason:
            drafter = None
        draftable = DraftCandidates(
            max_tokens=search.max_tokens,
            chances=chances,
            offsets=offsets,
            drafter=drafter,
            min_chance=search.min_chance,
            by_worth=self._rules.budget == "optimal",
            max_total=self.latency.max_tokens(running) - running,
        )
        if self._rules.always:
            plan = self._plan_everything(draftable)
        else:
            plan = self._plan_by_gain(slots, draftable)
        if self._device_chooses:
            plan = self._with_budget(plan, slots, search.max_tokens)
        if plan.budget or plan.total:
            return plan
        rest_steps = self._account.rest_steps(running)
        return Rest(rest_steps, True)

    def flush(self) -> None:
        """Learn from the last outcome, if that is still to be done."""
        if self._unlearned is None:
            return
        outcome, asked = self._unlearned
        self._unlearned = None
        if self._rehearsing:
            return
        if asked:
            self._learn(outcome)
        else:
            self._requests.record_baseline_steps(outcome.slots, outcome.got)

    def num_validating(self, slots: Ints) -> int:
        """Return how many of these slots' requests belong to no training rollout."""
        of_training = self._requests.record[slots]
        return int(len(of_training) - np.count_nonzero(of_training))

    def timed(self, step: TimedStep) -> float | None:
        """Take how long a decode step took, or the sum of several baseline steps.
        Return the seconds that the latency model expected of the step; None: there is
        no model yet, or there are several steps.
        """
        account = self._account
        if step.steps is not None:
            sums = (step.steps, step.seconds, step.context)
            account.record_baseline_steps(step.slots, np.array(sums, dtype=float))
            return None
        predicted_s = self.latency.add(
            tokens=step.tokens,
            requests=len(step.slots),
            drafted=step.drafted,
            seconds=step.seconds,
            context=step.context,
        )
        more_drafting_s = step.drafting_seconds - self._drafting_s
        self._drafting_s += more_drafting_s / tuning.PACE_STEPS
        self.latency.keep_fitted()
        refilling = self._refilling
        if account.time.batch.refilled != refilling:
            account.time.begin_batch(refilling)
        account.record_step(step, predicted_s)
        return predicted_s

    def timed_drafting(self, seconds: float) -> None:
        """Take how long a model drafted at the end of a step that also read prompts:
        such steps are not timed.
        """
        self._account.time.add_seconds(seconds)
        self._account.record_model(took_s=seconds)

    # What is told

    def figures(self) -> dict[str, Any]:
        """Return the figures since the last weight sync, as plain numbers."""
        return self._account.figures()

    @property
    def latency(self) -> StepTimes:
        """Times of the engine's steps."""
        return self._account.time.engine

    @latency.setter
    def latency(self, times: StepTimes) -> None:
        self._account.time.engine = times

    @property
    def idle(self) -> bool:
        """Whether no drafter is asked before the next weight sync."""
        return self._account.idle

    @property
    def idle_reason(self) -> str | None:
        """Why no drafter is asked before the next weight sync; None: one may be."""
        if not self.idle:
            return None
        return self._account.reason

    @property
    def model_rests(self) -> bool:
        """Whether the model that drafts is not asked before the next weight sync."""
        rest = self._account.model_rest
        return self.idle or rest.reason is not None

    @property
    def baseline_known(self) -> bool:
        """Whether enough baseline steps were timed."""
        return self._account.time.known

    def pop_news(self) -> str | None:
        """Return what has changed for the worse since the last call, as a line of the
        log.
        """
        return self._account.pop_news()

    # What an engine says of itself

    def stop(self, reason: str, state: State = State.STOPPED) -> None:
        """Draft no more until the next weight sync."""
        self._account.stop(reason, state)

    def give_own_lengths(self, sizes: tuple[int, ...]) -> None:
        """Give each request of a step its own number of draft tokens, which a device
        chooses within the budget of the plan; `sizes`: see `StepModel.drafted_sizes`.
        """
        self._common_lengths = None
        self._device_chooses = True
        if sizes:
            self.latency.set_drafted_sizes(sizes)

    def share_with(self, other: DraftPolicy) -> None:
        """Learn step times and response lengths together with the policy of an engine
        that is alike.
        """
        self.latency = other.latency
        self._lengths = other._lengths

    def rehearse(self) -> None:
        """Draft in every step whatever it costs, until `rehearsed`: an engine tries its
        drafts before it serves.
        """
        self._rehearsing = True
        self._rules_of_block = self._rules
        self._rules = _Rules(
            always=True,
            budget="unlimited",
            min_chance=0.0,
        )

    def rehearsed(self) -> None:
        """Decide as the block says, as if nothing had been decoded yet."""
        self._rehearsing = False
        self._unlearned = None
        self._rules = self._rules_of_block
        self._account.forget()
        self._begin_batch()

    # Inside

    @property
    def _refilling(self) -> bool:
        steps = self._account.step - self._last_refill
        return steps < tuning.REFILL_STEPS

    def _begin_batch(self) -> None:
        """Begin another batch: what follows is not compared with the steps before."""
        self._account.time.begin_batch()
        self._last_end = _NEVER
        self._last_refill = _NEVER

    def _learn(self, outcome: Outcome) -> None:
        slots = outcome.slots
        table = self._requests
        table.advance(slots, outcome.got, outcome.carried, self._curve.counts)
        by_model = outcome.by_model
        if self.drafts is None or by_model is None or not by_model.any():
            return
        saved_s = self.drafts.record_verified(
            drafted=by_model,
            got=outcome.got,
            worth_s=table.worth_s[slots],
            training=table.record[slots],
            token_kinds=outcome.token_kinds,
        )
        self._account.record_model(saved_s=saved_s)

    def _max_draft_tokens(
        self,
        slots: Ints,
        room: Ints,
        context: Ints | None,
    ) -> Ints:
        """Return the most draft tokens of each request, int64 [b], before it is known
        what there is to draft.
        """
        step = self._account.step
        running = len(slots)
        if self._arrived or self._replan.due(step, running):
            self._replan.done(step, running, again_soon=self._arrived)
            self._value_requests(slots, context)
        longest = self._longest_draft
        if self._rules.budget == "optimal":
            price_s = self._model.marginal_price(running)
            return self._requests.max_draft_tokens(slots, room, longest, price_s)
        max_tokens: Ints = np.minimum(room, longest)
        if self._rules.budget == "das":
            # A fraction of a token is drafted in that share of the steps.
            shift = step * GOLDEN % 1.0
            planned = self._requests.budget[slots] + shift
            whole = np.floor(planned).astype(np.int64)
            np.minimum(max_tokens, whole, out=max_tokens)
        np.maximum(max_tokens, 0, out=max_tokens)
        return max_tokens

    def _plan_everything(self, candidates: DraftCandidates) -> StepPlan:
        """Return all drafts that there are; where all requests have one length and
        drafts are looked up, as much as the device may find by then.
        """
        running = len(candidates.max_tokens)
        self._account.decided(running, drafted=True, probing=False)
        plan = plan_everything(candidates)
        if self._common_lengths is None:
            return plan
        if self._looks_up:
            plan = plan._replace(history=candidates.max_tokens)
        return self._with_one_length(plan)

    def _plan_by_gain(self, slots: Ints, candidates: DraftCandidates) -> StepPlan:
        """Return the drafts that gain most, if they gain enough; none, if they do not,
        or a plain step is due; a few, where a drafted step is due all the same.
        """
        account = self._account
        running = len(slots)
        model = self._model
        drafter = candidates.drafter
        plain_due = account.probe("plain")
        worth_s = self._requests.worth_s[slots]
        lengths = self._common_lengths
        if lengths:
            best = plan_one_length(candidates, worth_s, model, lengths)
        else:
            best = plan_own_lengths(candidates, worth_s, model)
        total = best.total
        gain_share = None
        if total:
            gain_share = self._gain_share(best, total, running)
        pays = account.drafts_pay(running, gain_share, candidates.by_worth)
        drafted = pays and not plain_due and total > 0
        plain_s = model.plain_step(running)
        untried = False
        if drafter is not None and not drafted:
            untried = drafter.may_pay_untried(plain_s)
        probe_due = account.probe("drafted", untried)
        has_history = len(candidates.chances) > 0
        probing = probe_due and (has_history or drafter is not None)
        plan = best
        if probing:
            plan = self._plan_probe(slots, candidates, untried)
            drafted = plan.total > 0
        elif not drafted:
            plan = StepPlan.nothing(running)
        account.decided(
            running=running,
            drafted=drafted,
            probing=probing,
            plain_due=plain_due,
            seconds=plain_s,
        )
        if lengths and plan is not best:
            plan = self._with_one_length(plan)
        return plan

    def _gain_share(self, plan: StepPlan, total: int, running: int) -> float:
        """Return the gain of a plan with so many draft tokens as a share of its step's
        time.
        """
        tokens = running + total
        verifying_step_s = self._model.step(tokens, running, True)
        drafted_step_s = verifying_step_s + plan.passes_s
        return plan.gain / drafted_step_s

    def _plan_probe(
        self,
        slots: Ints,
        candidates: DraftCandidates,
        untried: bool,
    ) -> StepPlan:
        """Return drafts for some requests, to see what a drafted step brings and costs:
        for all of them where the model is `untried`, else for those in the lowest
        slots.
        """
        running = len(slots)
        max_requests: float = running
        if not untried:
            share = tuning.PROBE_BATCH_SHARE * running
            max_requests = min(tuning.PROBE_REQUESTS, share)
        has_history = len(candidates.chances) > 0
        by_model = untried or not has_history
        if by_model:
            tokens = candidates.max_tokens
        else:
            tokens = candidates.history_tokens
        can_draft = tokens > 0
        order = np.where(can_draft, slots, 2**30)
        by_slot = np.argsort(order)
        ranks = np.argsort(by_slot)
        is_chosen = ranks < max_requests
        chosen = np.minimum(tokens, is_chosen)
        none = np.zeros_like(chosen)
        if by_model:
            return StepPlan(history=none, model=chosen)
        return StepPlan(history=chosen, model=none)

    def _with_one_length(self, plan: StepPlan) -> StepPlan:
        """Return a plan in which all requests have the length that one of them
        needs.
        """
        lengths = self._common_lengths
        assert lengths is not None
        of_history = shortest_sufficient_length(plan.history, lengths)
        of_model = shortest_sufficient_length(plan.model, lengths)
        history = np.full_like(plan.history, of_history)
        model = np.full_like(plan.model, of_model)
        return StepPlan(history, model)

    def _with_budget(
        self,
        plan: StepPlan,
        slots: Ints,
        max_tokens: Ints,
    ) -> StepPlan:
        """Return a plan with what a device needs that chooses, among the drafts that it
        finds by then, whose tokens are verified.
        """
        budget = plan.total
        if self._rules.always:
            budget = int(max_tokens.sum())
        weights: Floats = self._requests.worth_s[slots]
        by_worth = self._rules.budget == "optimal" and weights.max() > 0
        if not by_worth:
            weights = np.ones(len(slots))
        return plan._replace(budget=budget, weights=weights)

    def _value_requests(self, slots: Ints, context: Ints | None) -> None:
        """Compute the worth of an accepted token of each request, the requests'
        classes, and DAS's budgets.
        """
        table = self._requests
        lengths = self._lengths
        running = len(slots)
        cdf = table.cdf[slots]
        written = table.written[slots]
        length_class = classes(cdf, lengths.edges, written, lengths.bounds)
        table.length_class[slots] = length_class
        if self._rules.budget == "das":
            table.budget[slots] = self._das_budgets(slots, cdf, written)
        tokens = np.zeros(running)
        if context is not None:
            tokens = np.asarray(context, dtype=float)
        latency = self.latency.model
        context_s = latency.context * tokens
        request_s: Floats = latency.request + context_s
        worth_s = token_worth(
            last=self._chances_to_end_last(cdf, written),
            pace=table.pace[slots],
            load=table.load[slots],
            request_s=request_s,
            model=self._model,
            drafting_s=self._drafting_s,
        )
        table.worth_s[slots] = worth_s
        price_here_s = self._model.slope(running)
        price_beyond_s = self._model.slope(np.inf)
        price_s = min(price_here_s, price_beyond_s)
        greatest_worth = max(float(worth_s.max()), 1e-12)
        self._min_chance = max(tuning.LEAST_CHANCE, price_s / greatest_worth)

    def _chances_to_end_last(self, cdf: Floats, written: Floats) -> Floats:
        """Return the chance of each request to end last, float64 [b]; where requests
        keep arriving nobody decides the end, and all have the same.
        """
        running = len(written)
        if self._refilling:
            return np.full(running, 1.0 / running)
        return makespan_weights(cdf, self._lengths.edges, written)

    def _das_budgets(self, slots: Ints, cdf: Floats, written: Floats) -> Floats:
        """Return the draft tokens a step that DAS plans for each request (Eqs. 6-9),
        float64 [b]; one whose class has risen has at least that class's tokens left.
        """
        table = self._requests
        lengths = self._lengths
        length_class = table.length_class[slots]
        first_class = table.first_class[slots]
        has_risen = length_class > first_class
        risen_class = np.where(has_risen, length_class, 0)
        of_class = lengths.class_lengths[risen_class] - written
        expected = expected_remaining(cdf, lengths.edges, written)
        remaining = np.maximum(expected, of_class)
        curve = self._curve.fitted()
        return das_budgets(remaining, curve, self._model, self._longest_draft)
