"""Commands about runs and what they leave: report, compare, status, history."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Any

import click

from das_adapter.commands.output import DIRECTORY, EXISTING, as_json, print_json, print_table


@click.command()
@click.argument("run_dir", type=DIRECTORY)
@click.option("--out", type=click.Path(path_type=Path), help="Where the page goes; default: RUN_DIR/report.")
@click.option("--version", type=int, help="Show the rollout before this weight version over time; default: the last.")
@click.option("--follow", is_flag=True, help="Write the page again whenever the logs have grown, until Ctrl-C.")
@as_json
def report(run_dir: Path, out: Path | None, version: int | None, follow: bool, as_json: bool) -> None:
    """Turn the decision logs of a run (das.log_dir) into a page.

    It is RUN_DIR/report/report.html, with the figures beside it. With --follow browsers load it again while the run
    goes on.
    """
    from das_adapter.tools import report as page
    from das_adapter.tools.advice import sentences

    if follow:
        click.echo(f"Following {run_dir}; Ctrl-C ends it.", err=True)
    with contextlib.suppress(KeyboardInterrupt):
        for rollouts in page.readings(run_dir, follow):
            written = page.write(rollouts, out or run_dir / "report", version, follow)
            if as_json:
                print_json(page.summary(rollouts))
            else:
                said = (f"{sentence.head}: {sentence.text}" for sentence in sentences(rollouts))
                click.echo("\n".join((*said, *map(str, written))))


@click.command()
@click.argument("run_a", type=EXISTING)
@click.argument("run_b", type=EXISTING)
@click.option("--every", type=click.IntRange(1), help="Training steps of a row; default: as many as give 30 rows.")
@click.option("--picture", type=click.Path(dir_okay=False, path_type=Path), help="Draw both runs: .png, .svg or .pdf.")
@as_json
def compare(run_a: Path, run_b: Path, every: int | None, picture: Path | None, as_json: bool) -> None:
    """Compare two runs: tokens, rewards, rollout time, acceptance.

    RUN_A and RUN_B: what the trainer's logger wrote: veRL's file logger (.jsonl), TensorBoard's event files or a
    directory with them, or a Weights & Biases export (.csv, .json, .jsonl). Exit code 1 if tokens differ in a step, 3
    if they can't be compared, because a run does not log das/token_hash.
    """
    from das_adapter.tools import compare as runs
    from das_adapter.tools import run_logs

    found = runs.compare(run_logs.read(run_a), run_logs.read(run_b), every)
    if picture:
        runs.picture(found, picture)
    if as_json:
        print_json(found)
    else:
        click.echo(f"A: {run_a}\nB: {run_b}")
        print_table(runs.COLUMNS, runs.table(found), left=2)
        click.echo("\n".join(runs.sentences(found)))
    same, logged = found["tokens"]
    sys.exit(3 if not logged else int(same < logged))


@click.command()
@click.argument("log_dir", type=DIRECTORY, required=False)
@as_json
def status(log_dir: Path | None, as_json: bool) -> None:
    """Say what of das-adapter's runs on this node.

    That is: its histories, and who writes and uses them; with LOG_DIR (das.log_dir) also how far that run is.
    """
    from das_adapter.tools import histories

    found = list(histories.here())
    run = _run(log_dir) if log_dir else None
    if as_json:
        print_json({"histories": found, "run": run})
        return
    for one in found:
        _print_history(one)
    if not found:
        click.echo("No history of yours lies on this node: no run of das-adapter's keeps one here.")
    if run:
        click.echo(f"Run: training step {run['step']}; its log was written {run['age_s']:.0f} s ago.")
        click.echo("\n".join(run["sentences"]))


def _run(log_dir: Path) -> dict[str, Any]:
    """Say how far a run is, by its decision logs: its last training step (0: none has ended), and in sentences."""
    from das_adapter.protocol import decision_log
    from das_adapter.tools.advice import sentences

    rollouts = decision_log.read(log_dir)
    last = max(path.stat().st_mtime for path in log_dir.rglob("decisions-*.jsonl"))
    return {
        "step": max((rollout.version for rollout in rollouts if rollout.end), default=0),
        "age_s": time.time() - last,
        "sentences": [f"{sentence.head}: {sentence.text}" for sentence in sentences(rollouts)],
    }


def _print_history(found: dict[str, Any]) -> None:
    def shown(value: Any) -> str:
        return f"{value:,}" if isinstance(value, int) else ", ".join(map(str, value)) or "none"

    rows = (
        (name, value if isinstance(value, str) else shown(value)) for name, value in found.items() if value is not None
    )
    print_table(("history", ""), rows, left=2, overflow="fold")


@click.group()
def history() -> None:
    """Look at histories, and remove what dead runs have left."""


@history.command()
@click.argument("directory", type=DIRECTORY)
@as_json
def inspect(directory: Path, as_json: bool) -> None:
    """Describe the history in DIRECTORY: a node's (/dev/shm/das-history-*), or a checkpoint's (das_history)."""
    from das_adapter.tools import histories

    found = histories.inspect(directory)
    if as_json:
        print_json(found)
    else:
        _print_history(found)


@history.command()
@as_json
def clean(as_json: bool) -> None:
    """Remove what dead runs of yours have left in shared memory; what a process writes or uses stays."""
    from das_adapter.tools import histories

    removed = histories.clean()
    if as_json:
        print_json({"removed": removed})
    else:
        click.echo("\n".join(f"removed {path}" for path in removed) or "Nothing to remove.")


COMMANDS = (report, compare, status, history)
