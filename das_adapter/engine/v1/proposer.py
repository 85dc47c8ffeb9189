"""The drafter of an engine on the V1 runner, which vLLM runs as a proposer
(`speculative_config.method: custom_class`): drafts from the history, with a model, or
with the better of the two, as the policy of drafts chooses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from vllm.config import VllmConfig

from das_adapter.core.model_drafts import ModelDrafts
from das_adapter.core.requests import EMPTY_INTS, advance_lengths, with_slots
from das_adapter.core.steps import Outcome, Rest, Search
from das_adapter.engine.controller import EngineController
from das_adapter.engine.requests import LiveRequest
from das_adapter.engine.settings import settings
from das_adapter.engine.timing import StepTimer
from das_adapter.engine.v1.copy_drafts import CopySource
from das_adapter.engine.v1.model_source import ModelSource
from das_adapter.engine.v1.neural_drafts import NeuralSource
from das_adapter.protocol.messages import Refresh, Refreshed
from das_adapter.protocol.metrics import EngineStats


class Proposer:
    """Drafts for the batch between two steps; it can fail, or draft nothing useful,
    without harming the rollout.

    `runner` (vLLM's model runner) is bound by the worker's state before the first step.
    With tensor parallelism the first rank decides and draws on the history; the others
    run their part of the model, for the requests that the first names. The class has no
    attribute `model`, by which vLLM and the hosts would take it for a drafter with
    weights.
    """

    def __init__(self, vllm_config: VllmConfig):
        config = settings(vllm_config)
        parallel = vllm_config.parallel_config
        assert config is not None and vllm_config.speculative_config is not None
        self.config = config
        self.runner: Any = None
        self.ranks = parallel.tensor_parallel_size
        self.leads = parallel.rank % self.ranks == 0
        """Whether vLLM takes this rank's drafts: the first of the tensor-parallel
        ranks, which sample alike.
        """
        self.carried: list[int] | None = None
        """Draft tokens that each request of the batch carried into the step being
        sampled; None: nobody had any.
        """
        self.drops = False
        """Whether that step verifies no drafts, see `expands`: the next one, of the
        same requests, would not either.
        """
        self.model_source: ModelSource | None = None
        if config.copies_policy:
            self.model_source = CopySource(self, ModelDrafts(config.model_tokens))
        elif config.neural:
            self.model_source = NeuralSource(
                self, ModelDrafts(config.model_tokens, narrows=False)
            )
        drafts = self.model_source.drafts if self.model_source else None
        self.engine = EngineController(config, vllm_config, drafts, leads=self.leads)
        self.timer = StepTimer()
        self.model_tokens = EMPTY_INTS
        """Tokens that the model shall draft for each request of the batch, int64
        [batch].
        """
        self._max_model_len = vllm_config.model_config.max_model_len
        scheduler = vllm_config.scheduler_config
        self._step_tokens = (
            getattr(scheduler, "max_num_scheduled_tokens", None)
            or scheduler.max_num_batched_tokens
        )
        self._ends, self._lengths, self._by_model = np.zeros((3, 1), dtype=np.int64)
        """By slot: `LiveRequest.end`; the request's length when it was last drafted
        for, tokens; tokens of its last draft, if that was to be the model's.
        """
        self._synced = False
        """Whether a weight sync has come since requests were closed last."""
        self._unchosen: Callable[[], None] | None = None
        """Has the policy choose among the drafts that are still looked for."""
        self._later: list[Callable[[], None]] = []
        """Work of steps that are over, see `catch_up`."""
        self._batch: tuple[list[str], int, np.ndarray, np.ndarray] | None = None
        """Requests of the last batch, and how many the runner had; its rows and their
        slots, int64 [batch]. None: some were opened or closed since.
        """

    def load_model(self, policy: Any) -> None:
        """Take the policy, once vLLM has loaded it."""
        if self.model_source:
            self.model_source.load(policy)

    # A decode step

    def begin_step(self, scheduled: Any, now: float) -> None:
        """Note that the engine starts a forward pass (vLLM's `SchedulerOutput`): the
        one before, if it only decoded, took until now, seconds of a monotonic clock.
        """
        self.settle()
        if not self.engine.failed:
            self.later(partial(self.time_step, scheduled, now))

    def time_step(self, scheduled: Any, now: float) -> None:
        """As `begin_step`, while the forward pass runs."""
        step = self.timer.begin_step(scheduled, now) if self.leads else None
        if step is not None:
            self.engine.timed(step, time.time() - time.perf_counter() + now)
        self.engine.stop_if_collapsed()

    def later(self, work: Callable[[], None]) -> None:
        """Do some work once a forward pass runs: it may only count and learn."""
        self._later.append(work)

    def catch_up(self) -> None:
        """Do what was put off; while a GPU runs the forward pass that has begun, nobody
        waits for it.
        """
        later = self._later
        self._later = []
        for work in later:
            with self.engine.surviving():
                work()

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Draft for every request of the batch: at most `num_speculative_tokens` tokens
        each, once `settle` has been called; none at all where the drafter has failed
        since the last weight sync.

        Args:
            sampled_token_ids: tokens each request got in this step; empty while its
                prompt is read.
            num_tokens_no_spec, token_ids_cpu: int [max_batch], int32 [max_batch,
                max_model_len], all of its tokens.
        """
        self.settle()
        self.catch_up()
        begin = time.perf_counter()
        if self.model_source:
            self.model_tokens = np.zeros(len(sampled_token_ids), dtype=np.int64)
            self.model_source.drawn_with = {}
        drafts: list[list[int]] | None = None
        if not self.engine.failed:
            try:
                drafts = self.begin_drafts(
                    sampled_token_ids, num_tokens_no_spec, token_ids_cpu
                )
            except Exception as error:
                self.engine.fail(error)
        if drafts is None:
            self._batch = None
            drafts = [[] for _ in sampled_token_ids]
        try:
            return self._with_model(drafts, num_tokens_no_spec, token_ids_cpu)
        finally:
            self.engine.counters.propose_seconds.append(time.perf_counter() - begin)

    def begin_drafts(
        self,
        sampled: list[list[int]],
        lengths: np.ndarray,
        tokens: np.ndarray,
    ) -> list[list[int]]:
        """As `propose`, but only begin to look for drafts: `settle` puts them into the
        lists that are returned.
        """
        drafts: list[list[int]] = [[] for _ in sampled]
        if not self.leads:
            return drafts
        policy = self.engine.policy
        outcome, rows = self._outcome(sampled, lengths, tokens)
        search = policy.next(outcome)
        asked = search.asked if isinstance(search, Rest) else True
        self.later(policy.flush)
        if not self.drops:
            self.later(partial(self._note_tokens, outcome, asked))
        if isinstance(search, Rest) or self.drops:
            return drafts
        slots = outcome.slots
        if self.engine.history:
            assert outcome.context is not None
            self.engine.history.begin_search(
                slots, rows, outcome.context, tokens, search
            )
        choose = partial(self._choose, rows, slots, search, drafts)
        if self.model_source:
            choose()
        else:
            self._unchosen = choose
        return drafts

    def settle(self) -> None:
        """Put the drafts that are still looked for into what `propose` has returned:
        vLLM takes it now.
        """
        if self._unchosen is None:
            return
        begin = time.perf_counter()
        choose = self._unchosen
        self._unchosen = None
        try:
            choose()
        except Exception as error:
            self.engine.fail(error)
        if seconds := self.engine.counters.propose_seconds:
            seconds[-1] += time.perf_counter() - begin

    # Commands of the host

    def rehearsed(self) -> None:
        """End the rehearsal, and forget its request."""
        self.settle()
        self.catch_up()
        self._batch = None
        self.timer = StepTimer()
        self.engine.rehearsed()

    def refresh(self, message: Refresh) -> Refreshed:
        """Bring the history and the model up to date, at a weight sync."""
        self.settle()
        self.catch_up()
        self.timer = StepTimer()  # the next step begins after a pause
        self._close_gone()
        if self.engine.failed:  # they are opened again: who knows their state
            self._close(list(self.engine.live))
        self._synced = True
        return self.engine.refresh(message)

    def map_guest_history(self, files: Sequence[str]) -> None:
        self.settle()
        if self.engine.history:
            self.engine.history.map_guest_history(files)

    def stats(self) -> EngineStats:
        """As `EngineController.stats`."""
        self.settle()
        self.catch_up()
        return self.engine.stats()

    # Inside

    def _with_model(
        self,
        drafts: list[list[int]],
        lengths: np.ndarray,
        tokens: np.ndarray,
    ) -> list[list[int]]:
        source = self.model_source
        policy = self.engine.policy
        if not source or not (
            self.ranks > 1 or source.follows or self.model_tokens.any()
        ):
            return drafts
        # it need not even follow the policy
        rests = policy.model_rests
        begin = time.perf_counter()
        made = source.drafts.passes_made
        try:
            source.draft(self.model_tokens, lengths, tokens, drafts, not rests)
        except Exception as error:
            self.engine.fail(error)
            return [[] for _ in drafts]
        seconds = time.perf_counter() - begin
        if (
            not self.timer.record_drafting(seconds, source.drafts.passes_made - made)
            and not rests
        ):
            policy.timed_drafting(seconds)
        return drafts

    def _note_tokens(self, outcome: Outcome, asked: bool) -> None:
        """Tell the timer what the step brought, and whether a drafter was asked."""
        assert outcome.context is not None
        context = int(outcome.context.sum())
        self.timer.record_sampled(outcome.slots, outcome.got, context, asked)

    def _choose(
        self,
        rows: np.ndarray,
        slots: np.ndarray,
        search: Search,
        drafts: list[list[int]],
    ) -> None:
        """Put what the policy chooses into the batch's `drafts`."""
        history = self.engine.history
        candidates = None if history is None else history.found_drafts()
        plan = self.engine.policy.choose(search, candidates)
        if self.model_source:
            self._by_model[slots] = 0
        if isinstance(plan, Rest):
            return
        if history:
            history.put_drafts(rows, plan.history, drafts)
        if self.model_source:
            self._by_model[slots] = plan.model
            self.model_tokens[rows] = plan.model

    def _outcome(
        self,
        sampled: list[list[int]],
        lengths: np.ndarray,
        tokens: np.ndarray,
    ) -> tuple[Outcome, np.ndarray]:
        """Return what the step brought to the requests that decode, and their rows of
        the batch, int64 [requests].
        """
        req_ids = self.runner.input_batch.req_ids
        everyone = len(self.runner.requests)
        carried = self.carried
        self.carried = None
        followed = None
        if self._batch is not None and self._batch[:2] == (req_ids, everyone):
            _, _, rows, slots = self._batch
            now = lengths[: len(rows)].astype(np.int64)
            followed = advance_lengths(slots, sampled, now, self._lengths, self._ends)
        if followed is not None:
            got, room = followed
        else:
            got = np.array([len(new) for new in sampled], dtype=np.int64)
            rows, slots, got, now = self._opened(req_ids, got, lengths, tokens)
            room = self._ends[slots] - 1 - now
            self._batch = (
                (list(req_ids), everyone, rows, slots)
                if len(rows) == len(req_ids)
                else None
            )
        drafts = None if carried is None else np.array(carried, dtype=np.int64)
        if followed is None and drafts is not None:
            drafts = drafts[rows]
        by_model = (
            np.minimum(drafts, self._by_model[slots])
            if self.model_source and drafts is not None
            else None
        )
        # The next step writes the draft and one token more: neither may pass the
        # request's end, or take what the other requests and prompts need of a step, to
        # which vLLM comes later. More prompts come where the batch has changed.
        kept = self._step_tokens // (2 if followed is None else 16)
        if (
            fits := (self._step_tokens - kept) // max(everyone, 1) - 1
        ) < self.config.num_draft_tokens:
            room = np.minimum(room, max(0, fits))
        return Outcome(slots, got, drafts, by_model, room, context=now), rows

    def _opened(
        self,
        req_ids: list[str],
        got: np.ndarray,
        lengths: np.ndarray,
        tokens: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Close the requests that are gone and open those that began; return of those
        that decode the rows, the slots, the tokens that they got and their lengths,
        int64 [requests] each.
        """
        self._close_gone()
        live = map(self.engine.live.get, req_ids)
        everyone = np.array(
            [-1 if request is None else request.slot for request in live],
            dtype=np.int64,
        )
        rows = np.flatnonzero(got)
        got = got[rows]
        slots = everyone[rows]
        now = lengths[rows].astype(np.int64)
        for i in np.flatnonzero((slots < 0) | (self._lengths[slots] > now)).tolist():
            row = int(rows[i])
            slots[i] = self._open(req_ids[row], tokens[row, : now[i]], int(got[i]))
        self._lengths[slots] = now
        return rows, slots, got, now

    def _open(
        self,
        req_id: str,
        text: np.ndarray,
        got: int,
    ) -> int:
        """Open a request, given its text so far, int32 token ids, and how many of them
        are new; return its slot.
        """
        self._close([req_id])
        request = self.runner.requests[req_id]
        before = len(text) - got
        live = LiveRequest.of(req_id, request, self._max_model_len)
        self.engine.open(
            live,
            before,
            np.asarray(request.prompt_token_ids or (), dtype=np.int32),
            text,
        )
        slot = live.slot
        columns = self._ends, self._lengths, self._by_model
        self._ends, self._lengths, self._by_model = (
            with_slots(column, slot + 1) for column in columns
        )
        self._ends[slot] = live.end
        self._lengths[slot] = before
        self._by_model[slot] = 0
        return slot

    def _close(self, req_ids: list[str]) -> None:
        self._batch = None
        self.engine.close(req_ids)

    def _close_gone(self) -> None:
        gone = [
            req_id for req_id in self.engine.live if req_id not in self.runner.requests
        ]
        # they ended before the weight sync: nobody drafts from them now
        for req_id in gone if self._synced else ():
            self.engine.live[req_id].record = False
        self._synced = False
        self._close(gone)
