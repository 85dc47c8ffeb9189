"""The drafter of an engine on the V1 runner, which vLLM runs as a proposer
(`speculative_config.method: custom_class`): drafts from the history, with a model, or
with the better of the two, as the policy of drafts chooses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from vllm.config import VllmConfig

from das_adapter.core.model_drafts import ModelDrafts
from das_adapter.core.requests import EMPTY_INTS, advance_lengths, with_slots
from das_adapter.core.steps import Ints, Outcome, Rest, Search
from das_adapter.engine.controller import EngineController
from das_adapter.engine.requests import LiveRequest
from das_adapter.engine.settings import settings
from das_adapter.engine.timing import StepTimer
from das_adapter.engine.v1.copy_drafts import CopySource
from das_adapter.engine.v1.model_source import Drafts, ModelSource
from das_adapter.engine.v1.neural_drafts import NeuralSource
from das_adapter.protocol.messages import Refresh, Refreshed
from das_adapter.protocol.metrics import EngineStats


class _DecodingBatch(NamedTuple):
    """The batch of a step, of which every request decodes."""

    req_ids: list[str]
    everyone: int
    """Number of requests that the runner has, those beside the batch included."""
    rows: Ints
    """Rows of the requests, int64 [batch]."""
    slots: Ints
    """Slots of the requests, int64 [batch]."""

    def is_of(self, req_ids: list[str], everyone: int) -> bool:
        """Return whether the runner still has the same requests."""
        return self.everyone == everyone and self.req_ids == req_ids


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
        drafts: ModelDrafts | None = None
        if config.copies_policy:
            drafts = ModelDrafts(config.model_tokens)
            self.model_source = CopySource(self, drafts)
        elif config.neural:
            drafts = ModelDrafts(config.model_tokens, narrows=False)
            self.model_source = NeuralSource(self, drafts)
        self.engine = EngineController(
            config,
            vllm_config,
            drafts,
            leads=self.leads,
        )
        self.timer = StepTimer()
        self.model_tokens = EMPTY_INTS
        """Tokens that the model shall draft for each request of the batch, int64
        [batch].
        """
        self._max_model_len = vllm_config.model_config.max_model_len
        scheduler = vllm_config.scheduler_config
        step_tokens = getattr(scheduler, "max_num_scheduled_tokens", None)
        self._step_tokens = step_tokens or scheduler.max_num_batched_tokens
        self._ends = np.zeros(1, dtype=np.int64)
        """By slot: `LiveRequest.end`."""
        self._lengths = np.zeros(1, dtype=np.int64)
        """By slot: tokens of the request when it was last drafted for."""
        self._by_model = np.zeros(1, dtype=np.int64)
        """By slot: tokens of the last draft, if that was to be the model's."""
        self._synced = False
        """Whether a weight sync has come since requests were closed last."""
        self._unchosen: Callable[[], None] | None = None
        """Has the policy choose among the drafts that are still looked for."""
        self._later: list[Callable[[], None]] = []
        """Work of steps that are over, see `catch_up`."""
        self._batch: _DecodingBatch | None = None
        """The last batch; None: requests were opened or closed since."""

    def load_model(self, policy: Any) -> None:
        """Load the model that drafts, once vLLM has loaded the policy."""
        if self.model_source:
            self.model_source.load(policy)

    # A decode step

    def begin_step(self, scheduled: Any, now: float) -> None:
        """Note that the engine starts a forward pass (vLLM's `SchedulerOutput`): the
        one before, if it only decoded, took until now, seconds of a monotonic clock.
        """
        self.emit_drafts()
        if not self.engine.failed:
            time_step = partial(self.time_step, scheduled, now)
            self.later(time_step)

    def time_step(self, scheduled: Any, now: float) -> None:
        """Time the step before the one that has begun, while its forward pass runs;
        the arguments are those of `begin_step`.
        """
        if self.leads:
            step = self.timer.begin_step(scheduled, now)
            if step is not None:
                since_epoch = time.time() - time.perf_counter()
                self.engine.timed(step, since_epoch + now)
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
    ) -> Drafts:
        """Draft for every request of the batch: at most `num_speculative_tokens` tokens
        each, once `emit_drafts` has been called; none at all where the drafter has
        failed since the last weight sync.

        Args:
            sampled_token_ids: tokens each request got in this step; empty while its
                prompt is read.
            num_tokens_no_spec, token_ids_cpu: int [max_batch], int32 [max_batch,
                max_model_len], all of its tokens.
        """
        self.emit_drafts()
        self.catch_up()
        begin = time.perf_counter()
        if self.model_source:
            num_requests = len(sampled_token_ids)
            self.model_tokens = np.zeros(num_requests, dtype=np.int64)
            self.model_source.drawn_with = {}
        drafts: Drafts | None = None
        if not self.engine.failed:
            try:
                drafts = self.begin_drafts(
                    sampled_token_ids,
                    num_tokens_no_spec,
                    token_ids_cpu,
                )
            except Exception as error:
                self.engine.fail(error)
        if drafts is None:
            self._batch = None
            drafts = [[] for _ in sampled_token_ids]
        try:
            return self._with_model(
                drafts,
                num_tokens_no_spec,
                token_ids_cpu,
            )
        finally:
            propose_s = time.perf_counter() - begin
            self.engine.counters.propose_seconds.append(propose_s)

    def begin_drafts(
        self,
        sampled: list[list[int]],
        lengths: np.ndarray,
        tokens: np.ndarray,
    ) -> Drafts:
        """Begin to look for drafts, as `propose`: `emit_drafts` puts them into the
        lists that are returned.
        """
        drafts: Drafts = [[] for _ in sampled]
        if not self.leads:
            return drafts
        policy = self.engine.policy
        outcome, rows = self._outcome(sampled, lengths, tokens)
        search = policy.next(outcome)
        asked = search.asked if isinstance(search, Rest) else True
        self.later(policy.flush)
        if not self.drops:
            note_tokens = partial(self._note_tokens, outcome, asked)
            self.later(note_tokens)
        if isinstance(search, Rest) or self.drops:
            return drafts
        slots = outcome.slots
        if self.engine.history:
            assert outcome.context is not None
            self.engine.history.begin_search(
                slots,
                rows,
                outcome.context,
                tokens,
                search,
            )
        choose = partial(
            self._choose,
            rows,
            slots,
            search,
            drafts,
        )
        if self.model_source:
            choose()
        else:
            self._unchosen = choose
        return drafts

    def emit_drafts(self) -> None:
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
        seconds = self.engine.counters.propose_seconds
        if seconds:
            seconds[-1] += time.perf_counter() - begin

    # Commands of the host

    def rehearsed(self) -> None:
        """End the rehearsal, and forget its request."""
        self.emit_drafts()
        self.catch_up()
        self._batch = None
        self.timer = StepTimer()
        self.engine.rehearsed()

    def refresh(self, message: Refresh) -> Refreshed:
        """Bring the history and the model up to date, at a weight sync."""
        self.emit_drafts()
        self.catch_up()
        self.timer = StepTimer()  # the next step begins after a pause
        self._close_gone()
        if self.engine.failed:  # they are opened again: who knows their state
            live = list(self.engine.live)
            self._close(live)
        self._synced = True
        return self.engine.refresh(message)

    def map_guest_history(self, files: Sequence[str]) -> None:
        """Map files with the history of problems that are at home on other nodes."""
        self.emit_drafts()
        if self.engine.history:
            self.engine.history.map_guest_history(files)

    def stats(self) -> EngineStats:
        """Return the figures of the engine, see `EngineController.stats`."""
        self.emit_drafts()
        self.catch_up()
        return self.engine.stats()

    # Inside

    def _with_model(
        self,
        drafts: Drafts,
        lengths: np.ndarray,
        tokens: np.ndarray,
    ) -> Drafts:
        source = self.model_source
        policy = self.engine.policy
        if source is None:
            return drafts
        must_run = self.ranks > 1 or source.follows
        if not must_run and not self.model_tokens.any():
            return drafts
        # it need not even follow the policy
        rests = policy.model_rests
        begin = time.perf_counter()
        passes_before = source.drafts.passes_made
        try:
            source.draft(
                self.model_tokens,
                lengths,
                tokens,
                drafts,
                able=not rests,
            )
        except Exception as error:
            self.engine.fail(error)
            return [[] for _ in drafts]
        drafting_s = time.perf_counter() - begin
        passes = source.drafts.passes_made - passes_before
        is_recorded = self.timer.record_drafting(drafting_s, passes)
        if not is_recorded and not rests:
            policy.timed_drafting(drafting_s)
        return drafts

    def _note_tokens(self, outcome: Outcome, asked: bool) -> None:
        """Tell the timer what the step brought, and whether a drafter was asked."""
        assert outcome.context is not None
        context = int(outcome.context.sum())
        self.timer.record_sampled(
            outcome.slots,
            outcome.got,
            context,
            asked,
        )

    def _choose(
        self,
        rows: Ints,
        slots: Ints,
        search: Search,
        drafts: Drafts,
    ) -> None:
        """Put what the policy chooses into the batch's `drafts`."""
        history = self.engine.history
        candidates = None
        if history is not None:
            candidates = history.found_drafts()
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
    ) -> tuple[Outcome, Ints]:
        """Return what the step brought to the requests that decode, and their rows of
        the batch, int64 [requests].
        """
        req_ids = self.runner.input_batch.req_ids
        everyone = len(self.runner.requests)
        carried = self.carried
        self.carried = None
        followed = None
        batch = self._batch
        if batch is not None and batch.is_of(req_ids, everyone):
            rows = batch.rows
            slots = batch.slots
            num_rows = len(rows)
            now = lengths[:num_rows].astype(np.int64)
            followed = advance_lengths(
                slots,
                sampled,
                now,
                self._lengths,
                self._ends,
            )
        if followed is not None:
            got, room = followed
        else:
            new_tokens = list(map(len, sampled))
            got = np.array(new_tokens, dtype=np.int64)
            rows, slots, got, now = self._opened(
                req_ids,
                got,
                lengths,
                tokens,
            )
            room = self._ends[slots] - 1 - now
            self._batch = None
            if len(rows) == len(req_ids):
                self._batch = _DecodingBatch(list(req_ids), everyone, rows, slots)
        drafts = None
        by_model = None
        if carried is not None:
            drafts = np.array(carried, dtype=np.int64)
            if followed is None:
                drafts = drafts[rows]
            if self.model_source is not None:
                by_model = np.minimum(drafts, self._by_model[slots])
        # The next step writes the draft and one token more: neither may pass the
        # request's end, or take what the other requests and prompts need of a step, to
        # which vLLM comes later. More prompts come where the batch has changed.
        kept_part = 2 if followed is None else 16
        kept_tokens = self._step_tokens // kept_part
        free_tokens = self._step_tokens - kept_tokens
        fitting = free_tokens // max(everyone, 1) - 1
        if fitting < self.config.num_draft_tokens:
            room = np.minimum(room, max(0, fitting))
        outcome = Outcome(
            slots,
            got,
            carried=drafts,
            by_model=by_model,
            room=room,
            context=now,
        )
        return outcome, rows

    def _opened(
        self,
        req_ids: list[str],
        got: Ints,
        lengths: np.ndarray,
        tokens: np.ndarray,
    ) -> tuple[Ints, Ints, Ints, Ints]:
        """Close the requests that are gone and open those that began; return of those
        that decode the rows, the slots, the tokens that they got and their lengths,
        int64 [requests] each.
        """
        self._close_gone()
        known_slots = []
        for request in map(self.engine.live.get, req_ids):
            known_slots.append(-1 if request is None else request.slot)
        batch_slots = np.array(known_slots, dtype=np.int64)
        rows = np.flatnonzero(got)
        got = got[rows]
        slots = batch_slots[rows]
        now = lengths[rows].astype(np.int64)
        is_new = slots < 0
        is_shorter = self._lengths[slots] > now
        begun = np.flatnonzero(is_new | is_shorter)
        for i in begun.tolist():
            row = int(rows[i])
            length = now[i]
            text = tokens[row, :length]
            num_new = int(got[i])
            slots[i] = self._open(req_ids[row], text, num_new)
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
        prompt_ids = request.prompt_token_ids or ()
        prompt = np.asarray(prompt_ids, dtype=np.int32)
        self.engine.open(live, before, prompt, text)
        slot = live.slot
        num_slots = slot + 1
        self._ends = with_slots(self._ends, num_slots)
        self._lengths = with_slots(self._lengths, num_slots)
        self._by_model = with_slots(self._by_model, num_slots)
        self._ends[slot] = live.end
        self._lengths[slot] = before
        self._by_model[slot] = 0
        return slot

    def _close(self, req_ids: list[str]) -> None:
        self._batch = None
        self.engine.close(req_ids)

    def _close_gone(self) -> None:
        gone = []
        for req_id, request in self.engine.live.items():
            if req_id in self.runner.requests:
                continue
            gone.append(req_id)
            if self._synced:
                # it ended before the weight sync: nobody drafts from it now
                request.record = False
        self._synced = False
        self._close(gone)
