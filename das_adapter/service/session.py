"""An engine's part in the run's history: what it finished goes out, what is published
comes back at a weight sync.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

from das_adapter.config import DasConfig
from das_adapter.core.homes import homes
from das_adapter.errors import UnsupportedHost
from das_adapter.protocol.label import Label
from das_adapter.protocol.messages import Refresh, Trajectory, call_workers, responses
from das_adapter.protocol.metrics import RolloutClock
from das_adapter.protocol.spool import Gathered, put_batch, write
from das_adapter.service import node
from das_adapter.service.ledger import actor, answers, ask, history_of, ledger

logger = logging.getLogger("das_adapter")

PATIENCE_S = 60.0
"""How long a weight sync may take on our account; after that the engine drafts from
what it has.
"""
_GUESTS_S = 0.05
"""How long problems are gathered whose history is fetched together."""
_GUESTS_WAIT_S = 5.0
"""How long the history of a problem is worth waiting for, once a request about it has
begun.
"""

Rpc = Callable[[str, dict[str, Any], float], list[list[Any]]]
"""Calls `das_rpc` with a command and its payload in every worker of an engine, and
returns the answers of each of its data-parallel engines' ranks; raises TimeoutError
after so many seconds.
"""


def of_async_engine(engine: Any, loop: asyncio.AbstractEventLoop) -> Rpc:
    """Make an `Rpc`, for other threads than the loop's, of vLLM's `AsyncLLM`."""

    def rpc(command: str, payload: dict[str, Any], timeout: float) -> list[list[Any]]:
        answer = asyncio.wait_for(call_workers(engine, command, payload), timeout)
        return asyncio.run_coroutine_threadsafe(answer, loop).result(timeout + 1.0)

    return rpc


class Session:
    """One engine's part. Trajectories are left in the spool of the node's history, and
    never waited for. Any thread may call, an event loop's too; no method but `start`
    raises.
    """

    def __init__(self, das: DasConfig, rpc: Rpc, any_time: bool = True):
        """`any_time`: whether the engine may be called while it generates; else whoever
        lets it generate calls `map_guest_history` between two steps.
        """
        self._das = das
        self._rpc = rpc
        self._any_time = any_time
        self._clock = RolloutClock()
        self._name = uuid.uuid4().hex
        self._gathered = Gathered(self._leave)
        self._asked: set[int] = set()
        """Problems that began since the last weight sync."""
        self._guests = Gathered(self._fetch, _GUESTS_S)
        """Those of them whose history is to be fetched, and from whom."""
        self._arrived = deque[Path]()
        """Files with such history, for the engine to map."""
        self._directory = "/nowhere"
        """Of the node's history, once it is known."""
        self._cursor = 0
        self._here: Any = None
        """The history of this node; None: none is shared."""
        self._behind = 0
        """Engines that the last weight sync left with an older history than their
        node's.
        """
        self._nodes: tuple[str, ...] = ()
        self._own = history_of()
        """Names of all histories, and of this node's."""
        self._find()

    def start(self) -> None:
        """Make sure that das-adapter is in the engine's workers: a plug-in that was
        left out is an error now, not a run that silently does without. UnsupportedHost:
        it is not.
        """
        try:
            hello = self._rpc("hello", {}, PATIENCE_S)
        except Exception as error:
            raise UnsupportedHost(
                "das-adapter did not reach vLLM's workers: its entry point"
                " vllm.general_plugins:das_adapter was not loaded there"
                f" (VLLM_PLUGINS={os.environ.get('VLLM_PLUGINS')!r} must be unset or"
                " name das_adapter)"
            ) from error
        logger.warning("das: an engine speculates: %s", hello[0][0])

    def begun(self, problems: Iterable[int]) -> None:
        """Fetch the history of problems that are at home on other nodes, for requests
        that begin; each once in a weight version. They draft from it as soon as it is
        there, and never wait for it.
        """
        if len(nodes := self._nodes) < 2 or self._das.history.scope == "global":
            return
        try:
            new = [*({*problems} - self._asked)]
            self._asked.update(new)
            for problem, home in zip(new, homes(new, nodes), strict=True):
                if nodes[home] != self._own:
                    self._guests.add((problem, nodes[home]))
        except Exception:
            logger.exception("das: a request begins without the history of its problem")

    def finished(
        self,
        label: Label,
        tokens: Sequence[int],
        begin: float,
        end: float,
        version: int,
    ) -> None:
        """Take a finished response, without its prompt, into the step's figures and
        into the history, if it may be recorded; `begin` and `end` are seconds since the
        epoch.
        """
        if label.problem is None:
            return
        try:
            text = np.asarray(tokens, dtype=np.int32).tobytes()
            self._clock.count_response(label, begin, end, text)
            if label.record:
                self._gathered.add(Trajectory(label.problem, text, version))
        except Exception:
            logger.exception("das: a trajectory did not reach the history")

    def report(self, step: int, timeout: float = PATIENCE_S) -> list[dict[str, Any]]:
        """Report the counts since the last time to the run's ledger, as those of a
        training step, and return them, of each data-parallel engine; none, with a line
        in the log, where the engine does not answer.
        """
        try:
            reports: list[dict[str, Any]] = []
            for ranks in self._rpc("stats", {}, timeout):
                # of the rank that samples
                counts = max(ranks, key=lambda rank: rank.get("tokens", -1))
                engine = (  # it may report several times to one step
                    f"{self._name} {len(reports)}"
                )
                # the clock's go to the first
                reports.append(
                    {**counts, **self._clock.read_and_reset(), "engine": engine}
                )
                reports[-1] |= (
                    {"engines_behind": self._behind}
                    if self._here and len(reports) == 1
                    else {}
                )
                self._ledger.report.remote(step, reports[-1])
            return reports
        except Exception:
            logger.exception("das: no figures of an engine for step %s", step)
            return []

    def sync(self, version: int, report: bool = False) -> None:
        """Exchange histories after a weight sync: the engine's trajectories go out,
        what is published comes in.

        It takes `PATIENCE_S` at most. Where the history does not answer, and whatever
        else goes wrong, the engine drafts from what it has. `report`: the figures of
        the step that ends are reported first.
        """
        deadline = time.monotonic() + PATIENCE_S

        def left() -> float:
            return max(0.0, deadline - time.monotonic())

        try:
            self._find()
            if report:
                self.report(version, left())
            self._behind = 1
            # the rest is the engine's
            message = self._message(version, lambda: left() / 2)
            engines = self._rpc("refresh", message.payload(), left())
            newest = message.history.generation if message.history else math.inf
            self._behind = sum(
                any(rank.get("generation", newest) < newest for rank in ranks)
                for ranks in engines
            )
        except Exception:
            logger.exception(
                "das: weight sync %s without fresh history; decoding goes on", version
            )

    def map_guest_history(self) -> None:
        """Let the engine map what was fetched of other nodes' histories, if there is
        anything.
        """
        files = [self._arrived.popleft() for _ in range(len(self._arrived))]
        if not files:
            return
        try:
            self._rpc(
                "map_guest_history",
                {"files": [str(file) for file in files]},
                PATIENCE_S,
            )
        except Exception as error:
            logger.warning(
                "das: requests go on without the history of their problems: %r", error
            )
        for file in files:
            file.unlink(missing_ok=True)

    def flush(self) -> None:
        """Leave the trajectories of the open batch for the history now; that is done
        anyway after half a second.
        """
        self._gathered.flush()

    def _message(self, version: int, left: Callable[[], float]) -> Refresh:
        """What the engine hears; without a history, and with a line in the log, where
        that does not answer.
        """
        history = None
        lengths = b""
        try:
            self.flush()
            if self._here is None:
                synced = ask(self._ledger.sync.remote(version, self._cursor), left())
            else:
                history, synced = ask(
                    self._here.sync.remote(version, self._cursor), left()
                )
                self._directory = history.directory
            if synced is not None:
                lengths = synced.lengths.tobytes()
                self._cursor = synced.cursor
                self._nodes = synced.nodes
        except Exception as error:
            logger.error(
                "das: weight sync %s without fresh history; decoding goes on: %r",
                version,
                error,
            )
        self._asked.clear()
        return Refresh(version, history, lengths)

    def _find(self) -> None:
        """Find the actors of the run, and start those again that are gone."""
        self._ledger = ledger()
        if self._das.shares_history:
            self._here = node.here(self._das.history)

    def _leave(self, batch: Sequence[Trajectory]) -> None:
        """Leave trajectories for the history, or their lengths alone where none is
        shared.
        """
        # the run is over, and a call of Ray would start a cluster
        if not ray.is_initialized():
            return
        if self._here is None:
            self._ledger.add.remote(responses(batch))
            return
        try:
            put_batch(self._directory, self._name, batch)
        except FileNotFoundError:  # it is not known, or was removed
            self._directory = ask(self._here.directory.remote(), PATIENCE_S)
            put_batch(self._directory, self._name, batch)

    def _fetch(self, guests: Sequence[tuple[int, str]]) -> None:
        """Fetch the history of problems that are at home on other nodes, each with that
        node's.
        """
        try:
            if not ray.is_initialized():  # as in `_leave`
                return
            wanted = defaultdict[str, list[int]](list)
            calls = list[Any]()
            for problem, home in guests:
                wanted[home].append(problem)
            for name, asked in wanted.items():
                # it ended, and the others are homes still
                with contextlib.suppress(ValueError):
                    calls.append(actor(name).give.remote(asked))
            for history in answers(calls, _GUESTS_WAIT_S, "give"):
                # as in `NodeHistory.give`
                file = Path(f"{self._directory}/{uuid.uuid4().hex}.tmp")
                try:
                    write(file, history)
                except BaseException:  # there may be no room for all of it
                    file.unlink(missing_ok=True)
                    raise
                self._arrived.append(file)
        except Exception as error:
            logger.warning(
                "das: requests go on without the history of their problems: %r", error
            )
        if self._any_time:
            self.map_guest_history()


def for_run(das: DasConfig) -> DasConfig:
    """Return the block with this run's own directory under `log_dir`."""
    if das.log_dir is None:
        return das
    name = ask(ledger().run.remote(), timeout=PATIENCE_S)
    return das.model_copy(update={"log_dir": f"{das.log_dir}/{name}"})
