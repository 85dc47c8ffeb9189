"""The writer of a node's history: it takes what engines leave in the spool, puts it
into the store, and publishes generations that the engines map. `service.node` runs it
as a Ray actor, `service.local` as a process of its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from das_adapter.config import HistoryConfig
from das_adapter.core import tuning
from das_adapter.core.history import HistoryRules
from das_adapter.core.index.errors import IndexFileError
from das_adapter.core.index.private import check_owner, make_private
from das_adapter.core.index.store import HistoryStore
from das_adapter.errors import DasError
from das_adapter.files import parse_or_skip
from das_adapter.protocol.messages import Trajectory, unpack
from das_adapter.protocol.spool import (
    AWAY,
    BATCH,
    FOLDER,
    GRACE_S,
    TEXTS,
    USERS,
    available_bytes,
    bytes_on_disk,
    history_roots,
)
from das_adapter.service import janitor
from das_adapter.service.prompts import Prompt, Prompts
from das_adapter.trouble import log_once

logger = logging.getLogger("das_adapter")

_MAX_WAITING_FILES = 128
"""Files that wait in the spool until they are published, before all is sealed for that:
every look lists them.
"""
_PROMPTS = "prompts"
"""File of the prompts in a history's directory."""
_PUBLISHED_FILES = 2**12
"""Files of which the writer knows that they are published, the last ones."""
_PARTS = {AWAY: 3}
"""Parts of the names of files of a kind, between dashes; others have two at least."""
_YIELD_S = 0.001
"""How long background work pauses after each slice."""


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
        object_store_bytes: int = 0,
    ):
        """Take over the history that an earlier writer left in the directory, or begin
        one; `object_store_bytes`: see `available_bytes`. Raises as `HistoryStore`.
        """
        self.rules = HistoryRules(config)
        self.lock = threading.RLock()
        """Guards texts on their way, from `read_files` to `keep_texts`; held for a
        moment.
        """
        self.altered = False
        """Whether the store was changed by something else than texts, which is to be
        published.
        """
        self._grace_s = grace_s
        self._object_store_bytes = object_store_bytes
        for root in history_roots():
            janitor.sweep(root, besides=directory.name)
        self._kept: list[str] = []
        """Files whose texts the store has, and may not have published."""
        self._published = deque[str](maxlen=_PUBLISHED_FILES)
        """Files that are published: one that comes again, since an answer was lost, is
        dropped.
        """
        self._has_failed = False
        """Whether something went wrong since something was published."""
        self._stuck = set[str]()
        """Names in the spool that are no files and can't be removed."""
        self._may_exceed = False
        """Whether the byte budget is to be looked at since something was published."""
        try:
            self.store = self._open_store(directory)
        except IndexFileError as error:
            self._begin_anew(directory, error)
        self.prompts = Prompts(
            self.directory / _PROMPTS, config.max_bytes // tuning.PROMPTS_SHARE
        )
        """Prompts of the problems, for those who train drafters."""
        self._left_before = set[str]()
        """Files that an earlier writer left: it may have published some of their
        texts.
        """
        if self.store.tokens:
            for path in self.waiting_files(BATCH, TEXTS):
                self._left_before.add(path.name)

    @property
    def directory(self) -> Path:
        """Where engines leave what they wrote, and find what is published."""
        return self.store.directory

    def waiting_files(self, *kinds: str) -> list[Path]:
        """Return the files of some kinds that wait in the spool, in order."""
        folder = self.directory / FOLDER
        found = []
        paths = sorted(folder.iterdir())
        self._stuck &= {path.name for path in paths}
        for path in paths:
            parts = path.name.split("-")
            kind = parts[0]
            if kind not in kinds or path.suffix == ".tmp" or path.name in self._stuck:
                continue
            if len(parts) >= _PARTS.get(kind, 2):
                found.append(path)
            else:
                log_once(f"das: history: left out, for its name: {path}")
                self.drop(path)
        return found

    def drop(self, path: Path) -> None:
        """Remove what is no file of the spool, or look at it no more."""
        try:
            path.unlink(missing_ok=True)
        except OSError:  # a directory, say
            self._stuck.add(path.name)

    def read_files(self) -> list[tuple[str, list[Trajectory]]]:
        """Return the files that have arrived, with their trajectories, for
        `keep_texts`, until which the caller holds `lock`; a file that is damaged is
        dropped, with a line in the log.
        """
        found = []
        kept = set(self._kept)
        published = set(self._published)
        for path in self.waiting_files(BATCH, TEXTS):
            file = path.name
            if file in published:
                path.unlink(missing_ok=True)
            elif file not in kept:
                texts = parse_or_skip(path, unpack, "das: history: left out:")
                if texts is None:
                    self.drop(path)
                else:
                    found.append((file, texts))
        return found

    def keep_texts(self, file: str, texts: Sequence[Trajectory]) -> None:
        """Put texts of a file into the store, and keep the prompts that came along."""
        self.keep_prompts((text.problem, text.prompt) for text in texts)
        with self.lock:
            if file in self._left_before:
                texts = [text for text in texts if not self.rules.has(self.store, text)]
            self.rules.add_trajectories(self.store, texts)
            self._kept.append(file)
            if not texts:  # they go elsewhere, or are published
                self._remove_published([file])

    def keep_prompts(self, prompts: Iterable[Prompt]) -> None:
        """Keep prompts of problems; where that fails, a line in the log says so, and
        their next visits bring them again.
        """
        try:
            self.prompts.add(prompts)
        except OSError as error:
            log_once("das: history: prompts are not kept", error)

    def work(self, seconds: float) -> bool:
        """Do for so long what waits for no weight sync: seal what was kept, merge, and
        keep to room and byte budget; return whether there is more.
        """
        until = time.monotonic() + seconds
        more = True
        crowded = len(self._kept) >= _MAX_WAITING_FILES
        with self._anew_where_damaged():
            while more and time.monotonic() < until:
                if self._may_exceed:
                    # thinning merges as well: no problem is written twice
                    self._thin_out()
                else:
                    more = self.store.work(every=crowded)
                time.sleep(_YIELD_S)  # whoever waits for the store has its turn
        if crowded and not self.store.staged:
            self.publish()
        return more

    def _thin_out(self) -> None:
        """Do a slice of thinning out what exceeds room or byte budget."""
        held_bytes = bytes_on_disk(self.directory)
        room = available_bytes(self.directory, self._object_store_bytes, held_bytes)
        room -= self.prompts.nbytes
        self._may_exceed = False  # before, since others may publish meanwhile
        if self.rules.shrink_slice(self.store, room):
            self._may_exceed = True

    def publish(self, tokens: int = 2**62) -> int:
        """Publish what was kept, of what is not sealed yet about so many tokens at
        most; return how many it sealed.
        """
        with self.lock:
            changed = self._kept or self.altered or self._has_failed
            if tokens <= 0 or not changed:
                return 0
            staged_before = self.store.staged
            with self._anew_where_damaged():
                self.store.seal(tokens)
                self.altered = False
                self._has_failed = False
                self._may_exceed = True
                if not self.store.staged:
                    self._remove_published(list(self._kept))
            return staged_before - self.store.staged

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
            store = self._open_store(self.directory)
            try:
                # the janitor removes it if this process is killed
                saved = store.directory / "restored.tmp"
                self.store.save(saved)
                store.absorb(saved)
                saved.unlink()
                self.store = store
            except BaseException:
                store.close()
                raise
            self.altered = True

    def report(self, error: Exception) -> None:
        """Log an error, each once within a minute."""
        self._has_failed = True
        end = "; engines go on with what is published"
        log_once("das: history", error, end)

    @contextmanager
    def _anew_where_damaged(self) -> Iterator[None]:
        """Begin the history anew if a file of it turns out to be damaged."""
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
        self.store = self._open_store(directory)
        self._kept = []
        self._left_before = set()
        self.altered = True

    def _remove_published(self, files: Sequence[str]) -> None:
        """Remove files of the spool whose texts are published."""
        folder = self.directory / FOLDER
        for file in files:
            path = folder / file
            path.unlink(missing_ok=True)
            self._kept.remove(file)
            self._published.append(file)

    def _open_store(self, directory: Path) -> HistoryStore:
        store = self.rules.store(directory)
        make_private(directory / FOLDER)
        try:
            janitor.watch(directory, self._grace_s)
        except (DasError, OSError) as error:
            log_once(f"das: history: nobody will remove {directory}", error)
        logger.warning("das: the history lies in %s", directory)
        return store


def _remove_files(directory: Path) -> None:
    """Remove a history; its prompts, what engines left, and their lock, stay."""
    for path in directory.glob("*"):
        if path.is_file() and path.name not in (USERS, _PROMPTS):
            path.unlink(missing_ok=True)
