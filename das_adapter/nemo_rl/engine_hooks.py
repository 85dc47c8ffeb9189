"""Hooks on the engine of a NeMo-RL generation worker: requests are labelled,
trajectories go into the history, and each refit (weight sync) brings the engine's
history up to date.

They wrap the engine's own `generate` and `collective_rpc`, which every path of NeMo-RL
uses: batches, single samples, the HTTP server; refits over IPC, collectives,
resharding, checkpoint engines and sparse deltas.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from das_adapter.config import DasConfig
from das_adapter.core.routing import start_order
from das_adapter.protocol.label import Label, Labeller
from das_adapter.service import ledger
from das_adapter.service.run_ahead import AheadRequests
from das_adapter.service.session import Session, of_async_engine

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
"""Labels of the requests that the current call of the worker will send, if the driver
gave any.
"""

ahead: ContextVar[list[Any] | None] = ContextVar("das_ahead", default=None)
"""Where the current call of the worker only writes ahead: a list that gets the last
output of the engine.
"""
_LAST = 2**62
"""Priority of what is written ahead, as vLLM counts it."""


class EngineHooks:
    """The part that does not depend on whether the engine is synchronous. `start` comes
    before all requests.
    """

    start: Any
    generate: Any
    collective_rpc: Any
    _session: Session

    def __init__(
        self,
        llm: Any,
        das: DasConfig,
        source: str,
        resumed: int = 0,
        loop: asyncio.AbstractEventLoop | None = None,
    ):
        """Put the hooks on an engine.

        Args:
            llm: `vllm.LLM` or `AsyncLLM`; its `generate` and `collective_rpc` do the
                work.
            source: distinguishes this worker's unlabelled requests from those of other
                workers.
            resumed: training step from which the run resumes.
            loop: the one on which an asynchronous engine must be called, where NeMo-RL
                gave it one of its own (`vllm_cfg.engine_owner_loop`); None: that of
                `start`.
        """
        self.version = 0
        self.validating = self.alone = False
        """Whether a validation goes on, and whether no training request comes
        meanwhile, whatever its label says.
        """
        self._labeller = Labeller(das.verify.seed, source, resumed, guesses=True)
        self._llm = llm
        self._generate = llm.generate
        self._rpc = llm.collective_rpc
        self._das = das
        self._order = start_order(das)
        self._loop = loop
        llm.generate = self.generate
        llm.collective_rpc = self.collective_rpc

    def _label(self, prompt: Any, given: Label | None) -> Label | None:
        ids = (
            prompt.get("prompt_token_ids")
            if isinstance(prompt, dict)
            else getattr(prompt, "prompt_token_ids", None)
        )
        if given is None and ids is None:
            return None
        # vLLM's, by kind
        hashes = prompt.get("mm_hashes") or {} if isinstance(prompt, dict) else {}
        media = [found for kind in sorted(hashes) for found in hashes[kind]]
        label = given or self._labeller.label(ids, self.validating, media)
        return replace(label, record=False) if self.validating and self.alone else label

    @staticmethod
    def _labelled(params: Any, label: Label | None) -> Any:
        if label is None:
            return params
        # the samples of one request share its extra_args; they need different seeds
        if params.n != 1:
            label = replace(label, seed=None)
        params = copy.copy(params)
        params.extra_args = {**label.extra_args(), **(params.extra_args or {})}
        return params

    def _finished(
        self,
        output: Any,
        texts: Sequence[Sequence[int]],
        label: Label | None,
        begin: float,
    ) -> None:
        if label is None or any(
            sample.finish_reason == "abort" for sample in output.outputs
        ):
            return
        end = time.time()
        stats = output.metrics
        if stats is not None and stats.last_token_ts:
            begin = stats.arrival_time
            end = stats.arrival_time + stats.last_token_ts - stats.queued_ts
        if len(texts) > 1:  # the label's seed is not theirs: see `_labelled`
            label = replace(label, seed=None)
        for text in texts:
            self._session.record_response(label, text, begin, end, self.version)

    def _refitted(self, method: Any, answers: Sequence[Any] | None) -> bool:
        """Return whether a call was a refit that reached every rank, and count the
        weight version. A worker answers False where it failed: the engine still has its
        old weights, or parts of both.
        """
        if method not in REFITS or any(answer is False for answer in answers or ()):
            return False
        self.version += 1
        return True

    def report(self) -> list[dict[str, Any]]:
        """Return the counts since the last report, with the weight version."""
        return [
            {**counts, "weight_version": self.version}
            for counts in self._session.report(self.version + 1)
        ]


class SyncEngineHooks(EngineHooks):
    """Hooks on `vllm.LLM`. It can't be called while it generates: history that arrives
    from other nodes is mapped between two steps of its `llm_engine`.
    """

    def __init__(self, llm: Any, *args: Any, **kwargs: Any):
        super().__init__(llm, *args, **kwargs)
        self._step, llm.llm_engine.step = llm.llm_engine.step, self.step

    def step(self) -> Any:
        """Take a step of the engine, which drafts from what has arrived."""
        self._session.map_guest_history()
        return self._step()

    def generate(self, prompts: Any, sampling_params: Any = None, **kwargs: Any) -> Any:
        given: Sequence[Label | None] = labels.get() or [None] * len(prompts)
        marks = [
            self._label(prompt, label)
            for prompt, label in zip(prompts, given, strict=True)
        ]
        params = (
            sampling_params
            if isinstance(sampling_params, Sequence)
            else [sampling_params] * len(prompts)
        )
        begin = time.time()
        params = [
            self._labelled(p, mark) for p, mark in zip(params, marks, strict=True)
        ]
        self._session.fetch_guest_history(
            m.problem for m in marks if m is not None and m.problem is not None
        )
        outputs = self._generate(prompts, params, **kwargs)
        for output, mark in zip(outputs, marks, strict=True):
            self._finished(
                output, [sample.token_ids for sample in output.outputs], mark, begin
            )
        self._session.flush()  # a checkpoint may follow at once
        return outputs

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        result = self._rpc(method, *args, **kwargs)
        if self._refitted(method, result):
            self._session.sync(self.version)
        return result

    def start(self) -> None:
        """Make sure that das-adapter is in the engine's workers."""

        def rpc(
            command: str, payload: dict[str, Any], timeout: float
        ) -> list[list[Any]]:
            return [self._rpc("das_rpc", timeout=timeout, args=(command, payload))]

        self._session = Session(self._das, rpc, any_time=False)
        self._session.start()


class AsyncEngineHooks(EngineHooks):
    """Hooks on `AsyncLLM`."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._aside = AheadRequests(lambda ids: self._llm.abort(ids))

    async def generate(
        self, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any
    ) -> AsyncIterator[Any]:
        given: Sequence[Label | None] = labels.get() or [None]
        mark = self._label(prompt, given[0])
        params = self._labelled(sampling_params, mark)
        last = ahead.get()
        if last is not None:
            async for output in self._generate_ahead(prompt, params, **kwargs):
                last[:] = [output]
                yield output
            return
        if mark is not None and mark.problem is not None:
            if self._order is not None:
                kwargs["priority"] = kwargs.get("priority") or self._order.priority(
                    mark.problem
                )
            self._session.fetch_guest_history([mark.problem])
        texts: dict[int, Any] = {}
        pieces = sampling_params.output_kind.name == "DELTA"
        begin = time.time()
        stream = self._generate(prompt, params, *args, **kwargs)
        with self._aside.request():
            # where the caller gives up, the request is aborted
            async with contextlib.aclosing(stream):
                async for output in stream:
                    for sample in output.outputs:
                        if pieces:
                            texts.setdefault(sample.index, []).extend(sample.token_ids)
                        else:
                            # all of it; a copy at each step would take the square of
                            # its length
                            texts[sample.index] = sample.token_ids
                    if output.finished:
                        self._finished(output, list(texts.values()), mark, begin)
                    yield output

    async def _generate_ahead(
        self, prompt: Any, params: Any, **kwargs: Any
    ) -> AsyncIterator[Any]:
        if self._order is not None:
            kwargs["priority"] = _LAST
        self._aside.ids.add(kwargs["request_id"])
        try:
            async for output in self._generate(prompt, params, **kwargs):
                yield output
        finally:
            self._aside.ids.discard(kwargs["request_id"])

    async def write_ahead(
        self, generate: Callable[[], AsyncIterator[Any]]
    ) -> tuple[Sequence[int], bool]:
        """Write what a request of a next step will begin with, as
        `AheadRequests.write` does; `generate`: sends it.
        """

        async def ask() -> tuple[Sequence[int], bool]:
            token = ahead.set(last := list[Any]())
            try:
                async for _ in generate():
                    pass
            finally:
                ahead.reset(token)
            if not last:  # its prompt leaves no room
                return [], True
            [sample] = last[0].outputs
            return list(sample.token_ids), sample.finish_reason != "abort"

        return await self._aside.write(ask)

    async def end_ahead(self) -> None:
        """End what is written ahead, as a rollout has ended."""
        ended = self._aside.end()
        if self._loop is None:
            await ended
        else:
            await asyncio.wrap_future(
                asyncio.run_coroutine_threadsafe(ended, self._loop)
            )

    async def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        result = await self._rpc(method, *args, **kwargs)
        if self._refitted(method, result):
            await asyncio.to_thread(self._session.sync, self.version)
            if self._order is not None:
                self._order.refresh(
                    await asyncio.to_thread(ledger.expected_lengths, 25.0), self.version
                )
        return result

    async def start(self) -> None:
        """Make sure that das-adapter is in the engine's workers."""
        rpc = of_async_engine(self._llm, self._loop or asyncio.get_running_loop())
        self._session = await asyncio.to_thread(Session, self._das, rpc)
        await asyncio.to_thread(self._session.start)
