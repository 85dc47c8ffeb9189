"""Files that others may have left are read whole, or not at all: nothing waits for what
is no file, and one bad file costs that file alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from das_adapter.trouble import log_once

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T]) -> T:
    """Return what a call returns that a file system may keep waiting for ever;
    TimeoutError: it takes longer, and goes on in a thread that nobody waits for.
    """
    found: Future[T] = Future()

    def run() -> None:
        try:
            result = call()
        except BaseException as error:
            found.set_exception(error)
        else:
            found.set_result(result)

    threading.Thread(target=run, name="das-file", daemon=True).start()
    try:
        return found.result(seconds)
    except TimeoutError:
        if found.done():  # the call's own
            raise
        raise TimeoutError(f"no answer within {seconds:g} s") from None


def open_without_waiting(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file, as `os.open`, and return its descriptor; OSError: it is something
    else, such as a FIFO, whose opening might wait for ever.
    """
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    descriptor = os.open(path, flags, 0o600)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "Is a directory", os.fspath(path))
    kind = stat.filemode(mode)
    raise OSError(errno.EINVAL, f"found {kind}, allowed: a file", os.fspath(path))


def read_file(path: str | os.PathLike[str], max_bytes: int | None = None) -> bytes:
    """Return what a file has; OSError: it can't be read, is no file, or has more than
    `max_bytes`.
    """
    descriptor = open_without_waiting(path, os.O_RDONLY)
    with open(descriptor, "rb") as file:
        num_bytes = os.fstat(descriptor).st_size
        if max_bytes is not None and num_bytes > max_bytes:
            raise OSError(
                errno.EFBIG,
                f"found {num_bytes} bytes, allowed: {max_bytes}",
                os.fspath(path),
            )
        return file.read()


def is_locked(path: str | os.PathLike[str], operation: int) -> bool:
    """Return whether somebody's lock on a file keeps this process from one by
    `operation` (`fcntl.LOCK_SH` or `LOCK_EX`), which it does not keep; False where
    there is no such file.
    """
    with contextlib.suppress(OSError):
        descriptor = open_without_waiting(path, os.O_RDWR)
        try:
            fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
    return False


def parse_or_skip(
    path: Path, parse: Callable[[bytes], T], skipped: str, max_bytes: int | None = None
) -> T | None:
    """Return what `parse` makes of a file's bytes; None, with one line in the log that
    begins with `skipped`, where that or reading it fails, however it does.
    """
    try:
        return parse(read_file(path, max_bytes))
    except FileNotFoundError:  # somebody took it meanwhile
        return None
    except Exception as error:  # what is damaged may raise anything
        log_once(f"{skipped} {path}", error)
        return None
