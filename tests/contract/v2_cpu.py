"""vLLM's V2 model runner on a machine without a GPU: its kernels and das-adapter's run in Triton's interpreter.

What the interpreter or the CPU platform lack is lifted here: a Triton driver, asynchronous scheduling, the kernel of
top-k and top-p (vLLM has it in PyTorch as well). In the interpreter a step's time goes into the kernels of the sampler,
of the inputs and of the history: NumPy stands in for them, but for jobs that are `interpreted`; see `v2_stand_ins.py`
and `device_reference.py`.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch

VARIABLE = "DAS_TEST_V2"
ENV = {"TRITON_INTERPRET": "1", "TORCH_COMPILE_DISABLE": "1", VARIABLE: "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}


def pretend_driver() -> None:
    """Have Triton take the CPU for a device, so that vLLM finds that it can run."""
    import triton.backends

    driver = SimpleNamespace(is_active=lambda: True)
    triton.backends.backends["cpu"] = SimpleNamespace(driver=driver, compiler=None)


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
    """Break a part of das-adapter, to see that nothing depends on it."""
    from das_adapter.engine.v2.device_index import DeviceIndex

    stock = DeviceIndex.draft

    def draft(self: Any, slots: torch.Tensor, num_sampled: torch.Tensor, total_len: torch.Tensor) -> torch.Tensor:
        if kind == "failing drafter" and self.arena.sealed_tokens:
            raise RuntimeError("the drafter is broken on purpose")
        drafts = stock(self, slots, num_sampled, total_len)
        if kind == "garbage drafts":
            generator = torch.Generator().manual_seed(int(total_len.sum()))
            drafts.copy_(torch.randint(0, 90, drafts.shape, generator=generator))
            self.real[: len(slots)] = drafts.shape[1]
            self.confidence[: len(slots)] = 0.5
        return drafts

    DeviceIndex.draft = draft  # type: ignore[method-assign]


if os.environ.get(VARIABLE):
    pretend_driver()
