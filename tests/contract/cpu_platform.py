"""What a GPU engine does and a CPU engine is not let: asynchronous scheduling, routing
of experts, forked ranks.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any


def keep_asynchronous_scheduling() -> None:
    """Let a CPU engine schedule asynchronously where it is told to."""
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.check_and_update_config.__func__

    def check(cls: Any, config: Any) -> None:
        wanted = config.scheduler_config.async_scheduling
        stock(cls, config)
        config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = classmethod(check)


def schedule_asynchronously() -> None:
    """Let a CPU engine schedule the next step before the present one's tokens are
    known, as a GPU engine does. Nothing runs in parallel there; streams and events need
    not exist.
    """
    import torch

    keep_asynchronous_scheduling()

    class Event:
        def __init__(self, *_: Any, **__: Any) -> None: ...
        def record(self, *_: Any) -> None: ...
        def synchronize(self) -> None: ...
        def wait(self, *_: Any) -> None: ...
        def query(self) -> bool:
            return True

    class Stream(Event):
        def wait_stream(self, _: Any) -> None: ...
        def wait_event(self, _: Any) -> None: ...

    torch.cuda.Event = torch.Event = Event
    torch.cuda.Stream = Stream
    torch.cuda.current_stream = lambda *_: Stream()
    torch.cuda.stream = lambda _: contextlib.nullcontext()


def tell_routing() -> None:
    """Let a CPU engine tell which experts its tokens go to, as a GPU engine's routers
    do: before vLLM 0.32 the CPU's experts choose by themselves, and vLLM refuses to
    return what they don't tell.
    """
    import torch
    from vllm.model_executor.layers.fused_moe.layer import MoERunner
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod as Experts,
    )
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    # on CPUs that have it vLLM 0.27 refuses experts in float32
    torch.cpu._is_amx_tile_supported = lambda: False
    told: dict[int, Any] = {}

    def bind(self: Any, capturer: Any) -> None:
        runners = [
            module for module in self.model.modules() if isinstance(module, MoERunner)
        ]
        told.update(
            {
                id(r.routed_experts): functools.partial(capturer.capture, r.layer_id)
                for r in runners
            }
        )

    def apply(
        self: Any, layer: Any, x: Any, router_logits: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if id(layer) in told:
            told[id(layer)](router_logits.topk(layer.top_k).indices)
        return stock(self, layer, x, router_logits, *args, **kwargs)

    stock = Experts.apply_monolithic
    Experts.apply_monolithic = apply
    GPUModelRunner._bind_routed_experts_capturer = bind


def fork_workers() -> None:
    """Fork the workers of several ranks: they need not import vLLM again, and are
    sabotaged like this process.
    """
    import multiprocessing

    import torch
    from vllm.v1.executor import multiproc_executor

    def context() -> Any:
        if torch.cuda.is_initialized():
            raise RuntimeError("this process uses the GPU already: its forks could not")
        return multiprocessing.get_context("fork")

    multiproc_executor.get_mp_context = context


def graphs(runner: Any, most: int) -> tuple[list[str], list[str]]:
    """Return which CUDA graph vLLM would replay for each number of requests up to
    `most` that decode without drafts, and with four draft tokens each, if this engine
    ran on a GPU whose attention captures uniform batches.
    """
    from vllm.config import CUDAGraphMode

    dispatcher = runner.cudagraph_dispatcher
    length = runner.uniform_decode_query_len
    compilation = dispatcher.compilation_config
    mode = CUDAGraphMode.FULL_AND_PIECEWISE
    compilation.cudagraph_capture_sizes = [1, 2, 4, *range(8, 65, 8)]
    compilation.max_cudagraph_capture_size = 64
    if length > 1:
        compilation.adjust_cudagraph_sizes_for_spec_decode(length, 1)
    dispatcher.initialize_cudagraph_keys(mode, length)

    def replayed(each: int) -> list[str]:
        found = [
            dispatcher.dispatch(
                n * each,
                uniform_decode=runner._is_uniform_decode(each, length, n * each, n),
            )
            for n in range(1, most + 1)
        ]
        return [f"{kind.name} {batch.num_tokens}" for kind, batch in found]

    return replayed(1), replayed(5)


def exchange_between_experts() -> None:
    """Let data-parallel ranks that hold parts of the experts exchange tokens on a CPU,
    over gloo.
    """
    import torch
    import torch.distributed as dist
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def gathered(self: Any, part: Any, sizes: list[int]) -> Any:
        parts = [
            part if r == self.rank_in_group else part.new_empty(n, *part.shape[1:])
            for r, n in enumerate(sizes)
        ]
        for rank, whole in zip(self.ranks, parts, strict=True):
            dist.broadcast(whole, src=rank, group=self.device_group)
        return torch.cat(parts)

    def all_gatherv(self: Any, parts: Any, dim: int = 0, sizes: Any = None) -> Any:
        own = parts if isinstance(parts, list) else [parts]
        found = [
            gathered(self, part.contiguous(), sizes or [len(part)] * self.world_size)
            for part in own
        ]
        return found if isinstance(parts, list) else found[0]

    def reduce_scatterv(self: Any, whole: Any, dim: int = -1, sizes: Any = None) -> Any:
        dist.all_reduce(whole, group=self.device_group)
        each = sizes or [len(whole) // self.world_size] * self.world_size
        return whole.split(each)[self.rank_in_group].contiguous()

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv
