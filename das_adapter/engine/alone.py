"""What an engine without a host does: it harvests its own trajectories, asks for a
generation of its node's history, and brings its drafter up to date. Without Ray a
process of its own (`das_adapter.service.local`) writes the history; the engines of the
node start it and share it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sys
import time
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from das_adapter.config import HistoryConfig
from das_adapter.core import tuning
from das_adapter.core.index.private import is_private, make_private
from das_adapter.core.index.store import is_served
from das_adapter.engine.responses import ResponseLog, response_log
from das_adapter.errors import DasError
from das_adapter.files import open_without_waiting
from das_adapter.protocol.messages import Published, Refresh, Trajectory, responses
from das_adapter.protocol.metrics import EngineStats
from das_adapter.protocol.processes import Starter
from das_adapter.protocol.spool import (
    ANSWER,
    ASK,
    FOLDER,
    GRACE_S,
    USERS,
    Answer,
    Gathered,
    directory_for,
    put_batch,
    put_file,
)
from das_adapter.trouble import Peer

logger = logging.getLogger("das_adapter")

PATIENCE_S = 30.0
"""Maximum time that a weight sync waits for the writer; after that the engine drafts
from what it has mapped.
"""
AGAIN_S = 2.0
"""Time after which a request is left again, and another writer started: the last one
may have been killed. At once, where the last sync had no answer, or the first writer
did not start.
"""
POLL_S = 0.002
"""Time between two looks for the writer's answer."""


class SharedHistory:
    """The history that engines of a node share. What an engine writes goes into the
    spool of the history; a weight sync asks for a generation, and is all that waits. No
    method raises.
    """

    def __init__(
        self,
        name: str,
        config: HistoryConfig,
        grace_s: float = GRACE_S,
    ):
        """Engines of the node with the same `name`, that of the history's directory,
        share it; `grace_s`: see `protocol.spool.GRACE_S`.
        """
        self._name = name
        self._config = config
        self._grace_s = grace_s
        self._directory = Path()
        self._engine = uuid.uuid4().hex
        self._gathered = Gathered(self._leave)
        self._number = 0
        """Number of the generation that was asked for last."""
        self._users: IO[bytes] | None = None
        """Locked while this engine lives: neither the writer nor a janitor removes the
        directory.
        """
        self._writer = Peer()
        self._starter: Starter | None = None
        """Starts a writer, and was not ready in time."""
        try:
            self._enter()
            self._start_writer()
        except (DasError, OSError) as error:
            self._report(error)

    @property
    def trouble(self) -> str:
        """Why the last weight sync left the engine with an older history, or the writer
        did not start; empty: it did not.
        """
        return self._writer.trouble

    def add(self, trajectory: Trajectory) -> None:
        """Add a finished trajectory to what the next batch brings."""
        self._gathered.add(trajectory)

    def sync(self) -> Published | None:
        """Have everything published that was added; return what to map, None: what is
        mapped stays.
        """
        try:
            patience_s = self._patience_s()
            self._gathered.flush(patience_s)
            answer = self._ask(patience_s)
        except (DasError, OSError) as error:
            self._report(error)
            return None
        for line in answer.log:
            logger.warning("%s", line)
        self._writer.answered()
        return Published(str(self._directory), answer.generation)

    def _enter(self) -> None:
        """Make sure that the directory is there, belongs to this user, and is not
        removed while this engine lives.
        """
        if not self._users or not is_private(self._directory):
            self._directory = directory_for(self._name, self._config.max_bytes)
        for directory in (self._directory, self._directory / FOLDER):
            make_private(directory)
        path = self._directory / USERS
        until = time.monotonic() + self._patience_s()
        # until nobody has removed it
        while not self._users or not _is_at(self._users, path):
            if self._users:
                self._users.close()
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            descriptor = open_without_waiting(path, flags)
            self._users = open(descriptor, "ab")
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:  # whoever removes it, or looks, may hang
                self._users.close()
                self._users = None
                if time.monotonic() > until:
                    raise TimeoutError(f"another process holds {path}") from None
                time.sleep(POLL_S)

    def _patience_s(self) -> float:
        """Return how long a weight sync waits: less, where the last one waited in
        vain.
        """
        if self._number == 0:  # no weight sync yet
            return PATIENCE_S
        return self._writer.patience_s(PATIENCE_S)

    def _start_writer(self) -> None:
        """Start the process that writes, unless there is one, which may hang, or one is
        being started. Raises as `Starter.wait`, also for the one before.
        """
        if self._starter:
            if self._starter.is_running:
                return
            self._wait_for_starter()
        if is_served(self._directory):
            return
        # Whoever may write into the working directory must not choose which modules it
        # runs: it is not in the path with -P, if no entry of PYTHONPATH is empty.
        command = [
            sys.executable,
            "-P",
            "-m",
            "das_adapter.service.local",
            str(self._directory),
        ]
        arguments = [self._config.model_dump_json(), str(self._grace_s)]
        python_path = os.environ.get("PYTHONPATH", "")
        entries = filter(None, python_path.split(os.pathsep))
        path = os.pathsep.join(entries)
        self._starter = Starter(
            [*command, *arguments],
            f"the process that writes {self._directory}",
            {**os.environ, "PYTHONPATH": path},
        )
        self._wait_for_starter()

    def _wait_for_starter(self) -> None:
        """Wait for what starts the writer, and forget it unless it runs still."""
        starter = self._starter
        if starter is None:
            return
        try:
            starter.wait(PATIENCE_S)
        finally:
            if not starter.is_running:
                self._starter = None

    def _leave(self, batch: Sequence[Trajectory]) -> None:
        """Put trajectories into the spool."""
        self._enter()
        put_batch(self._directory, self._engine, batch, self._config.max_bytes)

    def _ask(self, patience_s: float) -> Answer:
        """Ask for a generation, and wait so long for the answer; TimeoutError: there
        was none; DasError: there is no writer, and why.
        """
        self._number += 1
        self._leave_ask()
        name = f"{ANSWER}-{self._engine}"
        path = self._directory / FOLDER / name
        again_s = 0.0 if self.trouble else AGAIN_S
        now = time.monotonic()
        end = now + patience_s
        asked = now
        while now < end:
            if now > asked + again_s:
                self._start_writer()
                self._leave_ask()
                asked = time.monotonic()
                end += asked - now
                again_s = AGAIN_S
            try:
                answer = Answer.read(path)
                path.unlink()
                if answer.number == self._number:
                    return answer
            except (OSError, ValueError, TypeError):
                time.sleep(POLL_S)
            now = time.monotonic()
        raise TimeoutError(f"no answer within {patience_s} s")

    def _leave_ask(self) -> None:
        """Put the request for a generation into the spool."""
        self._enter()
        name = f"{ASK}-{self._engine}"
        number = str(self._number).encode()
        put_file(self._directory, name, number)

    def _report(self, error: Exception) -> None:
        """Log an error once, until a weight sync succeeds."""
        end = "; engines go on with what is mapped"
        self._writer.failed("das: history", error, end)


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Return whether an open file is the one at a path, and was not removed there."""
    opened = os.fstat(file.fileno())
    try:
        return os.path.samestat(opened, path.lstat())
    except OSError:
        return False


class Standalone:
    """What one worker of an engine without a host does. All ranks of an engine see the
    same requests and weight updates; the first has the history.
    """

    def __init__(self, state: Any, directory: str):
        """`state`: the worker's `WorkerState`; `directory`: name of the history on this
        node.
        """
        from vllm.distributed import get_tp_group

        self._state = state
        self._first = get_tp_group().rank_in_group == 0
        self._version = 0
        self._due = False
        """Whether the weights have changed since the last step."""
        self.synced = False
        """Whether the weights had changed before the last refresh; else that sealed
        what was written.
        """
        self._unread = state.config.shares_history
        """Whether there may be a history that an earlier engine has left."""
        self._finished: list[Trajectory] = []
        """Whole trajectories since the last refresh."""
        self._live_tokens = 0
        self._log: ResponseLog | None = None
        """Where weight updates are logged; None: nowhere, or on another rank."""
        if state.config.log_dir is not None and self._first:
            self._log = response_log(state.runner.vllm_config)
        self._shared: SharedHistory | None = None
        if state.config.shares_history and self._first:
            self._shared = SharedHistory(directory, state.config.history)

    def stats(self) -> EngineStats:
        """Return the figures of an engine that looks after its own history."""
        if self._shared is None:
            return {}
        is_behind = bool(self._shared.trouble)
        return {"engines_behind": int(is_behind)}

    def weights_changed(self) -> None:
        """Note that the weights are other ones from the next step on. A weight
        sync of many calls counts once.
        """
        self._due = True

    def begin_step(self, scheduled: Any, updating: bool) -> None:
        """Keep what has finished since the last step, and bring the drafter up to date
        if the weights have changed. `scheduled`: vLLM's `SchedulerOutput`; `updating`:
        a weight update is under way, which ends later.
        """
        self._harvest(scheduled.finished_req_ids)
        if not scheduled.total_num_scheduled_tokens or updating:
            return
        is_full = self._live_tokens > tuning.MAX_LIVE_TOKENS
        if self._due or self._unread or is_full:
            self._refresh()

    def _refresh(self) -> None:
        """Do what a host does at a weight sync."""
        if self._due:
            self._version += 1
            if self._log is not None:
                self._log.add_weight_update()
        self.synced = self._due
        self._due = False
        self._unread = False
        self._live_tokens = 0
        lengths = responses(self._finished)
        self._finished = []
        published = None
        if self._shared:
            published = self._shared.sync()
        message = Refresh(self._version, published, lengths.tobytes())
        self._state.refresh(message)

    def _harvest(self, req_ids: Iterable[str]) -> None:
        """Keep the texts of requests that are over."""
        most_tokens = self._state.config.num_draft_tokens + 1
        for req_id in req_ids:
            response = self._state.response(req_id)
            if response is None or response.text is None:
                continue
            if not response.is_of_tokens:
                continue
            self._live_tokens += len(response.text)
            if not response.record or not self._first:
                continue
            tokens = np.array(response.text, np.int32)
            trajectory = Trajectory(
                response.problem,
                tokens.tobytes(),
                self._version,
            )
            # else it says nothing of lengths
            if response.is_whole(most_tokens):
                self._finished.append(trajectory)
            if self._shared:
                self._shared.add(trajectory)
