"""Predict what a proposal of the V2 runner's device index takes on an H100, by the code
that Triton compiles for it.

python benchmarks/kernels.py --out FILE.json

It needs no GPU. A disassembler tells from which line of source, in which calls, each
instruction comes. Triton's interpreter runs these lines on the texts of the GPU kit's
part `kernels` (`das_adapter.bench.kernels.World`), and counts how often each is run and
what it loads.

A kernel takes the longest of three times: in which the device issues all instructions,
in which it reads all bytes, and of its longest program, where each instruction waits
for the one before it. Whatever a program loads for the first time comes from HBM, and
what an unrolled loop repeats is counted too often; but no kernel slows down the one
beside it, and no instruction takes longer than one of 32-bit integers. All programs of
a kernel run at once (`device_index.SCAN`).

[1] CUDA Programming Guide, compute capability 9.0: throughput of arithmetic
instructions. [2] PMC10448217, table 3: clock (the PCIe card's, below the SXM card's),
bandwidth, 4 clocks of an operation. [3] arXiv 2402.13499, table 4: clocks of a load
from HBM and from L1. [4] hazyresearch.stanford.edu/blog/2025-05-27-no-bubbles: what a
kernel takes to begin in a CUDA graph on an H100; taken for the four copies before the
graph, too, since in an engine the host is ahead of the device.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import pytest
import torch
from provenance import provenance, save
from triton import knobs
from triton.runtime.interpreter import InterpreterBuilder

from das_adapter.bench.engines import Plan
from das_adapter.bench.kernels import GROUP, STEPS, World
from das_adapter.engine.v2 import device_index, search, votes

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "unit"))
from compiled_kernels import compiled, forms

SMS, CLOCK, BANDWIDTH = 132, 1.755e9, 3.352e12
"""Multiprocessors of an H100 SXM; Hz; bytes a second from HBM [2]."""
RATE, WAIT, FIRST, AGAIN = 2, 6, 478.8, 40.7
"""Warp instructions that a multiprocessor issues in a clock [1]. Clocks until a warp
issues its next one: those of an operation and the 2 for which it holds its unit; and
those of a load of something new to the program, or known [3].
"""
BEGIN_US, COPIES = 1.3, 4
"""Launch of a kernel [4]; launches before the graph: slots, numbers of tokens, lengths,
and slots of nobody.
"""
CHAINS = (
    ("learn", "estimate", "search_sealed", "vote"),
    ("scan_live", "merge_live", "vote"),
)
"""Kernels that wait for each other."""
CELLS = {
    "256 x 4096": (256, 4096, 256, 32, 200),
    "1 x 32768": (GROUP, 32768, 1, 1, 200),
    "512 x 16384": (512, 16384, 512, 4, 500),
}
"""Requests that write, tokens of their texts, requests that draft, those of them that
are interpreted, and the bar.
"""
FILES = {str(search.__file__), str(votes.__file__)}
SOURCE = r'\s*//## File "([^"]*)", line (\d+).*\n'
CODE = re.compile(
    rf"((?:{SOURCE})+)|/\*[0-9a-f]{{4,}}\*/ +(?:@!?U?P\w+ +)?(?!NOP)[A-Z]"
)
"""Where the instructions that follow come from, or an instruction."""
Place = tuple[tuple[str, int], ...]
"""A line of source and those that call it, innermost first."""


class Program(NamedTuple):
    """What a program of a kernel did: how often it ran each line, its loads, and the
    sectors of 32 bytes they read.
    """

    kernel: str
    lines: Counter[Place]
    loads: Counter[str]
    sectors: set[int]


def traced(batch: int, length: int, requests: int, asked: int) -> list[Program]:
    """Interpret a proposal's kernels for some of the requests that draft; return what
    each program did.
    """
    programs, block = device_index.SCAN["cuda"]
    device_index.SCAN["cpu"] = (
        min(device_index.SPLITS, programs // requests) * asked,
        block,
    )
    world = World(Plan("7b"), batch, length, asked, "cpu")
    done = list[Program]()

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        calls = (
            (caller.f_code.co_filename, line)
            for caller, line in traceback.walk_stack(frame)
        )
        place = tuple(call for call in calls if call[0] in FILES)
        if event == "call" and len(place) == 1:
            done.append(Program(frame.f_code.co_name, Counter(), Counter(), set()))
        done[-1].lines[place] += event == "line"
        return trace

    stock = InterpreterBuilder.create_masked_load

    def load(self: Any, ptrs: Any, mask: Any, *others: Any) -> Any:
        sectors = set(
            (ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)] >> 5).tolist()
        )
        done[-1].loads["again" if sectors <= done[-1].sectors else "first"] += bool(
            sectors
        )
        done[-1].sectors.update(sectors)
        return stock(self, ptrs, mask, *others)

    InterpreterBuilder.create_masked_load = load
    sys.settrace(trace)
    world.draft()
    sys.settrace(None)
    return done


def instructions() -> dict[str, tuple[Counter[Place], int]]:
    """Compile the kernels of a proposal; return each one's instructions by line of
    source, and its warps.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(device_index.SCAN, "cpu", device_index.SCAN["cuda"])
        noted = forms(patch, search, votes)
        device_index.DeviceIndex(
            torch.zeros(256, 64, dtype=torch.int32), STEPS, 2**12, 0.0, 2**17
        )._launch(256)
    found = {}
    for kernel in compiled(noted, 90, search, votes):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(kernel.asm["cubin"])
            command = [knobs.nvidia.nvdisasm.path, "-c", "-gi", file.name]
            text = subprocess.run(
                command, check=True, capture_output=True, text=True
            ).stdout
        place = ()
        counts = Counter[Place]()
        for code in CODE.finditer(text):
            if code[1]:
                place = tuple(
                    (name, int(line))
                    for name, line in re.findall(SOURCE, code[1])
                    if name in FILES
                )
            else:
                counts[place] += 1
        found[kernel.metadata.name] = counts, kernel.metadata.num_warps
    return found


def predicted(
    done: list[Program], code: dict[str, tuple[Counter[Place], int]], scale: float
) -> dict[str, Any]:
    """Return the microseconds of a proposal, and of each kernel; `scale`: requests that
    draft, per interpreted one.
    """
    rows = {}
    for name, (counts, warps) in code.items():
        issued = []
        waits = []
        read = 0
        for _, lines, loads, sectors in (
            program for program in done if program.kernel == name
        ):
            issued.append(sum(count * lines[place] for place, count in counts.items()))
            waits.append(
                WAIT * issued[-1] + FIRST * loads["first"] + AGAIN * loads["again"]
            )
            read += 32 * len(sectors)
        times = 1 if name == "estimate" else scale
        rows[name] = {
            "programs": round(times * len(issued)),
            "instructions": round(sum(issued) / len(issued)),
            "bytes": round(read / len(issued)),
            "busy_us": (
                1e6
                * times
                * max(warps * sum(issued) / RATE / SMS / CLOCK, read / BANDWIDTH)
            ),
            "longest_us": 1e6 * max(waits) / CLOCK,
        }
    takes = {
        name: BEGIN_US + max(row["busy_us"], row["longest_us"])
        for name, row in rows.items()
    }
    longest = max(sum(takes[name] for name in chain) for chain in CHAINS)
    return {"proposal_us": COPIES * BEGIN_US + longest, "kernels": rows}


@click.command()
@click.option("--out", type=click.Path(path_type=Path))
def main(out: Path | None) -> None:
    """Print the prediction as JSON, and write it to a file."""
    code = instructions()
    cells = {}
    os.environ["TRITON_INTERPRET"] = "1"  # of the process that follows
    with ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn")
    ) as interpreter:
        for name, (batch, length, requests, asked, bar) in CELLS.items():
            done = interpreter.submit(traced, batch, length, requests, asked).result()
            cells[name] = {
                "bar_us": bar,
                "interpreted": asked,
                **predicted(done, code, requests / asked),
            }
            print(name, cells[name], flush=True)
    if out:
        save(out, {"provenance": provenance(), "cells": cells})


if __name__ == "__main__":
    main()
