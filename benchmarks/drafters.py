"""Measure every drafter on one policy: rollout time relative to off, tokens per
forward, memory, refresh.

    python benchmarks/drafters.py POLICY [--arms off self:int4 ...] \
        [--cells 256/1 256/8] [--draft DIR] [--eagle DIR]

It samples the same problems at temperature 1 with the same seeds in every arm, a cell
after the other: behind prompts of so many tokens, with so many requests in flight,
after a short rollout of the cell which does not count. Each problem is visited in
`--epochs` rollouts, the first of which finds no history. The arms take turns of half a
second, within a rollout, so that a machine that becomes slower does so for all of them;
of `--repeats` the fastest counts. With `--prefix-caching` the samples of a problem read
its prompt once; the cache is emptied before each rollout, as at a weight sync. With one
thread, seconds are those of the processor, for the figures and for the controllers: no
engine waits for others. Behind a context of more than 256 tokens, or with `--forced`,
responses are ended by the client, after a long tail of `--lengths`. What a rollout
wrote is sealed by a store and mapped by the engine, outside its time. `stock` is vLLM
without das-adapter, which draws other tokens, `stock:again` the same in another
process; `history:idle` is told to draft what is certain alone, and so drafts nothing;
`history:looks` as well, and looks for drafts in every step. POLICY is made by
`examples/tiny_math/widen_policy.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import drafters_engine
from provenance import provenance, save

from das_adapter.bench.engines import IN_PROCESS, TINY, process

ENVIRONMENT = IN_PROCESS | {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

Turn = Callable[[], Any]
"""Lets an engine in a process of its own work for a turn; returns its result, or None
if it is not through.
"""


def block(arm: str, args: argparse.Namespace) -> dict[str, Any] | None:
    """The `das:` block of an arm; `self:int4` names the weights too; `eagle3:always`:
    in every step. None: stock's, see `environment`.
    """
    drafter, _, variant = arm.partition(":")
    if drafter == "stock":
        return None
    if drafter == "off":
        return {"drafter": "none", "verify": {"noise": "keyed"}}
    das: dict[str, Any] = {"drafter": drafter}
    if variant in ("idle", "looks"):
        return das | {
            "budget": "uniform",
            "speculate": "always" if variant == "looks" else "auto",
        }
    if variant == "always":
        das |= {"budget": "unlimited", "speculate": "always"}
    elif variant:
        das["self"] = {"weights": variant}
    if drafter.endswith(("draft_model", "eagle3")):
        das["draft"] = {
            "model": str(args.draft if drafter.endswith("draft_model") else args.eagle)
        }
    if drafter == "ngram":
        das["max_draft_tokens"] = 4
    return das


def environment(arm: str) -> dict[str, str]:
    """Variables of an arm's process alone. `stock:uncompiled`: vLLM's sampler is not
    compiled, as das-adapter's is not; `stock:again`: as `stock`, for what two processes
    differ by.
    """
    return {"TORCHDYNAMO_DISABLE": "1"} if arm == "stock:uncompiled" else {}


def base(results: dict[str, Any]) -> str:
    """The arm that the others are compared with."""
    return next(
        (arm for arm in ("stock", "off") if arm in results), next(iter(results))
    )


def table(results: dict[str, Any]) -> str:
    """Rollout time relative to the base's, and tokens per forward, for each cell and
    epoch.
    """
    first = results[base(results)]["cells"]
    lines = ["arm".ljust(20) + "".join(f"{cell:>14}" for cell in first)]
    for arm, result in results.items():
        row = [
            f"{f['rollout_s'] / first[cell]['rollout_s']:.3f},"
            f" {f['tokens_per_forward']:.2f}"
            + ("" if f["tokens_hash"] == first[cell]["tokens_hash"] else " !")
            for cell, f in result["cells"].items()
        ]
        lines.append(arm.ljust(20) + "".join(f"{one:>14}" for one in row))
    return "\n".join([*lines, "!: other tokens than the first arm's"])


def cell(text: str) -> tuple[int, int]:
    """Read a cell, such as 256/8."""
    context, batch = text.split("/")
    return int(context), int(batch)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("policy", type=Path)
    parser.add_argument(
        "--arms",
        nargs="+",
        default=["off", "self:int4", "self:int8", "history", "history+self", "ngram"],
    )
    parser.add_argument(
        "--cells",
        nargs="+",
        type=cell,
        default=[(256, 1)],
        help="tokens of a prompt / requests",
    )
    parser.add_argument("--samples", type=int, default=4, help="of each problem")
    parser.add_argument(
        "--least", type=int, default=2, help="requests of a rollout at least"
    )
    parser.add_argument(
        "--tokens", type=int, default=800, help="most tokens of a response"
    )
    parser.add_argument(
        "--epochs",
        type=int,
        default=2,
        help="visits of each problem; the first finds no history",
    )
    parser.add_argument(
        "--repeats", type=int, default=2, help="each with problems of its own"
    )
    parser.add_argument(
        "--prefix-caching",
        action="store_true",
        help="samples of a problem read its prompt once",
    )
    parser.add_argument(
        "--forced",
        action="store_true",
        help="lengths of responses as behind a long context",
    )
    parser.add_argument(
        "--lengths",
        nargs=2,
        type=float,
        default=[5.7, 0.45],
        help="mean and deviation of their logarithm",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="more than one needs a machine with nobody else on it",
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--draft", type=Path, help="checkpoint of the arm draft_model")
    parser.add_argument("--eagle", type=Path, help="checkpoint of the arm eagle3")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    common = {
        name: value
        for name, value in vars(args).items()
        if name not in ("arms", "draft", "eagle", "out")
    }
    jobs = {
        arm: common | {"policy": str(args.policy), "arm": arm, "das": block(arm, args)}
        for arm in args.arms
    }
    for arm, job in jobs.items():
        job["never"] = arm.endswith((":idle", ":looks"))
    os.environ.update(ENVIRONMENT, OMP_NUM_THREADS=str(args.threads))
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as history,
        contextlib.ExitStack() as engines,
    ):
        turns = dict[str, Turn]()
        results = dict[str, Any]()
        for arm, job in jobs.items():  # one engine starts after the other
            run = engines.enter_context(process(TINY, environment(arm)))
            run(drafters_engine.start, {**job, "history": f"{history}/{arm}"})
            turns[arm] = functools.partial(run, drafters_engine.turn)
            while (found := turns[arm]()) is None:
                pass
            results[arm] = found
        take_turns(turns, results, args)
    print(table(results))


def take_turns(
    turns: dict[str, Turn], results: dict[str, Any], args: argparse.Namespace
) -> None:
    """Rollouts of all arms in turns; what is measured is written after each epoch."""
    for arm in results:
        results[arm]["cells"] = {}
    for context, batch in args.cells:
        rows: dict[tuple[str, int], list[Any]] = defaultdict(list)
        for epoch in list(range(args.epochs)) * args.repeats:
            pending = list(turns)
            while pending:
                found = {arm: turns[arm]() for arm in pending}
                pending = [arm for arm in pending if found[arm] is None]
                for arm in found.keys() - pending:
                    rows[arm, epoch].append(found[arm])
            for arm in results:
                found = rows[arm, epoch]
                fastest = min(found, key=lambda f: float(f["rollout_s"]))
                seconds = {"all_rollout_s": [round(f["rollout_s"], 3) for f in found]}
                results[arm]["cells"][f"{context}/{batch}/{epoch + 1}"] = (
                    fastest | seconds
                )
            if args.out:
                save(args.out, {"provenance": provenance(), "results": results})


if __name__ == "__main__":
    main()
