"""A node's history: a Ray actor that takes trajectories from the engines of all nodes, and publishes them in shared
memory for the engines of its own."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from das_adapter.config import HistoryConfig
from das_adapter.core.history import HistoryPolicy
from das_adapter.core.index.store import HistoryStore
from das_adapter.core.length import Responses
from das_adapter.errors import DasError
from das_adapter.protocol.messages import Published, Trajectory
from das_adapter.service import checkpoint, janitor, ledger
from das_adapter.service.batches import Batch, Batches

logger = logging.getLogger("das_adapter")

_SHARED_MEMORY = Path("/dev/shm")
_BATCHES = "batches"
"""File of the batches that are published in a directory."""
_PEER_S = 20.0
"""How long the first weight sync waits for a peer's history."""
GRACE_S = 20.0
"""How long a directory outlives the actor that wrote it, so that its successor can take it over."""

Copy = tuple[bytes, Batches]
"""(what `HistoryStore.save` wrote, the batches in it)."""


class NodeHistory:
    """The writer of one directory. Whatever happens to the directory, `sync` answers."""

    def __init__(self, config: HistoryConfig, name: str, root: str | None = None, grace_s: float = GRACE_S):
        """
        Args:
            config: the run's `history:` block.
            name: of the directory; a history that an earlier actor left there is taken over.
            root: where the directory lies; None: in shared memory if there is room for `max_bytes`.
            grace_s: see `GRACE_S`.
        """
        self._policy, self._name, self._root, self._grace_s = HistoryPolicy(config), name, root, grace_s
        self._staged: dict[Batch, Sequence[Trajectory]] = {}
        self._sealing = threading.RLock()
        self._version = self._tidied = 0
        self._offset: int | None = None
        """Offset from this run's weight versions to the store's; None before the first weight sync."""
        self._trouble = ""
        self._store = self._open()
        self._published = Batches.read(self._store.directory / _BATCHES)

    def push(self, source: str, number: int, trajectories: Sequence[Trajectory]) -> None:
        """Take a batch of finished trajectories; the first one after a weight sync also drops what is too much.

        Args:
            source: who sends.
            number: of the batch; one that was taken before is ignored.
            trajectories: of any weight versions.
        """
        if (source, number) not in self._published:
            self._staged.setdefault((source, number), trajectories)
            if self._offset is not None:
                self._give()
                self._store.seal_ahead(self._policy.config.window)
        if self._tidied < self._version:
            self._tidied = self._version
            self._tidy()

    def sync(self, version: int, source: str, numbers: Sequence[int]) -> tuple[Published, list[int]]:
        """Publish what has arrived, at a weight sync of one engine.

        Args:
            version: the engine's weight version from now on.
            source: who asks.
            numbers: of the batches that it has sent and that are not confirmed yet.

        Returns:
            What to map, and which of `numbers` are not in it.
        """
        self._version = max(self._version, version)
        try:
            self._rescue()
            if self._offset is None:
                self._begin()
            self._seal()
            self._trouble = ""
        except Exception as error:
            self._report(error)
        return Published(str(self._store.directory), self._store.generation), self.lacks(source, numbers)

    def lacks(self, source: str, numbers: Sequence[int]) -> list[int]:
        """Return which of a source's batches are not published here."""
        return [number for number in numbers if (source, number) not in self._published]

    def save(self, directory: str, facts: checkpoint.Facts, lengths: Responses) -> None:
        """Write the history to a directory, including what arrived since the last weight sync; all of it or nothing."""
        self._seal()
        checkpoint.write(Path(directory), facts, lengths, self._store.save)

    @ray.method(concurrency_group="copy")
    def copy(self) -> Copy | None:
        """Return the history and the batches in it; None while there is none."""
        if not self._store.tokens + self._store.staged:
            return None
        with tempfile.TemporaryDirectory() as directory, self._sealing:
            given = [batch for batch, trajectories in self._staged.items() if not trajectories]
            self._store.save(Path(directory) / checkpoint.INDEX)
            return (Path(directory) / checkpoint.INDEX).read_bytes(), self._published.joined(given)

    def figures(self) -> dict[str, int | str]:
        """Return tokens, problems, bytes, tokens not yet sealed and directory of the history, and this process's id."""
        store = self._store
        return {"tokens": store.tokens, "problems": store.problems, "bytes": store.nbytes, "staged": store.staged,
                "directory": str(store.directory), "pid": os.getpid()}  # fmt: skip

    def _seal(self) -> None:
        if not self._staged and not self._trouble:
            return
        with self._sealing:
            self._give()
            self._store.seal(self._policy.config.window)
            self._published.update(self._staged)
            self._staged = {}
            self._published.write(self._store.directory / _BATCHES)

    def _give(self) -> None:
        """Give the store the trajectories of the batches that are staged; a batch that comes again is known."""
        self._policy.take(self._store, itertools.chain(*self._staged.values()), offset=self._offset or 0)
        self._staged = dict.fromkeys(self._staged, ())

    def _tidy(self) -> None:
        """Apply the byte budget; called while engines roll out, because it may rewrite much of the history."""
        try:
            self._policy.tidy(self._store)
        except (OSError, DasError) as error:
            self._report(error)

    def _report(self, error: Exception) -> None:
        """Log an error once, until it is over."""
        if self._trouble != repr(error):
            logger.error("das: history: %r; engines go on with what is published", error)
        self._trouble = repr(error)

    def _begin(self) -> None:
        """Start the history from what lies in the directory, else from a peer's, else from what the run was given."""
        self._offset = 0
        if not self._store.tokens and (copy := self._peers_copy()):
            self._load(copy)
        elif not self._store.tokens and (given := ray.get(ledger.running().start.remote(), timeout=_PEER_S)):
            self._store.load(Path(given) / checkpoint.INDEX)
        if self._store.tokens:
            self._offset = max(0, self._store.newest - self._version)

    def _peers_copy(self) -> Copy | None:
        for name, peer in nodes().items():
            if name != name_of_here():
                try:
                    copy: Copy | None = ray.get(peer.copy.remote(), timeout=_PEER_S)
                    if copy:
                        return copy
                except ray.exceptions.RayError as error:
                    logger.warning("das: history: %s gave no copy: %r", name, error)
        return None

    def _rescue(self) -> None:
        """Publish the history again, elsewhere, when files were removed; mapped files stay readable here."""
        if self._store.intact:
            return
        logger.error("das: history: files in %s were removed; it is published anew", self._store.directory)
        copy = self.copy()
        with contextlib.suppress(OSError, DasError):  # what failed in the background is in the log
            self._store.close()
        shutil.rmtree(self._store.directory, ignore_errors=True)
        self._store = self._open()
        if copy:
            self._load(copy)

    def _load(self, copy: Copy) -> None:
        content, taken = copy
        with tempfile.NamedTemporaryFile(dir=self._store.directory) as file:
            file.write(content)
            file.flush()
            self._store.load(file.name)
        self._published = taken
        self._staged = {batch: of for batch, of in self._staged.items() if batch not in taken}

    def _open(self) -> HistoryStore:
        for place in (_SHARED_MEMORY, Path(tempfile.gettempdir())):
            janitor.sweep(place, besides=self._name)
        root = Path(self._root) if self._root else _roomy(self._name, self._policy.config.max_bytes)
        threads = max(1, (os.cpu_count() or 1) // 8)
        try:
            store = HistoryStore(root / self._name, threads=threads)
        except (DasError, OSError) as error:
            logger.error("das: history: %s can't be taken over (%r); a new history begins", root / self._name, error)
            store = HistoryStore(tempfile.mkdtemp(prefix=f"{self._name}-", dir=root), threads=threads)
        janitor.watch(store.directory, self._grace_s)
        logger.warning("das: the history lies in %s", store.directory)
        return store


def _roomy(name: str, size: int) -> Path:
    """Return shared memory, or a temporary directory if it has no room for `size` bytes, nor the directory yet."""
    if (_SHARED_MEMORY / name).is_dir():
        return _SHARED_MEMORY
    if _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free >= size:
        return _SHARED_MEMORY
    temporary = Path(tempfile.gettempdir())
    logger.warning("das: history: %s has no room for das.history.max_bytes=%s; the history lies in %s",
                   _SHARED_MEMORY, size, temporary)  # fmt: skip
    return temporary


def here(config: HistoryConfig, root: str | None = None, grace_s: float = GRACE_S) -> Any:
    """Return this node's history, started if need be. It lives as long as the process that started it."""
    context = ray.get_runtime_context()
    node = context.get_node_id()
    actor = ray.remote(num_cpus=0, max_restarts=-1, concurrency_groups={"copy": 1})(NodeHistory)
    pinned = NodeAffinitySchedulingStrategy(node, soft=False)
    directory = f"das-history-{context.get_job_id()}-{node[:16]}"
    return ledger.named(_name(node), actor, config, directory, root, grace_s, scheduling_strategy=pinned)


def _name(node: str) -> str:
    """Return the name of a node's history; `node`: Ray's id of it."""
    return f"{ledger.name_of('das_history')}:{node}"


def name_of_here() -> str:
    """Return the name of this node's history."""
    return _name(ray.get_runtime_context().get_node_id())


def nodes() -> dict[str, Any]:
    """Return the histories of all nodes of the run, by name."""
    found = {}
    for name in ray.util.list_named_actors():
        if name.startswith(_name("")):
            try:
                found[name] = ray.get_actor(name)
            except ValueError:  # it ended just now
                continue
    return found


def nearest() -> Any:
    """Return the history of this process's node, else of another.

    Raises:
        DasError: the run has none.
    """
    found = nodes()
    if not found:
        raise DasError(f"history: found no actor named {_name('*')} in this run")
    return found.get(name_of_here(), next(iter(found.values())))
