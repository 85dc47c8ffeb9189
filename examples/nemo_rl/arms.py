"""Run the arms of an example, each in a process of its own, and show what speculation changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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


def show(out: Path, epoch: int) -> None:
    """Compare the arms' files in `out`, a line per epoch of so many steps."""
    runs = [str(out / f"{name}.jsonl") for name in ("off", "history")]
    command = [sys.executable, "-m", "das_adapter.cli", "compare", *runs, "--every", str(epoch)]
    subprocess.run(command, check=False)  # it says so where tokens differ, by its exit code too
