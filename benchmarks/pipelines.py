"""Run veRL's asynchronous pipelines on a CPU: what drafting gains there.

    python benchmarks/pipelines.py --out FILE.json

Each pipeline without and with the history, same seeds; tokens per second of the
engine's own steps, and acceptance by the age of the history.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np
from provenance import provenance, save

from das_adapter.cpu.environment import cpu_env

ROOT = Path(__file__).resolve().parents[1]
DAS = "actor_rollout_ref.rollout.custom.das"
ARMS = {
    "off": [f"{DAS}.drafter=none", f"+{DAS}.verify.noise=keyed"],
    "history": [f"{DAS}.drafter=history"],
}
PIPELINES = {
    "one_step_off": (
        "verl.experimental.one_step_off_policy.main_ppo",
        "trainer.total_training_steps={steps}",
    ),
    "fully_async": (
        "verl.experimental.fully_async_policy.fully_async_main",
        "rollout.total_rollout_steps={rollouts}",
    ),
}


def train(module: str, config: str, *overrides: str) -> list[dict[str, Any]]:
    """Train, and return the logged figures of the steps that have those of a
    rollout.
    """
    command = [
        sys.executable,
        "-m",
        module,
        "--config-path",
        str(ROOT / "examples/verl"),
        "--config-name",
        config,
    ]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "log.jsonl"
        env = {
            **os.environ,
            **cpu_env(),
            "VERL_FILE_LOGGER_PATH": str(out),
            "HF_HUB_OFFLINE": "1",
        }
        env.pop("CUDA_VISIBLE_DEVICES", None)
        with (said := out.with_suffix(".log")).open("w") as log:
            done = subprocess.run(
                [*command, *overrides],
                cwd=ROOT,
                env=env,
                stdout=log,
                stderr=log,
                check=False,
            )
        if done.returncode:
            sys.exit(said.read_text()[-4000:])
        rows = [json.loads(line)["data"] for line in out.read_text().splitlines()]
    return [row for row in rows if "das/tokens_per_forward" in row]


@click.command()
@click.option(
    "--steps", "count", default=12, show_default=True, help="Training steps of a run."
)
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(count: int, out: Path) -> None:
    """Tokens per second of the engine, off against history."""
    result: dict[str, Any] = {
        "provenance": provenance(),
        "steps": count,
        "pipelines": {},
    }
    for pipeline, (module, length) in PIPELINES.items():
        arms = {}
        for arm, overrides in ARMS.items():
            limit = length.format(steps=count, rollouts=4 * count)
            found = train(module, f"grpo_tiny_math_cpu_{pipeline}", limit, *overrides)
            late = found[-max(1, len(found) // 2) :]
            arms[arm] = {
                "updates": len(found),
                **{
                    n: [row.get(n) for row in found]
                    for n in (
                        "das/tokens_per_s",
                        "das/tokens_per_forward",
                        "das/health",
                    )
                },
                "tokens_per_s_second_half": float(
                    np.mean([row["das/tokens_per_s"] for row in late])
                ),
            }
        ratio = (
            arms["history"]["tokens_per_s_second_half"]
            / arms["off"]["tokens_per_s_second_half"]
        )
        result["pipelines"][pipeline] = {"ratio_second_half": ratio, "arms": arms}
        click.echo(f"{pipeline}: {ratio:.2f} x off")
        save(out, result)


if __name__ == "__main__":
    main()
