"""A node's history: a Ray actor that keeps the history of the problems at home on the node, publishes it in shared
memory for the engines there, and speaks for these engines to the rest of the run."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from das_adapter.config import HistoryConfig
from das_adapter.core.history import HistoryPolicy
from das_adapter.core.homes import homes
from das_adapter.core.index.store import HistoryStore, problems_in
from das_adapter.core.length import RESPONSE, Responses
from das_adapter.errors import DasError
from das_adapter.protocol.messages import Published, Trajectory, responses, unpack
from das_adapter.service import checkpoint, janitor, ledger, spool
from das_adapter.service.ledger import Synced, ask
from das_adapter.service.outbox import Outbox

logger = logging.getLogger("das_adapter")

_SHARED_MEMORY = Path("/dev/shm")
GRACE_S = 20.0
"""How long a directory outlives the actor that wrote it, so that its successor can take it over."""
_TICK_S = 0.5
"""How often a history looks for what has arrived."""
_PEER_S = 20.0
"""How long it waits for another node's answer, beside the engines' way."""
_FETCH_S = 5.0
"""How long the history of a problem is worth waiting for, once a request about it has begun."""
_LEDGER_S = 5.0
"""How long a weight sync waits for the ledger."""
_AT_A_SYNC = 250_000
"""Tokens that the engines' calls at a weight sync seal at most; what has arrived before is sealed already."""
_SLICE = 8 << 20
"""Bytes of history that move to another node at once."""


class NodeHistory:
    """The writer of one directory. Whatever happens to the directory, `sync` answers.

    Engines leave what they wrote in its spool (see `service.spool`). Each text goes to its problem's home: here into
    the store, elsewhere through an outbox into that history's spool. A file is removed when all its texts are published
    here or have arrived there: a history that is killed finds them again.
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
            config: the run's `history:` block.
            name: of the directory; a history that an earlier actor left there is taken over.
            root: where the directory lies; None: in shared memory if there is room for `max_bytes`.
            grace_s: see `GRACE_S`.
            node: its name among the histories of the run; None: all problems are at home here, and nothing is done
                but by calls.
        """
        self._policy, self._name, self._root, self._grace_s = HistoryPolicy(config), name, root, grace_s
        self._node = node or ""
        self._nodes: tuple[str, ...] = (self._node,)
        self._lock = threading.RLock()
        """Of texts on their way; held for a moment."""
        self._arrived: list[tuple[str, list[Trajectory]]] = []
        """Files of the spool that were read, whose texts have no place yet."""
        self._unpublished: list[str] = []
        """Files with texts that the store has, and may not have published."""
        self._outboxes: dict[str, Outbox] = {}
        self._joined: Sequence[str] = ()
        """Nodes to which history may have to move."""
        self._moves: list[tuple[str, npt.NDArray[np.uint64]]] = []
        """Problems that move to other nodes, a slice at a time."""
        self._guests: dict[int, Path] = {}
        """Files with the history of problems at home elsewhere, that were fetched since the last weight sync."""
        self._fetched: list[list[Path]] = [[], []]
        """All such files; those of the weight version before, and of this one."""
        self._said: dict[tuple[int, int], Synced] = {}
        """What the ledger said, by weight version and cursor."""
        self._lengths: list[Responses] = []
        self._reports: list[tuple[int, dict[str, Any]]] = []
        self._engines: set[str] = set()
        self._heard: set[str] = set()
        """The engines that have had the last weight sync but one, and the last one."""
        self._changed = False
        self._version = self._tidied = 0
        self._synced = time.monotonic()
        self._told = 1.0
        """Seconds after the last weight sync at which lengths go to the ledger."""
        self._sealable = _AT_A_SYNC
        """Tokens that may still be sealed at this weight sync."""
        self._offset: int | None = None
        """Offset from this run's weight versions to the store's; None before the first weight sync."""
        self._trouble = ""
        self._open()
        if node is not None:
            threading.Thread(target=self._carry, name="das-carry", daemon=True).start()

    def directory(self) -> str:
        """Return where engines leave what they wrote."""
        self._rescue()
        return str(self._store.directory)

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
            self._take(spool.BATCH)
            synced = self._ask(version, cursor, rungs)
            if first:
                self._drop_guests()
                self._rescue()
            if self._offset is None:
                self._begin()
            self._distribute()
            self._sealable -= self._seal(self._sealable)
            self._trouble = ""
        except Exception as error:
            self._report(error)
        for outbox in self._outboxes.values():
            outbox.post()
        return Published(str(self._store.directory), self._store.generation), synced

    def report(self, step: int, counts: dict[str, Any]) -> None:
        """Take an engine's counts of a step; the ledger gets those of all engines together."""
        with self._lock:
            self._reports.append((step, {**counts, "staged_bytes": self._spool.nbytes}))

    @ray.method(concurrency_group="peers")
    def receive(self, source: str, number: int, content: bytes) -> None:
        """Take texts from another node; they are safe when it returns.

        Args:
            source: who sends; it sends one message after the other.
            number: of the message; one that was taken before is ignored.
            content: see `pack`.
        """
        self._spool.put_package(source, number, content)

    @ray.method(concurrency_group="peers")
    def give(self, problems: Sequence[int]) -> bytes:
        """Return the history of some problems, see `HistoryStore.give`."""
        return self._given(np.array(problems, dtype=np.uint64))

    @ray.method(concurrency_group="peers")
    def absorb(self, content: bytes) -> None:
        """Take the history of problems that are at home here from now on, see `HistoryStore.give`; it is safe when this
        returns."""
        spool.put(str(self._store.directory), f"{spool.SEGMENTS}-{uuid.uuid4().hex}", content)

    @ray.method(concurrency_group="engines")
    def fetch(self, problems: Sequence[int]) -> list[str]:
        """Return files to `SuffixIndex.visit` with the history of problems at home elsewhere, as far as it can be had;
        each problem is fetched once in a weight version."""
        keys = np.array([p for p in problems if p not in self._guests], dtype=np.uint64)
        calls = {}
        for peer, chosen in self._by_home(keys).items():
            if peer != self._node:
                with contextlib.suppress(ValueError):  # it ended
                    calls[ray.get_actor(peer).give.remote(chosen.tolist())] = chosen
        answers, _ = ray.wait(list(calls), num_returns=len(calls), timeout=_FETCH_S) if calls else ([], [])
        for answer in answers:
            with contextlib.suppress(ray.exceptions.RayError):
                path = self._write(ray.get(answer))
                self._fetched[-1].append(path)
                self._guests |= dict.fromkeys(calls[answer].tolist(), path)
        return sorted({str(self._guests[problem]) for problem in problems if problem in self._guests})

    def flush(self) -> None:
        """Bring all texts here to their homes, and lengths to the ledger, and wait for that; for a checkpoint."""
        until = time.monotonic() + _PEER_S
        self._take()
        self._send_lengths(wait=True)
        if self._offset is not None:
            self._distribute()
        for outbox in self._outboxes.values():
            outbox.post()
        while any(outbox.left() for outbox in self._outboxes.values()) and time.monotonic() < until:
            time.sleep(_TICK_S / 5)

    def save(self, path: str) -> None:
        """Write the history at home here to a file, including what arrived since the last weight sync."""
        self._take()
        if self._offset is not None:
            self._distribute()
        self._seal()
        self._store.save(path)

    def figures(self) -> dict[str, int | str]:
        """Return tokens, problems, bytes, tokens not yet sealed, bytes in the spool and directory of the history, and
        this process's id."""
        store = self._store
        return {
            "tokens": store.tokens,
            "problems": store.problems,
            "bytes": store.nbytes,
            "staged": store.staged,
            "spool": self._spool.nbytes,
            "directory": str(store.directory),
            "pid": os.getpid(),
        }

    def tick(self) -> None:
        """Do what waits for no weight sync: take what has arrived, send what is for others, apply the byte budget."""
        self._take()
        if self._offset is not None:
            self._distribute()
        if self._unpublished:
            self._store.seal_ahead(self._policy.window)
        if self._lengths and time.monotonic() > self._synced + self._told:
            self._told *= 2
            self._send_lengths()
        self._send_reports()
        for outbox in list(self._outboxes.values()):
            outbox.work()
        if self._tidied < self._version:
            self._tidied = self._version
            self._policy.tidy(self._store)
        self._move()

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

    def _take(self, kind: str = "") -> None:
        """Read what has arrived in the spool."""
        with self._lock:
            for file in self._spool.new(kind):
                path = self._spool.path(file)
                try:
                    if file.startswith(spool.SEGMENTS):
                        self._store.absorb(path)
                        self._spool.expect(file, [self._node])
                        self._unpublished.append(file)
                        continue
                    texts = unpack(path.read_bytes())
                    self._arrived.append((file, texts))
                    if file.startswith(spool.BATCH):  # others were counted where they came from
                        self._lengths.append(responses(texts))
                except OSError as error:
                    self._spool.leave(file)
                    self._report(error)
                except (ValueError, DasError) as error:
                    self._spool.done([file], "")
                    self._report(error)

    def _distribute(self) -> None:
        """Give the texts that were read to the store and the outboxes."""
        while self._arrived:
            with self._lock:
                if not self._arrived:
                    return
                file, texts = self._arrived.pop(0)
                parts: dict[str, list[Trajectory]] = {}
                for text, whom in zip(texts, self._whom(file, texts), strict=True):
                    for home in whom:
                        parts.setdefault(home, []).append(text)
                self._spool.expect(file, parts)
                for home, part in parts.items():
                    if home == self._node:
                        self._policy.take(self._store, part, offset=self._offset or 0)
                        self._unpublished.append(file)
                    else:
                        if home not in self._outboxes:
                            self._outboxes[home] = Outbox(home, self._spool)
                        self._outboxes[home].add(file, part)

    def _whom(self, file: str, texts: Sequence[Trajectory]) -> Iterable[tuple[str, ...]]:
        """For each of a file's texts, the histories that it is for."""
        if self._policy.config.scope == "global":  # it is everybody's
            return itertools.repeat(self._nodes if file.startswith(spool.BATCH) else (self._node,), len(texts))
        found = homes([text.problem for text in texts], self._nodes)
        return [(self._nodes[home],) for home in found.tolist()]

    def _by_home(self, problems: npt.NDArray[np.uint64]) -> dict[str, npt.NDArray[np.uint64]]:
        """Sort problems by the histories that they should move to or be fetched from."""
        if not len(problems):
            return {}
        if self._policy.config.scope == "global":
            return dict.fromkeys(self._nodes, problems)
        found = homes(problems, self._nodes)
        return {self._nodes[home]: problems[found == home] for home in np.unique(found).tolist()}

    def _seal(self, tokens: int = 2**62) -> int:
        """Publish what was taken, of what is not sealed yet about so many tokens at most; return how many it sealed."""
        with self._lock:
            if tokens <= 0 or not (self._unpublished or self._changed or self._trouble):
                return 0
            staged = self._store.staged
            self._store.seal(self._policy.window, tokens)
            self._changed = False
            if not self._store.staged:
                self._spool.done(self._unpublished, self._node)
                self._unpublished = []
            return staged - self._store.staged

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
        if self._node in synced.nodes and synced.nodes != self._nodes:
            self._reorder(synced.nodes)
        return synced

    def _send_lengths(self, wait: bool = False) -> None:
        with self._lock:
            sent, self._lengths = self._lengths, []
        if sent:
            call = ledger.running().add.remote(np.concatenate([np.zeros(0, RESPONSE), *sent]))
            if wait:
                ask(call, _PEER_S)

    def _send_reports(self, wait: bool = False) -> None:
        with self._lock:
            sent, self._reports = self._reports, []
        if sent:
            call = ledger.running().reports.remote(sent)
            if wait:
                ask(call, _LEDGER_S)

    def _reorder(self, nodes: tuple[str, ...]) -> None:
        """Take the run's nodes, after some came or went."""
        with self._lock:
            before, self._nodes = self._nodes, nodes
            for peer in self._outboxes.keys() - set(nodes):
                for file, texts in self._outboxes.pop(peer).left().items():
                    self._spool.expect(file, [""], instead=peer)
                    self._arrived.append((file, texts))
            if self._policy.config.scope != "global":
                self._joined = nodes
            elif self._node == min({*before} & {*nodes}, default=""):
                self._joined = [node for node in nodes if node not in before]

    def _slices(self, nodes: Sequence[str]) -> list[tuple[str, npt.NDArray[np.uint64]]]:
        """Cut what is at home at some nodes, and not here, in slices."""
        problems, sizes = self._store.contents()
        bytes_of = dict(zip(problems.tolist(), sizes.tolist(), strict=True))
        moves = []
        for peer, chosen in self._by_home(problems).items():
            if peer in nodes and peer != self._node:
                ends = np.cumsum([bytes_of[problem] for problem in chosen.tolist()]) // _SLICE
                moves += [(peer, part) for part in np.split(chosen, np.flatnonzero(np.diff(ends)) + 1)]
        return moves

    def _move(self) -> None:
        """Send some slices of history to their home, as long as nobody waits."""
        if self._joined and not self._store.staged:
            joined, self._joined = self._joined, ()
            self._moves = self._slices(joined)
        until = time.monotonic() + _TICK_S / 2
        while self._moves and time.monotonic() < until:
            peer, problems = self._moves[0]
            ask(ray.get_actor(peer).absorb.remote(self._given(problems)), _PEER_S)
            self._moves.pop(0)
            if self._policy.config.scope != "global":
                self._store.forget(problems)
                self._changed = True

    def _given(self, problems: npt.NDArray[np.uint64]) -> bytes:
        path = self._temporary()
        try:
            self._store.give(path, problems)
            return path.read_bytes()
        finally:
            path.unlink(missing_ok=True)

    def _write(self, content: bytes) -> Path:
        path = self._temporary()
        with open(path, "wb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o600)) as file:
            file.write(content)
        return path

    def _temporary(self) -> Path:
        """The path of a file that the next store of the directory removes."""
        return self._store.directory / f"{uuid.uuid4().hex}.tmp"

    def _drop_guests(self) -> None:
        """Forget what was fetched in the weight version before; engines have it mapped."""
        for path in self._fetched.pop(0):
            path.unlink(missing_ok=True)
        self._fetched.append([])
        self._guests = {}

    def _report(self, error: Exception) -> None:
        """Log an error once, until it is over."""
        if self._trouble != repr(error):
            logger.error("das: history: %r; engines go on with what is published", error)
        self._trouble = repr(error)

    def _begin(self) -> None:
        """Start the history from what lies in the directory, else from what the run was given."""
        self._offset = 0
        start, offset = ask(ledger.running().start.remote(self._node), _PEER_S)
        if start and not self._store.tokens:
            for path in checkpoint.parts(Path(start)):
                self._store.absorb(path, self._by_home(problems_in(path)).get(self._node, ()))
            self._changed = True
        self._offset = max(offset, self._store.newest - self._version if self._store.tokens else 0)

    def _rescue(self) -> None:
        """Publish the history again, elsewhere, when files were removed; mapped files stay readable here."""
        if self._store.intact:
            return
        logger.error("das: history: files in %s were removed; it is published anew", self._store.directory)
        with self._lock, tempfile.TemporaryDirectory() as directory:
            saved = Path(directory) / "history"
            self._store.save(saved)
            with contextlib.suppress(OSError, DasError):  # what failed in the background is in the log
                self._store.close()
            shutil.rmtree(self._store.directory, ignore_errors=True)
            self._open()
            self._store.absorb(saved)
            self._changed = True

    def _open(self) -> None:
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
        self._store, self._spool = store, spool.Spool(store.directory)


def _roomy(name: str, size: int) -> Path:
    """Return shared memory, or a temporary directory if it has no room for `size` bytes, nor the directory yet."""
    if (_SHARED_MEMORY / name).is_dir():
        return _SHARED_MEMORY
    if _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free >= size:
        return _SHARED_MEMORY
    temporary = Path(tempfile.gettempdir())
    logger.warning(
        "das: history: %s has no room for das.history.max_bytes=%s; the history lies in %s",
        _SHARED_MEMORY,
        size,
        temporary,
    )
    return temporary


def here(config: HistoryConfig, root: str | None = None, grace_s: float = GRACE_S) -> Any:
    """Return this node's history, started if need be. It lives as long as the process that started it."""
    context = ray.get_runtime_context()
    node, name = context.get_node_id(), name_of_here()
    options = {
        "concurrency_groups": {"peers": 2, "engines": 1},
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
    }
    directory = f"das-history-{context.get_job_id()}-{node[:16]}"
    return ledger.named(name, NodeHistory, config, directory, root, grace_s, name, **options)


def name_of_here() -> str:
    """Return the name of this node's history."""
    return ledger.history_of(ray.get_runtime_context().get_node_id())


def nodes() -> dict[str, Any]:
    """Return the histories of all nodes of the run, by name."""
    found = {}
    for name in ledger.histories():
        with contextlib.suppress(ValueError):  # it ended just now
            found[name] = ray.get_actor(name)
    return found
