"""vLLM's V2 model runner on a machine without a GPU: its kernels and das-adapter's run in Triton's interpreter.

What the interpreter or the CPU platform lack is lifted here: a Triton driver, asynchronous scheduling, the kernel of
top-k and top-p (vLLM has it in PyTorch as well). Noise, and the history's kernels, take the interpreter most of a
step's time: NumPy stands in for them, bit for bit (`test_v2_kernels.py`), unless a job asks for the kernels.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
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


def stand_in(kernels: bool) -> None:
    """Put NumPy in the place of the noise's kernel and, if asked for, of the history's."""
    import vllm.v1.worker.cpu.model_runner  # noqa: F401  # first, it replaces parts of torch
    from vllm.v1.worker.gpu.sample import gumbel, sampler

    gumbel.gumbel_sample = sampler.gumbel_sample = gumbel_sample
    if kernels:
        from device_reference import launch

        from das_adapter.engine.v2.device_index import DeviceIndex

        DeviceIndex._launch = launch


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


U, F = np.uint32, np.float32


def _mix(h: Any, key: Any) -> Any:
    key = key * U(0xCC9E2D51)
    key = ((key << U(15)) | (key >> U(17))) * U(0x1B873593)
    h = h ^ key
    return ((h << U(13)) | (h >> U(19))) * U(5) + U(0xE6546B64)


def _uniforms(seed: np.ndarray, pos: np.ndarray, vocab: int) -> np.ndarray:
    with np.errstate(over="ignore"):
        seed, pos = seed.astype(np.uint64), pos.astype(np.uint64)
        h = np.zeros(len(seed), dtype=U)
        for word in (seed & 0xFFFFFFFF, seed >> np.uint64(32), pos & 0xFFFFFFFF):
            h = _mix(h, word.astype(U))
        h = _mix(h[:, None], np.arange(vocab, dtype=U)[None, :]) ^ U(16)
        h ^= h >> U(16)
        h *= U(0x85EBCA6B)
        h ^= h >> U(13)
        h *= U(0xC2B2AE35)
        h ^= h >> U(16)
    high, low = (h >> U(16)).astype(F), (h & U(0xFFFF)).astype(F)
    return high * F(2.0**-16) + (low + F(0.5)) * F(2.0**-32)


def _noise(u: np.ndarray) -> np.ndarray:
    p = np.full_like(u, 1 / 8)
    for d in (7, 6, 5, 4, 3, 2, 1):
        p = F(1 / d) + u * p
    with np.errstate(divide="ignore"):
        direct = np.log(np.maximum(F(1) - u, F(2.0**-24)))
        return -np.log(-np.where(u < F(0.25), -u * p, direct))


def gumbel_sample(
    logits: torch.Tensor, slots: torch.Tensor, temperature: torch.Tensor, seed: torch.Tensor, pos: torch.Tensor,
    apply_temperature: bool, is_drafting: bool = False, use_fp64: bool = False, **others: Any,
) -> torch.Tensor:  # fmt: skip
    """Draw one token a row, as vLLM's `gumbel_sample` does."""
    assert not (apply_temperature or is_drafting or use_fp64 or others)
    rows, at = logits.float().numpy(), slots.numpy()
    drawn = rows + _noise(_uniforms(seed.numpy()[at], pos.numpy(), rows.shape[1]))
    greedy = temperature.numpy()[at] == 0
    return torch.from_numpy(np.where(greedy[:, None], rows, drawn).argmax(1))


if os.environ.get(VARIABLE):
    pretend_driver()
