"""The drafter of an engine on the V1 runner, which vLLM runs as a proposer (`speculative_config.method:
custom_class`): drafts from the history, with a model, or with the better of the two, as the controller decides."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from vllm.config import VllmConfig

from das_adapter.config import parse
from das_adapter.core.controller import Controller
from das_adapter.core.model_drafts import ModelDrafts
from das_adapter.core.requests import NOBODY, with_room
from das_adapter.core.steps import Decoded, Search
from das_adapter.engine.controller import EngineController
from das_adapter.engine.requests import LiveRequest
from das_adapter.engine.timing import StepTimer
from das_adapter.engine.v1.model_source import ModelSource, OutOfStep
from das_adapter.engine.v1.neural_drafts import NeuralSource
from das_adapter.engine.v1.policy_copy import CopySource
from das_adapter.protocol.engine_args import SETTINGS_KEY
from das_adapter.protocol.label import Label
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


class Proposer:
    """Drafts for the batch between two steps; it can fail, or draft nothing useful, without harming the rollout.

    `runner` (vLLM's model runner), `seed` (the noise seed of a request id) and `label` (of a request id) are bound by
    the worker's state before the first step. With tensor parallelism the first rank decides and draws on the history;
    the others run their part of the model, for the requests that the first names. The class has no attribute `model`,
    by which vLLM and the hosts would take it for a drafter with weights.
    """

    def __init__(self, vllm_config: VllmConfig):
        config, parallel = parse(vllm_config.additional_config[SETTINGS_KEY]), vllm_config.parallel_config
        assert config is not None and vllm_config.speculative_config is not None
        self.config = config
        self.runner: Any = None
        self.seed: Callable[[str], int] = hash
        self.label: Callable[[str], Label] = lambda _: Label()
        self.ranks = parallel.tensor_parallel_size
        self.leads = parallel.rank % self.ranks == 0
        """Whether vLLM takes this rank's drafts: the first of the tensor-parallel ranks, which sample alike."""
        self.carried: list[int] | None = None
        """Draft tokens that each request of the batch carried into the step being sampled; None: nobody had any."""
        self.model_source: ModelSource | None = None
        if config.copies_policy:
            self.model_source = CopySource(self, vllm_config, ModelDrafts(config.model_tokens))
        elif config.neural:
            self.model_source = NeuralSource(self, ModelDrafts(config.model_tokens, narrows=False))
        drafts = self.model_source.drafts if self.model_source else None
        self.engine = EngineController(config, vllm_config, drafts, leads=self.leads, logs=parallel.rank == 0)
        self.timer = StepTimer()
        self.model_tokens = NOBODY
        """Tokens that the model shall draft for each request of the batch, int64 [batch]."""
        self._max_model_len = vllm_config.model_config.max_model_len
        self._ends, self._lengths = np.zeros((2, 1), dtype=np.int64)
        """By slot: `LiveRequest.end`; the request's length when it was last drafted for, tokens."""
        self._batch: tuple[list[str], np.ndarray] = [], NOBODY
        """The requests of the last batch, and their slots."""
        self._undecided: _Undecided | None = None
        self._synced = False
        """Whether a weight sync lies between the last step and the next."""

    def load_model(self, policy: Any) -> None:
        """Take the policy, once vLLM has loaded it."""
        if self.model_source:
            self.model_source.load(policy)

    # A decode step

    def begin_step(self, scheduled: Any, now: float) -> None:
        """Note that the engine starts a forward pass (vLLM's `SchedulerOutput`): the one before, if it only decoded,
        took until now, seconds of a monotonic clock."""
        self.settle()
        if self.engine.counters.error is None:
            try:
                self.time_step(scheduled, now)
            except Exception as error:
                self.engine.fail(error)

    def time_step(self, scheduled: Any, now: float) -> None:
        """As `begin_step`; may raise."""
        if not self.leads:
            return
        if self._synced:
            self._synced = False
            self.engine.disown(scheduled.finished_req_ids)
        step = self.timer.begin(scheduled, now)
        if step is not None:
            self.engine.timed(step)

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Draft for every request of the batch: at most `num_speculative_tokens` tokens each, once `settle` has been
        called; none at all where the drafter has failed since the last weight sync.

        Args:
            sampled_token_ids: tokens each request got in this step; empty while its prompt is read.
            num_tokens_no_spec: int [max_batch], tokens known of each request.
            token_ids_cpu: int32 [max_batch, max_model_len], the tokens.
            slot_mappings: not used.
        """
        self.settle()
        begin = time.perf_counter()
        self.model_tokens = np.zeros(len(sampled_token_ids), dtype=np.int64)
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if self.engine.able:
            try:
                drafts = self.begin_drafts(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
                self.engine.stop_if_collapsed()
            except Exception as error:
                self.engine.fail(error)
        try:
            return self._with_model(drafts, num_tokens_no_spec, token_ids_cpu)
        finally:
            self.engine.counters.propose_seconds.append(time.perf_counter() - begin)

    def begin_drafts(self, sampled: list[list[int]], lengths: np.ndarray, tokens: np.ndarray) -> list[list[int]]:
        """Take what a step brought, and begin to look for drafts; return the lists into which `settle` puts them. The
        arguments are those of `propose`; may raise."""
        drafts: list[list[int]] = [[] for _ in sampled]
        if not self.leads:
            return drafts
        if not self.engine.ask(len(sampled), self.carried is not None):
            self.carried = None
            self.timer.unasked(len(sampled), int(lengths[: len(sampled)].sum()))
            return drafts
        decoded, rows = self._decoded(sampled, lengths, tokens)
        search = self.engine.begin(decoded)
        if search is None:
            return drafts
        slots = decoded.slots
        if self.engine.history:
            self.engine.history.look(slots, rows, self._lengths[slots], tokens, search)
        self._undecided = _Undecided(rows, slots, search, drafts)
        if self.model_source:
            self._decide()
        return drafts

    def settle(self) -> None:
        """Put the drafts that are still looked for into what `propose` has returned: vLLM takes it now."""
        if self._undecided is None:
            return
        begin = time.perf_counter()
        try:
            self._decide()
        except Exception as error:
            self.engine.fail(error)
        if seconds := self.engine.counters.propose_seconds:
            seconds[-1] += time.perf_counter() - begin

    # Commands of the host

    def refresh(self, message: Refresh) -> Refreshed:
        """Bring the history and the model up to date, at a weight sync."""
        self.settle()
        self._synced = True
        withdrawn = message.history is not None and not message.history.directory
        if self.engine.counters.error is not None:  # whatever state they are in, they are opened again
            self._close(list(self.engine.live))
            self._batch = [], NOBODY
        self._close_gone()
        if self.engine.history and withdrawn:  # they are opened again in another index, with what they have written
            self._close(list(self.engine.live))
        answer = self.engine.refresh(message)
        if self.model_source:
            seconds = self.model_source.refresh(message.draft_length)
            if self.config.copies_policy:
                answer["requantise_s"] = seconds
        return answer

    def visit(self, files: Sequence[str]) -> Refreshed:
        """As `EngineController.visit`."""
        self.settle()
        return self.engine.visit(files)

    def stats(self) -> EngineStats:
        """As `EngineController.stats`, with the figures of the model."""
        self.settle()
        model = self.model_source.stats() if self.model_source else {}
        return cast(EngineStats, {**self.engine.stats(), **model})

    def restart(self, controller: Controller) -> None:
        """Start again with another controller, as a measurement does for each of its arms."""
        self.settle()
        self._close(list(self.engine.live))
        self.engine.controller, self.timer = controller, StepTimer()

    # Inside

    def _with_model(self, drafts: list[list[int]], lengths: np.ndarray, tokens: np.ndarray) -> list[list[int]]:
        """Have the model draft for the requests for which it shall; return all drafts."""
        source = self.model_source
        if not source or not (self.ranks > 1 or source.follows or self.model_tokens.any()):
            return drafts
        begin, passes, rests = time.perf_counter(), source.passes, self.engine.model_rests
        try:
            source.draft(self.model_tokens, lengths, tokens, drafts, self.engine.able and not rests)
        except OutOfStep:
            raise
        except Exception as error:
            self.engine.fail(error)
            return [[] for _ in drafts]
        seconds = time.perf_counter() - begin
        if not self.timer.drafted(seconds, source.passes - passes) and not rests:
            self.engine.controller.drafted_beside_prompts(seconds)
        return drafts

    def _decide(self) -> None:
        step, self._undecided = self._undecided, None
        assert step is not None
        plan = self.engine.decide(step.slots, step.search)
        if self.engine.history:
            self.engine.history.take(step.rows, plan.history, step.drafts)
        if self.model_source:
            self.model_tokens[step.rows] = plan.model

    def _decoded(self, sampled: list[list[int]], lengths: np.ndarray, tokens: np.ndarray) -> tuple[Decoded, np.ndarray]:
        """Close the requests that are gone and open new ones; return what the step brought to those that decode, and
        their rows of the batch, int64 [requests]."""
        everyone = self._slots_of_batch()
        got = np.fromiter(map(len, sampled), dtype=np.int64, count=len(sampled))
        rows = np.flatnonzero(got)
        got, slots, now = got[rows], everyone[rows], lengths[rows].astype(np.int64)
        for i in np.flatnonzero((slots < 0) | (self._lengths[slots] > now)).tolist():
            row = int(rows[i])
            req_id = self.runner.input_batch.req_ids[row]
            slots[i] = everyone[row] = self._open(req_id, tokens[row, : now[i]], int(got[i]))
        skipped = now - got - self._lengths[slots]
        if skipped.any():
            self.engine.controller.skipped(slots, skipped)
        self._lengths[slots] = now
        carried = None if self.carried is None else np.asarray(self.carried, dtype=np.int64)[rows]
        self.carried = None
        if carried is not None and not carried.any():
            carried = None
        by_model = None
        if self.model_source:
            req_ids = self.runner.input_batch.req_ids
            by_model = self.model_source.verified([req_ids[row] for row in rows.tolist()], got)
        self.timer.sampled(slots, got, int(now.sum()))
        # The next step writes the draft and one token more: neither may pass the request's end.
        decoded = Decoded(slots, got, carried, by_model, self._ends[slots] - 1 - now, context=now)
        self.engine.verified(decoded)
        return decoded, rows

    def _slots_of_batch(self) -> np.ndarray:
        """Return the slot of each request of the batch, int64 [batch]; -1: it has none."""
        req_ids = self.runner.input_batch.req_ids
        if req_ids != self._batch[0]:
            self._close_gone()
            known = (self.engine.live.get(req_id) for req_id in req_ids)
            slots = np.array([-1 if live is None else live.slot for live in known], dtype=np.int64)
            self._batch = list(req_ids), slots
        return self._batch[1]

    def _open(self, req_id: str, text: np.ndarray, got: int) -> int:
        """Open a request, given its text so far, int32 token ids, and how many of them are new; return its slot."""
        self._close([req_id])
        request, before = self.runner.requests[req_id], len(text) - got
        live = LiveRequest.of(req_id, request, self.label(req_id), self._max_model_len)
        self.engine.open(live, before, np.asarray(request.prompt_token_ids, dtype=np.int32), text)
        slot = live.slot
        self._ends, self._lengths = (with_room(column, slot + 1) for column in (self._ends, self._lengths))
        self._ends[slot], self._lengths[slot] = live.end, before
        return slot

    def _close_gone(self) -> None:
        self._close([req_id for req_id in self.engine.live if req_id not in self.runner.requests])

    def _close(self, req_ids: list[str]) -> None:
        if self.engine.live.keys() & req_ids:
            self._batch = [], NOBODY
            self.engine.close(req_ids)
