"""Draft tokens from the history: a problem's rollouts, its live siblings, and the
request's own text.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from das_adapter.config import HistoryConfig
from das_adapter.core.history import HistoryRules
from das_adapter.core.index import IndexFileError, SuffixIndex
from das_adapter.core.requests import EMPTY_INTS, with_slots
from das_adapter.core.steps import Chances, Ints, Search
from das_adapter.engine.requests import LiveRequest
from das_adapter.protocol.messages import Refresh
from das_adapter.protocol.spool import bytes_on_disk

logger = logging.getLogger("das_adapter")


class HistorySource:
    """The suffix index of an engine, over the history of its node."""

    def __init__(self, config: HistoryConfig, vocabulary: int):
        self.index = SuffixIndex()
        self._policy = HistoryRules(config)
        self._vocabulary = vocabulary
        self._directory = ""
        """Directory of the history that the index maps; empty: none yet."""
        self._begun = self._hits = 0
        """Requests that may be recorded, and those of them that found sealed history of
        their problem.
        """
        self._lacking: set[int] = set()
        """Slots of those that have found none yet."""
        self._handles = self._lengths = EMPTY_INTS
        """By slot: of the request in the index; tokens that the index knows of, prompt
        included.
        """
        self._looking: Any = None

    def open(self, live: LiveRequest, prompt: np.ndarray, text: np.ndarray) -> None:
        """Take a request that begins: int32 token ids of its prompt, and of all its
        text so far.
        """
        key = self._policy.key(live.problem)
        start = live.start
        handle = self.index.open(
            key, prompt[:start], prefix=text[start:], ahead=live.ahead
        )
        slot = live.slot
        if live.record and self._policy.kept:
            self._begun += 1
            if self.index.age(handle) is None:
                self._lacking.add(slot)
            else:
                self._hits += 1
        self._handles, self._lengths = (
            with_slots(column, slot + 1) for column in (self._handles, self._lengths)
        )
        self._handles[slot] = handle
        self._lengths[slot] = len(text)

    def close(self, live: LiveRequest) -> None:
        """Close a request; what it wrote stays available to its siblings, if it may be
        recorded.
        """
        self._lacking.discard(live.slot)
        self.index.close(
            int(self._handles[live.slot]), keep=live.record and self._policy.kept
        )

    def look(
        self,
        slots: np.ndarray,
        rows: np.ndarray,
        written: np.ndarray,
        tokens: np.ndarray,
        search: Search,
    ) -> None:
        """Begin to draft for some requests, given their slots, their rows of the batch
        and the lengths `written`, int64 [requests] each; `tokens` as in
        `Proposer.propose`.
        """
        handles = self._handles[slots]
        lengths = self._lengths[slots]
        self._looking = self.index.draft_rows(
            handles, tokens, rows, lengths, written, *search
        )
        self._lengths[slots] = written

    def found(self) -> tuple[Chances, Ints]:
        """Return what was found, as `DraftPolicy.choose` takes it."""
        _, chances, offsets = self._looking.result()
        return chances, offsets

    def take(self, rows: np.ndarray, keep: np.ndarray, drafts: list[list[int]]) -> None:
        """Put the first `keep` tokens of each draft found, int64 [requests], into the
        batch's `drafts`.
        """
        # The history does not know the vocabulary; the policy must be able to read
        # whatever was found there.
        self._looking.put(rows, keep, self._vocabulary - 1, drafts)

    def refresh(self, message: Refresh) -> int:
        """Map what a service has published; if that fails, what is mapped stays. Return
        the generation (0: none).
        """
        try:
            if message.history is not None:
                directory, generation = message.history
                if directory != self._directory:
                    self.index.map(directory)
                self._directory = directory
                try:
                    self.index.refresh(generation)
                except FileNotFoundError:  # this engine is late: the generation is gone
                    self.index.refresh()
        except (OSError, IndexFileError) as error:
            logger.error(
                "das: history: not mapped: %r; drafts come from generation %s",
                error,
                self.index.generation,
            )
        self.index.clear_live()
        return self.index.generation

    def map_guest_history(self, files: Sequence[str]) -> None:
        """Map files with the history of problems that are at home on other nodes;
        requests draft from it at once. They keep it until the weight sync that finds
        none of them.
        """
        for file in files:
            try:
                self.index.map_guest_history(file)
            except (OSError, IndexFileError) as error:
                logger.warning(
                    "das: history: a problem's history from another node was not"
                    " mapped: %r",
                    error,
                )
        found = {
            slot
            for slot in self._lacking
            if self.index.age(int(self._handles[slot])) is not None
        }
        self._hits += len(found)
        self._lacking -= found

    def stats(self) -> dict[str, Any]:
        """Return the figures of the history."""
        requests = self._begun
        hits = self._hits
        self._begun = 0
        self._hits = 0
        return {
            "history_tokens": self.index.tokens,
            "history_bytes": bytes_on_disk(Path(self._directory))
            if self._directory
            else 0,
            "live_bytes": self.index.live_bytes,
            "history_requests": requests,
            "history_hits": hits,
        }
