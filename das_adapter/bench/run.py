"""Measure das-adapter on one GPU, without a network and without weights.

    das-adapter bench                      # all parts, at most 25 minutes
    das-adapter bench gate replay
        # some parts, each at most 8 minutes for a shape
    das-adapter bench --minutes 4 gate     # less time
    das-adapter bench --shape 7b
        # one shape; else `gate` takes both, `replay` and `lossless` 1.5b, others 7b
    das-adapter bench replay --traces FILE
        # recorded rollouts with token ids, as `das-adapter estimate` reads
    das-adapter bench --shape tiny --out DIR
        # on a CPU: only whether the parts work

Policies have random weights in the shape of Qwen2.5; `lossless` writes some for its
time, 4 GB for 1.5b, where TMPDIR says. gpu_PART_SHAPE.json has what a part could
measure, with its provenance. A bar is `kept` where all of its part ran, `MISSED` where
a figure is too high, `cut short` where those measured are good and others are missing,
and `not run` where none was measured, or too roughly to tell. The exit code is 0 if
none was missed or cut short and no part failed. Parts and their minutes, estimated by
what an H200 took, for all of their shapes:

    kernels  1    the time of the sampling kernel (V1 runner) and of the history's (V2),
    and their memory gate     9    undrafted steps beside stock vLLM's, start-up and KV
    cache replay   6    recorded rollouts through real forward passes, with and without
    drafts lossless 4    equal tokens behind long prompts copy     4    quantising the
    policy, and its copy after sleep

The first needs no vLLM, but PyTorch, Triton and NumPy alone.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from das_adapter.bench.engines import SHAPES, TINY, Found, Plan, apart
from das_adapter.tools.provenance import provenance, save

PARTS = ("kernels", "gate", "replay", "lossless", "copy")
"""Each is a module of the package. In the order in which they run: what there is no
time for is at the end.
"""
_SHAPES = {"gate": ("7b", "1.5b"), "replay": ("1.5b",), "lossless": ("1.5b",)}
"""Of a part where none is asked for; else 7b. Of `gate` a small policy may not keep
what a large one does; the others have several engines at once.
"""
PART_S, ALL_S = 480.0, 1500.0
"""Seconds after which a part, and everything, is ended."""
NOT_GOOD = ("MISSED", "cut short", "failed")


def module(part: str) -> Any:
    """Return the module of a part: its `BARS`, and `measure`, which yields figures.
    Imports no vLLM.
    """
    return importlib.import_module(f"das_adapter.bench.{part}")


def measured(
    name: str,
    plan: Plan,
    traces: Path | None,
    keep: Callable[[Found], None] = lambda _: None,
) -> Found:
    """Measure one part; where it fails or its time is over, what is known by then is
    there. `keep` is called with it after each figure.
    """
    content: Found = {}
    try:
        for found in module(name).measure(plan, traces):
            content |= found
            keep(content | {"state": "cut short", "why": "the program was ended"})
        return content | {"state": "done"}
    except TimeoutError as error:
        return content | {"state": "cut short", "why": str(error)}
    except Exception as error:
        why = str(error).strip().splitlines()[-1]
        return content | {
            "state": "failed",
            "why": why,
            "error": traceback.format_exc(),
        }


def judge(name: str, content: Found) -> list[str]:
    """Add the verdicts to what a part has measured and print them; return them, and
    `failed` or `cut short` of a part that did not end.
    """
    content["bars"] = [bar.verdict(content) for bar in module(name).BARS]
    for v in content["bars"]:
        found = (
            ""
            if v["found"] is None
            else f": {v['found']:.4g} (at most {v['at_most']:g})"
        )
        print(f"{v['verdict']:9} {name}: {v['bar']}{found}")
    if "why" in content:
        print(f"          {name}: {content['why']}")
    return [v["verdict"] for v in content["bars"]] + [content["state"]] * (
        content["state"] != "done"
    )


def chosen(words: Sequence[str], shape: str | None) -> list[tuple[str, str]]:
    """Return these parts, or all, each with a shape; None: with its shapes."""
    names = dict.fromkeys(words or PARTS)
    return [
        (name, each)
        for name in names
        for each in ((shape,) if shape else _SHAPES.get(name, ("7b",)))
    ]


def _save(path: Path, head: Found, content: Found) -> None:
    save(path, head | content)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; None: that of the process."""
    os.environ.update(
        VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1"
    )
    parser = argparse.ArgumentParser(
        "das-adapter bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; none: all"
    )
    parser.add_argument("--shape", choices=list(SHAPES), help="that of every part")
    parser.add_argument("--traces", type=Path, help="recorded rollouts for `replay`")
    parser.add_argument(
        "--out", type=Path, default=Path("das-bench"), help="where the files go"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=PART_S / 60,
        help="for each part and shape, at most",
    )
    args = parser.parse_args(arguments)
    if unknown := sorted(set(args.parts) - {*PARTS}):
        parser.error(f"found {', '.join(unknown)}, allowed: {', '.join(PARTS)}")
    # as after an error: engines are ended
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    made = apart(TINY, provenance)  # it asks the GPU, which this process must not use
    if made["hardware"]["gpu"] is None and args.shape != "tiny":
        parser.error(
            "found no GPU; without one, --shape tiny tells whether the parts work"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    plans = {shape: Plan(shape) for shape in SHAPES} | {"tiny": TINY}
    counts = Counter[str]()
    end = time.monotonic() + ALL_S
    for name, shape in chosen(args.parts, args.shape):
        until = min(time.monotonic() + 60 * args.minutes, end)
        traces = (
            f" --traces {args.traces.name}" if args.traces and name == "replay" else ""
        )
        command = f"das-adapter bench {name} --shape {shape}{traces}"
        head = {"provenance": made | {"command": command}, "part": name, "shape": shape}
        keep = functools.partial(_save, args.out / f"gpu_{name}_{shape}.json", head)
        content = measured(name, replace(plans[shape], until=until), args.traces, keep)
        counts.update(judge(name, content))
        keep(content)
    print(
        ", ".join(
            f"{counts[verdict]} {verdict}" for verdict in ("kept", *NOT_GOOD, "not run")
        )
    )
    sys.exit(any(counts[verdict] for verdict in NOT_GOOD))
