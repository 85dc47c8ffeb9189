"""The writer of a node's history: it takes what engines leave in the spool, puts it into the store, and publishes
generations that the engines map. `service.node` runs it as a Ray actor, `service.local` as a process of its own."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from das_adapter.config import HistoryConfig
from das_adapter.core.history import HistoryPolicy
from das_adapter.core.index.store import HistoryStore
from das_adapter.errors import DasError
from das_adapter.protocol.messages import Trajectory, unpack
from das_adapter.protocol.spool import GRACE_S, KINDS, SEGMENTS, SHARED_MEMORY, USERS
from das_adapter.service import janitor
from das_adapter.service.spool import Spool

logger = logging.getLogger("das_adapter")

_KNOWN = 2**17
"""Trajectories that are remembered, so that one that comes again is dropped."""
HERE = "here"
"""Who has the texts of a file once they are published."""


class Writer:
    """The one writer of a directory. A file of the spool is removed when its texts are published: a writer that is
    killed finds it again, and drops what it had published already. Any thread may call."""

    def __init__(self, config: HistoryConfig, directory: Path, grace_s: float = GRACE_S):
        """Take over the history that an earlier writer left in the directory, or begin one; `grace_s`: see `GRACE_S`.

        Raises:
            DasError: another writer is there.
            IndexFileError: it is a link or another user's, or what was left there is damaged.
            OSError: it can't be created.
        """
        self.policy = HistoryPolicy(config)
        self.lock = threading.RLock()
        """Of texts on their way; held for a moment."""
        self.altered = False
        """Whether the store was changed by something else than texts, which is to be published."""
        self._grace_s = grace_s
        for place in (SHARED_MEMORY, Path(tempfile.gettempdir())):
            janitor.sweep(place, besides=directory.name)
        self._unpublished: list[str] = []
        """Files with texts that the store has, and may not have published."""
        self._known: dict[bytes, None] = {}
        """`Trajectory.digest` of what came last, the oldest first."""
        self._trouble = ""
        self.store = self._opened(directory)
        self.spool = Spool(self.store.directory)

    @property
    def directory(self) -> Path:
        """Where engines leave what they wrote, and find what is published."""
        return self.store.directory

    def read(self, kinds: Sequence[str] = KINDS) -> list[tuple[str, list[Trajectory]]]:
        """Return the files that have arrived, with their trajectories, for `keep`. History that moved here is taken in;
        a file that is damaged is dropped, with a line in the log."""
        found = []
        for file in self.spool.new(kinds):
            path = self.spool.path(file)
            try:
                if file.startswith(SEGMENTS):
                    self.store.absorb(path)
                    self._hold(file)
                else:
                    found.append((file, unpack(path.read_bytes())))
            except OSError as error:
                self.spool.leave(file)
                self.report(error)
            except (ValueError, DasError) as error:
                self.spool.done([file], "")
                self.report(error)
        return found

    def keep(self, file: str, texts: Sequence[Trajectory]) -> list[Trajectory]:
        """Put texts of a file into the store; return those that had not come before."""
        with self.lock:
            published: dict[int, set[tuple[bytes, int]]] = {}
            if file in self.spool.left:
                published = {text.problem: self.store.texts(self.policy.key(text.problem)) for text in texts}
            fresh = []
            for text in texts:
                digest = text.digest
                if digest not in self._known and (text.tokens, text.version) not in published.get(text.problem, ()):
                    fresh.append(text)
                self._known[digest] = None
            while len(self._known) > _KNOWN:
                del self._known[next(iter(self._known))]
            self.policy.take(self.store, (text[:3] for text in fresh))
            self._hold(file)
            return fresh

    def seal_ahead(self) -> None:
        """Let what was kept be sealed in the background."""
        if self._unpublished:
            self.store.seal_ahead(self.policy.window)

    def publish(self, tokens: int = 2**62) -> int:
        """Publish what was kept, of what is not sealed yet about so many tokens at most; return how many it sealed."""
        with self.lock:
            if tokens <= 0 or not (self._unpublished or self.altered or self._trouble):
                return 0
            staged = self.store.staged
            self.store.seal(self.policy.window, tokens)
            self.altered, self._trouble = False, ""
            if not self.store.staged:
                self.spool.done(self._unpublished, HERE)
                self._unpublished = []
            return staged - self.store.staged

    def restore(self) -> None:
        """Publish the history again if files were removed; what is mapped stays readable here."""
        if self.store.intact:
            return
        logger.error("das: history: files in %s were removed; it is published anew", self.directory)
        with self.lock:
            with contextlib.suppress(OSError, DasError):  # what failed in the background is in the log
                self.store.close()
            for path in self.directory.glob("*"):
                if path.is_file() and path.name != USERS:  # what engines left stays
                    path.unlink(missing_ok=True)
            store = self._opened(self.directory)
            try:
                saved = store.directory / "restored.tmp"  # the janitor removes it if this process is killed
                self.store.save(saved)
                store.absorb(saved)
                saved.unlink()
                self.store, self.spool = store, Spool(store.directory)
            except BaseException:
                store.close()
                raise
            self.altered = True

    def report(self, error: Exception) -> None:
        """Log an error once, until something is published."""
        if self._trouble != repr(error):
            logger.error("das: history: %r; engines go on with what is published", error)
        self._trouble = repr(error)

    def _hold(self, file: str) -> None:
        """Let a file wait until its texts are published."""
        self.spool.expect(file, [HERE])
        self._unpublished.append(file)

    def _opened(self, directory: Path) -> HistoryStore:
        store = HistoryStore(directory, threads=max(1, (os.cpu_count() or 1) // 8))
        janitor.watch(directory, self._grace_s)
        logger.warning("das: the history lies in %s", directory)
        return store
