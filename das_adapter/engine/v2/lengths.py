"""The draft length of the next steps, chosen on the host from what it hears of the
steps before, one step late. What is learned from a step waits until the host waits for
the device.
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
from das_adapter.core.steps import Decoded, Ints, TimedStep
from das_adapter.engine.controller import EngineController
from das_adapter.engine.requests import LiveRequest
from das_adapter.engine.v2.live import LiveTexts, Sums
from das_adapter.engine.v2.neural import Call
from das_adapter.engine.v2.speculator import Offer
from das_adapter.protocol.engine_args import DraftTokens, draft_lengths
from das_adapter.protocol.messages import Refresh, Refreshed
from das_adapter.protocol.metrics import EngineStats

LATE = 3
"""Steps after which one hears of what is looked up where it is chosen now: one is
scheduled already, in the next it is looked up, and it comes with the output of the one
after that.
"""


MOST_ASIDE = 64
"""Steps whose outputs are put aside together, at most: where nobody is asked any more,
else fewer.
"""
EVERY = 8
"""Of those steps, so many are timed as one: it takes longer than to count them."""
_SILENCE = DraftTokens(0, looks=False)


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
    """Seconds of a monotonic clock."""
    offer: Offer | None = None
    """Of its end; None: nothing was looked for."""
    kinds: Any = None
    """Of the tokens that a model drafted at its end, uint8 [requests, drafted]; None:
    nobody says how sure it was.
    """
    calls: Sequence[Call] = ()
    """Of a model that drafts, those that ended between the output of the step before
    and its own.
    """
    req_ids: list[str] = field(default_factory=list)
    """Its requests in batch order."""
    admitted: Ints | None = None
    """Draft tokens of each that the device has verified, int64 [requests]; None: all
    that are scheduled.
    """
    unburdened: bool = False
    """Whether the host did nothing for das-adapter in it: the output of the step before
    was put aside.
    """

    @property
    def quiet(self) -> bool:
        """Whether nobody joins or leaves, and nothing is drafted, verified or looked
        for.
        """
        if not self.decodes or self.begun or self.ended or self.offer or self.calls:
            return False
        given = self.given
        return given is None or not given.any()

    @property
    def given(self) -> Ints | None:
        """Draft tokens of each request that were verified, int64 [requests] in batch
        order; None: nobody had any.
        """
        if self.admitted is not None or not self.drafts:
            return self.admitted
        return np.fromiter(
            map(self.drafts.get, self.req_ids, repeat(0)), np.int64, len(self.req_ids)
        )


_Aside = tuple[Step, Sequence[list[int]], float]
"""A step, the tokens that each of its requests got, and when its output came,
seconds.
"""


class _Taken(NamedTuple):
    """A step whose output was taken, and that is still to be learned from."""

    step: Step
    decoded: Decoded
    sums: Sums
    """Of the requests that go on."""
    now: float
    """When its output came, seconds."""
    ended: float
    """The same since the epoch."""
    asked: bool
    """Whether a drafter was asked at its end."""


class DraftLengths:
    """Chooses draft lengths. Outputs come in one thread, messages of the host in
    another.
    """

    def __init__(self, config: DasConfig, vllm_config: Any, always: int = 0) -> None:
        """`always`: passes of a neural drafter in every step, with drafts or
        without.
        """
        drafts = None
        lengths = draft_lengths(config)
        if config.by_model:
            drafts = ModelDrafts(
                config.model_tokens,
                False,
                always,
                follows=config.neural,
                parallel=config.parallel,
                lengths=lengths,
            )
        self.engine = EngineController(config, vllm_config, drafts, lengths=lengths)
        self.engine.controller.account.look_share = (
            0.0  # for a look outputs can't be put aside for some steps
        )
        self.texts = LiveTexts(config.num_draft_tokens, self.engine.live)
        self._model = (
            -1 if drafts is None else 0 if self.engine.history else config.model_tokens
        )
        """Tokens of the model's drafts, see `LiveTexts.take`."""
        self._lock = threading.Lock()
        self._aside: list[_Aside] = []
        """Outputs that are still to be taken."""
        self._before: Step | None = None
        """The last step, whose offer arrives with the next one's output."""
        self._taken: _Taken | None = None
        """The last step that was taken; None: it was learned from."""
        self._last: float | None = None
        """When the last output came, seconds; None: after a pause."""
        self._unheard = 0
        """Outputs until one hears of the last look that was asked for while nothing was
        drafted.
        """
        self._silence = 0
        """Outputs that may be put aside: until they are taken nobody is asked for
        drafts.
        """

    def output(self, step: Step, sampled: Sequence[list[int]], now: float) -> int:
        """Take the output of a step that came `now`: the tokens that each of its
        requests got, in batch order, none while its prompt is read. Return how many
        tokens each request of the next unscheduled step is to draft.

        While it is known that nobody is asked for drafts, outputs are put aside, some
        steps long: what those steps take without das-adapter's own work is what stock
        takes, with which the account compares.
        """
        with self._lock:
            step.unburdened = bool(self._aside)
            self._aside.append((step, sampled, now))
            if len(self._aside) <= self._silence and step.quiet:
                return _SILENCE
            return self._catch_up()

    def settle(self) -> None:
        """Learn from the last step that was taken."""
        if self._taken is not None:
            with self._lock:
                self._settle()

    def catch_up(self) -> None:
        """Take the outputs that were put aside."""
        with self._lock:
            self._catch_up()

    def _catch_up(self) -> DraftTokens:
        answer = _SILENCE
        aside = self._aside
        self._aside = []
        # in the first one the host has worked for das-adapter
        for part in (
            aside[:1],
            aside[1:-1],
            aside[1:][-1:],
        ):
            if len(part) < 2 or not self._take_together(part, aside[-1][2]):
                for step, sampled, now in part:
                    answer = self._take(step, sampled, now, aside[-1][2] - now)
        before = self._before
        self._silence = 0
        if before is not None and before.offer is None:
            asked = self.engine.controller.account.asks_in(len(before.req_ids))
            self._silence = min(MOST_ASIDE, asked - LATE - 1)
        return answer

    def _take_together(self, aside: Sequence[_Aside], last: float) -> bool:
        """Take steps, of which the `last` came when, in which each request got a token
        and nothing else happened; and learn from them. Return whether they were such
        steps: else none is taken.
        """
        self._settle()
        req_ids = aside[0][0].req_ids
        steps = len(aside)
        same = all(step.req_ids == req_ids for step, *_ in aside)
        slots = (
            self.texts.take_singles(req_ids, [sampled for _, sampled, _ in aside])
            if same
            else None
        )
        if slots is None:
            return False
        self._before, self._unheard = aside[-1][0], max(0, self._unheard - steps)
        with self.engine.surviving():
            account = self.engine.controller.account
            requests = self.engine.controller.requests
            account.now += steps
            context = int(np.add.reduce(self.texts.length[slots])) - steps * len(slots)
            one = np.ones_like(slots)
            busy = 0.0
            since = time.time() - last
            every = EVERY if account.time.known and self.engine.log is None else 1
            others = np.zeros(3)
            for number, (step, _, now) in enumerate(aside):
                context += len(slots)
                busy += now - max(step.began, self._last or 0.0)
                if self._last is not None and now > self._last:
                    seconds = now - self._last
                    if number % every:
                        others += 1.0, seconds, context
                    else:
                        timed = TimedStep(
                            slots,
                            one,
                            len(slots),
                            seconds,
                            context=context,
                            asked=False,
                        )
                        self.engine.timed(timed, since + now)
                self._last = now
            account.count(slots, others)
            if training := int(np.count_nonzero(requests.record[slots])):
                self.engine.counters.add(training, steps, busy)
            requests.record_baseline_steps(slots, steps * one)
        return True

    def _take(
        self, step: Step, sampled: Sequence[list[int]], now: float, since: float
    ) -> DraftTokens:
        self._settle()
        before = self._before
        self._before = step
        with self.engine.surviving():
            self._begin_and_end(step)
            if before is not None:
                self._hear(before)
            places, decoded, sums = self.texts.take(
                step.req_ids, sampled, step.given, self._model
            )
            if before is not None and before.kinds is not None:
                decoded = decoded._replace(kinds=self.texts.kinds[decoded.slots])
            account = self.engine.controller.account
            asked = account.ask(len(decoded.slots), decoded.carried is not None)
            self._taken = _Taken(step, decoded, sums, now, time.time() - since, asked)
            if asked:
                return self._choose(step, places, decoded)
            return DraftTokens(0, looks=self._looks(len(decoded.slots)))
        return _SILENCE

    def rehearsed(self) -> None:
        """End the rehearsal, and forget its request."""
        with self._lock:
            self._catch_up()
            self.engine.rehearsed()
            self.texts = LiveTexts(
                self.engine.config.num_draft_tokens, self.engine.live
            )
            self._before = None
            self._taken = None
            self._last = None
            self._unheard = self._silence = 0

    def _hear(self, step: Step) -> None:
        """Take what was drafted at the end of a step."""
        if (offer := step.offer) is not None:
            self.texts.hear(
                step.req_ids,
                offer.lengths.numpy(),
                offer.chances.numpy(),
                offer.by_model.numpy(),
            )
        if step.kinds is not None and self.engine.drafts is not None:
            kinds = step.kinds.numpy()
            self.texts.hear_kinds(step.req_ids, kinds)
            if not self.engine.rehearsing:
                self.engine.drafts.record_draft_kinds(kinds)

    def _looks(self, requests: int) -> bool:
        """Return whether the next unscheduled step looks up what there is, while
        nothing is drafted: once for each time that a drafter will be asked.
        """
        self._unheard = max(0, self._unheard - 1)
        looks = (
            not self._unheard
            and self.engine.controller.account.asks_in(requests) <= LATE
        )
        self._unheard = LATE if looks else self._unheard
        return looks

    def _settle(self) -> None:
        taken = self._taken
        self._taken = None
        if taken is None:
            return
        step, decoded, sums, now, *_ = taken
        if self.engine.rehearsing:
            return
        with self.engine.surviving():
            if sums.forwards:
                busy = now - max(step.began, self._last or 0.0)
                self.engine.counters.add(
                    sums.forwards, 1, busy, sums.written, *sums[-3:]
                )
            self._time(taken)
            self._last = now
            self.engine.stop_if_collapsed()
            controller = self.engine.controller
            if taken.asked:
                controller.learn(decoded)
            else:
                controller.requests.record_baseline_steps(decoded.slots, decoded.got)

    def refresh(self, message: Refresh) -> Refreshed:
        with self._lock:
            self._catch_up()
            self._settle()
            self._close(
                sorted(
                    req_id
                    for req_id, request in self.engine.live.items()
                    if self.texts.ended[request.slot]
                )
            )
            self._last = None
            self._silence = 0
            return self.engine.refresh(message)

    def visit(self, files: Sequence[str]) -> None:
        with self._lock:
            self._catch_up()
            if self.engine.history:
                self.engine.history.visit(files)

    def stats(self) -> EngineStats:
        """As `EngineController.stats`."""
        with self._lock:
            self._catch_up()
            self._settle()
            return self.engine.stats()

    def _begin_and_end(self, step: Step) -> None:
        self._close(sorted(step.ended))
        for request in step.begun:
            if known := self.engine.live.get(request.req_id):  # it was preempted
                known.length = request.length
                known.text = request.text
                self.texts.open(known)
                continue
            with self.engine.surviving():  # the others' tokens are taken all the same
                self.engine.open(request, request.length)
                self.texts.open(request)

    def _close(self, req_ids: Sequence[str]) -> None:
        self.texts.close(req_ids)
        self.engine.close(req_ids)

    def _choose(self, step: Step, places: Ints, decoded: Decoded) -> DraftTokens:
        controller = self.engine.controller
        slots = decoded.slots
        found = None
        drafts = self.engine.drafts
        history = self.engine.history
        own = controller.common is None
        search = controller.search(decoded)
        if search is not None and history is not None:
            found = self.texts.found(
                slots, *search, last=self.engine.config.budget != "optimal"
            )
        plan = controller.decide(slots, search, found)
        total = plan.total
        wanted = 0
        by_model = 0
        if drafts is not None:
            wanted = max(plan.longest, int(plan.model.max(initial=0)))
            by_model = drafts.draft_length(wanted)
        most = np.zeros(len(slots), dtype=np.int64) if search is None else search.limits
        if own:  # the device gives them to whom its newest drafts promise most
            total = int(most.sum()) if controller.always else total
            longest = (
                by_model if history is None else int(np.maximum.reduce(most, initial=0))
            )
            wanted = min(longest, max(total, by_model)) if total else 0
        else:
            wanted = max(wanted, int(np.maximum.reduce(plan.history, initial=0)))
        looks = wanted > 0 or self._looks(len(most))
        chosen = DraftTokens(wanted, by_model, looks)
        if drafts is not None:
            chosen.chances = drafts.confidence.chances
        if own and total:
            req_ids = step.req_ids
            worth = controller.worth(slots)
            if len(places) < len(req_ids):
                req_ids = [req_ids[place] for place in places.tolist()]
            chosen.total = total
            chosen.req_ids = req_ids
            chosen.most = most
            chosen.worth = worth / worth.max()
        return chosen

    def _time(self, taken: _Taken) -> None:
        """Take how long a step took, and the calls of a model that drafts beside it."""
        step, decoded, sums, now, ended, _ = taken
        drafts = self.engine.drafts
        passes = sum(call.passes for call in step.calls)
        drafting = sum(call.seconds for call in step.calls)
        if drafts is not None:
            drafts.passes_made += passes
            for call in (call for call in step.calls if call.usual):
                drafts.record_pass(call.requests, call.seconds / call.passes)
        seconds = 0.0 if self._last is None else now - self._last - drafting
        if step.decodes and seconds > 0 and sums.requests:
            asked = (
                step.offer is not None
                or passes > 0
                or sums.tokens > sums.requests
                or not step.unburdened
            )
            timed = TimedStep(
                decoded.slots,
                decoded.got,
                sums.tokens,
                seconds,
                drafting,
                passes,
                sums.context,
                asked,
            )
            self.engine.timed(timed, ended)
