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

from das_adapter.core import tuning
from das_adapter.core.index.private import make_private
from das_adapter.core.index.values import (
    ALL,
    FilePath,
    Number,
    Shrunk,
    Tokens,
    tokens_of,
)
from das_adapter.core.native import native
from das_adapter.errors import DasError
from das_adapter.files import is_locked

UInt64 = npt.NDArray[np.uint64]

logger = logging.getLogger("das_adapter")

_LOCK_S = 0.1
"""How long a store waits for the lock of a directory: others look for a moment whether
somebody has it.
"""
_LOCK_POLL_S = 0.01
"""Time between two attempts."""


class HistoryStore:
    """The one writer of a directory of segment files (in /dev/shm, to share memory and
    not a disk).

    Files never change. `seal` publishes a generation: a manifest, renamed into place,
    says what it changed and in which files that lies. Files that a generation no longer
    needs stay for two more. What can be done before or after, `work` does, a slice at a
    time. Any thread may call.
    """

    def __init__(
        self, directory: FilePath, window: int = ALL, others_tokens: int = 0
    ) -> None:
        """Create the directory for this user alone, or take over what an earlier store
        left there.

        Args:
            directory: of the files.
            window: visits that each problem keeps, the newest, once it is added to.
            others_tokens: tokens of the texts that requests of all problems draft from,
                at most: the newest, of each weight version up to a half; 0: none. They
                do not count in `tokens`.

        Raises:
            DasError: another store writes there.
            IndexFileError: it is a link or another user's, or what was left there is
                damaged.
        """
        self.directory = Path(directory)
        self.window = window
        self._lock = threading.RLock()
        self._last_added_s = 0.0
        """The time when a text was added last, by `time.monotonic`."""
        self._unwritten_tokens = 0
        """Tokens that `work` and `shrink` have changed and that are in no file yet."""
        self._has_unpublished_merge = False
        self._closed = False
        make_private(self.directory)
        self._writer = _lock_file(self.directory)
        self._core: Any = native().SuffixIndex()
        try:
            self._core.attach(str(self.directory), True)
            self._core.share_texts(others_tokens)
        except Exception:
            os.close(self._writer)
            raise

    def add(self, problem: int, tokens: Tokens, version: int) -> None:
        """Stage one finished trajectory, without its prompt.

        Args:
            version: of the weights that wrote it; later ones count more, whatever the
                difference.
        """
        ids = tokens_of(tokens)
        with self._changing():
            self._core.add(problem, ids, version)
            self._last_added_s = time.monotonic()

    def seal(self, tokens: int = 2**62) -> int:
        """Publish what was added, at the end of a step; return the generation. At most
        so many tokens are sealed, about; the others follow in `work`, for the next
        generation.
        """
        with self._changing():
            self._core.seal(self.window, max_tokens=tokens)
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

    def work(self, every: bool = False) -> bool:
        """Do a slice of the work between two seals; return whether there is more now.

        Problems are sealed that have as many trajectories as problems had in the
        generation before; all, once nothing more is added, or with `every`. Then
        segments of about one size are merged; that is one more generation, unless they
        are texts that all problems share.
        """
        with self._lock:
            if self._closed:
                return False
            quiet_s = time.monotonic() - self._last_added_s
            seal_all = every or quiet_s > tuning.SEAL_QUIET_S
            min_texts = 1 if seal_all else self._core.group
            sealed = 0
            if min_texts:
                sealed = self._core.seal(
                    self.window, min_texts, tuning.SEAL_SLICE_TOKENS
                )
            merged = 0
            if not sealed:
                merged = self._core.merge(tuning.SEAL_SLICE_TOKENS)
            if merged:
                self._has_unpublished_merge = True
            merged_others = 0
            if not sealed and not merged:
                merged_others = self._core.merge_others()
            changed = sealed + merged + merged_others
            more = self._write(changed, more=changed > 0)
            if self._has_unpublished_merge and not more:
                self._core.publish()
                self._has_unpublished_merge = False
            return more

    def shrink(self, max_bytes: int) -> Shrunk:
        """Do a slice of thinning the history out, as long as `nbytes` > `max_bytes`;
        return what it did. The last one publishes the history. Texts that all problems
        share go first, once they take more than a quarter.

        The largest problems first, down to about the same size: of a problem the
        stretches of text stay, each once, that are worth most for their bytes, by the
        rollouts that share them; of equals the newest. A problem with more than a
        million tokens is too large for that: its oldest visits go whole, and only of
        its newest, where that does not fit, are stretches kept. Where every problem
        would be left with less than 256 bytes, those not seen for longest are dropped
        whole.
        """
        with self._changing():
            before = self.nbytes
            shrunk = Shrunk(*self._core.shrink(max_bytes, tuning.SEAL_SLICE_TOKENS))
            self._write(shrunk.kept, more=True)
            if self.nbytes < before and self.nbytes <= max_bytes:
                self._core.publish()
            return shrunk

    def _write(self, tokens: int, more: bool) -> bool:
        """Write files of what was changed, once there is enough for one, or nothing
        more is going to be changed now.

        Args:
            tokens: tokens that were changed since the last call.
            more: whether there is more to change.

        Returns:
            Whether there is more to change or to write.
        """
        self._unwritten_tokens += tokens
        file_tokens = tuning.WRITE_SLICES * tuning.SEAL_SLICE_TOKENS
        is_due = self._unwritten_tokens > file_tokens or not more
        if self._unwritten_tokens and is_due:
            has_written = bool(self._core.write())
            more = has_written or more
            self._unwritten_tokens = 0
        return more

    def has(self, problem: int, tokens: Tokens, version: int) -> bool:
        """Return whether the sealed history has this trajectory, whole."""
        with self._lock:
            return bool(self._core.has(problem, tokens_of(tokens), version))

    def save(self, path: FilePath) -> None:
        """Write the history to one file, for `absorb` of another store; what was added
        is sealed before. Other threads may change the history while it is written.
        """
        with self._lock:
            self._core.seal(self.window)
            saving = self._core.saving()
        saving.write(os.fspath(path))

    def give(self, path: FilePath, problems: npt.ArrayLike) -> None:
        """Write the sealed history of some problems, uint64 [n], to a file for this
        user alone: for `absorb` of another store, and for
        `SuffixIndex.map_guest_history`.
        """
        with self._lock:
            self._core.give(os.fspath(path), np.asarray(problems, dtype=np.uint64))

    def absorb(self, path: FilePath, problems: npt.ArrayLike | None = None) -> None:
        """Add what `give` or `save` wrote of some problems, uint64 [n], or of all, as
        older than what is there; the next `seal` publishes it. Raises as
        `SuffixIndex.check`; nothing is added then.
        """
        if problems is None:
            chosen = problems_in(path)
        else:
            chosen = np.asarray(problems, dtype=np.uint64)
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
            files = self.directory.glob("segments-*")
            num_bytes = sum(file.stat().st_size for file in files)
            has_files = num_bytes >= self._core.file_bytes
            has_writer = (self.directory / "writer").exists()
            return not self._closed and has_files and has_writer

    staged = Number("staged_tokens")
    """Tokens that were added and are not sealed."""
    generation = Number("generation")
    """The generation published last; 0: none."""
    nbytes = Number("nbytes")
    """Bytes of the sealed history, and of the memory that its problems take beside
    their text.
    """
    tokens = Number("tokens")
    """Tokens of the sealed history."""
    problems = Number("problems")
    """Problems that have some sealed history."""
    file_bytes = Number("file_bytes")
    """Bytes of the generation's files: of the sealed history, and at most a third more
    that no longer counts.
    """
    newest = Number("newest")
    """The newest weight version that was ever sealed here; meaningless while there is
    none.
    """


def _lock_file(directory: Path) -> int:
    """Open and lock the file that says that a store writes to a directory; return its
    descriptor.

    Raises:
        DasError: another store writes there.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(directory / "writer", flags, 0o600)
    until = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError:
            if time.monotonic() > until:
                os.close(descriptor)
                raise DasError(
                    f"history directory {str(directory)!r}: another store writes there"
                ) from None
        time.sleep(_LOCK_POLL_S)


def is_served(directory: Path) -> bool:
    """Return whether a store writes to a directory, which may hang."""
    return is_locked(directory / "writer", fcntl.LOCK_SH)


def problems_in(path: FilePath) -> UInt64:
    """Return the problems, uint64 [n], of a file that `give` or `save` wrote; one may
    occur several times. Raises as `SuffixIndex.check`.
    """
    problems, _ = native().read_index_file(os.fspath(path), False)
    return problems


def newest_in(path: FilePath) -> int:
    """Return the newest weight version that was sealed before `give` or `save` wrote a
    file; meaningless while none was.
    """
    _, newest = native().read_index_file(os.fspath(path), False)
    return int(newest)
