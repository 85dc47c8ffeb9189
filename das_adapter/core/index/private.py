"""Checks that the directory of a node's history belongs to one user: nobody else reads
it, and nobody else's directory is used in its place.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from das_adapter.core.index.errors import IndexFileError


def make_private(directory: Path) -> None:
    """Create a directory for this user alone, or take over one that is there; raises as
    `check_owner`.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_owner(directory)
    directory.chmod(0o700)


def is_private(directory: Path) -> bool:
    """Return whether there is a directory of this user, closed to all others, and no
    link.
    """
    try:
        status = directory.lstat()
    except FileNotFoundError:
        return False
    is_open_to_others = bool(status.st_mode & 0o077)
    return _is_own_directory(status) and not is_open_to_others


def check_owner(directory: Path) -> None:
    """Raise IndexFileError if a link, a file or another user's directory is in the
    place of a directory.
    """
    status = directory.lstat()
    if not _is_own_directory(status):
        raise IndexFileError(
            f"history directory {str(directory)!r}: found"
            f" {stat.filemode(status.st_mode)} of user {status.st_uid}, allowed: a"
            f" directory of user {os.geteuid()}, and no link"
        )


def _is_own_directory(status: os.stat_result) -> bool:
    """Return whether a path, itself and no link, is a directory of this user."""
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
