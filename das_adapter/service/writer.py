"""The writer of a node's history: it takes what engines leave in the spool, puts it
into the store, and publishes generations that the engines map. `service.node` runs it
as a Ray actor, `service.local` as a process of its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from das_adapter.config import HistoryConfig
from das_adapter.core.history import HistoryRules
from das_adapter.core.index.errors import IndexFileError
from das_adapter.core.index.private import check_owner, make_private
from das_adapter.core.index.store import HistoryStore
from das_adapter.protocol.messages import Trajectory, unpack
from das_adapter.protocol.spool import (
    BATCH,
    FOLDER,
    GRACE_S,
    TEXTS,
    USERS,
    places,
    room,
    size_of,
)
from das_adapter.service import janitor

logger = logging.getLogger("das_adapter")

_MOST_FILES = 128
"""Files that wait in the spool until they are published, before all is sealed for that:
every look lists them.
"""


class Writer:
    """The one writer of a directory. A file of the spool is removed when its texts are
    published: one that is left by a writer that was killed is taken again, without the
    texts that are published. Any thread may call.
    """

    def __init__(
        self,
        config: HistoryConfig,
        directory: Path,
        grace_s: float = GRACE_S,
        beside: int = 0,
    ):
        """Take over the history that an earlier writer left in the directory, or begin
        one; `beside`: see `room`. Raises as `HistoryStore`.
        """
        self.policy = HistoryRules(config)
        self.lock = threading.RLock()
        """Of texts on their way, from `read` to `keep`; held for a moment."""
        self.altered = False
        """Whether the store was changed by something else than texts, which is to be
        published.
        """
        self._grace_s = grace_s
        self._beside = beside
        for place in places():
            janitor.sweep(place, besides=directory.name)
        self._kept: list[str] = []
        """Files whose texts the store has, and may not have published."""
        self._done_with: deque[str] = deque(maxlen=2**12)
        """Files that are published: one that comes again, since an answer was lost, is
        dropped.
        """
        self._trouble, self._grown = "", False
        """The last error since something was published; whether the byte budget is to
        be looked at since then.
        """
        try:
            self.store = self._opened(directory)
        except IndexFileError as error:
            self._begin_anew(directory, error)
        self._found = (
            {path.name for path in self.waiting(BATCH, TEXTS)}
            if self.store.tokens
            else set()
        )
        """Files that an earlier writer left: it may have published some of their
        texts.
        """

    @property
    def directory(self) -> Path:
        """Where engines leave what they wrote, and find what is published."""
        return self.store.directory

    def waiting(self, *kinds: str) -> list[Path]:
        """Return the files of some kinds that wait in the spool, in order."""
        found = sorted((self.directory / FOLDER).iterdir())
        return [
            path
            for path in found
            if path.name.partition("-")[0] in kinds and path.suffix != ".tmp"
        ]

    def read(self) -> list[tuple[str, list[Trajectory]]]:
        """Return the files that have arrived, with their trajectories, for `keep`,
        until which the caller holds `lock`; a file that is damaged is dropped, with a
        line in the log.
        """
        found = []
        kept = {*self._kept}
        done_with = {*self._done_with}
        for path in self.waiting(BATCH, TEXTS):
            if path.name in done_with:
                path.unlink(missing_ok=True)
            elif path.name not in kept:
                try:
                    found.append((path.name, unpack(path.read_bytes())))
                except (OSError, ValueError) as error:
                    path.unlink(missing_ok=True)
                    self.report(error)
        return found

    def keep(self, file: str, texts: Sequence[Trajectory]) -> None:
        """Put texts of a file into the store."""
        with self.lock:
            if file in self._found:
                texts = [
                    text for text in texts if not self.policy.has(self.store, text)
                ]
            self.policy.add_trajectories(self.store, texts)
            self._kept.append(file)
            if not texts:  # they go elsewhere, or are published
                self._done([file])

    def work(self, seconds: float) -> bool:
        """Do for so long what waits for no weight sync: seal what was kept, merge, and
        keep to room and byte budget; return whether there is more.
        """
        until = time.monotonic() + seconds
        more = True
        crowded = len(self._kept) >= _MOST_FILES
        with self._anew_where_damaged():
            while more and time.monotonic() < until:
                if self._grown:  # thinning merges as well: no problem is written twice
                    left = room(self.directory, self._beside, size_of(self.directory))
                    self._grown = False  # before, since others may publish meanwhile
                    if self.policy.shrink_slice(self.store, left):
                        self._grown = True
                else:
                    more = self.store.work(self.policy.window, every=crowded)
                time.sleep(0.001)  # whoever waits for the store has its turn
        if crowded and not self.store.staged:
            self.publish()
        return more

    def publish(self, tokens: int = 2**62) -> int:
        """Publish what was kept, of what is not sealed yet about so many tokens at
        most; return how many it sealed.
        """
        with self.lock:
            if tokens <= 0 or not (self._kept or self.altered or self._trouble):
                return 0
            staged = self.store.staged
            with self._anew_where_damaged():
                self.store.seal(self.policy.window, tokens)
                self.altered = False
                self._trouble = ""
                self._grown = True
                if not self.store.staged:
                    self._done([*self._kept])
            return staged - self.store.staged

    def restore(self) -> None:
        """Publish the history again if files were removed; what is mapped stays
        readable here.
        """
        if self.store.intact:
            return
        logger.error(
            "das: history: files in %s were removed; it is published anew",
            self.directory,
        )
        with self.lock, self._anew_where_damaged():
            self.store.close()
            _remove_files(self.directory)
            store = self._opened(self.directory)
            try:
                # the janitor removes it if this process is killed
                saved = store.directory / "restored.tmp"
                self.store.save(saved, self.policy.window)
                store.absorb(saved)
                saved.unlink()
                self.store = store
            except BaseException:
                store.close()
                raise
            self.altered = True

    def report(self, error: Exception) -> None:
        """Log an error once, until something is published."""
        if self._trouble != repr(error):
            logger.error(
                "das: history: %r; engines go on with what is published", error
            )
        self._trouble = repr(error)

    @contextmanager
    def _anew_where_damaged(self) -> Iterator[None]:
        try:
            yield
        except IndexFileError as error:
            with self.lock:
                self.store.close()
                self._begin_anew(self.directory, error)

    def _begin_anew(self, directory: Path, error: IndexFileError) -> None:
        """Begin a damaged history anew where it lies, with a line in the log; what
        engines left is read again.
        """
        check_owner(directory)
        logger.error("das: history: %s; the history begins anew", error)
        _remove_files(directory)
        self.store = self._opened(directory)
        self._kept = []
        self._found = set()
        self.altered = True

    def _done(self, files: Sequence[str]) -> None:
        for file in files:
            (self.directory / FOLDER / file).unlink(missing_ok=True)
            self._kept.remove(file)
            self._done_with.append(file)

    def _opened(self, directory: Path) -> HistoryStore:
        store = HistoryStore(directory)
        make_private(directory / FOLDER)
        janitor.watch(directory, self._grace_s)
        logger.warning("das: the history lies in %s", directory)
        return store


def _remove_files(directory: Path) -> None:
    """Remove a history; what engines left, and their lock, stay."""
    for path in directory.glob("*"):
        if path.is_file() and path.name != USERS:
            path.unlink(missing_ok=True)
