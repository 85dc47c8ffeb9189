"""das-adapter inside one worker that runs vLLM's V2 model runner."""

from __future__ import annotations

import functools
import logging
import time
from typing import Any

from das_adapter import __version__
from das_adapter.config import DasConfig
from das_adapter.core.history import HistoryPolicy
from das_adapter.engine.v2 import verification
from das_adapter.engine.v2.lengths import Begun, DraftLengths, Step
from das_adapter.engine.v2.speculator import HistorySpeculator
from das_adapter.engine.worker import WorkerState
from das_adapter.patching import patch
from das_adapter.protocol.label import Label
from das_adapter.protocol.messages import Refresh, Refreshed, Started
from das_adapter.protocol.metrics import EngineStats

logger = logging.getLogger("das_adapter")

DRAFT_LENGTH = "das_draft_length"
"""Attribute of vLLM's `ModelRunnerOutput`: draft tokens of each request of the next step that is not scheduled yet."""


class DeviceWorkerState(WorkerState):
    """The state of one worker on the V2 runner. The first tensor-parallel rank drafts; the others follow it."""

    def __init__(self, runner: Any, config: DasConfig):
        super().__init__(runner, config)
        self.speculator: HistorySpeculator | None = runner.speculator if config.uses_history else None
        self.lengths: DraftLengths | None = None
        if self.speculator is not None and self.speculator.index is not None:
            self.lengths = DraftLengths(config, runner.vllm_config, self.counters)
            self.speculator.on_failure = self.lengths.fail
            self.speculator.index.weigh(self.lengths.history.index.fading)
            if runner.device.type == "cuda":
                self.speculator.streams = runner.main_stream, runner.output_copy_stream
        self._policy = HistoryPolicy(config.history)
        self._max_model_len = runner.vllm_config.model_config.max_model_len
        self._recorded: dict[str, bool] = {}
        self._begun: list[Begun] = []
        self._ended: set[str] = set()
        self._synced = self._unrecorded = False
        self._complete = True
        """Whether all sealed text that is drafted from is on the device."""
        self._step: Step | None = None

    def bind(self) -> None:
        """Bind it to the model runner."""
        if self.config.keyed:
            sample_keyed.apply(owner=self.runner)
        if self.lengths is not None:
            for step_patch in (take_requests, drop_requests, note_steps, choose_lengths):
                step_patch.apply(self, owner=self.runner)

    def begin(self, scheduled: Any) -> None:
        """Take the requests that join the batch (vLLM's `SchedulerOutput`), once the runner has them."""
        assert self.speculator is not None and self.speculator.index is not None and self.lengths is not None
        slots, opened = self.runner.req_states.req_id_to_index, []
        for new in scheduled.scheduled_new_reqs:
            params, prompt = new.sampling_params, new.prompt_token_ids or []
            label = Label.of(params.extra_args if params else None)
            problem, start = label.problem_of(prompt), label.start_in(len(prompt))
            limit = (params.max_tokens if params else None) or self._max_model_len
            end, length = min(self._max_model_len, len(prompt) + limit), len(new.prefill_token_ids or prompt)
            self._recorded[new.req_id] = label.record and self._policy.kept
            opened.append((slots[new.req_id], self._policy.key(problem), start))
            stops = frozenset(params.all_stop_token_ids if params else ())
            self._begun.append(Begun(new.req_id, problem, start, end, length, label.record, stops))
        self._complete = not self._policy.kept
        try:
            self.speculator.index.open(opened)
        except Exception as error:
            self.speculator.fail(error)

    def bring_history(self) -> None:
        """Bring more of the sealed text that is drafted from to the device, before a step."""
        if self._complete or self.speculator is None or self.speculator.index is None or self.lengths is None:
            return
        try:
            self._complete = self.speculator.index.bring(self.lengths.history.index)
        except Exception as error:
            self._complete = True
            self.speculator.fail(error)

    def end(self, scheduled: Any) -> None:
        """Take the requests that have ended or were preempted, while the runner has them still."""
        assert self.speculator is not None and self.speculator.index is not None
        states, closed = self.runner.req_states, []
        self._unrecorded, self._synced = self._synced, False
        for req_id in sorted(scheduled.finished_req_ids | (scheduled.preempted_req_ids or set())):
            slot = states.req_id_to_index.get(req_id)
            finished = req_id in scheduled.finished_req_ids
            kept = self._recorded.pop(req_id, False) and finished and not self._unrecorded
            if slot is not None:
                index = self.speculator.index
                step = self.config.num_draft_tokens + 2  # what the last step may have added
                most = int(states.num_computed_tokens_np[slot]) + step - int(index.arena.tables.begin[slot])
                closed.append((slot, max(0, min(most, self._max_model_len)) if kept else 0))
        self._ended |= scheduled.finished_req_ids
        try:
            if closed:
                self.speculator.index.close(closed, states.total_len.gpu)
        except Exception as error:
            self.speculator.fail(error)

    def start_step(self, scheduled: Any) -> None:
        """Note the step that the runner has begun."""
        drafts = {req_id: len(tokens) for req_id, tokens in scheduled.scheduled_spec_decode_tokens.items()}
        counts = scheduled.num_scheduled_tokens
        decodes = not self._begun and scheduled.total_num_scheduled_tokens == len(counts) + sum(drafts.values())
        self._step = Step(tuple(self._begun), frozenset(self._ended), self._unrecorded, dict(counts), drafts, decodes,
                          time.perf_counter())  # fmt: skip
        self._begun, self._ended = [], set()

    def watch(self, output: Any) -> Any:
        """Have the draft length of the next steps chosen when a step's output is on the host; return the output."""
        step, self._step = self._step, None
        if step is None or output is None or self.lengths is None or self.speculator is None:
            return output
        step.offer = self.speculator.take_offer()
        stock, lengths = output.get_output, self.lengths

        def get_output() -> Any:
            result = stock()
            step.req_ids = result.req_ids
            setattr(result, DRAFT_LENGTH, lengths.output(step, result.sampled_token_ids, time.perf_counter()))
            return result

        output.get_output = get_output
        return output

    def label(self, req_id: str) -> Label:
        raise NotImplementedError("the V2 runner's requests are known by what joins the batch")

    def _hello(self) -> Started:
        sampler = type(self.runner.sampler).__name__
        return Started(version=__version__, drafter=self.config.drafter, sampler=sampler, runner="V2")

    def _refresh(self, **payload: Any) -> Refreshed:
        if self.lengths is None or self.speculator is None or self.speculator.index is None:
            return Refreshed()
        answer = self.lengths.refresh(Refresh.of(payload))
        arena = self.speculator.index.arena
        arena.forget_sealed()
        arena.forget_closed()
        self._synced = True
        self.speculator.resume()
        self._complete = False
        self.counters.alarm = None
        return answer

    def _stats(self) -> EngineStats:
        stats = super()._stats()
        if self.lengths is None or self.speculator is None or self.speculator.index is None:
            return stats
        return stats | self.lengths.stats() | EngineStats(live_bytes=self.speculator.index.nbytes)


_RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"


@patch(f"{_RUNNER}.sample", since="0.32")
def sample_keyed(stock: Any) -> Any:
    """Without it drafts are verified as another engine of this process wants it (V2 runner)."""

    @functools.wraps(stock)
    def sample(*args: Any, **kwargs: Any) -> Any:
        with verification.keyed():
            return stock(*args, **kwargs)

    return sample


@patch(f"{_RUNNER}.add_requests", since="0.32")
def take_requests(stock: Any, state: DeviceWorkerState) -> Any:
    """Without it nobody knows which problem a request is about, and where it writes (V2 runner)."""

    @functools.wraps(stock)
    def add_requests(scheduler_output: Any) -> None:
        stock(scheduler_output)
        if scheduler_output.scheduled_new_reqs:
            state.begin(scheduler_output)
        state.bring_history()

    return add_requests


@patch(f"{_RUNNER}.finish_requests", since="0.32")
def drop_requests(stock: Any, state: DeviceWorkerState) -> Any:
    """Without it the text of a request that ended is overwritten before its siblings have drafted from it (V2
    runner)."""

    @functools.wraps(stock)
    def finish_requests(scheduler_output: Any) -> None:
        state.end(scheduler_output)
        stock(scheduler_output)

    return finish_requests


@patch(f"{_RUNNER}.execute_model", since="0.32")
def note_steps(stock: Any, state: DeviceWorkerState) -> Any:
    """Without it nobody knows how long decode steps take, and who carried drafts into them (V2 runner)."""

    @functools.wraps(stock)
    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        output = stock(scheduler_output, *args, **kwargs)
        if scheduler_output.total_num_scheduled_tokens and not kwargs.get("dummy_run"):
            state.start_step(scheduler_output)
        return output

    return execute_model


@patch(f"{_RUNNER}.sample_tokens", since="0.32")
def choose_lengths(stock: Any, state: DeviceWorkerState) -> Any:
    """Without it no figures of the rollouts are logged, and no draft length is chosen (V2 runner)."""

    @functools.wraps(stock)
    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        return state.watch(stock(*args, **kwargs))

    return sample_tokens
