"""A node's history under Ray: an actor that runs the `Writer` of the node's directory, and speaks for its engines to
the ledger and to the histories of other nodes."""

from __future__ import annotations

import hashlib
import logging
import os
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
from das_adapter.protocol.spool import BATCH, GRACE_S, KINDS, put, root_for
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
    """The history of the problems at home on a node: each text that engines leave in the spool goes to its problem's
    home. Whatever happens to the directory, `sync` answers."""

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
            config: the run's `history:` block.
            name: of the directory; where it can't be taken over, a new one is begun.
            root: where it lies; None: in shared memory if there is room for `max_bytes`.
            grace_s: see `GRACE_S`.
            node: its name among the histories of the run; None: all problems are at home here, and no thread works.
        """
        directory = Path(root or root_for(name, config.max_bytes)) / name
        try:
            self.writer = Writer(config, directory, grace_s)
        except (DasError, OSError) as error:
            logger.error("das: history: %s can't be taken over (%r); a new history begins", directory, error)
            self.writer = Writer(config, Path(tempfile.mkdtemp(prefix=f"{name}-", dir=directory.parent)), grace_s)
        self._node = node or ""
        self._peers = Peers(self.writer, self._node)
        self._arrived: list[tuple[str, list[Trajectory]]] = []
        """Files of the spool that were read, whose texts have no place yet."""
        self._lengths: list[Responses] = []
        self._reports: list[tuple[int, dict[str, Any]]] = []
        self._version = self._tidied = 0
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

    def sync(self, version: int, cursor: int, rungs: Sequence[int]) -> tuple[Published, Synced | None]:
        """Publish what has arrived, at a weight sync of one engine; return what to map, and what the ledger says (None:
        it does not answer). Arguments as in `Ledger.sync`."""
        if first := version > self._version:
            self._version, self._sealable = version, _AT_A_SYNC
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
        except Exception as error:
            self.writer.report(error)
        self._post()
        return Published(str(self.writer.directory), self.writer.store.generation), synced

    def report(self, step: int, counts: dict[str, Any]) -> None:
        """Take an engine's counts of a step; the ledger gets those of all engines together."""
        with self.writer.lock:
            self._reports.append((step, {**counts, "staged_bytes": self.writer.spool.nbytes}))

    @ray.method(concurrency_group="peers")
    def receive(self, kind: str, content: bytes) -> None:
        """Take what another node sends: texts (see `pack`), or the history of problems that are at home here from now
        on (see `HistoryStore.give`). It is safe when this returns; one that comes twice while it waits is one file."""
        put(self.writer.directory, f"{kind}-{hashlib.blake2b(content, digest_size=16).hexdigest()}", content)

    @ray.method(concurrency_group="peers")
    def give(self, problems: Sequence[int]) -> bytes:
        """Return the history of some problems, see `HistoryStore.give`."""
        return self._peers.given(np.array(problems, dtype=np.uint64))

    @ray.method(concurrency_group="engines")
    def fetch(self, problems: Sequence[int]) -> list[str]:
        """Return files with the history of problems at home elsewhere, see `Peers.fetch`."""
        return self._peers.fetch(problems)

    def flush(self) -> None:
        """Bring all texts here to their homes, and lengths to the ledger, and wait for that; for a checkpoint."""
        until = time.monotonic() + PEER_S
        self._take()
        self._send(wait=True)
        self._distribute()
        self._post()
        while any(outbox.texts for outbox in self._peers.outboxes) and time.monotonic() < until:
            time.sleep(_TICK_S / 5)

    def save(self, path: str) -> None:
        """Write the history at home here to a file, including what arrived since the last weight sync."""
        self._take()
        self._distribute()
        self.writer.publish()
        self.writer.store.save(path)

    def figures(self) -> dict[str, int | str]:
        """Return the size of the history, what waits, where it lies, and this process's id."""
        store = self.writer.store
        return {
            "tokens": store.tokens,
            "problems": store.problems,
            "bytes": store.nbytes,
            "staged": store.staged,
            "spool": self.writer.spool.nbytes,
            "directory": str(store.directory),
            "pid": os.getpid(),
        }

    def tick(self) -> None:
        """Do what waits for no weight sync: take what has arrived, send what is for others, apply the byte budget."""
        self._take()
        self._distribute()
        self.writer.seal_ahead()
        self._send()
        for outbox in self._peers.outboxes:
            outbox.work()
        if self._tidied < self._version:
            self._tidied = self._version
            self.writer.policy.tidy(self.writer.store)
        self._peers.move()

    def _carry(self) -> None:
        while True:
            time.sleep(_TICK_S)
            try:
                self.tick()
            except Exception as error:  # what waits is done later
                self.writer.report(error)

    def _post(self) -> None:
        """Let what is for other nodes be sent without waiting for more."""
        for outbox in self._peers.outboxes:
            outbox.post()

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
        """Tell the ledger what it has not heard, and take what it says."""
        try:
            self._send()
            synced: Synced = ask(ledger.running().sync.remote(version, cursor, rungs), _LEDGER_S)  # it has those now
        except (ValueError, ray.exceptions.RayError) as error:
            logger.warning("das: history: the ledger does not answer: %r", error)
            return None
        if self._node in synced.nodes and synced.nodes != self._peers.nodes:
            with self.writer.lock:
                self._arrived += self._peers.reorder(synced.nodes)
        return synced

    def _send(self, wait: bool = False) -> None:
        """Send the ledger what the engines wrote and counted; ValueError: there is none, and it is kept."""
        if not (self._lengths or self._reports):
            return
        actor = ledger.running()
        with self.writer.lock:
            lengths, self._lengths = self._lengths, []
            reports, self._reports = self._reports, []
        call = actor.take.remote(np.concatenate([np.zeros(0, RESPONSE), *lengths]), reports)
        if wait:
            ask(call, PEER_S)

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


def here(config: HistoryConfig, grace_s: float = GRACE_S) -> Any:
    """Return this node's history, started if need be. It lives as long as the process that started it."""
    context = ray.get_runtime_context()
    node, name = context.get_node_id(), ledger.history_here()
    options = {
        "concurrency_groups": {"peers": 2, "engines": 1},
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
    }
    directory = f"das-history-{context.get_job_id()}-{node[:16]}"
    return ledger.named(name, NodeHistory, config, directory, None, grace_s, name, **options)
