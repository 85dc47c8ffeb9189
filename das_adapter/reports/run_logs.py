"""Read a run's figures by training step from what the hosts' loggers leave: lines of
JSON, TensorBoard's event files, or a table that Weights & Biases exports.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from das_adapter.errors import DasError
from das_adapter.files import read_file

_STEP = (
    "step",
    "_step",
    "Step",
    "training/global_step",
    "train/global_step",
    "global_step",
)
"""Names of the column with the training step; the first that a row has."""
_ALLOWED = (
    "allowed: veRL's file logger (.jsonl), lines of {step, prefix, data}, TensorBoard's"
    " event files or a directory with them, a Weights & Biases export (.csv, .json,"
    " .jsonl)"
)


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
    steps: dict[int, dict[str, float]] = {}
    try:
        if places:
            rows = _events(places)
        else:
            rows = _lines(path)
        for row in rows:
            number = _training_step(row)
            if number is not None:
                steps.setdefault(number, {}).update(_figures(row))
    except Exception as error:  # what is damaged may raise anything
        raise DasError(f"{path}: {error}; {_ALLOWED}") from None
    if not any(steps.values()):
        raise DasError(f"{path}: found no figures of training steps; {_ALLOWED}")
    return RunLog(steps, exact=not places)


def _event_places(path: Path) -> list[Path]:
    """Return the file or the directories of TensorBoard's event files; none: the log is
    another.
    """
    if "tfevents" in path.name:
        return [path]
    directories = {file.parent for file in path.rglob("*tfevents*")}
    return sorted(directories)


def _training_step(row: Mapping[str, Any]) -> int | None:
    """Return the training step of a row; None: it has none."""
    for name in _STEP:
        value = row.get(name)
        if value not in (None, ""):
            return int(float(value))
    return None


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


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield a file's rows."""
    text = read_file(path).decode("utf-8")
    if path.suffix == ".csv":
        return csv.DictReader(io.StringIO(text))
    if path.suffix == ".json":
        return iter(json.loads(text))
    lines = text.removesuffix("\n").split("\n")
    return _records(lines)


def _records(lines: Sequence[str]) -> Iterator[Any]:
    """Yield lines of JSON; the last may be cut, where a run was killed or the disk was
    full.
    """
    for number, line in enumerate(lines, 1):
        try:
            yield json.loads(line)
        except ValueError as error:
            if number < len(lines):
                raise ValueError(f"line {number}: {error}") from None


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
    for name, value in row.get("data", row).items():
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
    """Return a value as a number; None: it is text, a histogram, or an empty cell."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    if math.isnan(number):
        return None
    return number
