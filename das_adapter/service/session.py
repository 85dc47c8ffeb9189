"""A host's end of the history: what finished goes out, what is published comes back at a weight sync."""

from __future__ import annotations

import logging
import threading
import uuid
from typing import Any

import ray

from das_adapter.config import DasConfig
from das_adapter.service import node
from das_adapter.service.ledger import ledger

logger = logging.getLogger("das_adapter")

PATIENCE_S = 60.0
"""How long a weight sync may wait for the history; after that the engines draft from what they have."""
_ANSWER_S = 25.0
_BATCH, _BATCH_S = 32, 0.5


class History:
    """Of one engine. Sends in batches and never waits for them; a batch counts as sent when a weight sync has found it
    there, and is sent again until then. Any thread may call."""

    def __init__(self, das: DasConfig):
        self._das = das
        self._source = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._batch: list[node.Trajectory] = []
        self._number = 0
        self._sent: dict[int, ray.ObjectRef] = {}
        self._cursor = 0
        self._find()

    def push(self, problem: int, tokens: bytes, version: int) -> None:
        """Hand a finished trajectory over: int32 token ids that a weight version wrote."""
        with self._lock:
            self._batch.append((problem, tokens, version))
            if len(self._batch) >= _BATCH:
                self._flush()
            elif len(self._batch) == 1:
                timer = threading.Timer(_BATCH_S, self.flush)
                timer.daemon = True
                timer.start()

    def flush(self) -> None:
        """Send what has been handed over; it goes by itself after half a second."""
        with self._lock:
            self._flush()

    def report(self, step: int, engine: dict[str, Any], rollout: dict[str, Any]) -> None:
        """See `Ledger.report`."""
        self._ledger.report.remote(step, engine, rollout)

    def sync(self, version: int) -> dict[str, Any]:
        """Everything of the engine's reaches the history.

        Args:
            version: weight version from now on.

        Returns:
            What `das_rpc("refresh")` takes: `version`, `lengths` that are new to the engine, `draft_length` where the
            config has a ladder, and `history`, what to map; None, with a line in the log, where the node's history does
            not answer.

        Waits less than `PATIENCE_S`.
        """
        payload: dict[str, Any] = {"version": version, "lengths": [], "history": None}
        try:
            self._find()
            self.flush()
            with self._lock:
                numbers = list(self._sent)
            if self._here is not None:
                question = self._here.sync.remote(version, self._source, numbers)
                payload["history"], lost = ray.get(question, timeout=_ANSWER_S)
                with self._lock:
                    for number in set(numbers) - set(lost):
                        del self._sent[number]
                    self._send(lost)
            if ladder := self._das.copies_policy and self._das.self.ladder:
                payload["draft_length"] = ray.get(self._ledger.draft_length.remote(ladder, version), timeout=_ANSWER_S)
            self._cursor, payload["lengths"] = ray.get(self._ledger.since.remote(self._cursor), timeout=_ANSWER_S)
        except (ray.exceptions.RayError, ValueError) as error:
            logger.error("das: weight sync %s without fresh history; decoding goes on: %r", version, error)
        return payload

    def predictions(self) -> tuple[dict[int, float], float]:
        """See `Ledger.predictions`."""
        found: tuple[dict[int, float], float] = ray.get(self._ledger.predictions.remote(), timeout=_ANSWER_S)
        return found

    def _find(self) -> None:
        """The actors of the run, started again where they are gone."""
        self._ledger = ledger(self._das.history.window)
        shared = self._das.recalls and self._das.history.scope != "request"
        self._here = node.here(self._das.history) if shared else None
        self._nodes = node.nodes() if shared else {}

    def _flush(self) -> None:
        batch, self._batch = self._batch, []
        if batch:
            self._ledger.add.remote([(problem, len(tokens) // 4, version) for problem, tokens, version in batch])
        if batch and self._here is not None:
            self._number += 1
            self._sent[self._number] = ray.put(batch)
            self._send([self._number])

    def _send(self, numbers: list[int]) -> None:
        for number in numbers:
            for history in self._nodes.values():
                history.push.remote(self._source, number, self._sent[number])


def remedy(version: int, mapped: list[Any]) -> dict[str, Any] | None:
    """What an engine must be refreshed with once more, from its ranks' answers to a refresh: without a history where
    those that draft have mapped different ones, for they would draft apart. None: they agree."""
    answers = [rank for rank in mapped if rank and ("generation" in rank or "error" in rank)]
    if len({rank.get("generation") for rank in answers}) <= 1:
        return None
    logger.error("das: weight sync %s: the ranks of an engine see different histories: they draft without", version)
    return {"version": version, "history": ("", 0)}
