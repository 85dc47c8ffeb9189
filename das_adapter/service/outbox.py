"""What a node sends to another: texts of problems at home there."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np
import ray

from das_adapter.protocol.messages import Trajectory, pack
from das_adapter.protocol.spool import TEXTS
from das_adapter.service.writer import Writer

logger = logging.getLogger("das_adapter")

LARGE = 16 << 20
"""Bytes of text that do not wait for the next weight sync; a message has as many, or a single text."""


class Outbox:
    """Texts for the history of one other node, in order. One message is on its way at a time; what did not arrive is
    sent again, and the other history drops what it had."""

    def __init__(self, peer: str, writer: Writer) -> None:
        self.texts: list[tuple[str, Trajectory]] = []
        """Texts that may not have arrived, each with the file of the spool that it comes from."""
        self._peer, self._writer = peer, writer
        self._due = 0
        """Texts that wait for no others."""
        self._sent = 0
        """Texts of the message on its way."""
        self._call: ray.ObjectRef | None = None

    def add(self, file: str, texts: Iterable[Trajectory]) -> None:
        """Take texts of a file of the spool."""
        with self._writer.lock:
            self.texts += [(file, text) for text in texts]

    def post(self) -> None:
        """Let what is there be sent without waiting for more."""
        self._due = len(self.texts)

    def work(self) -> None:
        """See whether the message on its way has arrived, and send the next one if it is due or large."""
        try:
            if self._call is not None and ray.wait([self._call], timeout=0)[0]:
                call, self._call = self._call, None
                ray.get(call)
                self._arrived()
            texts = [text for _, text in self.texts]
            ends = np.cumsum([len(text.tokens) for text in texts])
            if self._call is None and texts and (self._due > 0 or ends[-1] > LARGE):
                self._sent = max(1, int(np.searchsorted(ends, LARGE, side="right")))
                self._call = ray.get_actor(self._peer).receive.remote(TEXTS, pack(texts[: self._sent]))
        except (ValueError, ray.exceptions.RayError) as error:  # it ended, or there is no room for the message
            logger.warning("das: history: texts did not reach %s and are sent again: %r", self._peer, error)

    def _arrived(self) -> None:
        with self._writer.lock:
            arrived, self.texts = self.texts[: self._sent], self.texts[self._sent :]
            self._due -= self._sent
            self._writer.spool.done({file for file, _ in arrived} - {file for file, _ in self.texts}, self._peer)
