"""The decision log: what the controller decided in every step and how each request
went, as lines of JSON.

One file per engine and run, and another with what came before once it is full. A line
is a list: the kind of record, then its fields in the order in which they stand here.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from das_adapter.errors import DasError

logger = logging.getLogger("das_adapter")

_BEFORE = ".before.jsonl"
_LINES = 256
"""Lines that are written together."""
MOST = 128 << 20
"""Bytes of a file, at which the next begins: a log takes at most twice that."""


class Step(NamedTuple):
    """A decode step that was timed."""

    begin: float
    """Seconds since the epoch, like every time here."""
    requests: int
    tokens: int
    """In the policy's forward pass."""
    drafted: int
    """Draft tokens among them."""
    accepted: int
    seconds: float
    predicted: float | None
    """By the latency model; None before there was one."""
    passes: int = 0
    """Forward passes of the model that drafts, at its end."""


class Request(NamedTuple):
    """A request that ended."""

    problem: int
    length_class: int
    tokens: int
    drafted: int
    accepted: int
    begin: float
    end: float


class WeightSync(NamedTuple):
    """A weight sync, which ends a rollout."""

    version: int
    model: dict[str, Any] | None
    """The latency model."""
    saved: float
    """Seconds that speculation saved since the last one."""
    stopped: str | None
    """Why speculation stopped, if it did."""


class Counts(NamedTuple):
    """What an engine counted since the last such record: before a weight sync, and each
    time that it was asked.
    """

    stats: dict[str, Any]
    """`protocol.metrics.EngineStats`; `propose_seconds` is empty."""


Record = Step | Request | WeightSync | Counts
_KINDS: dict[str, type] = {"s": Step, "r": Request, "v": WeightSync, "c": Counts}


class DecisionLog:
    """Writes one worker's decisions. Lines of the last moments before a crash may be
    missing, and the oldest where a run is long.
    """

    def __init__(self, directory: str):
        """Raises OSError where the directory can't be made."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        name = (  # hosts may share the directory
            f"decisions-{time.strftime('%Y%m%dT%H%M%S')}-{uuid.uuid4().hex[:12]}"
        )
        self.path = Path(directory) / f"{name}.jsonl"
        self._lines: list[str] = []
        self._ended = False

    def add(self, record: Record) -> None:
        """Write a record, if not at once: after counts or a weight sync everything so
        far is on disk.
        """
        kind = next(
            kind
            for kind, record_type in _KINDS.items()
            if isinstance(record, record_type)
        )
        values = [
            round(value, 6) if isinstance(value, float) else value for value in record
        ]
        self._lines.append(json.dumps([kind, *values], separators=(",", ":")))
        if len(self._lines) >= _LINES or isinstance(record, WeightSync | Counts):
            self.flush()

    def flush(self) -> None:
        """Write what was kept back. Where the disk is full the log ends, and nothing
        else does.
        """
        if not self._ended:
            try:
                with self.path.open("a") as file:
                    file.writelines(line + "\n" for line in self._lines)
                    full = file.tell() >= MOST
                if full:
                    self.path.replace(self.path.with_suffix(_BEFORE))
            except OSError as error:
                self._ended = True
                logger.error("das: the decision log %s ends here: %r", self.path, error)
        self._lines = []


@dataclass
class Rollout:
    """What happened between two weight syncs in one engine."""

    source: str
    """Name of the log."""
    steps: list[Step] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    counts: list[dict[str, Any]] = field(default_factory=list)
    """`Counts.stats`."""
    end: WeightSync | None = None
    """The weight sync that followed; None: the log ends before it."""

    @property
    def version(self) -> int:
        """Weight version that followed; -1: the log ends before it."""
        return -1 if self.end is None else self.end.version


def read(directory: Path) -> list[Rollout]:
    """Read every rollout of the decision logs in a directory or under it, in the order
    of their beginning.

    Raises:
        DasError: there is no log, there are those of several runs, or a line is no
            record.
    """
    found = directory.rglob("decisions-*.jsonl")
    # by time
    paths = sorted(found, key=lambda path: (path.name.rpartition("-")[0], path))
    if not paths:
        raise DasError(
            f"report: no decisions-*.jsonl under {directory}: set das.log_dir in the"
            " run's config"
        )
    runs = list(dict.fromkeys(str(path.parent) for path in paths))
    if len(runs) > 1:
        raise DasError(
            f"report: found logs of {len(runs)} runs under {directory}, choose one, the"
            f" last is the newest: {', '.join(runs)}"
        )
    # what came before is the first
    logs = itertools.groupby(paths, key=lambda path: path.name.partition(".")[0])
    rollouts = [rollout for name, files in logs for rollout in _rollouts(name, files)]
    return sorted((r for r in rollouts if r.steps), key=lambda r: r.steps[0].begin)


def _rollouts(name: str, files: Iterable[Path]) -> Iterator[Rollout]:
    current = Rollout(name)
    for record in itertools.chain.from_iterable(map(_records, files)):
        if isinstance(record, Step):
            current.steps.append(record)
        elif isinstance(record, Request):
            current.requests.append(record)
        elif isinstance(record, Counts):
            current.counts.append(record.stats)
        else:
            current.end = record
            yield current
            current = Rollout(name)
    yield current


def _records(path: Path) -> Iterator[Record]:
    # the last line may be cut, or being written
    whole = path.read_text(errors="replace").rpartition("\n")[0]
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            kind, *values = json.loads(line)
            yield _KINDS[kind](*values)
        except (KeyError, TypeError, ValueError) as error:
            raise DasError(
                f"report: {path}, line {number}: found {line:.80}, no record: {error!r}"
            ) from None
