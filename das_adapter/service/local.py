"""The writer of a node's history where there is no Ray cluster: a process that the
engines of the node share and that ends after them.

    python -m das_adapter.service.local DIRECTORY HISTORY_BLOCK GRACE_S

It leaves the process that starts it, so that it is not ended together with an engine's
children, once the history has begun.
"""

from __future__ import annotations

import fcntl
import functools
import logging.handlers
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from das_adapter.config import HistoryConfig
from das_adapter.core.index.store import is_served
from das_adapter.errors import DasError
from das_adapter.files import is_locked, parse_or_skip
from das_adapter.protocol.processes import leave_process
from das_adapter.protocol.spool import ASK, USERS, Answer
from das_adapter.service.writer import Writer

logger = logging.getLogger("das_adapter")

_TICK_S = 0.02
"""How often the writer looks for what has arrived."""
_REST_S = 0.5
"""How often the writer looks for other work, while there is none."""
_MAX_ASK_BYTES = 64
"""Maximum bytes of a request, which is a number."""
_KEPT_LINES = 100
"""Lines of the log that wait for the next engine that asks, at most."""


class LocalHistory:
    """A writer for engines that ask by files. Each counts weight versions of its own
    from 0; those of an engine that comes later follow what is there.
    """

    def __init__(self, directory: Path, config: HistoryConfig, grace_s: float):
        """Begin as `Writer` does; arguments and errors as there."""
        # for the next engine that asks: somebody reads its log
        self._log_lines = logging.handlers.BufferingHandler(_KEPT_LINES)
        self._log_lines.setLevel(logging.WARNING)
        logger.addHandler(self._log_lines)
        self._writer = Writer(config, directory, grace_s)
        self._rests_until = 0.0
        """Time of the monotonic clock until which there is no other work."""
        self._offsets: dict[str, int] = {}
        """Offset from an engine's weight versions to the history's, by engine."""

    def work(self) -> None:
        """Keep what has arrived, and answer the engines that ask."""
        # before the texts: what an engine left before it asked is in the answer
        requests = []
        for path in self._writer.waiting_files(ASK):
            number = parse_or_skip(path, int, "das: history: left out:", _MAX_ASK_BYTES)
            if number is None:
                self._writer.drop(path)
            else:
                requests.append((path, number))
        self._keep_arrivals()
        for path, number in requests:
            self._answer(path, number)
        if time.monotonic() > self._rests_until:
            more = self._writer.work(_TICK_S)
            rest_s = 0.0 if more else _REST_S
            self._rests_until = time.monotonic() + rest_s

    def serve(self, grace_s: float) -> None:
        """Work until there has been no engine for so long; the janitor removes the
        directory then.
        """
        last_used = time.monotonic()
        while time.monotonic() < last_used + grace_s:
            try:
                self.work()
            except Exception as error:  # a full disk, say: engines ask again
                self._writer.report(error)
            if self._is_used():
                last_used = time.monotonic()
            time.sleep(min(_TICK_S, grace_s))

    def _keep_arrivals(self) -> None:
        """Put what engines left into the store, with the history's weight versions."""
        for file, texts in self._writer.read_files():
            engine = file.split("-")[1]
            versions = [text.version for text in texts]
            offset = self._offset_of(engine, max(versions, default=0))
            renumbered = []
            for text in texts:
                version = text.version + offset
                renumbered.append(text._replace(version=version))
            self._writer.keep_texts(file, renumbered)

    def _answer(self, path: Path, number: int) -> None:
        """Publish the history for an engine that asks by a file, and answer it."""
        self._writer.restore()
        self._writer.publish()
        store = self._writer.store
        records = list(self._log_lines.buffer)
        lines = [self._log_lines.format(record) for record in records]
        self._log_lines.flush()
        engine = path.name.partition("-")[2]
        answer = Answer(number, store.generation, lines)
        answer.write_to(store.directory, engine)
        path.unlink(missing_ok=True)

    def _is_used(self) -> bool:
        """Return whether an engine lives. False where files were removed, which the
        next engine that asks will notice.
        """
        return is_locked(self._writer.directory / USERS, fcntl.LOCK_EX)

    def _offset_of(self, engine: str, newest: int) -> int:
        """Return the offset from an engine's weight versions to the history's, where
        `newest` is the engine's newest one.
        """
        offset = self._offsets.get(engine, 0)
        store = self._writer.store
        behind = 0
        if store.tokens:
            behind = store.newest - newest - offset
        # Engines of one run may be one weight version apart; one without requests
        # counts several updates as one.
        if behind > 1:
            offset += behind
        self._offsets[engine] = offset
        return offset


def main(arguments: Sequence[str]) -> None:
    """Leave a process that serves a directory until its engines are gone; none where
    another one serves it. DasError: it did not begin, and says why.
    """
    path, block, grace = arguments
    directory = Path(path)
    config = HistoryConfig.model_validate_json(block)
    grace_s = float(grace)
    if is_served(directory):
        return

    def begin() -> Callable[[], None]:
        history = LocalHistory(directory, config, grace_s)
        return functools.partial(history.serve, grace_s)

    reason = leave_process(begin)
    if reason and not is_served(directory):  # another one was faster
        raise DasError(reason)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (DasError, ValueError) as error:
        text = " ".join(str(error).split())
        sys.exit(text)
