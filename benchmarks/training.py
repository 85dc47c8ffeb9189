"""Train 200 steps through veRL on a CPU, an arm after the other: reward by step, off and with drafts.

    python benchmarks/training.py --out FILE.json

`off` and `history` draw keyed noise, so that their tokens and rewards are equal in each step. `history:stock` drafts
under vLLM's own noise, and `off:seed1` draws other keyed noise: how far such a run is from `off` is the noise of the
curve.
"""

from __future__ import annotations

import sys
import tempfile
import time
from operator import eq
from pathlib import Path
from typing import Any

import click
import numpy as np
import pandas as pd
import pipelines
from pipelines import DAS, ROOT
from provenance import provenance, save

sys.path.append(str(ROOT / "examples" / "tiny_math"))
from prepare_data import make_rows

ARMS = {
    **pipelines.ARMS,
    "history:stock": [f"{DAS}.drafter=history", f"+{DAS}.verify.noise=stock"],
    "off:seed1": [f"{DAS}.drafter=none", f"+{DAS}.verify={{noise: keyed, seed: 1}}"],
}
COLUMNS = {
    "reward": "critic/score/mean",
    "token_hash": "das/token_hash",
    "tokens_per_forward": "das/tokens_per_forward",
    "response_length_mean": "response_length/mean",
    "rollout_s": "das/rollout_s",
    "health": "das/health",
}
EASY = 10
"""Most steps of a problem, so that 200 training steps take minutes."""


def train(arm: str, steps: int, problems: int, batch: int) -> dict[str, Any]:
    """Run an arm; return its figures, a list per step each."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "train.parquet"
        rows = [row for row in make_rows("train", 4 * problems, 0) if row["extra_info"]["difficulty"] <= EASY]
        pd.DataFrame(rows[:problems]).to_parquet(data)
        begin = time.perf_counter()
        found = pipelines.train(
            "verl.trainer.main_ppo",
            "grpo_tiny_math_cpu",
            f"data.train_files={data}",
            f"data.val_files={data}",
            f"data.train_max_samples={problems}",
            f"data.train_batch_size={batch}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={batch}",
            "data.max_prompt_length=64",
            "data.max_response_length=128",
            f"trainer.total_training_steps={steps}",
            f"trainer.total_epochs={steps}",
            *ARMS[arm],
        )
    figures = {name: [row.get(key) for row in found] for name, key in COLUMNS.items()}
    return figures | {"seconds": round(time.perf_counter() - begin)}


def compare(arms: dict[str, dict[str, Any]], epoch: int) -> dict[str, dict[str, Any]]:
    """Compare each arm with `off`: steps with the same reward and tokens, and how far epochs' mean rewards are apart;
    `epoch`: its steps."""
    off = arms["off"]
    return {
        arm: {
            "steps_with_same_reward": sum(map(eq, figures["reward"], off["reward"])),
            "steps_with_same_tokens": sum(map(eq, figures["token_hash"], off["token_hash"])),
            "reward_by_quarter": [float(part.mean()) for part in np.array_split(figures["reward"], 4)],
            "epochs_apart_rms": float(np.sqrt(np.mean((by_epoch(figures, epoch) - by_epoch(off, epoch)) ** 2))),
        }
        for arm, figures in arms.items()
    }


def by_epoch(figures: dict[str, Any], epoch: int) -> np.ndarray:
    """Return the mean reward of each epoch, whose steps have the same problems in every arm."""
    return np.array(figures["reward"], dtype=float).reshape(-1, epoch).mean(axis=1)


@click.command()
@click.option("--steps", "count", default=200, show_default=True, help="Training steps of a run: whole epochs.")
@click.option("--problems", default=20, show_default=True, help="Problems in the data.")
@click.option("--batch", default=1, show_default=True, help="Problems of a step, four samples of each.")
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(count: int, problems: int, batch: int, out: Path) -> None:
    """Train the arms; what is known is written after each."""
    settings = {"steps": count, "problems": problems, "batch": batch}
    if count * batch % problems:
        raise click.UsageError(f"--steps {count}: not whole epochs of {problems // batch} steps")
    arms: dict[str, dict[str, Any]] = {}
    for arm in ARMS:
        arms[arm] = train(arm, **settings)
        comparison = compare(arms, problems // batch)
        save(out, {"provenance": provenance(), "settings": settings, "arms": arms, "comparison": comparison})
        click.echo(f"{arm}: {arms[arm]['seconds']} s; {comparison[arm]}")


if __name__ == "__main__":
    main()
