"""How engines and the writer of a node's history exchange files, in the history's
directory:

    writer, users, janitor   locks: of the writer, of engines without a host, of the
                             process that removes the directory
    manifest-*, segments-*   what the writer has published, see `core.index.store`
    prompts                  the prompts of its problems, see `service.prompts`
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
import errno
import json
import logging
import os
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from das_adapter.core.index.private import check_owner, is_private, make_private
from das_adapter.errors import DasError
from das_adapter.files import read_file
from das_adapter.protocol.messages import Trajectory, pack
from das_adapter.trouble import Peer, reason

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
OUTBOX = 4
"""What waits in a spool takes at most this part of `max_bytes`: what engines left for
the writer, and what is on its way to other nodes.
"""
_ROW_BYTES = 32
"""Bytes that a packed text takes beside its tokens, at most."""
_TRIAL_BYTES = 1 << 16
"""Bytes that are written to find out whether a place can be written to."""
_MAX_ANSWER_BYTES = 1 << 22
"""Maximum bytes of a writer's answer: a hundred lines of the log and two numbers."""
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
    shared memory, or with temporary files if there is no room for `num_bytes`. It is
    the first of these that can be written to, which is tried.

    Args:
        object_store_bytes: as in `available_bytes`.

    Raises:
        DasError: none of them can be written to.
    """
    shared, temporary = history_roots()
    existing = [root for root in (shared, temporary) if _is_there(root / name)]
    has_room = False
    with contextlib.suppress(OSError):  # there is no shared memory
        has_room = available_bytes(shared, object_store_bytes) >= num_bytes
    by_room = [shared, temporary] if has_room else [temporary, shared]
    found = []
    for root in dict.fromkeys(existing + by_room):
        try:
            _try_to_write(root, name)
        except (DasError, OSError) as error:
            found.append(f"{root}: {reason(error)}")
            continue
        if found or (root != shared and root not in existing):
            why = "; ".join(found) or (
                f"{shared} has no room for das.history.max_bytes={num_bytes} beside"
                f" Ray's object store of {object_store_bytes} bytes"
            )
            logger.warning("das: history: it lies in %s: %s", root, why)
        return root / name
    places = "; ".join(found)
    raise DasError(
        f"found no place for the history {name!r} ({places}), allowed: one of these"
        f" directories that this process can write to; make room in {shared}, or set"
        " TMPDIR to another directory"
    )


def _is_there(directory: Path) -> bool:
    """Return whether a history's directory is there, for this user alone."""
    try:
        return is_private(directory)
    except OSError:  # of a name that no file may have, say
        return False


def _try_to_write(root: Path, name: str) -> None:
    """Make a history's directory in a root, and write a file in its spool, which is
    removed again.

    Raises:
        OSError: it can't be written to, or there is no room.
        IndexFileError: a link or another user's is in its place.
    """
    if not root.is_dir():
        raise OSError(errno.ENOENT, "found no directory", str(root))
    directory = root / name
    folder = directory / FOLDER
    attempt = uuid.uuid4().hex
    trial = folder / f"{attempt}.tmp"
    try:
        for made in (directory, folder):
            make_private(made)
        write_private(trial, bytes(_TRIAL_BYTES))
        trial.unlink()
    except BaseException:
        for remove in (trial.unlink, folder.rmdir, directory.rmdir):
            with contextlib.suppress(OSError):  # it is not there, or in use
                remove()
        raise


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
    directory: AnyPath,
    engine: str,
    trajectories: Sequence[Trajectory],
    max_bytes: int | None = None,
) -> int:
    """Leave what an engine wrote; `put_file` says what is raised. Files are taken in
    the order of their names.

    Args:
        max_bytes: of the history. What waits for its writer, which may hang, takes a
            quarter of it at most, and one text: the oldest files are removed before.

    Returns:
        How many files were removed.
    """
    limit_bytes = max_bytes // OUTBOX if max_bytes else None
    num_removed = 0
    for part in _parts(trajectories, limit_bytes):
        content = pack(part)
        if limit_bytes is not None:
            num_removed += _make_room(Path(directory), limit_bytes - len(content))
        now_ns = time.time_ns()
        batch = uuid.uuid4().hex[:8]
        name = f"{BATCH}-{engine}-{now_ns:020d}-{batch}"
        put_file(directory, name, content)
    return num_removed


def _parts(
    trajectories: Sequence[Trajectory], max_bytes: int | None
) -> Iterator[Sequence[Trajectory]]:
    """Yield trajectories in parts of so many bytes of text at most, or of one text."""
    part: list[Trajectory] = []
    part_bytes = 0
    for trajectory in trajectories:
        text_bytes = len(trajectory.tokens) + len(trajectory.prompt) + _ROW_BYTES
        is_full = max_bytes is not None and part_bytes + text_bytes > max_bytes
        if part and is_full:
            yield part
            part = []
            part_bytes = 0
        part.append(trajectory)
        part_bytes += text_bytes
    if part:
        yield part


def _make_room(directory: Path, max_bytes: int) -> int:
    """Remove the oldest files that engines left for the writer, until the others take
    at most so many bytes; return how many were removed.
    """
    waiting = []
    waiting_bytes = 0
    for entry in os.scandir(directory / FOLDER):
        if entry.name.startswith(f"{BATCH}-"):
            with contextlib.suppress(OSError):  # the writer took it
                status = entry.stat(follow_symlinks=False)
                waiting.append((status.st_mtime_ns, status.st_size, entry.path))
                waiting_bytes += status.st_size
    num_removed = 0
    for _, num_bytes, path in sorted(waiting):
        if waiting_bytes <= max_bytes:
            break
        with contextlib.suppress(OSError):  # it is a directory, say
            os.unlink(path)
            num_removed += 1
        waiting_bytes -= num_bytes
    return num_removed


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
        """Read what was left; ValueError, TypeError, OSError: it is no answer."""
        content = read_file(path, _MAX_ANSWER_BYTES)
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
        self._place = Peer()
        """Where it is left."""
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

    def flush(self, timeout_s: float = -1) -> None:
        """Leave now what was gathered; if that fails, a line in the log says so.
        `timeout_s`: how long to wait for another thread that leaves something now,
        after which nothing is done; negative: until it is ready.
        """
        if not self._leaving.acquire(timeout=timeout_s):
            return
        try:
            with self._lock:
                batch = self._batch
                self._batch = []
                self._due = False
            if batch:
                self._leave_or_keep(batch)
        finally:
            self._leaving.release()

    def _leave_or_keep(self, batch: list[Any]) -> None:
        """Leave what was gathered; what can't be left is kept for the next time."""
        try:
            self._leave(batch)
            self._place.answered()
        except Exception as error:
            message = "das: trajectories do not reach the history"
            self._place.failed(message, error)
            self._keep(batch)

    def _keep(self, trajectories: list[Any]) -> None:
        """Keep trajectories that could not be left, unless they are too many."""
        num_bytes = 0
        for trajectory in trajectories:
            num_bytes += len(trajectory.tokens) + len(trajectory.prompt)
        if num_bytes < KEPT_BYTES:
            with self._lock:
                self._batch = trajectories + self._batch
