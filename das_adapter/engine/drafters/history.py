"""Draft tokens from the history: a problem's rollouts, its live siblings, and the request's own text."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from das_adapter.config import HistoryConfig
from das_adapter.core.history import HistoryPolicy
from das_adapter.core.index import IndexFileError, SuffixIndex
from das_adapter.core.returns import Returns
from das_adapter.core.siblings import Siblings
from das_adapter.core.staleness import Staleness, bracket
from das_adapter.engine.drafters.base import LiveRequest
from das_adapter.protocol.messages import Published, Refresh

logger = logging.getLogger("das_adapter")


@dataclass(slots=True)
class _Known:
    """A request in the index."""

    handle: int
    length: int
    """Tokens the index knows of, prompt included."""
    age: int
    """Age of its problem's history when it began, see `staleness.bracket`."""
    finished: int
    """Siblings that had finished when it began."""
    lacks: int | None
    """The problem whose history it is counted as not having found."""


class HistorySource:
    """The suffix index of an engine, over its own history or a node's."""

    def __init__(self, config: HistoryConfig, vocabulary: int):
        self.index = SuffixIndex()
        self._policy = HistoryPolicy(config)
        self._vocabulary = vocabulary
        self._directory = ""
        """Directory of the history that a service publishes and the index maps; empty: the index keeps its own."""
        self._staleness = Staleness()
        self._returns = Returns()
        self._siblings = Siblings()
        self._known: dict[str, _Known] = {}
        self._found = np.zeros(0, dtype=np.int32), np.zeros(1, dtype=np.int64)

    def open(self, live: LiveRequest, prompt: np.ndarray, text: np.ndarray) -> None:
        """Take a request that begins: int32 token ids of its prompt, and of all its text so far."""
        key = self._policy.key(live.problem)
        handle = self.index.open(key, prompt[: live.start], prefix=text[live.start :])
        age = self.index.age(handle)
        counted = live.record and self._policy.kept
        if counted:
            self._returns.begin(live.problem, age is not None)
        lacks = live.problem if counted and age is None else None
        self._known[live.req_id] = _Known(handle, len(text), bracket(age), self._siblings.begin(key), lacks)

    def close(self, live: LiveRequest, tokens: float = 0.0, forwards: float = 0.0) -> None:
        """Close a request, with the tokens that it got from so many forward passes; what it wrote stays available to
        its siblings, if it may be recorded."""
        known = self._known.pop(live.req_id)
        self.index.close(known.handle, keep=live.record and self._policy.kept)
        counted = forwards if live.record else 0.0
        self._siblings.end(self._policy.key(live.problem), known.finished, known.age > 0, tokens, counted)

    def verified(self, live: Sequence[LiveRequest], drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Count draft tokens from the history that were verified, and those accepted, int64 [requests] each."""
        self._staleness.count((self._known[request.req_id].age for request in live), drafted, accepted)

    def draft(
        self,
        rows: Sequence[int],
        live: Sequence[LiveRequest],
        lengths: np.ndarray,
        tokens: np.ndarray,
        limits: np.ndarray,
        floor: float,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draft for some requests; see `core.controller.HistoryDrafts`.

        Args:
            rows: of the batch, [requests].
            live: the requests.
            lengths, tokens: of the batch's rows, as in `Drafter.propose`.
            limits: most tokens for each, int64 [requests].
            floor: chance under which a draft ends.
        """
        known = [self._known[request.req_id] for request in live]
        self._extend(known, [tokens[row, k.length : int(lengths[row])] for row, k in zip(rows, known, strict=True)])
        handles = np.array([k.handle for k in known], dtype=np.int64)
        ids, chances, offsets = self.index.draft_flat(handles, limits, floor)
        # A node's history does not know the vocabulary; the policy must be able to read whatever was found there.
        self._found = np.minimum(ids, self._vocabulary - 1), offsets
        return chances, offsets

    def take(self, rows: Sequence[int], keep: np.ndarray, drafts: list[list[int]]) -> None:
        """Put the first `keep` tokens of each draft found, int64 [requests], into the batch's `drafts`."""
        if not keep.any():
            return
        flat, offsets = self._found
        ids = flat.tolist()
        for row, begin, count in zip(rows, offsets.tolist(), keep.tolist(), strict=False):
            drafts[row] = ids[begin : begin + count]

    def refresh(self, message: Refresh) -> int:
        """Bring the history up to date, from a service or with the message's trajectories; return the generation mapped
        (0: none)."""
        if message.history is not None:
            self._map(message.history)
        elif not self._directory and self._policy.kept:
            self._policy.remember(self.index, message.trajectories, self._vocabulary)
            self._policy.tidy(self.index)
        self.index.clear_live()
        self._siblings.clear()
        self._returns.met(message.responses["problem"])
        return self.index.generation

    def visit(self, files: Sequence[str]) -> None:
        """Map files with the history of problems that are at home on other nodes; requests draft from it at once. They
        keep it until the weight sync that finds none of them."""
        for file in files:
            try:
                self.index.visit(file)
            except (OSError, IndexFileError) as error:
                logger.warning("das: history: a problem's history from another node was not mapped: %r", error)
        for known in self._known.values():
            if known.lacks is not None and self.index.age(known.handle) is not None:
                self._returns.arrived(known.lacks)
                known.lacks = None

    def stats(self) -> dict[str, Any]:
        """Return the figures of the history."""
        requests, hits, lost = self._returns.take()
        return {"history_tokens": self.index.tokens, "history_bytes": self.index.nbytes,
                "live_bytes": self.index.live_bytes,
                "history_requests": requests, "history_hits": hits, "history_lost": lost, "lost_because": self._cause(),
                "staleness": self._staleness.take(), "siblings": self._siblings.take()}  # fmt: skip

    def _cause(self) -> str:
        """Say why a problem that comes back probably finds no history, and what to do."""
        limit = self._policy.config.max_bytes
        if self.index.nbytes > limit / 2:
            return f"das.history.max_bytes={limit} is full: raise it"
        return "It could not be kept or mapped: lines that begin with 'das: history:' say more"

    def _extend(self, known: list[_Known], written: list[np.ndarray]) -> None:
        """Give the index what was written since it last drafted."""
        grown = [(k, new) for k, new in zip(known, written, strict=True) if len(new)]
        for k, new in grown:
            k.length += len(new)
        if grown:
            offsets = np.cumsum([0, *(len(new) for _, new in grown)], dtype=np.int64)
            self.index.extend_many([k.handle for k, _ in grown], np.concatenate([new for _, new in grown]), offsets)

    def _map(self, history: Published) -> None:
        """Map what a service has published; if that fails, what is mapped stays."""
        try:
            if not history.directory:
                self.index = SuffixIndex()
            elif history.directory != self._directory:
                self.index.map(history.directory)
            self._directory = history.directory
            if history.directory:
                try:
                    self.index.refresh(history.generation)
                except FileNotFoundError:  # this engine is late: the generation is gone
                    self.index.refresh()
        except (OSError, IndexFileError) as error:
            logger.error("das: history: not mapped: %r; drafts come from generation %s", error, self.index.generation)
