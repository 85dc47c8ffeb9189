"""A node's history under Ray: an actor that runs the `Writer` of the node's directory, and speaks for its engines to
the ledger and to the histories of other nodes."""

from __future__ import annotations

import hashlib
import logging
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from das_adapter.config import HistoryConfig
from das_adapter.core.index.store import problems_in
from das_adapter.core.length import RESPONSE, Responses
from das_adapter.errors import DasError
from das_adapter.protocol.messages import Published, Trajectory, responses
from das_adapter.protocol.spool import BATCH, GRACE_S, KINDS, SEGMENTS, TEXTS, put, root_for
from das_adapter.service import checkpoint, ledger
from das_adapter.service.ledger import Synced, ask
from das_adapter.service.peers import PEER_S, Peers
from das_adapter.service.writer import Writer

logger = logging.getLogger("das_adapter")

_TICK_S = 0.5
"""How often a history looks for what has arrived."""
_LEDGER_S = 5.0
"""How long a weight sync waits for the ledger."""
_AT_A_SYNC = 250_000
"""Maximum tokens sealed synchronously at a weight sync; what has arrived before is sealed already."""
_TRIES = 2
"""Weight syncs that try to read what the run's history starts with; then it starts empty."""


class NodeHistory:
    """The history of the problems at home on a node. Whatever happens to the directory, `sync` answers.

    Each text that engines leave in the spool goes to its problem's home: here into the store, elsewhere through an
    outbox into that history's spool. A file is removed when all its texts are published here or have arrived there.
    """

    def __init__(
        self,
        config: HistoryConfig,
        name: str,
        root: str | None = None,
        grace_s: float = GRACE_S,
        node: str | None = None,
    ):
        """
        Args:
            config, name, root, grace_s: see `Writer`; where the directory can't be taken over, a new one is begun.
            node: its name among the histories of the run; None: all problems are at home here, and nothing is done
                but by calls.
        """
        root = root or str(root_for(name, config.max_bytes))
        try:
            self.writer = Writer(config, name, root, grace_s)
        except (DasError, OSError) as error:
            logger.error("das: history: %s/%s can't be taken over (%r); a new history begins", root, name, error)
            self.writer = Writer(config, Path(tempfile.mkdtemp(prefix=f"{name}-", dir=root)).name, root, grace_s)
        self._node = node or ""
        self._peers = Peers(self.writer, self._node)
        self._arrived: list[tuple[str, list[Trajectory]]] = []
        """Files of the spool that were read, whose texts have no place yet."""
        self._said: dict[tuple[int, int], Synced] = {}
        """What the ledger said, by weight version and cursor."""
        self._lengths: list[Responses] = []
        self._reports: list[tuple[int, dict[str, Any]]] = []
        self._engines: set[str] = set()
        self._heard: set[str] = set()
        """The engines that have had the last weight sync but one, and the last one."""
        self._version = self._tidied = 0
        self._synced = time.monotonic()
        self._told = 1.0
        """Seconds after the last weight sync at which lengths go to the ledger."""
        self._sealable = _AT_A_SYNC
        """Tokens that may still be sealed at this weight sync."""
        self._offset: int | None = None
        """Offset from this run's weight versions to the store's; None until the history has begun."""
        self._tries = _TRIES
        self._empty = not self.writer.store.tokens
        """Whether nothing was taken over."""
        if node is not None:
            threading.Thread(target=self._carry, name="das-carry", daemon=True).start()

    def directory(self) -> str:
        """Return where engines leave what they wrote."""
        self.writer.restore()
        return str(self.writer.directory)

    def sync(self, version: int, engine: str, cursor: int, rungs: Sequence[int]) -> tuple[Published, Synced | None]:
        """Publish what has arrived, at a weight sync of one engine.

        Args:
            version: the engine's weight version from now on.
            engine: who asks.
            cursor, rungs: see `Ledger.sync`.

        Returns:
            What to map, and what the ledger says; None: it does not answer.
        """
        if first := version > self._version:
            self._version, self._synced, self._told, self._sealable = version, time.monotonic(), 1.0, _AT_A_SYNC
            self._engines, self._heard = self._heard, set()
        self._heard.add(engine)
        synced = None
        try:
            self._take((BATCH,))
            synced = self._ask(version, cursor, rungs)
            if first:
                self._peers.drop_guests()
                self.writer.restore()
            self._begin()
            self._distribute()
            self._sealable -= self.writer.publish(self._sealable)
            self.writer.recovered()
        except Exception as error:
            self.writer.report(error)
        self._peers.post()
        return Published(str(self.writer.directory), self.writer.store.generation), synced

    def report(self, step: int, counts: dict[str, Any]) -> None:
        """Take an engine's counts of a step; the ledger gets those of all engines together."""
        with self.writer.lock:
            self._reports.append((step, {**counts, "staged_bytes": self.writer.spool.nbytes}))

    @ray.method(concurrency_group="peers")
    def receive(self, content: bytes) -> None:
        """Take texts from another node, see `pack`; they are safe when it returns, and dropped if they came before."""
        self._put(TEXTS, content)

    @ray.method(concurrency_group="peers")
    def give(self, problems: Sequence[int]) -> bytes:
        """Return the history of some problems, see `HistoryStore.give`."""
        return self._peers.given(np.array(problems, dtype=np.uint64))

    @ray.method(concurrency_group="peers")
    def absorb(self, content: bytes) -> None:
        """Take the history of problems that are at home here from now on, see `HistoryStore.give`; it is safe when this
        returns."""
        self._put(SEGMENTS, content)

    @ray.method(concurrency_group="engines")
    def fetch(self, problems: Sequence[int]) -> list[str]:
        """Return files with the history of problems at home elsewhere, see `Peers.fetch`."""
        return self._peers.fetch(problems)

    def flush(self) -> None:
        """Bring all texts here to their homes, and lengths to the ledger, and wait for that; for a checkpoint."""
        until = time.monotonic() + PEER_S
        self._take()
        self._send_lengths(wait=True)
        self._distribute()
        self._peers.post()
        while not self._peers.sent() and time.monotonic() < until:
            time.sleep(_TICK_S / 5)

    def save(self, path: str) -> None:
        """Write the history at home here to a file, including what arrived since the last weight sync."""
        self._take()
        self._distribute()
        self.writer.save(path)

    def figures(self) -> dict[str, int | str]:
        """Return the writer's figures."""
        return self.writer.figures()

    def tick(self) -> None:
        """Do what waits for no weight sync: take what has arrived, send what is for others, apply the byte budget."""
        self._take()
        self._distribute()
        self.writer.seal_ahead()
        if self._lengths and time.monotonic() > self._synced + self._told:
            self._told *= 2
            self._send_lengths()
        self._send_reports()
        self._peers.work()
        if self._tidied < self._version:
            self._tidied = self._version
            self.writer.tidy()
        self._peers.move()

    def _carry(self) -> None:
        trouble = ""
        while True:
            time.sleep(_TICK_S)
            try:
                self.tick()
                trouble = ""
            except Exception as error:
                if trouble != repr(error):
                    logger.exception("das: history: what waits is done later")
                trouble = repr(error)

    def _put(self, kind: str, content: bytes) -> None:
        """Leave a message in the spool; one that comes twice while it waits there is one file."""
        put(self.writer.directory, f"{kind}-{hashlib.blake2b(content, digest_size=16).hexdigest()}", content)

    def _take(self, kinds: Sequence[str] = KINDS) -> None:
        """Read what has arrived in the spool."""
        with self.writer.lock:
            for file, texts in self.writer.read(kinds):
                self._arrived.append((file, texts))
                if file.startswith(BATCH):  # others were counted where they came from
                    self._lengths.append(responses(texts))

    def _distribute(self) -> None:
        """Bring the texts that were read to their homes, once the history has begun."""
        while self._arrived and self._offset is not None:
            with self.writer.lock:
                if self._arrived:
                    self._peers.distribute(*self._arrived.pop(0), self._offset)

    def _ask(self, version: int, cursor: int, rungs: Sequence[int]) -> Synced | None:
        """Send the ledger what the engines counted and wrote, and take what it says."""
        try:
            self._send_lengths()
            if self._heard >= self._engines:
                self._send_reports(wait=True)
            if (version, cursor) not in self._said:
                synced: Synced = ask(ledger.running().sync.remote(version, cursor, rungs), _LEDGER_S)
                self._said = {key: said for key, said in self._said.items() if key[0] == version}
                self._said[version, cursor] = synced
        except (ValueError, ray.exceptions.RayError) as error:
            logger.warning("das: history: the ledger does not answer: %r", error)
            return None
        synced = self._said[version, cursor]
        if self._node in synced.nodes and synced.nodes != self._peers.nodes:
            with self.writer.lock:
                self._arrived += self._peers.reorder(synced.nodes)
        return synced

    def _send_lengths(self, wait: bool = False) -> None:
        with self.writer.lock:
            sent, self._lengths = self._lengths, []
        if sent:
            call = ledger.running().add.remote(np.concatenate([np.zeros(0, RESPONSE), *sent]))
            if wait:
                ask(call, PEER_S)

    def _send_reports(self, wait: bool = False) -> None:
        with self.writer.lock:
            sent, self._reports = self._reports, []
        if sent:
            call = ledger.running().reports.remote(sent)
            if wait:
                ask(call, _LEDGER_S)

    def _begin(self) -> None:
        """Start the history from what lies in the directory, else from what the run was given. What fails is tried
        again at the next weight sync; until then texts wait in the spool."""
        if self._offset is not None:
            return
        store = self.writer.store
        start, offset = ask(ledger.running().start.remote(self._node), PEER_S)
        try:
            if start and self._empty:
                for path in checkpoint.parts(Path(start)):
                    store.absorb(path, self._peers.by_home(problems_in(path)).get(self._node, ()))
                self.writer.altered = True
        except (DasError, OSError) as error:
            self._tries -= 1
            self.writer.report(error)
            if self._tries:
                raise
        self._offset = max(offset, store.newest - self._version if store.tokens else 0)


def here(config: HistoryConfig, root: str | None = None, grace_s: float = GRACE_S) -> Any:
    """Return this node's history, started if need be. It lives as long as the process that started it."""
    context = ray.get_runtime_context()
    node, name = context.get_node_id(), ledger.history_here()
    options = {
        "concurrency_groups": {"peers": 2, "engines": 1},
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
    }
    directory = f"das-history-{context.get_job_id()}-{node[:16]}"
    return ledger.named(name, NodeHistory, config, directory, root, grace_s, name, **options)
