"""How engines and the writer of a node's history exchange files, in the history's
directory:

    writer, users, janitor   locks: of the writer, of engines without a host, of the
                             process that removes the directory
    manifest-*, segments-*   what the writer has published, see `core.index.store`
    spool/batch-*            trajectories of an engine here
    spool/texts-*            trajectories from another node
    spool/away-HISTORY-*     trajectories on their way to another node
    spool/ask-ENGINE         a request for a generation, where there is no Ray
    spool/answer-ENGINE      its answer

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
from itertools import chain
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
SPARE_BYTES = 1 << 30
"""Bytes of the file system that the history leaves free, an eighth of it at most."""
KEPT_BYTES = 64 << 20
"""Maximum bytes of text that an engine keeps while it can't leave them in the spool."""
_BLOCK_BYTES = 512
"""Unit in which a file's status counts the space that it takes."""

AnyPath = str | os.PathLike[str]
Leave = Callable[[Sequence[Any]], None]
"""Leaves what was gathered."""


def history_roots() -> tuple[Path, Path]:
    """Return where a history's directory may lie: in shared memory, or with temporary
    files, if there is no room.
    """
    temporary = tempfile.gettempdir()
    return SHARED_MEMORY, Path(temporary)


def directory_for(name: str, num_bytes: int, object_store_bytes: int = 0) -> Path:
    """Return the directory of a history: the one that is there, else a new one, in
    shared memory, or with temporary files if there is no room for `num_bytes`;
    `object_store_bytes` as in `available_bytes`.
    """
    shared, temporary = history_roots()
    for root in (shared, temporary):
        directory = root / name
        if is_private(directory):
            return directory
    with contextlib.suppress(OSError):  # there is no shared memory
        if available_bytes(shared, object_store_bytes) >= num_bytes:
            return shared / name
    logger.warning(
        "das: history: %s has no room for das.history.max_bytes=%s beside Ray's object"
        " store of %s bytes; the history lies in %s",
        shared,
        num_bytes,
        object_store_bytes,
        temporary,
    )
    return temporary / name


def available_bytes(
    directory: Path, object_store_bytes: int, held_bytes: int = 0
) -> int:
    """Return how many bytes a history's files may take.

    Args:
        object_store_bytes: size of Ray's object store, which takes memory when it needs
            it; it lies in shared memory, or with temporary files if that is smaller.
        held_bytes: what the history's files take now.

    Raises:
        OSError: the directory is gone.
    """
    disk = shutil.disk_usage(directory)
    not_for_rays_store = disk.total
    if object_store_bytes and _lies_beside_store(directory, object_store_bytes):
        not_for_rays_store -= object_store_bytes
    without_others = disk.free + held_bytes
    spare = min(SPARE_BYTES, disk.total // 8)
    return min(without_others, not_for_rays_store) - spare


def _lies_beside_store(directory: Path, object_store_bytes: int) -> bool:
    """Return whether a directory and Ray's object store are in one file system."""
    shared, temporary = history_roots()
    shared_memory = shutil.disk_usage(shared)
    fits = shared_memory.total >= object_store_bytes
    store = shared if fits else temporary
    return store.stat().st_dev == directory.stat().st_dev


def bytes_on_disk(directory: Path) -> int:
    """Return how many bytes the files of a history's directory take."""
    num_blocks = 0
    published = directory.glob("*")
    left = (directory / FOLDER).glob("*")
    for path in chain(published, left):
        with contextlib.suppress(OSError):  # it was removed
            status = path.lstat()
            num_blocks += status.st_blocks
    return num_blocks * _BLOCK_BYTES


def write_private(path: Path, content: bytes) -> None:
    """Write a file for this user alone, without following a link."""

    def open_private(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, 0o600)

    with open(path, "wb", opener=open_private) as file:
        file.write(content)


def put_file(directory: AnyPath, name: str, content: bytes) -> None:
    """Leave a file in a spool, all of it or nothing; one of the same name is replaced.

    Raises:
        OSError: the directory is gone, or has no room.
        IndexFileError: it is a link or another user's.
    """
    folder = Path(directory) / FOLDER
    check_owner(folder)
    # another thread may leave the same file, sent again
    attempt = uuid.uuid4().hex
    new = folder / f"{name}.{attempt}.tmp"
    try:
        write_private(new, content)
        new.rename(folder / name)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def put_batch(
    directory: AnyPath, engine: str, trajectories: Sequence[Trajectory]
) -> None:
    """Leave what an engine wrote; `put_file` says what is raised. Files are taken in
    the order of their names.
    """
    now_ns = time.time_ns()
    batch = uuid.uuid4().hex[:8]
    name = f"{BATCH}-{engine}-{now_ns:020d}-{batch}"
    put_file(directory, name, pack(trajectories))


class Answer(NamedTuple):
    """The writer's answer to an engine that asks for a generation with all that it has
    left.
    """

    number: int
    """Number of the request, which is all that its file says."""
    generation: int
    """Generation to be mapped."""
    log: Sequence[str]
    """Lines for the engine's log: somebody reads that."""

    def write_to(self, directory: Path, engine: str) -> None:
        """Leave the answer in a spool; `put_file` says what is raised."""
        content = json.dumps(self).encode()
        name = f"{ANSWER}-{engine}"
        put_file(directory, name, content)

    @classmethod
    def read(cls, path: Path) -> Answer:
        """Read what was left; ValueError, TypeError: it is no answer."""
        content = path.read_bytes()
        number, generation, log = json.loads(content)
        lines = list(map(str, log))
        return cls(int(number), int(generation), lines)


class Gathered:
    """What is gathered for a while and then left together, such as trajectories on
    their way from an engine to a spool. Trajectories that can't be left are kept, up to
    `KEPT_BYTES`, for the next time. Any thread may call.
    """

    def __init__(self, leave: Leave, seconds: float = GATHER_S) -> None:
        """Gather for so many seconds; `leave` leaves what was gathered, or, of
        trajectories, raises; one thread calls it at a time.
        """
        self._leave = leave
        self._seconds = seconds
        self._lock = threading.Lock()
        """Guards what is gathered; never held while something is left, because an event
        loop may wait for it.
        """
        self._leaving = threading.Lock()
        self._batch: list[Any] = []
        self._due = False
        """Whether a `flush` will follow."""

    def add(self, item: Any) -> None:
        """Gather an item, without waiting for anything."""
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
            if not batch:
                return
            try:
                self._leave(batch)
            except Exception:
                logger.exception("das: trajectories do not reach the history")
                self._keep(batch)

    def _keep(self, trajectories: list[Any]) -> None:
        """Keep trajectories that could not be left, unless they are too many."""
        num_bytes = 0
        for trajectory in trajectories:
            num_bytes += len(trajectory.tokens)
        if num_bytes < KEPT_BYTES:
            with self._lock:
                self._batch = trajectories + self._batch
