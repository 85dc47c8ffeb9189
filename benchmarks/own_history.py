"""A suffix index with a history of its own, for a replay in one process."""

from __future__ import annotations

import shutil
import tempfile
import weakref

from das_adapter.core.index import SuffixIndex
from das_adapter.core.index.store import HistoryStore
from das_adapter.core.index.values import ALL, Tokens


class OwnHistory(SuffixIndex):
    """Maps what its own store publishes, merged as a node's history is in time."""

    def __init__(self, others_tokens: int = 0) -> None:
        """`others_tokens`: see `HistoryStore`."""
        super().__init__()
        folder = tempfile.mkdtemp(prefix="das-own-")
        self.store = HistoryStore(folder, others_tokens=others_tokens)
        self.map(self.store.directory)
        weakref.finalize(self, _remove, self.store)

    def add(self, problem: int, tokens: Tokens, version: int) -> None:
        self.store.add(problem, tokens, version)

    def seal(self, window: int = ALL) -> None:
        """Draft from what was added, from now on; `window`: visits that each problem
        keeps.
        """
        self.store.window = window
        self.store.seal()
        while self.store.work():
            pass
        self.refresh()

    def shrink(self, max_bytes: int) -> None:
        """Thin the history out until `nbytes` <= `max_bytes`."""
        while self.store.nbytes > max_bytes:
            self.store.shrink(max_bytes)
        self.refresh()


def _remove(store: HistoryStore) -> None:
    store.close()
    shutil.rmtree(store.directory)
