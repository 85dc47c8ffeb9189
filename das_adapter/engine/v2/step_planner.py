"""The host's side of an engine on the V2 runner: it processes the outputs of steps, has
the policy of drafts choose, and makes the plan that goes to vLLM's scheduler.

vLLM schedules ahead, so that a choice acts late. Step 3 is running when the output of
step 2 is on the host, and step 4 is scheduled:

    output of step 2 arrives   the plan that is made now goes with step 5
    step 5 ends                the drafts of this plan are made, on the device
    step 6                     verifies them
    output of step 6           says what was found for step 5, and what was accepted

What the policy learns from a step waits until the host waits for the device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from das_adapter.config import DasConfig
from das_adapter.core.model_drafts import ModelDrafts
from das_adapter.core.requests import EMPTY_INTS
from das_adapter.core.steps import Ints, Outcome, Rest, Search, TimedStep
from das_adapter.engine.controller import EngineController
from das_adapter.engine.plan import SILENCE, DraftPlan
from das_adapter.engine.requests import LiveRequest
from das_adapter.engine.v2.live import LiveTexts, Sums
from das_adapter.engine.v2.neural import Call
from das_adapter.engine.v2.speculator import DeviceOffer
from das_adapter.protocol.engine_args import draft_lengths
from das_adapter.protocol.messages import Refresh, Refreshed
from das_adapter.protocol.metrics import EngineStats

LATE_STEPS = 3
"""Steps after which one hears of what is looked up where it is chosen now: one is
scheduled already, in the next it is looked up, and it comes with the output of the one
after that.
"""
MOST_PUT_OFF = 64
"""Outputs that are put off together, at most: where nobody is asked any more, else
fewer.
"""
TIMED_EVERY = 8
"""One in so many of those steps is timed by itself: it takes longer than to count
them.
"""


@dataclass(slots=True)
class Step:
    """A step as the host started it, and what came of it."""

    begun: Sequence[LiveRequest]
    """Requests that joined the batch, or came back to it."""
    ended: Set[str]
    """Requests that had ended before it."""
    drafts: dict[str, int]
    """Draft tokens of each request that are scheduled, fillers included; those without
    may be left out.
    """
    decodes: bool
    """Whether it reads no prompt."""
    began: float
    """Seconds of a monotonic clock at its begin."""
    offer: DeviceOffer | None = None
    """What was drafted at its end; None: nothing was looked for."""
    kinds: Any = None
    """Kinds of the tokens that a model drafted at its end, uint8 [requests, drafted];
    None: nobody says how sure it was.
    """
    calls: Sequence[Call] = ()
    """Calls of a model that drafts which ended between the output of the step before
    and its own.
    """
    req_ids: list[str] = field(default_factory=list)
    """Its requests in batch order."""
    admitted: Ints | None = None
    """Draft tokens of each request that the device has verified, int64 [requests];
    None: all that are scheduled.
    """
    unburdened: bool = False
    """Whether the host did nothing for das-adapter in it: the output of the step before
    was put off.
    """

    @property
    def quiet(self) -> bool:
        """Whether nobody joins or leaves, and nothing is drafted, verified or looked
        for.
        """
        joins_or_leaves = self.begun or self.ended
        drafts = self.offer or self.calls
        if not self.decodes or joins_or_leaves or drafts:
            return False
        verified = self.verified
        return verified is None or not verified.any()

    @property
    def verified(self) -> Ints | None:
        """Draft tokens of each request that were verified, int64 [requests] in batch
        order; None: nobody had any.
        """
        if self.admitted is not None or not self.drafts:
            return self.admitted
        req_ids = self.req_ids
        scheduled = map(self.drafts.get, req_ids, repeat(0))
        return np.fromiter(scheduled, np.int64, len(req_ids))


class Output(NamedTuple):
    """The output of a step."""

    step: Step
    sampled: Sequence[list[int]]
    """Tokens that each of its requests got, in batch order; none while its prompt is
    read.
    """
    arrived: float
    """Seconds of a monotonic clock at which it was on the host."""


class _Counted(NamedTuple):
    """A step whose output was processed, and that is still to be counted and timed."""

    output: Output
    outcome: Outcome
    sums: Sums
    """Sums over the requests that go on."""
    ended: float
    """Seconds since the epoch at which the output was on the host."""


class StepPlanner:
    """Makes the plans of an engine. Outputs come in one thread, messages of the host in
    another.
    """

    def __init__(
        self,
        config: DasConfig,
        vllm_config: Any,
        always: int = 0,
    ) -> None:
        """`always`: passes of a neural drafter in every step, with drafts or
        without.
        """
        drafts = None
        lengths = draft_lengths(config)
        if config.by_model:
            drafts = ModelDrafts(
                config.model_tokens,
                narrows=False,
                passes_every_step=always,
                follows=config.neural,
                parallel=config.parallel,
                lengths=lengths,
            )
        self.engine = EngineController(
            config,
            vllm_config,
            drafts,
            lengths=lengths,
            # until one hears of a look no output can be put off
            look_steps=1 + LATE_STEPS,
        )
        self.texts = LiveTexts(config.num_draft_tokens, self.engine.live)
        self._own_lengths = False
        """Whether each request of a step has its own number of draft tokens."""
        self._model_tokens = -1
        """Tokens of the model's drafts, see `LiveTexts.process_tokens`."""
        if drafts is not None:
            has_history = self.engine.history is not None
            self._model_tokens = 0 if has_history else config.model_tokens
        self._lock = threading.Lock()
        self._put_off: list[Output] = []
        """Outputs that are still to be processed."""
        self._before: Step | None = None
        """The last step, whose offer arrives with the next one's output."""
        self._uncounted: _Counted | None = None
        """The last step that was processed; None: it was counted."""
        self._last_arrival: float | None = None
        """Seconds at which the last output arrived; None: after a pause."""
        self._look_under_way = 0
        """Outputs until one hears of the last look that was asked for while nothing was
        drafted.
        """
        self._may_put_off = 0
        """Outputs that may be put off: until they are processed nobody is asked for
        drafts.
        """

    def give_own_lengths(self, sizes: tuple[int, ...]) -> None:
        """Give each request of a step its own number of draft tokens; `sizes`: see
        `StepModel.drafted_sizes`.
        """
        self._own_lengths = True
        self.engine.policy.give_own_lengths(sizes)

    # Outputs

    def process_output(self, output: Output) -> DraftPlan:
        """Process the output of a step; return the plan for the next unscheduled step.

        While it is known that nobody is asked for drafts, outputs are put off, some
        steps long: what those steps take without das-adapter's own work is what stock
        takes, with which the account compares.
        """
        with self._lock:
            step = output.step
            step.unburdened = bool(self._put_off)
            self._put_off.append(output)
            num_waiting = len(self._put_off)
            if num_waiting <= self._may_put_off and step.quiet:
                return SILENCE
            return self._catch_up()

    def count_last(self) -> None:
        """Count and time the last step that was processed, and learn from it."""
        if self._uncounted is not None:
            with self._lock:
                self._count_last()

    def catch_up(self) -> None:
        """Process the outputs that were put off."""
        with self._lock:
            self._catch_up()

    def _catch_up(self) -> DraftPlan:
        plan = SILENCE
        self._may_put_off = 0
        outputs = self._put_off
        self._put_off = []
        if not outputs:
            return plan
        newest = outputs[-1].arrived
        # In the first step the host has worked for das-adapter; the last one's output
        # may bring something else than a token for each request.
        first = outputs[:1]
        between = outputs[1:-1]
        last = outputs[1:][-1:]
        for part in (first, between, last):
            if len(part) > 1 and self._process_together(part, newest):
                continue
            for output in part:
                age_s = newest - output.arrived
                plan = self._process(output, age_s)
        return plan

    def _process_together(self, outputs: Sequence[Output], newest: float) -> bool:
        """Process the outputs of some steps, in each of which every request got a token
        and nothing else happened; `newest`: when the newest of all outputs arrived.
        Return whether they were such steps: else none is processed.
        """
        self._count_last()
        req_ids = outputs[0].step.req_ids
        steps = len(outputs)
        sampled = []
        for output in outputs:
            if output.step.req_ids != req_ids:
                return False
            sampled.append(output.sampled)
        slots = self.texts.process_single_tokens(req_ids, sampled)
        if slots is None:
            return False
        self._before = outputs[-1].step
        outputs_to_look = self._look_under_way - steps
        self._look_under_way = max(0, outputs_to_look)
        with self.engine.surviving():
            policy = self.engine.policy
            outcome = Outcome(
                slots,
                got=np.full_like(slots, steps),
                carried=None,
                by_model=None,
                room=EMPTY_INTS,
                steps=steps,
            )
            decision = policy.next(outcome)
            self._note_rest(decision)
            busy_s = self._time_together(outputs, slots, newest)
            is_training = self.texts.record[slots]
            num_training = int(np.count_nonzero(is_training))
            if num_training:
                self.engine.counters.add(
                    requests=num_training,
                    steps=steps,
                    seconds=busy_s,
                )
            policy.flush()
        return True

    def _time_together(
        self,
        outputs: Sequence[Output],
        slots: Ints,
        newest: float,
    ) -> float:
        """Time steps as `_process_together` processes them; return the seconds between
        each one's begin and its output, added up.
        """
        requests = len(slots)
        since_epoch = time.time() - newest
        lengths = self.texts.length[slots]
        context = int(np.add.reduce(lengths))
        context -= len(outputs) * requests
        every = 1
        if self.engine.policy.baseline_known and self.engine.log is None:
            every = TIMED_EVERY
        one = np.ones_like(slots)
        step = TimedStep(
            slots,
            one,
            requests,
            seconds=0.0,
            asked=False,
        )
        busy_s = 0.0
        num_others = 0
        others_s = 0.0
        others_context = 0
        for number, output in enumerate(outputs):
            context += requests
            arrived = output.arrived
            begin = max(output.step.began, self._last_arrival or 0.0)
            busy_s += arrived - begin
            if self._last_arrival is not None and arrived > self._last_arrival:
                seconds = arrived - self._last_arrival
                if number % every:
                    num_others += 1
                    others_s += seconds
                    others_context += context
                else:
                    timed = step._replace(seconds=seconds, context=context)
                    self.engine.timed(timed, since_epoch + arrived)
            self._last_arrival = arrived
        if num_others:
            others = step._replace(
                seconds=others_s,
                context=others_context,
                steps=num_others,
            )
            self.engine.policy.timed(others)
        return busy_s

    def _process(self, output: Output, age_s: float) -> DraftPlan:
        """Process the output of a step that arrived so long ago."""
        self._count_last()
        self._may_put_off = 0
        step = output.step
        before = self._before
        self._before = step
        with self.engine.surviving():
            self._begin_and_end(step)
            if before is not None:
                self._record_drafts(before)
            places, outcome, sums = self.texts.process_tokens(
                step.req_ids,
                output.sampled,
                step.verified,
                self._model_tokens,
            )
            if before is not None and before.kinds is not None:
                kinds = self.texts.kinds[outcome.slots]
                outcome = outcome._replace(token_kinds=kinds)
            ended = time.time() - age_s
            self._uncounted = _Counted(output, outcome, sums, ended)
            search = self.engine.policy.next(outcome)
            if isinstance(search, Rest):
                return self._resting_plan(search)
            return self._plan(step, places, outcome, search)
        return SILENCE

    def _count_last(self) -> None:
        counted = self._uncounted
        self._uncounted = None
        if counted is None or self.engine.rehearsing:
            return
        step, _, arrived = counted.output
        sums = counted.sums
        with self.engine.surviving():
            if sums.forwards:
                begin = max(step.began, self._last_arrival or 0.0)
                busy_s = arrived - begin
                self.engine.counters.add(
                    requests=sums.forwards,
                    steps=1,
                    seconds=busy_s,
                    tokens=sums.written,
                    drafted_forwards=sums.drafted_forwards,
                    draft_tokens=sums.drafted,
                    accepted_tokens=sums.accepted,
                )
            self._time(counted)
            self._last_arrival = arrived
            self.engine.stop_if_collapsed()
            self.engine.policy.flush()

    def _time(self, counted: _Counted) -> None:
        """Record how long a step took, and the calls of a model that drafts beside
        it.
        """
        step, _, arrived = counted.output
        outcome = counted.outcome
        sums = counted.sums
        drafts = self.engine.drafts
        passes = sum(call.passes for call in step.calls)
        drafting_s = sum(call.seconds for call in step.calls)
        if drafts is not None:
            drafts.passes_made += passes
            for call in step.calls:
                if call.is_typical:
                    pass_s = call.seconds / call.passes
                    drafts.record_pass(call.requests, pass_s)
        if self._last_arrival is None:
            return
        seconds = arrived - self._last_arrival - drafting_s
        if not step.decodes or seconds <= 0 or not sums.requests:
            return
        verifies = sums.tokens > sums.requests
        drafted = passes > 0 or verifies
        asked = step.offer is not None or drafted or not step.unburdened
        timed = TimedStep(
            outcome.slots,
            outcome.got,
            tokens=sums.tokens,
            seconds=seconds,
            drafting_seconds=drafting_s,
            passes=passes,
            context=sums.context,
            asked=asked,
        )
        self.engine.timed(timed, counted.ended)

    def _record_drafts(self, step: Step) -> None:
        """Record what was drafted at the end of a step."""
        offer = step.offer
        if offer is not None:
            self.texts.record_offers(
                step.req_ids,
                offer.lengths.numpy(),
                offer.chances.numpy(),
                offer.by_model.numpy(),
            )
        if step.kinds is not None and self.engine.drafts is not None:
            kinds = step.kinds.numpy()
            self.texts.record_kinds(step.req_ids, kinds)
            if not self.engine.rehearsing:
                self.engine.drafts.record_token_kinds(kinds)

    # Plans

    def _plan(
        self,
        step: Step,
        places: Ints,
        outcome: Outcome,
        search: Search,
    ) -> DraftPlan:
        """Have the policy choose, and make the plan; `places`: rows of the batch that
        the outcome's requests have.
        """
        candidates = None
        if self.engine.history is not None:
            is_optimal = self.engine.config.budget == "optimal"
            candidates = self.texts.forecast_drafts(
                outcome.slots,
                search.max_tokens,
                search.min_chance,
                last=not is_optimal,
            )
        chosen = self.engine.policy.choose(search, candidates)
        if isinstance(chosen, Rest):
            return self._resting_plan(chosen)
        drafts = self.engine.drafts
        wanted = 0
        num_model_tokens = 0
        chances = None
        if drafts is not None:
            most_by_model = _largest(chosen.model)
            wanted = max(chosen.longest, most_by_model)
            num_model_tokens = drafts.draft_length(wanted)
            chances = drafts.confidence.chances
        if not self._own_lengths:
            most_by_history = _largest(chosen.history)
            wanted = max(wanted, most_by_history)
            return DraftPlan(wanted, num_model_tokens, chances=chances)
        # The device gives tokens to the requests to which its newest drafts promise
        # most.
        longest = num_model_tokens
        if self.engine.history is not None:
            longest = _largest(search.max_tokens)
        req_ids = step.req_ids
        if len(places) < len(req_ids):
            req_ids = [req_ids[place] for place in places.tolist()]
        drafted = max(chosen.budget, num_model_tokens)
        greatest_weight = chosen.weights.max()
        return DraftPlan(
            num_draft_tokens=min(longest, drafted),
            num_model_tokens=num_model_tokens,
            looks_up=True,
            chances=chances,
            budget=chosen.budget,
            req_ids=req_ids,
            limits=search.max_tokens,
            worth=chosen.weights / greatest_weight,
        )

    def _resting_plan(self, rest: Rest) -> DraftPlan:
        """Return a plan without drafts: what there is is looked up once for each time
        that a drafter will be asked.
        """
        self._note_rest(rest)
        self._look_under_way = max(0, self._look_under_way - 1)
        rests_briefly = rest.steps < LATE_STEPS
        looks_up = rests_briefly and not self._look_under_way
        if looks_up:
            self._look_under_way = LATE_STEPS
        return DraftPlan(looks_up=looks_up)

    def _note_rest(self, decision: Search | Rest) -> None:
        """Note how many outputs may be put off: none whose offer is still to come."""
        self._may_put_off = 0
        before = self._before
        offer_is_to_come = before is None or before.offer is not None
        if isinstance(decision, Rest) and not offer_is_to_come:
            undrafted_steps = decision.steps - LATE_STEPS
            self._may_put_off = min(MOST_PUT_OFF, undrafted_steps)

    # Requests

    def _begin_and_end(self, step: Step) -> None:
        self._close(sorted(step.ended))
        for request in step.begun:
            known = self.engine.live.get(request.req_id)
            if known is not None:
                # It was preempted.
                self._take_back_discarded(known, request)
                known.length = request.length
                known.text = request.text
                self.texts.open(known)
                continue
            # The others' tokens are processed all the same.
            with self.engine.surviving():
                self.engine.open(request, request.length)
                self.texts.open(request)

    def _take_back_discarded(self, known: LiveRequest, request: LiveRequest) -> None:
        """Count no longer what vLLM threw away of a request that comes back: the tokens
        of the step in flight when the prefix cache was reset.
        """
        discarded = int(self.texts.length[known.slot]) - request.length
        if discarded <= 0 or not known.record or self.engine.rehearsing:
            return
        counters = self.engine.counters
        counters.tokens = max(0, counters.tokens - discarded)
        # a step brings one token that was no draft
        accepted = counters.accepted_tokens - (discarded - 1)
        counters.accepted_tokens = max(0, accepted)

    def _close(self, req_ids: Sequence[str]) -> None:
        self.texts.close(req_ids)
        self.engine.close(req_ids)

    # Commands of the host

    def rehearsed(self) -> None:
        """End the rehearsal, and forget its request."""
        with self._lock:
            self._catch_up()
            self.engine.rehearsed()
            self.texts = LiveTexts(
                self.engine.config.num_draft_tokens, self.engine.live
            )
            self._before = None
            self._uncounted = None
            self._last_arrival = None
            self._look_under_way = 0
            self._may_put_off = 0

    def refresh(self, message: Refresh) -> Refreshed:
        """Bring the history up to date, at a weight sync; see
        `EngineController.refresh`.
        """
        with self._lock:
            self._catch_up()
            self._count_last()
            live = self.engine.live
            ended = []
            for req_id, request in live.items():
                if self.texts.ended[request.slot]:
                    ended.append(req_id)
            ended.sort()
            self._close(ended)
            self._last_arrival = None
            self._may_put_off = 0
            self.texts.forget_drafts()
            return self.engine.refresh(message)

    def map_guest_history(self, files: Sequence[str]) -> None:
        """Map files with the history of problems that are at home on other nodes."""
        with self._lock:
            self._catch_up()
            if self.engine.history:
                self.engine.history.map_guest_history(files)

    def stats(self) -> EngineStats:
        """Return the figures of the engine; see `EngineController.stats`."""
        with self._lock:
            self._catch_up()
            self._count_last()
            return self.engine.stats()


def _largest(tokens: Ints) -> int:
    return int(np.maximum.reduce(tokens, initial=0))
