"""Measure das-adapter on one GPU, without a network and without weights.

    das-adapter bench                      # the parts `speed`, at most 25 minutes
    das-adapter bench tokens               # the parts `tokens`, at most 25 minutes
    das-adapter bench gate replay          # some parts, each at most 8 minutes for a shape
    das-adapter bench --minutes 4 gate     # less time: what does not fit is left out, and said
    das-adapter bench --shape 1.5b         # one shape; else `gate` and `trace` take 7b and 1.5b, others 7b
    das-adapter bench replay --traces FILE.npz    # recorded rollouts: ids, offsets, problem
    das-adapter bench --shape tiny --out DIR      # on a CPU: only whether the parts work

Policies have random weights in the shape of Qwen2.5. Each part runs in a process of its own and writes
gpu_PART_SHAPE.json with its provenance, whatever it could measure. A bar is `kept` where all of its part ran, `MISSED`
where a figure is too high, `cut short` where those measured are good and others are missing, and `not run`. The exit
code is 0 if none was missed or cut short and no part failed. Parts and their minutes on an H100, estimated, for all of
their shapes:

  speed
    kernel   0.5  the sampling kernel against its definition, its draws' distribution, and its time
    index    1    the history's kernels (V2 runner) against their reference, and their time
    gate     9    undrafted steps beside stock vLLM's, start-up and KV cache
    replay   4.5  recorded rollouts through real forward passes, with and without drafts
    trace    3.5  what a step waits for, and the graphs that it replays
  tokens
    lossless 5    equal tokens, positions in the keys, distribution, long prompts
    copy     2.5  the policy copy's CUDA graphs, quantising it, sleep
    robust   3    a crowded engine, contract tests on this device
    ranks    1    two GPUs

The first two need no vLLM, but PyTorch, Triton and NumPy alone. A wheel has neither references nor tests: what compares
with them runs from the source.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from das_adapter.bench.engines import CONTRACT, TINY, Bar, Found, Plan, apart, has_vllm, runner_here

SETS = {
    "speed": ("kernel", "index", "gate", "replay", "trace"),
    "tokens": ("lossless", "copy", "robust", "ranks"),
}
"""Parts in the order in which they run: what there is no time for is at the end. A set fits 25 minutes."""
PARTS = tuple(itertools.chain(*SETS.values()))
TWO_SHAPES = ("gate", "trace")
"""Parts that a small policy may not keep although a large one does."""
WITHOUT_VLLM = ("kernel", "index")
PART_S, ALL_S = 480.0, 1500.0
"""Seconds after which a part, and everything, is ended."""
NOT_GOOD = ("MISSED", "cut short", "failed")
LAST_S = 60.0
"""Seconds before its end in which a part begins no further figure."""


def known() -> dict[str, tuple[tuple[Bar, ...], Callable[[Plan, Path | None], Iterator[Found]]]]:
    """Return what each part must show, and what measures it. Imports no vLLM."""
    from das_adapter.bench import checks, copies, device_index, replay, sampling, steps

    return {
        "kernel": (sampling.BARS, lambda plan, *_: iter([apart(plan, sampling.kernel, plan)])),
        "index": (device_index.BARS, lambda plan, *_: iter([device_index.measure(plan)])),
        "gate": (steps.GATE_BARS, lambda plan, *_: steps.gate(plan)),
        "replay": (replay.BARS, lambda plan, traces: replay.replay(plan, traces)),
        "trace": (steps.TRACE_BARS, lambda plan, *_: steps.trace(plan)),
        "lossless": (checks.LOSSLESS_BARS, lambda plan, *_: checks.lossless(plan)),
        "copy": (copies.BARS, lambda plan, *_: copies.copy(plan)),
        "robust": (checks.ROBUST_BARS, lambda plan, *_: checks.robust(plan)),
        "ranks": (checks.RANKS_BARS, lambda plan, *_: checks.ranks(plan)),
    }


def bars(name: str) -> tuple[Bar, ...]:
    """Return what a part must show."""
    return known()[name][0]


def part(name: str, plan: Plan, traces: Path | None) -> Iterator[Found]:
    """Measure one part; give what is known whenever more of it is."""
    if name not in WITHOUT_VLLM and not has_vllm():
        return iter([{"why": "vLLM is not installed"}])
    return known()[name][1](plan, traces)


def measure(name: str, plan: Plan, traces: Path | None, out: Path) -> None:
    """Measure one part, and write down what is known whenever more of it is."""
    if plan.tiny and has_vllm():
        import_for_forks()
    content = {"state": "running"}
    try:
        for found in part(name, plan, traces):
            content |= found
            write(name, plan, out, content)
        content["state"] = "done"
    except Exception as error:
        content |= {"state": "failed", "why": str(error).strip().splitlines()[-1], "error": traceback.format_exc()}
    from das_adapter.tools.provenance import provenance  # asks the GPU, which the engines' processes must do first

    made = provenance() | {"command": f"das-adapter bench {name} --shape {plan.shape} --runner {plan.runner}"}
    write(name, plan, out, {"provenance": made, **content})


def import_for_forks() -> None:
    """Import what takes seconds, once for all engines of a test."""
    from vllm import LLM  # noqa: F401

    if not CONTRACT.is_dir():
        return
    sys.path.insert(0, str(CONTRACT))
    from engine import preload

    preload(["vllm.v1.worker.cpu_worker", "vllm.v1.worker.cpu_model_runner", "vllm.model_executor.models.qwen2"])


def path(name: str, plan: Plan, out: Path) -> Path:
    """Where a part's figures are."""
    return out / f"gpu_{name}_{plan.shape}.json"


def write(name: str, plan: Plan, out: Path, content: Found) -> None:
    """Write down a part's figures."""
    from das_adapter.tools.provenance import save

    head = {key: content[key] for key in ("provenance",) if key in content}
    save(path(name, plan, out), head | {"part": name, "shape": plan.shape} | content)


def judge(name: str, plan: Plan, out: Path) -> list[str]:
    """Add the verdicts to what a part has written and print them; return them, and `failed` or `cut short` of a part
    that did not end."""
    file = path(name, plan, out)
    content = json.loads(file.read_text()) if file.exists() else {"state": "failed", "why": "its process wrote nothing"}
    verdicts = [bar.verdict(content) for bar in bars(name)]
    write(name, plan, out, content | {"bars": verdicts})
    for v in verdicts:
        found = "" if v["found"] is None else f": {v['found']:.4g} (at most {v['at_most']:g})"
        print(f"{v['verdict']:9} {name}: {v['bar']}{found}")
    for why in (
        content.get("why"),
        content.get("said"),
        content.get("left_out") and f"no time for {', '.join(content['left_out'])}",
    ):
        if why:
            print(f"          {name}: {why}")
    state = "cut short" if content.get("left_out") and content["state"] == "done" else content["state"]
    return [v["verdict"] for v in verdicts] + [state] * (state != "done")


def run_apart(name: str, plan: Plan, args: argparse.Namespace, seconds: float) -> None:
    """Measure one part in a process of its own, which is ended after so many seconds; what it has written stays."""
    path(name, plan, args.out).unlink(missing_ok=True)
    more = ["--runner", plan.runner, *(["--traces", str(args.traces)] if args.traces else [])]
    until = time.time() + seconds - min(LAST_S, seconds / 4)
    command = [sys.executable, "-m", "das_adapter.bench", name, "--shape", plan.shape, *more, "--until", str(until)]
    process = subprocess.Popen([*command, "--out", str(args.out)], start_new_session=True)
    why = None
    try:
        if process.wait(seconds):
            why = f"its process ended with {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its engines too
        why = f"not done after {seconds:.0f} s"
    if why:
        file = path(name, plan, args.out)
        content = json.loads(file.read_text()) if file.exists() else {}
        about = "import json; from das_adapter.tools.provenance import provenance; print(json.dumps(provenance()))"
        asked = subprocess.run([sys.executable, "-c", about], capture_output=True, text=True, check=True)
        made = json.loads(asked.stdout) | {"command": f"das-adapter bench {name} --shape {plan.shape}"}
        content |= {"provenance": made, "state": "cut short" if file.exists() else "failed", "why": why}
        write(name, plan, args.out, content)


def chosen(words: Sequence[str], shape: str | None) -> list[tuple[str, str]]:
    """Return the parts that some words name, of `SETS` or `PARTS`, each with a shape; None: with its shapes."""
    names = dict.fromkeys(itertools.chain(*(SETS.get(word, (word,)) for word in words or ("speed",))))
    shapes = {name: ("7b", "1.5b") if name in TWO_SHAPES else ("7b",) for name in names}
    return [(name, each) for name in names for each in ((shape,) if shape else shapes[name])]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; None: that of the process."""
    os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    parser = argparse.ArgumentParser(
        "das-adapter bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join((*SETS, *PARTS))}; none: speed")
    parser.add_argument("--shape", choices=("7b", "1.5b", "tiny"), help="that of every part")
    parser.add_argument("--traces", type=Path, help="recorded rollouts for `replay`")
    parser.add_argument("--out", type=Path, default=Path("das-bench"), help="where the files go")
    parser.add_argument("--minutes", type=float, default=PART_S / 60, help="for each part and shape, at most")
    parser.add_argument("--runner", choices=("V1", "V2"), help="vLLM's; the one that das-adapter takes here")
    parser.add_argument("--few", action="store_true", help=argparse.SUPPRESS)  # `Plan.whole`
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if unknown := sorted(set(args.parts) - {*PARTS, *SETS}):
        parser.error(f"found {', '.join(unknown)}, allowed: {', '.join((*SETS, *PARTS))}")
    runner = args.runner or (runner_here() if has_vllm() else "V1")

    def plan(shape: str, until: float = float("inf")) -> Plan:
        made = TINY if shape == "tiny" else Plan(shape)
        return replace(made, whole=not args.few, runner=runner, until=until)

    args.out.mkdir(parents=True, exist_ok=True)
    if args.until is not None:
        return measure(args.parts[0], plan(args.shape, args.until), args.traces, args.out)
    counts, end = Counter[str](), time.monotonic() + ALL_S
    for name, shape in chosen(args.parts, args.shape):
        if shape == "tiny":
            measure(name, plan(shape, time.time() + 60 * args.minutes), args.traces, args.out)
        else:
            run_apart(name, plan(shape), args, max(1.0, min(60 * args.minutes, end - time.monotonic())))
        counts.update(judge(name, plan(shape), args.out))
    print(", ".join(f"{counts[verdict]} {verdict}" for verdict in ("kept", *NOT_GOOD, "not run")))
    sys.exit(any(counts[verdict] for verdict in NOT_GOOD))
