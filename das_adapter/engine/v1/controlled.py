"""The drafter of an engine: one controller, and one or two sources of draft tokens."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from vllm.config import VllmConfig

from das_adapter.core.controller import Controller, Decoded, Search
from das_adapter.core.model_drafts import ModelDrafts
from das_adapter.core.requests import NOBODY, with_room
from das_adapter.core.stock import StockGuard
from das_adapter.engine import controller as decisions
from das_adapter.engine.front_end import media
from das_adapter.engine.history import HistorySource
from das_adapter.engine.requests import LiveRequest
from das_adapter.engine.timing import StepTimer, before_the_first_step, graph_sizes
from das_adapter.engine.v1.base import Drafter
from das_adapter.engine.v1.model_source import ModelSource, OutOfStep
from das_adapter.engine.v1.neural_drafts import NeuralSource
from das_adapter.engine.v1.policy_copy import CopySource
from das_adapter.protocol.decision_log import DecisionLog
from das_adapter.protocol.messages import Refresh, Refreshed
from das_adapter.protocol.metrics import EngineStats


class _Undecided(NamedTuple):
    """Drafts that are still looked for."""

    rows: np.ndarray
    slots: np.ndarray
    """Of the requests, like the rows, int64 [requests]."""
    search: Search
    drafts: list[list[int]]
    """What vLLM has been given, a list for each row of the batch."""


class ControlledDrafter(Drafter):
    """Drafts from the history, with a model (the policy copy, a neural drafter), or with the better of the two, as the
    controller decides.

    With tensor parallelism the first rank decides and draws on the history; the others run their part of the model, for
    the requests that the first names.
    """

    def __init__(self, vllm_config: VllmConfig):
        super().__init__(vllm_config)
        config = self.config
        looked_up = config.looked_up if self.leads else None
        self.history = HistorySource(looked_up, self._vocabulary) if looked_up else None
        self.model_source: ModelSource | None = None
        if config.copies_policy:
            self.model_source = CopySource(self, vllm_config, ModelDrafts(config.model_tokens))
        elif config.neural:
            self.model_source = NeuralSource(self, ModelDrafts(config.model_tokens, narrows=False))
        self._sizes = graph_sizes(vllm_config)
        known = before_the_first_step(config, vllm_config)
        if known and self.model_source:
            self.model_source.drafts.expect(known.passes)
        self.controller = Controller(
            config,
            self._max_model_len,
            known and known.steps,
            self.model_source.drafts if self.model_source else None,
            sizes=self._sizes,
        )
        first = vllm_config.parallel_config.rank == 0
        if config.log_dir and first:
            self.log = DecisionLog(config.log_dir)
        self.timer = StepTimer()
        self.guard = StockGuard.of(config, self._sizes)
        self._live: dict[str, LiveRequest] = {}
        self._ends, self._lengths = np.zeros((2, 1), dtype=np.int64)
        """By slot: `LiveRequest.end`; the request's length when it was last drafted for, tokens."""
        self._batch: tuple[list[str], np.ndarray] = [], NOBODY
        """The requests of the last batch, and their slots."""
        self._undecided: _Undecided | None
        self._counts = np.zeros(0, dtype=np.int64)
        """Tokens that the model shall draft for each request of the batch."""
        self._synced = False
        """Whether a weight sync lies between the last step and the next."""

    def load_model(self, policy: Any) -> None:
        if self.model_source:
            self.model_source.load(policy)

    def refresh(self, message: Refresh) -> Refreshed:
        """Bring the history and the model up to date, at a weight sync (DAS, section 4.1)."""
        self.settle()
        failed = self.counters.error is not None
        answer = super().refresh(message)
        self._synced = True
        if failed:
            self._batch = [], NOBODY
            self.close(list(self._live))  # whatever state they are in; they are opened again
        self.close([req_id for req_id in self._live if req_id not in self.runner.requests])
        if self.history:
            if message.history is not None and not message.history.directory:
                self.close(list(self._live))  # they are opened again, with what they have written
            answer["generation"] = self.history.refresh(message)
        if self.model_source:
            seconds = self.model_source.refresh(message.draft_length)
            if self.config.copies_policy:
                answer["requantise_s"] = seconds
        decisions.sync(self.controller, self.guard, self.log, message, self._slots())
        return answer

    def visit(self, files: Sequence[str]) -> Refreshed:
        """Take the history of problems that are at home on other nodes, see `HistorySource.visit`."""
        if self.history is None:
            return Refreshed()
        self.settle()
        self.history.visit(files)
        return Refreshed(generation=self.history.index.generation, problems=self.history.index.problems)

    def stats(self) -> EngineStats:
        """Return the figures of the sources and of the controller since the last call."""
        self.settle()
        parts = [source.stats() for source in (self.history, self.model_source) if source]
        parts += [self.guard.take()] if self.guard else []
        return cast(EngineStats, functools.reduce(dict.__or__, parts, self.controller.take(self._slots())))

    def restart(self, controller: Controller) -> None:
        """Start again with another controller, as a measurement does for each of its arms."""
        self.settle()
        self.close(list(self._live))
        self.controller, self.timer, self._paused = controller, StepTimer(), False
        self.guard = StockGuard.of(self.config, self._sizes)

    def close(self, req_ids: Iterable[str]) -> None:
        """Close requests."""
        for req_id in req_ids:
            if live := self._live.pop(req_id, None):
                self._batch = [], NOBODY
                decisions.close(self.controller, self.guard, self.log, self.history, live)

    def _begin_step(self, scheduled: Any, now: float) -> None:
        if not self.leads:
            return
        if self._synced:  # what ended before the weight sync was not written by the present policy
            self._synced = False
            for req_id in scheduled.finished_req_ids & self._live.keys():
                self._live[req_id].record = False
        step = self.timer.begin(scheduled, now)
        if step is not None:
            decisions.timed(self.controller, self.guard, self.log, step)

    def _drafts(self, sampled: list[list[int]], lengths: np.ndarray, tokens: np.ndarray) -> list[list[int]]:
        self._counts = np.zeros(len(sampled), dtype=np.int64)
        drafts = super()._drafts(sampled, lengths, tokens)
        source = self.model_source
        if source and (self.ranks > 1 or source.follows or self._counts.any()):
            begin, passes = time.perf_counter(), source.passes
            try:
                idle = self.controller.stopped or source.drafts.silent or (self.guard is not None and self.guard.idle)
                source.draft(self._counts, lengths, tokens, drafts, self.able and not idle)
            except OutOfStep:
                raise
            except Exception as error:
                self._fail(error)
                return [[] for _ in sampled]
            took = time.perf_counter() - begin
            if not self.timer.drafted(took, source.passes - passes) and self.guard and not idle:
                self.guard.beside(took)
                self.controller.beside(took)
        return drafts

    def _propose(self, sampled: list[list[int]], lengths: np.ndarray, tokens: np.ndarray) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in sampled]
        if not self.leads:
            return drafts
        if self.controller.stopped or (self.guard and not self.guard.ask(len(sampled), self.carried is not None)):
            self.carried = None
            self.timer.unasked(len(sampled), int(lengths[: len(sampled)].sum()))
            return drafts
        rows, slots, got = self._decoding(sampled, lengths, tokens)
        search = self.controller.begin(self._decoded(rows, slots, got))
        if search is None:
            return drafts
        if self.history:
            self.history.look(slots, rows, self._lengths[slots], tokens, search)
        self._undecided = _Undecided(rows, slots, search, drafts)
        if self.model_source:
            self._settle()
        return drafts

    def _settle(self) -> None:
        step, self._undecided = self._undecided, None
        assert step is not None
        plan = self.controller.decide(step.slots, step.search, self.history.found() if self.history else None)
        if self.history:
            self.history.take(step.rows, plan.history, step.drafts)
        if self.model_source:
            self._counts[step.rows] = plan.model

    def _decoding(
        self, sampled: list[list[int]], lengths: np.ndarray, tokens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Close the requests that are gone, open new ones, and return those of the batch that decode: their rows, their
        slots, and the tokens that each got, int64 [requests] each."""
        everyone = self._slots_of_batch()
        got = np.fromiter(map(len, sampled), dtype=np.int64, count=len(sampled))
        rows = np.flatnonzero(got)
        got, slots, now = got[rows], everyone[rows], lengths[rows].astype(np.int64)
        for i in np.flatnonzero((slots < 0) | (self._lengths[slots] > now)).tolist():
            row = int(rows[i])
            req_id = self.runner.input_batch.req_ids[row]
            slots[i] = everyone[row] = self._open(req_id, tokens[row, : now[i]], int(got[i]))
        missed = now - got - self._lengths[slots]
        if missed.any():  # nobody was asked in some steps
            self.controller.missed(slots, missed)
        self._lengths[slots] = now
        return rows, slots, got

    def _slots_of_batch(self) -> np.ndarray:
        """Return the slot of each request of the batch, int64 [batch]; -1: it has none."""
        req_ids = self.runner.input_batch.req_ids
        if req_ids != self._batch[0]:
            self.close([req_id for req_id in self._live if req_id not in self.runner.requests])
            known = (self._live.get(req_id) for req_id in req_ids)
            slots = np.array([-1 if live is None else live.slot for live in known], dtype=np.int64)
            self._batch = list(req_ids), slots
        return self._batch[1]

    def _open(self, req_id: str, text: np.ndarray, got: int) -> int:
        """Open a request, given its text so far, int32 token ids, and how many of them are new; return its slot."""
        self.close([req_id])
        request = self.runner.requests[req_id]
        prompt, label = np.asarray(request.prompt_token_ids, dtype=np.int32), self.label(req_id)
        problem, start = label.problem_of(prompt, media(request)), label.start_in(len(prompt))
        end, before = self.end(request), len(text) - got
        slot = self.controller.open(problem, before - start, end - start)
        live = LiveRequest(req_id, slot, problem, start, end, label.record)
        if self.history:
            self.history.open(live, prompt, text)
        self._live[req_id] = live
        self._ends, self._lengths = (with_room(column, slot + 1) for column in (self._ends, self._lengths))
        self._ends[slot], self._lengths[slot] = end, before
        return slot

    def _decoded(self, rows: np.ndarray, slots: np.ndarray, got: np.ndarray) -> Decoded:
        """Describe what the step brought to the requests that decode."""
        carried = None if self.carried is None else np.asarray(self.carried, dtype=np.int64)[rows]
        self.carried = None
        if carried is not None and not carried.any():
            carried = None
        by_model = None
        if self.model_source:
            req_ids = self.runner.input_batch.req_ids
            by_model = self.model_source.verified([req_ids[row] for row in rows.tolist()], got)
        if carried is not None:
            theirs = carried if by_model is None else np.where(by_model > 0, 0, carried)
            if self.history:
                self.history.verified(slots, theirs, np.where(theirs > 0, got - 1, 0))
            if self.log is not None:
                self.log.verified(self.controller.requests.written[slots], carried, np.where(carried > 0, got - 1, 0))
        context = self._lengths[slots]
        self.timer.sampled(slots, got, int(context.sum()))
        # The next step writes the draft and one token more: neither may pass the request's end.
        room = self._ends[slots] - 1 - context
        return Decoded(slots, got, carried, by_model, room, context=context)

    def _slots(self) -> np.ndarray:
        return np.array([request.slot for request in self._live.values()], dtype=np.int64)
