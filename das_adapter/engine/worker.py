"""das-adapter inside one vLLM worker: what is bound to its model runner, and the calls the host can make."""

from __future__ import annotations

import functools
import logging
import random
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from das_adapter import __version__
from das_adapter.config import DasConfig
from das_adapter.core.noise import row_keys
from das_adapter.engine.drafters.neural import DraftWeights
from das_adapter.errors import DasError, UnsupportedHost
from das_adapter.protocol.engine_args import RECORD_ARG, SEED_ARG
from das_adapter.protocol.metrics import Counters, collapsed

if TYPE_CHECKING:
    from das_adapter.engine.sampling.verification import KeyedSampler

logger = logging.getLogger("das_adapter")


class DasWorker:
    """The state of one worker. `call` is reached from the host by `collective_rpc("das_rpc", (command, payload))`."""

    def __init__(self, runner: Any, config: DasConfig):
        self.config = config
        self.runner = runner
        self.drafter: Any = getattr(runner, "drafter", None) if config.own else None
        self.counters: Counters = self.drafter.counters if self.drafter else Counters()
        self._seeds: dict[str, int] = {}
        self._validation: dict[str, bool] = {}
        if self.drafter:
            self.drafter.runner, self.drafter.seed, self.drafter.validates = runner, self._seed, self._validates
        if not config.neural:
            self._draft_up_to_the_end()
        self.draft_weights = DraftWeights(runner, config, self._seed) if config.neural else None
        self._watch_steps(self._install_keyed_samplers() if config.keyed else None)

    def call(self, command: str, payload: dict[str, Any]) -> Any:
        """Run a command of the host: `hello`, `refresh` or `stats`. Raises nothing but on an unknown command:
        a worker that raises during a weight sync would leave the trainer waiting for ever."""
        if command not in ("hello", "refresh", "stats"):
            raise DasError(f"das_rpc: found command {command!r}, allowed: hello, refresh, stats")
        try:
            return getattr(self, f"_{command}")(**payload)
        except Exception as error:
            self.counters.error = repr(error)
            logger.exception("das: %s failed; decoding goes on without drafts", command)
            return {"error": repr(error)}

    def _hello(self) -> dict[str, Any]:
        return {
            "version": __version__,
            "drafter": type(self.drafter).__name__ if self.drafter else self.config.drafter,
            "sampler": type(self.runner.sampler).__name__,
        }

    def _refresh(self, version: int, **news: Any) -> dict[str, Any]:
        done = self.drafter.refresh(version, **news) if self.drafter else {}
        self.counters.alarm = self.draft_weights.refresh() if self.draft_weights else None
        if self.counters.alarm:
            logger.error("das: %s", self.counters.alarm)
        for known in (self._seeds, self._validation):
            for req_id in known.keys() - self.runner.requests.keys():
                del known[req_id]
        return done

    def _stats(self) -> dict[str, Any]:
        if collapsed(vars(self.counters)):
            self.counters.alarm = f"acceptance of the {self.config.drafter} drafter collapsed"
            logger.error("das: %s: %d of %d draft tokens", self.counters.alarm,
                         self.counters.accepted_tokens, self.counters.draft_tokens)  # fmt: skip
        stats = self.counters.take()
        return stats | (self.drafter.stats() if self.drafter else {})

    def _draft_up_to_the_end(self) -> None:
        """When one request comes within num_speculative_tokens of max_model_len, vLLM skips the drafter and gives the
        whole batch junk drafts. Ours end before it, and the scheduler clips as well: raise that limit."""
        if hasattr(self.runner, "effective_drafter_max_model_len"):
            self.runner.effective_drafter_max_model_len += self.config.num_draft_tokens + 1

    def _install_keyed_samplers(self) -> KeyedSampler:
        from das_adapter.engine.sampling.verification import KeyedRejectionSampler, KeyedSampler

        runner, stock = self.runner, getattr(self.runner, "sampler", None)
        if stock is None or not hasattr(runner.input_batch, "num_tokens_no_spec"):
            raise UnsupportedHost(
                "das.verify.noise='keyed' needs vLLM's V1 model runner: set VLLM_USE_V2_MODEL_RUNNER=0 "
                f"in the engine's environment (found {type(runner).__module__}.{type(runner).__name__})"
            )
        runner.sampler = sampler = KeyedSampler(logprobs_mode=stock.logprobs_mode)
        if hasattr(runner, "rejection_sampler"):
            runner.rejection_sampler = KeyedRejectionSampler(sampler, runner.speculative_config, runner.device)
        return sampler

    def _watch_steps(self, sampler: KeyedSampler | None) -> None:
        """Wrap the parts of a step: `execute_model` begins it, `_sample` gets the keys of its rows, and
        `sample_tokens`, which drafts as well, ends it and is counted."""
        runner, counters, drafter = self.runner, self.counters, self.drafter
        sample, sample_tokens, execute_model = runner._sample, runner.sample_tokens, runner.execute_model
        drafts: list[int] | None = None
        begin = 0.0

        @functools.wraps(execute_model)
        def begun(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal begin
            begin = time.perf_counter()
            if drafter:
                drafter.begin_step(scheduler_output, begin)
            return execute_model(scheduler_output, *args, **kwargs)

        @functools.wraps(sample)
        def keyed(logits: torch.Tensor, spec_decode_metadata: Any) -> Any:
            nonlocal drafts
            drafts = None if spec_decode_metadata is None else spec_decode_metadata.num_draft_tokens
            if drafter:
                drafter.carried = drafts
            if sampler is not None:
                keys = torch.from_numpy(self._keys(drafts).view(np.int64))
                sampler.keys = keys.to(logits.device, non_blocking=True)
            return sample(logits, spec_decode_metadata)

        @functools.wraps(sample_tokens)
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal drafts
            output, drafted, drafts = sample_tokens(*args, **kwargs), drafts, None
            sampled = getattr(output, "sampled_token_ids", None)
            if not sampled and runner.use_async_scheduling:  # the tokens are still on the device: one per request
                unread = runner.discard_request_mask.np[: runner.input_batch.num_reqs]
                sampled = [[] if skip else [0] for skip in unread]
            if sampled:
                apart = [self._validates(req_id) for req_id in runner.input_batch.req_ids]
                if not all(apart):
                    training = [[] if skip else got for skip, got in zip(apart, sampled, strict=True)]
                    counters.step(training, drafted or [0] * len(sampled), time.perf_counter() - begin)
            return output

        runner.execute_model, runner._sample, runner.sample_tokens = begun, keyed, counted

    def _keys(self, drafts: list[int] | None) -> np.ndarray:
        """uint64 [rows]: request after request, its drafted positions and one more."""
        batch = self.runner.input_batch
        seeds = np.fromiter(map(self._seed, batch.req_ids), dtype=np.uint64, count=batch.num_reqs)
        positions = batch.num_tokens_no_spec[: batch.num_reqs].astype(np.int64)
        if drafts is not None:
            counts = np.asarray(drafts, dtype=np.int64) + 1
            first = np.cumsum(counts) - counts
            seeds, positions = np.repeat(seeds, counts), np.repeat(positions - first, counts)
            positions += np.arange(len(positions))
        return row_keys(seeds, positions)

    def _validates(self, req_id: str) -> bool:
        validates = self._validation.get(req_id)
        if validates is None:
            extra = self.runner.requests[req_id].sampling_params.extra_args or {}
            self._validation[req_id] = validates = not extra.get(RECORD_ARG, 1)
        return validates

    def _seed(self, req_id: str) -> int:
        seed = self._seeds.get(req_id)
        if seed is None:
            params = self.runner.requests[req_id].sampling_params
            seed = (params.extra_args or {}).get(SEED_ARG, params.seed)
            if seed is None:  # asked for no particular tokens
                seed = random.getrandbits(63)
            self._seeds[req_id] = seed = int(seed) & (2**64 - 1)
        return seed
