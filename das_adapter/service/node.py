"""A node's history under Ray: an actor that runs the `Writer` of the node's directory,
and speaks for its engines to the ledger and to the histories of other nodes.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
import time
import uuid
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from das_adapter.config import HistoryConfig
from das_adapter.core.homes import homes
from das_adapter.core.index.store import problems_in
from das_adapter.core.length import Responses
from das_adapter.errors import DasError
from das_adapter.protocol.messages import Published, Trajectory, pack, responses
from das_adapter.protocol.spool import AWAY, BATCH, GRACE_S, TEXTS, directory_for, put
from das_adapter.service import checkpoint, ledger
from das_adapter.service.ledger import Synced, ask
from das_adapter.service.writer import Writer

logger = logging.getLogger("das_adapter")

_TICK_S = 0.5
"""How often a history looks for what has arrived."""
_LEDGER_S = 5.0
"""How long a weight sync waits for the ledger."""
_PEER_S = 20.0
"""How long a checkpoint waits for what is for the ledger, and for other nodes."""
_OUTBOX = 4
"""Texts on their way to other nodes take at most this part of `max_bytes`."""
_AT_A_SYNC = 250_000
"""Maximum tokens sealed synchronously at a weight sync; what has arrived before is
sealed already.
"""


class NodeHistory:
    """The history of the problems at home on a node: each text that engines leave in
    the spool goes to its problem's home. When nodes come or go, problems that have a
    new home begin anew there. Whatever happens to the directory, `sync` answers. Calls
    of the node's engines, those of other nodes, a checkpoint's and `tick` come in
    threads of their own, which share the writer, whose lock is held while the history
    begins, and from `read` to `keep`.
    """

    def __init__(
        self,
        config: HistoryConfig,
        name: str,
        root: str | None = None,
        grace_s: float = GRACE_S,
        node: str | None = None,
    ):
        """`name`: of the directory, where it can't be taken over, a new one is begun;
        `root`: where it lies, None: see `directory_for`; `node`: its name among the
        histories of the run, None: all problems are at home here, and no thread
        works.
        """
        own = ray.get_runtime_context().get_node_id()
        beside = sum(
            int(n["Resources"].get("object_store_memory", 0))
            for n in ray.nodes()
            if n["NodeID"] == own
        )
        directory = (
            Path(root) / name if root else directory_for(name, config.max_bytes, beside)
        )
        try:
            self.writer = Writer(config, directory, grace_s, beside)
        except (DasError, OSError) as error:
            logger.error(
                "das: history: %s can't be taken over (%r); a new history begins",
                directory,
                error,
            )
            begun = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=directory.parent))
            self.writer = Writer(config, begun, grace_s, beside)
        self._node = node or ""
        self._nodes: tuple[str, ...] = (self._node,)
        self._sending: dict[str, ray.ObjectRef] = {}
        """By file: calls of other nodes' histories."""
        self._unreached = set[str]()
        """Those to which texts could not be sent the last time."""
        self._lengths = deque[Responses](maxlen=2**12)
        """Of the last batches, for the ledger."""
        self._version = -1
        """The newest of the node's engines; -1: none has had a weight sync."""
        self._sealable = _AT_A_SYNC
        """Tokens that may still be sealed at this weight sync."""
        self._offset: int | None = None
        """Offset from this run's weight versions to the store's; None until the history
        has begun: texts wait.
        """
        self._start: str | None = None
        self._loaded: set[Path] = set()
        """Saved history that is to be taken in, and the files of it that were."""
        if node is not None:
            threading.Thread(target=self._carry, name="das-carry", daemon=True).start()
        ledger.end_with_job()

    def directory(self) -> str:
        """Return where engines leave what they wrote."""
        self.writer.restore()
        return str(self.writer.directory)

    def sync(self, version: int, cursor: int) -> tuple[Published, Synced | None]:
        """Publish what has arrived, at a weight sync of one engine; return what to map,
        and what the ledger says (None: it does not answer). Arguments as in
        `Ledger.sync`.
        """
        if version > self._version:
            self._version = version
            self._sealable = _AT_A_SYNC
        synced = None
        try:
            self.writer.restore()
            self._begin()
            self._take()
            synced = self._ask(version, cursor)
            self._sealable -= self.writer.publish(self._sealable)
        except Exception as error:
            self.writer.report(error)
        return (
            Published(str(self.writer.directory), self.writer.store.generation),
            synced,
        )

    @ray.method(concurrency_group="peers")
    def receive(self, file: str, content: bytes) -> None:
        """Take texts of another node (see `pack`), which are safe when this returns."""
        put(self.writer.directory, file, content)

    @ray.method(concurrency_group="peers")
    def give(self, problems: Sequence[int]) -> bytes:
        """Return the history of some problems, see `HistoryStore.give`."""
        # the next store of the directory removes it
        path = self.writer.directory / f"{uuid.uuid4().hex}.tmp"
        try:
            self.writer.store.give(path, np.array(problems, dtype=np.uint64))
            return path.read_bytes()
        finally:
            path.unlink(missing_ok=True)

    def end(self) -> None:
        """Remove the history: its run has ended, and another one of its job begins."""
        with self.writer.lock:
            self.writer.store.close()
            shutil.rmtree(self.writer.directory, ignore_errors=True)

    @ray.method(concurrency_group="checkpoints")
    def flush(self) -> int:
        """Bring all texts here to their homes, and lengths to the ledger, and wait for
        that, for a checkpoint; return how many files of texts are still on their
        way.
        """
        until = time.monotonic() + _PEER_S
        self._take()
        self._send(wait=True)
        while (left := len(self.writer.waiting(AWAY))) and time.monotonic() < until:
            time.sleep(_TICK_S / 5)
        return left

    @ray.method(concurrency_group="checkpoints")
    def save(self, path: str) -> None:
        """Write the history at home here to a file, including what arrived since the
        last weight sync.
        """
        self._take()
        self.writer.publish()
        self.writer.store.save(path)

    def tick(self) -> None:
        """Do what waits for no weight sync of this node's engines, which may sleep:
        begin, send what is for others, take what has arrived, and what follows.
        """
        if self._offset is None:
            self._begin()
        self._deliver()
        self._take()
        self._send()
        self.writer.work(_TICK_S)

    def _carry(self) -> None:
        while True:
            time.sleep(_TICK_S)
            try:
                self.tick()
            except Exception as error:  # what waits is done later
                self.writer.report(error)

    def _take(self) -> None:
        """Bring what has arrived in the spool to its homes, once the history has
        begun.
        """
        if self._offset is None:
            return
        with self.writer.lock:
            for file, texts in self.writer.read():
                own = (
                    self._distributed(file, texts) if file.startswith(BATCH) else texts
                )
                self.writer.keep(
                    file,
                    [
                        text._replace(version=text.version + self._offset)
                        for text in own
                    ],
                )
                if file.startswith(BATCH):  # others were counted where they came from
                    self._lengths.append(responses(texts))

    def _distributed(self, file: str, texts: list[Trajectory]) -> list[Trajectory]:
        """Leave texts of an engine that are at home elsewhere in the spool, for
        `_deliver`; return the others.
        """
        nodes = self._nodes  # a weight sync may change it meanwhile
        # all nodes are home to everything
        if self.writer.policy.config.scope == "global":
            parts = dict.fromkeys(nodes, texts)
        else:
            parts = {}
            for text, home in zip(
                texts, homes([text.problem for text in texts], nodes), strict=True
            ):
                parts.setdefault(nodes[home], []).append(text)
        own = parts.pop(self._node, [])
        for home, part in parts.items():
            put(
                self.writer.directory,
                file.replace(BATCH, f"{AWAY}-{home}", 1),
                pack(part),
            )
        return own

    def _deliver(self) -> None:
        """Send what is at home elsewhere, and remove what has arrived; what has not is
        sent again. If too much waits, the oldest is given up. Nothing is done before
        the history has begun, which tells the other nodes.
        """
        if self._offset is None:
            return
        waiting = sorted(
            ((path.stat(), path) for path in self.writer.waiting(AWAY)),
            key=lambda file: file[0].st_mtime,
        )
        beyond = (
            sum(stat.st_size for stat, _ in waiting)
            - self.writer.policy.config.max_bytes // _OUTBOX
        )
        told = self._unreached
        self._unreached = set[str]()
        for stat, path in waiting:
            if beyond > 0:
                beyond -= stat.st_size
                path.unlink()
                self._sending.pop(path.name, None)
                self.writer.report(
                    DasError(
                        f"the oldest texts for other nodes are lost: 1/{_OUTBOX} of"
                        " max_bytes waits"
                    )
                )
                continue
            _, peer, rest = path.name.split("-", 2)
            try:
                call = self._sending.pop(path.name, None)
                if peer not in self._nodes:  # it went
                    # which this node has, too
                    if self.writer.policy.config.scope == "global":
                        path.unlink()
                    else:
                        path.rename(
                            path.with_name(f"{TEXTS}-{rest}-{peer.rpartition(':')[2]}")
                        )
                elif call is None:
                    call = ledger.actor(peer).receive.remote(
                        f"{TEXTS}-{rest}", path.read_bytes()
                    )
                    self._sending[path.name] = call
                elif ray.wait([call], timeout=0)[0]:
                    ray.get(call, timeout=_PEER_S)
                    path.unlink()
                else:
                    self._sending[path.name] = call
            except (
                ValueError,
                ray.exceptions.RayError,
            ) as error:  # it ended, or there is no room for the message
                if peer not in told | self._unreached:
                    logger.warning(
                        "das: history: texts did not reach %s and are sent again: %r",
                        peer,
                        error,
                    )
                self._unreached.add(peer)

    def _ask(self, version: int, cursor: int) -> Synced | None:
        try:
            self._send()
            # it has those now
            synced: Synced = ask(
                ledger.running().sync.remote(version, cursor), _LEDGER_S
            )
        except (ValueError, ray.exceptions.RayError) as error:
            logger.warning("das: history: the ledger does not answer: %r", error)
            return None
        self._meet(synced.nodes)
        return synced

    def _meet(self, nodes: tuple[str, ...]) -> None:
        # else this node joins, and the others know at the next weight sync
        if self._node in nodes:
            self._nodes = nodes

    def _send(self, wait: bool = False) -> None:
        """Send the ledger the lengths of what the engines wrote; ValueError: there is
        none, and they are kept.
        """
        if not self._lengths:
            return
        actor = ledger.running()
        with self.writer.lock:
            # another thread may have sent them meanwhile
            lengths = np.concatenate([responses(()), *self._lengths])
            self._lengths.clear()
        call = actor.add.remote(lengths)
        if wait:
            ask(call, _PEER_S)

    def _begin(self) -> None:
        """Go on with what lies in the directory, or take in what the run starts with;
        nothing is done before the run's first weight sync, which says what its weight
        version is.
        """
        with self.writer.lock:  # two threads may begin
            if self._offset is None:
                store = self.writer.store
                start, offset, version = ask(ledger.running().start.remote(), _PEER_S)
                if (version := max(version, self._version)) < 0:
                    return
                self._meet(ledger.histories())
                self._start = None if store.tokens else start
                self._offset = max(
                    offset, store.newest - version if store.tokens else 0
                )
            self._load()

    def _load(self) -> None:
        """Take in what the run starts with; what can't be read now is tried again at
        the next weight sync.
        """
        try:
            parts = checkpoint.parts(Path(self._start)) if self._start else []
            # is in each part, less in that of a late node
            everything = self.writer.policy.config.scope == "global"
            for path in sorted(parts, key=lambda part: -part.stat().st_size):
                if path in self._loaded:
                    continue
                try:
                    problems = problems_in(path)
                    if not everything:
                        problems = problems[
                            homes(problems, self._nodes)
                            == self._nodes.index(self._node)
                        ]
                    self.writer.store.absorb(path, problems)
                    self.writer.altered = True
                    if everything:
                        break
                except DasError as error:  # it is damaged
                    self.writer.report(error)
                self._loaded.add(path)
            self._start = None
        except OSError as error:
            self.writer.report(error)


def here(config: HistoryConfig, grace_s: float = GRACE_S) -> Any:
    """Return this node's history, started if need be; see `ledger.named`."""
    context = ray.get_runtime_context()
    node = context.get_node_id()
    name = ledger.history_of()
    options = {
        "concurrency_groups": {
            "peers": 2,
            "checkpoints": 1,
        },  # weight syncs wait for neither
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
    }
    directory = f"das-history-{context.get_job_id()}-{node[:16]}"
    return ledger.named(
        name, NodeHistory, config, directory, None, grace_s, name, **options
    )
