"""Predict what a proposal of the V2 runner's device index takes on an H100; needs no GPU, and no GPU has checked it.

python benchmarks/kernels.py --out FILE.json

Triton compiles the kernels for sm_90, and its disassembler tells which line of source, in which calls, each instruction
comes from. Triton's interpreter runs the same lines on the texts of the GPU kit's part `kernels`
(`das_adapter.bench.kernels.py`: tokens as frequent as words, the r-th of 152,064 with a weight of 1 / (r + 2.7);
siblings that differ in a tenth), and counts how often each line is run, and where loads find what they read.

A kernel takes as long as its busiest unit, and then as its longest program alone, in which each instruction waits for
the one before it: Graham's bound of a schedule in which nothing idles that could work. Sources:
[1] CUDA Programming Guide, compute capability 9.0: throughput of arithmetic instructions, technical specifications.
[2] PMC10448217, table 3: clock (the PCIe card's, below the SXM card's), bandwidths, 4 clocks of an operation.
[3] arXiv 2402.13499, table 4: clocks of a load by where it finds what it reads; those of shared memory are taken for
exchanges between lanes and warps, which take its way.
[4] hazyresearch.stanford.edu/blog/2025-05-27-no-bubbles: what a kernel takes to begin in a CUDA graph on an H100; taken
for the four copies before the graph, too, since in an engine the host is ahead of the device.
"""

from __future__ import annotations

import ast
import functools
import math
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import torch
from provenance import provenance, save

from das_adapter.bench.engines import Plan
from das_adapter.bench.kernels import GROUP, STEPS, World
from das_adapter.engine.v2 import device_index, search, votes

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path += [str(TESTS / "contract"), str(TESTS / "unit")]

SMS, CLOCK, BANDWIDTHS = 132, 1.755e9, {"L2": 8.986e12, "HBM": 3.352e12}
"""Multiprocessors of an H100 SXM; Hz; bytes a second [2]."""
WARPS, PROGRAMS, REGISTERS, SHARED = 64, 32, 65536, 227 * 1024
"""What a multiprocessor holds at most: warps, programs, registers, bytes of shared memory [1]."""
RATES = {"integer": 2.0, "float64": 2.0, "convert": 0.5, "shuffle": 1.0, "reduce": 0.5, "memory": 1.0, "issue": 4.0}
"""Warp instructions that a multiprocessor begins in a clock [1]: all that are no other kind count as 32-bit integer, of
16 lanes a scheduler; of memory: lines of 128 bytes; `issue`: all together, one of each scheduler."""
WAITS = {kind: 4 + RATES["issue"] / rate for kind, rate in RATES.items()}
WAITS |= dict.fromkeys(("shuffle", "reduce", "barrier"), 29.0) | {"L1": 40.7, "L2": 263.0, "HBM": 478.8}
"""Clocks until the next instruction begins: those of an operation [2] and as long as it takes its unit; [3]."""
BEGIN_US, COPIES = 1.3, 4
"""Of a kernel [4]; launches before the graph: slots, numbers of tokens, lengths, and slots of nobody."""
BESIDE = ("learn", "estimate", "search_sealed")
"""Kernels that run beside `scan_live` and `merge_live`; `vote` waits for all."""
CELLS = {"256 x 4096": (256, 4096, 256, 32, 150), "1 x 32768": (GROUP, 32768, 1, 1, 120)}
"""Requests that write, tokens of their texts, requests that draft, those of them that are interpreted, and the bar."""
KINDS = {
    "float64": r"D(ADD|MUL|FMA|SETP)",
    "convert": r"[IF]2[IF]|MUFU|POPC|FLO",
    "shuffle": r"SHFL",
    "reduce": r"C?REDUX",
    "barrier": r"BAR|WARPSYNC\.ALL|MEMBAR",
    "memory": r"LD[GS]?\b|ST[GS]?\b|ATOM|RED\b|REDG",
}
FILE = re.compile(r'//## File "[^"]*?(\w+)\.py", line (\d+)')
CODE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)")
MODULES = {"search": search, "votes": votes}
FILES = {str(module.__file__): name for name, module in MODULES.items()}
Place = tuple[tuple[str, int], ...]
"""A line of source and those that call it, innermost first."""


class Program(NamedTuple):
    """What one program of a kernel did in the interpreter: how often it ran each line; and its loads by where they
    found what they read, bytes by where they came from, and lines of 128 bytes."""

    kernel: str
    lines: Counter[Place]
    loads: Counter[str]


class Kernel(NamedTuple):
    """A compiled kernel: instructions by line of source and kind, warps, and programs of a multiprocessor at a time."""

    code: dict[Place, Counter[str]]
    warps: int
    resident: int


def traced(batch: int, length: int, requests: int, asked: int) -> list[Program]:
    """Interpret a proposal's kernels for some requests, after one that offered tokens; return what each program did."""
    from device_reference import launch
    from triton.runtime.interpreter import InterpreterBuilder

    programs, block = device_index.SCAN["cuda"]
    device_index.SCAN["cpu"] = (min(device_index.SPLITS, programs // requests) * asked, block)
    world = World(Plan("7b"), batch, length, asked, "cpu")
    world.index._launch = functools.partial(launch, world.index)  # type: ignore[method-assign]
    world.draft()
    del world.index._launch
    world.total += 4
    done: list[Program] = []
    known: dict[str, set[int]] = {"L1": set(), "L2": set()}

    def trace(frame: Any, event: str, _: Any) -> Any:
        if (name := FILES.get(frame.f_code.co_filename)) is None or frame.f_code.co_name == "<module>":
            return None
        above, caller = [], frame.f_back
        while caller is not None:
            if file := FILES.get(caller.f_code.co_filename):
                above.append((file, caller.f_lineno))
            caller = caller.f_back
        if not above:
            done.append(Program(frame.f_code.co_name, Counter(), Counter()))
            known["L1"] = set()
        lines = done[-1].lines

        def line(frame: Any, event: str, _: Any) -> Any:
            lines[((name, frame.f_lineno), *above)] += event == "line"
            return line

        return line

    stock = InterpreterBuilder.create_masked_load

    def load(self: Any, ptrs: Any, mask: Any, *others: Any) -> Any:
        sectors = set((ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)] >> 5).tolist())
        missed = sectors - known["L1"]
        deeper = missed - known["L2"]
        loads = done[-1].loads
        loads["HBM" if deeper else "L2" if missed else "L1"] += bool(sectors)
        loads.update({"L2 bytes": 32 * len(missed), "HBM bytes": 32 * len(deeper)})
        loads["lines"] += len({sector >> 2 for sector in sectors})
        known["L1"] |= missed
        known["L2"] |= deeper
        return stock(self, ptrs, mask, *others)

    InterpreterBuilder.create_masked_load = load
    sys.settrace(trace)
    try:
        world.draft()
    finally:
        sys.settrace(None)
    return done


def kernels() -> dict[str, Kernel]:
    """Compile the kernels of a proposal, and read their code."""
    import pytest
    import triton
    from compiled_kernels import compiled, forms

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(device_index.SCAN, "cpu", device_index.SCAN["cuda"])
        noted = forms(patch, search, votes)
        device_index.DeviceIndex(torch.zeros(256, 64, dtype=torch.int32), STEPS, 2**12, 0.0, 2**17)._launch(256)
    found, tools = {}, triton.knobs.nvidia
    for kernel in compiled({name: kinds for name, kinds in noted.items() if kinds}, 90, search, votes):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            text, used = (
                subprocess.run([tool.path, *given, file.name], check=True, capture_output=True, text=True).stdout
                for tool, given in ((tools.nvdisasm, ("-c", "-gi")), (tools.cuobjdump, ("-res-usage",)))
            )
        registers, warps = int(re.search(r"REG:(\d+)", used)[1]), kernel.metadata.num_warps  # type: ignore[index]
        by_registers = REGISTERS // (32 * warps * registers)
        resident = min(PROGRAMS, WARPS // warps, by_registers, SHARED // (kernel.metadata.shared + 1024))
        found[kernel.metadata.name] = Kernel(instructions(text), warps, resident)
    return found


def instructions(text: str) -> dict[Place, Counter[str]]:
    """Count the instructions of a disassembled kernel by line of source and kind; what `BRA.DIV` leads to, for warps
    whose lanes have parted, is left out: ours never do."""
    found: dict[Place, Counter[str]] = {}
    place: list[tuple[str, int]] = []
    fresh = parted = False
    for line in text.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            parted = parted or re.search(rf"BRA\.DIV .*{re.escape(label[1])}\b", text) is not None
        elif at := FILE.search(line):
            place = [*(place if fresh else []), *([(at[1], int(at[2]))] if at[1] in MODULES else [])]
            fresh = True
        elif code := CODE.match(line):
            fresh = False
            kind = next((kind for kind, form in KINDS.items() if re.match(form, code[2])), "integer")
            found.setdefault(tuple(place), Counter())[kind] += code[2] != "NOP" and not parted
            parted = parted and (code[2] != "BRA" or code[1] is not None)
    return found


def unrolled() -> Counter[tuple[str, int]]:
    """Return how often each line stands in the code, of those that `tl.static_range` repeats."""
    times: Counter[tuple[str, int]] = Counter()
    for name, module in MODULES.items():
        for loop in ast.walk(ast.parse(Path(str(module.__file__)).read_text())):
            if isinstance(loop, ast.For) and "static_range" in ast.unparse(loop.iter):
                count = eval(ast.unparse(loop.iter.args[0]), vars(module))  # type: ignore[attr-defined]
                for line in range(loop.lineno + 1, int(loop.end_lineno or 0) + 1):
                    times[name, line] = int(getattr(count, "value", count))
    return times


def executed(program: Program, kernel: Kernel, times: Counter[tuple[str, int]]) -> Counter[str]:
    """Return a program's instructions by kind, of each of its warps. What the interpreter has no line for counts as
    often as the line that calls it."""
    total: Counter[str] = Counter()
    for place, kinds in kernel.code.items():
        copies = math.prod(times[line] or 1 for line in place)
        runs = next((program.lines[place[i:]] for i in range(len(place)) if place[i:] in program.lines), not place)
        for kind, count in kinds.items():
            total[kind] += count * runs / copies  # type: ignore[assignment]
    return total


def predicted(done: list[Program], compiled: dict[str, Kernel], requests: int, asked: int) -> dict[str, Any]:
    """Return the microseconds of a proposal, and of each kernel; see this module."""
    times, rows = unrolled(), {}
    for name, kernel in compiled.items():
        programs = [program for program in done if program.kernel == name]
        scale = 1 if name == "estimate" else -(-requests // 32) if name == "learn" else requests / asked
        counts = [executed(program, kernel, times) for program in programs]
        work, loads = sum(counts, Counter()), sum((program.loads for program in programs), Counter())
        each = {kind: round(n / len(programs)) for kind, n in sorted(work.items())}
        work["issue"] = sum(work.values())
        units = {kind: work[kind] * kernel.warps / rate / SMS / CLOCK for kind, rate in RATES.items()}
        units["memory"] += loads["lines"] / SMS / CLOCK
        units |= {level: loads[f"{level} bytes"] / rate for level, rate in BANDWIDTHS.items()}
        longest = max(
            sum(WAITS.get(kind, 0) * n for kind, n in (count + program.loads).items())
            for program, count in zip(programs, counts, strict=True)
        )
        fills = math.ceil(len(programs) * scale / (SMS * kernel.resident))
        busiest = max(units, key=lambda unit: units[unit])
        rows[name] = {
            "programs": round(len(programs) * scale),
            "resident": kernel.resident,
            "instructions": each,
            "busiest": busiest,
            "busy_us": 1e6 * units[busiest] * scale,
            "longest_us": 1e6 * fills * longest / CLOCK,
        }
    beside, live = [name for name in rows if name in BESIDE], [n for n in rows if n not in (*BESIDE, "vote")]
    longest = max(sum(rows[name]["longest_us"] + BEGIN_US for name in branch) for branch in (beside, live))
    busy = sum(rows[name]["busy_us"] for name in (*beside, *live))
    last = rows["vote"]["busy_us"] + rows["vote"]["longest_us"]
    return {"proposal_us": (COPIES + 1) * BEGIN_US + busy + longest + last, "kernels": rows}


@click.command()
@click.option("--out", type=click.Path(path_type=Path))
def main(out: Path | None) -> None:
    """Print the prediction as JSON, and write it to a file."""
    found, cells = kernels(), {}
    os.environ["TRITON_INTERPRET"] = "1"  # of the processes that follow
    for name, (batch, length, requests, asked, bar) in CELLS.items():
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as interpreter:
            done = interpreter.submit(traced, batch, length, requests, asked).result()
        cells[name] = {"bar_us": bar, "interpreted": asked, **predicted(done, found, requests, asked)}
        print(name, cells[name], flush=True)
    if out:
        save(out, {"provenance": provenance(), "cells": cells})


if __name__ == "__main__":
    main()
