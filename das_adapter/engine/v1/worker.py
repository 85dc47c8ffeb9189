"""das-adapter inside one worker that runs vLLM's V1 model runner: what is bound to it,
and the keys of its noise.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from das_adapter.config import DasConfig
from das_adapter.engine.requests import LiveRequest, label_of
from das_adapter.engine.v1.keyed_sample import Keys
from das_adapter.engine.v1.model_source import Drafts
from das_adapter.engine.v1.neural_drafts import KeyedDrafts, NeuralSource
from das_adapter.engine.v1.proposer import Proposer
from das_adapter.engine.v1.verification import (
    KeyedRejectionSampler,
    KeyedSampler,
    beside,
    expands,
)
from das_adapter.engine.worker import WorkerState
from das_adapter.patching import patch


class Batch(NamedTuple):
    """What is known of the requests of the runner's batch."""

    seeds: torch.Tensor
    """Seeds of their noise on the runner's device, int64 [requests]; 0 where it is
    stock's.
    """
    training: list[bool]
    """Whether each belongs to a training rollout."""


class HostWorkerState(WorkerState):
    """The state of one worker on the V1 runner, whose drafts are made on the host. All
    ranks draft.
    """

    model_runner = 1

    def __init__(self, runner: Any, config: DasConfig):
        self.drafter: Proposer | None = None
        """The drafter that the controller asks; None: vLLM's own drafts in every step,
        or nobody does.
        """
        if config.controlled:
            if config.neural:
                self.drafter = Proposer(runner.vllm_config)
            else:
                self.drafter = getattr(runner, "drafter", None)
        super().__init__(runner, config, self.drafter)
        self.sampler: KeyedSampler | None = None
        self.drafts: list[int] | None = None
        """Draft tokens that each request carried into the step that is going on; None:
        nobody had any.
        """
        self.began = 0.0
        """When the step that is going on began, seconds."""
        self.drafts_no_more = False
        """Whether drafting has failed in a place that the controller does not see."""
        self._req_ids: list[str] = []
        """Requests of the batch for which `_batch` was made."""
        no_seeds = torch.zeros(0, dtype=torch.int64)
        self._batch = Batch(no_seeds, [])

    def bind(self) -> None:
        """Bind it to the model runner: drafter, samplers, and the parts of a step that
        are watched.
        """
        super().bind()
        if self.drafter:
            self.drafter.runner = self.runner
        if not self.draft_weights:
            self.draft_up_to_the_end()
        runner = self.runner
        if self.config.keyed:
            logprobs_mode = runner.sampler.logprobs_mode
            self.sampler = KeyedSampler(logprobs_mode)
            runner.sampler = self.sampler
            if hasattr(runner, "rejection_sampler"):
                runner.rejection_sampler = KeyedRejectionSampler(
                    self.sampler,
                    runner.speculative_config,
                    runner.device,
                )
        elif self.drafter and self.drafter.model_source:
            tell_probabilities = self.drafter.model_source.tell_probabilities
            runner.rejection_sampler.register_forward_pre_hook(tell_probabilities)
        if self.config.controlled:
            # Steps without drafts replay the full CUDA graphs that an engine without
            # speculation captures. vLLM's V1 runner captures decode steps for K + 1
            # tokens of every request instead, which drafts of any length never are, and
            # rounds all sizes up to multiples of K + 1. Drafted steps replay piecewise
            # graphs.
            for owner in (runner, runner.cudagraph_dispatcher):
                if hasattr(owner, "uniform_decode_query_len"):
                    owner.uniform_decode_query_len = 1
        time_steps.apply(self, owner=runner)
        key_rows.apply(self, owner=runner)
        count_tokens.apply(self, owner=runner)
        emit_drafts_in_time.apply(self, owner=runner)
        # else the drafter takes the place of what would fail
        if not (self.drafter and self.draft_weights):
            survive_drafting.apply(self, owner=runner)

    def response(self, req_id: str) -> LiveRequest | None:
        request = self.runner.requests.get(req_id)
        if request is None or request.prompt_token_ids is None:
            return None
        longest = self.runner.max_model_len
        live = LiveRequest.of(req_id, request, longest)
        written_ahead = request.prompt_token_ids[live.start :]
        live.text = [*written_ahead, *request.output_token_ids]
        return live

    def batch(self) -> Batch:
        """Return what is known of the requests of the runner's batch."""
        req_ids = self.runner.input_batch.req_ids
        if req_ids == self._req_ids:
            return self._batch
        seeds = []
        training = []
        for req_id in req_ids:
            request = self.runner.requests[req_id]
            seed = 0
            if self.config.keyed:
                seed = request.sampling_params.seed
            seeds.append(seed)
            training.append(label_of(request).record)
        host_seeds = torch.tensor(seeds, dtype=torch.int64)
        device = self.runner.device
        device_seeds = host_seeds.to(device, non_blocking=True)
        self._req_ids = list(req_ids)
        self._batch = Batch(device_seeds, training)
        return self._batch

    def keys(self, metadata: Any) -> Keys:
        """Return the keys of the rows that are sampled: request after request, its
        drafted positions and one more.

        The positions are those that the policy has just read, on the device: under
        asynchronous scheduling the host does not know how many draft tokens of the step
        before were accepted. `metadata`: as in `_sample`.
        """
        if metadata is None:
            return self.first_keys(None)
        seeds = self.batch().seeds
        num_drafted = np.asarray(metadata.num_draft_tokens)
        num_rows = num_drafted + 1
        batch_rows = np.arange(len(seeds))
        requests = np.repeat(batch_rows, num_rows)
        row_seeds = seeds[beside(requests, seeds)]
        row_places = metadata.logits_indices.long()
        return Keys(row_seeds, self._positions[row_places])

    @property
    def _positions(self) -> torch.Tensor:
        """Positions of the tokens that the policy reads, int64 [tokens], on the
        device.
        """
        positions: Any = self.runner.positions
        return getattr(positions, "gpu", positions)

    def first_rows(self, drafted: Sequence[int]) -> torch.Tensor:
        """Return each request's first row of logits, int64 [batch], where it has so
        many drafted positions and one more.
        """
        num_drafted = np.asarray(drafted, dtype=np.int64)
        num_rows = num_drafted + 1
        first_rows = np.cumsum(num_rows) - num_rows
        return beside(first_rows, self.batch().seeds)

    def first_keys(self, drafted: Sequence[int] | None) -> Keys:
        """Return the keys of each request's first row; None: nobody has a drafted
        position.
        """
        seeds = self.batch().seeds
        behind = len(seeds) + 1
        ends = self.runner.query_start_loc.gpu[1:behind]
        places = ends.long() - 1
        if drafted is not None:
            num_drafted = np.asarray(drafted, dtype=np.int64)
            places = places - beside(num_drafted, seeds)
        return Keys(seeds, self._positions[places])

    def count(
        self,
        sampled: list[list[int]],
        drafts: list[int] | None,
        training: list[bool],
    ) -> None:
        """Count a step; `training`: whether each request belongs to a training
        rollout.
        """
        if self.rehearsal is not None and drafts is not None:
            self.rehearsal.verified += sum(drafts)
            for tokens in sampled:
                accepted = len(tokens) - 1
                self.rehearsal.accepted += max(0, accepted)
        if not any(training):
            return
        got = []
        for record, tokens in zip(training, sampled, strict=True):
            num_tokens = len(tokens) if record else 0
            got.append(num_tokens)
        step_s = time.perf_counter() - self.began
        nothing = [0] * len(got)
        carried = drafts or nothing
        counted = partial(
            self.counters.count_step,
            got,
            carried,
            step_s,
        )
        if self.drafter:
            self.drafter.later(counted)
        else:
            counted()

    def begin_step(self, scheduled: Any) -> None:
        """Note that a step begins (vLLM's `SchedulerOutput`)."""
        # it may bring everything up to date, which is no part of a step
        self.begin_standalone(scheduled)
        self.began = time.perf_counter()
        if self.drafter:
            self.drafter.begin_step(scheduled, self.began)

    @property
    def looks_up_alone(self) -> bool:
        """Whether drafts are looked up on the host, with no model that other ranks run
        a part of.
        """
        drafter = self.drafter
        return drafter is not None and drafter.model_source is None

    def _draft_no_more(self) -> None:
        self.drafts_no_more = True

    def _draft_again(self) -> None:
        self.drafts_no_more = False

    def draft_up_to_the_end(self) -> None:
        """Raise the length up to which vLLM drafts: when one request comes within
        num_speculative_tokens of max_model_len, it skips the drafter and gives the
        whole batch junk drafts. Ours end before it, and the scheduler clips as well.
        """
        if hasattr(self.runner, "effective_drafter_max_model_len"):
            beyond = self.config.num_draft_tokens + 1
            self.runner.effective_drafter_max_model_len += beyond

    def loaded(self) -> None:
        """Take over what vLLM has just loaded, see `WorkerState.loaded`; a drafter with
        weights draws with the policy's noise, and the controller runs it.
        """
        super().loaded()
        if not self.draft_weights:
            return
        noise = None
        if self.config.keyed and self._draws_tokens():
            noise = KeyedDrafts(
                self.runner,
                seeds=lambda: self.batch().seeds,
            )
        drafter = self.drafter
        if drafter:
            source = drafter.model_source
            assert isinstance(source, NeuralSource)
            source.noise = noise
            drafter.load_model(self.runner.model)

    def _draws_tokens(self) -> bool:
        """Return whether a drafter with weights can draw tokens by their positions."""
        options = self.config.draft.options
        for name in ("parallel_drafting", "use_heterogeneous_vocab"):
            if options.get(name):  # it drafts the most likely ones
                return False
        # Under M-RoPE a drafter knows no positions in the text.
        return hasattr(self.runner.drafter, "positions")


_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"


@patch(f"{_RUNNER}.execute_model", since="0.24", needs="scheduler_output")
def time_steps(stock: Any, state: HostWorkerState) -> Any:
    """Without it nobody knows how long decode steps take. Remove this patch when vLLM
    reports the time of each decode step to plug-ins.
    """

    def execute_model(
        scheduler_output: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        state.begin_step(scheduler_output)
        output = stock(scheduler_output, *args, **kwargs)
        if state.drafter:
            state.drafter.catch_up()
        return output

    return execute_model


@patch(f"{_RUNNER}._sample", since="0.24", needs="logits, spec_decode_metadata")
def key_rows(stock: Any, state: HostWorkerState) -> Any:
    """Without it the samplers have no keys, and nobody knows who carried a draft.
    Remove this patch when vLLM's V1 samplers draw with noise keyed by seed and
    position.
    """

    def sample(logits: torch.Tensor, spec_decode_metadata: Any) -> Any:
        drafted = getattr(spec_decode_metadata, "num_draft_tokens", None)
        if drafted is not None and not any(drafted):
            # vLLM 0.32 describes steps without drafts too
            spec_decode_metadata = None
            drafted = None
        sampling = state.runner.input_batch.sampling_metadata
        drops = False
        if state.sampler is not None:
            drops = not expands(sampling)
        state.drafts = None if drops else drafted
        if state.drafter:
            state.drafter.carried = state.drafts
            state.drafter.drops = drops
        try:
            if state.sampler is not None:
                state.sampler.keys = state.keys(spec_decode_metadata)
            return stock(logits, spec_decode_metadata)
        except Exception as error:
            # nothing of das-adapter's was called
            if spec_decode_metadata is None and state.sampler is None:
                raise
            state.fail_in_step(error)
            return without_drafts(logits, drafted)
        finally:
            if state.sampler is not None:
                state.sampler.keys = None

    def without_drafts(
        logits: torch.Tensor,
        drafted: Sequence[int] | None,
    ) -> Any:
        """Draw one token of each request, as a step without drafts does; `drafted`:
        draft tokens of each, None: nobody had any.
        """
        state.drafts = None
        if state.drafter:
            state.drafter.carried = None
        if state.sampler is not None:
            state.sampler.keys = state.first_keys(drafted)
        if drafted is not None:
            logits = logits[state.first_rows(drafted)]
        return stock(logits, None)

    return sample


@patch(
    f"{_RUNNER}.propose_draft_token_ids",
    since="0.24",
    needs="scheduler_output, sampled_token_ids",
)
def survive_drafting(stock: Any, state: HostWorkerState) -> Any:
    """Without it a failure of vLLM's own part in drafting ends the engine. Remove this
    patch when vLLM survives a drafter's failure.
    """

    def propose_draft_token_ids(
        scheduler_output: Any,
        sampled_token_ids: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        num_requests = len(sampled_token_ids)
        nothing: Drafts = [[] for _ in range(num_requests)]
        runner = state.runner
        ranks = runner.parallel_config.tensor_parallel_size
        alone = ranks == 1 or state.looks_up_alone
        may_fail = alone and not runner.use_async_scheduling
        if state.drafts_no_more and may_fail:
            return nothing
        try:
            return stock(
                scheduler_output,
                sampled_token_ids,
                *args,
                **kwargs,
            )
        except Exception as error:
            # the other ranks, or the step that is scheduled, count on these drafts
            if not may_fail:
                raise
            state.fail_in_step(error)
            return nothing

    return propose_draft_token_ids


@patch(f"{_RUNNER}.sample_tokens", since="0.24")
def count_tokens(stock: Any, state: HostWorkerState) -> Any:
    """Without it no figures of the rollouts are logged. It ends a step, and drafts as
    well. Under asynchronous scheduling the tokens are still on the device: they are
    counted when vLLM has them on the host. Remove this patch when vLLM reports the
    tokens of each decode step to plug-ins.
    """

    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        output = stock(*args, **kwargs)
        drafts = state.drafts
        state.drafts = None
        arrives = getattr(output, "get_output", None)
        sampled: Any = getattr(output, "sampled_token_ids", None)
        if not sampled and arrives is None:
            return output
        training = state.batch().training
        if arrives is None:
            with state.surviving():
                state.count(sampled, drafts, training)
            return output

        def get_output() -> Any:
            arrived = arrives()
            arrived_tokens = arrived.sampled_token_ids
            if arrived_tokens:
                with state.surviving():
                    state.count(arrived_tokens, drafts, training)
            return arrived

        output.get_output = get_output
        return output

    return sample_tokens


@patch(f"{_RUNNER}.take_draft_token_ids", since="0.24")
def emit_drafts_in_time(stock: Any, state: HostWorkerState) -> Any:
    """Without it vLLM takes no drafts: they are looked for beside its scheduler's work.
    Remove this patch when vLLM asks a `custom_class` drafter for its drafts after the
    step.
    """

    def take_draft_token_ids() -> Any:
        if state.drafter:
            state.drafter.emit_drafts()
        return stock()

    return take_draft_token_ids
