"""das-adapter inside one vLLM worker: what is bound to its model runner, and the calls the host can make."""

from __future__ import annotations

import functools
import logging
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from das_adapter import __version__
from das_adapter.config import DasConfig
from das_adapter.core.noise import row_keys
from das_adapter.engine.drafters.neural import DraftWeights, take_loaded_drafter
from das_adapter.engine.sampling.verification import KeyedRejectionSampler, KeyedSampler
from das_adapter.errors import DasError, UnsupportedHost
from das_adapter.patching import patch
from das_adapter.protocol.label import Label
from das_adapter.protocol.messages import Refresh, Refreshed, Started
from das_adapter.protocol.metrics import Counters, EngineStats, collapsed

logger = logging.getLogger("das_adapter")


class WorkerState:
    """The state of one worker. `call` is reached from the host by `collective_rpc("das_rpc", (command, payload))`."""

    def __init__(self, runner: Any, config: DasConfig):
        self.config = config
        self.runner = runner
        self.drafter: Any = getattr(runner, "drafter", None) if config.controlled else None
        self.counters: Counters = self.drafter.counters if self.drafter else Counters()
        self.sampler: KeyedSampler | None = None
        self.drafts: list[int] | None = None
        """Draft tokens that each request carried into the step that is going on; None: nobody had any."""
        self.began = 0.0
        """When that step began, seconds."""
        self._labels: dict[str, Label] = {}
        self._seeds: dict[str, int] = {}
        self.draft_weights = DraftWeights(runner, config, self.seed) if config.neural else None

    def bind(self) -> None:
        """Bind it to the model runner: drafter, samplers, and the parts of a step that are watched."""
        if self.drafter:
            self.drafter.runner, self.drafter.seed, self.drafter.label = self.runner, self.seed, self.label
        if self.draft_weights:
            take_loaded_drafter.apply(self.draft_weights.take_loaded, owner=self.runner)
        else:
            self._draft_up_to_the_end()
        if self.config.keyed:
            self._install_keyed_samplers()
        for step_patch in (time_steps, key_rows, count_tokens):
            step_patch.apply(self, owner=self.runner)

    def call(self, command: str, payload: dict[str, Any]) -> Any:
        """Run a command of the host: `hello`, `refresh` or `stats`. Raises only for an unknown command: a worker that
        raises during a weight sync would leave the trainer waiting for ever."""
        commands: dict[str, Callable[..., Any]] = {"hello": self._hello, "refresh": self._refresh, "stats": self._stats}
        if command not in commands:
            raise DasError(f"das_rpc: found command {command!r}, allowed: {', '.join(commands)}")
        try:
            return commands[command](**payload)
        except Exception as error:
            self.counters.error = repr(error)
            logger.exception("das: %s failed; decoding goes on without drafts", command)
            return Refreshed(error=repr(error))

    def label(self, req_id: str) -> Label:
        """Return the label of a request."""
        label = self._labels.get(req_id)
        if label is None:
            label = self._labels[req_id] = Label.of(self.runner.requests[req_id].sampling_params.extra_args)
        return label

    def seed(self, req_id: str) -> int:
        """Return the seed of a request's keyed noise, 64 bits."""
        seed = self._seeds.get(req_id)
        if seed is None:
            seed = self.label(req_id).seed
            if seed is None:
                seed = self.runner.requests[req_id].sampling_params.seed
            if seed is None:  # asked for no particular tokens
                seed = random.getrandbits(63)
            self._seeds[req_id] = seed = int(seed) & (2**64 - 1)
        return seed

    def row_keys(self) -> torch.Tensor:
        """Return the keys of the rows that are sampled, int64 [rows]: request after request, its drafted positions
        and one more."""
        batch = self.runner.input_batch
        seeds = np.fromiter(map(self.seed, batch.req_ids), dtype=np.uint64, count=batch.num_reqs)
        positions = batch.num_tokens_no_spec[: batch.num_reqs].astype(np.int64)
        if self.drafts is not None:
            counts = np.asarray(self.drafts, dtype=np.int64) + 1
            first = np.cumsum(counts) - counts
            seeds, positions = np.repeat(seeds, counts), np.repeat(positions - first, counts)
            positions += np.arange(len(positions))
        return torch.from_numpy(row_keys(seeds, positions).view(np.int64))

    def count(self, sampled: list[list[int]], drafts: list[int] | None) -> None:
        """Count the step that ends: the tokens that each request got, and the draft tokens that each carried into
        it."""
        training = [self.label(req_id).record for req_id in self.runner.input_batch.req_ids]
        if any(training):
            counted = [got if record else [] for record, got in zip(training, sampled, strict=True)]
            self.counters.step(counted, drafts or [0] * len(sampled), time.perf_counter() - self.began)

    def _hello(self) -> Started:
        return Started(version=__version__, drafter=self.config.drafter, sampler=type(self.runner.sampler).__name__)

    def _refresh(self, **payload: Any) -> Refreshed:
        answer = self.drafter.refresh(Refresh.of(payload)) if self.drafter else Refreshed()
        self.counters.alarm = self.draft_weights.refresh() if self.draft_weights else None
        if self.counters.alarm:
            logger.error("das: %s", self.counters.alarm)
        for known in (self._seeds, self._labels):
            for req_id in known.keys() - self.runner.requests.keys():
                del known[req_id]
        return answer

    def _stats(self) -> EngineStats:
        counters = self.counters
        if collapsed(vars(counters)):
            counters.alarm = (
                f"acceptance of the {self.config.drafter} drafter collapsed: {counters.accepted_tokens} of "
                f"{counters.draft_tokens} draft tokens"
            )
        stats = counters.take()
        return stats | self.drafter.stats() if self.drafter else stats

    def _draft_up_to_the_end(self) -> None:
        """Raise the length up to which vLLM drafts: when one request comes within num_speculative_tokens of
        max_model_len, it skips the drafter and gives the whole batch junk drafts. Ours end before it, and the scheduler
        clips as well."""
        if hasattr(self.runner, "effective_drafter_max_model_len"):
            self.runner.effective_drafter_max_model_len += self.config.num_draft_tokens + 1

    def _install_keyed_samplers(self) -> None:
        runner, stock = self.runner, getattr(self.runner, "sampler", None)
        if stock is None or not hasattr(runner.input_batch, "num_tokens_no_spec"):
            raise UnsupportedHost(
                "das.verify.noise='keyed' needs vLLM's V1 model runner: set VLLM_USE_V2_MODEL_RUNNER=0 "
                f"in the engine's environment (found {type(runner).__module__}.{type(runner).__name__})"
            )
        runner.sampler = self.sampler = KeyedSampler(logprobs_mode=stock.logprobs_mode)
        if hasattr(runner, "rejection_sampler"):
            runner.rejection_sampler = KeyedRejectionSampler(self.sampler, runner.speculative_config, runner.device)


_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"


@patch(f"{_RUNNER}.execute_model", since="0.24")
def time_steps(stock: Any, state: WorkerState) -> Any:
    """Without it nobody knows how long decode steps take."""

    @functools.wraps(stock)
    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        state.began = time.perf_counter()
        if state.drafter:
            state.drafter.begin_step(scheduler_output, state.began)
        return stock(scheduler_output, *args, **kwargs)

    return execute_model


@patch(f"{_RUNNER}._sample", since="0.24")
def key_rows(stock: Any, state: WorkerState) -> Any:
    """Without it the samplers have no keys, and nobody knows who carried a draft."""

    @functools.wraps(stock)
    def sample(logits: torch.Tensor, spec_decode_metadata: Any) -> Any:
        state.drafts = None if spec_decode_metadata is None else spec_decode_metadata.num_draft_tokens
        if state.drafter:
            state.drafter.carried = state.drafts
        if state.sampler is not None:
            state.sampler.keys = state.row_keys().to(logits.device, non_blocking=True)
        return stock(logits, spec_decode_metadata)

    return sample


@patch(f"{_RUNNER}.sample_tokens", since="0.24")
def count_tokens(stock: Any, state: WorkerState) -> Any:
    """Without it no figures of the rollouts are logged. It ends a step, and drafts as well."""
    runner = state.runner

    @functools.wraps(stock)
    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        output = stock(*args, **kwargs)
        drafts, state.drafts = state.drafts, None
        sampled = getattr(output, "sampled_token_ids", None)
        if not sampled and runner.use_async_scheduling:  # the tokens are still on the device: one per request
            unread = runner.discard_request_mask.np[: runner.input_batch.num_reqs]
            sampled = [[] if skip else [0] for skip in unread]
        if sampled:
            state.count(sampled, drafts)
        return output

    return sample_tokens
