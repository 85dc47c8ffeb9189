"""das-adapter inside one worker that runs vLLM's V2 model runner."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Iterator
from typing import Any

from vllm.distributed.parallel_state import get_tp_group

from das_adapter.config import DasConfig
from das_adapter.core.history import HistoryPolicy
from das_adapter.engine.requests import LiveRequest
from das_adapter.engine.standalone.worker import Response
from das_adapter.engine.v2 import verification
from das_adapter.engine.v2.device_index import DeviceIndex
from das_adapter.engine.v2.harvest import Harvest
from das_adapter.engine.v2.lengths import DraftLengths, Step
from das_adapter.engine.v2.neural import Beside, Speculation, take_loaded_speculator
from das_adapter.engine.v2.reading import may_miss_steps
from das_adapter.engine.v2.speculator import HistorySpeculator, keep_texts_on_device
from das_adapter.engine.worker import WorkerState
from das_adapter.patching import patch
from das_adapter.protocol.engine_args import DRAFT_LENGTH
from das_adapter.protocol.label import Label
from das_adapter.protocol.messages import Refresh, Refreshed
from das_adapter.protocol.metrics import EngineStats

logger = logging.getLogger("das_adapter")


class DeviceWorkerState(WorkerState):
    """The state of one worker on the V2 runner. The first tensor-parallel rank drafts; the others follow it."""

    ranks_draft_alike = False
    model_runner = 2

    def __init__(self, runner: Any, config: DasConfig):
        self.lengths: DraftLengths | None = None
        """None: another rank chooses, or nobody drafts."""
        if config.drafter != "none" and get_tp_group().rank_in_group == 0:
            always = int(config.neural and not may_miss_steps(runner.speculator))
            self.lengths = DraftLengths(config, runner.vllm_config, always)
        super().__init__(runner, config, self.lengths, harvests=self.lengths is not None)
        self.index: DeviceIndex | None = None
        self.speculation: Speculation | None = None
        self.source: HistorySpeculator | None = None
        if config.uses_history and self.lengths is not None:
            keep_texts_on_device(runner.req_states)
        if config.uses_history and not config.neural:
            self._bind_history(runner.speculator)
        self._policy = HistoryPolicy(config.history)
        self._max_model_len = runner.vllm_config.model_config.max_model_len
        self._recorded: dict[str, bool] = {}
        self._begun: list[LiveRequest] = []
        self._ended: set[str] = set()
        self._synced = self._unrecorded = False
        self._complete = True
        """Whether all sealed text that is drafted from is on the device."""
        self._step: Step | None = None
        self._harvest: Harvest | None = None
        """Of an engine without a host."""

    def stand_alone(self, worker: Any, directory: str) -> None:
        """As `WorkerState.stand_alone`, with the responses that outputs bring to the host."""
        if self.lengths is not None:
            self._harvest = Harvest()
        super().stand_alone(worker, directory)

    def response(self, req_id: str) -> Response | None:
        """Return what a request has written that is over; None: it is not known."""
        return None if self._harvest is None else self._harvest.take(req_id)

    def bind(self) -> None:
        """Bind it to the model runner."""
        if self.config.keyed:
            sample_keyed.apply(owner=self.runner)
        if self.draft_weights:
            take_loaded_speculator.apply(self._take_loaded_drafter, owner=self.runner)
        if self.lengths is not None:
            for step_patch in (take_requests, drop_requests, note_steps, choose_lengths):
                step_patch.apply(self, owner=self.runner)
        elif self.config.uses_history:
            note_steps.apply(self, owner=self.runner)
        self.say_which_steps_have_no_graphs()

    def begin(self, scheduled: Any) -> None:
        """Take the requests that join the batch (vLLM's `SchedulerOutput`), once the runner has them."""
        slots, opened = self.runner.req_states.req_id_to_index, []
        for new in scheduled.scheduled_new_reqs:
            params, text = new.sampling_params, new.prefill_token_ids or new.prompt_token_ids or []
            label = Label.of(params.extra_args if params else None)
            begun = LiveRequest.of(new.req_id, new, label, self._max_model_len)
            begun.length, begun.stops = len(text), stop_tokens(params) if params else frozenset()
            self._recorded[new.req_id] = begun.record and self._policy.kept
            opened.append((slots[new.req_id], self._policy.key(begun.problem), begun.start))
            if self._harvest is not None:
                self._harvest.begin(begun, list(text[begun.start :]))
            self._begun.append(begun)
        if self.index is not None:
            self._complete = not self._policy.kept
            with self._drafting():
                self.index.open(opened)

    @contextlib.contextmanager
    def _drafting(self) -> Iterator[None]:
        """Switch the history's drafts off where something fails inside."""
        try:
            yield
        except Exception as error:
            self._complete = True
            if self.source is not None:
                self.source.fail(error)

    def bring_history(self) -> None:
        """Bring more of the sealed text that is drafted from to the device, before a step."""
        if self._complete or self.index is None or self.lengths is None or self.lengths.engine.history is None:
            return
        with self._drafting():
            self._complete = self.index.bring(self.lengths.engine.history.index)

    def end(self, scheduled: Any) -> None:
        """Take the requests that have ended or were preempted, while the runner has them still."""
        states, closed = self.runner.req_states, []
        self._unrecorded, self._synced = self._synced, False
        for req_id in sorted(scheduled.finished_req_ids | (scheduled.preempted_req_ids or set())):
            slot = states.req_id_to_index.get(req_id)
            finished = req_id in scheduled.finished_req_ids
            kept = self._recorded.pop(req_id, False) and finished and not self._unrecorded
            if slot is not None and self.index is not None:
                step = self.config.num_draft_tokens + 2  # what the last step may have added
                before = max(states.num_computed_tokens_np[slot], states.prefill_len.np[slot])
                most = int(before) + step - int(self.index.arena.tables.begin[slot])
                closed.append((slot, max(0, min(most, self._max_model_len)) if kept else 0))
        self._ended |= scheduled.finished_req_ids
        if closed and self.index is not None:
            with self._drafting():
                self.index.close(closed, states.total_len.gpu)

    def start_step(self, scheduled: Any) -> None:
        """Note the step that the runner has begun."""
        drafts = {req_id: len(tokens) for req_id, tokens in scheduled.scheduled_spec_decode_tokens.items()}
        counts = scheduled.num_scheduled_tokens
        decodes = not self._begun and scheduled.total_num_scheduled_tokens == len(counts) + sum(drafts.values())
        begun, ended, self._begun, self._ended = self._begun, self._ended, [], set()
        self._step = Step(begun, ended, self._unrecorded, dict(counts), drafts, decodes, time.perf_counter())

    def watch(self, output: Any) -> Any:
        """Have the draft length of the next steps chosen when a step's output is on the host; return the output."""
        step, self._step = self._step, None
        if step is None or output is None or self.lengths is None:
            return output
        if self.source is not None:
            step.offer = self.source.take_offer()
        stock, lengths = output.get_output, self.lengths

        def get_output() -> Any:
            result = stock()
            step.req_ids = result.req_ids
            if self._harvest is not None:
                self._harvest.output(result.req_ids, result.sampled_token_ids)
            if self.speculation is not None:
                step.proposals = self.speculation.take()
            setattr(result, DRAFT_LENGTH, lengths.output(step, result.sampled_token_ids, time.perf_counter()))
            return result

        output.get_output = get_output
        return output

    def refresh(self, message: Refresh) -> Refreshed:
        """As `WorkerState.refresh`, with what is on the device."""
        answer = super().refresh(message)
        self._synced = True
        if self.speculation is not None:
            self.speculation.resume()
        if self.index is not None and self.source is not None:
            self.index.arena.forget_sealed()
            self.index.arena.forget_closed()
            self.source.resume()
            self._complete = False
        return answer

    def visit(self, files: list[str]) -> Refreshed:
        """As `WorkerState.visit`; what arrived is brought to the device before the next steps."""
        answer = super().visit(files)
        if self.index is not None:
            self.index.arena.look_again()
            self._complete = False
        return answer

    def own_stats(self) -> EngineStats:
        """Return the figures of the device's memory."""
        if self.index is None:
            return EngineStats()
        if shortage := self.index.shortage():
            logger.warning("das: %s", shortage)
        return EngineStats(live_bytes=self.index.nbytes)

    def _bind_history(self, speculator: HistorySpeculator) -> None:
        """Take over the history's speculator."""
        self.source = speculator
        speculator.read(self.runner.req_states)
        if self.lengths is None or self.lengths.engine.history is None or speculator.index is None:
            return
        self.index = speculator.index
        self.index.weigh(self.lengths.engine.history.index.fading)
        speculator.on_failure = self.lengths.engine.fail
        if self.runner.device.type == "cuda":
            speculator.streams = self.runner.main_stream, self.runner.output_copy_stream

    def _take_loaded_drafter(self) -> None:
        """Take over a neural drafter, once vLLM has loaded it."""
        assert self.draft_weights is not None
        self.draft_weights.take_loaded()
        self.runner.drafter = self.runner.speculator  # where veRL looks for a drafter that it sends weights to
        config, beside = self.config, None
        if config.uses_history:
            source = HistorySpeculator(self.runner.vllm_config, self.runner.device, config)
            self._bind_history(source)
            beside = Beside(source, self._model_worth)
        texts = self.runner.req_states.all_token_ids.gpu

        def decodes() -> bool:
            return self._step is not None and self._step.decodes

        self.speculation = Speculation(self.runner.speculator, decodes, config, texts, beside)
        if self.lengths is not None:
            self.speculation.on_failure = self.lengths.engine.fail

    def _model_worth(self, tokens: int) -> float:
        drafts = self.lengths and self.lengths.engine.drafts
        return float(drafts.acceptance.chances(tokens).sum()) if drafts else 0.0


def stop_tokens(params: Any) -> frozenset[int]:
    """Return the tokens that end a request: of its `SamplingParams`, whose own set has the end of the text even where
    that is ignored."""
    return frozenset((params.stop_token_ids or ()) if params.ignore_eos else params.all_stop_token_ids)


_RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"


@patch(f"{_RUNNER}.sample", since="0.31")
def sample_keyed(stock: Any) -> Any:
    """Without it drafts are verified as another engine of this process wants it (V2 runner). Remove this patch when
    `verify_by_equality` is removed."""

    @functools.wraps(stock)
    def sample(*args: Any, **kwargs: Any) -> Any:
        with verification.keyed():
            return stock(*args, **kwargs)

    return sample


@patch(f"{_RUNNER}.add_requests", since="0.31", needs="scheduler_output")
def take_requests(stock: Any, state: DeviceWorkerState) -> Any:
    """Without it nobody knows which problem a request is about, and where it writes (V2 runner). Remove this patch when
    vLLM hands speculators the requests of a step."""

    @functools.wraps(stock)
    def add_requests(scheduler_output: Any) -> None:
        stock(scheduler_output)
        if scheduler_output.scheduled_new_reqs:
            state.begin(scheduler_output)
        state.bring_history()

    return add_requests


@patch(f"{_RUNNER}.finish_requests", since="0.31", needs="scheduler_output")
def drop_requests(stock: Any, state: DeviceWorkerState) -> Any:
    """Without it the text of a request that ended is overwritten before its siblings have drafted from it (V2 runner).
    Remove this patch when vLLM tells speculators which requests have ended."""

    @functools.wraps(stock)
    def finish_requests(scheduler_output: Any) -> None:
        state.end(scheduler_output)
        stock(scheduler_output)

    return finish_requests


@patch(f"{_RUNNER}.execute_model", since="0.31", needs="scheduler_output")
def note_steps(stock: Any, state: DeviceWorkerState) -> Any:
    """Without it nobody knows how long decode steps take, and who carried drafts into them (V2 runner). Remove this
    patch when vLLM reports the time of each decode step to plug-ins."""

    @functools.wraps(stock)
    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dummy_run"):
            return stock(scheduler_output, *args, **kwargs)
        if state.source is not None:
            state.source.wanted = scheduler_output.num_spec_tokens_to_schedule
        if state.lengths is None:
            return stock(scheduler_output, *args, **kwargs)
        state.begin_standalone(scheduler_output)
        output = stock(scheduler_output, *args, **kwargs)
        if scheduler_output.total_num_scheduled_tokens:
            state.start_step(scheduler_output)
        return output

    return execute_model


@patch(f"{_RUNNER}.sample_tokens", since="0.31")
def choose_lengths(stock: Any, state: DeviceWorkerState) -> Any:
    """Without it no figures of the rollouts are logged, and no draft length is chosen (V2 runner). Remove this patch
    when vLLM reports the tokens of each decode step to plug-ins and lets a worker choose the draft length."""

    @functools.wraps(stock)
    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        return state.watch(stock(*args, **kwargs))

    return sample_tokens
