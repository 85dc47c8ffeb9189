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
from das_adapter.engine.v2.neural import Proposal
from das_adapter.protocol.engine_args import DraftTokens, draft_lengths
from das_adapter.protocol.messages import Refresh, Refreshed
from das_adapter.protocol.metrics import EngineStats

_NOTHING = np.zeros(0, dtype=np.float32)


@dataclass
class Step:
    """A step as the host started it, and what came of it."""

    begun: Sequence[LiveRequest]
    """Requests that joined the batch, or came back to it."""
    ended: Set[str]
    """Requests that had ended before it."""
    unrecorded: bool
    """Whether these ended before the last weight sync."""
    scheduled: dict[str, int]
    """Tokens that each request has in the forward pass."""
    drafts: dict[str, int]
    """Draft tokens of these, fillers included."""
    decodes: bool
    """Whether it reads no prompt."""
    began: float
    """Seconds of a monotonic clock."""
    offer: Any = None
    """`speculator.Offer` of its end, None if nothing was looked for."""
    proposals: Sequence[Proposal] = ()
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
        self._pending: Step | None = None
        """A step whose offer had not arrived with its output."""
        self._passes = 0
        """Of a neural drafter, since `stats` was called last."""
        self._last: float | None = None
        """When the last output came, seconds; None: after a pause."""
        self._first = DraftTokens(0)
        """What was chosen first for the present batch: the next one begins with it, before it is known what there is to
        draft."""
        self._over = True
        """Whether nobody decoded after the last step."""

    def output(self, step: Step, sampled: Sequence[list[int]], now: float) -> int:
        """Take the output of a step; return how many tokens each request of the next unscheduled step is to draft.

        Args:
            sampled: tokens that each of its requests got, in batch order; none while its prompt is read.
            now: seconds of a monotonic clock.
        """
        with self._lock:
            failed = self.engine.counters.error is not None
            try:
                self._begin_and_end(step)
                if not failed and self._pending is not None:
                    self._hear(self._pending)
                live, decoded = self._decoded(step, sampled)
                if not failed:
                    return self._output(step, live, decoded, now)
                self.engine.controller.skipped(decoded.slots, decoded.got)
            except Exception as error:
                if not failed:
                    self.engine.fail(error)
            return 0

    def refresh(self, message: Refresh) -> Refreshed:
        """As `EngineController.refresh`."""
        with self._lock:
            live = self.engine.live
            self.engine.close(sorted(req_id for req_id, request in live.items() if request.ended))
            self._last = None
            if self.engine.counters.error is not None:  # what was drafted before it is not known any more
                self._pending = None
                for request in live.values():
                    request.chances, request.by_model = _NOTHING, False
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
        if step.unrecorded:
            self.engine.disown(step.ended)
        self.engine.close(sorted(step.ended))
        for request in step.begun:
            if known := self.engine.live.get(request.req_id):  # it was preempted
                known.length, known.ended = request.length, False
            else:
                self.engine.open(request, request.length)

    def _decoded(self, step: Step, sampled: Sequence[list[int]]) -> tuple[list[LiveRequest], Decoded]:
        """Return the requests that a step has written for, and what it brought to them."""
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

    def _output(self, step: Step, live: list[LiveRequest], decoded: Decoded, now: float) -> int:
        self._count(step, live, decoded, now)
        self._time(step, live, decoded, now)
        self._last, self._pending = now, step
        if step.offer is None or step.offer.arrived:
            self._hear(step)
        self.engine.stop_if_collapsed()
        asked = self.engine.able and self.engine.ask(len(live), decoded.carried is not None)
        chosen = self._choose(live, decoded) if asked else DraftTokens(0)
        if not asked:
            self.engine.controller.skipped(decoded.slots, decoded.got)
        if self._over and live:
            self._first = chosen
        self._over = not live or all(request.ended for request in self.engine.live.values())
        return chosen if not (self._over and asked) else self._first

    def _choose(self, live: list[LiveRequest], decoded: Decoded) -> DraftTokens:
        """Choose the length that the controller wants for all."""

        def offers(limits: np.ndarray, floor: float) -> tuple[np.ndarray, np.ndarray]:
            found = [request.chances[:most] for request, most in zip(live, limits.tolist(), strict=True)]
            kept = [chances[: int((chances >= floor).sum())] for chances in found]
            return np.concatenate([*kept, _NOTHING]), np.cumsum([0, *map(len, kept)], dtype=np.int64)

        plan = self.engine.plan(decoded, offers)
        wanted = max(plan.history.max(initial=0), plan.model.max(initial=0))
        return DraftTokens(int(wanted), bool(plan.model.any()))

    def _time(self, step: Step, live: list[LiveRequest], decoded: Decoded, now: float) -> None:
        """Take how long a step took, and what a neural drafter's calls took beside it."""
        drafts = self.engine.drafts
        for call in step.proposals:
            if drafts is not None and call.usual:
                drafts.timed_pass(call.requests, call.seconds / call.passes)
        passes, drafting = sum(call.passes for call in step.proposals), sum(call.seconds for call in step.proposals)
        self._passes += passes
        if step.decodes and self._last is not None and live:
            seconds = max(0.0, now - self._last - drafting)
            tokens = sum(step.scheduled[request.req_id] for request in live)  # others ended in the step before
            asked = step.offer is not None or passes > 0 or tokens > len(live)
            context = sum(request.length for request in live)
            timed = TimedStep(decoded.slots, decoded.got, tokens, seconds, drafting, passes, context, asked)
            self.engine.timed(timed)

    def _hear(self, step: Step) -> None:
        """Take what was drafted at the end of a step."""
        self._pending = None
        if step.offer is not None:
            counts, chances = step.offer.read()
            by_model = step.offer.modelled(step.req_ids)
            for req_id, count, row in zip(step.req_ids, counts.tolist(), chances, strict=True):
                if request := self.engine.live.get(req_id):
                    request.chances, request.by_model = row[:count], req_id in by_model

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
