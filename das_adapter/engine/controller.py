"""What decides on an engine's drafts, on both of vLLM's runners: the live requests, core's controller and its account
of the rollout's time, the history, and the decision log."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any, cast

import numpy as np

from das_adapter.config import DasConfig
from das_adapter.core.controller import Controller, Decoded, HistoryDrafts, Search, StepPlan, TimedStep
from das_adapter.core.model_drafts import ModelDrafts
from das_adapter.core.stock import StockGuard, UnaskedStep
from das_adapter.engine.history import HistorySource
from das_adapter.engine.requests import LiveRequest
from das_adapter.engine.timing import before_the_first_step, captured_tokens
from das_adapter.protocol import decision_log
from das_adapter.protocol.decision_log import DecisionLog
from das_adapter.protocol.messages import Refresh, Refreshed
from das_adapter.protocol.metrics import Counters, EngineStats, collapsed

logger = logging.getLogger("das_adapter")
_NO_TOKENS = np.zeros(0, dtype=np.int32)


class EngineController:
    """The controller of one engine. A runner's drafter opens and closes requests, and after each decode step asks
    whether anybody is to draft (`ask`), says what the step brought (`plan`, or `begin` and `decide`), and how long it
    took (`timed`). Nothing here knows a runner."""

    def __init__(
        self,
        config: DasConfig,
        vllm_config: Any,
        drafts: ModelDrafts | None = None,
        *,
        lengths: Sequence[int] | None = None,
        leads: bool = True,
        logs: bool = True,
    ) -> None:
        """
        Args:
            config: the block.
            vllm_config: of the engine.
            drafts: of the model that drafts, where there is one.
            lengths: draft lengths to choose from where all requests of a step share one (V2); None: each request has
                its own, and steps in which no drafter is asked are taken to see what they cost.
            leads: whether this rank decides, and drafts from the history.
            logs: whether it writes the decision log.
        """
        self.config = config
        self.counters = Counters()
        self.live: dict[str, LiveRequest] = {}
        vocabulary = vllm_config.model_config.get_vocab_size()
        self.history = HistorySource(config.looked_up, vocabulary) if config.looked_up and leads else None
        self.drafts = drafts
        self.log = DecisionLog(config.log_dir) if config.log_dir and logs else None
        self._sizes = captured_tokens(vllm_config)
        known = before_the_first_step(config.toggle, vllm_config)
        if known and drafts is not None:
            drafts.expect(known.passes)
        self.controller = Controller(
            config.budget,
            config.toggle,
            vllm_config.model_config.max_model_len,
            config.history.window,
            known and known.steps,
            drafts,
            config.num_draft_tokens,
            lengths,
            self._sizes,
        )
        self.guard = StockGuard.of(config.toggle, self._sizes)
        self._takes_baselines = lengths is None
        self._collapsed = False

    # Requests

    def open(
        self, request: LiveRequest, length: int, prompt: np.ndarray = _NO_TOKENS, text: np.ndarray = _NO_TOKENS
    ) -> None:
        """Take a request that joins the batch.

        Args:
            request: it gets a slot.
            length: of its text before the present step, prompt included.
            prompt, text: its prompt and all its text so far, int32 token ids, where the host looks up its drafts.
        """
        start = request.start
        request.slot = self.controller.open(request.problem, length - start, request.end - start)
        if self.history is not None:
            self.history.open(request, prompt, text)
        self.live[request.req_id] = request

    def close(self, req_ids: Iterable[str]) -> None:
        """Close those of these requests that are live; their texts become history."""
        for req_id in req_ids:
            if request := self.live.pop(req_id, None):
                self._close(request)

    def disown(self, req_ids: Collection[str]) -> None:
        """Keep the texts of requests out of the history: the present policy has not written them."""
        for req_id in self.live.keys() & req_ids:
            self.live[req_id].record = False

    @property
    def slots(self) -> np.ndarray:
        """Slots of the live requests, int64 [live]."""
        return np.array([request.slot for request in self.live.values()], dtype=np.int64)

    # A decode step

    @property
    def able(self) -> bool:
        """Whether anybody may draft before the next weight sync."""
        return self.counters.error is None and not self._collapsed

    @property
    def model_rests(self) -> bool:
        """Whether the model that drafts need not even follow the policy."""
        silent = self.drafts is not None and self.drafts.silent
        return bool(self.controller.stopped or silent or (self.guard is not None and self.guard.idle))

    def ask(self, requests: int, drafted: bool) -> bool:
        """Decide at the end of a decode step whether a drafter is asked at all.

        Args:
            requests: in the batch.
            drafted: whether the step has verified drafts.
        """
        if self.controller.stopped:
            return False
        if self.guard is None or not (self._takes_baselines or self.guard.idle):
            return True
        return self.guard.ask(requests, drafted)

    def skip(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Take the tokens that requests got in steps at whose end no drafter was asked, int64 [requests] each."""
        self.controller.missed(slots, tokens)

    def verified(self, decoded: Decoded) -> None:
        """Count the drafts that a step has verified, by their source and their place in the response."""
        carried, by_model = decoded.carried, decoded.by_model
        if carried is None:
            return
        accepted = np.minimum(decoded.got - 1, carried)
        if self.history is not None:
            looked_up = carried if by_model is None else np.where(by_model > 0, 0, carried)
            self.history.verified(decoded.slots, looked_up, np.minimum(accepted, looked_up))
        if self.log is not None:
            self.log.verified(self.controller.requests.written[decoded.slots], carried, accepted)

    def begin(self, decoded: Decoded) -> Search | None:
        """As `Controller.begin`."""
        return self.controller.begin(decoded)

    def decide(self, slots: np.ndarray, search: Search) -> StepPlan:
        """As `Controller.decide`, with what the history has found."""
        return self.controller.decide(slots, search, None if self.history is None else self.history.found())

    def plan(self, decoded: Decoded, offers: HistoryDrafts) -> StepPlan:
        """As `Controller.plan`."""
        return self.controller.plan(decoded, None if self.history is None else offers)

    def timed(self, step: TimedStep | UnaskedStep, asked: bool = True) -> None:
        """Take a decode step that has ended; `asked`: whether a drafter was asked at its end."""
        if isinstance(step, UnaskedStep):
            if self.guard is not None:
                self.guard.unasked(step)
            if self.log is not None:
                n = step.requests
                self.log.add(decision_log.Step(time.time() - step.seconds, n, n, 0, 0, step.seconds, None))
            return
        model, running = self.controller.times.model, len(step.slots)
        drafted, took = step.tokens - running, step.seconds + step.drafting_seconds
        predicted = None if model is None else model.step(step.tokens, running, drafted > 0, step.context)
        if self.guard is not None and asked:
            most = None if predicted is None else predicted + step.drafting_seconds
            self.guard.asked(step.slots, step.got, took, drafted > 0, most, step.context)
        elif self.guard is not None:
            self.guard.unasked(UnaskedStep(running, step.seconds, step.context))
        if self.log is not None:
            accepted, begin = int(step.got.sum()) - running, time.time() - took
            record = (running, step.tokens, drafted, accepted, step.seconds, predicted, step.passes)
            self.log.add(decision_log.Step(begin, *record))
        stopped = self.controller.stopped
        self.controller.timed(step)
        if self.controller.stopped and not stopped:
            logger.error("das: %s: no drafts until the next weight sync", self.controller.stopped)

    def drafted_beside_prompts(self, seconds: float) -> None:
        """Take what the model that drafts took in a step that is not timed, because it also read prompts."""
        if self.guard is not None:
            self.guard.beside(seconds)
            self.controller.beside(seconds)

    # Failures

    def fail(self, error: Exception) -> None:
        """Draft no more until the next weight sync, and say so."""
        self.counters.error = repr(error)
        drafter = self.config.drafter
        logger.error("das: the %s drafter failed; no drafts until the next weight sync", drafter, exc_info=error)

    def stop_if_collapsed(self) -> None:
        """Draft no more until the next weight sync if nearly all draft tokens are rejected: they only cost time."""
        counters = self.counters
        if collapsed(vars(counters)) and not self._collapsed:
            self._collapsed = True
            logger.error(
                "das: acceptance collapsed (%d of %d draft tokens); no drafts until the next weight sync",
                counters.accepted_tokens,
                counters.draft_tokens,
            )

    # Commands of the host

    def refresh(self, message: Refresh) -> Refreshed:
        """Bring the history up to date and start again, at a weight sync (DAS, section 4.1)."""
        self._collapsed, self.counters.error = False, None
        answer = Refreshed()
        if self.history is not None:
            answer["generation"] = self.history.refresh(message)
        self._judge(message)
        return answer

    def visit(self, files: Sequence[str]) -> Refreshed:
        """Take the history of problems that are at home on other nodes, see `HistorySource.visit`."""
        if self.history is None:
            return Refreshed()
        self.history.visit(files)
        return Refreshed(generation=self.history.index.generation, problems=self.history.index.problems)

    def stats(self) -> EngineStats:
        """Return the figures of the controller, the account and the history since the last call."""
        stats = self.controller.take(self.slots)
        stats |= self.guard.take() if self.guard is not None else {}
        stats |= self.history.stats() if self.history is not None else {}
        return cast(EngineStats, stats)

    def restart(self, controller: Controller) -> None:
        """Start again with another controller, as a measurement does for each of its arms."""
        self.close(list(self.live))
        self.controller, self._collapsed = controller, False
        self.guard = StockGuard.of(self.config.toggle, self._sizes)

    # Inside

    def _close(self, request: LiveRequest) -> None:
        if self.guard is not None:
            self.guard.close(request.slot)
        table = self.controller.requests
        if self.history is not None:
            forwards = float(table.steps[request.slot])
            self.history.close(request, forwards + float(table.accepted[request.slot]), forwards)
        if self.log is not None:
            counts = table.counts(request.slot)
            self.log.add(decision_log.Request(*counts[:2], request.began, time.time(), *counts[2:]))
        self.controller.close(request.slot)

    def _judge(self, message: Refresh) -> None:
        """Judge the rollout that a weight sync ends, and start the next."""
        share = None if self.guard is None else self.guard.of_stock()
        news = None if self.guard is None else self.guard.sync()
        if news:
            logger.error("das: %s: rollouts begin without drafts until a trial gains time", news)
        if self.log is not None:
            model, saved = self.controller.times.model, self.controller.time_saved(self.slots)
            fitted, stopped = None if model is None else model.to_dict(), self.controller.stopped
            self.log.sync(decision_log.WeightSync(message.version, time.time(), fitted, saved, stopped, share, news))
        rested = self.drafts is not None and self.drafts.silent
        self.controller.sync(message.responses)
        if self.drafts is not None and self.drafts.silent and not rested:
            logger.warning("das: the model that drafts rests for a while: %s", self.drafts.silent)
