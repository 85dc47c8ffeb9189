"""Fixes of vLLM's CPU backend: without them sampled speculation and live weight updates
are wrong there.
"""

from __future__ import annotations

import inspect
import os
from typing import Any

import torch

from das_adapter.config import DasConfig
from das_adapter.cpu.environment import WEIGHT_SYNC
from das_adapter.patching import patch


def prepare(config: DasConfig | None) -> None:
    """Apply the patches that an engine with this block needs to a worker's process; a
    second call changes nothing. `config`: None without a block.
    """
    has_weight_sync = bool(os.environ.get(WEIGHT_SYNC))
    if config is not None or has_weight_sync:
        expand_draft_parameters.apply()
        accept_fp64_keyword.apply()
    if config is not None and config.keyed:
        drop_generator.apply()
    copies_policy = config is not None and config.copies_policy
    if has_weight_sync or copies_policy:
        packed = not has_weight_sync
        keep_linear_weights.apply(packed)


@patch(
    "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens",
    since="0.24",
    needs="x, cu_num_tokens, num_tokens, replace_from, replace_to",
)
def expand_draft_parameters(stock: Any) -> Any:
    """Without it temperature, top-k and top-p of every draft position are uninitialised
    memory: the CPU stand-in of the Triton kernel fills a copy of its output and drops
    it. All versions up to 0.32.0. Remove this patch when vllm#55005 is fixed in the
    oldest supported vLLM.
    """

    def expand(
        x: torch.Tensor,
        cu_num_tokens: torch.Tensor,
        num_tokens: int,
        replace_from: int = 0,
        replace_to: int = 0,
    ) -> torch.Tensor:
        zero = cu_num_tokens.new_zeros(1, dtype=torch.int64)
        num_draft_tokens = torch.diff(cu_num_tokens.to(torch.int64), prepend=zero)
        replacement = torch.full_like(x, replace_to)
        values = torch.where(x == replace_from, replacement, x)
        return torch.repeat_interleave(values, num_draft_tokens, output_size=num_tokens)

    return expand


@patch(
    "vllm.utils.cpu_triton_utils:sample_recovered_tokens_kernel",
    since="0.24",
    adds=True,
)
def accept_fp64_keyword(stock: Any) -> Any:
    """Without it every speculative engine of vLLM 0.24.0 dies in its start-up dummy
    run: the CPU stand-in of the kernel does not know the keyword `USE_FP64_GUMBEL` that
    it is called with. Later versions know it and are left alone. Remove this patch when
    0.25 is the oldest supported vLLM.
    """
    import vllm.utils.cpu_triton_utils as kernels

    kernel = getattr(kernels, "_sample_recovered_tokens_kernel_impl", None)
    wrapper = getattr(kernels, "_FuncWrapper", None)
    if kernel is None or wrapper is None:
        return stock
    parameters = inspect.signature(kernel).parameters
    if "USE_FP64_GUMBEL" in parameters:
        return stock
    for parameter in parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            return stock
    return wrapper(
        lambda *args, USE_FP64_GUMBEL=False, **kwargs: kernel(*args, **kwargs)
    )


@patch(
    "vllm.v1.worker.gpu_input_batch:InputBatch.add_request",
    since="0.24",
    needs="request",
)
def drop_generator(stock: Any) -> Any:
    """Without it an engine dies where the prompt of a request with a seed is read in
    parts: vLLM's V1 runner turns the request's generator back then, which no CPU
    generator can do. Keyed noise needs no generator. Remove this patch when vLLM turns
    back only the generators that have drawn.
    """

    def add_request(self: Any, request: Any) -> int:
        request.generator = None
        return stock(self, request)

    return add_request


@patch(
    "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
    since="0.24",
    needs="layer, remove_weight",
)
def keep_linear_weights(stock: Any, packed: bool) -> Any:
    """Without it the CPU backend repacks every linear layer and empties `layer.weight`:
    `load_weights` on a live engine fails, and a trainer that pushes weights waits for
    ever; a policy copy would be quantised from nothing.

    `packed`: compute with the packed weights, which are faster, and keep the others
    beside them (see `REPACK`). Remove this patch when vLLM's CPU backend keeps
    `layer.weight` of the layers that it packs.
    """

    from das_adapter.engine.policy_copy import REPACK

    def keep(layer: Any, remove_weight: bool = False) -> None:
        if packed:
            stock(layer, remove_weight=False)
            setattr(layer, REPACK, lambda: stock(layer, remove_weight=False))
        else:
            layer.cpu_linear = torch.nn.functional.linear

    return keep
