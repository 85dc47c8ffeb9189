"""An engine's part in the run's history: what it finished goes out, what is published
comes back at a weight sync.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
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
from das_adapter.errors import DasError, UnsupportedHost
from das_adapter.protocol.label import Label
from das_adapter.protocol.messages import (
    Published,
    Refresh,
    Trajectory,
    call_workers,
    responses,
)
from das_adapter.protocol.metrics import EngineStats, RolloutClock
from das_adapter.protocol.spool import Gathered, put_batch, write_private
from das_adapter.service import node
from das_adapter.service.ledger import (
    Synced,
    ask,
    find_actor,
    history_name,
    ledger,
    of_ledger,
)
from das_adapter.trouble import Peer, log_once

logger = logging.getLogger("das_adapter")

PATIENCE_S = 60.0
"""How long a weight sync may take on our account; after that the engine drafts from
what it has.
"""
_GUESTS_S = 0.05
"""How long problems are gathered whose history is fetched together."""
GUESTS_WAIT_S = 5.0
"""How long the history of a problem is worth waiting for, once a request about it has
begun.
"""
_NO_FRESH_HISTORY = "das: a weight sync without fresh history; decoding goes on"
_NO_GUESTS = "das: requests go on without the history of their problems"

Guest = tuple[int, str]
"""A problem that is at home on another node, and the name of that node's history."""
Answers = list[list[Any]]
"""The answers of the ranks of each data-parallel engine."""
Rpc = Callable[[str, dict[str, Any], float], Answers]
"""Calls `das_rpc` with a command and its payload in every worker of an engine; raises
TimeoutError after so many seconds.
"""


def of_async_engine(engine: Any, loop: asyncio.AbstractEventLoop) -> Rpc:
    """Return an `Rpc`, for other threads than the loop's, of vLLM's `AsyncLLM`."""

    def rpc(command: str, payload: dict[str, Any], timeout_s: float) -> Answers:
        call = call_workers(engine, command, payload)
        limited = asyncio.wait_for(call, timeout_s)
        future = asyncio.run_coroutine_threadsafe(limited, loop)
        return future.result(timeout_s + 1.0)

    return rpc


class Session:
    """One engine's part. Trajectories are left in the spool of the node's history, and
    never waited for. Any thread may call, an event loop's too; no method but `start`
    raises.
    """

    def __init__(self, das: DasConfig, rpc: Rpc, any_time: bool = True):
        """Find the run's actors, and start those that are missing; `any_time`: whether
        the engine may be called while it generates; else whoever lets it generate calls
        `map_guest_history` between two steps.
        """
        self._das = das
        self._rpc = rpc
        self._any_time = any_time
        self._clock = RolloutClock()
        self._name = uuid.uuid4().hex
        self._gathered = Gathered(self._leave)
        self._prompted = set[int]()
        """Problems whose prompts were left since the last weight sync."""
        self._begun: set[int] = set()
        """Problems whose requests began since the last weight sync."""
        self._guests = Gathered(self._fetch, _GUESTS_S)
        """Problems among them whose history is to be fetched, each with the name of the
        history that has it.
        """
        self._arrived = deque[Path]()
        """Files with such history, for the engine to map."""
        self._directory = "/nowhere"
        """Directory of the node's history, once it is known."""
        self._cursor = 0
        """Cursor of the last weight sync, see `Ledger.sync`."""
        self._here: Any = None
        """The history of this node; None: none is shared."""
        self._history = Peer()
        """Whom a weight sync waits for: the node's history, or the ledger where there
        is none.
        """
        self._homes = defaultdict[str, Peer](Peer)
        """Histories of other nodes, by name."""
        self._silent_homes = set[str]()
        """Those that had no answer since the last weight sync."""
        self._engines_behind = 0
        """Engines that the last weight sync left with an older history than their
        node's.
        """
        self._nodes: tuple[str, ...] = ()
        """Names of the histories of all nodes."""
        self._own_node = history_name()
        self._find_actors()

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
        first_rank = hello[0][0]
        logger.warning("das: an engine speculates: %s", first_rank)

    def fetch_guest_history(self, problems: Iterable[int]) -> None:
        """Fetch the history of problems that are at home on other nodes, for requests
        that begin; each once in a weight version. The requests draft from it as soon as
        it is there, and never wait for it.
        """
        nodes = self._nodes
        if len(nodes) < 2 or self._das.history.scope == "global":
            return
        try:
            new = list(set(problems) - self._begun)
            self._begun.update(new)
            indices = homes(new, nodes)
            for problem, index in zip(new, indices, strict=True):
                home = nodes[index]
                if home != self._own_node:
                    self._guests.add((problem, home))
        except Exception as error:
            log_once("das: a request begins without the history of its problem", error)

    def record_response(
        self,
        label: Label,
        tokens: Sequence[int],
        begin: float,
        end: float,
        version: int,
        prompt: Sequence[int] = (),
    ) -> None:
        """Count a finished response in the step's figures, and leave it for the
        history, if it may be recorded.

        Args:
            tokens: token ids without the prompt.
            begin, end: seconds since the epoch.
            version: weight version that wrote the response.
            prompt: token ids before the response; empty: they do not say all of it,
                as where images belong to it.
        """
        if label.problem is None:
            return
        try:
            ids = np.asarray(tokens, dtype=np.int32)
            text = ids.tobytes()
            self._clock.count_response(label, begin, end, text)
            if label.record:
                prompt_text = self._new_prompt(label.problem, prompt)
                trajectory = Trajectory(label.problem, text, version, prompt_text)
                self._gathered.add(trajectory)
        except Exception as error:
            log_once("das: a trajectory did not reach the history", error)

    def _new_prompt(self, problem: int, prompt: Sequence[int]) -> bytes:
        """Return the int32 token ids of a prompt for the history; none where they are
        there, or where no checkpoint will have them.
        """
        if not self._das.saves_prompts or problem in self._prompted:
            return b""
        ids = np.asarray(prompt, dtype=np.int32)
        if len(ids):
            self._prompted.add(problem)
        return ids.tobytes()

    def report(self, step: int, timeout_s: float = PATIENCE_S) -> list[EngineStats]:
        """Report the counts since the last time to the run's ledger, as those of a
        training step, and return them, of each data-parallel engine; none, with a line
        in the log, where the engine does not answer.
        """
        try:
            reports: list[EngineStats] = []
            engines = self._rpc("stats", {}, timeout_s)
            for number, ranks in enumerate(engines):
                report = dict(_counts_of(ranks))
                # the clock's counts go to the first
                clock = self._clock.read_and_reset()
                report.update(clock)
                # an engine may report several times to one step
                report["engine"] = f"{self._name} {number}"
                if self._here and number == 0:
                    report["engines_behind"] = self._engines_behind
                reports.append(report)
                self._ledger.report.remote(step, report)
            return reports
        except Exception as error:
            log_once("das: no figures of an engine", error)
            return []

    def sync(self, version: int, report: bool = False) -> None:
        """Exchange histories after a weight sync: the engine's trajectories go out,
        what is published comes in.

        It takes `PATIENCE_S` at most. Where the history does not answer, and whatever
        else goes wrong, the engine drafts from what it has. `report`: the figures of
        the step that ends are reported first.
        """
        deadline = time.monotonic() + PATIENCE_S
        try:
            self._find_actors()
            if report:
                self.report(version, _left_s(deadline))
            self._engines_behind = 1
            message = self._refresh_message(version, deadline)
            payload = message.payload()
            engines = self._rpc("refresh", payload, _left_s(deadline))
            self._engines_behind = _count_behind(engines, message.history)
        except Exception as error:
            log_once(_NO_FRESH_HISTORY, error)

    def map_guest_history(self) -> None:
        """Let the engine map what was fetched of other nodes' histories, if there is
        anything.
        """
        files: list[Path] = []
        with contextlib.suppress(IndexError):  # other threads may take some
            while True:
                files.append(self._arrived.popleft())
        if not files:
            return
        names = [str(file) for file in files]
        try:
            self._rpc("map_guest_history", {"files": names}, PATIENCE_S)
        except Exception as error:
            log_once("das: requests go on without the history of their problems", error)
        for file in files:
            file.unlink(missing_ok=True)

    def flush(self) -> None:
        """Leave the trajectories of the open batch for the history now; that is done
        anyway after half a second.
        """
        self._gathered.flush()

    def _refresh_message(self, version: int, deadline: float) -> Refresh:
        """Return the message to the engine at a weight sync; without a history, and
        with a line in the log, where that does not answer.
        """
        history = None
        lengths = b""
        # the other half of the time is the engine's
        timeout_s = _left_s(deadline) / 2
        self._gathered.flush(self._history.patience_s(timeout_s))
        timeout_s = min(timeout_s, _left_s(deadline) / 2)
        history, synced = self._sync_history(version, timeout_s)
        if synced is not None:
            lengths = synced.lengths.tobytes()
            self._cursor = synced.cursor
            self._nodes = synced.nodes
        self._begun.clear()
        self._prompted.clear()
        self._silent_homes.clear()
        return Refresh(version, history, lengths)

    def _sync_history(
        self, version: int, timeout_s: float
    ) -> tuple[Published | None, Synced | None]:
        """Return what the node's history has published, and what the ledger knows; None
        where there is no such history, or where somebody did not answer.
        """
        here = self._here or self._ledger

        def call() -> ray.ObjectRef:
            return here.sync.remote(version, self._cursor)

        answer = ask(self._history, call, timeout_s, _NO_FRESH_HISTORY)
        if answer is None or self._here is None:
            return None, answer
        history, synced = answer
        self._directory = history.directory
        return history, synced

    def _find_actors(self) -> None:
        """Find the actors of the run, and start those again that are gone."""
        self._ledger = ledger()
        if self._das.shares_history:
            self._here = node.history_here(self._das.history)

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
        max_bytes = self._das.history.max_bytes
        try:
            put_batch(self._directory, self._name, batch, max_bytes)
        except FileNotFoundError:  # it is not known, or was removed
            self._directory = self._find_directory()
            put_batch(self._directory, self._name, batch, max_bytes)

    def _find_directory(self) -> str:
        """Return where engines leave what they wrote; DasError: the history does not
        answer, or did not at the last weight sync, which the next finds out.
        """
        directory = None
        if not self._history.trouble:
            message = "das: the node's history does not say where it lies"
            call = self._here.directory.remote
            directory = ask(self._history, call, PATIENCE_S / 2, message)
        if directory is None:
            raise DasError(f"the node's history: {self._history.trouble}")
        return str(directory)

    def _fetch(self, guests: Sequence[Guest]) -> None:
        """Fetch the history of problems from the nodes on which they are at home. One
        that does not answer is asked again after the next weight sync.
        """
        if not ray.is_initialized():  # as in `_leave`
            return
        wanted = defaultdict[str, list[int]](list)
        for problem, home in guests:
            if home not in self._silent_homes:
                wanted[home].append(problem)
        calls: dict[str, ray.ObjectRef] = {}
        for home, problems in wanted.items():
            # it ended, and the others are homes still
            with contextlib.suppress(ValueError):
                calls[home] = find_actor(home).give.remote(problems)
        for home, started in calls.items():
            call = functools.partial(_same, started)
            content = ask(self._homes[home], call, GUESTS_WAIT_S, _NO_GUESTS)
            if content is None:
                self._silent_homes.add(home)
                continue
            try:
                self._keep_for_engine(content)
            except (DasError, OSError) as error:
                log_once(_NO_GUESTS, error)
        if self._any_time:
            self.map_guest_history()

    def _keep_for_engine(self, history: bytes) -> None:
        """Write history of another node to a file, for the engine to map."""
        # the next store of the directory removes it, as in `NodeHistory.give`
        name = f"{uuid.uuid4().hex}.tmp"
        file = Path(self._directory) / name
        try:
            write_private(file, history)
        except BaseException:  # there may be no room for all of it
            file.unlink(missing_ok=True)
            raise
        self._arrived.append(file)


def _same(call: ray.ObjectRef) -> ray.ObjectRef:
    """Return a call that was made."""
    return call


def _counts_of(ranks: Sequence[EngineStats]) -> EngineStats:
    """Return the counts of an engine: those of its rank that samples."""
    return max(ranks, key=lambda rank: rank.get("tokens", -1))


def _left_s(deadline: float) -> float:
    """Return how many seconds are left; `deadline`: of the monotonic clock."""
    return max(0.0, deadline - time.monotonic())


def _count_behind(engines: Answers, history: Published | None) -> int:
    """Return how many engines have an older history than the published one."""
    newest = math.inf
    if history is not None:
        newest = history.generation
    num_behind = 0
    for ranks in engines:
        generations = [rank.get("generation", newest) for rank in ranks]
        oldest = min(generations, default=newest)
        if oldest < newest:
            num_behind += 1
    return num_behind


def for_run(das: DasConfig) -> DasConfig:
    """Return the block with this run's own directory under `log_dir`."""
    if das.log_dir is None:
        return das

    def call() -> ray.ObjectRef:
        return ledger().run.remote()

    message = "das: the decision logs lie in a directory with the name of the job"
    name = ask(of_ledger, call, PATIENCE_S, message)
    if name is None:
        context = ray.get_runtime_context()
        name = f"job-{context.get_job_id()}"
    log_dir = f"{das.log_dir}/{name}"
    return das.model_copy(update={"log_dir": log_dir})
