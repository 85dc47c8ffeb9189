"""A run's ledger, a Ray actor: how long responses were, the engines' counts, added up
to one set of figures per training step, and what the run's history starts from.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

import ray
from ray._private import state

from das_adapter.core.length import ExpectedLengths, LengthLog, Responses
from das_adapter.protocol.metrics import figures

logger = logging.getLogger("das_adapter")

_LOOK_S = 5.0
"""How often an actor of a run looks whether its job has ended."""
_END_S = 30.0
"""How long a run waits for what an earlier run of its job has left."""


class Synced(NamedTuple):
    """What an engine hears at a weight sync."""

    cursor: int
    """To ask with at the next weight sync."""
    lengths: Responses
    """Of the responses since the cursor."""
    nodes: tuple[str, ...]
    """Names of the histories of the run's nodes: the homes of its problems."""


class Ledger(LengthLog):
    """Keeps the lengths of the last responses and the figures of recent steps."""

    def __init__(self) -> None:
        super().__init__()
        self._name = f"{time.strftime('%Y%m%dT%H%M%S')}-{uuid.uuid4().hex[:6]}"
        self._reports: dict[int, list[dict[str, Any]]] = {}
        self._told: set[str] = set()
        """Faults that were logged."""
        self._start: tuple[str | None, int] = None, 0
        self._nodes: tuple[str, ...] = ()
        self._version = -1
        self._heard = 0
        self._lengths: dict[int, Responses] = {}
        """What `sync` has answered for this weight version, by cursor: engines ask
        alike.
        """
        self._expected: dict[int, float] | None = None
        end_with_job()

    def sync(self, version: int, cursor: int) -> Synced:
        """Tell an engine, or a node's history for its engines, what the run knows, at a
        weight sync to `version`. The first call for a weight version fixes the answer
        for all: lengths that arrive later are told at the next. `cursor`: of the last
        weight sync, 0: there was none.
        """
        if version > self._version:
            self._version, self._heard, self._nodes = version, self.count, histories()
            self._lengths = {}
            self._expected = None
        if cursor not in self._lengths:
            self._lengths[cursor] = self.since(cursor, self._heard)
        return Synced(self._heard, self._lengths[cursor], self._nodes)

    def expected(self) -> dict[int, float]:
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
        self._start = directory, offset

    def start(self) -> tuple[str | None, int, int]:
        """Return what a node's history begins with, see `start_from`, and the run's
        weight version; -1: it has had no weight sync yet.
        """
        return *self._start, self._version

    def report(self, step: int, report: dict[str, Any]) -> None:
        """Take one replica's counts of a step, with the keys of `EngineStats` and
        `RolloutClock`.
        """
        self._reports.setdefault(step, []).append(report)
        for old in [s for s in self._reports if s < step - 8]:
            del self._reports[old]

    def metrics(self, step: int) -> dict[str, float]:
        """Return the figures of a step over all replicas, under the names the trainer
        logs; say in the log, once per run and kind of fault, why `das/health` is 0.
        """
        return figures(self._reports.get(step, []), self._told)


def ask(call: ray.ObjectRef, timeout: float) -> Any:
    """Wait for what an actor answers; a call that times out is taken back, so that
    nobody waits for its turn. RayError: there is no answer.
    """
    try:
        return ray.get(call, timeout=timeout)
    except ray.exceptions.GetTimeoutError:
        ray.cancel(call)
        raise


def answers(calls: Sequence[ray.ObjectRef], timeout: float, what: str) -> list[Any]:
    """Wait for what several actors answer to `what`; those that do not within `timeout`
    seconds, or that fail, are left out, with a line in the log.
    """
    found = []
    deadline = time.monotonic() + timeout
    for call in calls:
        try:
            found.append(ask(call, max(0.0, deadline - time.monotonic())))
        except ray.exceptions.RayError as error:
            logger.warning(
                "das: one of %s actors has no answer to %s: %r", len(calls), what, error
            )
    return found


def expected(timeout: float) -> ExpectedLengths | None:
    """Ask for what is expected; None, with a line in the log, where the ledger does not
    answer.
    """
    try:
        return ExpectedLengths(ask(running().expected.remote(), timeout))
    except (ValueError, ray.exceptions.RayError) as error:
        logger.warning(
            "das: no new predicted lengths; those from before stand: %r", error
        )
        return None


def name_of(part: str) -> str:
    """Return the name of an actor of this run: jobs that share a namespace have actors
    of their own.
    """
    return f"{part}:{ray.get_runtime_context().get_job_id()}"


NAMESPACE = "das_adapter"
"""Ray's namespace of the actors of all runs: Ray warns of detached ones in a namespace
without a name.
"""
HISTORY = "das_history"


def histories() -> tuple[str, ...]:
    """Return the names of the histories of this run's nodes, sorted; each ends in `:`
    and Ray's id of its node.
    """
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    own = (name for name in _names() if name.startswith(f"{name_of(HISTORY)}:"))
    return tuple(sorted(name for name in own if name.rpartition(":")[2] in alive))


def _names() -> set[str]:
    return {found["name"] for found in ray.util.list_named_actors(all_namespaces=True)}


def history_of(node: str = "") -> str:
    """Return the name of a node's history; `node`: Ray's id of it, empty: this one."""
    return f"{name_of(HISTORY)}:{node or ray.get_runtime_context().get_node_id()}"


def ledger() -> Any:
    """Return the run's ledger, started if need be; see `named`."""
    return named(name_of("das_ledger"), Ledger)


def running() -> Any:
    """Return the run's ledger; ValueError: there is none."""
    return actor(name_of("das_ledger"))


def actor(name: str) -> Any:
    """Return an actor of the run; ValueError: there is none of this name."""
    return ray.get_actor(name, NAMESPACE)


def named(name: str, kind: type, *args: Any, **options: Any) -> Any:
    """Return the run's actor of this name; if there is none, it is started as
    `kind(*args)` with Ray's `options`. It outlives the process that started it, because
    engines come and go; `kind` calls `end_with_job`.
    """
    try:
        return actor(name)
    except ValueError:
        # not in the placement group of an engine
        options = {
            "scheduling_strategy": "DEFAULT",
            **options,
        }
        started = ray.remote(
            num_cpus=0, max_restarts=-1, lifetime="detached", **options
        )(kind)
        return started.options(
            name=name, namespace=NAMESPACE, get_if_exists=True
        ).remote(*args)


def end_earlier() -> None:
    """End what an earlier run of this job has left, before anything of a run is
    started: its lengths, figures and history, whose weight versions may be higher, are
    not the next one's.
    """
    names = (
        {name_of("das_ledger"), *histories()} & _names()
        if ray.is_initialized()
        else set[str]()
    )
    if not names:
        return
    answers(
        [actor(name).end.remote() for name in names if name.startswith(HISTORY)],
        _END_S,
        "end",
    )
    for name in names:
        with contextlib.suppress(ValueError):
            ray.kill(actor(name))
    until = time.monotonic() + _END_S
    while names & _names() and time.monotonic() < until:
        time.sleep(0.05)


def end_with_job() -> None:
    """Let this actor end soon after its job: Ray keeps a detached one as long as the
    cluster. In a process that is no actor nothing happens.
    """
    context = ray.get_runtime_context() if ray.is_initialized() else None
    if context is None or context.get_actor_id() is None:
        return
    job = context.get_job_id()
    own = context.current_actor

    def watch() -> None:
        while True:
            time.sleep(_LOOK_S)
            try:
                if any(
                    found["JobID"] == job and found["IsDead"] for found in state.jobs()
                ):
                    ray.kill(own)
            except Exception as error:  # Ray's head is restarted, say
                logger.warning("das: whether the job has ended is not known: %r", error)

    threading.Thread(target=watch, name="das-job", daemon=True).start()


def metrics(step: int) -> dict[str, float]:
    """Return the figures of a step, for the trainer's logger; none, with a warning, if
    the ledger does not answer.
    """
    try:
        found: dict[str, float] = ask(running().metrics.remote(step), timeout=10)
        return found
    except (ValueError, ray.exceptions.RayError) as error:
        logger.warning("das: no rollout figures for step %s: %r", step, error)
        return {}
