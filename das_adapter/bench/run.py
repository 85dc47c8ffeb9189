"""Measure das-adapter on one GPU, without a network and without weights.

    das-adapter bench                          # all parts, at most 25 minutes
    das-adapter bench gate replay              # some parts
    das-adapter bench --minutes 4 gate         # less time
    das-adapter bench --shape 7b               # one shape for all parts
    das-adapter bench replay --traces FILE     # recorded rollouts
    das-adapter bench train --tiny-math DIR    # a training, with TRL
    das-adapter bench --shape tiny --out DIR   # on a CPU: only whether the parts work

A part takes at most 8 minutes for a shape. Without --shape, `gate` takes both shapes,
`train`, `replay` and `lossless` 1.5b, others 7b. `train` must be named; DIR is
examples/tiny_math of das-adapter's repository, here by default. Recorded rollouts have
token ids, as `das-adapter estimate` reads them.

Policies have random weights in the shape of Qwen2.5; `lossless` writes some for its
time, 4 GB for 1.5b, where TMPDIR says. gpu_PART_SHAPE.json has what a part could
measure, with its provenance. A bar is `kept` where all of its part ran, `MISSED` where
a figure is too high, `cut short` where those measured are good and others are missing,
and `not run` where none was measured, or too roughly to tell. The exit code is 0 if
none was missed or cut short and no part failed. Parts and their minutes, estimated by
what an H200 took, for all of their shapes:

    kernels  1    the sampling kernel (V1 runner), and the history's (V2)
    gate     9    undrafted steps beside stock vLLM's, start-up and KV cache
    replay   6    recorded rollouts through real forward passes
    lossless 4    equal tokens behind long prompts
    copy     4    quantising the policy, and its copy after sleep
    train    8    GRPO through TRL: rollout and step times by epoch, rewards

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
from das_adapter.reports.provenance import provenance, save

ALL = ("kernels", "gate", "replay", "lossless", "copy")
"""Parts where none is named, in the order in which they run: those that there may be no
time for are at the end.
"""
PARTS = (*ALL, "train")
"""Modules of the package."""
_SHAPES = {
    "train": ("1.5b",),
    "gate": ("7b", "1.5b"),
    "replay": ("1.5b",),
    "lossless": ("1.5b",),
}
"""Shapes of a part where none is asked for; of others 7b. A small policy may not keep
the bars of `gate` that a large one keeps; the others have several engines at once.
"""
PART_S = 480.0
"""Seconds after which a part is ended."""
ALL_S = 1500.0
"""Seconds after which everything is ended."""
NOT_GOOD = ("MISSED", "cut short", "failed")
VERDICTS = ("kept", *NOT_GOOD, "not run")


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
    """Measure one part; where it fails or its time is over, return what is known by
    then. `keep` is called with it after each figure.
    """
    content: Found = {}
    ended = {"state": "cut short", "why": "the program was ended"}
    part = module(name)
    try:
        for figures in part.measure(plan, traces):
            content |= figures
            keep(content | ended)
    except TimeoutError as error:
        content["state"] = "cut short"
        content["why"] = str(error)
    except Exception as error:
        text = str(error).strip()
        lines = text.splitlines()
        content["state"] = "failed"
        content["why"] = lines[-1]
        content["error"] = traceback.format_exc()
    else:
        content["state"] = "done"
    return content


def judge(name: str, content: Found) -> list[str]:
    """Add the verdicts to what a part has measured and print them; return them, and
    `failed` or `cut short` of a part that did not end.
    """
    verdicts = []
    bars = []
    for bar in module(name).BARS:
        judged = bar.verdict(content)
        bars.append(judged)
        verdict = judged["verdict"]
        verdicts.append(verdict)
        figure = ""
        found = judged["found"]
        if found is not None:
            figure = f": {found:.4g} (at most {judged['at_most']:g})"
        print(f"{verdict:9} {name}: {judged['bar']}{figure}")
    content["bars"] = bars
    if "why" in content:
        print(f"          {name}: {content['why']}")
    state = content["state"]
    if state != "done":
        verdicts.append(state)
    return verdicts


def chosen(words: Sequence[str], shape: str | None) -> list[tuple[str, str]]:
    """Return these parts, or `ALL`, each with a shape; None: with its shapes."""
    names = list(words)
    if not names:
        names = list(ALL)
    found = []
    for name in dict.fromkeys(names):
        shapes = _SHAPES.get(name, ("7b",))
        if shape:
            shapes = (shape,)
        for each in shapes:
            found.append((name, each))
    return found


def _save(path: Path, head: Found, content: Found) -> None:
    save(path, head | content)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "das-adapter bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parts = ", ".join(PARTS)
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help=f"{parts}; none: all but train",
    )
    parser.add_argument(
        "--shape",
        choices=list(SHAPES),
        help="that of every part",
    )
    parser.add_argument(
        "--traces",
        type=Path,
        help="recorded rollouts for `replay`",
    )
    parser.add_argument(
        "--longest",
        type=int,
        default=Plan.longest,
        help="tokens of the longest response of `replay`",
    )
    parser.add_argument(
        "--tiny-math",
        type=Path,
        default=Path("examples/tiny_math"),
        help="examples/tiny_math of the repository, for `train`",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("das-bench"),
        help="where the files go",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=PART_S / 60,
        help="for each part and shape, at most",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; None: that of the process."""
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    parser = _parser()
    args = parser.parse_args(arguments)
    unknown = sorted(set(args.parts) - set(PARTS))
    if unknown:
        names = ", ".join(unknown)
        allowed = ", ".join(PARTS)
        parser.error(f"found {names}, allowed: {allowed}")
    # as after an error: engines are ended
    signal.signal(signal.SIGTERM, _exit_at)
    made = apart(TINY, provenance)  # it asks the GPU, which this process must not use
    has_gpu = made["hardware"]["gpu"] is not None
    if not has_gpu and args.shape != "tiny":
        parser.error(
            "found no GPU; without one, --shape tiny tells whether the parts work"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    counts = Counter[str]()
    end = time.monotonic() + ALL_S
    for name, shape in chosen(args.parts, args.shape):
        part_end = time.monotonic() + 60 * args.minutes
        plan = _plan(shape, min(part_end, end), args.longest)
        if args.tiny_math.is_dir():
            plan = replace(plan, tiny_math=args.tiny_math)
        command = f"das-adapter bench {name} --shape {shape}"
        if name == "replay":
            if args.traces:
                command += f" --traces {args.traces.name}"
            if args.longest != Plan.longest:
                command += f" --longest {args.longest}"
        head = {
            "provenance": made | {"command": command},
            "part": name,
            "shape": shape,
        }
        path = args.out / f"gpu_{name}_{shape}.json"
        keep = functools.partial(_save, path, head)
        content = measured(name, plan, args.traces, keep)
        verdicts = judge(name, content)
        counts.update(verdicts)
        keep(content)
    parts = [f"{counts[verdict]} {verdict}" for verdict in VERDICTS]
    print(", ".join(parts))
    not_good = [counts[verdict] for verdict in NOT_GOOD]
    sys.exit(any(not_good))


def _exit_at(number: int, _: Any) -> None:
    """Exit at a signal, with the code that shells give it."""
    sys.exit(128 + number)


def _plan(shape: str, until: float, longest: int) -> Plan:
    """Return the plan of a part with a shape, which ends at this time; `longest`: see
    `Plan.longest`, but for the tiny shape.
    """
    if shape == "tiny":
        return replace(TINY, until=until)
    return Plan(shape, until=until, longest=longest)
