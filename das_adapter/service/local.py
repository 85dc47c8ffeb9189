"""The history of a node without a Ray cluster: a process that the engines of the node share and that ends after them.

    python -m das_adapter.service.local DIRECTORY HISTORY_BLOCK GRACE_S

It listens on a socket in its directory, which no other user can open. Messages are tuples: `("push", source, number,
trajectories)` has no answer; `("sync", source, cursor)` is answered by the `Answer` of `LocalHistory.sync`.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import NamedTuple

from das_adapter.config import HistoryConfig
from das_adapter.core.history import HistoryPolicy
from das_adapter.core.index.store import HistoryStore
from das_adapter.core.length import LengthLog
from das_adapter.errors import DasError
from das_adapter.protocol.messages import Trajectory, responses
from das_adapter.service import janitor

logger = logging.getLogger("das_adapter")


START_S = 60.0
"""How long a new history waits for the engine that started it."""


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


class Answer(NamedTuple):
    """The answer to an engine's weight sync."""

    generation: int
    """To be mapped."""
    published: int
    """The engine's last batch in it."""
    cursor: int
    """To ask with at the next weight sync."""
    lengths: bytes
    """`RESPONSE` rows of the responses of all engines since the cursor that was given."""
    log: list[str]
    """Lines for the engine's log."""


class LocalHistory:
    """The writer of one directory. Engines count weight versions of their own from 0; those of one that comes later
    follow what is there."""

    def __init__(self, directory: Path, config: HistoryConfig):
        self._told = Told()
        logger.addHandler(self._told)
        self._policy = HistoryPolicy(config)
        self._store = HistoryStore(directory)
        self._lengths = LengthLog()
        self._lock = threading.Lock()
        self._offsets: dict[str, int] = {}
        self._last: dict[str, int] = {}
        """The last batch of each source."""
        self._tidied = True

    def push(self, source: str, number: int, trajectories: Sequence[Trajectory]) -> None:
        """Take a batch of finished trajectories; batches are numbered from 1, and one that comes again is known."""
        with self._lock:
            if number <= self._last.get(source, 0):
                return
            self._last[source] = number
            if not trajectories:
                return
            offset = self._offset(source, trajectories[0].version)
            self._policy.take(self._store, trajectories, offset=offset)
            self._lengths.add(responses(Trajectory(t.problem, t.tokens, t.version + offset) for t in trajectories))
            self._store.seal_ahead(self._policy.window)
            if not self._tidied:
                self._tidied = True
                self._policy.tidy(self._store)

    def sync(self, source: str, cursor: int) -> Answer:
        """Publish what has arrived, at a weight sync of an engine."""
        with self._lock:
            generation = self._store.seal(self._policy.window)
            self._tidied = False
            lengths = self._lengths.since(cursor).tobytes()
            return Answer(generation, self._last.get(source, 0), self._lengths.count, lengths, self._told.take())

    def close(self) -> None:
        """Stop writing."""
        self._store.close()

    def _offset(self, source: str, version: int) -> int:
        if source not in self._offsets:  # engines of one run may be one weight version apart
            behind = self._store.newest - version if self._store.tokens else 0
            self._offsets[source] = behind if behind > 1 else 0
        return self._offsets[source]


class Server:
    """Serves engines on a socket."""

    def __init__(self, history: LocalHistory, socket: Path):
        self._history = history
        socket.unlink(missing_ok=True)
        self._listener = Listener(str(socket), family="AF_UNIX", backlog=64)
        self._engines = 0
        self._left = time.monotonic() + START_S
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def wait(self, grace_s: float) -> None:
        """Return once there has been no engine for so long."""
        while self._engines or time.monotonic() - self._left < grace_s:
            time.sleep(min(0.2, grace_s))

    def _accept(self) -> None:
        while True:
            connection = self._listener.accept()
            self._count(1)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        try:
            while True:
                kind, source, *rest = connection.recv()
                if kind == "push":
                    number, trajectories = rest
                    self._history.push(source, number, [Trajectory(*t) for t in trajectories])
                else:
                    connection.send(tuple(self._history.sync(source, *rest)))
        except (EOFError, ConnectionError):
            pass
        except (DasError, OSError):  # a full disk, say: the engine sends again over the next connection
            logger.exception("das: history: a message of an engine failed")
        finally:
            connection.close()
            self._count(-1)

    def _count(self, change: int) -> None:
        with self._lock:
            self._engines += change
            self._left = time.monotonic()


def main(directory: Path, config: HistoryConfig, grace_s: float) -> None:
    """Serve a directory until its engines are gone, then remove it; end at once where another process serves it."""
    janitor.sweep(directory.parent, besides=directory.name)
    try:
        history = LocalHistory(directory, config)
    except DasError as error:
        sys.exit(0 if "another store writes there" in str(error) else str(error))
    (directory / "janitor").touch()  # for `sweep`: engines lock it, and what nobody locks is left over
    server = Server(history, directory / "socket")
    server.wait(grace_s)
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), HistoryConfig.model_validate_json(sys.argv[2]), float(sys.argv[3]))
