"""A node's history: written once, in files that every engine process of the node maps
read-only.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from das_adapter.core.index.private import make_private
from das_adapter.core.index.values import ALL, Number, Shrunk, Tokens, tokens_of
from das_adapter.core.native import native
from das_adapter.errors import DasError

UInt64 = npt.NDArray[np.uint64]

logger = logging.getLogger("das_adapter")

SLICE = 200_000
"""Tokens that `work` seals or merges, and `shrink` thins out, before the history's lock
is released.
"""
QUIET_S = 0.5
"""Once nothing was added for so long, problems are sealed of which more may come."""


class HistoryStore:
    """The one writer of a directory of segment files (in /dev/shm, to share memory and
    not a disk).

    Files never change. `seal` publishes a generation: a manifest, renamed into place,
    says what it changed and in which files that lies. Files that a generation no longer
    needs stay for two more. What can be done before or after, `work` does, a slice at a
    time. Any thread may call.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Create the directory for this user alone, or take over what an earlier store
        left there.

        Raises:
            DasError: another store writes there.
            IndexFileError: it is a link or another user's, or what was left there is
                damaged.
        """
        self.directory = Path(directory)
        self._lock = threading.RLock()
        self._added = 0.0
        self._unwritten, self._merged = 0, False
        """Of what `work` and `shrink` have done: tokens that are in no file yet;
        whether what was merged is not published.
        """
        self._closed = False
        make_private(self.directory)
        self._writer = os.open(
            self.directory / "writer",
            os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC,
            0o600,
        )
        try:
            fcntl.flock(self._writer, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._writer)
            raise DasError(
                f"history directory {str(self.directory)!r}: another store writes there"
            ) from None
        self._core: Any = native().SuffixIndex()
        try:
            self._core.attach(str(self.directory), True)
        except Exception:
            os.close(self._writer)
            raise

    def add(self, problem: int, tokens: Tokens, version: int) -> None:
        """Stage one finished trajectory, without its prompt. `version`: of the weights
        that wrote it; later ones count more, whatever the difference.
        """
        ids = tokens_of(tokens)
        with self._changing():
            self._core.add(problem, ids, version)
            self._added = time.monotonic()

    def seal(self, window: int = ALL, tokens: int = 2**62) -> int:
        """Publish what was added, at the end of a step; return the generation.
        `window`: visits that each problem added to keeps, the newest.

        About `tokens` are sealed at most; the others follow in `work`, for the next
        generation.
        """
        with self._changing():
            self._core.seal(window, tokens=tokens)
            self._core.publish(True)
            return self.generation

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise DasError(
                    f"history directory {str(self.directory)!r}: this store is closed"
                    " and changes nothing"
                )
            yield

    def work(self, window: int = ALL, every: bool = False) -> bool:
        """Do a slice of the work between two seals; return whether there is more now.

        Problems are sealed that have as many trajectories as problems had in the
        generation before; all, once nothing more is added, or with `every`. Then
        segments of about one size are merged; that is one more generation.
        """
        with self._lock:
            if self._closed:
                return False
            least = (
                1
                if every or time.monotonic() > self._added + QUIET_S
                else self._core.group
            )
            sealed = self._core.seal(window, least, SLICE) if least else 0
            merged = 0 if sealed else self._core.merge(SLICE)
            self._merged = self._merged or merged > 0
            more = self._write(sealed + merged, more=bool(sealed or merged))
            if self._merged and not more:
                self._core.publish()
                self._merged = False
            return more

    def shrink(self, max_bytes: int) -> Shrunk:
        """Do a slice of thinning the history out, as long as `nbytes` > `max_bytes`;
        return what it did. The last one publishes the history.

        The largest problems first, down to about the same size: of a problem the
        stretches of text stay, each once, that are worth most for their bytes, by the
        rollouts that share them; of equals the newest. A problem with more than a
        million tokens is too large for that: its oldest visits go whole, and only of
        its newest, where that does not fit, are stretches kept. Where every problem
        would be left with less than 256 bytes, those not seen for longest are dropped
        whole.
        """
        with self._changing():
            shrunk = Shrunk(*self._core.shrink(max_bytes, SLICE))
            self._write(shrunk.kept, more=True)
            if shrunk.tokens and self.nbytes <= max_bytes:
                self._core.publish()
            return shrunk

    def _write(self, tokens: int, more: bool) -> bool:
        """Write files of what was changed, so many tokens more, once there are enough
        for one, or there is no `more`; return whether there is more to do then.
        """
        self._unwritten += tokens
        if self._unwritten and (self._unwritten > 8 * SLICE or not more):
            more = bool(self._core.write()) or more
            self._unwritten = 0
        return more

    def has(self, problem: int, tokens: Tokens, version: int) -> bool:
        """Return whether the sealed history has this trajectory, whole."""
        with self._lock:
            return bool(self._core.has(problem, tokens_of(tokens), version))

    def save(self, path: str | os.PathLike[str], window: int = ALL) -> None:
        """Write the history to one file, for `absorb` of another store; what was added
        is sealed before. Other threads may change the history while it is written.
        """
        with self._lock:
            self._core.seal(window)
            saving = self._core.saving()
        saving.write(os.fspath(path))

    def give(self, path: str | os.PathLike[str], problems: npt.ArrayLike) -> None:
        """Write the sealed history of some problems, uint64 [n], to a file for this
        user alone: for `absorb` of another store, and for `SuffixIndex.map_guest_history`.
        """
        with self._lock:
            self._core.give(os.fspath(path), np.asarray(problems, dtype=np.uint64))

    def absorb(
        self, path: str | os.PathLike[str], problems: npt.ArrayLike | None = None
    ) -> None:
        """Take in what `give` or `save` wrote of some problems, uint64 [n], or of all,
        as older than what is there; the next `seal` publishes it. Raises as
        `SuffixIndex.check`; nothing is taken in then.
        """
        chosen = (
            problems_in(path)
            if problems is None
            else np.asarray(problems, dtype=np.uint64)
        )
        with self._changing():
            self._core.absorb(os.fspath(path), chosen)

    def close(self) -> None:
        """Stop writing; the files stay, for readers and for the next store."""
        with self._lock:
            if not self._closed:
                os.close(self._writer)
            self._closed = True

    def __enter__(self) -> HistoryStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def intact(self) -> bool:
        """Whether it is open, and nobody else removed files of the generation. What is
        mapped stays readable: `save` still works.
        """
        with self._lock:
            there = sum(
                file.stat().st_size for file in self.directory.glob("segments-*")
            )
            return (
                not self._closed
                and there >= self._core.file_bytes
                and (self.directory / "writer").exists()
            )

    staged = Number("staged_tokens")
    """Tokens that were added and are not sealed."""
    generation = Number("generation")
    """The generation published last; 0: none."""
    nbytes = Number("nbytes")
    tokens = Number("tokens")
    problems = Number("problems")
    """Of the sealed history, as in `SuffixIndex`."""
    file_bytes = Number("file_bytes")
    """Bytes of the generation's files: `nbytes`, and at most a third more that no
    longer counts.
    """
    newest = Number("newest")
    """The newest weight version that was ever sealed here; meaningless while there is
    none.
    """


def problems_in(path: str | os.PathLike[str]) -> UInt64:
    """Return the problems, uint64 [n], of a file that `give` or `save` wrote; one may
    occur several times. Raises as `SuffixIndex.check`.
    """
    return native().read_index_file(os.fspath(path), False)[0]


def newest_in(path: str | os.PathLike[str]) -> int:
    """Return the newest weight version that was sealed before such a file was written;
    meaningless while none was.
    """
    return int(native().read_index_file(os.fspath(path), False)[1])
