"""veRL's vLLM server with history: it gives the engine its `das:` block, harvests what was generated, and brings
every engine up to date at the weight sync."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from typing import Any

import numpy as np
import ray
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from das_adapter.core.noise import prompt_identity, request_seed
from das_adapter.errors import plugin_not_loaded
from das_adapter.protocol.engine_args import PROBLEM_ARG, RECORD_ARG, SEED_ARG, START_ARG, engine_args, engine_env
from das_adapter.service.ledger import RolloutClock
from das_adapter.service.session import PATIENCE_S, History, remedy
from das_adapter.verl import settings
from das_adapter.verl.identity import ABORTED

logger = logging.getLogger("das_adapter")


class DasVLLMHttpServer(vLLMHttpServer):
    """One per replica and node; a Ray actor."""

    def _post_init(self, *args: Any, **kwargs: Any) -> None:
        super()._post_init(*args, **kwargs)
        das = settings.of_rollout(self.config)
        assert das is not None, "DasVLLMReplica chooses this server only for an active das: block"
        self._das = das
        self._history = History(das)
        self._clock = RolloutClock()
        self._seen: Counter[int] = Counter()
        self._strangers = 0
        self._expected: dict[int, float] = {}

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        super()._preprocess_engine_kwargs(engine_kwargs)
        os.environ.update(engine_env(self._das))
        args = engine_args(self._das)
        additional = {**(engine_kwargs.get("additional_config") or {}), **args.pop("additional_config")}
        engine_kwargs.update(args, additional_config=additional)
        if self._das.routing.policy == "longest_first":
            engine_kwargs.setdefault("scheduling_policy", "priority")  # a longer queue starts with the longest, too

    async def run_server(self, args: Any) -> None:
        """Start the engine, and make sure that das-adapter is in it: a plugin that was left out is an error now,
        not a run that silently does without."""
        await super().run_server(args)
        try:
            workers = await self.engine.collective_rpc("das_rpc", args=("hello", {}))
        except Exception as error:
            raise plugin_not_loaded() from error
        logger.warning("das: replica %s speculates: %s", self.replica_rank, workers[0])

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **kwargs: Any
    ) -> Any:
        """Generate as the stock server does; a finished training response goes into the history, with what it had
        written before it was interrupted and what tools answered since the turn before."""
        sampling_params, extra = self._labelled(prompt_ids, sampling_params)
        if self._das.routing.policy == "longest_first" and not kwargs.get("priority"):
            kwargs["priority"] = -round(self._expected.get(extra[PROBLEM_ARG], 0.0))
        begin = time.time()
        output = await super().generate(prompt_ids, sampling_params, request_id, **kwargs)
        if extra[RECORD_ARG] and output.stop_reason not in ABORTED:
            text = [*prompt_ids[extra[START_ARG] :], *output.token_ids]
            tokens = np.asarray(text, dtype=np.int32).tobytes()
            self._clock.finished(begin, time.time(), extra[SEED_ARG], tokens)
            self._history.push(extra[PROBLEM_ARG], tokens, int(self.global_steps or 0))
        return output

    def _labelled(
        self, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, int]]:
        extra = dict(sampling_params.get("extra_args") or {})
        if PROBLEM_ARG not in extra:
            if not self._strangers:
                logger.warning(
                    "das: a request came without identity, not from veRL's agent loop: it counts as training and its "
                    "seed depends on the order of arrival"
                )
            self._strangers += 1
            problem, version = prompt_identity(prompt_ids), int(self.global_steps or 0)
            seed = request_seed(self._das.verify.seed, problem, version, self._seen[problem])
            self._seen[problem] += 1
            extra |= {PROBLEM_ARG: problem, SEED_ARG: seed, RECORD_ARG: 1, START_ARG: len(prompt_ids)}
        return {**sampling_params, "extra_args": extra}, extra

    async def set_global_steps(self, global_steps: int) -> None:
        """The end of a weight sync: report the step's figures, then bring the engine's history up to date.

        Never raises and never waits for long: the trainer would hang.
        """
        await super().set_global_steps(global_steps)
        if self.node_rank != 0:
            return
        try:
            await asyncio.wait_for(self._sync(int(global_steps or 0)), PATIENCE_S)
        except Exception:
            logger.exception("das: weight sync %s without fresh history; decoding goes on", global_steps)

    async def _sync(self, version: int) -> None:
        stats = await self.engine.collective_rpc("das_rpc", args=("stats", {}))
        self._history.report(version, stats[0], self._clock.take())
        self._seen.clear()
        payload = await asyncio.to_thread(self._history.sync, version)
        answers = await self.engine.collective_rpc("das_rpc", args=("refresh", payload))
        if again := remedy(version, answers):
            await self.engine.collective_rpc("das_rpc", args=("refresh", again))
        if self._das.routing.policy == "longest_first":
            self._expected, _ = await asyncio.to_thread(self._history.predictions)


class DasVLLMReplica(vLLMReplica):
    """veRL's replica; its server is ours where the rollout has an active `das:` block, else the stock one."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if not (self.is_reward_model or self.is_teacher_model) and settings.of_rollout(self.config) is not None:
            self.server_class = ray.remote(DasVLLMHttpServer)
