"""An engine's link to the history of its node where there is no Ray cluster: a process of its own
(`das_adapter.service.local`), which the engines of the node start and share."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import IO

import numpy as np

from das_adapter.config import HistoryConfig
from das_adapter.core.length import RESPONSE, Responses
from das_adapter.protocol.messages import Published, Trajectory

logger = logging.getLogger("das_adapter")

PATIENCE_S = 30.0
"""How long a weight sync may wait for the history; after that the engine drafts from what it has."""
GRACE_S = 20.0
"""How long the history outlives its last engine, so that one that is started again finds it."""
MOST_WAITING = 2**28
"""Bytes of trajectories that wait for a history which does not answer; older ones are given up."""
TRIES = 5
"""How often a connection that ends is opened again: a killed process may still be answering."""
SOCKET = "socket"
"""File in the history's directory on which its process listens."""
_SHARED_MEMORY = Path("/dev/shm")


class HistoryLink:
    """Sends trajectories from a thread of its own, so that a step never waits for them. No method raises."""

    def __init__(self, name: str, config: HistoryConfig, grace_s: float = GRACE_S):
        """
        Args:
            name: of the history's directory; engines of the node with the same name share it.
            config: the `history:` block.
            grace_s: see `GRACE_S`.
        """
        self._config, self._grace_s = config, grace_s
        self._directory = _root(name, config.max_bytes) / name
        self._source = uuid.uuid4().hex
        self._waiting: list[tuple[int, Sequence[Trajectory]]] = []
        """Batches that are not known to be published."""
        self._sent = self._number = self._cursor = 0
        self._connection: Connection | None = None
        self._in_use: IO[bytes] | None = None
        """Locked while this engine lives, so that nobody sweeps the directory away whose process was killed."""
        self._trouble = ""
        self._tasks: queue.SimpleQueue[queue.SimpleQueue[_Answer] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._tasks.put(None)  # connect now
        threading.Thread(target=self._work, name="das-history", daemon=True).start()

    def push(self, trajectories: Sequence[Trajectory]) -> None:
        """Send finished trajectories."""
        with self._lock:
            self._number += 1
            self._waiting.append((self._number, trajectories))
        self._tasks.put(None)

    def sync(self) -> tuple[Published | None, Responses]:
        """Have everything published that was pushed; return what to map (None: what is mapped stays), and the lengths
        of the responses of all engines since the last call."""
        answer: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        self._tasks.put(answer)
        try:
            return answer.get(timeout=PATIENCE_S)
        except queue.Empty:
            logger.error("das: history: no answer within %s s; drafts come from what is mapped", PATIENCE_S)
            return _NOTHING

    def _work(self) -> None:
        while True:
            answer_to = self._tasks.get()
            answer = self._try(answer_to is not None)
            if answer_to is not None:
                answer_to.put(answer)

    def _try(self, sync: bool) -> _Answer:
        """Send what waits, and sync if that is asked for; over a new connection where one has ended."""
        for attempt in range(1, TRIES + 1):
            try:
                connection = self._connect()
                self._send(connection)
                answer = self._sync(connection) if sync else _NOTHING
                self._trouble = ""
                return answer
            except (OSError, EOFError, subprocess.SubprocessError) as error:
                self._connection = None
                if attempt < TRIES:
                    time.sleep(0.02 * attempt)
                elif repr(error) != self._trouble:
                    self._trouble = repr(error)
                    logger.error("das: history: %r; engines go on with what is mapped", error)
        self._forget()
        return _NOTHING

    def _connect(self) -> Connection:
        """Return the connection to the history's process, started if need be."""
        if self._connection is not None and self._connection.poll():  # it says nothing unasked: it has ended
            self._connection = None
        process, deadline = None, time.monotonic() + PATIENCE_S / 2
        while self._connection is None:
            try:
                connection = Client(str(self._directory / SOCKET), family="AF_UNIX")
                self._in_use = (self._directory / "janitor").open("rb")
                fcntl.flock(self._in_use, fcntl.LOCK_SH)
                self._connection, self._sent = connection, 0
            except (FileNotFoundError, ConnectionRefusedError):
                if time.monotonic() > deadline:
                    raise
                if process is None:
                    process = self._start()
                elif process.poll():
                    raise OSError(f"the history's process ended with exit code {process.returncode}") from None
                time.sleep(0.02)
        return self._connection

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the history's process; where another engine's writes there, it ends at once."""
        command = [sys.executable, "-m", "das_adapter.service.local", str(self._directory)]
        # It outlives this process, and must not keep its output open.
        nowhere = subprocess.DEVNULL
        return subprocess.Popen(
            [*command, self._config.model_dump_json(), str(self._grace_s)],
            stdin=nowhere,
            stdout=nowhere,
            stderr=nowhere,
            start_new_session=True,
        )

    def _send(self, connection: Connection) -> None:
        with self._lock:
            unsent = [batch for batch in self._waiting if batch[0] > self._sent]
        for number, trajectories in unsent:
            connection.send(("push", self._source, number, [tuple(t) for t in trajectories]))
            self._sent = number

    def _sync(self, connection: Connection) -> _Answer:
        connection.send(("sync", self._source, self._cursor))
        if not connection.poll(PATIENCE_S):
            raise TimeoutError(f"no answer within {PATIENCE_S} s")
        generation, published, self._cursor, lengths, log = connection.recv()
        for line in log:
            logger.warning("%s", line)
        with self._lock:
            self._waiting = [batch for batch in self._waiting if batch[0] > published]
        return Published(str(self._directory), generation), np.frombuffer(lengths, RESPONSE)

    def _forget(self) -> None:
        """Give up the oldest batches where too much waits."""
        with self._lock:
            size = sum(len(t.tokens) for _, batch in self._waiting for t in batch)
            while size > MOST_WAITING:
                _, batch = self._waiting.pop(0)
                size -= sum(len(t.tokens) for t in batch)


_Answer = tuple[Published | None, Responses]
_NOTHING: _Answer = (None, np.zeros(0, RESPONSE))


def _root(name: str, size: int) -> Path:
    """Return shared memory, or a temporary directory if it has no room for `size` bytes, nor the directory yet."""
    if (_SHARED_MEMORY / name).is_dir():
        return _SHARED_MEMORY
    with contextlib.suppress(OSError):
        if shutil.disk_usage(_SHARED_MEMORY).free >= size:
            return _SHARED_MEMORY
    logger.warning(
        "das: history: %s has no room for das.history.max_bytes=%s; the history lies in %s",
        _SHARED_MEMORY,
        size,
        tempfile.gettempdir(),
    )
    return Path(tempfile.gettempdir())
