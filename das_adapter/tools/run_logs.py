"""Read a run's figures by training step from what the hosts' loggers leave: lines of
JSON, TensorBoard's event files, or a table that Weights & Biases exports.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from das_adapter.errors import DasError

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
    """By training step, under the names that the trainer logs, without `train/` before
    them.
    """
    exact: bool
    """Whether they are logged as they are; else, by TensorBoard, with 24 bits."""


def read(path: Path) -> RunLog:
    """Read a log. Where a step comes again, as after a resumption, what came last
    counts.

    Raises:
        DasError: there are no figures in it.
    """
    events = (
        [path]
        if "tfevents" in path.name
        else sorted({file.parent for file in path.rglob("*tfevents*")})
    )
    steps: dict[int, dict[str, float]] = {}
    try:
        for row in _events(events) if events else _lines(path):
            step = next(
                (row[name] for name in _STEP if row.get(name) not in (None, "")), None
            )
            if step is not None:
                steps.setdefault(int(float(step)), {}).update(_figures(row))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise DasError(f"{path}: {error}; {_ALLOWED}") from None
    if not any(steps.values()):
        raise DasError(f"{path}: found no figures of training steps; {_ALLOWED}")
    return RunLog(steps, not events)


def _events(places: Iterable[Path]) -> Iterator[Mapping[str, Any]]:
    """Yield the scalars of a run's directories, each in a row of its own."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logged: dict[tuple[str, int], Path] = {}
    for place in places:
        found = EventAccumulator(str(place), size_guidance={"scalars": 0}).Reload()
        for name in found.Tags()["scalars"]:
            for event in found.Scalars(name):
                if (other := logged.setdefault((name, event.step), place)) != place:
                    twice = (
                        f"found {name!r} of step {event.step} in both {other} and"
                        f" {place}"
                    )
                    raise ValueError(f"{twice}, expected one run: name its directory")
                yield {"step": event.step, name: event.value}


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield a file's rows."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".csv":
        return csv.DictReader(io.StringIO(text))
    return (
        iter(json.loads(text))
        if path.suffix == ".json"
        else _records(text.removesuffix("\n").split("\n"))
    )


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
    """Return the numbers of a row: those under `data`, where veRL's file logger put
    them, with the `prefix` of NeMo-RL's; else those of its columns, without what
    Weights & Biases adds to their names: the run, where the columns are of one
    alone.
    """
    prefix = f"{row['prefix']}/" if row.get("prefix") else ""
    found: dict[str, float] = {}
    runs: dict[str, str] = {}
    for name, value in row.get("data", row).items():
        run, _, figure = f"{prefix}{name}".rpartition(" - ")
        if run and (other := runs.setdefault(figure, run)) != run:
            runs_found = f"found {figure!r} of the runs {other!r} and {run!r}"
            raise ValueError(
                f"{runs_found}, expected one run: export each into a file of its own"
            )
        # text, a histogram or an empty cell
        with contextlib.suppress(TypeError, ValueError):
            if (
                not str(name).endswith(("__MIN", "__MAX"))
                and name not in _STEP
                and not math.isnan(float(value))
            ):
                found[figure.removeprefix("train/")] = float(value)
    return found
