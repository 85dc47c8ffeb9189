"""Measure das-adapter on one GPU, without a network and without weights.

    python benchmarks/gpu/run.py                    # every part, at most 25 minutes
    python benchmarks/gpu/run.py gate replay        # some parts, each at most 8 minutes
    python benchmarks/gpu/run.py --shape 1.5b       # a smaller policy; the default is 7b
    python benchmarks/gpu/run.py replay --traces FILE.npz    # recorded rollouts: ids, offsets, problem
    python benchmarks/gpu/run.py --shape tiny --out DIR      # on a CPU: only whether the parts work

Policies have random weights in the shape of Qwen2.5. Each part writes gpu_PART_SHAPE.json with its provenance, and
prints whether the device keeps each bar. Parts and their minutes on an H100, estimated:

    kernel   0.5  the sampling kernel against its definition, and its time
    index    1    the history's kernels (V2 runner) against their reference, and their time
    propose  0.5  the history's drafts on the host (V1 runner), beside a GPU's step
    gate     6    undrafted steps beside stock vLLM's
    replay   4    recorded rollouts through real forward passes, with and without drafts
    trace    2.5  what a step waits for, and the graphs that it replays
    sweep    2    the step-time model, and a file for toggle.calibration
    lossless 2.5  equal tokens, positions in the keys, distribution
    copy     4    the policy copy's CUDA graphs, quantising it, sleep
    robust   2.5  contract tests on this device, a crowded engine
    ranks    1    two GPUs

The first three need no vLLM.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")

from engines import TINY, Plan, runner_here  # noqa: E402

PARTS = ("kernel", "index", "propose", "gate", "replay", "trace", "sweep", "lossless", "copy", "robust", "ranks")
WITHOUT_VLLM = PARTS[:3]
VLLM = importlib.util.find_spec("vllm") is not None
PART_S, ALL_S = 480.0, 1500.0
"""Seconds after which a part, and everything, is ended."""


def part(name: str, plan: Plan, traces: Path | None, out: Path) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """Measure one part; return its figures, and what makes bars of them."""
    import checks
    import copies
    import device_index
    import proposing
    import replay
    import sampling
    import steps
    from engines import apart

    parts: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
        "kernel": (lambda: apart(plan, sampling.kernel, plan), sampling.bars),
        "gate": (lambda: steps.gate(plan), steps.gate_bars),
        "sweep": (lambda: steps.sweep(plan, out), steps.sweep_bars),
        "trace": (lambda: steps.trace(plan), steps.trace_bars),
        "replay": (lambda: replay.replay(plan, traces), replay.bars),
        "lossless": (lambda: checks.lossless(plan), checks.lossless_bars),
        "robust": (lambda: checks.robust(plan), checks.robust_bars),
        "propose": (lambda: proposing.propose(plan), proposing.bars),
        "copy": (lambda: copies.copy(plan), copies.bars),
        "ranks": (lambda: checks.ranks(plan), checks.ranks_bars),
        "index": (lambda: device_index.measure(plan), device_index.bars),
    }
    measure, bars = parts[name]
    return measure(), bars


def report(name: str, plan: Plan, traces: Path | None, out: Path) -> bool:
    """Measure one part, write its file and print its verdicts; return whether every bar holds."""
    if plan.tiny and VLLM:
        import vllm  # noqa: F401  # its forks need not import it again
    if name in WITHOUT_VLLM or VLLM:
        found, bars = part(name, plan, traces, out)
    else:
        found, bars = {"why": "vLLM is not installed"}, lambda _: ()
    from provenance import provenance  # asks the GPU, which the engines' processes must do first

    verdicts = [{"bar": bar, "found": value, "at_most": limit, "kept": value <= limit}
                for bar, value, limit in bars(found)]  # fmt: skip
    content = {"provenance": provenance(), "part": name, "shape": plan.shape, "bars": verdicts, **found}
    (out / f"gpu_{name}_{plan.shape}.json").write_text(json.dumps(content, indent=2) + "\n")
    for v in verdicts:
        print(f"{'kept  ' if v['kept'] else 'MISSED'} {name}: {v['bar']}: {v['found']:.4g} (at most {v['at_most']:g})")
    if not verdicts:
        print(f"       {name}: not run: {found['why']}")
    return all(v["kept"] for v in verdicts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; none: all")
    parser.add_argument("--shape", choices=("7b", "1.5b", "tiny"), default="7b")
    parser.add_argument("--traces", type=Path, help="recorded rollouts for `replay`")
    parser.add_argument("--out", type=Path, default=HERE.parent / "results")
    parser.add_argument("--apart", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--runner", choices=("V1", "V2"), help="vLLM's; the one that das-adapter takes here")
    args = parser.parse_args()
    if unknown := sorted(set(args.parts) - set(PARTS)):
        parser.error(f"found {', '.join(unknown)}, allowed: {', '.join(PARTS)}")
    plan = replace(
        TINY if args.shape == "tiny" else Plan(args.shape), runner=args.runner or (runner_here() if VLLM else "V1")
    )
    args.out.mkdir(parents=True, exist_ok=True)
    if args.apart or plan.tiny:
        sys.exit(not all([report(name, plan, args.traces, args.out) for name in args.parts or PARTS]))
    good, end = True, time.monotonic() + ALL_S
    for name in args.parts or PARTS:
        more = ["--runner", plan.runner, *(["--traces", str(args.traces)] if args.traces else [])]
        command = [sys.executable, __file__, name, "--shape", args.shape, *more, "--apart", "--out", str(args.out)]
        seconds = max(1.0, min(PART_S, end - time.monotonic()))
        process = subprocess.Popen(command, start_new_session=True)
        try:
            good &= process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its engines too
            print(f"MISSED {name}: not done after {seconds:.0f} s")
            good = False
    sys.exit(not good)


if __name__ == "__main__":
    main()
