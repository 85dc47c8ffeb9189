"""A node's history: written once, in files that every engine process of the node maps read-only."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from pathlib import Path
from typing import Any

from das_adapter.core.index import _files
from das_adapter.core.index.private import make_private
from das_adapter.core.index.values import Shrunk, Tokens, check_knobs, problem_id, shrink, token_ids, visits
from das_adapter.core.native import native
from das_adapter.errors import DasError

logger = logging.getLogger("das_adapter")

SLICE = 200_000
"""Tokens that the background merge handles before it releases the history's lock."""


class HistoryStore:
    """The one writer of a directory of segment files (in /dev/shm, to share memory and not a disk).

    Files never change. Each call that alters the history publishes a generation: a manifest, renamed into place, names
    the files and what of them counts. Files that a generation no longer needs stay for two more. Any thread may call.
    """

    def __init__(self, directory: str | os.PathLike[str], max_depth: int = 64, threads: int = 1) -> None:
        """
        Args:
            directory: created if need be, for this user alone; a history that an earlier store left there is taken
                over, with its depth.
            max_depth: as in `SuffixIndex`.
            threads: that seal problems in parallel.

        Raises:
            DasError: another store writes there.
            IndexFileError: it is a link or another user's, or what was left there is damaged.
        """
        check_knobs(max_depth, 1.0)
        self.directory = Path(directory)
        self._threads = threads
        self._lock = threading.RLock()
        self._merging: threading.Thread | None = None
        self._failure: Exception | None = None
        self._closed = False
        make_private(self.directory)
        self._writer = os.open(self.directory / "writer", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._writer, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._writer)
            raise DasError(f"history directory {str(self.directory)!r}: another store writes there") from None
        self._core: Any = native().SuffixIndex(max_depth, 1.0)
        try:
            with _files():
                self._core.attach(str(self.directory), True)
            self._merge_in_background()  # what an earlier store left unmerged
        except Exception:
            os.close(self._writer)
            raise

    def add(self, problem: int, tokens: Tokens, version: int) -> None:
        """Stage one finished trajectory; as in `SuffixIndex.add`."""
        problem, ids = problem_id(problem), token_ids(tokens)
        with self._lock:
            self._core.add(problem, ids, version)

    def seal(self, window: int | None = None) -> int:
        """Publish what was added, at the end of a step, one segment per problem; return the generation.

        Segments of earlier steps are merged in the background, and published as one more generation.

        Args:
            window: as in `SuffixIndex.seal`.
        """
        with self._lock, _files():
            self._core.seal(visits(window), False, self._threads)
            self._core.publish()
            self._merge_in_background()
            return self.generation

    def _merge_in_background(self) -> None:
        if self._merging is None and not self._closed:
            self._merging = threading.Thread(target=self._merge, name="das-history-merge", daemon=True)
            self._merging.start()

    def _merge(self) -> None:
        any_merged = False
        try:
            while True:
                with self._lock, _files():
                    merged = not self._closed and self._core.merge(SLICE)
                    any_merged = any_merged or merged
                    if not merged:
                        if any_merged:
                            self._core.publish()
                        self._merging = None
                        return
        except Exception as error:
            logger.exception("das: merging the history in %s failed; it stays unmerged", self.directory)
            self._failure, self._merging = error, None

    def settle(self) -> int:
        """Wait until nothing is being merged; return the generation.

        Raises:
            IndexFileError, OSError: what failed in the background since the last call.
        """
        while (merging := self._merging) is not None:
            merging.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return self.generation

    def shrink(self, max_bytes: int) -> Shrunk:
        """Thin the history out, as `SuffixIndex.shrink` does, and publish it; return what went."""
        with self._lock, _files():
            shrunk = shrink(self._core, max_bytes, self._threads)
            if shrunk.tokens:
                self._core.publish()
            return shrunk

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the sealed history to one file, which `SuffixIndex.load` reads."""
        with self._lock, _files():
            self._core.save(os.fspath(path))

    def load(self, path: str | os.PathLike[str]) -> int:
        """Publish what `save` wrote, with its depth, in place of the sealed history; return the generation.

        Raises:
            IndexFileError, OSError: as `SuffixIndex.load`; the history is then what it was.
        """
        with self._lock, _files():
            self._core.load(os.fspath(path))
            self._core.publish()
            return self.generation

    def close(self) -> None:
        """Stop writing; the files stay, for readers and for the next store."""
        self._closed = True
        try:
            self.settle()
        finally:
            if self._writer >= 0:
                os.close(self._writer)
                self._writer = -1

    def __enter__(self) -> HistoryStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def generation(self) -> int:
        """The generation published last; 0: none."""
        with self._lock:
            return int(self._core.generation)

    @property
    def intact(self) -> bool:
        """Whether nobody else removed files of the generation. What is mapped stays readable: `save` still works."""
        with self._lock:
            there = sum(file.stat().st_size for file in self.directory.glob("segments-*"))
            return there >= self._core.file_bytes and (self.directory / "writer").exists()

    @property
    def nbytes(self) -> int:
        """Bytes of the sealed history, as in `SuffixIndex`."""
        with self._lock:
            return int(self._core.nbytes)

    @property
    def file_bytes(self) -> int:
        """Bytes of the generation's files: `nbytes`, and at most a third more that no longer counts."""
        with self._lock:
            return int(self._core.file_bytes)

    @property
    def tokens(self) -> int:
        """Tokens in the sealed history."""
        with self._lock:
            return int(self._core.tokens)

    @property
    def newest(self) -> int:
        """The newest weight version that was ever sealed here; meaningless while there is none."""
        with self._lock:
            return int(self._core.newest)

    @property
    def problems(self) -> int:
        """Problems with sealed history."""
        with self._lock:
            return int(self._core.problems)
