"""A run's ledger, a Ray actor: how long responses were, the engines' counts, added up
to one set of figures per training step, and what the run's history starts from.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ray
from ray._private import state

from das_adapter.core.length import ExpectedLengths, LengthLog, Responses
from das_adapter.protocol.metrics import EngineStats, figures
from das_adapter.trouble import Peer, log_once

logger = logging.getLogger("das_adapter")

_JOB_POLL_S = 5.0
"""How often an actor of a run looks whether its job has ended."""
_END_S = 30.0
"""How long a run waits for what an earlier run of its job has left."""
_END_POLL_S = 0.05
"""How often a run looks whether an earlier one has ended."""
_LENGTHS_S = 25.0
"""How long a weight sync waits for the expected lengths."""
_METRICS_S = 10.0
"""How long the trainer's logger waits for the figures of a step."""
_REPORTED_STEPS = 8
"""Steps before the newest whose reports are kept."""
_LEDGER = "das_ledger"
HISTORY = "das_history"
_NO_ANSWER = (AttributeError, ValueError, ray.exceptions.RayError)
"""What is raised where an actor does not answer, is not there, or is another thing of
that name.
"""
of_ledger = Peer()
"""The ledger, as this process knows it."""
NAMESPACE = "das_adapter"
"""Ray's namespace of the actors of all runs: Ray warns of detached ones in a namespace
without a name.
"""


class Synced(NamedTuple):
    """What an engine gets from the ledger at a weight sync."""

    cursor: int
    """The cursor to call with at the next weight sync."""
    lengths: Responses
    """Lengths of the responses since the cursor of the call."""
    nodes: tuple[str, ...]
    """Names of the histories of the run's nodes: the homes of its problems."""


class Ledger(LengthLog):
    """Keeps the lengths of the last responses and the figures of recent steps."""

    def __init__(self) -> None:
        super().__init__()
        begin = time.strftime("%Y%m%dT%H%M%S")
        run_id = uuid.uuid4().hex[:6]
        self._name = f"{begin}-{run_id}"
        self._reports = defaultdict[int, list[EngineStats]](list)
        """Reports of the replicas, by training step."""
        self._logged_faults: set[str] = set()
        """Kinds of fault that are in the log."""
        self._start_directory: str | None = None
        self._start_offset = 0
        self._nodes: tuple[str, ...] = ()
        self._version = -1
        self._cursor = 0
        """Responses that were known at the last weight sync."""
        self._lengths: dict[int, Responses] = {}
        """What `sync` has answered for this weight version, by cursor: engines call
        alike.
        """
        self._expected: dict[int, float] | None = None
        end_with_job()

    def sync(self, version: int, cursor: int) -> Synced:
        """Return what the run knows to an engine, or to a node's history for its
        engines, at a weight sync to `version`. The first call for a weight version
        fixes the answer for all: lengths that arrive later are returned at the next.
        `cursor`: of the last weight sync, 0: there was none.
        """
        if version > self._version:
            self._version = version
            self._cursor = self.count
            self._nodes = history_names()
            self._lengths = {}
            self._expected = None
        lengths = self._lengths.get(cursor)
        if lengths is None:
            lengths = self.since(cursor, self._cursor)
            self._lengths[cursor] = lengths
        return Synced(self._cursor, lengths, self._nodes)

    def expected_lengths(self) -> dict[int, float]:
        """Return the predicted lengths at the last weight sync."""
        if self._expected is None:
            self._expected = self.predictions()
        return self._expected

    def run(self) -> str:
        """Return the run's name, for its logs."""
        return self._name

    def start_from(self, directory: str | None, offset: int = 0) -> None:
        """Let the run's history begin with what lies in a directory (see
        `service.checkpoint`), whose weight versions are `offset` above the run's; None:
        it begins empty.
        """
        self._start_directory = directory
        self._start_offset = offset

    def start(self) -> tuple[str | None, int, int]:
        """Return what a node's history begins with, see `start_from`, and the run's
        weight version; -1: it has had no weight sync yet.
        """
        return self._start_directory, self._start_offset, self._version

    def report(self, step: int, report: EngineStats) -> None:
        """Keep one replica's counts of a step, with the keys of `EngineStats` and
        `RolloutClock`.
        """
        self._reports[step].append(report)
        oldest = step - _REPORTED_STEPS
        for reported in list(self._reports):
            if reported < oldest:
                del self._reports[reported]

    def metrics(self, step: int) -> dict[str, float]:
        """Return the figures of a step over all replicas, under the names the trainer
        logs; say in the log, once per run and kind of fault, why `das/health` is 0.
        """
        reports = self._reports.get(step, [])
        return figures(reports, self._logged_faults)


def wait_for_answer(call: ray.ObjectRef, timeout_s: float) -> Any:
    """Return what an actor answers; a call that times out is cancelled, so that nobody
    waits for its turn. RayError: there is no answer.
    """
    try:
        return ray.get(call, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        ray.cancel(call)
        raise


def ask(
    peer: Peer, call: Callable[[], ray.ObjectRef], timeout_s: float, message: str
) -> Any | None:
    """Return what an actor answers; None, where it has no answer within `timeout_s`,
    less where it had none before, is gone, or is something else. The log says `message`
    and why, once until it answers.
    """
    try:
        answer = wait_for_answer(call(), peer.patience_s(timeout_s))
    except _NO_ANSWER as error:
        peer.failed(message, error)
        return None
    peer.answered()
    return answer


def wait_for_answers(
    calls: Sequence[ray.ObjectRef], timeout_s: float, method: str
) -> list[Any]:
    """Return what several actors answer to a method; those that do not within
    `timeout_s`, or that fail, are left out, with a line in the log.
    """
    found = []
    deadline = time.monotonic() + timeout_s
    for call in calls:
        left_s = max(0.0, deadline - time.monotonic())
        try:
            answer = wait_for_answer(call, left_s)
            found.append(answer)
        except ray.exceptions.RayError as error:
            log_once(
                f"das: one of {len(calls)} actors has no answer to {method}", error
            )
    return found


def expected_lengths(timeout_s: float = _LENGTHS_S) -> ExpectedLengths | None:
    """Return the lengths that the ledger expects; None, with a line in the log, where
    it does not answer.
    """
    message = "das: no new predicted lengths; those from before stand"

    def call() -> ray.ObjectRef:
        return running_ledger().expected_lengths.remote()

    lengths = ask(of_ledger, call, timeout_s, message)
    return None if lengths is None else ExpectedLengths(lengths)


def name_in_run(part: str) -> str:
    """Return the name of an actor of this run: jobs that share a namespace have actors
    of their own.
    """
    job = ray.get_runtime_context().get_job_id()
    return f"{part}:{job}"


def history_name(node: str = "") -> str:
    """Return the name of a node's history; `node`: Ray's id of it, empty: this one."""
    if not node:
        node = ray.get_runtime_context().get_node_id()
    return f"{name_in_run(HISTORY)}:{node}"


def history_names() -> tuple[str, ...]:
    """Return the names of the histories of this run's nodes, sorted; each ends in `:`
    and Ray's id of its node.
    """
    alive = set()
    for node in ray.nodes():
        if node["Alive"]:
            alive.add(node["NodeID"])
    prefix = name_in_run(HISTORY) + ":"
    found = []
    for name in _actor_names():
        node_id = name.rpartition(":")[2]
        if name.startswith(prefix) and node_id in alive:
            found.append(name)
    return tuple(sorted(found))


def _actor_names() -> set[str]:
    actors = ray.util.list_named_actors(all_namespaces=True)
    return {found["name"] for found in actors}


def ledger() -> Any:
    """Return the run's ledger, started if need be; see `get_or_start_actor`."""
    return get_or_start_actor(name_in_run(_LEDGER), Ledger)


def running_ledger() -> Any:
    """Return the run's ledger; ValueError: there is none."""
    return find_actor(name_in_run(_LEDGER))


def find_actor(name: str) -> Any:
    """Return an actor of the run; ValueError: there is none of this name."""
    return ray.get_actor(name, NAMESPACE)


def get_or_start_actor(name: str, actor_class: type, *args: Any, **options: Any) -> Any:
    """Return the run's actor of this name; if there is none, it is started as
    `actor_class(*args)` with Ray's `options`. It outlives the process that started it,
    because engines come and go; `actor_class` calls `end_with_job`.
    """
    try:
        return find_actor(name)
    except ValueError:
        # not in the placement group of an engine
        options.setdefault("scheduling_strategy", "DEFAULT")
        options |= {"num_cpus": 0, "max_restarts": -1, "lifetime": "detached"}
        detached = ray.remote(**options)(actor_class)
        named = detached.options(name=name, namespace=NAMESPACE, get_if_exists=True)
        return named.remote(*args)


def end_earlier_run() -> None:
    """End what an earlier run of this job has left, before anything of a run is
    started: its lengths, figures and history, whose weight versions may be higher, are
    not the next one's.
    """
    if not ray.is_initialized():
        return
    of_run = {name_in_run(_LEDGER), *history_names()}
    names = of_run & _actor_names()
    if not names:
        return
    calls = []
    for name in names:
        if name.startswith(HISTORY):
            # it has ended, or is another thing of that name
            with contextlib.suppress(AttributeError, ValueError):
                history = find_actor(name)
                calls.append(history.end.remote())
    wait_for_answers(calls, _END_S, "end")
    for name in names:
        with contextlib.suppress(ValueError):
            ray.kill(find_actor(name))
    until = time.monotonic() + _END_S
    while names & _actor_names() and time.monotonic() < until:
        time.sleep(_END_POLL_S)


def end_with_job() -> None:
    """Let this actor end soon after its job: Ray keeps a detached one as long as the
    cluster. In a process that is no actor nothing happens.
    """
    if not ray.is_initialized():
        return
    context = ray.get_runtime_context()
    if context.get_actor_id() is None:
        return
    job = context.get_job_id()
    own = context.current_actor

    def watch() -> None:
        while True:
            time.sleep(_JOB_POLL_S)
            try:
                if _has_ended(job):
                    ray.kill(own)
            except Exception as error:  # Ray's head is restarted, say
                logger.warning("das: whether the job has ended is not known: %r", error)

    threading.Thread(target=watch, name="das-job", daemon=True).start()


def _has_ended(job: str) -> bool:
    for found in state.jobs():
        if found["JobID"] == job and found["IsDead"]:
            return True
    return False


def metrics(step: int) -> dict[str, float]:
    """Return the figures of a step, for the trainer's logger; none, with a warning, if
    the ledger does not answer.
    """
    message = "das: no rollout figures"

    def call() -> ray.ObjectRef:
        return running_ledger().metrics.remote(step)

    return ask(of_ledger, call, _METRICS_S, message) or {}
