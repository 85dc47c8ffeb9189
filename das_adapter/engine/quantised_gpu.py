"""Quantised linear layers on a GPU, through vLLM's own kernels (vLLM 0.24 to 0.32)."""

from __future__ import annotations

import inspect
from typing import NamedTuple

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
    wide_codes = codes.to(torch.int32)
    inputs = len(codes)
    pairs = wide_codes.reshape(inputs, -1, 4, 2)
    packed = torch.zeros_like(pairs[..., 0, 0])
    # of eight numbers those at even places first: 0 2 4 6 1 3 5 7
    for place in range(8):
        pair = place % 4
        is_odd = place // 4
        numbers = pairs[..., pair, is_odd]
        packed |= numbers << (4 * place)
    return packed


class Rounded(NamedTuple):
    """A weight [rows, inputs] in 16 values for each row and group of inputs: about
    `scale * (code - zero)`.
    """

    codes: torch.Tensor
    """Numbers of 4 bits, float32 [rows, inputs]."""
    scales: torch.Tensor
    """Scales in the weight's dtype, [rows, groups]."""
    zeros: torch.Tensor
    """Zero points, float32 [rows, groups]."""


def rounded(weight: torch.Tensor) -> Rounded:
    """Round a weight [rows, inputs] to the nearest of 16 values for each row and group
    of inputs.
    """
    rows = len(weight)
    grouped = weight.float().view(rows, -1, GROUP)
    least = grouped.amin(-1)
    greatest = grouped.amax(-1)
    low = least.clamp(max=0)
    high = greatest.clamp(min=0)
    exact_steps = (high - low) / 15
    # such as float16 has, too
    steps = exact_steps.clamp(min=1e-6)
    scales = steps.to(weight.dtype)
    divisors = scales.float()
    exact_zeros = -low / divisors
    nearest_zeros = exact_zeros.round()
    zeros = nearest_zeros.clamp(0, 15)
    codes = grouped / divisors[..., None]
    codes.round_()
    codes.add_(zeros[..., None])
    codes.clamp_(0, 15)
    return Rounded(codes.view(weight.shape), scales, zeros)


def pack_zeros(zeros: torch.Tensor) -> torch.Tensor:
    """Pack zero points [groups, rows] to int32 [groups, rows / 8], as vLLM's
    `marlin_zero_points`.
    """
    order, _ = get_scale_perms()
    tiles = zeros.reshape(-1, len(order))
    ordered = tiles[:, order]
    return pack(ordered.reshape(zeros.shape))


class Fp8:
    """Weights in float8_e4m3fn with a scale per row, inputs quantised per token; needs
    compute capability 8.9.
    """

    def __init__(self, weight: torch.Tensor):
        codes = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
        scales = torch.empty(
            len(weight),
            1,
            dtype=torch.float32,
            device=weight.device,
        )
        self.kept = [codes, scales]

    def quantise(self, weight: torch.Tensor) -> None:
        fresh = ops.scaled_fp8_quant(
            weight.contiguous(),
            use_per_token_if_dynamic=True,
        )
        for kept, new in zip(self.kept, fresh, strict=True):
            kept.copy_(new)

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        *leading, width = x.shape
        flat = x.reshape(-1, width)
        codes, scales = ops.scaled_fp8_quant(flat, use_per_token_if_dynamic=True)
        own_codes, own_scales = self.kept
        y = ops.cutlass_scaled_mm(
            codes,
            own_codes.t(),
            scales,
            own_scales.t(),
            out_dtype=x.dtype,
        )
        return y.reshape(*leading, -1)


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
                self._unordered[name] = torch.empty(
                    0,
                    dtype=torch.int32,
                    device=weight.device,
                )

    def quantise(self, weight: torch.Tensor) -> None:
        rows_at_once = _WEIGHTS_AT_ONCE // self.inputs
        blocks_at_once = max(1, rows_at_once // 64)
        packed_parts = []
        scale_parts = []
        zero_parts = []
        parts = torch.split(weight, 64 * blocks_at_once)
        for part in parts:
            codes, part_scales, part_zeros = rounded(part)
            packed_parts.append(pack(codes.t()))
            scale_parts.append(part_scales)
            zero_parts.append(part_zeros)
        packed = torch.cat(packed_parts, 1)
        row_scales = torch.cat(scale_parts)
        row_zeros = torch.cat(zero_parts)
        scales = row_scales.t().contiguous()
        zeros = row_zeros.t()
        marlin_codes = ops.awq_marlin_repack(
            packed,
            self.inputs,
            self.rows,
            4,  # bits
        )
        marlin_scales = marlin_permute_scales(
            scales,
            self.inputs,
            self.rows,
            GROUP,
        )
        marlin_zeros = pack_zeros(zeros)
        fresh = [marlin_codes, marlin_scales, marlin_zeros]
        if not self.kept:
            self.kept = fresh
        for kept, new in zip(self.kept, fresh, strict=True):
            kept.copy_(new)
        # sleep may have thrown away the zeros that the kernel expects and leaves behind
        self._workspace.zero_()

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        *leading, _ = x.shape
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
        return y.reshape(*leading, self.rows)
