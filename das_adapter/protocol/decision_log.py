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

from pydantic import ConfigDict, TypeAdapter

from das_adapter.errors import DasError
from das_adapter.files import parse_or_skip, within
from das_adapter.trouble import log_once, reason

logger = logging.getLogger("das_adapter")

_BEFORE = ".before.jsonl"
"""End of the name of the file with what came before."""
_LINES_TOGETHER = 256
"""Lines that are written together."""
WRITE_S = 5.0
"""Maximum time that an engine waits for a write; a log whose file system does not
answer by then has ended.
"""
MAX_FILE_BYTES = 128 << 20
"""Bytes of a file, at which the next begins: a log takes at most twice that."""


Stats = dict[str, Any]


class StepRecord(NamedTuple):
    """A decode step that was timed."""

    begin: float
    """Seconds since the epoch, like every time here."""
    requests: int
    tokens: int
    """Tokens in the policy's forward pass."""
    drafted: int
    """Draft tokens among them."""
    accepted: int
    """Draft tokens that were accepted."""
    seconds: float
    """Time of the step."""
    predicted: float | None
    """Seconds that the latency model predicted; None before there was one."""
    passes: int = 0
    """Forward passes of the model that drafts, at its end."""
    validating: int = 0
    """Requests of a validation among them."""

    @property
    def is_validation(self) -> bool:
        """Whether all its requests are of a validation."""
        return 0 < self.requests <= self.validating


class RequestRecord(NamedTuple):
    """A request that ended."""

    problem: int
    length_class: int
    tokens: int
    drafted: int
    accepted: int
    begin: float
    end: float
    record: bool = True
    """Whether it belongs to a training rollout; else to a validation."""


class WeightSyncRecord(NamedTuple):
    """A weight sync, which ends a rollout."""

    version: int
    model: dict[str, Any] | None
    """The latency model."""
    saved: float
    """Seconds that speculation saved since the last one."""
    stopped: str | None
    """Why speculation stopped, if it did."""


class CountsRecord(NamedTuple):
    """What an engine counted since the last such record: before a weight sync, and each
    time that it was asked.
    """

    stats: Stats
    """`protocol.metrics.EngineStats`; `propose_seconds` is empty."""


class RunRecord(NamedTuple):
    """What the engine of a log runs: the begin of each file."""

    model: str
    drafter: str
    vllm: str
    das_adapter: str
    """Versions."""


class ResponseRecord(NamedTuple):
    """A response of an engine without a host, as its scheduler has finished it."""

    engine: str
    tokens: int
    hash: int
    """`protocol.metrics.response_hash`."""
    begin: float
    end: float


class WeightUpdateRecord(NamedTuple):
    """The weights of an engine without a host have changed."""

    engine: str
    at: float


Record = (
    StepRecord
    | RequestRecord
    | WeightSyncRecord
    | CountsRecord
    | RunRecord
    | ResponseRecord
    | WeightUpdateRecord
)
_RECORDS: dict[str, type] = {
    "s": StepRecord,
    "r": RequestRecord,
    "v": WeightSyncRecord,
    "c": CountsRecord,
    "b": RunRecord,
    "t": ResponseRecord,
    "u": WeightUpdateRecord,
}
"""By the letter that stands at the begin of a line."""
_LETTERS = {record_type: letter for letter, record_type in _RECORDS.items()}
_ADAPTERS: dict[str, TypeAdapter[Any]] = {
    letter: TypeAdapter(record_type, config=ConfigDict(allow_inf_nan=False))
    for letter, record_type in _RECORDS.items()
}
"""What checks the fields of a record."""


class DecisionLog:
    """Writes one worker's decisions. Lines of the last moments before a crash may be
    missing, and the oldest where a run is long.
    """

    def __init__(self, directory: str, run: RunRecord | None = None) -> None:
        """Begin a log in a directory, with what each of its files begins with. Where
        the directory can't be made the log has ended, with a line in the log of the
        engine, which starts without.
        """
        folder = Path(directory)
        begin = time.strftime("%Y%m%dT%H%M%S")
        # hosts may share the directory
        random = uuid.uuid4()
        log_id = random.hex[:12]
        name = f"decisions-{begin}-{log_id}.jsonl"
        self.path = folder / name
        self._lines: list[str] = []
        self._head = None if run is None else _line(run)
        self._ended = False
        try:
            within(WRITE_S, lambda: folder.mkdir(parents=True, exist_ok=True))
        except (OSError, ValueError) as error:
            self._end(error)

    def add(self, record: Record) -> None:
        """Write a record, if not at once: after counts or a weight sync everything so
        far is on disk.
        """
        line = _line(record)
        self._lines.append(line)
        ends_rollout = isinstance(
            record, WeightSyncRecord | CountsRecord | WeightUpdateRecord
        )
        is_full = len(self._lines) >= _LINES_TOGETHER
        if ends_rollout or is_full:
            self.flush()

    def flush(self) -> None:
        """Write what was kept back. Where the disk is full, or does not answer, the log
        ends, and nothing else does.
        """
        lines = self._lines
        self._lines = []
        if self._ended:
            return
        try:
            within(WRITE_S, lambda: self._write(lines))
        except OSError as error:
            self._end(error)

    def _end(self, error: Exception) -> None:
        """Write no more, and say why."""
        self._ended = True
        logger.error(
            "das: das.log_dir: the decision log %s ends here: %s",
            self.path,
            reason(error),
        )

    def _write(self, lines: list[str]) -> None:
        with self.path.open("a") as file:
            if self._head is not None and not file.tell():
                lines = [self._head, *lines]
            for line in lines:
                file.write(line)
                file.write("\n")
            num_bytes = file.tell()
        if num_bytes >= MAX_FILE_BYTES:
            before = self.path.with_suffix(_BEFORE)
            self.path.replace(before)


def _line(record: Record) -> str:
    """Return the line of a record."""
    fields: list[Any] = [_LETTERS[type(record)]]
    for value in record:
        if isinstance(value, float):
            value = round(value, 6)
        fields.append(value)
    return json.dumps(fields, separators=(",", ":"))


@dataclass
class LoggedRollout:
    """What happened between two weight syncs in one engine."""

    source: str
    """Name of the log."""
    steps: list[StepRecord] = field(default_factory=list)
    requests: list[RequestRecord] = field(default_factory=list)
    counts: list[Stats] = field(default_factory=list)
    """`CountsRecord.stats`."""
    end: WeightSyncRecord | None = None
    """The weight sync that followed; None: the log ends before it."""
    run: RunRecord | None = None
    """What the engine runs; None: the log does not say."""

    @property
    def version(self) -> int:
        """Weight version that followed; -1: the log ends before it."""
        if self.end is None:
            return -1
        return self.end.version


def read(directory: Path) -> list[LoggedRollout]:
    """Read every rollout of the decision logs in a directory or under it, in the order
    of their beginning.

    A file that can't be read, or a line that is no record, is left out, with a line in
    the log.

    Raises:
        DasError: there is no log, or there are those of several runs.
    """
    paths = _files(directory)
    rollouts: list[LoggedRollout] = []
    for log, paths_of_log in itertools.groupby(paths, key=_log_of):
        for rollout in _rollouts(log, paths_of_log):
            if rollout.steps:
                rollouts.append(rollout)
    return sorted(rollouts, key=_begin_of_rollout)


def read_responses(
    directory: Path,
) -> tuple[list[ResponseRecord], list[WeightUpdateRecord]]:
    """Read what engines without a host have logged of their responses, and of the
    updates of their weights.

    Raises:
        DasError: as of `read`.
    """
    found = list[ResponseRecord]()
    updates = list[WeightUpdateRecord]()
    for path in _files(directory):
        for record in _records(path):
            if isinstance(record, ResponseRecord):
                found.append(record)
            elif isinstance(record, WeightUpdateRecord):
                updates.append(record)
    return found, updates


def _files(directory: Path) -> list[Path]:
    """Return the files of a run's logs in a directory or under it, in the order of
    their beginning.

    Raises:
        DasError: there are none, or those of several runs.
    """
    files = []
    for path in directory.rglob("decisions-*.jsonl"):
        if path.is_file():
            files.append(path)
        else:
            log_once(f"report: left out, because it is no file: {path}")
    paths = sorted(files, key=_begin_of)
    if not paths:
        raise DasError(
            f"no decisions-*.jsonl under {directory}: set das.log_dir in the"
            " run's config"
        )
    folders = [str(path.parent) for path in paths]
    runs = list(dict.fromkeys(folders))
    if len(runs) > 1:
        names = ", ".join(runs)
        raise DasError(
            f"found logs of {len(runs)} runs under {directory}, choose one, the"
            f" last is the newest: {names}"
        )
    return paths


def _begin_of_rollout(rollout: LoggedRollout) -> float:
    """Return the time of a rollout's first step."""
    first = rollout.steps[0]
    return first.begin


def _begin_of(path: Path) -> tuple[str, Path]:
    """Return what sorts the files of logs by the time at which their logs began."""
    begin, _, _ = path.name.rpartition("-")
    return begin, path


def _log_of(path: Path) -> str:
    """Return the name of the log that a file belongs to. Of its files, sorted, the one
    with what came before is the first.
    """
    name, _, _ = path.name.partition(".")
    return name


def _rollouts(log: str, files: Iterable[Path]) -> Iterator[LoggedRollout]:
    """Yield the rollouts of a log, the last of which may have no end."""
    current = LoggedRollout(log)
    records = itertools.chain.from_iterable(map(_records, files))
    for record in records:
        if isinstance(record, StepRecord):
            current.steps.append(record)
        elif isinstance(record, RequestRecord):
            current.requests.append(record)
        elif isinstance(record, CountsRecord):
            current.counts.append(record.stats)
        elif isinstance(record, RunRecord):
            current.run = record
        elif isinstance(record, WeightSyncRecord):
            current.end = record
            yield current
            current = LoggedRollout(log, run=current.run)
    yield current


def _records(path: Path) -> Iterator[Record]:
    """Yield the records of a file, without lines that are none."""
    content = parse_or_skip(path, bytes, "report: left out:")
    text = (content or b"").decode(errors="replace")
    # the last line may be cut, or being written
    whole, _, _ = text.rpartition("\n")
    num_odd = 0
    first_odd = ""
    for number, line in enumerate(whole.split("\n"), 1):
        if not line:
            continue
        try:
            yield _record(line)
        except Exception as error:  # what is damaged may raise anything
            num_odd += 1
            first_odd = first_odd or f"line {number}: {reason(error)}: {line:.80}"
    if num_odd:
        log_once(f"report: {path}: left out {num_odd} lines, the first: {first_odd}")


def _record(line: str) -> Record:
    """Return the record of a line; it may raise anything where there is none."""
    letter, *values = json.loads(line)
    adapter = _ADAPTERS[letter]
    record: Record = adapter.validate_python(tuple(values), strict=False)
    return record
