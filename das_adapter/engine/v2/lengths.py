"""The draft length of the next steps, chosen on the host from what it hears of the steps before, one step late."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from das_adapter.config import DasConfig
from das_adapter.core.controller import Controller, Decoded, TimedStep
from das_adapter.core.model_drafts import ModelDrafts
from das_adapter.core.stock import StockGuard, UnaskedStep
from das_adapter.engine import controller as decisions
from das_adapter.engine.history import HistorySource
from das_adapter.engine.requests import LiveRequest
from das_adapter.engine.timing import before_the_first_step, graph_sizes
from das_adapter.engine.v2.neural import Proposal
from das_adapter.protocol.decision_log import DecisionLog
from das_adapter.protocol.engine_args import DraftTokens, draft_lengths
from das_adapter.protocol.messages import Refresh, Refreshed
from das_adapter.protocol.metrics import Counters, EngineStats, collapsed

logger = logging.getLogger("das_adapter")
_NO_TOKENS, _NOTHING = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32)


@dataclass(frozen=True)
class Begun:
    """A request that joined the batch, or came back to it."""

    req_id: str
    problem: int
    start: int
    """Length at which its response began."""
    end: int
    """Length at which it stops."""
    length: int
    """Its length, tokens."""
    record: bool
    """Whether its text may serve as history."""
    stops: frozenset[int] = frozenset()
    """Tokens that end it."""


@dataclass(slots=True)
class _Growing(LiveRequest):
    length: int = 0
    """Its length, tokens."""


@dataclass
class Step:
    """A step as the host started it, and what came of it."""

    begun: Sequence[Begun]
    ended: frozenset[str]
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
    """The controller of an engine on the V2 runner. Outputs come in one thread, messages of the host in another."""

    def __init__(self, config: DasConfig, vllm_config: Any, counters: Counters, always: int = 0) -> None:
        """`always`: passes of a neural drafter in every step, with drafts or without."""
        self._config = config
        self.history: HistorySource | None = None
        self.drafts: ModelDrafts | None = None
        known, sizes = before_the_first_step(config, vllm_config), graph_sizes(vllm_config)
        if config.uses_history:
            self.history = HistorySource(config.history, vllm_config.model_config.get_vocab_size())
        if config.neural:
            self.drafts = ModelDrafts(config.model_tokens, narrows=False, always=always)
            self.drafts.expect(known and known.passes)
        self.controller = Controller(
            config,
            vllm_config.model_config.max_model_len,
            known and known.steps,
            self.drafts,
            draft_lengths(config),
            sizes,
        )
        self.guard = StockGuard.of(config, sizes)
        self.log = DecisionLog(config.log_dir) if config.log_dir else None
        self._counters = counters
        self._lock = threading.Lock()
        self._live: dict[str, _Growing] = {}
        self._stops: dict[str, frozenset[int]] = {}
        """Tokens that end a live request; without an entry it has ended, and vLLM has not said so yet."""
        self._offered: dict[str, np.ndarray] = {}
        """What was last drafted for each request: the chances of its tokens, float32."""
        self._by_model: set[str] = set()
        """Requests whose last draft is a model's, where others have theirs from the history."""
        self._pending: Step | None = None
        """A step whose offer had not arrived with its output."""
        self._passes = 0
        """Of a neural drafter, since `stats` was called last."""
        self._last: float | None = None
        """When the last output came, seconds; None: after a pause."""
        self._paused = False
        self._first = DraftTokens(0)
        """What was chosen first for the present batch: the next one begins with it, before it is known what there is to
        draft."""
        self._over = True
        """Whether nobody decoded after the last step."""

    def output(self, step: Step, sampled: Sequence[Sequence[int]], now: float) -> int:
        """Take the output of a step.

        Args:
            step: which.
            sampled: tokens that each of its requests got, in batch order; none while its prompt is read.
            now: seconds of a monotonic clock.

        Returns:
            How many tokens each request of the next step that is not scheduled yet is to draft.
        """
        with self._lock:
            try:
                self._begin_and_end(step)
                if self._counters.error is None:
                    return self._output(step, sampled, now)
                _, slots, got = self._follow(step, sampled)
                self.controller.missed(slots, got)
            except Exception as error:
                if self._counters.error is None:
                    self.fail(error)
            return 0

    def fail(self, error: Exception) -> None:
        """Draft no more until the next weight sync, and say so."""
        self._counters.error = repr(error)
        logger.error(
            "das: the %s drafter failed; no drafts until the next weight sync", self._config.drafter, exc_info=error
        )

    def refresh(self, message: Refresh) -> Refreshed:
        """Bring the history up to date and start again, at a weight sync."""
        with self._lock:
            self._close(frozenset(self._live.keys() - self._stops.keys()), unrecorded=False)
            self._paused, self._last = False, None
            if self._counters.error is not None:  # what was drafted before it is not known any more
                self._pending, self._offered, self._by_model = None, {}, set()
            self._counters.error = None
            answer = Refreshed()
            if self.history is not None:
                answer["generation"] = self.history.refresh(message)
            decisions.sync(self.controller, self.guard, self.log, message, self._slots())
            return answer

    def visit(self, files: Sequence[str]) -> Refreshed:
        """Take the history of problems that are at home on other nodes, see `HistorySource.visit`."""
        with self._lock:
            if self.history is None:
                return Refreshed()
            self.history.visit(files)
            return Refreshed(generation=self.history.index.generation, problems=self.history.index.problems)

    def stats(self) -> EngineStats:
        """Return the figures of the history and of the controller since the last call."""
        with self._lock:
            stats = self.controller.take(self._slots()) | (self.guard.take() if self.guard else {})
            if self.history is not None:
                stats |= self.history.stats()
            if self.drafts is not None:
                stats["drafter_passes"], self._passes = self._passes, 0
            return cast(EngineStats, stats)

    def _begin_and_end(self, step: Step) -> None:
        self._close(step.ended, step.unrecorded)
        for begun in step.begun:
            self._open(begun)

    def _follow(self, step: Step, sampled: Sequence[Sequence[int]]) -> tuple[list[_Growing], np.ndarray, np.ndarray]:
        """Return the requests that a step has written for, their slots, and the tokens that each got, int64
        [requests]."""
        rows = [row for row, tokens in enumerate(sampled) if tokens and step.req_ids[row] in self._stops]
        live = [self._live[step.req_ids[row]] for row in rows]
        got = [self._written(request, sampled[row]) for request, row in zip(live, rows, strict=True)]
        for request, new in zip(live, got, strict=True):
            request.length += new
        slots = np.array([request.slot for request in live], dtype=np.int64)
        return live, slots, np.array(got, dtype=np.int64)

    def _output(self, step: Step, sampled: Sequence[Sequence[int]], now: float) -> int:
        if self._pending is not None:
            self._hear(self._pending)
        live, slots, got = self._follow(step, sampled)
        carried = np.array([self._carried(step, request.req_id) for request in live], dtype=np.int64)
        by_model = carried * [self._modelled(request.req_id) for request in live]
        self._count(step, live, slots, got, carried, carried - by_model, now)
        passes, drafting = self._take(step.proposals)
        context = np.array([request.length for request in live], dtype=np.int64)
        if step.decodes and self._last is not None and len(live):
            seconds = max(0.0, now - self._last - drafting)
            tokens = sum(step.scheduled[request.req_id] for request in live)  # others ended in the step before
            asked = step.offer is not None or passes > 0 or tokens > len(live)
            timed = TimedStep(slots, got, tokens, seconds, drafting, passes, int(context.sum()))
            decisions.timed(self.controller, self.guard if asked else None, self.log, timed)
            if self.guard and not asked:
                self.guard.unasked(UnaskedStep(len(live), seconds, int(context.sum())))
        self._last = now
        self._pending = step
        if step.offer is None or step.offer.arrived:
            self._hear(step)
        room = np.array([request.end - 1 - request.length for request in live], dtype=np.int64)
        offers = None if self.history is None else functools.partial(self._offers, live)
        carriers = carried if carried.any() else None
        plan = self.controller.plan(Decoded(slots, got, carriers, by_model, room, context=context), offers)
        if collapsed(vars(self._counters)) and not self._paused:
            self._paused = True
            logger.error(
                "das: acceptance collapsed (%d of %d draft tokens); no drafts until the next weight sync",
                self._counters.accepted_tokens,
                self._counters.draft_tokens,
            )
        silent = self.guard is not None and self.guard.idle and not self.guard.ask(len(live), bool(carried.any()))
        wanted = 0 if self._paused or silent else int(max(plan.history.max(initial=0), plan.model.max(initial=0)))
        chosen = DraftTokens(wanted, bool(plan.model.any()))
        if self._over and live:
            self._first = chosen
        self._over = not live or not self._stops
        return chosen if not self._over else DraftTokens(0) if self._paused or silent else self._first

    def _take(self, proposals: Sequence[Proposal]) -> tuple[int, float]:
        """Learn from a neural drafter's calls; return their passes and seconds."""
        for call in proposals:
            if self.drafts is not None and call.usual:
                self.drafts.timed_pass(call.requests, call.seconds / call.passes)
        passes = sum(call.passes for call in proposals)
        self._passes += passes
        return passes, sum(call.seconds for call in proposals)

    def _written(self, request: _Growing, tokens: Sequence[int]) -> int:
        """Return how many of the tokens that a request got are its text: what lies behind its end is not."""
        count = max(1, min(len(tokens), request.end - request.length))
        stops = self._stops[request.req_id]
        ended = next((i + 1 for i, token in enumerate(tokens[:count]) if token in stops), None)
        if ended is not None or request.length + count >= request.end:
            del self._stops[request.req_id]
        return ended or count

    def _open(self, begun: Begun) -> None:
        self._stops[begun.req_id] = begun.stops
        known = self._live.get(begun.req_id)
        if known is not None:  # it was preempted
            known.length = begun.length
            return
        slot = self.controller.open(begun.problem, begun.length - begun.start, begun.end - begun.start)
        live = _Growing(begun.req_id, slot, begun.problem, begun.start, begun.end, begun.record, length=begun.length)
        if self.history is not None:
            self.history.open(live, _NO_TOKENS, _NO_TOKENS)
        self._live[begun.req_id] = live

    def _close(self, req_ids: frozenset[str], unrecorded: bool) -> None:
        for req_id in sorted(req_ids):
            self._offered.pop(req_id, None)
            self._by_model.discard(req_id)
            self._stops.pop(req_id, None)
            if live := self._live.pop(req_id, None):
                live.record = live.record and not unrecorded
                decisions.close(self.controller, self.guard, self.log, self.history, live)

    def _hear(self, step: Step) -> None:
        """Take what was drafted at the end of a step."""
        self._pending = None
        if step.offer is not None:
            counts, chances = step.offer.read()
            self._by_model = self._by_model - set(step.req_ids) | step.offer.modelled(step.req_ids)
            for req_id, count, row in zip(step.req_ids, counts.tolist(), chances, strict=True):
                self._offered[req_id] = row[:count]

    def _carried(self, step: Step, req_id: str) -> int:
        """Return the draft tokens that a request carried into a step, without fillers."""
        there = self._config.model_tokens if self._modelled(req_id) else len(self._offered.get(req_id, _NOTHING))
        return min(step.drafts.get(req_id, 0), there)

    def _modelled(self, req_id: str) -> bool:
        """Whether the last draft of a request is a model's."""
        return self.history is None or req_id in self._by_model

    def _offers(self, live: list[_Growing], limits: np.ndarray, floor: float) -> tuple[np.ndarray, np.ndarray]:
        """Return what is drafted for some requests, see `core.controller.HistoryDrafts`."""
        chances = [
            self._offered.get(request.req_id, _NOTHING)[:most]
            for request, most in zip(live, limits.tolist(), strict=True)
        ]
        kept = [c[: int((c >= floor).sum())] for c in chances]
        return np.concatenate([*kept, _NOTHING]), np.cumsum([0, *map(len, kept)], dtype=np.int64)

    def _count(
        self,
        step: Step,
        live: list[_Growing],
        slots: np.ndarray,
        got: np.ndarray,
        carried: np.ndarray,
        looked_up: np.ndarray,
        now: float,
    ) -> None:
        accepted = np.minimum(got - 1, carried)
        training = [request.record for request in live]
        if any(training):
            self._counters.step((got * training).tolist(), carried.tolist(), now - max(step.began, self._last or 0.0))
        if carried.any():
            if self.history is not None:
                self.history.verified(slots, looked_up, np.minimum(accepted, looked_up))
            if self.log is not None:
                self.log.verified(self.controller.requests.written[slots], carried, accepted)

    def _slots(self) -> np.ndarray:
        return np.array([request.slot for request in self._live.values()], dtype=np.int64)
