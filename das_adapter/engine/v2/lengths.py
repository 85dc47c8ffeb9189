"""The draft length of the next steps, chosen on the host from what it hears of the steps before, one step late."""

from __future__ import annotations

import threading
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from das_adapter.config import DasConfig
from das_adapter.core.model_drafts import ModelDrafts
from das_adapter.core.steps import Decoded, TimedStep
from das_adapter.engine.controller import EngineController
from das_adapter.engine.requests import LiveRequest
from das_adapter.engine.v2.neural import Call
from das_adapter.engine.v2.speculator import Offer
from das_adapter.protocol.engine_args import DraftTokens, draft_lengths
from das_adapter.protocol.messages import Refresh, Refreshed
from das_adapter.protocol.metrics import EngineStats

LATE = 3
"""Steps after which one hears of what is looked up where it is chosen now: one is scheduled already, in the next it is
looked up, and it comes with the output of the one after that."""
_NOTHING = np.zeros(0, dtype=np.float32)


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
    """Draft tokens of these, fillers included."""
    decodes: bool
    """Whether it reads no prompt."""
    began: float
    """Seconds of a monotonic clock."""
    offer: Offer | None = None
    """Of its end; None: nothing was looked for."""
    calls: Sequence[Call] = ()
    """Of a neural drafter, those that ended between the output of the step before and its own."""
    req_ids: list[str] = field(default_factory=list)
    """Its requests in batch order."""


class DraftLengths:
    """Chooses draft lengths. Outputs come in one thread, messages of the host in another."""

    def __init__(self, config: DasConfig, vllm_config: Any, always: int = 0) -> None:
        """`always`: passes of a neural drafter in every step, with drafts or without."""
        drafts = ModelDrafts(config.model_tokens, narrows=False, always=always) if config.neural else None
        self.engine = EngineController(config, vllm_config, drafts, lengths=draft_lengths(config))
        self._lock = threading.Lock()
        self._before: Step | None = None
        """The last step, whose offer arrives with the next one's output."""
        self._passes = 0
        """Of a neural drafter, since `stats` was called last."""
        self._last: float | None = None
        """When the last output came, seconds; None: after a pause."""

    def output(self, step: Step, sampled: Sequence[list[int]], now: float) -> int:
        """Take the output of a step; return how many tokens each request of the next unscheduled step is to draft.

        Args:
            sampled: tokens that each of its requests got, in batch order; none while its prompt is read.
            now: seconds of a monotonic clock.
        """
        with self._lock:
            before, self._before = self._before, step
            try:
                self._begin_and_end(step)
                if before is not None and before.offer is not None:
                    self._hear(before.req_ids, before.offer)
                live, decoded = self._decoded(step, sampled)
                self._count(step, live, decoded, now)
                self._time(step, live, decoded, now)
                self._last = now
                self.engine.stop_if_collapsed()
                if self.engine.ask(len(live), decoded.carried is not None):
                    return self._choose(live, decoded)
                self.engine.controller.skipped(decoded.slots, decoded.got)
                return DraftTokens(0, looks=self.engine.controller.account.asks_in(LATE, len(live)))
            except Exception as error:
                self.engine.fail(error)
            return DraftTokens(0, looks=False)

    def refresh(self, message: Refresh) -> Refreshed:
        """As `EngineController.refresh`."""
        with self._lock:
            self.engine.close(sorted(req_id for req_id, request in self.engine.live.items() if request.ended))
            self._last = None
            return self.engine.refresh(message)

    def visit(self, files: Sequence[str]) -> Refreshed:
        """As `EngineController.visit`."""
        with self._lock:
            return self.engine.visit(files)

    def stats(self) -> EngineStats:
        """As `EngineController.stats`, with the passes of a neural drafter."""
        with self._lock:
            stats = self.engine.stats()
            if self.engine.drafts is not None:
                stats["drafter_passes"], self._passes = self._passes, 0
            return stats

    def _begin_and_end(self, step: Step) -> None:
        self.engine.close(sorted(step.ended))
        for request in step.begun:
            if known := self.engine.live.get(request.req_id):  # it was preempted
                known.length, known.text, known.ended = request.length, request.text, False
            else:
                self.engine.open(request, request.length)

    def _decoded(self, step: Step, sampled: Sequence[list[int]]) -> tuple[list[LiveRequest], Decoded]:
        live, got = list[LiveRequest](), list[int]()
        for req_id, tokens in zip(step.req_ids, sampled, strict=True):
            request = self.engine.live.get(req_id)
            if tokens and request is not None and not request.ended:
                live.append(request)
                got.append(request.take(tokens))
        carried = np.array([self._carried(step, request) for request in live], dtype=np.int64)
        by_model = carried * [self._modelled(request) for request in live]
        columns = [(request.slot, request.length, request.end) for request in live]
        slots, context, ends = np.array(columns, dtype=np.int64).reshape(-1, 3).T.copy()
        new, carriers = np.array(got, dtype=np.int64), carried if carried.any() else None
        return live, Decoded(slots, new, carriers, by_model, ends - 1 - context, context=context)

    def _choose(self, live: list[LiveRequest], decoded: Decoded) -> DraftTokens:

        def offers(limits: np.ndarray, floor: float) -> tuple[np.ndarray, np.ndarray]:
            found = [request.chances[:most] for request, most in zip(live, limits.tolist(), strict=True)]
            kept = [chances[: int((chances >= floor).sum())] for chances in found]
            return np.concatenate([*kept, _NOTHING]), np.cumsum([0, *map(len, kept)], dtype=np.int64)

        plan = self.engine.plan(decoded, offers)
        wanted = int(max(plan.history.max(initial=0), plan.model.max(initial=0)))
        looks = wanted > 0 or self.engine.controller.account.asks_in(LATE, len(live))
        return DraftTokens(wanted, bool(plan.model.any()), looks)

    def _time(self, step: Step, live: list[LiveRequest], decoded: Decoded, now: float) -> None:
        """Take how long a step took, and what a neural drafter's calls took beside it."""
        drafts = self.engine.drafts
        for call in step.calls:
            if drafts is not None and call.usual:
                drafts.timed_pass(call.requests, call.seconds / call.passes)
        passes, drafting = sum(call.passes for call in step.calls), sum(call.seconds for call in step.calls)
        self._passes += passes
        if step.decodes and self._last is not None and live:
            seconds = max(0.0, now - self._last - drafting)
            tokens = sum(step.scheduled[request.req_id] for request in live)  # others ended in the step before
            asked = step.offer is not None or passes > 0 or tokens > len(live)
            context = sum(request.length for request in live)
            timed = TimedStep(decoded.slots, decoded.got, tokens, seconds, drafting, passes, context, asked)
            self.engine.timed(timed)

    def _hear(self, req_ids: list[str], offer: Offer) -> None:
        counts, by_model = offer.lengths.tolist(), offer.by_model.tolist()
        chances = np.cumprod(offer.chances.numpy(), axis=1)
        for req_id, count, row, mine in zip(req_ids, counts, chances, by_model, strict=True):
            if request := self.engine.live.get(req_id):
                request.chances, request.by_model = row[:count], mine

    def _carried(self, step: Step, request: LiveRequest) -> int:
        """Return the draft tokens that a request carried into a step, without fillers."""
        there = self.engine.config.model_tokens if self._modelled(request) else len(request.chances)
        return min(step.drafts.get(request.req_id, 0), there)

    def _modelled(self, request: LiveRequest) -> bool:
        """Whether the last draft of a request is a model's."""
        return self.engine.history is None or request.by_model

    def _count(self, step: Step, live: list[LiveRequest], decoded: Decoded, now: float) -> None:
        training = [request.record for request in live]
        if any(training):
            carried = decoded.carried if decoded.carried is not None else np.zeros_like(decoded.got)
            seconds = now - max(step.began, self._last or 0.0)
            self.engine.counters.step((decoded.got * training).tolist(), carried.tolist(), seconds)
        self.engine.verified(decoded)
