"""Read a run's figures by training step from what the trainers' loggers leave: lines of
JSON, TensorBoard's event files, the `trainer_state.json` of Hugging Face's trainers, or
a table that Weights & Biases exports; or from the decision logs of engines without a
host.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from das_adapter import tables
from das_adapter.errors import DasError
from das_adapter.protocol import decision_log
from das_adapter.protocol.metrics import HASH_VALUES

_STEP = (
    "step",
    "training/global_step",
    "train/global_step",
    "global_step",
    "Step",
    "_step",
)
"""Names of the column with the training step; the first that a file has. Weights &
Biases counts `_step` on with each call, also with those of an evaluation.
"""
_WANTED = (
    "the log of a run: veRL's file logger (.jsonl), lines of {step, prefix, data},"
    " TensorBoard's event files or a directory with them, TRL's trainer_state.json, the"
    " history of a Weights & Biases run (.csv, .json, .jsonl, .parquet), or das.log_dir"
    " of an engine without a host"
)
_HISTORY_OF_WANDB = """the history of one run, which this writes:
    import json, wandb
    with open("run.jsonl", "w") as file:
        for row in wandb.Api().run("ENTITY/PROJECT/RUN_ID").scan_history():
            print(json.dumps(row, default=str), file=file)"""
_HISTORY_OF_TRAINER = "log_history"
"""Key of a `trainer_state.json`, under which its rows are."""
_LOGS = (".jsonl", ".json", ".csv", ".parquet")
"""Names of files that may be logs end so."""
_TEXTS = ("output", "response", "completion")
"""Columns of recorded rollouts."""
_COLUMNS_OF_RUNS = {"Name", "State"}
"""Columns of the table of a project's runs, with the last figures of each."""


class RunLog(NamedTuple):
    """A run's figures."""

    steps: dict[int, dict[str, float]]
    """Figures by training step, under the names that the trainer logs, without `train/`
    before them.
    """
    exact: bool
    """Whether figures are logged with all bits; TensorBoard logs 24."""


def read(path: Path) -> RunLog:
    """Read a log. Where a step comes again, as after a resumption, what came last
    counts.

    Raises:
        DasError: there are no figures in it.
    """
    places = _event_places(path)
    if not places and next(path.rglob("decisions-*.jsonl"), None) is not None:
        return RunLog(_of_responses(path), exact=True)
    if places:
        rows: Iterable[Mapping[str, Any]] = _events(places)
        name = "step"
    else:
        rows = _rows(path)
        name = _name_of_step(rows)
    steps: dict[int, dict[str, float]] = {}
    try:
        for row in rows:
            number = _number(row.get(name))
            if number is not None:
                steps.setdefault(int(number), {}).update(_figures(row))
    except Exception as error:  # what is damaged may raise anything
        raise DasError(f"{path}: {error}; expected {_WANTED}") from None
    if not any(steps.values()):
        raise DasError(
            f"{path}: found no figures of training steps; expected {_WANTED}"
        )
    return RunLog(steps, exact=not places)


def _of_responses(directory: Path) -> dict[int, dict[str, float]]:
    """Return the figures of engines without a host, by the number of weight updates
    before a response ended.

    Raises:
        DasError: the logs are those of engines that a host looks after.
    """
    responses, updates = decision_log.read_responses(directory)
    if not responses:
        raise DasError(
            f"{directory}: found decision logs without responses, as of engines that"
            f" veRL or NeMo-RL looks after; expected {_WANTED}"
        )
    updated = defaultdict[str, list[float]](list)
    for update in updates:
        updated[update.engine].append(update.at)
    by_step = defaultdict[int, list[decision_log.ResponseRecord]](list)
    for response in responses:
        step = sum(at <= response.end for at in updated[response.engine])
        by_step[step].append(response)
    found = {step: _figures_of(by_step[step]) for step in sorted(by_step)}
    for step, claim in _claims(directory, updated.values()).items():
        if step in found:
            rollout_s = found[step]["das/rollout_s"]
            found[step]["das/of_stock"] = claim.of_rollout(rollout_s)
    return found


class _Claim(NamedTuple):
    """What an engine said of a rollout."""

    of_stock: float
    """Time of its decode steps relative to stock's."""
    saved_s: float
    """Seconds that drafts saved."""

    def of_rollout(self, rollout_s: float) -> float:
        """Return the time of the rollout relative to stock's, prompts and the host's
        share included: it would have ended later by what drafts saved, which is no
        larger share of it than of the decode steps.
        """
        bound_s = rollout_s * (1.0 / self.of_stock - 1.0)
        least_s = min(0.0, bound_s)
        most_s = max(0.0, bound_s)
        saved_s = min(most_s, max(least_s, self.saved_s))
        return rollout_s / (rollout_s + saved_s)


def _claims(directory: Path, updated: Collection[list[float]]) -> dict[int, _Claim]:
    """Return what engines said of their rollouts, that of the highest ratio by the
    number of weight updates before; `updated`: their times, of each engine.
    """
    found: dict[int, _Claim] = {}
    for rollout in decision_log.read(directory):
        if not rollout.counts:
            continue
        of_stock = rollout.counts[-1].get("of_stock")
        if not of_stock:
            continue
        begin = rollout.steps[0].begin
        counts = [sum(at <= begin for at in times) for times in updated]
        step = max(counts, default=0)
        saved = [counted.get("time_saved_s", 0.0) for counted in rollout.counts]
        claim = _Claim(of_stock, sum(saved))
        found[step] = max(claim, found.get(step, claim))
    return found


def _figures_of(responses: Sequence[decision_log.ResponseRecord]) -> dict[str, float]:
    """Return the figures of the responses of one step, under das-adapter's names."""
    begin = min(response.begin for response in responses)
    end = max(response.end for response in responses)
    total = sum(response.hash for response in responses)
    return {
        "das/token_hash": float(total % HASH_VALUES),
        "das/rollout_s": end - begin,
    }


def _event_places(path: Path) -> list[Path]:
    """Return the file or the directories of TensorBoard's event files; none: the log is
    another.
    """
    if "tfevents" in path.name:
        return [path]
    directories = {file.parent for file in path.rglob("*tfevents*")}
    return sorted(directories)


def _name_of_step(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the name of the column with the training step; empty: there is none."""
    columns = set[str]()
    for row in rows:
        columns.update(row)
    return next((name for name in _STEP if name in columns), "")


def _events(places: Iterable[Path]) -> Iterator[Mapping[str, Any]]:
    """Yield the scalars of a run's directories, each in a row of its own."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logged: dict[tuple[str, int], Path] = {}
    for place in places:
        accumulator = EventAccumulator(str(place), size_guidance={"scalars": 0})
        log = accumulator.Reload()
        for name in log.Tags()["scalars"]:
            for event in log.Scalars(name):
                other = logged.setdefault((name, event.step), place)
                if other != place:
                    raise ValueError(
                        f"found {name!r} of step {event.step} in both {other} and"
                        f" {place}, expected one run: name its directory"
                    )
                yield {"step": event.step, name: event.value}


def _rows(path: Path) -> list[Mapping[str, Any]]:
    """Return a file's rows."""
    if path.is_dir():
        raise DasError(f"{path}: found {_in_directory(path)}; expected {_WANTED}")
    table = tables.read(path, _WANTED)
    first = table.rows[0]
    if table.format == tables.JSON and len(table.rows) == 1:
        history = first.get(_HISTORY_OF_TRAINER)
        if isinstance(history, list):
            return [row for row in history if isinstance(row, Mapping)]
        if "_wandb" in first:
            raise DasError(
                f"{path}: found the summary of a Weights & Biases run, its last figures"
                f" alone; expected {_HISTORY_OF_WANDB}"
            )
    if first.keys() >= _COLUMNS_OF_RUNS:
        raise DasError(
            f"{path}: found the table of a Weights & Biases project's runs, with the"
            f" last figures of each; expected {_HISTORY_OF_WANDB}"
        )
    if any(isinstance(first.get(name), str) for name in _TEXTS):
        raise DasError(
            f"{path}: found responses, which `das-adapter estimate` reads; expected"
            f" {_WANTED}"
        )
    return list(table.rows)


def _in_directory(path: Path) -> str:
    """Say what there is in a directory without event files."""
    names = [file.name for file in tables.named(path, _LOGS)]
    if names:
        return f"a directory with {', '.join(names[:5])}: name one of these"
    places = [str(place) for place in tables.below(path, _LOGS)]
    if places:
        return f"a directory with files in {', '.join(places[:3])}: name one of these"
    return "a directory without a log"


def _figures(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a row.

    They are those under `data`, where veRL's file logger put them, with the `prefix` of
    NeMo-RL's; else those of its columns, without what Weights & Biases adds to their
    names: the run, where the columns are of one alone.
    """
    if row.get("prefix"):
        prefix = f"{row['prefix']}/"
    else:
        prefix = ""
    found: dict[str, float] = {}
    runs: dict[str, str] = {}
    logged = row.get("data")
    if not isinstance(logged, Mapping):
        logged = row
    for name, value in logged.items():
        run, _, figure = f"{prefix}{name}".rpartition(" - ")
        if run:
            other = runs.setdefault(figure, run)
            if other != run:
                raise ValueError(
                    f"found {figure!r} of the runs {other!r} and {run!r}, expected one"
                    " run: export each into a file of its own"
                )
        number = _number(value)
        if number is None or name in _STEP:
            continue
        if not str(name).endswith(("__MIN", "__MAX")):
            found[figure.removeprefix("train/")] = number
    return found


def _number(value: Any) -> float | None:
    """Return a value as a number; None: it is text, a histogram, an empty cell, or not
    finite.
    """
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
