"""`make demo`: GRPO through veRL three times with the same seeds, and what speculation changed: only the time.

Arms: `off` (no speculation), `ngram` (vLLM's own prompt look-up), `history` (das-adapter's drafter), and, if asked
for, `self` (a rounded copy of the policy), `history+self`, `draft_model`, `eagle3` (vLLM's own, trained here). All draw
their tokens with keyed noise, so every arm must write the same rollouts. Results go to runs/demo: summary.json, plots,
logs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from das_adapter.tools.hardware import hardware
from das_adapter.verl.cpu.env import cpu_env

ROOT = Path(__file__).resolve().parents[2]
DAS = "actor_rollout_ref.rollout.custom.das"
DRAFTERS = ROOT / "runs" / "drafters"
ARMS = {
    "off": [f"{DAS}.drafter=none", f"+{DAS}.verify.noise=keyed"],
    "ngram": [f"{DAS}.drafter=ngram", f"{DAS}.budget.max_draft_tokens=4"],
    "history": [f"{DAS}.drafter=history"],
    "self": [f"{DAS}.drafter=self"],
    "history+self": [f"{DAS}.drafter=history+self"],
    "draft_model": [f"{DAS}.drafter=draft_model", f"+{DAS}.draft.model={DRAFTERS}/draft_model"],
    "eagle3": [f"{DAS}.drafter=eagle3", f"+{DAS}.draft.model={DRAFTERS}/eagle3"],
    # vLLM's own suffix decoding, under our noise: for benchmarks, needs arctic-inference.
    "suffix": [
        *(f"{DAS}.drafter=none", f"+{DAS}.verify.noise=keyed"),
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config={method:suffix,num_speculative_tokens:32}",
    ],
}
COLUMNS = {
    "rollout_s": "das/rollout_s",
    "reward": "critic/score/mean",
    "token_hash": "das/token_hash",
    "tokens_per_forward": "das/tokens_per_forward",
    "acceptance_length": "das/acceptance_length",
    "draft_coverage": "das/draft_coverage",
    "tail_s": "das/tail_s",
    "gen_s": "timing_s/gen",
    "step_s": "timing_s/step",
    "response_length_mean": "response_length/mean",
    "response_length_max": "response_length/max",
    "health": "das/health",
}


def main() -> None:
    """Run the arms, print the table, write the summary and the plots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["off", "ngram", "history"])
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "demo")
    parser.add_argument("overrides", nargs="*", help="further hydra overrides, for every arm")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    console = Console(width=None if sys.stdout.isatty() else 120)
    begin = time.time()
    subprocess.run([sys.executable, ROOT / "examples/tiny_math/prepare_data.py"], check=True, stdout=subprocess.DEVNULL)
    if {"draft_model", "eagle3"} & set(args.arms) and not (DRAFTERS / "eagle3").exists():
        subprocess.run([sys.executable, ROOT / "examples/tiny_math/make_drafters.py", DRAFTERS], check=True)
    with Progress(
        TextColumn("{task.description:8}"), BarColumn(), TextColumn("step {task.completed}/{task.total}"),
        TextColumn("{task.fields[note]}"), TimeElapsedColumn(), console=console,
    ) as progress:  # fmt: skip
        arms = {arm: run_arm(arm, args, progress) for arm in args.arms}
    summary = {
        "versions": {name: version(name) for name in ("das-adapter", "verl", "vllm", "torch", "ray", "transformers")},
        "hardware": hardware(),
        "command": "make demo" if len(sys.argv) == 1 else " ".join(["python examples/verl/demo.py", *sys.argv[1:]]),
        "seconds": round(time.time() - begin),
        "steps": args.steps,
        "arms": arms,
        "comparison": compare(arms),
    }
    (args.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    show(summary, console)
    plot(summary, args.out)
    console.print(f"\n{args.out / 'summary.json'} and the plots beside it; {summary['seconds']} s in all")


def run_arm(arm: str, args: argparse.Namespace, progress: Progress) -> dict[str, list[float]]:
    """Train with one arm's settings and return its figures, a list per step each."""
    task = progress.add_task(arm, total=args.steps, note="starting Ray, veRL and vLLM")
    metrics, log = args.out / f"{arm}.jsonl", args.out / f"{arm}.log"
    metrics.unlink(missing_ok=True)
    environment = {
        **os.environ, **cpu_env(),
        "VERL_FILE_LOGGER_PATH": str(metrics), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    command = [
        *(sys.executable, "-m", "verl.trainer.main_ppo"),
        *("--config-path", str(ROOT / "examples/verl"), "--config-name", "grpo_tiny_math_cpu"),
        f"trainer.total_training_steps={args.steps}",
        *ARMS[arm],
        *args.overrides,
    ]
    with log.open("w") as out, subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out) as run:
        while run.poll() is None:
            time.sleep(0.5)
            if steps := read(metrics):
                last = steps[-1]
                note = f"rollout {last['das/rollout_s']:.1f} s, reward {last['critic/score/mean']:.2f}"
                progress.update(task, completed=len(steps), note=note)
    steps = read(metrics)
    if run.returncode or len(steps) < args.steps:
        sys.exit(f"the {arm} arm stopped after {len(steps)} of {args.steps} steps; see {log}")
    figures = {name: [step[key] for step in steps] for name, key in COLUMNS.items()}
    return {**figures, "token_hash": [f"{int(h):012x}" for h in figures["token_hash"]]}


def read(metrics: Path) -> list[dict[str, float]]:
    """The steps that veRL's file logger has written so far."""
    if not metrics.exists():
        return []
    lines = metrics.read_text().splitlines()
    return [row["data"] for row in map(json.loads, lines) if "das/rollout_s" in row["data"]]


def compare(arms: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each arm against `off`: over all steps, and over the last third, when the history is warm."""
    if "off" not in arms:
        return {}
    off = arms["off"]
    late = slice(-(len(off["rollout_s"]) // 3), None)
    return {
        arm: {
            "rollout_ratio": sum(figures["rollout_s"]) / sum(off["rollout_s"]),
            "rollout_ratio_last_third": sum(figures["rollout_s"][late]) / sum(off["rollout_s"][late]),
            "identical_tokens": figures["token_hash"] == off["token_hash"],
            "identical_reward": figures["reward"] == off["reward"],
        }
        for arm, figures in arms.items()
    }


def show(summary: dict[str, Any], console: Console) -> None:
    """Print the arms' means over the last third, then the steps."""
    arms, comparison = summary["arms"], summary["comparison"]
    late = slice(-(summary["steps"] // 3), None)
    table = Table(title="Last third of the steps")
    for column in ("arm", "rollout s/step", "of off", "tokens/forward", "acceptance length", "draft coverage",
                   "reward, first third → last", "identical tokens"):  # fmt: skip
        table.add_column(column, justify="left" if column == "arm" else "right")
    for arm, f in arms.items():
        against = comparison.get(arm, {})
        table.add_row(
            arm,
            f"{mean(f['rollout_s'][late]):.2f}",
            f"{against['rollout_ratio_last_third']:.2f}" if against else "-",
            *(f"{mean(f[name][late]):.2f}" for name in ("tokens_per_forward", "acceptance_length", "draft_coverage")),
            f"{mean(f['reward'][: summary['steps'] // 3]):.2f} → {mean(f['reward'][late]):.2f}",
            ("yes" if against["identical_tokens"] else "NO") if against else "-",
        )
    console.print(table)
    steps = Table(title="Each step: rollout seconds, reward")
    for column in ("step", *arms):
        steps.add_column(column, justify="right")
    for i in range(summary["steps"]):
        steps.add_row(str(i + 1), *(f"{f['rollout_s'][i]:6.2f}  {f['reward'][i]:.3f}" for f in arms.values()))
    console.print(steps)


def plot(summary: dict[str, Any], out: Path) -> None:
    """Write rollout.png and reward.png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for name, label in (("rollout_s", "rollout, seconds per step"), ("reward", "mean reward"),
                        ("tokens_per_forward", "tokens per target forward")):  # fmt: skip
        figure, axis = pyplot.subplots(figsize=(6, 3.4), layout="constrained")
        for style, (arm, figures) in zip(("-", "--", ":"), summary["arms"].items(), strict=False):
            axis.plot(range(1, summary["steps"] + 1), figures[name], style, marker="o", markersize=3, label=arm)
        axis.set(xlabel="training step", ylabel=label)
        axis.set_ylim(bottom=0)
        axis.legend()
        figure.savefig(out / f"{name.removesuffix('_s')}.png", dpi=150)
        pyplot.close(figure)


def mean(values: list[float]) -> float:
    """Arithmetic mean."""
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
