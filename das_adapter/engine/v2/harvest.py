"""What the requests of an engine on the V2 runner have written, where no host keeps it: their text is on the device,
and comes to the host in the outputs of steps."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from das_adapter.engine.standalone.worker import Response


@dataclass
class Writing:
    """A request that is being written."""

    problem: int
    record: bool
    """Whether its text may serve as history."""
    room: int
    """Tokens of its response at most."""
    stops: frozenset[int]
    """Tokens that end it."""
    text: list[int]
    """Of its response."""
    ended: bool = False

    def extend(self, tokens: Sequence[int]) -> None:
        """Append what a step has sampled, up to its end: under asynchronous scheduling a step may follow it."""
        for token in tokens:
            if self.ended or len(self.text) >= self.room:
                return
            self.text.append(token)
            self.ended = token in self.stops


class Harvest:
    """The responses that are being written. Outputs come in one thread, steps begin in another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writing: dict[str, Writing] = {}

    def begin(self, req_id: str, writing: Writing) -> None:
        """Take a request that joins the batch, or comes back to it."""
        with self._lock:
            self._writing[req_id] = writing

    def output(self, req_ids: Sequence[str], sampled: Sequence[Sequence[int]]) -> None:
        """Take the tokens that each request of a step got."""
        with self._lock:
            for req_id, tokens in zip(req_ids, sampled, strict=False):
                if writing := self._writing.get(req_id):
                    writing.extend(tokens)

    def take(self, req_id: str) -> Response | None:
        """Return the response of a request that is over, and forget it; None: it is not known."""
        with self._lock:
            writing = self._writing.pop(req_id, None)
        if writing is None:
            return None
        return Response(writing.problem, writing.record, np.array(writing.text, dtype=np.int32))
