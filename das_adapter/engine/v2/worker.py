"""das-adapter inside one worker that runs vLLM's V2 model runner."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group

from das_adapter.config import DasConfig
from das_adapter.core.history import HistoryRules
from das_adapter.engine import plan, recurrent
from das_adapter.engine.controller import EngineController
from das_adapter.engine.plan import PlanInForce, plan_of
from das_adapter.engine.requests import LiveRequest, warm_up
from das_adapter.engine.runner import STOCK_NOISE
from das_adapter.engine.timing import an_eighth_apart, captured_tokens
from das_adapter.engine.v2.admission import ADMITS, Admission, obstacle
from das_adapter.engine.v2.confidence import DraftConfidence
from das_adapter.engine.v2.device_index import DeviceIndex
from das_adapter.engine.v2.neural import Speculation
from das_adapter.engine.v2.ranking import Ranking
from das_adapter.engine.v2.reading import may_miss_steps
from das_adapter.engine.v2.sampling_limits import SamplingLimits
from das_adapter.engine.v2.speculator import HistorySpeculator, keep_texts_on_device
from das_adapter.engine.v2.step_planner import Output, Step, StepPlanner
from das_adapter.engine.v2.survival import Survival, survive_verification
from das_adapter.engine.worker import WorkerState
from das_adapter.errors import DasError
from das_adapter.patching import patch
from das_adapter.protocol.messages import Refresh, Refreshed
from das_adapter.protocol.metrics import EngineStats

logger = logging.getLogger("das_adapter")


class DeviceWorkerState(WorkerState):
    """The state of one worker on the V2 runner. The first tensor-parallel rank drafts;
    the others follow it.
    """

    model_runner = 2

    def __init__(self, runner: Any, config: DasConfig):
        self.planner: StepPlanner | None = None
        """Makes the plans of the engine; None: another rank does, or nobody drafts."""
        self.in_force = PlanInForce()
        """The plan of the present step."""
        engine: EngineController | None = None
        if config.drafter != "none" and get_tp_group().rank_in_group == 0:
            # the policy copy misses nothing
            always = config.neural and not may_miss_steps(runner.speculator)
            self.planner = StepPlanner(config, runner.vllm_config, int(always))
            engine = self.planner.engine
        super().__init__(runner, config, self.planner)
        self.engine = engine
        self.speculation: Speculation | None = None
        self.source: HistorySpeculator | None = None
        # Now: what is made while vLLM loads the weights lies in a pool that sleep
        # discards.
        self._limits: SamplingLimits | None = None
        self._confidence: DraftConfidence | None = None
        if config.by_model:
            self._limits = SamplingLimits(runner)
            drafter = runner.speculator
            # vLLM 0.29: remove this when 0.30 is the oldest
            if not hasattr(drafter, "draft_token_confidence_probs"):
                drafter.draft_token_confidence_probs = torch.zeros_like(
                    drafter.draft_tokens, dtype=torch.float32
                )
            if config.keyed and config.controlled:
                chances = drafter.draft_token_confidence_probs
                self._confidence = DraftConfidence(chances)
        if config.uses_history:
            if self.planner is not None:
                keep_texts_on_device(runner.req_states)
            source: HistorySpeculator = runner.speculator
            if config.by_model:
                source = HistorySpeculator(
                    runner.vllm_config,
                    runner.device,
                    config,
                )
            self.source = source
            source.bind(
                runner.req_states,
                self.engine,
                self.in_force,
                self.fail_in_step,
            )
        if config.controlled:
            states = runner.req_states
            self._ranking = Ranking(
                states.max_num_reqs,
                states.num_speculative_steps,
                states.device,
            )
            setattr(states, ADMITS, self.admission)
        self._rules = HistoryRules(config.history)
        self._max_model_len = runner.vllm_config.model_config.max_model_len
        self._requests: dict[str, LiveRequest] = {}
        self._begun: list[LiveRequest] = []
        self._ended: set[str] = set()
        self._step: Step | None = None
        self.survival = Survival(runner, self.fail_in_step)

    @property
    def index(self) -> DeviceIndex | None:
        """What drafts from the history on this rank; None: nothing does."""
        if self.source is None:
            return None
        return self.source.index

    @property
    def plans_travel(self) -> bool:
        return self.config.controlled

    def response(self, req_id: str) -> LiveRequest | None:
        if self.planner is not None:
            self.planner.catch_up()
        return self._requests.get(req_id)

    def admission(
        self,
        attn_groups: Any,
        additional_attn_cg_support: Any = None,
        **stock: Any,
    ) -> Admission | None:
        """Give each request its own number of draft tokens where that can be, and say
        which it is; the arguments are those of vLLM's
        `maybe_create_adaptive_verification_manager`.
        """
        recurrent.tell_room(self.runner.vllm_config, self.runner.kv_cache_config)
        sizes = self._drafted_sizes()
        why: str | None = STOCK_NOISE
        if self.config.keyed:
            why = obstacle(
                self.runner.vllm_config,
                attn_groups,
                additional_attn_cg_support,
            )
        made = None
        try:
            if not why:
                made = Admission(
                    self.drops_drafts,
                    self.in_force,
                    self._ranking,
                    self.fail_in_step,
                    largest=max(sizes, default=0),
                    req_states=stock["req_states"],
                    query_start_loc=stock["query_start_loc"],
                    num_bonus_tokens=stock["num_bonus_tokens"],
                    max_total_logits=stock["max_total_logits"],
                )
        except Exception as error:
            # the kernel does not compile, or computes something else: on all ranks
            logger.exception(
                "das: the draft tokens of a step can't be shared out by worth"
            )
            why = repr(error)
        if made is None:
            logger.info(
                "das: all requests of a step have equally many draft tokens: %s", why
            )
            return None
        logger.info("das: each request has its own number of draft tokens")
        self.runner.rejection_sampler.enable_adaptive_verification = True
        if self.source is not None:
            self.source.admits = True
        if self.planner is not None:
            self.planner.give_own_lengths(sizes)
        return made

    def _drafted_sizes(self) -> tuple[int, ...]:
        """Return the tokens for which graphs of steps with drafts are captured,
        rising.
        """
        vllm_config = self.runner.vllm_config
        graphs = vllm_config.compilation_config.cudagraph_mode
        if not graphs.has_full_cudagraphs():
            return ()
        request_tokens = 1 + self.config.num_draft_tokens
        most_tokens = self.runner.max_num_reqs * request_tokens
        sizes = []
        for num_tokens in captured_tokens(vllm_config):
            if num_tokens <= most_tokens:
                sizes.append(num_tokens)
        return tuple(sorted(an_eighth_apart(sizes)))

    def drops_drafts(self, req_ids: Iterable[str]) -> bool:
        """Return whether a step of these requests verifies no drafts, see
        `drop_drafts_beside_chosen_tokens`.
        """
        asked = self.runner.sampler.logprob_token_ids_state
        # of any slot, also of one that is free now
        if not asked.num_token_ids.np.any():
            return False
        slot_of = self.runner.req_states.req_id_to_index
        slots = [slot_of[req_id] for req_id in req_ids]
        most_asked = int(asked.max_num_token_ids(slots))
        return most_asked > 0

    def bind(self) -> None:
        """Bind it to the model runner."""
        super().bind()
        if self.config.drafter != "none":
            plan_steps.apply(self, owner=self.runner)
            note_steps.apply(self, owner=self.runner)
            survive_verification.apply(
                self.runner,
                self.fail_in_step,
                owner=self.runner,
            )

    def begin(self, scheduled: Any) -> None:
        """Note the requests that have joined the batch (vLLM's `SchedulerOutput`), and
        copy the sealed text that is drafted from to the device.
        """
        index = self.index
        engine = self.engine
        lacks_text = index is not None and index.arena.lacks
        if not scheduled.scheduled_new_reqs and not lacks_text:
            return
        slots = self.runner.req_states.req_id_to_index
        opened = []
        ahead = []
        for new in scheduled.scheduled_new_reqs:
            text = new.prefill_token_ids or new.prompt_token_ids or []
            begun = LiveRequest.of(new.req_id, new, self._max_model_len)
            begun.length = len(text)
            if self.standalone is not None:
                begun.text = list(text[begun.start :])
            key = self._rules.key(begun.problem)
            # it may come back, preempted
            if self._requests.setdefault(new.req_id, begun) is begun:
                ahead.append((key, begun.ahead))
            self._begun.append(begun)
            slot = slots[new.req_id]
            opened.append((slot, key, begun.start))
        if index is None or engine is None or engine.history is None:
            return
        with engine.surviving():
            index.open(opened)
            for text in ahead:
                index.add(*text)
            if not engine.failed:
                index.arena.copy_sealed(engine.history.index)

    def end(self, scheduled: Any) -> None:
        """Close the requests that have ended or were preempted, which the runner still
        has.
        """
        finished = scheduled.finished_req_ids
        preempted = scheduled.preempted_req_ids or set()
        self._ended |= finished
        states = self.runner.req_states
        index = self.index
        # what the last step may have added
        step_tokens = self.config.num_draft_tokens + 2
        closed = []
        for req_id in sorted(finished | preempted):
            request = None
            if req_id in finished:
                request = self._requests.pop(req_id, None)
            slot = states.req_id_to_index.get(req_id)
            if slot is None or index is None:
                continue
            kept_tokens = 0
            if request is not None and request.record and self._rules.keeps_texts:
                num_computed = states.num_computed_tokens_np[slot]
                before = int(max(num_computed, states.prefill_len.np[slot]))
                begin = int(index.arena.tables.begin[slot])
                most_tokens = before + step_tokens - begin
                most_tokens = min(most_tokens, self._max_model_len)
                kept_tokens = max(0, most_tokens)
            closed.append((slot, kept_tokens))
        if closed and index is not None and self.engine is not None:
            with self.engine.surviving():
                index.close(closed, states.total_len.gpu)

    def start_step(self, scheduled: Any) -> None:
        """Note the step that the runner has begun."""
        scheduled = self.survival.as_run(scheduled)
        counts = scheduled.num_scheduled_tokens
        drafts = {}
        scheduled_drafts = scheduled.scheduled_spec_decode_tokens or {}
        for req_id, tokens in scheduled_drafts.items():
            drafts[req_id] = len(tokens)
        num_drafted = sum(drafts.values())
        decoded_tokens = len(counts) + num_drafted
        has_no_prompt = scheduled.total_num_scheduled_tokens == decoded_tokens
        decodes = has_no_prompt and not self._begun
        if drafts and self.drops_drafts(counts):
            # it is not timed: they may have been read
            drafts = {}
            decodes = False
        begun = self._begun
        ended = self._ended
        self._begun = []
        self._ended = set()
        self._step = Step(
            begun,
            ended,
            drafts,
            decodes,
            began=time.perf_counter(),
        )

    def read_plan(self, scheduled: Any) -> None:
        """Put the plan of a step that begins (vLLM's `SchedulerOutput`) in force."""
        if not self.plans_travel or not scheduled.total_num_scheduled_tokens:
            return
        self.in_force.plan = plan.SILENCE
        found = plan_of(scheduled)
        self.in_force.plan = found
        if found.error is not None:
            self.fail(DasError(found.error))
        if self.rehearsal is not None and found.num_draft_tokens:
            self.rehearsal.asked = True

    def _draft_no_more(self) -> None:
        self.survival.stop()

    def _draft_again(self) -> None:
        self.survival.start_again()

    def leaves_out(self) -> bool:
        """Return whether the present step verifies no drafts, and nothing is drafted or
        looked for at its end: it may end as one of an engine without a speculator.
        """
        runner = self.runner
        source = self.source
        if self.survival.drafts_no_more:
            return runner.execute_model_state is not None
        if source is None or source is not runner.speculator:
            return False
        if runner.pp_handler is not None or not self._silent:
            return False
        if runner.execute_model_state is None:
            return False
        batch = runner.execute_model_state.input_batch
        return batch.num_draft_tokens == 0 and not batch.has_structured_output_reqs

    @property
    def _silent(self) -> bool:
        """Whether nothing is drafted or looked for at the end of the present step."""
        found = self.in_force.plan
        return found is not None and found.silent

    def watch(self, output: Any) -> Any:
        """Have the plan of the next unscheduled step made when a step's output is on
        the host; return the output.
        """
        step = self._step
        self._step = None
        manager = self.runner.adaptive_verification
        admitted = None
        # it takes part in the warm-up of vLLM 0.29 too
        if isinstance(manager, Admission):
            admitted = manager.admitted
            manager.admitted = None
        if step is None or output is None or self.planner is None:
            return output
        # there were none, whatever was admitted before the step failed
        if self.survival.drafts_no_more:
            admitted = None
        else:
            step.offer = self.source and self.source.offer
            step.kinds = self.speculation and self.speculation.kinds()
        stock = output.get_output
        planner = self.planner

        def get_output() -> Any:
            planner.count_last()
            result = stock()  # waits for the device
            with self.surviving():
                step.req_ids = result.req_ids
                if admitted is not None:
                    step.admitted = admitted.numpy().astype(np.int64)
                if self.speculation is not None:
                    step.calls = self.speculation.take_ended_calls()
                if self.rehearsal is not None and step.verified is not None:
                    self.rehearsal.verified += int(step.verified.sum())
                    for got in result.sampled_token_ids:
                        num_accepted = len(got) - 1
                        self.rehearsal.accepted += max(0, num_accepted)
                arrived = time.perf_counter()
                output = Output(step, result.sampled_token_ids, arrived)
                next_plan = planner.process_output(output)
                setattr(result, plan.ATTRIBUTE, next_plan)
            return result

        output.get_output = get_output
        return output

    def rehearsed(self) -> dict[str, Any]:
        """As `WorkerState.rehearsed`; its request is not of those that end with the
        next step.
        """
        self._requests = {}
        self._begun = []
        self._ended = set()
        self._step = None
        if self.index is not None:
            self.index.forget_outcomes()
        return super().rehearsed()

    def refresh(self, message: Refresh) -> Refreshed:
        """Bring what is on the device up to date too, see `WorkerState.refresh`."""
        answer = super().refresh(message)
        if self.index is not None:
            self.index.arena.forget()
            self.index.forget_chances()
        return answer

    def map_guest_history(self, files: list[str]) -> None:
        """Map files with the history of problems that are at home on other nodes, see
        `WorkerState.map_guest_history`; what arrived is copied to the device before the
        next steps.
        """
        super().map_guest_history(files)
        if self.index is not None:
            self.index.arena.forget_missing()

    def own_stats(self) -> EngineStats:
        """Return the figures of this worker with the arena's, see
        `WorkerState.own_stats`.
        """
        stats = super().own_stats()
        if self.index is not None:
            live_bytes = self.index.words.nbytes
            num_short = self.index.arena.short
            stats["live_bytes"] = live_bytes
            if num_short:
                logger.warning(
                    "das: das.history.device_bytes=%d is full: %d texts found no room"
                    " on the device and are not drafted from: raise it",
                    live_bytes,
                    num_short,
                )
        return stats

    def loaded(self) -> None:
        """Take over what vLLM has just loaded, see `WorkerState.loaded`; a model drafts
        as the controller says.
        """
        super().loaded()
        if self.draft_weights is not None:
            # where veRL looks for a drafter that it sends weights to
            self.runner.drafter = self.runner.speculator
        if self._limits is not None:  # a model drafts
            self.speculation = Speculation(
                self.runner.speculator,
                self.config,
                self.runner.req_states.all_token_ids.gpu,
                self.engine,
                self.source,
                self._limits,
                self._confidence,
                self.in_force,
                self.fail_in_step,
            )


_RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"


@patch(f"{_RUNNER}.execute_model", since="0.29", needs="scheduler_output")
def note_steps(stock: Any, state: DeviceWorkerState) -> Any:
    """Without it nobody knows which problem a request is about and where it writes, who
    carried drafts into a step and how long that took; and the text of a request that
    ended is overwritten before its siblings have drafted from it (V2 runner). Remove
    this patch when vLLM hands speculators the requests of a step and tells them which
    have ended.
    """

    def execute_model(
        scheduler_output: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if kwargs.get("dummy_run") or warm_up(scheduler_output.num_scheduled_tokens):
            return stock(scheduler_output, *args, **kwargs)
        with state.surviving():
            state.read_plan(scheduler_output)
        state.begin_standalone(scheduler_output)
        if state.planner is None:
            return state.survival.run_step(stock, scheduler_output, *args, **kwargs)
        if scheduler_output.finished_req_ids or scheduler_output.preempted_req_ids:
            with state.surviving():
                state.end(scheduler_output)
        output = state.survival.run_step(stock, scheduler_output, *args, **kwargs)
        with state.surviving():
            state.begin(scheduler_output)
            if scheduler_output.total_num_scheduled_tokens:
                state.start_step(scheduler_output)
        return output

    return execute_model


@patch(f"{_RUNNER}.sample_tokens", since="0.29")
def plan_steps(stock: Any, state: DeviceWorkerState) -> Any:
    """Without it no figures of the rollouts are logged, no drafts are planned, and
    each step without drafts does a speculator's work for none (V2 runner). Remove this
    patch when vLLM reports the tokens of each decode step to plug-ins, lets a worker
    plan the drafts, and leaves out that work.
    """
    runner = state.runner
    nothing = torch.empty(
        runner.max_num_reqs, 0, dtype=torch.int64, device=runner.device
    )

    def sample_tokens(
        grammar_output: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        grammar_output = state.survival.masks(grammar_output)
        if not state.leaves_out():
            return state.watch(stock(grammar_output, *args, **kwargs))
        speculator = runner.speculator
        steps = runner.num_speculative_steps
        if state.source is not None:
            state.source.offer = None
        batch = runner.execute_model_state.input_batch
        no_drafts = nothing[: batch.num_reqs]
        runner.draft_tokens_handler.set_draft_tokens(batch, no_drafts)
        runner.speculator = None
        runner.num_speculative_steps = 0
        try:
            return state.watch(stock(grammar_output, *args, **kwargs))
        finally:
            runner.speculator = speculator
            runner.num_speculative_steps = steps

    return sample_tokens
