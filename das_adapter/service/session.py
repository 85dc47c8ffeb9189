"""An engine's part in the run's history: what it finished goes out, what is published comes back at a weight sync."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import numpy as np
import ray

from das_adapter.config import DasConfig
from das_adapter.core.length import Expected
from das_adapter.errors import plugin_not_loaded
from das_adapter.protocol.label import Label
from das_adapter.protocol.messages import Published, Refresh, Refreshed, Trajectory, responses
from das_adapter.protocol.metrics import RolloutClock
from das_adapter.service import node
from das_adapter.service.ledger import ask, ledger

logger = logging.getLogger("das_adapter")

PATIENCE_S = 60.0
"""How long a weight sync may take on our account; after that the engine drafts from what it has."""
_BATCH, _BATCH_S = 32, 0.5


class Rpc(Protocol):
    """Calls `das_rpc` in every worker of an engine, and returns their answers; raises TimeoutError after `timeout`."""

    def __call__(self, command: str, payload: dict[str, Any], timeout: float) -> list[Any]: ...


def of_async_engine(call: Callable[..., Awaitable[list[Any]]], loop: asyncio.AbstractEventLoop) -> Rpc:
    """Make an `Rpc`, for other threads than the loop's, of an asynchronous engine's `collective_rpc`."""

    def rpc(command: str, payload: dict[str, Any], timeout: float) -> list[Any]:
        async def answer() -> list[Any]:
            return await asyncio.wait_for(call("das_rpc", args=(command, payload)), timeout)

        return asyncio.run_coroutine_threadsafe(answer(), loop).result(timeout + 1.0)

    return rpc


class Session:
    """One engine's part. Trajectories are sent in batches and never waited for; a batch counts as sent when a weight
    sync has found it there, and is sent again until then. Any thread may call; no method but `start` raises."""

    def __init__(self, das: DasConfig, rpc: Rpc):
        self._das, self._rpc = das, rpc
        self._shared = das.shares_history
        self._clock = RolloutClock()
        self._source = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._batch: list[Trajectory] = []
        self._number = 0
        self._sent: dict[int, ray.ObjectRef] = {}
        self._cursor = 0
        self._expected: ray.ObjectRef | None = None
        self._find()

    def start(self) -> None:
        """Make sure that das-adapter is in the engine's workers: a plug-in that was left out is an error now, not a run
        that silently does without.

        Raises:
            UnsupportedHost: it is not.
        """
        try:
            hello = self._rpc("hello", {}, PATIENCE_S)
        except Exception as error:
            raise plugin_not_loaded() from error
        logger.warning("das: an engine speculates: %s", hello[0])

    def finished(self, label: Label, tokens: Sequence[int], begin: float, end: float, version: int) -> None:
        """Take a finished response into the step's figures and into the history, if it may be recorded.

        Args:
            label: of the request, with problem and seed.
            tokens: token ids, the prompt excluded.
            begin, end: seconds since the epoch.
            version: weight version that wrote it.
        """
        if not label.record:
            return
        assert label.problem is not None and label.seed is not None
        text = np.asarray(tokens, dtype=np.int32).tobytes()
        self._clock.finished(begin, end, label.seed, text)
        try:
            self._push(Trajectory(label.problem, text, version))
        except Exception:
            logger.exception("das: a trajectory did not reach the history")

    def report(self, step: int, timeout: float = PATIENCE_S) -> dict[str, Any]:
        """Report the counts since the last time to the run's ledger, as those of a training step, and return them."""
        report = self._counts(timeout)
        self._ledger.report.remote(step, report)
        return report

    def _counts(self, timeout: float) -> dict[str, Any]:
        stats = self._rpc("stats", {}, timeout)
        counts = max(stats, key=lambda rank: rank.get("tokens", -1))  # of the rank that samples
        return {**counts, **self._clock.take()}

    def sync(self, version: int, report: bool = False) -> None:
        """Exchange histories after a weight sync: the engine's trajectories go out, what is published comes in.

        It takes `PATIENCE_S` at most. Where the history does not answer, and whatever else goes wrong, the engine
        drafts from what it has; where its ranks have mapped different histories, and would draft apart, from none.

        Args:
            version: weight version from now on.
            report: whether the figures of the step that ends are reported first.
        """
        deadline = time.monotonic() + PATIENCE_S

        def left() -> float:
            return max(0.0, deadline - time.monotonic())

        try:
            counts = self._counts(left()) if report else None
            message = self._message(version, counts, lambda: left() / 2)  # the rest is the engine's
            answers: list[Refreshed] = self._rpc("refresh", message.payload(), left())
            drafting = [rank for rank in answers if rank and ("generation" in rank or "error" in rank)]
            if len({rank.get("generation") for rank in drafting}) > 1:
                logger.error("das: weight sync %s: the ranks of an engine see different histories: they draft without",
                             version)  # fmt: skip
                self._rpc("refresh", Refresh(version, Published("", 0)).payload(), left())
        except Exception:
            logger.exception("das: weight sync %s without fresh history; decoding goes on", version)

    def expected(self, timeout: float = 25.0) -> Expected:
        """Return what the ledger expected at the last weight sync; nothing, with a line in the log, where it can't be
        had."""
        try:
            return Expected() if self._expected is None else Expected(*ray.get(self._expected, timeout=timeout))
        except ray.exceptions.RayError as error:
            logger.warning("das: no predicted lengths: %r", error)
            return Expected()

    def flush(self) -> None:
        """Send the trajectories of the open batch now; they are sent automatically after half a second."""
        try:
            with self._lock:
                self._flush()
        except Exception:
            logger.exception("das: trajectories did not reach the history")

    def _message(self, version: int, report: dict[str, Any] | None, left: Callable[[], float]) -> Refresh:
        """What the engine hears; without a history, and with a line in the log, where that does not answer."""
        history, length, lengths = None, None, b""
        try:
            self._find()
            self.flush()
            rungs = (self._das.copies_policy and self._das.self.ladder) or ()
            known = self._ledger.sync.remote(version, self._cursor, report, rungs)
            with self._lock:
                numbers = list(self._sent)
            if self._here is not None:
                history, lost = ask(self._here.sync.remote(version, self._source, numbers), left())
                with self._lock:
                    for number in set(numbers) - set(lost):
                        del self._sent[number]
                    self._send(lost)
            synced = ask(known, left())
            length, lengths = synced.draft_length, ray.get(synced.lengths, timeout=left()).tobytes()
            self._cursor, self._expected = synced.cursor, synced.expected
        except (ray.exceptions.RayError, ValueError) as error:
            logger.error("das: weight sync %s without fresh history; decoding goes on: %r", version, error)
        return Refresh(version, history, lengths, draft_length=length)

    def _find(self) -> None:
        """Find the actors of the run, and start those again that are gone."""
        self._ledger = ledger(self._das.history.window)
        self._here = node.here(self._das.history) if self._shared else None
        self._nodes = node.nodes() if self._shared else {}

    def _push(self, trajectory: Trajectory) -> None:
        with self._lock:
            self._batch.append(trajectory)
            if len(self._batch) >= _BATCH:
                self._flush()
            elif len(self._batch) == 1:
                timer = threading.Timer(_BATCH_S, self.flush)
                timer.daemon = True
                timer.start()

    def _flush(self) -> None:
        batch, self._batch = self._batch, []
        if batch:
            self._ledger.add.remote(responses(batch))
        if batch and self._here is not None:
            self._number += 1
            self._sent[self._number] = ray.put(batch)
            self._send([self._number])

    def _send(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            for history in self._nodes.values():
                history.push.remote(self._source, number, self._sent[number])


def for_run(das: DasConfig) -> DasConfig:
    """Return the block with this run's own directory under `log_dir`."""
    if das.log_dir is None:
        return das
    name = ask(ledger(das.history.window).run.remote(), timeout=PATIENCE_S)
    return das.model_copy(update={"log_dir": f"{das.log_dir}/{name}"})
