"""veRL's vLLM server with history: it gives the engine its `das:` block, records what
was generated, and updates the engine's history at each weight sync.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from verl.utils.tokenizer import normalize_token_ids
from verl.workers.rollout.vllm_rollout.vllm_async_server import (
    vLLMHttpServer,
    vLLMReplica,
)

from das_adapter.core.identity import media_hash
from das_adapter.core.routing import StartOrder, start_order
from das_adapter.protocol.engine_args import engine_args
from das_adapter.protocol.label import Label, Labeller
from das_adapter.service import ledger
from das_adapter.service.run_ahead import LAST_PRIORITY, AheadRequests
from das_adapter.service.session import Session, for_run, of_async_engine
from das_adapter.verl import settings
from das_adapter.verl.identity import ABORTED, media_of

logger = logging.getLogger("das_adapter")


class DasVLLMHttpServer(vLLMHttpServer):
    """veRL's server with das-adapter in its engine: a Ray actor, one per replica and
    node.
    """

    def _post_init(self, *args: Any, **kwargs: Any) -> None:
        super()._post_init(*args, **kwargs)
        das = settings.of_rollout(self.config)
        assert das is not None, (
            "DasVLLMReplica chooses this server only for an active das: block"
        )
        self._das = das
        self._session: Session
        self._labeller: Labeller | None = None
        """Labels requests that come without a label; None: none has come."""
        self._start_order: StartOrder | None = None
        """Which requests start first; None: the order of arrival, or the priorities
        that the run itself gives.
        """
        run_has_priorities = self.config.scheduling_policy == "priority"
        if not run_has_priorities:
            self._start_order = start_order(das, self.config.n)
        self._ahead_priority = 0
        if run_has_priorities or self._start_order is not None:
            self._ahead_priority = LAST_PRIORITY
        self._aside = AheadRequests(lambda ids: self.engine.abort(ids))

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        super()._preprocess_engine_kwargs(engine_kwargs)
        given_config = engine_kwargs.get("additional_config")
        arguments = engine_args(for_run(self._das), given_config)
        engine_kwargs.update(arguments)
        if self._start_order is not None:
            engine_kwargs.setdefault("scheduling_policy", "priority")

    async def run_server(self, args: Any) -> None:
        """Start the engine, and make sure that das-adapter is in it."""
        await super().run_server(args)
        loop = asyncio.get_running_loop()
        rpc = of_async_engine(self.engine, loop)
        self._session = Session(self._das, rpc)
        await asyncio.to_thread(self._session.start)

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        **kwargs: Any,
    ) -> Any:
        """Generate as the stock server does. A finished training response goes into the
        history, with what it wrote before it was interrupted, and what tools answered
        since the previous turn.
        """
        label = Label.of(sampling_params.get("extra_args"))
        if label.problem is None:
            # a prompt that has a label was normalised when it got it
            prompt_ids = normalize_token_ids(prompt_ids)
            label = self._label_unknown(prompt_ids, kwargs)
            sampling_params = label.put_into(sampling_params)
        problem = label.problem_of(prompt_ids)
        start = label.start_in(len(prompt_ids))
        if self._start_order is not None:
            has_begun = start < len(prompt_ids)
            kwargs["priority"] = self._start_order.priority(problem, has_begun)
        self._session.fetch_guest_history([problem])
        begin_s = time.time()
        with self._aside.request():
            output = await super().generate(
                prompt_ids, sampling_params, request_id, **kwargs
            )
        if output.stop_reason in ABORTED:
            return output
        self._session.record_response(
            label,
            tokens=[*prompt_ids[start:], *output.token_ids],
            begin=begin_s,
            end=time.time(),
            version=self._version(),
            prompt=() if media_of(kwargs) else prompt_ids[:start],
        )
        return output

    async def write_ahead(
        self, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> tuple[Sequence[int], bool]:
        """Write what a request of a next step will begin with, until the engine has
        requests or the rollout ends.

        Returns:
            The token ids, and whether they are the whole response.
        """
        request_id = uuid.uuid4().hex
        generate = super().generate

        async def send() -> tuple[Sequence[int], bool]:
            output = await generate(
                prompt_ids,
                sampling_params,
                request_id,
                priority=self._ahead_priority,
            )
            tokens = list(output.token_ids)
            is_whole = output.stop_reason not in ABORTED
            return tokens, is_whole

        self._aside.ids.add(request_id)
        try:
            return await self._aside.write(send)
        finally:
            self._aside.ids.discard(request_id)

    async def wait_for_requests_to_drain(self) -> None:
        """Wait as the stock server does before it sleeps, once nothing is written ahead
        any more, which nobody waits for.
        """
        await self._aside.end()
        await super().wait_for_requests_to_drain()

    async def sleep(self) -> None:
        """Sleep as the stock server does: the rollout has ended.

        The figures of the rollout are reported at once: a replica that the trainer
        lends has its next weight sync when it is lent again, many steps later.
        """
        await self._aside.end()
        if self.node_rank == 0:
            next_version = self._version() + 1
            await asyncio.to_thread(self._session.report, next_version)
        await super().sleep()

    async def set_global_steps(self, global_steps: int) -> None:
        """Report the step's figures at the end of a weight sync, then update the
        engine's history.

        Never raises and never waits for long: the trainer would hang.
        """
        await super().set_global_steps(global_steps)
        if self.node_rank != 0:
            return
        version = int(global_steps or 0)
        await asyncio.to_thread(self._session.sync, version, report=True)
        if self._start_order is not None:
            expected = await asyncio.to_thread(ledger.expected_lengths)
            self._start_order.refresh(expected, version)

    def _version(self) -> int:
        """Return the weight version of the engine: the trainer's step."""
        return int(self.global_steps or 0)

    def _label_unknown(
        self, prompt_ids: Sequence[int], request: Mapping[str, Any]
    ) -> Label:
        """Label a request that came without a label, by its prompt and its media."""
        if self._labeller is None:
            logger.warning(
                "das: a request came without identity, not from veRL's agent loop: it"
                " counts as training and its seed depends on the order of arrival"
            )
            self._labeller = Labeller(
                self._das.verify.seed,
                source=f"replica {self.replica_rank}, node {self.node_rank}",
                resumed=self._version(),
            )
        hashes = [media_hash(item) for item in media_of(request)]
        return self._labeller.label(prompt_ids, validate=False, media=hashes)


class DasVLLMReplica(vLLMReplica):
    """veRL's replica, whose server is das-adapter's where the rollout has an active
    `das:` block, else the stock one.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.is_reward_model or self.is_teacher_model:
            return
        if settings.of_rollout(self.config) is not None:
            self.server_class = ray.remote(DasVLLMHttpServer)
