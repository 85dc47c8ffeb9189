"""Fixes of vLLM's CPU backend, without which sampled speculation and live weight updates are wrong there.

Each fix names what fails without it; `tests/contract/test_cpu_fixes.py` fails when one is missing.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch


def apply(reload_weights: bool, copied: bool = False) -> None:
    """Apply the fixes to this process; a second call changes nothing.

    Args:
        reload_weights: whether the host writes weights into the running engine (an RL weight sync does).
        copied: whether a drafter is made from the policy's weights.
    """
    _expand_batch_to_tokens()
    _recovered_tokens_keyword()
    if reload_weights:
        _keep_linear_weights()
    elif copied:
        _keep_weights_beside_packed_ones()


def _expand_batch_to_tokens() -> None:
    """Temperature, top-k and top-p of every draft position are uninitialised memory without this (vLLM issue 55005):
    the CPU stand-in of the Triton kernel fills a copy of its output and drops it. All versions up to 0.32.0."""
    from vllm.v1.sample import rejection_sampler

    def expand(
        x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
    ) -> torch.Tensor:
        counts = torch.diff(cu_num_tokens.to(torch.int64), prepend=cu_num_tokens.new_zeros(1, dtype=torch.int64))
        values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
        return torch.repeat_interleave(values, counts, output_size=num_tokens)

    rejection_sampler.expand_batch_to_tokens = expand


def _recovered_tokens_keyword() -> None:
    """vLLM 0.24.0: every speculative engine dies in its start-up dummy run, because the CPU stand-in of the kernel
    does not know the keyword `USE_FP64_GUMBEL` it is called with. Later versions know it."""
    import vllm.utils.cpu_triton_utils as kernels

    stock = getattr(kernels, "_sample_recovered_tokens_kernel_impl", None)
    wrapper = getattr(kernels, "_FuncWrapper", None)
    if stock is None or wrapper is None:
        return
    parameters = inspect.signature(stock).parameters
    if "USE_FP64_GUMBEL" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return

    def recovered(*args: Any, USE_FP64_GUMBEL: bool = False, **kwargs: Any) -> Any:
        return stock(*args, **kwargs)

    kernels._sample_recovered_tokens_kernel_impl = recovered
    kernels.sample_recovered_tokens_kernel = wrapper(recovered)


def _keep_linear_weights() -> None:
    """`model.load_weights` on a live engine fails without this, and a trainer that pushes weights waits for ever:
    the CPU backend repacks every linear layer and empties `layer.weight`."""
    import vllm.model_executor.layers.utils as layers

    def keep(layer: torch.nn.Module, remove_weight: bool = False) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    layers.dispatch_cpu_unquantized_gemm = keep


def _keep_weights_beside_packed_ones() -> None:
    """The weights a self-drafter is rounded from are empty without this; the policy keeps its packed, faster ones."""
    import vllm.model_executor.layers.utils as layers

    stock = layers.dispatch_cpu_unquantized_gemm
    if hasattr(stock, "_das_adapter"):
        return

    def keep(layer: torch.nn.Module, remove_weight: bool = False) -> None:
        stock(layer, remove_weight=False)
        layer._das_repack = lambda: stock(layer, remove_weight=False)

    keep._das_adapter = True  # type: ignore[attr-defined]
    layers.dispatch_cpu_unquantized_gemm = keep


def repack(policy: torch.nn.Module) -> None:
    """Pack the policy's present weights again, where packed ones are computed with."""
    for module in policy.modules():
        if hasattr(module, "_das_repack"):
            module._das_repack()
