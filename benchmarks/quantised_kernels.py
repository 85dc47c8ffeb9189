"""Time linear layers of a 0.6 B policy on a CPU: the policy's kernels against quantised ones, ours and existing ones.

    OMP_NUM_THREADS=2 python benchmarks/quantised_kernels.py [--out FILE]

Times the four matrices of a Qwen3-0.6B layer for some tokens at once, over several layers' worth of weights so that
caches do not hold them; the fastest of the repeats counts. Milliseconds per layer.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
import vllm._custom_ops as ops
from provenance import provenance, save
from rich.console import Console
from rich.table import Table
from vllm.platforms import current_platform

from das_adapter.engine.quantised import quantised

current_platform.import_kernels()

SHAPES = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)]  # qkv, o, gate and up, down
LAYERS, TOKENS = 6, (1, 2, 4, 8, 16, 32)
Linear = Callable[[torch.Tensor], torch.Tensor]


def torch_linear(w: torch.Tensor) -> Linear:
    return lambda x: torch.nn.functional.linear(x, w)


def onednn(w: torch.Tensor) -> Linear:
    """What vLLM's CPU backend uses for the policy."""
    handler = ops.create_onednn_mm(w.t(), 32)
    return lambda x: ops.onednn_mm(handler, x, None)


def ours(weights: str) -> Callable[[torch.Tensor], Linear]:
    return lambda w: quantised(w, weights).linear


def rows8(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = w.float().abs().amax(1) / 127
    return (w.float() / scale[:, None]).round().to(torch.int8), scale


def int8pack(w: torch.Tensor) -> Linear:
    codes, scale = rows8(w)
    return lambda x: torch.ops.aten._weight_int8pack_mm(x, codes, scale.to(w.dtype))


def int_mm(w: torch.Tensor) -> Linear:
    codes, scale = rows8(w)

    def linear(x: torch.Tensor) -> torch.Tensor:
        own = x.float().abs().amax(1, keepdim=True) / 127
        return torch._int_mm((x.float() / own).round().to(torch.int8), codes.t()).float() * own * scale

    return linear


def int4pack(w: torch.Tensor, group: int = 128) -> Linear:
    grouped = w.float().view(w.shape[0], -1, group)
    low, high = grouped.amin(2), grouped.amax(2)
    scale = (high - low) / 15
    codes = ((grouped - low[..., None]) / scale[..., None]).round().clamp(0, 15).int().view(w.shape)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    zeros = torch.stack([scale, low + 8 * scale], -1).transpose(0, 1).contiguous().to(w.dtype)
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group, zeros)


def onednn_int8(w: torch.Tensor) -> Linear:
    codes, scale = rows8(w)
    handler = ops.create_onednn_scaled_mm(codes.t(), scale.view(1, -1), w.dtype, True, False, 32)

    def linear(x: torch.Tensor) -> torch.Tensor:
        rounded, own, _ = ops.onednn_scaled_int8_quant(x, None, None, True)
        out = torch.empty(len(x), len(codes), dtype=x.dtype)
        ops.onednn_scaled_mm(handler, rounded, out, own, None, None, None)
        return out

    return linear


KERNELS = {
    "policy: oneDNN packed": onednn,
    "policy: torch linear": torch_linear,
    "ours int8": ours("int8"),
    "ours int4": ours("int4"),
    "aten int8pack": int8pack,
    "aten int4pack": int4pack,
    "oneDNN int8 x int8": onednn_int8,
    "torch _int_mm": int_mm,
}


def measure(kernel: Callable[[torch.Tensor], Linear], dtype: torch.dtype, repeats: int) -> list[float]:
    """Milliseconds per layer for each of `TOKENS`."""
    torch.manual_seed(0)
    shapes = SHAPES * LAYERS
    linears = [kernel((torch.randn(n, k) * 0.02).to(dtype)) for n, k in shapes]
    times = []
    for tokens in TOKENS:
        inputs = [torch.randn(tokens, k).to(dtype) for _, k in shapes]
        best = float("inf")
        for _ in range(repeats):
            begin = time.perf_counter()
            for linear, x in zip(linears, inputs, strict=True):
                linear(x)
            best = min(best, time.perf_counter() - begin)
        times.append(best * 1e3 / LAYERS)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=list(KERNELS))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = {
        dtype: {name: measure(KERNELS[name], getattr(torch, dtype), args.repeats) for name in args.kernels}
        for dtype in args.dtypes
    }
    for dtype, kernels in results.items():
        table = Table(title=f"ms per layer, {dtype}, {torch.get_num_threads()} threads")
        for column in ("kernel", *map(str, TOKENS)):
            table.add_column(column, justify="right")
        for name, times in kernels.items():
            table.add_row(name, *(f"{t:.2f}" for t in times))
        Console(width=100).print(table)
    if args.out:
        known = Path("/proc/cpuinfo").read_text().split()
        flags = [flag for flag in ("avx2", "avx512_vnni", "avx512_bf16", "amx_int8") if flag in known]
        made = provenance() | {"flags": flags, "threads": torch.get_num_threads()}
        save(args.out, {"provenance": made, "tokens": TOKENS, "layer": SHAPES, "ms_per_layer": results})


if __name__ == "__main__":
    main()
