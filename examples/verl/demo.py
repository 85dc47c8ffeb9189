"""Run `make demo`: GRPO through veRL with speculation off and on, same seeds: the same
tokens in less time.

Arms: `off` and `history` (das-adapter's drafter); with `--arms` also `ngram` (vLLM's
prompt look-up), `self` (a quantised copy of the policy), `history+self`, `draft_model`
and `eagle3` (vLLM's own, trained here). All draw their tokens with keyed noise, so
every arm must write the same rollouts. The arms run side by side and roll out in turn,
so that noise of the machine falls on all of them. Results go to runs/demo:
summary.json, logs, and the decisions of the history arm, which `das-adapter report`
shows.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from operator import eq
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from das_adapter.cpu.environment import cpu_env
from das_adapter.reports.compare import claims, right_claims
from das_adapter.reports.provenance import RUN, provenance, save

ROOT = Path(__file__).resolve().parents[2]
DAS = "actor_rollout_ref.rollout.custom.das"
DRAFTERS = ROOT / "runs" / "drafters"
POLICY = ROOT / "runs" / "tiny_math_31m"
ARMS = {
    "off": [f"{DAS}.drafter=none", f"+{DAS}.verify.noise=keyed"],
    "ngram": [f"{DAS}.drafter=ngram", f"+{DAS}.max_draft_tokens=4"],
    "history": [f"{DAS}.drafter=history"],
    "self": [f"{DAS}.drafter=self"],
    "history+self": [f"{DAS}.drafter=history+self"],
    "draft_model": [
        f"{DAS}.drafter=draft_model",
        f"+{DAS}.draft.model={DRAFTERS}/draft_model",
    ],
    "eagle3": [
        f"{DAS}.drafter=eagle3",
        f"+{DAS}.draft.model={POLICY}/eagle3",
    ],
    # vLLM's own suffix decoding, with das-adapter's noise: for benchmarks, needs
    # arctic-inference.
    "suffix": [
        f"{DAS}.drafter=none",
        f"+{DAS}.verify.noise=keyed",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config={method:suffix,num_speculative_tokens:32}",
    ],
}
"""The overrides of each arm."""
DECISIONS = "decisions"
"""Folder of the history arm's decision log in `--out`."""
ARM_GB = 7.5
"""Memory that an arm takes, in 10^9 bytes (benchmarks/results/demo.json, of two)."""
PER_STEP = (
    "data.train_batch_size",
    "data.val_max_samples",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
)
"""Keys that take the number of problems in a step."""
COLUMNS = {
    "rollout_s": "das/rollout_s",
    "reward": "critic/score/mean",
    "token_hash": "das/token_hash",
    "tokens_per_forward": "das/tokens_per_forward",
    "acceptance_length": "das/acceptance_length",
    "draft_coverage": "das/draft_coverage",
    "tail_s": "das/tail_s",
    "response_length_mean": "response_length/mean",
    "response_length_max": "response_length/max",
    "health": "das/health",
    "memory_used_gb": "actor/perf/cpu_memory_used_gb",
    "of_stock": "das/of_stock",
}
"""The figures of the summary, and their names in veRL's log."""


def main() -> None:
    """Run the arms, print the table, write the summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--problems", type=int, default=8, help="problems in the data")
    parser.add_argument("--batch", type=int, default=2, help="problems a step")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["off", "history"])
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "demo")
    parser.add_argument(
        "--not-strict",
        action="store_true",
        help=(
            "without MKL_CBWR=AUTO,STRICT: products of several rows may be faster, and"
            " tokens may differ"
        ),
    )
    parser.add_argument(
        "overrides", nargs="*", help="further hydra overrides, for every arm"
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    console = Console(width=None if sys.stdout.isatty() else 120)
    available_gb = psutil.virtual_memory().available / 1e9
    at_once = arms_at_once(args.arms, available_gb, console)
    shutil.rmtree(args.out / DECISIONS, ignore_errors=True)
    begin = time.time()
    prepare(args)
    figures = {}
    runners = {}
    for names in at_once:
        arms = [Arm(name, args) for name in names]
        try:
            figures |= train(arms, steps(args), console)
            runners |= {arm.name: arm.runner() for arm in arms}
        finally:
            for arm in arms:
                arm.run.terminate()
            for arm in arms:
                arm.run.wait()
    summary = {
        "provenance": provenance([*RUN, "das_adapter/verl"]),
        "seconds": round(time.time() - begin),
        "memory_used_gb": max(
            value for row in figures.values() for value in row["memory_used_gb"]
        ),
        "epochs": args.epochs,
        "runners": runners,
        "in_turn": len(at_once) == 1,
        "arms": figures,
        "comparison": compare(figures, args.epochs),
        "tokens_per_forward_by_epoch": {
            arm: tokens_per_forward(row, args.epochs) for arm, row in figures.items()
        },
    }
    save(args.out / "summary.json", summary)
    show(summary, console)
    if "history" in args.arms:
        show_next_commands(args.out, console)


def arms_at_once(
    arms: list[str], available_gb: float, console: Console
) -> list[list[str]]:
    """Return which arms run at a time: all, whose rollouts then take turns; one, and it
    is said, where there is too little memory for that.
    """
    if available_gb >= len(arms) * ARM_GB:
        return [arms]
    console.print(
        f"{available_gb:.0f} GB of memory are available, and {len(arms)} runs side by"
        f" side take about {len(arms) * ARM_GB:.0f} GB: they run one after the other,"
        " and what else the machine does changes how they compare."
    )
    if available_gb < ARM_GB:
        console.print(
            f"Warning: one run takes about {ARM_GB} GB; it may be slow, or be killed."
        )
    return [[arm] for arm in arms]


def steps(args: argparse.Namespace) -> int:
    """Return the training steps of an arm."""
    steps_per_epoch = args.problems // args.batch
    return args.epochs * steps_per_epoch


def prepare(args: argparse.Namespace) -> None:
    """Write the data, the policy, and the neural drafters if an arm needs them."""
    needs_drafters = "draft_model" in args.arms or "eagle3" in args.arms
    train_size = max(48, args.problems)
    commands = [["prepare_data.py", "--train-size", str(train_size)]]
    if needs_drafters and not (DRAFTERS / "eagle3").exists():
        commands.append(["make_drafters.py", DRAFTERS])
    widen = ["widen_policy.py", POLICY]
    widen += ["--width", "3", "--layers", "4", "--dtype", "float32"]
    if needs_drafters:
        widen += ["--drafters", DRAFTERS]
    commands.append(widen)
    for script, *options in commands:
        command = [sys.executable, ROOT / "examples/tiny_math" / script, *options]
        subprocess.run(
            command,
            check=True,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "TQDM_DISABLE": "1"},
        )


def environment_of(not_strict: bool) -> dict[str, str]:
    """Return the environment that the runs have in common; `not_strict`: without
    MKL_CBWR.
    """
    environment = {
        **os.environ,
        **cpu_env(),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_ADDRESS": "local",
    }
    # the config sizes the KV cache
    unset = ["CUDA_VISIBLE_DEVICES", "VLLM_CPU_KVCACHE_SPACE"]
    if not_strict:
        unset.append("MKL_CBWR")
    for variable in unset:
        environment.pop(variable, None)
    return environment


def decision_log(arm: str, out: Path) -> list[str]:
    """Return the overrides by which the history arm logs what it decides: a report
    shows one run.
    """
    if arm != "history":
        return []
    return [f"+{DAS}.log_dir={(out / DECISIONS).resolve()}"]


class Arm:
    """A veRL run with one arm's settings, which stops at gates (`in_turn.py`) until
    they are opened.
    """

    def __init__(self, name: str, args: argparse.Namespace):
        self.name = name
        self.gate = args.out / f"{name}.gate"
        self.log = args.out / f"{name}.log"
        self.metrics = args.out / f"{name}.jsonl"
        self.gate.unlink(missing_ok=True)
        self.metrics.unlink(missing_ok=True)
        environment = {
            **environment_of(args.not_strict),
            "DEMO_GATE": str(self.gate),
            "VERL_FILE_LOGGER_PATH": str(self.metrics),
        }
        command = [
            sys.executable,
            "-m",
            "verl.trainer.main_ppo",
            f"--config-path={ROOT / 'examples/verl'}",
            "--config-name=grpo_tiny_math_cpu_demo",
            f"trainer.total_training_steps={steps(args)}",
            f"data.train_max_samples={args.problems}",
            *(f"{key}={args.batch}" for key in PER_STEP),
            *ARMS[name],
            *decision_log(name, args.out),
            *args.overrides,
        ]
        with self.log.open("w") as out:
            self.run = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=out, stderr=out
            )

    def wait_for_gate(self, may_end: bool = False) -> None:
        """Wait until the run stands at its next gate, or has ended, if it may."""
        while not self.gate.exists():
            if self.run.poll() is not None:
                if may_end and self.run.returncode == 0:
                    return
                sys.exit(f"the {self.name} arm stopped; see {self.log}")
            time.sleep(0.02)

    def open_gate(self) -> None:
        """Open the gate."""
        with self.gate.open("wb"):
            self.gate.unlink()

    def runner(self) -> str:
        """Return which model runner of vLLM the engine had in the last step."""
        version = self.last_step()["das/model_runner"]
        return f"V{version:.0f}"

    def last_step(self) -> dict[str, float]:
        """Return what veRL's file logger wrote last."""
        lines = self.metrics.read_text().splitlines()
        return json.loads(lines[-1])["data"]


def train(
    arms: list[Arm], total: int, console: Console
) -> dict[str, dict[str, list[Any]]]:
    """Train all arms: rollouts in turn, each with the machine to itself, then the
    updates side by side.

    Returns:
        Each arm's figures, a list per step each.
    """
    figures: dict[str, dict[str, list[Any]]] = {
        arm.name: {name: [] for name in COLUMNS} for arm in arms
    }
    with Progress(
        TextColumn("{task.description:8}"),
        BarColumn(),
        TextColumn("step {task.completed}/{task.total}"),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        tasks = {
            arm: progress.add_task(
                arm.name, total=total, note="starting Ray, veRL and vLLM"
            )
            for arm in arms
        }
        for step in range(total + 1):  # step 0 is the warm-up
            for arm in arms:
                arm.wait_for_gate()
            # the order changes at each step
            order = arms if step % 2 else arms[::-1]
            for arm in order:
                arm.open_gate()
                arm.wait_for_gate()
            for arm in arms:
                arm.open_gate()
            for arm in arms:
                arm.wait_for_gate(may_end=step == total)
                note = "warmed up"
                if step:
                    logged = arm.last_step()
                    for name, key in COLUMNS.items():
                        figures[arm.name][name].append(logged.get(key))
                    note = (
                        f"rollout {logged['das/rollout_s']:.1f} s, reward"
                        f" {logged['critic/score/mean']:.2f}"
                    )
                progress.update(tasks[arm], completed=step, note=note)
                if not console.is_terminal:
                    print(f"{arm.name:8} step {step}/{total}  {note}", flush=True)
    return figures


def compare(arms: dict[str, dict[str, Any]], epochs: int) -> dict[str, dict[str, Any]]:
    """Compare each arm with `off`: its tokens, and its rollout time, also over the last
    third, with a warm history.
    """
    if "off" not in arms:
        return {}
    off = arms["off"]
    steps_per_epoch = len(off["reward"]) // epochs
    last_third = slice(-last_third_of(epochs) * steps_per_epoch, None)
    comparison = {}
    for arm, figures in arms.items():
        if arm == "off":
            continue
        ratio_by_epoch = []
        for epoch in range(epochs):
            begin = epoch * steps_per_epoch
            steps_of_epoch = slice(begin, begin + steps_per_epoch)
            ratio_by_epoch.append(ratio(figures, off, steps_of_epoch))
        comparison[arm] = {
            "rollout_ratio": ratio(figures, off),
            "rollout_ratio_by_epoch": ratio_by_epoch,
            "rollout_ratio_last_third": ratio(figures, off, last_third),
            "steps_with_same_tokens": num_equal(figures, off, "token_hash"),
            "steps_with_same_reward": num_equal(figures, off, "reward"),
            "claimed_of_measured": claims(
                figures["of_stock"], figures["rollout_s"], off["rollout_s"]
            ),
        }
    return comparison


def num_equal(arm: dict[str, Any], off: dict[str, Any], figure: str) -> int:
    """Return in how many steps a figure of an arm is that of `off`."""
    return sum(map(eq, arm[figure], off[figure]))


def last_third_of(epochs: int) -> int:
    """Return how many epochs are in the last third."""
    return max(1, epochs // 3)


def ratio(
    arm: dict[str, Any], off: dict[str, Any], steps: slice = slice(None)
) -> float:
    """Return the rollout time of an arm, as a share of that of `off`."""
    return sum(arm["rollout_s"][steps]) / sum(off["rollout_s"][steps])


def show(summary: dict[str, Any], console: Console) -> None:
    """Print a row per epoch, and the outcome in a line."""
    arms = summary["arms"]
    comparison = summary["comparison"]
    epochs = summary["epochs"]
    rewards = next(iter(arms.values()))["reward"]
    steps_per_epoch = len(rewards) / epochs
    columns = {"epoch": list(range(1, epochs + 1)), "reward": by_epoch(rewards, epochs)}
    for arm, figures in arms.items():
        step_s = by_epoch(figures["rollout_s"], epochs)
        columns[f"{arm}: rollout s"] = [steps_per_epoch * seconds for seconds in step_s]
        if arm in comparison:
            columns[f"{arm}: of off"] = comparison[arm]["rollout_ratio_by_epoch"]
            columns[f"{arm}: tokens per forward"] = tokens_per_forward(figures, epochs)
    table = Table(*columns)
    for row in zip(*columns.values(), strict=True):
        cells = []
        for value in row:
            cells.append(f"{value:.2f}" if isinstance(value, float) else str(value))
        table.add_row(*cells)
    console.print(table)
    runners = [f"{arm}: {name}" for arm, name in summary["runners"].items()]
    console.print(f"vLLM's model runner: {', '.join(runners)}")
    for arm, compared in comparison.items():
        console.print(f"{arm}: {outcome(compared, epochs, len(rewards))}")
        console.print(f"{arm}: {right_claims(compared['claimed_of_measured'])}")


def outcome(compared: dict[str, Any], epochs: int, steps: int) -> str:
    """Say whether an arm wrote the same tokens as `off`, and how much faster."""
    ratios = compared["rollout_ratio_by_epoch"][-last_third_of(epochs) :]
    same = compared["steps_with_same_tokens"]
    return (
        f"the same tokens in {same} of {steps} steps; rollouts"
        f" {1 / compared['rollout_ratio_last_third']:.1f}x as fast as off over the last"
        f" third ({1 / max(ratios):.1f}x to {1 / min(ratios):.1f}x by epoch)"
    )


def show_next_commands(out: Path, console: Console) -> None:
    """Print what a user may want to run next."""
    program = os.path.relpath(Path(sys.executable).with_name("das-adapter"))
    console.print("Next:", highlight=False)
    for command, what in (
        (f"report {os.path.relpath(out)}", "what was drafted, step by step, as a page"),
        ("config --help", "checks your own veRL or NeMo-RL config"),
    ):
        console.print(
            f"  {program} {command}  # {what}", highlight=False, soft_wrap=True
        )


def by_epoch(values: list[float], epochs: int) -> list[float]:
    """Return the mean of each epoch's steps, which differ in difficulty."""
    steps_per_epoch = len(values) // epochs
    means = []
    for epoch in range(epochs):
        begin = epoch * steps_per_epoch
        means.append(statistics.mean(values[begin : begin + steps_per_epoch]))
    return means


def tokens_per_forward(arm: dict[str, Any], epochs: int) -> list[float]:
    """Return how many tokens a request gets from a forward pass, in each epoch."""
    lengths = arm["response_length_mean"]  # every step has as many responses
    forwards = []
    for length, tokens in zip(lengths, arm["tokens_per_forward"], strict=True):
        forwards.append(length / tokens)
    mean_lengths = by_epoch(lengths, epochs)
    mean_forwards = by_epoch(forwards, epochs)
    return [
        length / num_forwards
        for length, num_forwards in zip(mean_lengths, mean_forwards, strict=True)
    ]


if __name__ == "__main__":
    main()
