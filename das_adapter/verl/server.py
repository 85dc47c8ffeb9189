"""veRL's vLLM server with history: it gives the engine its `das:` block, harvests what
was generated, and brings every engine up to date at the weight sync.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from typing import Any

import ray
from verl.utils.tokenizer import normalize_token_ids
from verl.workers.rollout.vllm_rollout.vllm_async_server import (
    vLLMHttpServer,
    vLLMReplica,
)

from das_adapter.core.identity import media_hash
from das_adapter.core.routing import start_order
from das_adapter.protocol.engine_args import engine_args
from das_adapter.protocol.label import Label, Labeller
from das_adapter.service import ledger
from das_adapter.service.run_ahead import AheadRequests
from das_adapter.service.session import Session, for_run, of_async_engine
from das_adapter.verl import settings
from das_adapter.verl.identity import ABORTED, MEDIA

logger = logging.getLogger("das_adapter")


class DasVLLMHttpServer(vLLMHttpServer):
    """veRL's server with das-adapter in its engine: a Ray actor, one per replica and
    node.
    """

    def _post_init(self, *args: Any, **kwargs: Any) -> None:
        super()._post_init(*args, **kwargs)
        _show_warnings()
        das = settings.of_rollout(self.config)
        assert das is not None, (
            "DasVLLMReplica chooses this server only for an active das: block"
        )
        self._das = das
        self._session: Session
        self._strangers: Labeller | None = None
        # the run's own priorities stand
        hosts = self.config.scheduling_policy == "priority"
        self._order = None if hosts else start_order(das, self.config.n)
        self._last = 2**62 if hosts or self._order else 0
        """Priority of what is written ahead, as vLLM counts it."""
        self._aside = AheadRequests(lambda ids: self.engine.abort(ids))

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        super()._preprocess_engine_kwargs(engine_kwargs)
        engine_kwargs.update(
            engine_args(for_run(self._das), engine_kwargs.get("additional_config"))
        )
        if self._order is not None:
            engine_kwargs.setdefault("scheduling_policy", "priority")

    async def run_server(self, args: Any) -> None:
        """Start the engine, and make sure that das-adapter is in it."""
        await super().run_server(args)
        rpc = of_async_engine(self.engine, asyncio.get_running_loop())
        self._session = Session(self._das, rpc)
        await asyncio.to_thread(self._session.start)

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        **kwargs: Any,
    ) -> Any:
        """Generate as the stock server does; a finished training response goes into the
        history, with what it wrote before it was interrupted, and what tools answered
        since the previous turn.
        """
        label = Label.of(sampling_params.get("extra_args"))
        if label.problem is None:
            # else it was when it was labelled
            prompt_ids = normalize_token_ids(prompt_ids)
            media = [
                media_hash(item) for name in MEDIA for item in kwargs.get(name) or ()
            ]
            label = self._label_stranger(prompt_ids, media)
            sampling_params = label.put_into(sampling_params)
        if self._order is not None:
            begun = label.start_in(len(prompt_ids)) < len(prompt_ids)
            kwargs["priority"] = self._order.priority(
                label.problem_of(prompt_ids), begun
            )
        self._session.fetch_guest_history([label.problem_of(prompt_ids)])
        begin = time.time()
        with self._aside.request():
            output = await super().generate(
                prompt_ids, sampling_params, request_id, **kwargs
            )
        if output.stop_reason not in ABORTED:
            text = [*prompt_ids[label.start_in(len(prompt_ids)) :], *output.token_ids]
            self._session.record_response(
                label, text, begin, time.time(), int(self.global_steps or 0)
            )
        return output

    async def write_ahead(
        self, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> tuple[Sequence[int], bool]:
        """Write what a request of a next step will begin with, as `AheadRequests.write`
        does.
        """
        self._aside.ids.add(request_id := uuid.uuid4().hex)

        async def ask() -> tuple[Sequence[int], bool]:
            output = await generate(
                prompt_ids, sampling_params, request_id, priority=self._last
            )
            return list(output.token_ids), output.stop_reason not in ABORTED

        generate = super().generate
        try:
            return await self._aside.write(ask)
        finally:
            self._aside.ids.discard(request_id)

    async def wait_for_requests_to_drain(self) -> None:
        """Wait as the stock server does, before it sleeps: what is written ahead is
        waited for by nobody.
        """
        await self._aside.end()
        await super().wait_for_requests_to_drain()

    async def sleep(self) -> None:
        """Sleep as the stock server does: the rollout has ended. Its figures are
        reported at once: a replica that the trainer lends has its next weight sync when
        it is lent again, many steps later.
        """
        await self._aside.end()
        if self.node_rank == 0:
            await asyncio.to_thread(
                self._session.report, int(self.global_steps or 0) + 1
            )
        await super().sleep()

    def _label_stranger(self, prompt_ids: list[int], images: Sequence[str]) -> Label:
        if self._strangers is None:
            logger.warning(
                "das: a request came without identity, not from veRL's agent loop: it"
                " counts as training and its seed depends on the order of arrival"
            )
            source = f"replica {self.replica_rank}, node {self.node_rank}"
            self._strangers = Labeller(
                self._das.verify.seed, source, int(self.global_steps or 0)
            )
        return self._strangers.label(prompt_ids, validate=False, media=images)

    async def set_global_steps(self, global_steps: int) -> None:
        """Report the step's figures at the end of a weight sync, then bring the
        engine's history up to date.

        Never raises and never waits for long: the trainer would hang.
        """
        await super().set_global_steps(global_steps)
        if self.node_rank != 0:
            return
        await asyncio.to_thread(self._session.sync, int(global_steps or 0), report=True)
        if self._order is not None:
            self._order.refresh(
                await asyncio.to_thread(ledger.expected_lengths, 25.0),
                int(global_steps or 0),
            )


def _show_warnings() -> None:
    """vLLM's HTTP server imports a package that has the root logger pass errors
    alone.
    """
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())
        logger.setLevel(logging.WARNING)
        logger.propagate = False


class DasVLLMReplica(vLLMReplica):
    """veRL's replica; its server is ours where the rollout has an active `das:` block,
    else the stock one.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if (
            not (self.is_reward_model or self.is_teacher_model)
            and settings.of_rollout(self.config) is not None
        ):
            self.server_class = ray.remote(DasVLLMHttpServer)
