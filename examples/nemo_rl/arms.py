"""Run GRPO through NeMo-RL on a CPU with speculation off and on, in a process each: the
same tokens, in less time.

PYTHONPATH=/path/to/NeMo-RL python examples/nemo_rl/arms.py [--asynchronous]

In the asynchronous pipeline, with in-flight weight updates, it depends on timing which
weights write which token, so no two runs agree token by token, with or without
speculation. Its trainer goes through its data only once, so the data set repeats its
problems.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from das_adapter.commands.output import print_table
from das_adapter.cpu.environment import cpu_env
from das_adapter.reports import compare
from das_adapter.reports.provenance import RUN, provenance, save
from das_adapter.reports.run_logs import read

ROOT = Path(__file__).resolve().parents[2]
DAS = "++policy.generation.das"
ARMS = {
    "off": [f"{DAS}.drafter=none", f"{DAS}.verify.noise=keyed"],
    "history": [f"{DAS}.drafter=history"],
}
ASYNC = [
    "grpo.async_grpo.enabled=true",
    "grpo.async_grpo.in_flight_weight_updates=true",
    "loss_fn.use_importance_sampling_correction=true",
    "policy.generation.vllm_cfg.async_engine=true",
    "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources.gpus_per_node=1",
    "cluster.gpus_per_node=2",
]
"""Overrides of the asynchronous pipeline."""
Steps = list[dict[str, float]]
"""Figures by name, of each step."""


def run(name: str, overrides: list[str], out: Path) -> Steps:
    """Train one arm; its log goes to `<name>.log` and its steps to `<name>.jsonl` in
    `out`.

    Returns:
        The scalars of each step, in order: NeMo-RL's `train/` metrics under their
            names, timings under `timing/`.
    """
    out.mkdir(parents=True, exist_ok=True)
    lines = out / f"{name}.jsonl"
    lines.unlink(missing_ok=True)
    environment = {
        **os.environ,
        **cpu_env(),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "NRL_VLLM_ASYNC_TIMEOUT_SECONDS": "300",
    }
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    command = [
        sys.executable,
        str(Path(__file__).parent / "tiny_run.py"),
        "--out",
        str(lines),
        *overrides,
    ]
    log = out / f"{name}.log"
    with log.open("w") as file:
        code = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=file, stderr=file, check=False
        ).returncode
    if code or not lines.exists():
        sys.exit(f"the {name} arm failed; see {log}")
    return steps(lines)


def steps(lines: Path) -> Steps:
    """Return the steps in a file of `tiny_run.py`."""
    prefixes = {"train": "", "timing/train": "timing/"}
    figures_by_step: dict[int, dict[str, float]] = {}
    for line in lines.read_text().splitlines():
        row = json.loads(line)
        if row["prefix"] not in prefixes:
            continue
        prefix = prefixes[row["prefix"]]
        figures = figures_by_step.setdefault(row["step"], {})
        for name, value in row["data"].items():
            figures[prefix + name] = value
    return [figures_by_step[step] for step in sorted(figures_by_step)]


def show(out: Path, epoch: int) -> dict[str, Any]:
    """Compare the arms' files in `out`, a line per epoch of so many steps; return the
    comparison.
    """
    off, history = (read(out / f"{name}.jsonl") for name in ARMS)
    comparison = compare.compare(off, history, epoch)
    print_table(compare.COLUMNS, compare.table(comparison), left=2)
    print("\n".join(compare.sentences(comparison)))
    return comparison


def main() -> None:
    """Run both arms, and show what speculation changed, a line per epoch."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--asynchronous", action="store_true", help="with in-flight weight updates"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "nemo_rl_arms")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--problems", type=int, default=8)
    parser.add_argument(
        "--epoch", type=int, default=2, help="training steps of a row of the comparison"
    )
    args, overrides = parser.parse_known_args()
    common = ["--problems", str(args.problems), f"grpo.max_num_steps={args.steps}"]
    if args.asynchronous:
        common += ASYNC
    common += overrides
    for name, arm in ARMS.items():
        run(name, [*arm, *common], args.out)
    made = provenance([*RUN, "das_adapter/nemo_rl"])
    save(
        args.out / "summary.json",
        {"provenance": made, "comparison": show(args.out, args.epoch)},
    )


if __name__ == "__main__":
    main()
