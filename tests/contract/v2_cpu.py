"""vLLM's V2 model runner on a machine without a GPU: its kernels and das-adapter's run in Triton's interpreter.

What the interpreter or the CPU platform lack is lifted here: a Triton driver, asynchronous scheduling, the kernel of
top-k and top-p (vLLM has it in PyTorch as well). In the interpreter a step's time goes into the kernels of the sampler,
of the inputs and of the history: NumPy stands in for them, but for jobs that are `interpreted`; see `v2_stand_ins.py`
and `device_reference.py`.
"""

from __future__ import annotations

import itertools
import os
from types import SimpleNamespace
from typing import Any

import torch

VARIABLE = "DAS_TEST_V2"
ENV = {"TRITON_INTERPRET": "1", "TORCH_COMPILE_DISABLE": "1", VARIABLE: "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}


class Driver:
    """What is asked of a Triton driver where nothing is compiled."""

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> Any:
        return SimpleNamespace(backend="cpu", arch="", warp_size=1)


def pretend_driver() -> None:
    """Have Triton take the CPU for a device, so that vLLM finds that it can run."""
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=Driver, compiler=None)


def lift_limits() -> None:
    """Keep asynchronous scheduling on the CPU platform, and top-k and top-p in PyTorch."""
    import vllm.v1.sample.ops.topk_topp_sampler as top
    from vllm.platforms.cpu import CpuPlatform

    top.HAS_TRITON = False
    stock = CpuPlatform.check_and_update_config.__func__

    def check(cls: Any, config: Any) -> None:
        wanted = config.scheduler_config.async_scheduling
        stock(cls, config)
        config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = classmethod(check)


def stand_in(interpreted: bool) -> None:
    """Put NumPy in the place of kernels of vLLM and of the history; `interpreted`: run them all, and hold vLLM's
    against what stands in for them elsewhere."""
    import v2_stand_ins

    v2_stand_ins.install(compared=interpreted)
    if not interpreted:
        from device_reference import launch

        from das_adapter.engine.v2.device_index import DeviceIndex

        DeviceIndex._launch = launch


def compared() -> dict[str, int]:
    """Return how often each of vLLM's kernels was held against what stands in for it."""
    import v2_stand_ins

    return v2_stand_ins.COMPARED


def sabotage(kind: str) -> None:
    """Break a part of das-adapter, to see that nothing depends on it, or let it do what it seldom does."""
    from das_adapter.engine.v2.device_index import DeviceIndex
    from das_adapter.engine.v2.lengths import DraftLengths
    from das_adapter.engine.v2.neural import Speculation
    from das_adapter.engine.v2.reading import MissedText
    from das_adapter.protocol.engine_args import DraftTokens

    draft, output, propose = DeviceIndex.draft, DraftLengths.output, Speculation.propose
    steps = itertools.count()

    def other_drafts(self: Any, slots: torch.Tensor, num_sampled: torch.Tensor, total_len: torch.Tensor) -> Any:
        if kind == "failing drafter" and self.arena.sealed_tokens:
            raise RuntimeError("the drafter is broken on purpose")
        drafts = draft(self, slots, num_sampled, total_len)
        if kind == "garbage drafts":
            generator = torch.Generator().manual_seed(int(total_len.sum()))
            drafts.copy_(torch.randint(0, 90, drafts.shape, generator=generator))
            self.real[: len(slots)] = drafts.shape[1]
            self.confidence[: len(slots)] = 0.5
        return drafts

    def failing(self: Any, run: Any, *args: Any) -> Any:
        def broken(*_: Any, **__: Any) -> None:
            raise RuntimeError("the drafter is broken on purpose")

        return propose(self, run if next(steps) % 8 else broken, *args)

    def any_length(self: Any, step: Any, sampled: Any, now: float) -> int:
        output(self, step, sampled, now)
        number = next(steps)
        return DraftTokens((3, 1, 0, 0, 0, 0, 0, 2)[number % 8], by_model=number // 8 % 3 > 0)

    def slowly(self: Any, step: Any, sampled: Any, now: float) -> int:
        return output(self, step, sampled, 50.0 * next(steps))

    if kind in ("garbage drafts", "failing drafter"):
        DeviceIndex.draft = other_drafts  # type: ignore[method-assign]
        if kind == "failing drafter":
            Speculation.propose = failing  # type: ignore[method-assign]
    elif kind == "slow policy":
        DraftLengths.output = slowly  # type: ignore[method-assign]
    elif kind == "small chunks":
        from v2_stand_ins import COMPARED
        from vllm.v1.worker.gpu.spec_decode import rejection_sampler

        chunks = rejection_sampler._iter_request_chunks

        def counted(*args: Any) -> Any:
            for chunk in chunks(*args):
                COMPARED["chunks"] = COMPARED.get("chunks", 0) + 1
                yield chunk

        rejection_sampler.MAX_CHUNK_BYTES = 4 * 96 * 20  # 20 rows of the policy's vocabulary
        rejection_sampler._iter_request_chunks = counted
    elif kind in ("any draft length", "any draft length, reading along"):
        DraftLengths.output = any_length  # type: ignore[method-assign]
        if "along" in kind:
            MissedText.may_miss = lambda *_: False  # type: ignore[method-assign]
    else:
        raise ValueError(kind)


if os.environ.get(VARIABLE):
    pretend_driver()
