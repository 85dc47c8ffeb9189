"""Train 200 steps through veRL on a CPU, an arm after the other: reward by step, off
and with drafts.

    python benchmarks/training.py --out FILE.json

`off` and `history` draw keyed noise, so that their tokens and rewards are equal in each
step. The other arms have the history, and train the first of these steps: with other
seeds of the keyed noise, which shows the noise of the curve, and with vLLM's own noise.
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

SEEDS = (1, 2, 3)
SEEDED = {
    "keyed": {
        seed: [f"+{DAS}.verify={{noise: keyed, seed: {seed}}}"] for seed in SEEDS
    },
    "stock": {
        seed: [f"+{DAS}.verify.noise=stock", f"actor_rollout_ref.rollout.seed={seed}"]
        for seed in SEEDS
    },
}
"""Settings of each kind of noise by its seeds, beside those of `history`."""
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


def train(settings: list[str], steps: int, problems: int, batch: int) -> dict[str, Any]:
    """Run an arm with its settings; return its figures, a list per step each."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "train.parquet"
        rows = [
            row
            for row in make_rows("train", 4 * problems, 0)
            if row["extra_info"]["difficulty"] <= EASY
        ]
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
            "actor_rollout_ref.actor.optim.lr=2.0e-5",
            *settings,
        )
    figures = {name: [row.get(key) for row in found] for name, key in COLUMNS.items()}
    return figures | {"seconds": round(time.perf_counter() - begin)}


def compare(off: dict[str, Any], figures: dict[str, Any], epoch: int) -> dict[str, Any]:
    """Compare an arm with `off`, over the arm's steps: those with the same reward and
    tokens, the mean reward, and how far epochs' mean rewards are apart, root mean
    square; `epoch`: its steps.
    """
    off = {
        name: off[name][: len(figures["reward"])] for name in ("reward", "token_hash")
    }
    return {
        "steps_with_same_reward": sum(map(eq, figures["reward"], off["reward"])),
        "steps_with_same_tokens": sum(
            map(eq, figures["token_hash"], off["token_hash"])
        ),
        "reward": float(np.mean(figures["reward"])),
        "reward_by_quarter": [
            float(part.mean()) for part in np.array_split(figures["reward"], 4)
        ],
        "epochs_apart_rms": float(
            np.sqrt(np.mean((by_epoch(figures, epoch) - by_epoch(off, epoch)) ** 2))
        ),
    }


def by_epoch(figures: dict[str, Any], epoch: int) -> np.ndarray:
    """Return the mean reward of each epoch, whose steps have the same problems in every
    arm.
    """
    return np.array(figures["reward"], dtype=float).reshape(-1, epoch).mean(axis=1)


@click.command()
@click.option(
    "--steps",
    "count",
    default=200,
    show_default=True,
    help="Training steps of a run: whole epochs.",
)
@click.option(
    "--seeded",
    default=60,
    show_default=True,
    help="Those of the arms with other noise.",
)
@click.option("--problems", default=20, show_default=True, help="Problems in the data.")
@click.option(
    "--batch",
    default=1,
    show_default=True,
    help="Problems of a step, four samples of each.",
)
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(count: int, seeded: int, problems: int, batch: int, out: Path) -> None:
    """Train the arms; what is known is written after each."""
    if any(steps * batch % problems for steps in (count, seeded)):
        raise click.UsageError(
            f"--steps {count} --seeded {seeded}: not whole epochs of"
            f" {problems // batch} steps"
        )
    shape = {"steps": count, "seeded": seeded, "problems": problems, "batch": batch}
    arms: dict[str, dict[str, Any]] = {}
    seeds: dict[str, dict[int, Any]] = {kind: {} for kind in SEEDED}

    def run(found: dict[Any, Any], name: Any, steps: int, settings: list[str]) -> None:
        figures = train(settings, steps, problems, batch)
        off = arms["off"]["figures"] if "off" in arms else figures
        found[name] = {**compare(off, figures, problems // batch), "figures": figures}
        save(
            out,
            {
                "provenance": provenance(),
                "settings": shape,
                "arms": arms,
                "seeds": seeds,
            },
        )
        click.echo(
            f"{name}: reward {found[name]['reward']:.3f},"
            f" {found[name]['epochs_apart_rms']:.3f} from off"
        )

    for arm, settings in pipelines.ARMS.items():
        run(arms, arm, count, settings)
    for kind, by_seed in SEEDED.items():
        for seed, settings in by_seed.items():
            run(seeds[kind], seed, seeded, [*pipelines.ARMS["history"], *settings])


if __name__ == "__main__":
    main()
