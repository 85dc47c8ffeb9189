"""Where what a node's history is given waits until it is published, or has arrived at its home: files in the history's
directory, so that no process that dies takes them along."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from das_adapter.core.index.private import check_owner, make_private
from das_adapter.protocol.messages import Trajectory, pack

_FOLDER = "spool"
_LAST = "last"
"""Files with the number of a sender's last message."""


def put(directory: str, name: str, content: bytes) -> None:
    """Leave a file in the spool of a node's history, all of it or nothing.

    Args:
        directory: of the history.
        name: of the file, which begins with what it is; files are taken in the order of their names.
        content: its bytes.

    Raises:
        OSError: the directory is gone, or has no room.
        IndexFileError: it is a link or another user's.
    """
    folder = Path(directory) / _FOLDER
    check_owner(folder)
    new = folder / f"{name}.{os.getpid()}.tmp"
    try:
        with open(new, "wb", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o600)) as file:
            file.write(content)
        new.rename(folder / name)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


BATCH, PACKAGE, SEGMENTS = "batch", "package", "segments"
"""What files are: trajectories of an engine here or from another node, and history of problems that moved here from
another node."""


def put_batch(directory: str, source: str, number: int, trajectories: Sequence[Trajectory]) -> None:
    """Leave a batch that an engine wrote; `put` says what is raised."""
    put(directory, f"{BATCH}-{source}-{number:010d}", pack(trajectories))


class Spool:
    """A spool as the history reads it. A file is removed when everyone whom its texts are for has them."""

    def __init__(self, directory: Path) -> None:
        self._folder = directory / _FOLDER
        make_private(self._folder)
        self._last = {path.name.split("-")[1]: int(path.read_text()) for path in self._folder.glob(f"{_LAST}-*")}
        self._waited_for: dict[str, set[str]] = {}
        """By file that was taken: who does not have his texts yet; "" while it is not known for whom they are."""

    def new(self, prefix: str = "") -> list[str]:
        """Return the files that were not taken yet, in order, and count them as taken."""
        found = [name for name in os.listdir(self._folder) if name.startswith(prefix) and not name.endswith(".tmp")]
        new = sorted(name for name in found if name not in self._waited_for and not name.startswith(_LAST))
        self._waited_for |= {name: {""} for name in new}
        return new

    def put_package(self, source: str, number: int, content: bytes) -> None:
        """Leave a message from another node, unless it was there before; its sender numbers messages from 1. `put` says
        what is raised."""
        if number > self._last.get(source, 0):
            put(str(self._folder.parent), f"{PACKAGE}-{source}-{number:010d}", content)

    def leave(self, file: str) -> None:
        """Count a file as not taken."""
        del self._waited_for[file]

    def path(self, file: str) -> Path:
        """Return where a file lies."""
        return self._folder / file

    def expect(self, file: str, whom: Iterable[str], instead: str = "") -> None:
        """Say for whom a file's texts are, instead of someone who will not have them."""
        self._waited_for.setdefault(file, set()).update(whom)
        if instead not in whom:
            self.done([file], instead)

    def done(self, files: Iterable[str], who: str) -> None:
        """Say that someone has his texts of some files."""
        for file in files:
            whom = self._waited_for.get(file)
            if whom is not None:
                whom.discard(who)
                if not whom:
                    if file.startswith(PACKAGE):
                        _, source, number = file.split("-")
                        self._last[source] = int(number)
                        self.path(f"{_LAST}-{source}").write_text(number)
                    self.path(file).unlink(missing_ok=True)
                    del self._waited_for[file]

    @property
    def nbytes(self) -> int:
        """Bytes of the files that wait."""
        total = 0
        for name in os.listdir(self._folder):
            if not name.startswith(_LAST):
                with contextlib.suppress(FileNotFoundError):  # it was removed just now
                    total += self.path(name).stat().st_size
        return total
