"""What a node sends to another: texts of problems at home there."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable

import ray

from das_adapter.protocol.messages import Trajectory, pack
from das_adapter.service.writer import Writer

logger = logging.getLogger("das_adapter")

LARGE = 16 << 20
"""Bytes of text that do not wait for the next weight sync; a message has as many, or a single text."""


class Outbox:
    """Texts for the history of one other node. One message is on its way at a time; it is sent again until it is in
    that history's spool, and dropped there if it had arrived."""

    def __init__(self, peer: str, writer: Writer) -> None:
        self.peer = peer
        self._writer = writer
        self._lock = threading.Lock()
        """Of the texts."""
        self._texts: deque[tuple[str, Trajectory]] = deque()
        """Each with the file of the spool that it comes from."""
        self._bytes = 0
        self._due = False
        self._message: list[tuple[str, Trajectory]] = []
        self._call: ray.ObjectRef | None = None

    def add(self, file: str, texts: Iterable[Trajectory]) -> None:
        """Take texts of a file of the spool."""
        with self._lock:
            for text in texts:
                self._texts.append((file, text))
                self._bytes += len(text.tokens)

    def post(self) -> None:
        """Let what is there be sent without waiting for more."""
        self._due = bool(self._texts)

    def work(self) -> None:
        """See whether the message on its way has arrived, and send the next one if it is due or large."""
        if self._call is not None and not self._arrived(self._call):
            return
        if not self._message and (self._due or self._bytes > LARGE):
            self._next()
        if self._message:
            try:
                content = pack([text for _, text in self._message])
                self._call = ray.get_actor(self.peer).receive.remote(content)
            except (ValueError, ray.exceptions.RayError) as error:  # it ended, or there is no room for the message
                logger.warning("das: history: texts for %s are sent later: %r", self.peer, error)

    def left(self) -> dict[str, list[Trajectory]]:
        """Return the texts that may not have arrived, by file."""
        found: dict[str, list[Trajectory]] = {}
        with self._lock:
            for file, text in (*self._message, *self._texts):
                found.setdefault(file, []).append(text)
        return found

    def _arrived(self, call: ray.ObjectRef) -> bool:
        """Whether the message on its way has an answer; one that did not arrive is sent again."""
        if not ray.wait([call], timeout=0)[0]:
            return False
        self._call = None
        try:
            ray.get(call)
        except ray.exceptions.RayError as error:
            logger.warning("das: history: texts did not reach %s and are sent again: %r", self.peer, error)
            return True
        with self._lock:
            files = {file for file, _ in self._message} - {file for file, _ in self._texts}
            self._message = []
        self._writer.spool.done(files, self.peer)
        return True

    def _next(self) -> None:
        with self._lock:
            size = 0
            while self._texts and (not size or size + len(self._texts[0][1].tokens) <= LARGE):
                self._message.append(self._texts.popleft())
                size += len(self._message[-1][1].tokens)
            self._bytes -= size
            self._due = self._due and bool(self._texts)
