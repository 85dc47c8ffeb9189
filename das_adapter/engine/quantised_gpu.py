"""Quantised linear layers on a GPU, through vLLM's own kernels (vLLM 0.24 to 0.32)."""

from __future__ import annotations

import inspect

import torch
from vllm import _custom_ops as ops
from vllm.model_executor.layers.quantization.utils.marlin_utils import (
    get_scale_perms,
    marlin_make_workspace_new,
    marlin_permute_scales,
)
from vllm.scalar_type import scalar_types

from das_adapter.errors import ConfigError

GROUP = 128
"""Inputs that share a scale."""
_WEIGHTS_AT_ONCE = 2**24
"""Weights that are quantised at once: the float32 copies on the way take some 20 bytes
each.
"""


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Pack numbers of 4 bits [inputs, rows] to int32 [inputs, rows / 8], as vLLM's
    `awq_pack` does on the host, which takes seconds for a large matrix.
    """
    pairs = codes.to(torch.int32).reshape(len(codes), -1, 4, 2)
    packed = torch.zeros_like(pairs[..., 0, 0])
    # of eight numbers those at even places first: 0 2 4 6 1 3 5 7
    for place in range(8):
        numbers = pairs[..., place % 4, place // 4]
        packed |= numbers << (4 * place)
    return packed


def rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round a weight [rows, inputs] to the nearest of 16 values for each row and group
    of inputs.

    Returns codes float32 [rows, inputs], scales [rows, groups] in the weight's dtype
    and zero points float32 [rows, groups]: a weight is about `scale * (code - zero)`.
    """
    grouped = weight.float().view(len(weight), -1, GROUP)
    low = grouped.amin(-1).clamp(max=0)
    high = grouped.amax(-1).clamp(min=0)
    # such as float16 has, too
    steps = ((high - low) / 15).clamp(min=1e-6)
    scales = steps.to(weight.dtype)
    divisors = scales.float()
    zeros = (-low / divisors).round().clamp(0, 15)
    codes = grouped / divisors[..., None]
    codes.round_()
    codes.add_(zeros[..., None])
    codes.clamp_(0, 15)
    return codes.view(weight.shape), scales, zeros


def pack_zeros(zeros: torch.Tensor) -> torch.Tensor:
    """Pack zero points [groups, rows] to int32 [groups, rows / 8], as vLLM's
    `marlin_zero_points`.
    """
    order = get_scale_perms()[0]
    ordered = zeros.reshape(-1, len(order))[:, order]
    return pack(ordered.reshape(zeros.shape))


class Fp8:
    """Weights in float8_e4m3fn with a scale per row, inputs quantised per token; needs
    compute capability 8.9.
    """

    def __init__(self, weight: torch.Tensor):
        scales = torch.empty(len(weight), 1, dtype=torch.float32, device=weight.device)
        self.kept = [torch.empty_like(weight, dtype=torch.float8_e4m3fn), scales]

    def quantise(self, weight: torch.Tensor) -> None:
        fresh = ops.scaled_fp8_quant(weight.contiguous(), use_per_token_if_dynamic=True)
        for kept, new in zip(self.kept, fresh, strict=True):
            kept.copy_(new)

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        codes, scales = ops.scaled_fp8_quant(flat, use_per_token_if_dynamic=True)
        own_codes, own_scales = self.kept
        y = ops.cutlass_scaled_mm(
            codes, own_codes.t(), scales, own_scales.t(), out_dtype=x.dtype
        )
        return y.reshape(*x.shape[:-1], -1)


class Int4:
    """uint4 weights, zero points per row and group of 128 inputs, in Marlin's layout;
    needs compute capability 8.0.
    """

    def __init__(self, weight: torch.Tensor):
        rows, inputs = weight.shape
        if rows % 64 or inputs % GROUP:
            raise ConfigError(
                f"das.self.weights: found 'int4' and a weight of {rows} x {inputs},"
                " allowed on a GPU: rows divisible by 64 and inputs by 128 (else"
                " 'fp8')"
            )
        self.rows = rows
        self.inputs = inputs
        self.kept: list[torch.Tensor] = []
        self._workspace = marlin_make_workspace_new(weight.device)
        self._unordered: dict[str, torch.Tensor] = {}
        """Arguments that say that the inputs are in order, which vLLM 0.32 no longer
        has.
        """
        known = inspect.signature(ops.marlin_gemm).parameters
        for name in ("g_idx", "perm"):
            if name in known:
                nothing = torch.empty(0, dtype=torch.int32, device=weight.device)
                self._unordered[name] = nothing

    def quantise(self, weight: torch.Tensor) -> None:
        rows_at_once = max(1, _WEIGHTS_AT_ONCE // self.inputs // 64) * 64
        packed_parts = []
        scale_parts = []
        zero_parts = []
        for part in torch.split(weight, rows_at_once):
            codes, part_scales, part_zeros = rounded(part)
            packed_parts.append(pack(codes.t()))
            scale_parts.append(part_scales)
            zero_parts.append(part_zeros)
        packed = torch.cat(packed_parts, 1)
        scales = torch.cat(scale_parts).t().contiguous()
        zeros = torch.cat(zero_parts).t()
        fresh = [
            ops.awq_marlin_repack(packed, self.inputs, self.rows, 4),
            marlin_permute_scales(scales, self.inputs, self.rows, GROUP),
            pack_zeros(zeros),
        ]
        if not self.kept:
            self.kept = fresh
        for kept, new in zip(self.kept, fresh, strict=True):
            kept.copy_(new)
        # sleep may have thrown away the zeros that the kernel expects and leaves behind
        self._workspace.zero_()

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, self.inputs)
        codes, scales, zeros = self.kept
        y = ops.marlin_gemm(
            a=flat,
            c=None,
            b_q_weight=codes,
            b_bias=None,
            b_scales=scales,
            a_scales=None,
            global_scale=None,
            b_zeros=zeros,
            workspace=self._workspace,
            b_q_type=scalar_types.uint4,
            size_m=len(flat),
            size_n=self.rows,
            size_k=self.inputs,
            use_fp32_reduce=True,
            **self._unordered,
        )
        return y.reshape(*x.shape[:-1], self.rows)
