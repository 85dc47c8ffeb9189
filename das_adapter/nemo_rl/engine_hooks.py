"""What NeMo-RL's generation worker sends to its engine passes here: requests are labelled, finished text goes into the
history, and after every refit the engine's history is brought up to date.

It sits on the engine's own `generate` and `collective_rpc`, through which every path of NeMo-RL leads: batches, single
samples, the HTTP server; refits over IPC, collectives, resharding, checkpoint engines and sparse deltas.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np

from das_adapter.config import DasConfig
from das_adapter.errors import plugin_not_loaded
from das_adapter.nemo_rl.identity import Label, Labeller
from das_adapter.protocol.engine_args import PROBLEM_ARG, RECORD_ARG, SEED_ARG
from das_adapter.service.ledger import RolloutClock
from das_adapter.service.session import PATIENCE_S, History, remedy

logger = logging.getLogger("das_adapter")

REFITS = frozenset(
    (
        "update_weights_via_ipc_zmq",
        "update_weights_from_collective",
        "update_weights_from_checkpoint_engine",
        "nccl_reshard_refit",
        "finish_sparse_delta_refit",
    )
)
"""Methods of NeMo-RL's vLLM workers whose end is the end of a weight sync."""

labels: ContextVar[Sequence[Label] | None] = ContextVar("das_labels", default=None)
"""Labels of the requests that the current call of the worker will send, if the driver gave any."""


class Tap:
    """The part that does not depend on whether the engine is synchronous."""

    def __init__(self, llm: Any, das: DasConfig, source: int):
        """
        Args:
            llm: `vllm.LLM` or `AsyncLLM`; its `generate` and `collective_rpc` are replaced.
            das: the run's block.
            source: distinguishes this worker's unlabelled requests from those of other workers.
        """
        self.version = 0
        self.validating = False
        self._das = das
        self._labeller = Labeller(das.verify.seed, source)
        self._history = History(das)
        self._clock = RolloutClock()
        self._stock_generate, self._stock_rpc = llm.generate, llm.collective_rpc
        llm.generate, llm.collective_rpc = self.generate, self.collective_rpc

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def collective_rpc(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def _label(self, prompt: Any, given: Label | None) -> Label | None:
        """The label of a request; None for a prompt that is no token ids."""
        ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else getattr(prompt, "prompt_token_ids", None)
        if given is None and ids is None:
            return None
        label = given or self._labeller.label(ids, self.validating)
        return {**label, RECORD_ARG: int(label[RECORD_ARG] and not self.validating)}

    @staticmethod
    def _labelled(params: Any, label: Label | None) -> Any:
        if label is None:
            return params
        # The samples of one request with n > 1 share its extra_args; they need different seeds.
        seeded = {name: value for name, value in label.items() if name != SEED_ARG or params.n == 1}
        params = copy.copy(params)
        params.extra_args = {**seeded, **(params.extra_args or {})}
        return params

    def _finished(self, output: Any, texts: Sequence[Sequence[int]], label: Label | None, begin: float) -> None:
        """Take one finished request into the step's figures and, if it may serve as history, into the history."""
        if label is None or any(sample.finish_reason == "abort" for sample in output.outputs):
            return
        end, stats = time.time(), output.metrics
        if stats is not None and stats.last_token_ts:
            begin, end = stats.arrival_time, stats.arrival_time + stats.last_token_ts - stats.queued_ts
        if not label[RECORD_ARG]:
            return
        for text in texts:
            tokens = np.asarray(text, dtype=np.int32).tobytes()
            self._clock.finished(begin, end, label[SEED_ARG], tokens)
            self._history.push(label[PROBLEM_ARG], tokens, self.version)

    def _report(self, stats: list[dict[str, Any]]) -> dict[str, Any]:
        """Counts since the last report, from the rank that samples."""
        counts, rollout = max(stats, key=lambda s: s.get("tokens", -1)), self._clock.take()
        if self._das.self.ladder:  # by which the replicas' drafts get their length at the next refit but one
            self._history.report(self.version + 1, counts, rollout)
        return {**counts, **rollout, "weight_version": self.version}


class SyncTap(Tap):
    """Around `vllm.LLM`."""

    def generate(self, prompts: Any, sampling_params: Any = None, **kwargs: Any) -> Any:
        if isinstance(prompts, (str, dict)):
            prompts = [prompts]
        given = labels.get() or [None] * len(prompts)
        marks = [self._label(prompt, label) for prompt, label in zip(prompts, given, strict=True)]
        params = sampling_params if isinstance(sampling_params, Sequence) else [sampling_params] * len(prompts)
        begin = time.time()
        params = [self._labelled(p, mark) for p, mark in zip(params, marks, strict=True)]
        outputs = self._stock_generate(prompts, params, **kwargs)
        for output, mark in zip(outputs, marks, strict=True):
            self._finished(output, [sample.token_ids for sample in output.outputs], mark, begin)
        return outputs

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        result = self._stock_rpc(method, *args, **kwargs)
        if method in REFITS:
            self.version += 1
            try:
                answers = self._rpc("refresh", self._history.sync(self.version))
                if again := remedy(self.version, answers):
                    self._rpc("refresh", again)
            except Exception:
                logger.exception("das: refit %s without fresh history; decoding goes on", self.version)
        return result

    def start(self) -> None:
        """Make sure that das-adapter is in the engine's workers."""
        try:
            _started(self._rpc("hello", {}))
        except Exception as error:
            raise plugin_not_loaded() from error

    def report(self) -> dict[str, Any]:
        """Counts since the last report."""
        return self._report(self._rpc("stats", {}))

    def _rpc(self, command: str, payload: dict[str, Any]) -> Any:
        return self._stock_rpc("das_rpc", args=(command, payload))


class AsyncTap(Tap):
    """Around `AsyncLLM`."""

    async def generate(self, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        mark = self._label(prompt, (labels.get() or [None])[0])
        begin, texts = time.time(), {}
        stream = self._stock_generate(prompt, self._labelled(sampling_params, mark), *args, **kwargs)
        async with contextlib.aclosing(stream):  # a caller that gives up aborts the request
            async for output in stream:
                for sample in output.outputs:
                    pieces = texts.get(sample.index, []) if sampling_params.output_kind.name == "DELTA" else []
                    texts[sample.index] = [*pieces, *sample.token_ids]
                if output.finished:
                    self._finished(output, list(texts.values()), mark, begin)
                yield output

    async def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        result = await self._stock_rpc(method, *args, **kwargs)
        if method in REFITS:
            self.version += 1
            try:
                payload = await asyncio.wait_for(asyncio.to_thread(self._history.sync, self.version), PATIENCE_S)
                if again := remedy(self.version, await self._rpc("refresh", payload)):
                    await self._rpc("refresh", again)
            except Exception:
                logger.exception("das: refit %s without fresh history; decoding goes on", self.version)
        return result

    async def start(self) -> None:
        """Make sure that das-adapter is in the engine's workers."""
        try:
            _started(await self._rpc("hello", {}))
        except Exception as error:
            raise plugin_not_loaded() from error

    async def report(self) -> dict[str, Any]:
        """Counts since the last report."""
        return self._report(await self._rpc("stats", {}))

    async def _rpc(self, command: str, payload: dict[str, Any]) -> Any:
        return await self._stock_rpc("das_rpc", args=(command, payload))


def _started(hello: list[dict[str, Any]]) -> None:
    logger.warning("das: generation worker speculates: %s", hello[0])
