"""The spool of a node's history as its writer reads it: what the history is given waits there until it is published, or
has arrived at its home, so that no process that dies takes it along."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from das_adapter.core.index.private import make_private
from das_adapter.protocol.spool import ASK, FOLDER, KINDS, Ask

_HALF_WRITTEN_S = 600.0
"""Age after which a file that was not completed is removed: its writer was killed."""


class Spool:
    """A file is removed when everyone whom its texts are for has them."""

    def __init__(self, directory: Path) -> None:
        self._folder = directory / FOLDER
        make_private(self._folder)
        self._waited_for: dict[str, set[str]] = {}
        """By file that was taken: who does not have his texts yet; "" while it is not known for whom they are."""
        for path in self._folder.glob("*.tmp"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < time.time() - _HALF_WRITTEN_S:
                    path.unlink()
        self.left = frozenset(self._names(KINDS))
        """Files that an earlier writer may have published already."""

    def new(self, kinds: Sequence[str] = KINDS) -> list[str]:
        """Return the files of some kinds that were not taken yet, in order, and count them as taken."""
        new = [name for name in self._names(kinds) if name not in self._waited_for]
        self._waited_for |= {name: {""} for name in new}
        return new

    def asked(self) -> list[tuple[str, Path, Ask]]:
        """Return the engines that ask for a generation, each with its request's file, to be removed when the answer was
        left."""
        found = []
        for name in self._names((ASK,)):
            with contextlib.suppress(OSError, ValueError, TypeError):  # it was taken back, or is no request
                path = self.path(name)
                found.append((name.partition("-")[2], path, Ask.read(path)))
        return found

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
                    self.path(file).unlink(missing_ok=True)
                    del self._waited_for[file]

    @property
    def nbytes(self) -> int:
        """Bytes of the files that wait."""
        total = 0
        for name in self._names(KINDS):
            with contextlib.suppress(FileNotFoundError):  # it was removed just now
                total += self.path(name).stat().st_size
        return total

    def _names(self, kinds: Sequence[str]) -> list[str]:
        found = os.listdir(self._folder)
        return sorted(name for name in found if name.partition("-")[0] in kinds and not name.endswith(".tmp"))
