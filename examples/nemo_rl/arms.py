"""Run the arms of an example, each in a process of its own, and show what speculation changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean

from rich.console import Console
from rich.table import Table

from das_adapter.cpu.environment import cpu_env

ROOT = Path(__file__).resolve().parents[2]
DAS = "++policy.generation.das"
ARMS = {
    "off": [f"{DAS}.drafter=none", f"{DAS}.verify.noise=keyed"],
    "history": [f"{DAS}.drafter=history"],
}
Steps = list[dict[str, float]]


def run(name: str, overrides: list[str], out: Path) -> Steps:
    """Train one arm; its log goes to `<name>.log` and its steps to `<name>.jsonl` in `out`.

    Returns:
        The scalars of each step, in order: NeMo-RL's `train/` metrics under their names, timings under `timing/`.
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
    command = [sys.executable, str(Path(__file__).parent / "tiny_run.py"), "--out", str(lines), *overrides]
    log = out / f"{name}.log"
    with log.open("w") as file:
        code = subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=file, check=False).returncode
    if code or not lines.exists():
        sys.exit(f"the {name} arm failed; see {log}")
    return steps(lines)


def steps(lines: Path) -> Steps:
    """The steps in a file of `tiny_run.py`."""
    found: dict[int, dict[str, float]] = {}
    for row in map(json.loads, lines.read_text().splitlines()):
        if row["prefix"] in ("train", "timing/train"):
            prefix = "" if row["prefix"] == "train" else "timing/"
            found.setdefault(row["step"], {}).update({prefix + name: value for name, value in row["data"].items()})
    return [found[step] for step in sorted(found)]


def show(arms: dict[str, Steps], epoch: int) -> None:
    """Print a line per step and the comparison.

    Args:
        arms: the steps of each arm.
        epoch: steps after which every problem has been seen once.
    """
    table = Table(title="Each step")
    columns = {
        "das/rollout_s": "rollout s",
        "das/acceptance_length": "acceptance length",
        "das/draft_coverage": "coverage",
        "vllm/spec_num_accepted_tokens": "accepted",
        "das/weight_version": "weights",
        "reward": "reward",
    }
    for column in ("arm", "step", *columns.values(), "token hash"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for arm, figures in arms.items():
        for i, step in enumerate(figures):
            values = [f"{step.get(name, 0):.2f}" for name in columns]
            table.add_row(arm, str(i + 1), *values, f"{int(step['das/token_hash']):012x}")
    console = Console()
    console.print(table)
    off, history = arms["off"], arms["history"]
    late = slice(epoch, None)
    ratio = mean(s["das/rollout_s"] for s in history[late]) / mean(s["das/rollout_s"] for s in off[late])
    same = [s["das/token_hash"] for s in off] == [s["das/token_hash"] for s in history]
    console.print(f"generation time from the second epoch on, history / off: {ratio:.2f}")
    console.print(f"tokens of every step identical: {'yes' if same else 'no'}")
