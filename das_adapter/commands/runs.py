"""Commands about runs and the files that they leave: report, compare, history."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from das_adapter.commands.output import (
    DIRECTORY,
    EXISTING,
    as_json,
    examples,
    print_json,
    print_table,
)


@click.command(
    epilog=examples("das-adapter report runs/das", "das-adapter report runs/das --json")
)
@click.argument("run_dir", type=EXISTING)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Where the page goes; default: RUN_DIR/report.",
)
@as_json
def report(run_dir: Path, out: Path | None, as_json: bool) -> None:
    """Turn the decision logs of a run (das.log_dir) into a page.

    It is RUN_DIR/report/report.html. Its figures are those of training; what
    validations took is said apart. While the run goes on it shows what is logged by
    then. With --json the figures of each training step are printed, and no page is
    written.
    """
    from das_adapter.protocol import decision_log
    from das_adapter.reports import report as page
    from das_adapter.reports import run_series

    logged = decision_log.read(run_dir)
    if as_json:
        print_json(run_series.by_training_step(page.training(logged)))
        return
    name = run_dir.resolve().name
    file = page.write(logged, out or run_dir / "report", name)
    for head, text in page.sentences(logged):
        click.echo(f"{head}: {text}")
    click.echo(str(file))


@click.command(
    epilog=examples(
        "das-adapter compare runs/off.jsonl runs/das.jsonl",
        "das-adapter compare off/checkpoint-600/trainer_state.json"
        " das/checkpoint-600/trainer_state.json",
        "das-adapter compare logs/off logs/das",
    )
)
@click.argument("run_a", type=EXISTING)
@click.argument("run_b", type=EXISTING)
@click.option(
    "--every",
    type=click.IntRange(1),
    help="Training steps of a row; default: as many as give 30 rows.",
)
@as_json
def compare(run_a: Path, run_b: Path, every: int | None, as_json: bool) -> None:
    """Compare two runs: tokens, rewards, rollout time, acceptance length.

    RUN_A and RUN_B: what the trainer's logger wrote: veRL's file logger (.jsonl),
    TensorBoard's event files or a directory with them, TRL's trainer_state.json, or the
    history of a Weights & Biases run (.csv, .json, .jsonl, .parquet); or the directory
    of the decision logs (das.log_dir) of engines without a host, such as TRL's. Exit
    code 1 if tokens differ in a step, 2 after an error, 3 if they can't be compared,
    because a run does not log das/token_hash.
    """
    from das_adapter.reports import compare as runs
    from das_adapter.reports import run_logs

    found = runs.compare(run_logs.read(run_a), run_logs.read(run_b), every)
    if as_json:
        print_json(found)
    else:
        click.echo(f"A: {run_a}\nB: {run_b}")
        print_table(runs.COLUMNS, runs.table(found), left=2)
        click.echo("\n".join(runs.sentences(found)))
    num_same, num_logged = found["tokens"]
    if num_logged == 0:
        sys.exit(3)
    sys.exit(1 if num_same < num_logged else 0)


@click.group(
    epilog=examples("das-adapter history export --out rows checkpoints/global_step_100")
)
def history() -> None:
    """Use the history that a run has saved with its checkpoints."""


@history.command(
    epilog=examples(
        "das-adapter history export --out rows checkpoints/global_step_100",
        "das-adapter history export --out rows --tokens 20000000 step_40/das_history",
    )
)
@click.argument("folder", type=DIRECTORY)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    help="Directory of the rows, which must be new.",
)
@click.option(
    "--visits",
    type=click.IntRange(1),
    help="Weight versions of each prompt, the newest; default: all that are kept.",
)
@click.option(
    "--tokens",
    type=click.IntRange(1),
    help="Tokens of all responses, at most, of the newest visits; default: no limit.",
)
@as_json
def export(
    folder: Path, out: Path, visits: int | None, tokens: int | None, as_json: bool
) -> None:
    """Write a saved history as rows for the training of a drafter.

    FOLDER: a checkpoint of veRL or NeMo-RL, or the directory das_history in it. Each
    row is a prompt and a response to it (input_ids, loss_mask: 1 on the response), as
    `speculators train --data-path` reads them. Responses to prompts that the history
    does not have are left out, and those of which it has no beginning.
    """
    from das_adapter.reports import training_rows

    exported = training_rows.export(folder, out, visits, tokens)
    if as_json:
        print_json(exported._asdict())
        return
    click.echo(
        f"{out}: {exported.rows} rows, {exported.problems} prompts,"
        f" {exported.response_tokens} tokens of responses"
    )
    click.echo(
        f"left out: {exported.problems_without_prompt} prompts that the history does"
        f" not have, {exported.stretches} parts of responses without their beginning"
    )


COMMANDS = (report, compare, history)
