"""The writer of a node's history where there is no Ray cluster: a process that the engines of the node share and that
ends after them.

    python -m das_adapter.service.local DIRECTORY HISTORY_BLOCK GRACE_S

It leaves the process that starts it at once, so that it is not ended together with an engine's children.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import sys
import time
from pathlib import Path

from das_adapter.config import HistoryConfig
from das_adapter.core.length import LengthLog
from das_adapter.errors import DasError
from das_adapter.protocol.messages import responses
from das_adapter.protocol.spool import BATCH, USERS, Answer
from das_adapter.service.writer import Writer

logger = logging.getLogger("das_adapter")

_TICK_S = 0.02
"""How often it looks for what has arrived."""


class Told(logging.Handler):
    """Keeps what is logged here for the next engine that asks: it has a log that somebody reads."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self._lines = [*self._lines[-99:], self.format(record)]

    def take(self) -> list[str]:
        """Return the lines since the last call."""
        lines, self._lines = self._lines, []
        return lines


class LocalHistory:
    """A writer for engines that ask by files. Each counts weight versions of its own from 0; those of an engine that
    comes later follow what is there."""

    def __init__(self, directory: Path, config: HistoryConfig, grace_s: float):
        """Arguments and errors as in `Writer`."""
        self._told = Told()
        logger.addHandler(self._told)
        self._writer = Writer(config, directory.name, str(directory.parent), grace_s)
        self._lengths = LengthLog()
        self._offsets: dict[str, int] = {}
        """By engine: from its weight versions to the history's."""
        self._tidy = False
        """Whether the byte budget is to be applied, when the next text has arrived."""

    def work(self) -> None:
        """Take what has arrived, and answer the engines that ask."""
        asked = list(self._writer.spool.asked())  # what they left before is taken below
        for file, texts in self._writer.read((BATCH,)):
            offset = self._offset(file.split("-")[1], min((text.version for text in texts), default=0))
            fresh = self._writer.keep(file, [text._replace(version=text.version + offset) for text in texts])
            self._lengths.add(responses(fresh))
            self._writer.seal_ahead()
            if self._tidy:
                self._writer.tidy()
                self._tidy = False
        for engine, path, ask in asked:
            self._writer.restore()
            self._writer.publish()
            self._writer.recovered()
            store, lengths = self._writer.store, self._lengths
            answer = Answer(ask.number, store.generation, lengths.count, lengths.since(ask.cursor), self._told.take())
            answer.put(store.directory, engine)
            path.unlink(missing_ok=True)
            self._tidy = True

    def serve(self, grace_s: float) -> None:
        """Work until there has been no engine for so long, then remove the directory."""
        last = time.monotonic()
        while True:
            try:
                self.work()
            except Exception as error:  # a full disk, say: engines ask again
                self._writer.report(error)
            if self._used(over := time.monotonic() - last > grace_s):
                last = time.monotonic()
            elif over:
                return
            time.sleep(min(_TICK_S, grace_s))

    def _used(self, remove: bool) -> bool:
        """Return whether engines live; if none does and `remove`, remove the directory before another comes."""
        try:
            with (self._writer.directory / USERS).open("r+b") as users:
                try:
                    fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    return True
                if remove:
                    shutil.rmtree(self._writer.directory, ignore_errors=True)
                return False
        except FileNotFoundError:  # files were removed, which the next engine that asks will notice
            return False

    def _offset(self, engine: str, version: int) -> int:
        if engine not in self._offsets:  # engines of one run may be one weight version apart
            store = self._writer.store
            behind = store.newest - version if store.tokens else 0
            self._offsets[engine] = behind if behind > 1 else 0
        return self._offsets[engine]


def main(directory: Path, config: HistoryConfig, grace_s: float) -> None:
    """Serve a directory until its engines are gone, then remove it; end at once where another process serves it."""
    try:
        history = LocalHistory(directory, config, grace_s)
    except (DasError, OSError) as error:
        sys.exit(str(error))
    history.serve(grace_s)
    os._exit(0)


if __name__ == "__main__":
    if os.fork() == 0:
        main(Path(sys.argv[1]), HistoryConfig.model_validate_json(sys.argv[2]), float(sys.argv[3]))
