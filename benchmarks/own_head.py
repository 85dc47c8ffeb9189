"""Train an EAGLE-3 head on a run's own rollouts, and measure it on new problems.

    python benchmarks/own_head.py --out FILE.json

A run of veRL on a CPU visits its problems twice and saves a checkpoint. `das-adapter
history export` writes its rollouts as rows, on which a head is trained. From the
checkpoint on each arm trains some more steps, in which no problem comes twice: with the
history alone, with a head that was trained on demonstrations before the run, and with
the run's own; the heads stay as they are. All arms must write the same tokens.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import pandas as pd
import pipelines
from pipelines import DAS, ROOT
from provenance import provenance, save

TINY_MATH = ROOT / "examples" / "tiny_math"
sys.path += [str(TINY_MATH), str(ROOT / "examples" / "verl")]
from demo import num_equal, tokens_per_forward  # noqa: E402
from prepare_data import make_rows  # noqa: E402

BATCH = 4
"""Problems of a step, four samples of each."""
COLUMNS = {
    "tokens_per_forward": "das/tokens_per_forward",
    "acceptance_length": "das/acceptance_length",
    "draft_coverage": "das/draft_coverage",
    "response_length_mean": "response_length/mean",
    "token_hash": "das/token_hash",
    "health": "das/health",
}
Figures = dict[str, list[Any]]
"""Figures of a run by name, a value for each step."""


def train(data: Path, settings: list[str], policy: Path | None = None) -> Figures:
    """Train on each problem of a data set in turn, until `settings` end it."""
    overrides = [
        f"data.train_files={data}",
        f"data.val_files={data}",
        "data.train_max_samples=-1",
        f"data.train_batch_size={BATCH}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}",
        *settings,
    ]
    if policy:
        overrides.append(f"actor_rollout_ref.model.path={policy}")
    found = pipelines.train("verl.trainer.main_ppo", "grpo_tiny_math_cpu", *overrides)
    figures = {}
    for name, key in COLUMNS.items():
        figures[name] = [row.get(key) for row in found]
    return figures


def write_data(out: Path, problems: int, new: int) -> tuple[Path, Path]:
    """Write the problems of the first run and those that come after it."""
    rows = make_rows("train", problems + new, 0)
    paths = (out / "first.parquet", out / "new.parquet")
    pd.DataFrame(rows[:problems]).to_parquet(paths[0])
    pd.DataFrame(rows[problems:]).to_parquet(paths[1])
    return paths


def first_run(data: Path, folder: Path, steps: int) -> Path:
    """Train with the history; return the directory of the last checkpoint."""
    train(
        data,
        [
            f"{DAS}.drafter=history",
            f"trainer.total_training_steps={steps}",
            f"trainer.save_freq={steps}",
            f"trainer.default_local_dir={folder}",
            "actor_rollout_ref.actor.checkpoint.save_contents=[model,hf_model]",
        ],
    )
    return folder / f"global_step_{steps}"


def run(script: Path | str, *arguments: Any) -> None:
    """Run a program of this environment, or a script of the tiny task."""
    words = [str(argument) for argument in arguments]
    subprocess.run([sys.executable, str(script), *words], cwd=ROOT, check=True)


def make_heads(checkpoint: Path, folder: Path, steps: int) -> dict[str, Path]:
    """Train a head on demonstrations, for the policy as it was before the run, and one
    on the run's rollouts, for the policy as it is behind it, so many steps each; return
    where they are.
    """
    rows = folder / "rows"
    program = Path(sys.executable).with_name("das-adapter")
    run(program, "history", "export", "--out", rows, checkpoint)
    script = TINY_MATH / "make_drafters.py"
    policy = policy_of(checkpoint)
    for name, more in {
        "general": [],
        "own": ["--policy", policy, "--rows", rows],
    }.items():
        run(script, folder / name, "--steps", steps, *more)
    return {name: folder / name / "eagle3" for name in ("general", "own")}


def policy_of(checkpoint: Path) -> Path:
    """Return the directory of a checkpoint that has the policy as vLLM reads it."""
    return checkpoint / "actor" / "huggingface"


def arms_of(heads: dict[str, Path]) -> dict[str, list[str]]:
    """Return the settings of each arm. All draft in every step, whatever that costs on
    a CPU.
    """
    arms = {"history": [f"{DAS}.drafter=history"]}
    for name, head in heads.items():
        model = f"+{DAS}.draft.model={head}"
        arms[f"{name} head"] = [f"{DAS}.drafter=eagle3", model]
    arms["history and own head"] = [f"{DAS}.drafter=history+eagle3", model]
    always = [f"+{DAS}.speculate=always", f"+{DAS}.budget=unlimited"]
    return {name: [*settings, *always] for name, settings in arms.items()}


def summary(arms: dict[str, Figures]) -> dict[str, Any]:
    """Return each arm's tokens per forward pass, over all steps and over each third,
    and in how many steps its tokens are those of the first arm.
    """
    first = next(iter(arms.values()))
    found = {}
    for name, figures in arms.items():
        (of_all_steps,) = tokens_per_forward(figures, 1)
        found[name] = {
            "tokens_per_forward": of_all_steps,
            "by_third": tokens_per_forward(figures, 3),
            "steps_with_same_tokens": num_equal(figures, first, "token_hash"),
        }
    return found


@click.command()
@click.option(
    "--problems",
    default=64,
    show_default=True,
    help="Problems of the first run, which visits each twice.",
)
@click.option(
    "--steps",
    default=30,
    show_default=True,
    help="Steps of each arm behind it, on new problems.",
)
@click.option(
    "--head-steps",
    default=500,
    show_default=True,
    help="Training steps of a head.",
)
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(problems: int, steps: int, head_steps: int, out: Path) -> None:
    """Train the heads and all arms; what is known is written after each."""
    arms: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first, new = write_data(folder, problems, steps * BATCH)
        checkpoint = first_run(first, folder / "run", 2 * problems // BATCH)
        heads = make_heads(checkpoint, folder, head_steps)
        for arm, settings in arms_of(heads).items():
            limit = f"trainer.total_training_steps={steps}"
            arms[arm] = train(new, [*settings, limit], policy_of(checkpoint))
            content = {
                "provenance": provenance(),
                "problems": problems,
                "steps": steps,
                "head_steps": head_steps,
                "arms": summary(arms),
                "figures": arms,
            }
            save(out, content)
            figures = content["arms"][arm]
            click.echo(f"{arm}: {figures['tokens_per_forward']:.2f} tokens a forward")


if __name__ == "__main__":
    main()
