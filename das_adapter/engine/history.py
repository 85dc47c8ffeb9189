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
        self._rules = HistoryRules(config)
        self.index = SuffixIndex(others=self._rules.others_tokens > 0)
        self._vocabulary = vocabulary
        self._directory = ""
        """Directory of the history that the index maps; empty: none yet."""
        self._num_requests = 0
        """Requests since the last `stats` that may be recorded."""
        self._num_hits = 0
        """Requests since the last `stats` that found sealed history of their
        problem.
        """
        self._lacking: set[int] = set()
        """Slots of the requests that have found no sealed history yet."""
        self._handles = EMPTY_INTS
        """Handle of each request in the index, by slot."""
        self._lengths = EMPTY_INTS
        """Tokens of each request that the index knows of, prompt included, by slot."""
        self._search: Any = None
        """The search that was begun last."""

    def open(
        self,
        live: LiveRequest,
        prompt: np.ndarray,
        text: np.ndarray,
    ) -> None:
        """Open a request that begins: int32 token ids of its prompt, and of all its
        text so far.
        """
        key = self._rules.key(live.problem)
        before = prompt[: live.start]
        response = text[live.start :]
        handle = self.index.open(key, before, prefix=response, ahead=live.ahead)
        slot = live.slot
        if live.record and self._rules.keeps_texts:
            self._num_requests += 1
            if self.index.age(handle) is None:
                self._lacking.add(slot)
            else:
                self._num_hits += 1
        self._handles = with_slots(self._handles, slot + 1)
        self._lengths = with_slots(self._lengths, slot + 1)
        self._handles[slot] = handle
        self._lengths[slot] = len(text)

    def close(self, live: LiveRequest) -> None:
        """Close a request. Its siblings go on drafting from what it wrote, if it may be
        recorded, until `refresh`.
        """
        self._lacking.discard(live.slot)
        handle = int(self._handles[live.slot])
        self.index.close(handle, keep=live.record and self._rules.keeps_texts)

    def begin_search(
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
        self._search = self.index.draft_rows(
            handles, tokens, rows, lengths, written, *search
        )
        self._lengths[slots] = written

    def found_drafts(self) -> tuple[Chances, Ints]:
        """Wait for the search; return what it found, as `DraftPolicy.choose`
        takes it.
        """
        _, chances, offsets = self._search.result()
        return chances, offsets

    def put_drafts(
        self,
        rows: np.ndarray,
        keep: np.ndarray,
        drafts: list[list[int]],
    ) -> None:
        """Put the first `keep` tokens of each draft found, int64 [requests], into the
        batch's `drafts`.
        """
        # The history does not know the vocabulary; the policy must be able to read
        # whatever was found there.
        self._search.put(rows, keep, self._vocabulary - 1, drafts)

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
        self.index.forget_chances()
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
        for slot in list(self._lacking):
            if self.index.age(int(self._handles[slot])) is not None:
                self._num_hits += 1
                self._lacking.remove(slot)

    def stats(self) -> dict[str, Any]:
        """Return the figures of the history, those of requests since the last call."""
        num_requests = self._num_requests
        num_hits = self._num_hits
        self._num_requests = 0
        self._num_hits = 0
        num_bytes = 0
        if self._directory:
            num_bytes = bytes_on_disk(Path(self._directory))
        return {
            "history_tokens": self.index.tokens,
            "history_bytes": num_bytes,
            "live_bytes": self.index.live_bytes,
            "history_requests": num_requests,
            "history_hits": num_hits,
        }
