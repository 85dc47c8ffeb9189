"""Run veRL's pipelines on a CPU: what drafting gains in the asynchronous ones, and whether a long run leaks memory.

    python benchmarks/pipelines.py throughput --out FILE.json
    python benchmarks/pipelines.py soak --steps 300 --out FILE.json

`throughput`: each pipeline without and with the history, same seeds; tokens per second of the engine's own steps, and
acceptance by the age of the history. `soak`: a synchronous run with weight syncs, validation and checkpoints; memory
of each of its processes, `das/health`, and the files and processes that it left behind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil
from provenance import provenance, save

from das_adapter.cpu.environment import cpu_env

ROOT = Path(__file__).resolve().parents[1]
DAS = "actor_rollout_ref.rollout.custom.das"
ARMS = {"off": [f"{DAS}.drafter=none", f"+{DAS}.verify.noise=keyed"], "history": [f"{DAS}.drafter=history"]}
PIPELINES = {
    "one_step_off": ("verl.experimental.one_step_off_policy.main_ppo", "trainer.total_training_steps={steps}"),
    "fully_async": ("verl.experimental.fully_async_policy.fully_async_main", "rollout.total_rollout_steps={rollouts}"),
}


def start(out: Path, module: str, config: str, *overrides: str) -> subprocess.Popen[bytes]:
    """A training run; its metrics go to `out`, what it prints beside them."""
    command = [sys.executable, "-m", module, "--config-path", str(ROOT / "examples/verl"), "--config-name", config]
    env = {**os.environ, **cpu_env(), "VERL_FILE_LOGGER_PATH": str(out), "HF_HUB_OFFLINE": "1"}
    env.pop("CUDA_VISIBLE_DEVICES", None)
    with out.with_suffix(".log").open("w") as log:
        return subprocess.Popen([*command, *overrides], cwd=ROOT, env=env, stdout=log, stderr=log)


def steps(out: Path) -> list[dict[str, Any]]:
    """The logged steps that have rollout figures."""
    rows = [json.loads(line)["data"] for line in out.read_text().splitlines()]
    return [row for row in rows if "das/tokens_per_forward" in row]


@click.group()
def main() -> None:
    """See the head of the file."""


@main.command()
@click.option("--steps", "count", default=12, show_default=True, help="Training steps of a run.")
@click.option("--out", type=click.Path(path_type=Path), required=True)
def throughput(count: int, out: Path) -> None:
    """Tokens per second of the engine, off against history."""
    result: dict[str, Any] = {"provenance": provenance(), "steps": count, "pipelines": {}}
    for pipeline, (module, length) in PIPELINES.items():
        arms = {}
        for arm, overrides in ARMS.items():
            with tempfile.TemporaryDirectory() as folder:
                log = Path(folder) / "log.jsonl"
                limit = length.format(steps=count, rollouts=4 * count)
                run = start(log, module, f"grpo_tiny_math_cpu_{pipeline}", limit, *overrides)
                if run.wait():
                    sys.exit(log.with_suffix(".log").read_text()[-4000:])
                found = steps(log)
            late = found[-max(1, len(found) // 2) :]
            names = sorted({n for row in found for n in row if n.startswith("das/accept_rate_age_")})
            arms[arm] = {
                "updates": len(found),
                **{
                    n: [row.get(n) for row in found]
                    for n in ("das/tokens_per_s", "das/tokens_per_forward", "das/health")
                },
                "tokens_per_s_second_half": float(np.mean([row["das/tokens_per_s"] for row in late])),
                "acceptance_by_age": {n: float(np.mean([row[n] for row in found if n in row])) for n in names},
            }
        ratio = arms["history"]["tokens_per_s_second_half"] / arms["off"]["tokens_per_s_second_half"]
        result["pipelines"][pipeline] = {"ratio_second_half": ratio, "arms": arms}
        click.echo(f"{pipeline}: {ratio:.2f} x off; {arms['history']['acceptance_by_age']}")
        save(out, result)


@main.command()
@click.option("--steps", "count", default=300, show_default=True, help="Training steps.")
@click.option("--out", type=click.Path(path_type=Path), required=True)
def soak(count: int, out: Path) -> None:
    """A long synchronous run."""
    memory: dict[str, list[tuple[int, int]]] = defaultdict(list)
    shared = Path("/dev/shm")
    before = {p.name for p in shared.glob("das-history-*")}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        overrides = [
            *("data.max_response_length=96", "actor_rollout_ref.rollout.n=2", "data.val_max_samples=4"),
            *("trainer.save_freq=50", "trainer.max_actor_ckpt_to_keep=1", f"trainer.total_training_steps={count}"),
            *("trainer.test_freq=25", f"trainer.default_local_dir={folder}/checkpoints", "trainer.total_epochs=10000"),
        ]
        run = start(log, "verl.trainer.main_ppo", "grpo_tiny_math_cpu", *overrides, *ARMS["history"])
        while run.poll() is None:
            done = len(log.read_text().splitlines()) if log.exists() else 0
            for process in [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]:
                try:
                    name = " ".join(Path(part).name for part in process.cmdline()[:2])
                    memory[f"{process.pid} {name}"].append((done, process.memory_info().rss))
                except psutil.Error:
                    continue
            time.sleep(5)
        if run.returncode:
            sys.exit(log.with_suffix(".log").read_text()[-4000:])
        found = steps(log)
    growth = {}
    for name, seen in memory.items():
        warm = [rss for done, rss in seen if count // 3 <= done < count // 2]
        last = [rss for done, rss in seen if done >= count - count // 6]
        if warm and last:
            growth[name] = {"warm_mib": max(warm) / 2**20, "last_mib": max(last) / 2**20}
    time.sleep(40)  # the janitors' patience
    result = {
        "provenance": provenance(),
        "steps": len(found),
        "unhealthy_steps": [i + 1 for i, row in enumerate(found) if row["das/health"] != 1],
        "tokens_per_forward_first_last": [found[0]["das/tokens_per_forward"], found[-1]["das/tokens_per_forward"]],
        "history_bytes_most": max(row["das/history_bytes"] for row in found),
        "left_in_shared_memory": sorted({p.name for p in shared.glob("das-history-*")} - before),
        "memory": growth,
        "largest_growth_mib": max(g["last_mib"] - g["warm_mib"] for g in growth.values()),
    }
    save(out, result)
    click.echo({name: value for name, value in result.items() if name not in ("memory", "provenance")})


if __name__ == "__main__":
    main()
