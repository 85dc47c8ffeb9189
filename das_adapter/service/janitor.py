"""Remove a history directory once nobody writes there any more, however its writer
ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import sys
import time
from pathlib import Path
from typing import IO

_START_S = 30.0
"""How long its start may take."""


def watch(directory: Path, grace_s: float) -> None:
    """Start a process that outlives this one and the job, and removes `directory` when
    it has no writer any more.

    A writer holds the lock of `directory / "writer"` (see `HistoryStore`), engines
    without a host that of `directory / "users"`. When they have been free for `grace_s`
    seconds, time enough for a restarted writer to take over, the directory is removed.

    Raises:
        DasError: the process did not start; its own words are in the message.
    """
    # imported here, because the process itself runs without the package
    from das_adapter.protocol.processes import Starter

    arguments = [str(directory), str(grace_s)]
    command = [sys.executable, "-S", "-E", __file__, *arguments]
    starter = Starter(command, f"the janitor of {directory}")
    starter.wait(_START_S)


def sweep(root: Path, besides: str) -> None:
    """Remove this user's history directories in `root` that nobody writes to, watches
    or uses: those of jobs that ended together with their janitors. `besides`: the name
    of one that stays.
    """
    for directory in root.glob("das-history-*"):
        if directory.name == besides:
            continue
        with contextlib.suppress(OSError):  # it is gone, or in use
            if _is_own_directory(directory):
                _remove_unwatched(directory)


def _is_own_directory(path: Path) -> bool:
    """Return whether a path is a directory of this user's, and no link."""
    status = path.lstat()
    is_own = status.st_uid == os.geteuid()
    return is_own and stat.S_ISDIR(status.st_mode)


def _remove_unwatched(directory: Path) -> None:
    """Remove a directory that has no writer and no janitor; OSError: it has one."""
    with contextlib.ExitStack() as locks:
        has_users = (directory / "users").exists()
        for name in ("janitor", "writer"):
            path = directory / name
            # a removal that was interrupted leaves "users" alone; a directory without
            # it has both, or is another thing
            if path.exists() or not has_users:
                if not path.exists():
                    raise FileNotFoundError(path)
                file = locks.enter_context(_open(path))
                _lock(file)
        _remove_unused(directory)


def _open(path: Path) -> IO[str]:
    """Open a file of locks, for this user alone; it is made if it is not there. What
    is no file is not waited for.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    file = open(descriptor, "r+")
    os.fchmod(descriptor, 0o600)  # others made it with another mode
    return file


def _lock(file: IO[str]) -> None:
    """Take the lock of a file; OSError: another process has it."""
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _watch(directory: Path, grace_s: float) -> None:
    """Leave a process that waits until the directory has had no writer for so long,
    and removes it; none, where there is one already.
    """
    with (
        _open(directory / "janitor") as own,
        (directory / "writer").open("r+") as writer,
    ):
        try:
            _lock(own)
        except OSError:  # there is one already
            return
        # The process forks, so that it is not ended together with the children of the
        # one that started it; not before it has the lock, since nobody may wait for
        # its end where that is process 1 of a container.
        if os.fork() == 0:
            _leave_terminal()
            _remove_in_time(directory, writer, grace_s)


def _leave_terminal() -> None:
    """Let go of the output of the process that started this one."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)


def _remove_in_time(directory: Path, writer: IO[str], grace_s: float) -> None:
    """Wait until the directory has had no writer for so long, and remove it."""
    while _is_writer_of(writer, directory):
        fcntl.flock(writer, fcntl.LOCK_SH)
        fcntl.flock(writer, fcntl.LOCK_UN)
        time.sleep(grace_s)
        try:
            _lock(writer)
        except OSError:  # somebody took over
            continue
        with contextlib.suppress(OSError):
            if _is_writer_of(writer, directory):
                _remove_unused(directory)
            return
        # engines live: they start another writer
        fcntl.flock(writer, fcntl.LOCK_UN)


def _remove_unused(directory: Path) -> None:
    """Remove a directory that no engine uses; OSError: one does."""
    with _open(directory / "users") as users:
        _lock(users)
        for path in directory.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != "users":
                path.unlink(missing_ok=True)
        # "users" goes last: whoever finds what a killed process left can lock it
        shutil.rmtree(directory, ignore_errors=True)


def _is_writer_of(writer: IO[str], directory: Path) -> bool:
    """Return whether an open file is the one that the writer of a directory locks, and
    not that of another directory, of the same name, that was removed.
    """
    opened = os.fstat(writer.fileno())
    try:
        current = (directory / "writer").stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(opened, current)


if __name__ == "__main__":
    _, watched, grace = sys.argv
    _watch(Path(watched), float(grace))
