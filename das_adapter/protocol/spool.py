"""How engines and the writer of a node's history exchange files, in the history's
directory:

    writer, users, janitor   locks: of the writer, of engines without a host, of the
        process that removes the directory
    manifest-*, segments-*   what the writer has published, see `core.index.store`
    spool/                   batch-*: trajectories of an engine here; texts-*: from
    another node;
                             away-HISTORY-*: on their way to another node;
                             ask-ENGINE, answer-ENGINE: a request for a generation and
                             its answer, where there is no Ray

Any thread and any process of this user may leave files, each whole or not at all, for
this user alone; one thread of the writer takes them at a time. Nothing in them is
unpickled.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from das_adapter.core.index.private import check_owner, is_private
from das_adapter.protocol.messages import Trajectory, pack

logger = logging.getLogger("das_adapter")

SHARED_MEMORY = Path("/dev/shm")
FOLDER = "spool"
USERS = "users"
"""File that engines without a host lock, shared, as long as they live."""
BATCH = "batch"
TEXTS = "texts"
AWAY = "away"
ASK = "ask"
ANSWER = "answer"
GRACE_S = 20.0
"""How long a directory outlives its writer, or its last engine, so that one that is
started again finds it.
"""
GATHER_S = 0.5
"""How long trajectories are gathered before they are left together."""
SPARE = 1 << 30
"""Maximum bytes of the file system that the history leaves free."""
KEPT = 64 << 20
"""Maximum bytes of text that an engine keeps while it can't leave them in the spool."""


def places() -> tuple[Path, Path]:
    """Return where a history's directory may lie: in shared memory, or with temporary
    files, if there is no room.
    """
    return SHARED_MEMORY, Path(tempfile.gettempdir())


def directory_for(name: str, size: int, beside: int = 0) -> Path:
    """Return the directory of a history: the one that is there, else a new one, in the
    second of the `places` if the first has no room for `size` bytes; `beside` as in
    `room`.
    """
    for root in places():
        if is_private(root / name):
            return root / name
    with contextlib.suppress(OSError):  # there is none
        if room(SHARED_MEMORY, beside) >= size:
            return SHARED_MEMORY / name
    logger.warning(
        "das: history: %s has no room for das.history.max_bytes=%s beside Ray's object"
        " store of %s bytes; the history lies in %s",
        *(SHARED_MEMORY, size, beside, root),
    )
    return root / name


def room(directory: Path, beside: int, held: int = 0) -> int:
    """Return how many bytes a history's files may take, which take `held` now.
    `beside`: the size of Ray's object store, which takes memory when it needs it; it
    lies in shared memory, or with temporary files if that is smaller. OSError: the
    directory is gone.
    """
    disk = shutil.disk_usage(directory)
    if beside:
        store = places()[shutil.disk_usage(SHARED_MEMORY).total < beside]
        beside *= store.stat().st_dev == directory.stat().st_dev
    return min(disk.free + held, disk.total - beside) - min(SPARE, disk.total // 8)


def size_of(directory: Path) -> int:
    """Return how many bytes the files of a history's directory take."""
    found = 0
    for path in (*directory.glob("*"), *directory.glob(f"{FOLDER}/*")):
        with contextlib.suppress(OSError):  # it was removed
            found += path.lstat().st_blocks * 512
    return found


def write(path: Path, content: bytes) -> None:
    """Write a file for this user alone, without following a link."""
    with open(
        path,
        "wb",
        opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o600),
    ) as file:
        file.write(content)


def put(directory: str | os.PathLike[str], name: str, content: bytes) -> None:
    """Leave a file in a spool, all of it or nothing; one of the same name is replaced.
    OSError: the directory is gone, or has no room; IndexFileError: it is a link or
    another user's.
    """
    folder = Path(directory) / FOLDER
    check_owner(folder)
    # another thread may leave the same file, sent again
    new = folder / f"{name}.{uuid.uuid4().hex}.tmp"
    try:
        write(new, content)
        new.rename(folder / name)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def put_batch(
    directory: str | os.PathLike[str], engine: str, trajectories: Sequence[Trajectory]
) -> None:
    """Leave what an engine wrote; `put` says what is raised. Files are taken in the
    order of their names.
    """
    put(
        directory,
        f"{BATCH}-{engine}-{time.time_ns():020d}-{uuid.uuid4().hex[:8]}",
        pack(trajectories),
    )


class Answer(NamedTuple):
    """The writer's answer to an engine that asks for a generation with all that it has
    left.
    """

    number: int
    """Of the request, which is all that its file says."""
    generation: int
    """To be mapped."""
    log: Sequence[str]
    """Lines for the engine's log: somebody reads that."""

    def put(self, directory: Path, engine: str) -> None:
        """Leave it in a spool; `put` says what is raised."""
        put(directory, f"{ANSWER}-{engine}", json.dumps(self).encode())

    @classmethod
    def read(cls, path: Path) -> Answer:
        """Read what was left; ValueError, TypeError: it is no answer."""
        number, generation, log = json.loads(path.read_bytes())
        return cls(int(number), int(generation), list(map(str, log)))


class Gathered:
    """What is gathered for a while and then left together, such as trajectories on
    their way from an engine to a spool. Trajectories that can't be left are kept, up to
    `KEPT` bytes, for the next time. Any thread may call.
    """

    def __init__(
        self, leave: Callable[[Sequence[Any]], None], seconds: float = GATHER_S
    ) -> None:
        """`leave`: leaves some, or, of trajectories, raises; one thread calls it at a
        time.
        """
        self._leave = leave
        self._seconds = seconds
        self._lock = threading.Lock()
        """Of what is gathered; never held while something is left, because an event
        loop may wait for it.
        """
        self._leaving = threading.Lock()
        self._batch: list[Any] = []
        self._due = False
        """Whether a `flush` will follow."""

    def add(self, item: Any) -> None:
        """Take something, without waiting for anything."""
        with self._lock:
            self._batch.append(item)
            due = self._due
            self._due = True
        if not due:
            timer = threading.Timer(self._seconds, self.flush)
            timer.daemon = True  # the process need not wait for it
            timer.start()

    def flush(self) -> None:
        """Leave now what was gathered; if that fails, a line in the log says so."""
        with self._leaving:
            with self._lock:
                batch = self._batch
                self._batch = []
                self._due = False
            try:
                if batch:
                    self._leave(batch)
            except Exception:
                logger.exception("das: trajectories do not reach the history")
                if sum(len(trajectory.tokens) for trajectory in batch) < KEPT:
                    with self._lock:
                        self._batch = batch + self._batch
