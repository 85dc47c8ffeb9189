"""The draft length of the next steps, chosen on the host from what it hears of the steps before, one step late. What is
learned from a step waits until the host waits for the device."""

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
from das_adapter.engine.v2.live import LiveTexts
from das_adapter.engine.v2.neural import Call
from das_adapter.engine.v2.speculator import Offer
from das_adapter.protocol.engine_args import DraftTokens, draft_lengths
from das_adapter.protocol.messages import Refresh, Refreshed
from das_adapter.protocol.metrics import EngineStats

LATE = 3
"""Steps after which one hears of what is looked up where it is chosen now: one is scheduled already, in the next it is
looked up, and it comes with the output of the one after that."""


MOST_ASIDE = 28
"""Steps whose outputs are put aside together, at most."""


@dataclass
class Step:
    """A step as the host started it, and what came of it."""

    begun: Sequence[LiveRequest]
    """Requests that joined the batch, or came back to it."""
    ended: Set[str]
    """Requests that had ended before it."""
    scheduled: dict[str, int]
    """Tokens that each request has in the forward pass."""
    drafts: dict[str, int]
    """Draft tokens of these that are scheduled, fillers included."""
    decodes: bool
    """Whether it reads no prompt."""
    began: float
    """Seconds of a monotonic clock."""
    offer: Offer | None = None
    """Of its end; None: nothing was looked for."""
    calls: Sequence[Call] = ()
    """Of a model that drafts, those that ended between the output of the step before and its own."""
    req_ids: list[str] = field(default_factory=list)
    """Its requests in batch order."""
    admitted: Ints | None = None
    """Draft tokens of each that the device has verified, int64 [requests]; None: all that are scheduled."""
    unburdened: bool = False
    """Whether the host did nothing for das-adapter in it: the output of the step before was put aside."""

    @property
    def quiet(self) -> bool:
        """Whether nobody joins or leaves, and nothing is drafted, verified or looked for."""
        changes = self.begun or self.ended or self.offer or self.calls
        drafted = any(self.drafts.values() if self.admitted is None else self.admitted)
        return self.decodes and not changes and not drafted

    def counts(self) -> tuple[Ints, Ints]:
        """Return the tokens that each request has in the forward pass, and the draft tokens of these, int64 [requests]
        in batch order."""
        tokens = np.fromiter(map(self.scheduled.__getitem__, self.req_ids), np.int64, len(self.req_ids))
        if not self.drafts:
            return tokens, np.zeros_like(tokens)
        drafts = np.fromiter(map(self.drafts.get, self.req_ids, repeat(0)), np.int64, len(self.req_ids))
        return (tokens, drafts) if self.admitted is None else (tokens - drafts + self.admitted, self.admitted)


_Aside = tuple[Step, Sequence[list[int]], float]
"""A step, the tokens that each of its requests got, and when its output came, seconds."""


class _Taken(NamedTuple):
    """A step whose output was taken, and that is still to be learned from."""

    step: Step
    decoded: Decoded
    tokens: int
    """Of the requests that go on, in the forward pass."""
    now: float
    """When its output came, seconds."""
    ended: float
    """The same since the epoch."""
    asked: bool
    """Whether a drafter was asked at its end."""


class DraftLengths:
    """Chooses draft lengths. Outputs come in one thread, messages of the host in another."""

    def __init__(self, config: DasConfig, vllm_config: Any, always: int = 0) -> None:
        """`always`: passes of a neural drafter in every step, with drafts or without."""
        drafts, lengths = None, draft_lengths(config)
        if config.by_model:
            drafts = ModelDrafts(
                config.model_tokens, False, always, follows=config.neural, parallel=config.parallel, lengths=lengths
            )
        self.engine = EngineController(config, vllm_config, drafts, lengths=lengths)
        self._live, self._model_tokens = LiveTexts(config.num_draft_tokens, self.engine.live), config.model_tokens
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
        """Outputs until one hears of the last look that was asked for while nothing was drafted."""
        self._step_tokens: int = vllm_config.scheduler_config.max_num_batched_tokens

    def output(self, step: Step, sampled: Sequence[list[int]], now: float) -> int:
        """Take the output of a step that came `now`: the tokens that each of its requests got, in batch order, none
        while its prompt is read. Return how many tokens each request of the next unscheduled step is to draft.

        While it is known that nobody is asked for drafts, outputs are put aside, some steps long: what those steps
        take without das-adapter's own work is what stock takes, with which the account compares.
        """
        with self._lock:
            step.unburdened = bool(self._aside)
            self._aside.append((step, sampled, now))
            return DraftTokens(0, looks=False) if self._silent(step) else self._catch_up()

    def settle(self) -> None:
        """Learn from the last step that was taken."""
        with self._lock:
            self._settle()

    def catch_up(self) -> None:
        """Take the outputs that were put aside."""
        with self._lock:
            self._catch_up()

    def _silent(self, step: Step) -> bool:
        before, account = self._before, self.engine.controller.account
        if before is None or before.offer is not None or not step.quiet or len(self._aside) >= MOST_ASIDE:
            return False
        return not account.asks_in(len(self._aside) + LATE, len(before.req_ids))

    def _catch_up(self) -> DraftTokens:
        answer, aside, self._aside = DraftTokens(0, looks=False), self._aside, []
        for part in (aside[:1], aside[1:-1], aside[1:][-1:]):  # in the first one the host has worked for das-adapter
            if len(part) < 2 or not self._take_together(part, aside[-1][2]):
                for step, sampled, now in part:
                    answer = self._take(step, sampled, now, aside[-1][2] - now)
        return answer

    def _take_together(self, aside: Sequence[_Aside], last: float) -> bool:
        """Take steps, of which the `last` came when, in which each request got a token and nothing else happened; and
        learn from them. Return whether they were such steps: else none is taken."""
        self._settle()
        req_ids, steps = aside[0][0].req_ids, len(aside)
        same = all(step.req_ids == req_ids for step, *_ in aside)
        slots = self._live.take_singles(req_ids, [sampled for _, sampled, _ in aside]) if same else None
        if slots is None:
            return False
        self._before, self._unheard = aside[-1][0], max(0, self._unheard - steps)
        with self.engine.surviving():
            account, requests = self.engine.controller.account, self.engine.controller.requests
            account.now += steps
            context = int(np.add.reduce(self._live.length[slots])) - steps * len(slots)
            one, busy, since = np.ones_like(slots), 0.0, time.time() - last
            for step, _, now in aside:
                context += len(slots)
                busy += now - max(step.began, self._last or 0.0)
                if self._last is not None and now > self._last:
                    seconds = now - self._last
                    self.engine.timed(
                        TimedStep(slots, one, len(slots), seconds, context=context, asked=False), since + now
                    )
                self._last = now
            self._count(slots, steps * one, None, busy, steps)
            requests.skip(slots, steps * one)
        return True

    def _take(self, step: Step, sampled: Sequence[list[int]], now: float, since: float) -> DraftTokens:
        self._settle()
        before, self._before = self._before, step
        with self.engine.surviving():
            self._begin_and_end(step)
            if before is not None and before.offer is not None:
                offer = before.offer
                told = offer.lengths.numpy(), offer.chances.numpy(), offer.by_model.numpy()
                self._live.hear(before.req_ids, *told)
            places, decoded, tokens = self._decoded(step, sampled)
            account = self.engine.controller.account
            asked = account.ask(len(decoded.slots), decoded.carried is not None)
            self._taken = _Taken(step, decoded, tokens, now, time.time() - since, asked)
            if asked:
                return self._choose(step, places, decoded)
            return DraftTokens(0, looks=self._looks(len(decoded.slots)))
        return DraftTokens(0, looks=False)

    def _looks(self, requests: int) -> bool:
        """Return whether the next unscheduled step looks up what there is, while nothing is drafted: once for each time
        that a drafter will be asked."""
        self._unheard = max(0, self._unheard - 1)
        looks = not self._unheard and self.engine.controller.account.asks_in(LATE, requests)
        self._unheard = LATE if looks else self._unheard
        return looks

    def _settle(self) -> None:
        taken, self._taken = self._taken, None
        if taken is None:
            return
        step, decoded, _, now, *_ = taken
        with self.engine.surviving():
            self._count(decoded.slots, decoded.got, decoded.carried, now - max(step.began, self._last or 0.0))
            self._time(taken)
            self._last = now
            self.engine.stop_if_collapsed()
            controller = self.engine.controller
            if taken.asked:
                controller.learn(decoded)
            else:
                controller.requests.skip(decoded.slots, decoded.got)

    def refresh(self, message: Refresh) -> Refreshed:
        with self._lock:
            self._catch_up()
            self._settle()
            self._close(
                sorted(req_id for req_id, request in self.engine.live.items() if self._live.ended[request.slot])
            )
            self._last = None
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
                known.length, known.text = request.length, request.text
            else:
                self.engine.open(request, request.length)
            self._live.open(self.engine.live[request.req_id])

    def _close(self, req_ids: Sequence[str]) -> None:
        self._live.close(req_ids)
        self.engine.close(req_ids)

    def _decoded(self, step: Step, sampled: Sequence[list[int]]) -> tuple[Ints, Decoded, int]:
        """Return the places in the batch of the requests that go on, what a step brought to them, and their tokens in
        its forward pass."""
        places, slots, got = self._live.take(step.req_ids, sampled)
        tokens, given = step.counts()
        most, by_model = self._live.offered[slots], None
        if self.engine.drafts is not None:
            by_model = self._live.by_model[slots] if self.engine.history else np.full(len(slots), self._model_tokens)
            most = np.where(by_model > 0, by_model, most)
        carried = np.minimum(given[places], most)  # some are fillers, of which `most` has none
        carriers, context = carried if carried.any() else None, self._live.length[slots]
        by_model = None if by_model is None else carried * (by_model > 0)
        room = self._live.end[slots] - 1 - context  # the step after writes one token more
        decoded = Decoded(slots, got, carriers, by_model, room, context=context)
        return places, decoded, int(np.add.reduce(tokens[places]))

    def _choose(self, step: Step, places: Ints, decoded: Decoded) -> DraftTokens:
        controller, slots, found = self.engine.controller, decoded.slots, None
        most = np.zeros(len(slots), dtype=np.int64)
        drafts, history, own = self.engine.drafts, self.engine.history, controller.common is None
        search = controller.search(decoded)
        if search is not None:
            most, found = search.limits, None if history is None else self._live.found(slots, *search)
        plan = controller.decide(slots, search, found)
        wanted, total = int(max(plan.history.max(initial=0), plan.model.max(initial=0))), plan.total
        by_model = 0 if drafts is None else drafts.drafted(int(plan.model.max(initial=0)))
        if own:  # the device gives them to whom its newest drafts promise most
            total = int(most.sum()) if controller.always else total
            longest = by_model if history is None else int(most.max(initial=0))
            wanted = min(longest, max(1, self._step_tokens // len(most) - 1)) if total else 0
        looks = wanted > 0 or self._looks(len(most))
        chosen = DraftTokens(wanted, by_model, looks, 1.0 if drafts is None else drafts.acceptance.rate)
        if own and total:
            worth = controller.worth(slots)
            shares = zip(most.tolist(), (worth / worth.max()).tolist(), strict=True)
            req_ids = map(step.req_ids.__getitem__, places.tolist())
            chosen.total, chosen.shares = total, dict(zip(req_ids, shares, strict=True))
        return chosen

    def _time(self, taken: _Taken) -> None:
        """Take how long a step took, and the calls of a model that drafts beside it."""
        step, decoded, tokens, now, ended, _ = taken
        drafts = self.engine.drafts
        passes, drafting = sum(call.passes for call in step.calls), sum(call.seconds for call in step.calls)
        if drafts is not None:
            drafts.made += passes
            for call in (call for call in step.calls if call.usual):
                drafts.timed_pass(call.requests, call.seconds / call.passes)
        running, seconds = len(decoded.slots), 0.0 if self._last is None else now - self._last - drafting
        if step.decodes and seconds > 0 and running and decoded.context is not None:
            asked = step.offer is not None or passes > 0 or tokens > running or not step.unburdened
            context = int(np.add.reduce(decoded.context))
            timed = TimedStep(decoded.slots, decoded.got, tokens, seconds, drafting, passes, context, asked)
            self.engine.timed(timed, ended)

    def _count(self, slots: Ints, got: Ints, carried: Ints | None, seconds: float, steps: int = 1) -> None:
        training = self.engine.controller.requests.record[slots]
        if training.any():
            carried = np.zeros_like(got) if carried is None else carried
            self.engine.counters.step(got * training, carried, seconds, steps)
