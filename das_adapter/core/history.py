"""The rules of the history: whose text a request drafts from, and how long it is
kept.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable

import numpy as np

from das_adapter.config import HistoryConfig
from das_adapter.core import tuning
from das_adapter.core.index.store import HistoryStore
from das_adapter.core.index.values import ALL, FilePath, Shrunk

logger = logging.getLogger("das_adapter")

FinishedText = tuple[int, bytes, int] | tuple[int, bytes, int, bytes]
"""A finished trajectory: problem, int32 token ids of the response, weight version that
wrote it; what follows is not read.
"""


class HistoryRules:
    """The rules that the `history:` block asks for."""

    def __init__(
        self, config: HistoryConfig, window: int = tuning.HISTORY_WINDOW
    ) -> None:
        self.config = config
        self.window = window
        if config.scope == "global":
            self.window = ALL
        """Visits of a problem that are kept. With `global` there is one problem, which
        every step visits: bytes are the limit there.
        """
        self.others_tokens = 0
        """Tokens of the texts that requests of all problems draft from, at most."""
        if config.others == "auto" and config.scope in ("problem", "trusted"):
            affordable = config.max_bytes // tuning.OTHERS_BYTES
            self.others_tokens = min(tuning.OTHERS_TOKENS, affordable)
        self._alone = itertools.count(1)
        self._shrunk = np.zeros(4, np.int64)
        """Sum of what the slices of `shrink_slice` did, int64 [4] as `Shrunk`."""

    def store(self, directory: FilePath) -> HistoryStore:
        """Open the store of a directory; see `HistoryStore`."""
        return HistoryStore(directory, self.window, self.others_tokens)

    @property
    def keeps_texts(self) -> bool:
        """Whether rollouts outlive their request: there is a history to share, to save
        and to map.
        """
        return self.config.scope != "request"

    def key(self, problem: int) -> int:
        """Return the key of a problem's text in the history: requests of one key draft
        from each other.
        """
        if self.config.scope == "request":
            return next(self._alone)
        if self.config.scope == "global":
            return 0
        return problem

    def add_and_seal(
        self, store: HistoryStore, trajectories: Iterable[FinishedText]
    ) -> None:
        """Add finished trajectories, and seal them: the visits of their problems
        beyond the window are dropped. Arguments as in `add_trajectories`.
        """
        self.add_trajectories(store, trajectories)
        store.seal()

    def add_trajectories(
        self, store: HistoryStore, trajectories: Iterable[FinishedText]
    ) -> None:
        """Add finished trajectories. One that can't be a text of a policy is left out,
        and a line in the log says so.
        """
        refused: list[str] = []
        for trajectory in trajectories:
            try:
                problem, text, version, *_ = trajectory
                key = self.key(problem)
                tokens = np.frombuffer(text, dtype=np.int32)
                store.add(key, tokens, version)
            except (TypeError, ValueError) as error:
                refused.append(repr(error))
        if refused:
            logger.error(
                "das: history: %d trajectories are no text of the policy and left out,"
                " the first because of %s",
                len(refused),
                refused[0],
            )

    def has(self, store: HistoryStore, trajectory: FinishedText) -> bool:
        """Return whether a trajectory is sealed in a store; see `add_trajectories`."""
        problem, text, version, *_ = trajectory
        if len(text) % 4:
            return False
        key = self.key(problem)
        tokens = np.frombuffer(text, dtype=np.int32)
        return store.has(key, tokens, version)

    def shrink_slice(self, store: HistoryStore, room: float = math.inf) -> bool:
        """Do a slice of thinning out what exceeds the byte budget; return whether there
        is more. The log says at the end what went. `room`: bytes that the store's files
        may take, which are at most four times as many as the history's: engines map
        three generations, and the next is written.
        """
        quarter = max(0.0, room / 4)
        max_bytes = self.config.max_bytes
        budget = int(min(max_bytes, quarter))
        self._shrunk += store.shrink(budget)
        if store.nbytes > budget:
            return True
        shrunk = Shrunk(*self._shrunk.tolist())
        self._shrunk = np.zeros_like(self._shrunk)
        if shrunk.tokens:
            full = "das.history.max_bytes"
            if quarter < max_bytes:
                full = f"a quarter of {store.directory}"
            logger.warning(
                "das: history: above %s=%d: %d of %d tokens were dropped; %d problems"
                " were thinned out, %d forgotten",
                full,
                budget,
                shrunk.tokens,
                shrunk.tokens + store.tokens,
                shrunk.thinned,
                shrunk.dropped,
            )
        return False
