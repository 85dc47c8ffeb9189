"""Remove a history directory once nobody writes there any more, however its writer
ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any


def watch(directory: Path, grace_s: float) -> None:
    """Start a process that outlives this one and the job, and removes `directory` when
    it has no writer any more.

    A writer holds the lock of `directory / "writer"` (see `HistoryStore`), engines
    without a host that of `directory / "users"`. When they have been free for `grace_s`
    seconds, time enough for a restarted writer to take over, the directory is removed.
    """
    command = [sys.executable, "-S", "-E", __file__, str(directory), str(grace_s)]
    nowhere: dict[str, Any] = dict.fromkeys(
        ("stdin", "stdout", "stderr"), subprocess.DEVNULL
    )
    # It forks once more, so that it is not ended together with this process's children.
    subprocess.run(command, check=True, start_new_session=True, **nowhere)


def sweep(root: Path, besides: str) -> None:
    """Remove this user's history directories in `root` that nobody writes to, watches
    or uses: those of jobs that ended together with their janitors. `besides`: the name
    of one that stays.
    """
    for directory in root.glob("das-history-*"):
        with contextlib.suppress(OSError):  # it is gone, or in use
            found = directory.lstat()
            if (
                directory.name != besides
                and stat.S_ISDIR(found.st_mode)
                and found.st_uid == os.geteuid()
            ):
                with contextlib.ExitStack() as locks:
                    for path in (directory / "janitor", directory / "writer"):
                        if path.exists() or not (directory / "users").exists():
                            lock = locks.enter_context(path.open("r+"))
                            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove_unused(directory)


def _watch(directory: Path, grace_s: float) -> None:
    with (
        (directory / "janitor").open("w") as own,
        (directory / "writer").open("r+") as writer,
    ):
        try:
            fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # there is one already
            return
        while _lies(writer, directory):
            fcntl.flock(writer, fcntl.LOCK_SH)
            fcntl.flock(writer, fcntl.LOCK_UN)
            time.sleep(grace_s)
            try:
                fcntl.flock(writer, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # somebody took over
                continue
            with contextlib.suppress(OSError):
                if _lies(writer, directory):
                    _remove_unused(directory)
                return
            # engines live: they start another writer
            fcntl.flock(writer, fcntl.LOCK_UN)


def _remove_unused(directory: Path) -> None:
    with (directory / "users").open("a+") as users:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for path in directory.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif (
                path.name != "users"
            ):  # it goes last: whoever finds what a killed process left can lock it
                path.unlink(missing_ok=True)
        shutil.rmtree(directory, ignore_errors=True)


def _lies(writer: IO[str], directory: Path) -> bool:
    """Whether the directory is still the one to be watched, and not another of the same
    name.
    """
    try:
        return os.path.samestat(
            os.fstat(writer.fileno()), (directory / "writer").stat()
        )
    except FileNotFoundError:
        return False


if __name__ == "__main__":
    if os.fork() == 0:
        _watch(Path(sys.argv[1]), float(sys.argv[2]))
