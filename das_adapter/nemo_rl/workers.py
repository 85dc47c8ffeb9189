"""NeMo-RL's vLLM generation workers with das-adapter in their engines.

Ray ships their methods by value, and with them what they name of this module: that must
be a module, or something that can be pickled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import ray
from nemo_rl.distributed.worker_group_utils import get_nsight_config_if_pattern_matches
from nemo_rl.models.generation.vllm.vllm_worker import VllmGenerationWorkerImpl
from nemo_rl.models.generation.vllm.vllm_worker_async import (
    VllmAsyncGenerationWorkerImpl,
)

from das_adapter.nemo_rl import engine_hooks, settings
from das_adapter.nemo_rl.engine_hooks import (
    AsyncEngineHooks,
    EngineHooks,
    SyncEngineHooks,
)
from das_adapter.nemo_rl.settings import LABELS
from das_adapter.protocol.engine_args import engine_args
from das_adapter.service.session import for_run

_NSIGHT = dict(get_nsight_config_if_pattern_matches("vllm_generation_worker"))


class _Worker:
    """The part that both kinds of workers share: an engine with hooks, and answers to
    calls of the generation.
    """

    cfg: Any
    """Config of NeMo-RL's generation."""
    llm: Any
    """vLLM's engine."""
    hooks_class: type[EngineHooks]

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        """Give the engine its block: the plug-in in its processes does what the block
        says.

        A response must end at `vllm_cfg.max_model_len`, whether drafts reach past it or
        not. NeMo-RL is told to cap it there; its clamp for speculative runs, K + 1
        tokens earlier, does not see a drafter that the block chose.
        """
        das = settings.of_generation(self.cfg)
        assert das is not None, "these workers are chosen for an active das: block only"
        self.cfg["vllm_cfg"]["cap_max_tokens_to_context"] = True
        given_config = llm_kwargs.get("additional_config")
        arguments = engine_args(for_run(das), given_config)
        llm_kwargs.update(arguments)
        is_async = self.hooks_class is AsyncEngineHooks
        if is_async and das.routing == "longest_first":
            llm_kwargs.setdefault("scheduling_policy", "priority")
        super()._create_engine(llm_kwargs)  # type: ignore[misc]
        # `vllm_cfg.engine_owner_loop`, from NeMo-RL 0.8 on
        owner = getattr(self, "_engine_owner_loop", None)
        seed = llm_kwargs.get("seed") or 0
        self.hooks = self.hooks_class(
            self.llm,
            das,
            source=f"worker {seed}",
            resumed=self.cfg.get(settings.STEP, 0),
            loop=owner.loop if owner else None,
        )

    def das_validation(self, on: bool, alone: bool = False) -> None:
        """Mark requests from now on as a validation's; off: no longer. `alone`: also
        requests whose labels say otherwise.
        """
        self.hooks.validating = on
        self.hooks.only_validating = alone

    def das_report(self) -> Any:
        """Return the counts since the last report."""
        return self.hooks.report()


@ray.remote(runtime_env=_NSIGHT)
class DasGenerationWorker(_Worker, VllmGenerationWorkerImpl):
    """A data-parallel replica with vLLM's synchronous engine."""

    hooks_class = SyncEngineHooks

    def post_init(self) -> None:
        """Set NUMA binding up as the stock worker does; check that das-adapter is in
        the engine.
        """
        super().post_init()
        self.hooks.start()

    def generate(self, data: Any, greedy: bool = False) -> Any:
        """Generate as the stock worker does, under the labels that the batch
        carries.
        """
        token = engine_hooks.labels.set(data.pop(LABELS, None))
        try:
            return super().generate(data, greedy=greedy)
        finally:
            engine_hooks.labels.reset(token)


@ray.remote(runtime_env=_NSIGHT)
class DasAsyncGenerationWorker(_Worker, VllmAsyncGenerationWorkerImpl):
    """A data-parallel replica with vLLM's asynchronous engine."""

    hooks_class = AsyncEngineHooks
    hooks: AsyncEngineHooks

    async def post_init_async(self) -> None:
        """Set NUMA binding up as the stock worker does; check that das-adapter is in
        the engine.
        """
        await super().post_init_async()
        await self.hooks.start()

    async def generate_async(
        self, data: Any, greedy: bool = False
    ) -> AsyncGenerator[Any, None]:
        """Generate as the stock worker does, under the label that the sample
        carries.
        """
        engine_hooks.labels.set(data.pop(LABELS, None))
        async for result in super().generate_async(data, greedy=greedy):
            yield result

    async def das_write_ahead(self, data: Any) -> Any:
        """Write what a sample of a next step will begin with (see
        `AsyncEngineHooks.write_ahead`).
        """
        return await self.hooks.write_ahead(lambda: self.generate_async(data))

    async def sleep_async(self) -> None:
        """Sleep as the stock worker does: the rollout has ended."""
        await self.hooks.end_ahead()
        await super().sleep_async()

    async def reset_prefix_cache_async(self) -> None:
        """Forget what is cached as the stock worker does: a rollout has ended whose
        engines do not sleep.
        """
        await self.hooks.end_ahead()
        await super().reset_prefix_cache_async()

    async def das_report(self) -> Any:
        """Return the counts since the last report."""
        return await asyncio.to_thread(self.hooks.report)
