"""Quantised linear layers, made from the policy's weights, for the policy copy.

Round to nearest, asymmetric, one scale and zero point per row and group of 128 inputs
(EfficientRollout, arXiv 2606.18967). Tensors keep their addresses when they are
quantised again, so CUDA graphs and sleeping memory pools stay valid.
"""

from __future__ import annotations

from functools import partial
from math import ceil
from typing import Any, Protocol

import torch

from das_adapter.core.native import native
from das_adapter.errors import ConfigError

GROUP = 128
"""Inputs that share a scale."""
ROWS = 16
"""Rows that stand together in memory (`csrc/quantised_linear.cpp`)."""


class QuantisedWeight(Protocol):
    """A quantised weight matrix [rows, inputs]."""

    kept: list[torch.Tensor]
    """Tensors in which it is kept, in a fixed order."""

    def quantise(self, weight: torch.Tensor) -> None:
        """Quantise `weight` [rows, inputs] into the existing tensors."""

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [..., inputs] by the matrix: [..., rows] in x's dtype."""


def quantised(weight: torch.Tensor, weights: str) -> QuantisedWeight:
    """Quantise a copy of `weight` [rows, inputs] in the format `weights`. ConfigError:
    the format or dtype does not exist on the weight's device.
    """
    formats: dict[str, Any]
    device = weight.device.type
    if device == "cpu":
        formats = {
            "int8": _CpuWeight,
            "int4": partial(_CpuWeight, bits=4),
        }
    else:
        from das_adapter.engine import quantised_gpu

        formats = {
            "fp8": quantised_gpu.Fp8,
            "int4": quantised_gpu.Int4,
        }
    if weights not in formats:
        allowed = ", ".join(map(repr, formats))
        raise ConfigError(
            f"das.self.weights: found {weights!r}, allowed on {device}: {allowed}"
        )
    copy: QuantisedWeight = formats[weights](weight)
    copy.quantise(weight)
    return copy


class _CpuWeight:
    """Weights of 4 or 8 bits, multiplied with inputs quantised to 8 bits by own
    kernels, which are made for the few tokens of a decode step.
    """

    def __init__(self, weight: torch.Tensor, bits: int = 8):
        allowed = (torch.float32, torch.bfloat16)
        if weight.dtype not in allowed:
            raise ConfigError(
                f"das.drafter: for a policy copy, found a policy in {weight.dtype},"
                " allowed on a CPU: torch.float32, torch.bfloat16"
            )
        self.rows, self.inputs = weight.shape
        blocks = ceil(self.rows / ROWS)
        groups = ceil(self.inputs / GROUP)
        block_weights = ROWS * GROUP
        block_bytes = block_weights * bits // 8
        codes_shape = (blocks, groups, block_bytes)
        row_shape = (blocks, groups, ROWS)
        codes = torch.empty(codes_shape, dtype=torch.uint8)
        scales = torch.empty(row_shape, dtype=torch.float32)
        zeros = torch.empty(row_shape, dtype=torch.uint8)
        self.kept = [codes, scales, zeros]
        addresses = [tensor.data_ptr() for tensor in self.kept]
        self._matrix = (
            self.rows,
            self.inputs,
            bits,
            *addresses,
        )
        """What the native kernels are told of the matrix."""

    def quantise(self, weight: torch.Tensor) -> None:
        weight = weight.detach().contiguous()
        is_bfloat16 = weight.dtype == torch.bfloat16
        native().quantise(
            weight.data_ptr(),
            is_bfloat16,
            *self._matrix,
            torch.get_num_threads(),
        )

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        *leading, _ = x.shape
        shape = (*leading, self.rows)
        flat = x.reshape(-1, self.inputs).contiguous()
        out = torch.empty(shape, dtype=x.dtype)
        is_bfloat16 = x.dtype == torch.bfloat16
        quantised_linear = native().quantised_linear
        quantised_linear(
            flat.data_ptr(),
            is_bfloat16,
            len(flat),
            *self._matrix,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out
