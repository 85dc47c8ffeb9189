"""The directory of a node's history belongs to one user: nobody else reads it, and
nobody else's is taken for it.
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
        found = directory.lstat()
    except FileNotFoundError:
        return False
    return (
        stat.S_ISDIR(found.st_mode)
        and found.st_uid == os.geteuid()
        and not found.st_mode & 0o077
    )


def check_owner(directory: Path) -> None:
    """Raise IndexFileError if a link, a file or another user's directory is in the
    place of a directory.
    """
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise IndexFileError(
            f"history directory {str(directory)!r}: found"
            f" {stat.filemode(found.st_mode)} of user {found.st_uid}, allowed: a"
            f" directory of user {os.geteuid()}, and no link"
        )
