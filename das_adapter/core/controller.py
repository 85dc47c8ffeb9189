"""How many draft tokens, for whom, and from where: asked by a drafter at every decode
step.

An accepted token saves a request one token. What that is worth depends on whether the
request decides when the rollout ends: the chance of that, times a round of the batch
that will be left then, plus the request's own share of a round. A draft token costs
what it adds to the step, and, where a model drafts it, a pass of the model. Where
requests keep arriving nobody decides the end, and a token is worth the engine's time
per token.

A decode step is one call, `plan`: what the step brought goes in, the next step's drafts
come out. How long it took is known when the next one begins; then comes `timed`. The
controller reads no clock.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from das_adapter.config import Budget, DasConfig
from das_adapter.core import tuning
from das_adapter.core.acceptance import AcceptanceCurve
from das_adapter.core.account import Account
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
    Chances,
    Decoded,
    Floats,
    HistoryDrafts,
    Ints,
    Search,
    StepPlan,
    TimedStep,
)

GOLDEN = 0.618034
"""Successive multiples of it are spread evenly between whole numbers."""
_NEVER = -(2**30)
_NO_DRAFTS: Chances = np.zeros(0, dtype=np.float32)


def least_chance(budget: Budget) -> float:
    """Return the chance under which a draft ends, as far as that never changes."""
    return {"optimal": tuning.LEAST_CHANCE, "unlimited": 0.0}.get(
        budget, tuning.FIXED_CHANCE
    )


class Controller:
    """The decisions of one engine. A live request has a slot from `open` to `close`."""

    def __init__(
        self,
        config: DasConfig,
        limit: int,
        prior: StepModel | None = None,
        drafts: ModelDrafts | None = None,
        common: Sequence[int] | None = None,
        sizes: tuple[int, ...] = (),
    ) -> None:
        """`limit`: longest response there can be, tokens; `prior`: latency model until
        the engine's own steps give one, see `StepTimes`; `drafts`: of the model that
        drafts; `common`: draft lengths to choose from, rising, where all requests of a
        step share one, None: each has its own; `sizes`: see `StepModel`.
        """
        time = PlainTime(StepTimes(prior, sizes=sizes), sizes)
        self.account = Account(time, config.speculate)
        self.lengths = LengthModel(limit)
        self.drafts = drafts
        self.requests = RequestTable()
        self._policy = config.budget
        self._most = config.num_draft_tokens
        self._floor = least_chance(config.budget)
        self.always = config.speculate == "always" and config.budget != "optimal"
        """Whether nothing is asked but the fixed budgets."""
        self._looks_up = config.looked_up is not None
        # of the block, while a rehearsal has others
        self._rules = (
            self.always,
            self._policy,
            self._floor,
        )
        self.common = common
        self._curve = AcceptanceCurve()
        # requests; whether one joined since drafts were last considered
        self._running = 0
        self._arrived = False
        self._last_end = self._last_refill = (
            _NEVER  # steps in which a request left, in which another took its place
        )
        self._replan = Backoff(tuning.REPLAN_FIRST_STEPS, tuning.REPLAN_STEPS)
        self._least_chance = tuning.LEAST_CHANCE
        self._model = self.times.model  # the latency model at the batch's context
        self._drafting_seconds = 0.0  # a step's, lately

    @property
    def times(self) -> StepTimes:
        return self.account.time.engine

    def gives_own(self, sizes: tuple[int, ...]) -> None:
        """Give each request of a step its own number of draft tokens; `sizes`: see
        `StepModel.drafted_sizes`.
        """
        self.common = None
        if sizes:
            self.times.set_drafted_sizes(sizes)

    # Requests

    def open(self, problem: int, written: int, most: int) -> int:
        """Give a request that joined a slot: tokens of its response that are there
        already, and the most there can be.
        """
        cdf = self.lengths.cdf(problem).copy()
        cdf[np.searchsorted(self.lengths.edges, most) :] = 1.0
        # another batch (a validation's, say), not one that refills
        if not self._running:
            self._settle()
        elif self._last_end >= 0:
            self._last_refill = self.account.now
        self._arrived = True
        self._running += 1
        slot = self.requests.open(written, cdf)
        lengths = self.lengths
        first = classes(
            cdf[None, :], lengths.edges, np.array([float(written)]), lengths.bounds
        )
        self.requests.first_class[slot] = first[0]
        return slot

    def close(self, slot: int) -> None:
        """Close the slot of a request that ended."""
        self.account.time.end_request(slot)
        self._last_end = self.account.now
        self._running -= 1
        self.requests.close(slot)

    def sync(self, responses: Responses) -> None:
        """Learn finished responses' lengths, at a weight sync, and start again."""
        self.lengths.observe(responses)
        self.lengths.refit()
        self._curve.sync()
        self.times.fit()
        self.account.sync(self.drafts is not None and not self.drafts.passes_every_step)
        if self.drafts is not None:
            self.drafts.sync()
        self._settle()

    def rehearse(self) -> None:
        """Draft in every step whatever it costs, until `rehearsed`: an engine tries its
        drafts before it serves.
        """
        self._rules = self.always, self._policy, self._floor
        self.always = True
        self._policy = "unlimited"
        self._floor = 0.0

    def rehearsed(self) -> None:
        """Decide as the block says, as if nothing had been decoded yet."""
        self.always, self._policy, self._floor = self._rules
        self.account.forget()
        self._settle()

    # A decode step

    def plan(self, decoded: Decoded, history: HistoryDrafts | None = None) -> StepPlan:
        """Take what a decode step brought, and decide on the drafts of the next:
        `learn`, `search`, then `decide`. `history` is asked at most once for drafts;
        None: none are looked up.
        """
        self.learn(decoded)
        search = self.search(decoded)
        return self.decide(
            decoded.slots,
            search,
            None if search is None or history is None else history(*search),
        )

    def learn(self, decoded: Decoded) -> None:
        """Take what a decode step brought."""
        slots = decoded.slots
        table = self.requests
        table.advance(slots, decoded.got, decoded.carried, self._curve.counts)
        if (
            self.drafts is not None
            and decoded.by_model is not None
            and decoded.by_model.any()
        ):
            worth = table.worth[slots]
            training = table.record[slots]
            saved = self.drafts.record_verified(
                decoded.by_model, decoded.got, worth, training, decoded.kinds
            )
            self.account.model(saved=saved)

    def search(self, decoded: Decoded) -> Search | None:
        """Say what to look for after a decode step; None: nothing is drafted for the
        next.
        """
        slots = decoded.slots
        running = len(decoded.slots)
        account = self.account
        account.now += decoded.steps
        if account.idle or not running or not account.look.due(account.now, running):
            return None
        mean = (
            0.0 if decoded.context is None else sum(decoded.context.tolist()) / running
        )
        self._model = self.times.model.at_context(mean)
        if self.drafts is not None:
            self.drafts.context = mean
        limits = self._draft_limits(slots, decoded.room, decoded.context)
        floor = self._floor
        if self._policy == "optimal" and not account.due("drafted"):
            floor = self._least_chance
        return Search(limits, floor)

    def decide(
        self,
        slots: Ints,
        search: Search | None,
        found: tuple[Chances, Ints] | None = None,
    ) -> StepPlan:
        """Decide on the drafts of the next step, given its requests' slots, int64 [b],
        what `search` has returned, and what was found in the history, see
        `HistoryDrafts`; None: nothing was looked for.
        """
        if search is None:
            return StepPlan.nothing(len(slots))
        chances, offsets = found or (
            _NO_DRAFTS,
            np.zeros(len(slots) + 1, dtype=np.int64),
        )
        model = None if self.account.model_rest.reason else self.drafts
        cut = self._policy == "optimal"
        return self._share_out(
            slots,
            DraftCandidates(search.limits, chances, offsets, model, search.floor, cut),
        )

    def value(self, slots: Ints, context: Ints | None, ahead: int = 0) -> None:
        """Compute what an accepted token of each request is worth, if that is due now
        or so many steps ahead.
        """
        step = self.account.now + ahead
        running = len(slots)
        arrived = self._arrived
        if arrived or self._replan.due(step, running):
            self._replan.done(step, running, again_soon=arrived)
            self._value_requests(slots, context)

    def timed(self, step: TimedStep) -> float | None:
        """Take how long a decode step took; return the seconds that the latency model
        expected of it, None before there is one.
        """
        predicted = self.times.add(
            step.tokens, len(step.slots), step.drafted, step.seconds, step.context
        )
        self._drafting_seconds += (
            step.drafting_seconds - self._drafting_seconds
        ) / tuning.PACE_STEPS
        self.times.keep_fitted()
        if self.account.time.batch.refilled != self._refilling:
            self.account.time.begin_batch(self._refilling)
        self.account.timed(step, predicted)
        return predicted

    def worth(self, slots: Ints) -> Floats:
        """Return what an accepted token of each request is worth, float64 [b]: seconds;
        where budgets are fixed, all are worth the same.
        """
        found: Floats = self.requests.worth[slots]
        return (
            found
            if self._policy == "optimal" and found.max() > 0
            else np.ones(len(slots))
        )

    # Inside

    @property
    def _refilling(self) -> bool:
        return self.account.now - self._last_refill < tuning.REFILL_STEPS

    def _draft_limits(self, slots: Ints, room: Ints, context: Ints | None) -> Ints:
        """Most draft tokens of each request, shape (b,), before it is known what there
        is to draft.
        """
        running = len(slots)
        now = self.account.now
        self.value(slots, context)
        if self._policy == "optimal":
            return self.requests.draft_limits(
                slots, room, self._most, self._model.marginal_price(running)
            )
        most: Ints = np.minimum(room, self._most)
        if self._policy == "das":  # a fraction of a token in that share of the steps
            np.minimum(
                most,
                np.floor(self.requests.budget[slots] + now * GOLDEN % 1.0).astype(
                    np.int64
                ),
                out=most,
            )
        np.maximum(most, 0, out=most)
        return most

    def _share_out(self, slots: Ints, offer: DraftCandidates) -> StepPlan:
        """Decide how many tokens of each draft are verified, and for whom the model
        drafts instead.
        """
        account = self.account
        running = len(slots)
        limits = offer.limits
        self._arrived = False
        model = self._model
        found = None
        if self.always:
            plan = plan_everything(offer)
            account.decided(running, True, False)
        else:
            plain = account.probe("plain")
            common = self.common
            worth = self.requests.worth[slots]
            found = (
                plan_one_length(offer, worth, model, common)
                if common
                else plan_own_lengths(offer, worth, model)
            )
            total = found.total
            drafting = model.step(running + total, running, total > 0) + found.passes_s
            gain = found.gain / drafting if total else None
            drafts = (
                account.draws(running, gain, offer.by_worth) and not plain and total > 0
            )
            plan = found if drafts else StepPlan.nothing(running)
            unseen = (
                not drafts
                and offer.drafter is not None
                and offer.drafter.may_pay_untried(model.step(running, running, False))
            )
            there = len(offer.chances) > 0 or offer.drafter is not None
            probing = account.probe("drafted", unseen) and there
            if probing:
                by_model = unseen or not len(offer.chances)
                offered = limits if by_model else np.diff(offer.offsets)
                count = (
                    running
                    if unseen
                    else min(tuning.PROBE_REQUESTS, tuning.PROBE_BATCH_SHARE * running)
                )
                ranks = np.argsort(np.argsort(np.where(offered > 0, slots, 2**30)))
                some = np.minimum(offered, ranks < count)  # those in the lowest slots
                plan = (
                    StepPlan(0 * some, some) if by_model else StepPlan(some, 0 * some)
                )
                drafts = bool(some.any())
            account.decided(
                running, drafts, probing, plain, model.step(running, running, False)
            )
        if self.common is None or plan is found:  # which has one length already
            return plan
        # as much as the device finds by then
        newest = limits if self.always and self._looks_up else plan.history
        kept, asked = (
            np.full_like(keep, shortest_sufficient_length(keep, self.common))
            for keep in (newest, plan.model)
        )
        return StepPlan(kept, asked)

    def _value_requests(self, slots: Ints, context: Ints | None) -> None:
        """Compute the worth of an accepted token of each request, the requests'
        classes, and DAS's budgets.
        """
        table = self.requests
        lengths = self.lengths
        model = self._model
        cdf = table.cdf[slots]
        written = table.written[slots]
        table.length_class[slots] = classes(cdf, lengths.edges, written, lengths.bounds)
        if self._policy == "das":
            risen = np.where(
                table.length_class[slots] > table.first_class[slots],
                table.length_class[slots],
                0,
            )
            remaining = np.maximum(
                expected_remaining(cdf, lengths.edges, written),
                lengths.class_lengths[risen] - written,
            )
            table.budget[slots] = das_budgets(
                remaining, self._curve.fitted(), model, self._most
            )
        texts = np.zeros(len(slots)) if context is None else context
        fixed: Floats = (
            self.times.model.request
            + self.times.model.context * np.asarray(texts, dtype=float)
        )
        table.worth[slots] = worth = self._token_worth(slots, model, fixed)
        dearest = float(worth.max())
        running = len(slots)
        self._least_chance = max(
            tuning.LEAST_CHANCE,
            min(model.slope(running), model.slope(np.inf)) / max(dearest, 1e-12),
        )

    def _token_worth(self, slots: Ints, model: StepModel, fixed: Floats) -> Floats:
        """What the request's own part in a step costs, and by how much the rollout ends
        earlier; `fixed`: seconds that each request adds to a step, tokens apart, shape
        (b,).
        """
        table = self.requests
        running = len(slots)
        if self._refilling:  # nobody decides the end
            last = np.full(running, 1.0 / running)
        else:
            last = makespan_weights(
                table.cdf[slots], self.lengths.edges, table.written[slots]
            )
        # A round that is not needed saves what its tokens cost, drafts included but not
        # more than plain decoding's, and the last ones what a step costs that nobody
        # else is in.
        pace = table.pace[slots]
        tokens = 1.0 + table.load[slots]
        token = model.slope(float(tokens.sum()))
        left = 1.0 / float(last @ last)
        size = left * float(last @ tokens)
        tail = max(
            0.0,
            model.step(size, left, size > left)
            - model.slope(size) * size
            - model.request * left,
        )
        own: Floats = np.minimum((token * tokens + fixed) / pace, token + fixed)
        return own + last * min(
            tail, (tail + self._drafting_seconds) / float(last @ pace)
        )

    def _settle(self) -> None:
        """A batch is over: what follows has a beginning of its own."""
        self.account.time.begin_batch()
        self._last_end = self._last_refill = _NEVER
