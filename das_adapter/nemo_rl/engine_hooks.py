"""Hooks on the engine of a NeMo-RL generation worker: they label requests, record
trajectories in the history, and update the engine's history at each refit (weight
sync).

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
from das_adapter.service.run_ahead import LAST_PRIORITY, AheadRequests
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

_MEDIA = ("multi_modal_data", "mm_kwargs", "mm_hashes")
"""Keys of a prompt for vLLM that has images, sound or video."""

labels: ContextVar[Sequence[Label] | None] = ContextVar("das_labels", default=None)
"""Labels of the requests that the current call of the worker will send, if the driver
gave any.
"""

ahead: ContextVar[list[Any] | None] = ContextVar("das_ahead", default=None)
"""A list that gets the last output of the engine, where the current call of the worker
only writes ahead; None: it answers a request.
"""


class EngineHooks:
    """The hooks that a synchronous and an asynchronous engine share. `start` is called
    before the first request.
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
        """Weight version: weight syncs so far."""
        self.validating = False
        """Whether a validation goes on."""
        self.only_validating = False
        """Whether no training request comes during a validation, whatever a request's
        label says.
        """
        self._labeller = Labeller(
            das.verify.seed,
            source=source,
            resumed=resumed,
            guesses=True,
        )
        self._llm = llm
        self._generate = llm.generate
        self._rpc = llm.collective_rpc
        self._das = das
        self._start_order = start_order(das)
        """Which requests start first; None: the order of arrival."""
        self._loop = loop
        llm.generate = self.generate
        llm.collective_rpc = self.collective_rpc

    def _label(self, prompt: Any, given: Label | None) -> Label | None:
        """Return the label of a request: the given one, else a new one by its prompt.
        None: its prompt has no token ids.
        """
        label = given
        if label is None:
            if isinstance(prompt, dict):
                ids = prompt.get("prompt_token_ids")
            else:
                ids = getattr(prompt, "prompt_token_ids", None)
            if ids is None:
                return None
            label = self._labeller.label(
                ids,
                validate=self.validating,
                media=_media_hashes(prompt),
            )
        if self.validating and self.only_validating:
            label = replace(label, record=False)
        return label

    @staticmethod
    def _labelled(params: Any, label: Label | None) -> Any:
        """Return a copy of sampling parameters with a label in their `extra_args`."""
        if label is None:
            return params
        # the samples of one request share its extra_args; they need different seeds
        if params.n != 1:
            label = replace(label, seed=None)
        params = copy.copy(params)
        given = params.extra_args or {}
        params.extra_args = {**label.extra_args(), **given}
        return params

    def _record(
        self,
        output: Any,
        texts: Sequence[Sequence[int]],
        label: Label | None,
        begin_s: float,
        prompt: Any,
    ) -> None:
        """Record the finished responses to a request, unless one was aborted.

        Args:
            output: vLLM's `RequestOutput`.
            texts: token ids of each sample.
            label: the request's label.
            begin_s: when the request was sent, for an engine without statistics.
            prompt: the request's prompt.
        """
        if label is None:
            return
        for sample in output.outputs:
            if sample.finish_reason == "abort":
                return
        end_s = time.time()
        stats = output.metrics
        if stats is not None and stats.last_token_ts:
            begin_s = stats.arrival_time
            # vLLM's other times are of another clock than its time of arrival
            duration_s = stats.last_token_ts - stats.queued_ts
            end_s = begin_s + duration_s
        if len(texts) > 1:  # the label's seed is not theirs: see `_labelled`
            label = replace(label, seed=None)
        ids = _ids_alone(prompt)
        for text in texts:
            self._session.record_response(
                label,
                tokens=text,
                begin=begin_s,
                end=end_s,
                version=self.version,
                prompt=ids,
            )

    def _count_refit(self, method: Any, answers: Sequence[Any] | None) -> bool:
        """Return whether a call was a refit that reached every rank, and count the
        weight version. A worker answers False where it failed: the engine still has its
        old weights, or parts of both.
        """
        if method not in REFITS:
            return False
        for answer in answers or ():
            if answer is False:
                return False
        self.version += 1
        return True

    def report(self) -> list[dict[str, Any]]:
        """Return the counts since the last report, with the weight version."""
        return [
            {**counts, "weight_version": self.version}
            for counts in self._session.report(self.version + 1)
        ]


def _media_hashes(prompt: Any) -> list[str]:
    """Return vLLM's hashes of a prompt's images, sound and video, in the order of their
    kinds.
    """
    if not isinstance(prompt, dict):
        return []
    hashes_by_kind = prompt.get("mm_hashes") or {}
    hashes: list[str] = []
    for kind in sorted(hashes_by_kind):
        hashes += hashes_by_kind[kind]
    return hashes


def _ids_alone(prompt: Any) -> Sequence[int]:
    """Return the token ids of a prompt; none where images, sound or video belong to it,
    or where it has none.
    """
    if isinstance(prompt, dict):
        has_media = any(prompt.get(key) for key in _MEDIA)
        ids = prompt.get("prompt_token_ids")
    else:
        has_media = bool(getattr(prompt, "mm_features", None))
        ids = getattr(prompt, "prompt_token_ids", None)
    return () if has_media or ids is None else ids


class SyncEngineHooks(EngineHooks):
    """Hooks on `vllm.LLM`. It can't be called while it generates: history that arrives
    from other nodes is mapped between two steps of its `llm_engine`.
    """

    def __init__(self, llm: Any, *args: Any, **kwargs: Any):
        super().__init__(llm, *args, **kwargs)
        self._step = llm.llm_engine.step
        llm.llm_engine.step = self.step

    def step(self) -> Any:
        """Take a step of the engine, which drafts from what has arrived."""
        self._session.map_guest_history()
        return self._step()

    def generate(self, prompts: Any, sampling_params: Any = None, **kwargs: Any) -> Any:
        """Generate as `vllm.LLM` does, and record the responses."""
        given_labels: Sequence[Label | None] | None = labels.get()
        if not given_labels:
            given_labels = [None] * len(prompts)
        if isinstance(sampling_params, Sequence):
            given_params = sampling_params
        else:
            given_params = [sampling_params] * len(prompts)
        request_labels = []
        params = []
        problems = []
        for prompt, given_label, request_params in zip(
            prompts, given_labels, given_params, strict=True
        ):
            label = self._label(prompt, given_label)
            request_labels.append(label)
            params.append(self._labelled(request_params, label))
            if label is not None and label.problem is not None:
                problems.append(label.problem)
        begin_s = time.time()
        self._session.fetch_guest_history(problems)
        outputs = self._generate(prompts, params, **kwargs)
        for output, label, prompt in zip(outputs, request_labels, prompts, strict=True):
            texts = [sample.token_ids for sample in output.outputs]
            self._record(output, texts, label, begin_s, prompt)
        self._session.flush()  # a checkpoint may follow at once
        return outputs

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the engine's workers; a refit is followed by a sync of the history."""
        answers = self._rpc(method, *args, **kwargs)
        if self._count_refit(method, answers):
            self._session.sync(self.version)
        return answers

    def start(self) -> None:
        """Make sure that das-adapter is in the engine's workers."""

        def rpc(
            command: str, payload: dict[str, Any], timeout: float
        ) -> list[list[Any]]:
            answers = self._rpc("das_rpc", timeout=timeout, args=(command, payload))
            return [answers]

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
        """Generate as `AsyncLLM` does, and record the response."""
        given_labels = labels.get()
        given_label = given_labels[0] if given_labels else None
        label = self._label(prompt, given_label)
        params = self._labelled(sampling_params, label)
        last_output = ahead.get()
        if last_output is not None:
            async for output in self._generate_ahead(prompt, params, **kwargs):
                last_output[:] = [output]
                yield output
            return
        if label is not None and label.problem is not None:
            if self._start_order is not None and not kwargs.get("priority"):
                kwargs["priority"] = self._start_order.priority(label.problem)
            self._session.fetch_guest_history([label.problem])
        texts: dict[int, Any] = {}
        """Token ids of each sample."""
        sends_pieces = sampling_params.output_kind.name == "DELTA"
        begin_s = time.time()
        stream = self._generate(prompt, params, *args, **kwargs)
        # where the caller gives up, `aclosing` has the request aborted
        with self._aside.request():
            async with contextlib.aclosing(stream):
                async for output in stream:
                    for sample in output.outputs:
                        if sends_pieces:
                            text = texts.setdefault(sample.index, [])
                            text.extend(sample.token_ids)
                        else:
                            # all of it; a copy at each step would take the square of
                            # its length
                            texts[sample.index] = sample.token_ids
                    if output.finished:
                        whole_texts = list(texts.values())
                        self._record(output, whole_texts, label, begin_s, prompt)
                    yield output

    async def _generate_ahead(
        self, prompt: Any, params: Any, **kwargs: Any
    ) -> AsyncIterator[Any]:
        """Generate what is only written ahead, after all requests."""
        if self._start_order is not None:
            kwargs["priority"] = LAST_PRIORITY
        request_id = kwargs["request_id"]
        self._aside.ids.add(request_id)
        try:
            async for output in self._generate(prompt, params, **kwargs):
                yield output
        finally:
            self._aside.ids.discard(request_id)

    async def write_ahead(
        self, generate: Callable[[], AsyncIterator[Any]]
    ) -> tuple[Sequence[int], bool]:
        """Write what a request of a next step will begin with, until the engine has
        requests or the rollout ends.

        Args:
            generate: sends the request.

        Returns:
            The token ids, and whether they are the whole response.
        """

        async def send() -> tuple[Sequence[int], bool]:
            last_output: list[Any] = []
            token = ahead.set(last_output)
            try:
                async for _ in generate():
                    pass
            finally:
                ahead.reset(token)
            if not last_output:  # its prompt leaves no room
                return [], True
            [sample] = last_output[0].outputs
            tokens = list(sample.token_ids)
            is_whole = sample.finish_reason != "abort"
            return tokens, is_whole

        return await self._aside.write(send)

    async def end_ahead(self) -> None:
        """End what is written ahead, as a rollout has ended."""
        ending = self._aside.end()
        if self._loop is None:
            await ending
        else:
            future = asyncio.run_coroutine_threadsafe(ending, self._loop)
            await asyncio.wrap_future(future)

    async def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the engine's workers; a refit is followed by a sync of the history."""
        answers = await self._rpc(method, *args, **kwargs)
        if not self._count_refit(method, answers):
            return answers
        await asyncio.to_thread(self._session.sync, self.version)
        if self._start_order is not None:
            expected = await asyncio.to_thread(ledger.expected_lengths)
            self._start_order.refresh(expected, self.version)
        return answers

    async def start(self) -> None:
        """Make sure that das-adapter is in the engine's workers."""
        loop = self._loop or asyncio.get_running_loop()
        rpc = of_async_engine(self._llm, loop)
        self._session = await asyncio.to_thread(Session, self._das, rpc)
        await asyncio.to_thread(self._session.start)
