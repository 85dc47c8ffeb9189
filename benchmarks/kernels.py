"""Predict what a proposal of the V2 runner's device index takes on an H100; needs no GPU.

python benchmarks/kernels.py --out FILE.json

Triton compiles the kernels for sm_90, and the disassembler that it brings tells which line of source, in which calls,
each instruction comes from. Triton's interpreter runs the same lines on the texts of the GPU kit's part `index`
(`das_adapter/bench/device_index.py`), and counts how often each is run, and where loads find what they read. The kit
holds what it measures against the prediction.
"""

from __future__ import annotations

import functools
import json
import math
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import torch
from provenance import provenance, save

from das_adapter.bench.device_index import GROUP, STEPS, World
from das_adapter.bench.engines import Plan, apart

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path += [str(TESTS / "contract"), str(TESTS / "unit")]

SMS, CLOCK, WARPS, PROGRAMS, REGISTERS, SHARED = 132, 1.755e9, 64, 32, 65536, 227 * 1024
"""Multiprocessors of an H100 SXM, Hz (the PCIe card's boost clock, below the SXM card's), and what a multiprocessor
holds at most: warps, programs, registers, bytes of shared memory (CUDA Programming Guide, compute capability 9.0)."""
HBM, L2 = 3.35e12, 5.4e12
"""Bytes a second: NVIDIA's data sheet; 60 % of the L2 cache's 5120 bytes a clock (PMC10448217, table 3)."""
RATES = {"alu": 2.0, "multiply": 2.0, "float64": 2.0, "convert": 0.5, "shuffle": 1.0, "reduce": 0.5, "memory": 1.0}
"""Instructions of 32 lanes that a multiprocessor begins in a clock (CUDA Programming Guide, throughput of native
arithmetic instructions, compute capability 9.0); of memory: lines of 128 bytes."""
ISSUES = 4.0
"""Of all kinds together: one of each scheduler."""
LATENCIES = dict.fromkeys(RATES, 4) | {"float64": 8, "convert": 8, "shuffle": 29, "reduce": 29, "barrier": 29}
"""Clocks until a warp that is alone begins its next instruction, as if each waited for the one before it: 4 of
arithmetic (PMC10448217, table 3), twice that where the pipe has half the lanes; between lanes and warps as long as
shared memory takes (arXiv 2402.13499, table 4)."""
WAITS = {"L1": 41, "L2": 263, "HBM": 479}
"""Clocks of a load by where it finds what it reads (arXiv 2402.13499, table 4)."""
GAP_US = 1.5
"""From a kernel's end to the begin of the one that waits for it, in a CUDA graph or a full stream. Assumed: no source;
measured by a proposal whose requests are all nobody's."""
COPIES = 4
"""Launches before the graph: slots, numbers of tokens, lengths, and slots of nobody."""
BESIDE = ("learn", "estimate", "search_sealed")
"""Kernels that run beside `scan_live` and `merge_live`; `vote` waits for all."""
WORLDS = {"256 x 4096": (GROUP, 4096, 2, 256), "1 x 32768": (GROUP, 32768, 1, 1)}
"""Requests that write, tokens of their texts, and requests that are interpreted, of so many that draft."""
KINDS = (
    ("multiply", r"IMAD|FFMA|FMUL|FADD"),
    ("float64", r"D(ADD|MUL|FMA|SETP)"),
    ("convert", r"[IF]2[IF]|MUFU|POPC|FLO"),
    ("shuffle", r"SHFL"),
    ("reduce", r"REDUX|CREDUX"),
    ("barrier", r"BAR|WARPSYNC\.ALL|MEMBAR"),
    ("memory", r"LD[GS]?\b|ST[GS]?\b|ATOM|RED\b"),
)
FILE = re.compile(r'//## File "[^"]*?(\w+)\.py", line (\d+)')
CODE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
OURS = ("search", "votes")
Place = tuple[tuple[str, int], ...]
"""A line of source and those that call it, innermost first."""


@dataclass
class Program:
    """What one program of a kernel did in the interpreter."""

    kernel: str
    lines: Counter[Place] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    """Loads by where they found what they read."""
    bytes: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    """Lines of 128 bytes that warps read."""


class Kernel(NamedTuple):
    """A compiled kernel."""

    code: dict[Place, Counter[str]]
    """Instructions by their line of source and kind."""
    warps: int
    resident: int
    """Programs of a multiprocessor at a time."""


def traced(batch: int, length: int, asked: int, requests: int) -> list[Program]:
    """Interpret a proposal's kernels for some requests, after one that offered tokens; return what each program did."""
    from device_reference import launch
    from triton.runtime.interpreter import InterpreterBuilder

    from das_adapter.engine.v2 import device_index

    programs, block = device_index.SCAN["cuda"]
    splits = min(device_index.SPLITS, programs // requests)
    device_index.SCAN["cpu"] = (splits * asked, block)
    world = World(Plan("7b"), batch, length, asked, "cpu")
    world.index._launch = functools.partial(launch, world.index)  # type: ignore[method-assign]
    world.draft()
    del world.index._launch
    world.total += 4
    done: list[Program] = []
    known: dict[str, set[int]] = {"L1": set(), "L2": set()}

    def trace(frame: Any, event: str, _: Any) -> Any:
        name = Path(frame.f_code.co_filename).stem
        if name not in OURS or frame.f_code.co_name == "<module>":
            return None
        above, caller = [], frame.f_back
        while caller is not None:
            if (file := Path(caller.f_code.co_filename).stem) in OURS:
                above.append((file, caller.f_lineno))
            caller = caller.f_back
        if not above:
            done.append(Program(frame.f_code.co_name))
            known["L1"] = set()
        lines = done[-1].lines

        def line(frame: Any, event: str, _: Any) -> Any:
            if event == "line":
                lines[((name, frame.f_lineno), *above)] += 1
            return line

        return line

    stock = InterpreterBuilder.create_masked_load

    def load(self: Any, ptrs: Any, mask: Any, *others: Any) -> Any:
        there = np.broadcast_to(mask.data, ptrs.data.shape)
        sectors = set((ptrs.data[there] >> 5).tolist())
        missed = sectors - known["L1"]
        deeper = missed - known["L2"]
        program = done[-1]
        program.waits["HBM" if deeper else "L2" if missed else "L1"] += bool(sectors)
        program.bytes += Counter(L2=32 * len(missed), HBM=32 * len(deeper))
        of_warps = np.where(there, ptrs.data >> 7, 0).astype(np.int64).ravel()
        of_warps = np.sort(np.resize(of_warps, (-(-len(of_warps) // 32), 32)), axis=1)
        program.rows += int(((np.diff(of_warps, axis=1, prepend=0) != 0) & (of_warps > 0)).sum())
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

    from das_adapter.engine.v2 import search, votes
    from das_adapter.engine.v2.device_index import SCAN, DeviceIndex

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SCAN, "cpu", SCAN["cuda"])
        noted = forms(patch, search, votes)
        DeviceIndex(torch.zeros(256, 64, dtype=torch.int32), STEPS, 2**12, 0.0, 2**17)._launch(256)
    found = {}
    for kernel in compiled({name: kinds for name, kinds in noted.items() if kinds}, 90, search, votes):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            tools, usage = triton.knobs.nvidia, re.compile(r"REG:(\d+)")
            text, used = (
                subprocess.run([tool.path, *given, file.name], check=True, capture_output=True, text=True).stdout
                for tool, given in ((tools.nvdisasm, ("-c", "-gi")), (tools.cuobjdump, ("-res-usage",)))
            )
        registers = int(usage.search(used)[1])  # type: ignore[index]
        warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
        resident = min(PROGRAMS, WARPS // warps, REGISTERS // (32 * warps * registers), SHARED // (shared + 1024))
        found[kernel.metadata.name] = Kernel(instructions(text), warps, resident)
    return found


def instructions(text: str) -> dict[Place, Counter[str]]:
    """Count the instructions of a disassembled kernel by their line of source, of our files, and by kind."""
    found: dict[Place, Counter[str]] = {}
    place: list[tuple[str, int]] = []
    fresh = False
    for line in text.splitlines():
        if at := FILE.search(line):
            place = place if fresh else []
            fresh = True
            if at[1] in OURS:
                place.append((at[1], int(at[2])))
        elif code := CODE.match(line):
            fresh = False
            kind = next((kind for kind, form in KINDS if re.match(form, code[1])), "alu")
            found.setdefault(tuple(place), Counter())[kind] += code[1] != "NOP"
    return found


def unrolled() -> Counter[tuple[str, int]]:
    """Return how often each line stands in the code, of those that `tl.static_range` repeats."""
    import ast

    from das_adapter.engine.v2 import search, votes

    times: Counter[tuple[str, int]] = Counter()
    for module in (search, votes):
        name = module.__name__.rpartition(".")[2]
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
        runs, copies = 1.0, math.prod(times[line] or 1 for line in place)
        for depth in range(len(place)):
            if place[depth:] in program.lines:
                runs = program.lines[place[depth:]]
                break
        for kind, count in kinds.items():
            total[kind] += count * runs / copies  # type: ignore[assignment]
    return total


def predicted(done: list[Program], compiled: dict[str, Kernel], asked: int, requests: int) -> dict[str, Any]:
    """Return the microseconds of a proposal, and of each kernel.

    A kernel takes as long as its busiest unit, and then as its longest program alone, once for each time that the
    multiprocessors are filled: nothing of that program is taken to overlap with the others.
    """
    times, rows = unrolled(), {}
    for name, kernel in compiled.items():
        programs = [program for program in done if program.kernel == name]
        scale = 1 if name == "estimate" else -(-requests // 32) if name == "learn" else requests / asked
        counts = [executed(program, kernel, times) for program in programs]
        total = sum(counts, Counter())
        busy = {kind: total[kind] * kernel.warps / rate for kind, rate in RATES.items()}
        busy["memory"] += sum(program.rows for program in programs)
        busy["issue"] = sum(total.values()) * kernel.warps / ISSUES
        busy = {kind: clocks * scale / SMS / CLOCK for kind, clocks in busy.items()}
        moved = sum((program.bytes for program in programs), Counter())
        busy |= {"L2": moved["L2"] * scale / L2, "HBM": moved["HBM"] * scale / HBM}
        alone = [
            sum((LATENCIES | WAITS)[kind] * n for kind, n in (count + program.waits).items())
            for program, count in zip(programs, counts, strict=True)
        ]
        fills = -(-len(programs) * scale // (SMS * kernel.resident))
        unit = max(busy, key=lambda name: busy[name])
        rows[name] = {
            "programs": len(programs) * scale,
            "warps": kernel.warps,
            "resident": kernel.resident,
            "instructions_per_program": round(sum(sum(count.values()) for count in counts) / len(programs)),
            "barriers_per_program": round(total["barrier"] / len(programs), 1),
            "busiest": unit,
            "busy_us": 1e6 * busy[unit],
            "longest_us": 1e6 * fills * max(alone) / CLOCK,
        }
    beside = [rows[name] for name in BESIDE]
    live = [rows[name] for name in rows if name not in (*BESIDE, "vote")]
    longest = max(sum(row["longest_us"] for row in branch) + GAP_US * len(branch) for branch in (beside, live))
    last = rows["vote"]["busy_us"] + rows["vote"]["longest_us"]
    both = sum(row["busy_us"] for row in beside + live) + longest
    return {"proposal_us": COPIES * GAP_US + both + GAP_US + last, "kernels": rows}


@click.command()
@click.option("--out", type=click.Path(path_type=Path))
def main(out: Path | None) -> None:
    """Print the prediction as JSON."""
    compiled, rows = kernels(), {}
    for name, (batch, length, asked, requests) in WORLDS.items():
        interpreted = {"TRITON_INTERPRET": "1"}
        done = apart(Plan("7b"), traced, batch, length, asked, requests, env=interpreted, fresh=True)
        rows[name] = predicted(done, compiled, asked, requests)
        print(name, json.dumps(rows[name], indent=1))
    if out is not None:
        names = ("SMS", "CLOCK", "HBM", "L2", "RATES", "ISSUES", "LATENCIES", "WAITS", "GAP_US", "COPIES")
        save(out, {"provenance": provenance(), "assumed": {name: globals()[name] for name in names}, "rows": rows})


if __name__ == "__main__":
    main()
