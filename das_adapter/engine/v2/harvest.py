"""What the requests of an engine on the V2 runner have written, where no host keeps it: their text is on the device,
and comes to the host in the outputs of steps."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from das_adapter.engine.requests import LiveRequest
from das_adapter.engine.standalone.worker import Response


class Harvest:
    """The responses that are being written. Outputs come in one thread, steps begin in another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writing: dict[str, tuple[LiveRequest, list[int]]] = {}

    def begin(self, request: LiveRequest, text: list[int]) -> None:
        """Take a request that joins the batch, or comes back to it, and what its response contains already."""
        with self._lock:
            self._writing[request.req_id] = replace(request), text

    def output(self, req_ids: Sequence[str], sampled: Sequence[Sequence[int]]) -> None:
        """Take the tokens that each request of a step got; under asynchronous scheduling a step may follow its end."""
        with self._lock:
            for req_id, tokens in zip(req_ids, sampled, strict=False):
                if tokens and req_id in self._writing:
                    request, text = self._writing[req_id]
                    text += () if request.ended else tokens[: request.take(tokens)]

    def take(self, req_id: str) -> Response | None:
        """Return the response of a request that is over, and forget it; None: it is not known."""
        with self._lock:
            found = self._writing.pop(req_id, None)
        if found is None:
            return None
        request, text = found
        return Response(request.problem, request.record, np.array(text, dtype=np.int32))
