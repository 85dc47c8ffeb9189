"""The writer of a node's history where there is no Ray cluster: a process that the
engines of the node share and that ends after them.

    python -m das_adapter.service.local DIRECTORY HISTORY_BLOCK GRACE_S

It leaves the process that starts it at once, so that it is not ended together with an
engine's children.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging.handlers
import os
import sys
import time
from pathlib import Path

from das_adapter.config import HistoryConfig
from das_adapter.errors import DasError
from das_adapter.protocol.spool import ASK, USERS, Answer
from das_adapter.service.writer import Writer

logger = logging.getLogger("das_adapter")

_TICK_S = 0.02
"""How often it looks for what has arrived."""
_REST_S = 0.5
"""How often it looks for other work, while there is none."""


class LocalHistory:
    """A writer for engines that ask by files. Each counts weight versions of its own
    from 0; those of an engine that comes later follow what is there.
    """

    def __init__(self, directory: Path, config: HistoryConfig, grace_s: float):
        """Arguments and errors as in `Writer`."""
        # for the next engine that asks: somebody reads its log
        self._told = logging.handlers.BufferingHandler(100)
        self._told.setLevel(logging.WARNING)
        logger.addHandler(self._told)
        self._writer = Writer(config, directory, grace_s)
        self._rests_until = 0.0
        self._offsets: dict[str, int] = {}
        """By engine: from its weight versions to the history's."""

    def work(self) -> None:
        """Take what has arrived, and answer the engines that ask."""
        # what they left before is taken
        asked = [(path, int(path.read_bytes())) for path in self._writer.waiting(ASK)]
        for file, texts in self._writer.read():
            offset = self._offset(
                file.split("-")[1], max((text.version for text in texts), default=0)
            )
            texts = [text._replace(version=text.version + offset) for text in texts]
            self._writer.keep(file, texts)
        for path, number in asked:
            self._writer.restore()
            self._writer.publish()
            store = self._writer.store
            told = [self._told.format(record) for record in self._told.buffer]
            self._told.flush()
            Answer(number, store.generation, told).put(
                store.directory, path.name.partition("-")[2]
            )
            path.unlink(missing_ok=True)
        if time.monotonic() > self._rests_until:
            more = self._writer.work(_TICK_S)
            self._rests_until = time.monotonic() + (0.0 if more else _REST_S)

    def serve(self, grace_s: float) -> None:
        """Work until there has been no engine for so long; the janitor removes the
        directory then.
        """
        last = time.monotonic()
        while time.monotonic() < last + grace_s:
            try:
                self.work()
            except Exception as error:  # a full disk, say: engines ask again
                self._writer.report(error)
            if self._used():
                last = time.monotonic()
            time.sleep(min(_TICK_S, grace_s))

    def _used(self) -> bool:
        with (
            contextlib.suppress(OSError),
            (self._writer.directory / USERS).open("r+b") as users,
        ):
            try:
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return True
        return (
            False  # or files were removed, which the next engine that asks will notice
        )

    def _offset(self, engine: str, version: int) -> int:
        offset = self._offsets.get(engine, 0)
        store = self._writer.store
        behind = store.newest - version - offset if store.tokens else 0
        # Engines of one run may be one weight version apart; one without requests
        # counts several updates as one.
        self._offsets[engine] = offset + (behind if behind > 1 else 0)
        return self._offsets[engine]


def main(directory: Path, config: HistoryConfig, grace_s: float) -> None:
    """Serve a directory until its engines are gone; end at once where another process
    serves it.
    """
    try:
        history = LocalHistory(directory, config, grace_s)
    except (DasError, OSError) as error:
        sys.exit(str(error))
    history.serve(grace_s)
    os._exit(0)


if __name__ == "__main__":
    if os.fork() == 0:
        main(
            Path(sys.argv[1]),
            HistoryConfig.model_validate_json(sys.argv[2]),
            float(sys.argv[3]),
        )
