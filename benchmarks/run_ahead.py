"""Run veRL on two replicas: what run-ahead gains where no problem has history, and at
later visits.

    python benchmarks/run_ahead.py --steps 60 --visits 2 --out FILE.json

Off, history, and history with run-ahead, same seeds, one training after the other, in
an order that is turned round from repeat to repeat; each replica computes with one
thread. All arms must write the same tokens.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import pipelines
from pipelines import ARMS, DAS, ROOT
from provenance import provenance, save

ALL = {**ARMS, "ahead": [*ARMS["history"], f"+{DAS}.history.run_ahead=auto"]}
COLUMNS = {
    "rollout_s": "das/rollout_s",
    "step_s": "timing_s/step",
    "tokens_per_forward": "das/tokens_per_forward",
    "written_ahead": "das/run_ahead_tokens",
    "repeated": "das/run_ahead_repeated",
    "token_hash": "das/token_hash",
    "health": "das/health",
}


def train(
    arm: str, count: int, batch: int, visits: int, overrides: tuple[str, ...]
) -> dict[str, list[Any]]:
    """Train with an arm's settings; return the figures of each step."""
    settings = [
        *(
            f"trainer.total_training_steps={count}",
            f"data.train_max_samples={count * batch // visits}",
        ),
        *(
            f"data.train_batch_size={batch}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={batch}",
        ),
        *("trainer.n_gpus_per_node=2", "ray_kwargs.ray_init.num_gpus=2"),
    ]
    found = pipelines.train(
        "verl.trainer.main_ppo", "grpo_tiny_math_cpu", *settings, *ALL[arm], *overrides
    )
    return {
        name: [row.get(column) for row in found] for name, column in COLUMNS.items()
    }


def compared(
    arms: dict[str, list[dict[str, list[Any]]]], visits: int
) -> dict[str, Any]:
    """Compare run-ahead with the other arms, run by run and visit by visit, without the
    first step, for which nothing is written ahead.
    """
    found: dict[str, Any] = {}
    for other in arms.keys() - {"ahead"}:
        pairs = list(zip(arms["ahead"], arms[other], strict=True))
        for column in ("rollout_s", "step_s", "tokens_per_forward"):
            steps = np.array([[a[column], b[column]] for a, b in pairs])
            for visit, part in enumerate(
                np.array_split(np.arange(steps.shape[-1]), visits), 1
            ):
                sums = steps[..., part[part > 0]].sum(axis=-1)
                ratios = (sums[:, 0] / sums[:, 1]).tolist()
                of = found.setdefault(f"visit_{visit}", {})
                of[f"{column}_of_{other}"] = {
                    "median": float(np.median(ratios)),
                    "runs": ratios,
                }
    hashes = [run["token_hash"] for runs in arms.values() for run in runs]
    found["same_tokens"] = all(run == hashes[0] for run in hashes)
    return found


@click.command()
@click.option(
    "--steps", "count", default=40, show_default=True, help="Training steps of a run."
)
@click.option(
    "--batch",
    default=8,
    show_default=True,
    help="Problems of a step, four samples each.",
)
@click.option(
    "--visits", default=1, show_default=True, help="How often each problem comes."
)
@click.option("--repeats", default=1, show_default=True, help="Runs of each arm.")
@click.option(
    "--arm",
    "names",
    type=click.Choice(list(ALL)),
    multiple=True,
    default=list(ALL),
    show_default=True,
)
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.argument("overrides", nargs=-1)
def main(
    count: int,
    batch: int,
    visits: int,
    repeats: int,
    names: tuple[str, ...],
    out: Path,
    overrides: tuple[str, ...],
) -> None:
    """Rollout and step times, and tokens per forward pass; further arguments are
    veRL's, for every arm.
    """
    size = ["--train-size", str(count * batch)]
    data = [sys.executable, ROOT / "examples/tiny_math/prepare_data.py", *size]
    subprocess.run(data, check=True, stdout=subprocess.DEVNULL)
    arms: dict[str, list[dict[str, list[Any]]]] = {arm: [] for arm in names}
    for repeat in range(repeats):
        for arm in names[:: 1 if repeat % 2 else -1]:
            arms[arm].append(train(arm, count, batch, visits, overrides))
            click.echo(
                f"{arm}: {np.sum(arms[arm][-1]['rollout_s'][1:]):.1f} s of rollouts"
            )
    against = compared(arms, visits)
    for name, value in against.items():
        click.echo(f"{name}: {value}")
    found = {
        "steps": count,
        "batch": batch,
        "visits": visits,
        "arms": arms,
        "against": against,
    }
    save(out, {"provenance": provenance(), **found})


if __name__ == "__main__":
    main()
