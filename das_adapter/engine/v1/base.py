"""The base of das-adapter's drafters. vLLM runs them as proposers (`speculative_config.method: custom_class`)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from vllm.config import VllmConfig

from das_adapter.config import parse
from das_adapter.protocol.decision_log import DecisionLog
from das_adapter.protocol.engine_args import SETTINGS_KEY
from das_adapter.protocol.label import Label
from das_adapter.protocol.messages import Refresh, Refreshed
from das_adapter.protocol.metrics import Counters, EngineStats, collapsed

logger = logging.getLogger("das_adapter")


class Drafter:
    """A drafter that can fail, or draft nothing useful, without harming the rollout.

    `runner` (vLLM's model runner), `seed` (the noise seed of a request id) and `label` (of a request id) are bound by
    `WorkerState` before the first step. The class has no attribute `model`, by which vLLM and the hosts would take it
    for a drafter with weights.
    """

    def __init__(self, vllm_config: VllmConfig):
        config = parse(vllm_config.additional_config[SETTINGS_KEY])
        assert config is not None and vllm_config.speculative_config is not None
        self.config = config
        self.counters = Counters()
        self.runner: Any = None
        self.seed: Callable[[str], int] = hash
        self.label: Callable[[str], Label] = lambda _: Label()
        self.carried: list[int] | None = None
        """Draft tokens that each request of the batch carried into the step being sampled; set by `WorkerState`."""
        self.log: DecisionLog | None = None
        """Where its decisions are written; None: nowhere."""
        parallel = vllm_config.parallel_config
        self.ranks = parallel.tensor_parallel_size
        self.leads = parallel.rank % self.ranks == 0
        """Whether vLLM takes this rank's drafts: the first of the tensor-parallel ranks, which sample alike."""
        self._max_model_len = vllm_config.model_config.max_model_len
        self._vocabulary = vllm_config.model_config.get_vocab_size()
        self._paused = False
        self._undecided: Any = None
        """What `settle` needs; None: nothing is looked for."""

    @property
    def able(self) -> bool:
        """Whether it may draft before the next weight sync."""
        return self.counters.error is None and not self._paused

    def load_model(self, policy: Any) -> None:
        """Take the policy, once vLLM has loaded it."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Draft for every request of the batch.

        Args:
            sampled_token_ids: tokens each request got in this step; empty while its prompt is read.
            num_tokens_no_spec: int [max_batch], tokens known of each request.
            token_ids_cpu: int32 [max_batch, max_model_len], the tokens.
            slot_mappings: not used.

        Returns:
            Per request at most `num_speculative_tokens` draft tokens, once `settle` has been called; none at all where
            the drafter has failed since the last weight sync.
        """
        self.settle()
        begin = time.perf_counter()
        try:
            return self._drafts(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        finally:
            self.counters.propose_seconds.append(time.perf_counter() - begin)

    def settle(self) -> None:
        """Put the drafts that are still looked for into what `propose` has returned: vLLM takes it now."""
        if self._undecided is None:
            return
        begin = time.perf_counter()
        try:
            self._settle()
        except Exception as error:
            self._fail(error)
        if self.counters.propose_seconds:
            self.counters.propose_seconds[-1] += time.perf_counter() - begin

    def _drafts(self, sampled: list[list[int]], lengths: np.ndarray, tokens: np.ndarray) -> list[list[int]]:
        """Draft as `propose`; a failure is noted, and costs the drafts."""
        if self.able:
            try:
                drafts = self._propose(sampled, lengths, tokens)
                self._pause_if_collapsed()
                return drafts
            except Exception as error:
                self._fail(error)
        return [[] for _ in sampled]

    def begin_step(self, scheduled: Any, now: float) -> None:
        """Note that the engine starts a forward pass: the one before, if it only decoded, took until now.

        Args:
            scheduled: vLLM's `SchedulerOutput`.
            now: seconds of a monotonic clock.
        """
        self.settle()
        if self.counters.error is None:
            try:
                self._begin_step(scheduled, now)
            except Exception as error:
                self._fail(error)

    def refresh(self, message: Refresh) -> Refreshed:
        """Take what a weight sync brings; a drafter that has failed starts again."""
        self._paused, self.counters.error = False, None
        return Refreshed()

    def visit(self, files: Sequence[str]) -> Refreshed:
        """Take the history of problems that are at home on other nodes, see `HistorySource.visit`."""
        return Refreshed()

    def stats(self) -> EngineStats:
        """Return the figures that are not in the counters."""
        return EngineStats()

    def end(self, request: Any) -> int:
        """Return the length at which a request stops at the latest, prompt included."""
        limit = request.sampling_params.max_tokens or self._max_model_len
        return min(self._max_model_len, len(request.prompt_token_ids) + limit)

    def _begin_step(self, scheduled: Any, now: float) -> None:
        raise NotImplementedError

    def _propose(self, sampled: list[list[int]], lengths: np.ndarray, tokens: np.ndarray) -> list[list[int]]:
        raise NotImplementedError

    def _settle(self) -> None:
        raise NotImplementedError

    def _fail(self, error: Exception) -> None:
        self.counters.error = repr(error)
        logger.exception("das: the %s drafter failed; no drafts until the next weight sync", self.config.drafter)

    def _pause_if_collapsed(self) -> None:
        """Pause until the next weight sync if nearly all draft tokens are rejected: they only cost time."""
        if collapsed(vars(self.counters)):
            self._paused = True
            logger.error(
                "das: acceptance collapsed (%d of %d draft tokens); no drafts until the next weight sync",
                self.counters.accepted_tokens,
                self.counters.draft_tokens,
            )
