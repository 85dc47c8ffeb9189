"""An engine's part in the run's history: what it finished goes out, what is published comes back at a weight sync."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
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
_BATCH_S = 0.5
"""How long trajectories are gathered before they are sent together."""


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
    """One engine's part. Trajectories are sent in batches and never waited for; a batch is kept until every history has
    published it, and sent again to one that has lost it. Any thread may call, an event loop's too; no method but
    `start` raises."""

    def __init__(self, das: DasConfig, rpc: Rpc):
        self._das, self._rpc = das, rpc
        self._shared = das.shares_history
        self._clock = RolloutClock()
        self._source = uuid.uuid4().hex
        self._lock = threading.Lock()
        """Of the open batch; never held while something is sent, because an event loop may wait for it."""
        self._sending = threading.RLock()
        """Of all that follows."""
        self._batch: list[Trajectory] = []
        self._number = self._older = 0
        """The last batch, and the last one before the last weight sync."""
        self._sent: dict[int, ray.ObjectRef] = {}
        self._unsure: dict[str, set[int]] = {}
        """By history: the batches that it may not have published."""
        self._asked: dict[str, tuple[Sequence[int], ray.ObjectRef]] = {}
        """By history of another node: what it was asked about, and the answer to come."""
        self._cursor = 0
        self._here: Any = None
        """The history of this node; None: none is shared."""
        self._own = ""
        self._nodes: dict[str, Any] = {}
        """All histories, by name; this node's is `_own`."""
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
        try:
            text = np.asarray(tokens, dtype=np.int32).tobytes()
            self._clock.finished(begin, end, label.seed or 0, text)
            self._push(Trajectory(label.problem or 0, text, version))
        except Exception:
            logger.exception("das: a trajectory did not reach the history")

    def report(self, step: int, timeout: float = PATIENCE_S) -> dict[str, Any]:
        """Report the counts since the last time to the run's ledger, as those of a training step, and return them;
        none, with a line in the log, where the engine does not answer."""
        report = self._counts(step, timeout)
        if report:
            self._ledger.report.remote(step, report)
        return report

    def _counts(self, step: int, timeout: float) -> dict[str, Any]:
        try:
            stats = self._rpc("stats", {}, timeout)
            counts = max(stats, key=lambda rank: rank.get("tokens", -1))  # of the rank that samples
            return {**counts, **self._clock.take()}
        except Exception:
            logger.exception("das: no figures of an engine for step %s", step)
            return {}

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
            counts = self._counts(version, left()) if report else {}
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
            with self._sending:
                self._flush()
        except Exception:
            logger.exception("das: trajectories did not reach the history")

    def _message(self, version: int, report: dict[str, Any], left: Callable[[], float]) -> Refresh:
        """What the engine hears; without a history, and with a line in the log, where that does not answer."""
        history, length, lengths = None, None, b""
        try:
            self._find()
            self.flush()
            rungs = (self._das.copies_policy and self._das.self.ladder) or ()
            known = self._ledger.sync.remote(version, self._cursor, report or None, rungs)
            if self._here is not None:
                with self._sending:
                    self._ask_others()
                    numbers = list(self._unsure.get(self._own, ()))
                history, lost = ask(self._here.sync.remote(version, self._source, numbers), left())
                with self._sending:
                    self._confirm(self._own, numbers, lost)
            synced = ask(known, left())
            length, lengths = synced.draft_length, ray.get(synced.lengths, timeout=left()).tobytes()
            self._cursor, self._expected = synced.cursor, synced.expected
        except Exception as error:
            logger.error("das: weight sync %s without fresh history; decoding goes on: %r", version, error)
        return Refresh(version, history, lengths, draft_length=length)

    def _find(self) -> None:
        """Find the actors of the run, and start those again that are gone."""
        self._ledger = ledger(self._das.history.window)
        if self._shared:
            self._here, self._own = node.here(self._das.history), node.name_of_here()
            known, self._nodes = self._nodes, {**node.nodes(), self._own: self._here}
            with self._sending:
                for name in self._nodes.keys() - known.keys():  # the copy it begins with may lack the last batches
                    self._send(name, list(self._sent))

    def _push(self, trajectory: Trajectory) -> None:
        with self._lock:
            self._batch.append(trajectory)
            if len(self._batch) > 1:
                return
        timer = threading.Timer(_BATCH_S, self.flush)
        timer.daemon = True
        timer.start()

    def _flush(self) -> None:
        with self._lock:
            batch, self._batch = self._batch, []
        if batch:
            self._ledger.add.remote(responses(batch))
        if batch and self._here is not None:
            sent = ray.put(batch)
            self._number += 1
            self._sent[self._number] = sent
            for name in self._nodes:
                self._send(name, [self._number])

    def _send(self, name: str, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._nodes[name].push.remote(self._source, number, self._sent[number])
            self._unsure.setdefault(name, set()).add(number)

    def _ask_others(self) -> None:
        """Take what the histories of other nodes have answered since the last weight sync, and ask them which batches
        they lack of those that they had a whole step to publish."""
        for name, (numbers, question) in self._asked.items():
            if name in self._nodes and ray.wait([question], timeout=0)[0]:
                with contextlib.suppress(ray.exceptions.RayError):  # it was killed, and is asked again
                    self._confirm(name, numbers, ray.get(question))
        self._unsure = {name: unsure for name, unsure in self._unsure.items() if name in self._nodes}
        self._asked = {}
        for name in self._unsure.keys() - {self._own}:
            if old := [number for number in self._unsure[name] if number <= self._older]:
                self._asked[name] = old, self._nodes[name].lacks.remote(self._source, old)
        self._older = self._number

    def _confirm(self, name: str, numbers: Sequence[int], lost: Sequence[int]) -> None:
        """Take a history's answer: it has published these batches, but for those lost, which are sent again."""
        self._unsure.setdefault(name, set()).difference_update(numbers)
        self._send(name, lost)
        needed = set().union(*self._unsure.values())
        self._sent = {number: batch for number, batch in self._sent.items() if number in needed}


def for_run(das: DasConfig) -> DasConfig:
    """Return the block with this run's own directory under `log_dir`."""
    if das.log_dir is None:
        return das
    name = ask(ledger(das.history.window).run.remote(), timeout=PATIENCE_S)
    return das.model_copy(update={"log_dir": f"{das.log_dir}/{name}"})
