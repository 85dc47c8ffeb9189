"""A node's history under Ray: an actor that runs the `Writer` of the node's directory,
and speaks for its engines to the ledger and to the histories of other nodes.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
import uuid
from collections import defaultdict, deque
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
from das_adapter.files import read_file
from das_adapter.protocol.messages import Published, Trajectory, pack, responses
from das_adapter.protocol.spool import (
    AWAY,
    BATCH,
    GRACE_S,
    OUTBOX,
    TEXTS,
    directory_for,
    put_file,
)
from das_adapter.service import checkpoint, ledger
from das_adapter.service.ledger import Synced, wait_for_answer
from das_adapter.service.prompts import read_prompts
from das_adapter.service.writer import Writer
from das_adapter.trouble import IMPATIENCE_S, Peer, log_once, reason

logger = logging.getLogger("das_adapter")

_TICK_S = 0.5
"""How often a history looks for what has arrived."""
_FLUSH_POLL_S = 0.1
"""How often a checkpoint looks whether texts have reached their homes."""
_LEDGER_S = 5.0
"""How long a weight sync waits for the ledger."""
_PEER_S = 20.0
"""How long a checkpoint waits for what is for the ledger, and for other nodes."""
_TOKENS_AT_SYNC = 250_000
"""Maximum tokens sealed synchronously at a weight sync; what has arrived before is
sealed already.
"""
_KEPT_LENGTHS = 2**12
"""Batches whose lengths are kept while the ledger can't be reached, the last ones."""
_NODE_ID_CHARACTERS = 16
"""Characters of Ray's id of a node in the name of its directory."""

Texts = list[Trajectory]


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
        """Take over what lies in the directory, or begin there.

        Args:
            name: of the directory; where it can't be taken over, a new one is begun.
            root: where the directory lies; None: see `directory_for`.
            node: the history's name among those of the run; None: all problems are at
                home here, and no thread works.
        """
        object_store_bytes = _own_object_store_bytes()

        def place_of(name: str) -> Path:
            if root is not None:
                return Path(root) / name
            return directory_for(name, config.max_bytes, object_store_bytes)

        directory = place_of(name)
        try:
            self.writer = Writer(config, directory, grace_s, object_store_bytes)
        except (DasError, OSError) as error:
            logger.error(
                "das: history: %s can't be taken over (%s); a new history begins",
                directory,
                reason(error),
            )
            begun = place_of(f"{name}-{uuid.uuid4().hex[:8]}")
            self.writer = Writer(config, begun, grace_s, object_store_bytes)
        self._node = node or ""
        self._nodes: tuple[str, ...] = (self._node,)
        self._sending: dict[str, ray.ObjectRef] = {}
        """Calls of other nodes' histories, by the file that is sent."""
        self._unreached = set[str]()
        """Histories to which texts could not be sent the last time."""
        # engines wait for this history meanwhile, for IMPATIENCE_S
        self._ledger = Peer(IMPATIENCE_S / 4)
        self._asked_version = -1
        """Weight version at which the ledger was asked last."""
        self._lengths = deque[Responses](maxlen=_KEPT_LENGTHS)
        """Lengths of the last batches, for the ledger."""
        self._version = -1
        """The newest weight version of the node's engines; -1: none has had a weight
        sync.
        """
        self._sealable_tokens = _TOKENS_AT_SYNC
        """Tokens that may still be sealed at this weight sync."""
        self._offset: int | None = None
        """Offset from this run's weight versions to the store's; None until the history
        has begun: texts wait.
        """
        self._start: str | None = None
        """Saved history that is to be loaded."""
        self._loaded: set[Path] = set()
        """Files of that history that were loaded."""
        if node is not None:
            threading.Thread(
                target=self._tick_for_ever, name="das-carry", daemon=True
            ).start()
        ledger.end_with_job()

    @property
    def _is_global(self) -> bool:
        """Whether all nodes are home to everything."""
        return self.writer.rules.config.scope == "global"

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
            self._sealable_tokens = _TOKENS_AT_SYNC
        synced = None
        try:
            self.writer.restore()
            self._begin()
            self._keep_arrivals()
            synced = self._sync_with_ledger(version, cursor)
            sealed_tokens = self.writer.publish(self._sealable_tokens)
            self._sealable_tokens -= sealed_tokens
        except Exception as error:
            self.writer.report(error)
        directory = str(self.writer.directory)
        published = Published(directory, self.writer.store.generation)
        return published, synced

    @ray.method(concurrency_group="peers")
    def receive(self, file: str, content: bytes) -> None:
        """Leave texts of another node (see `pack`) in the spool; they are safe when
        this returns.
        """
        put_file(self.writer.directory, file, content)

    @ray.method(concurrency_group="peers")
    def give(self, problems: Sequence[int]) -> bytes:
        """Return the history of some problems, see `HistoryStore.give`."""
        # the next store of the directory removes it
        name = f"{uuid.uuid4().hex}.tmp"
        path = self.writer.directory / name
        try:
            wanted = np.array(problems, dtype=np.uint64)
            self.writer.store.give(path, wanted)
            return path.read_bytes()
        finally:
            path.unlink(missing_ok=True)

    def end(self) -> None:
        """Remove the history: its run has ended, and another one of its job begins."""
        with self.writer.lock:
            self.writer.store.close()
            shutil.rmtree(self.writer.directory, ignore_errors=True)

    @ray.method(concurrency_group="checkpoints")
    def ping(self) -> None:
        """Answer: a checkpoint asks before it waits for more."""

    @ray.method(concurrency_group="checkpoints")
    def flush(self) -> int:
        """Send all texts here to their homes, and lengths to the ledger, and wait for
        that, for a checkpoint; return how many files of texts are still on their
        way.
        """
        until = time.monotonic() + _PEER_S
        self._keep_arrivals()
        self._send_lengths(wait=True)
        while True:
            num_left = len(self.writer.waiting_files(AWAY))
            if not num_left or time.monotonic() >= until:
                return num_left
            time.sleep(_FLUSH_POLL_S)

    @ray.method(concurrency_group="checkpoints")
    def save(self, path: str) -> None:
        """Write the history at home here to a file, including what arrived since the
        last weight sync, and its prompts beside it.
        """
        self._keep_arrivals()
        self.writer.publish()
        self.writer.store.save(path)
        try:
            self.writer.prompts.save(checkpoint.prompts_file(Path(path)))
        except OSError as error:  # the history is worth more
            log_once("das: history: no prompts are saved", error)

    def tick(self) -> None:
        """Do what waits for no weight sync of this node's engines, which may sleep:
        begin, send what is for others, keep what has arrived, and what follows.
        """
        if self._offset is None:
            self._begin()
        self._send_texts()
        self._keep_arrivals()
        self._send_lengths()
        self.writer.work(_TICK_S)

    def _tick_for_ever(self) -> None:
        while True:
            time.sleep(_TICK_S)
            try:
                self.tick()
            except Exception as error:  # what waits is done later
                self.writer.report(error)

    def _keep_arrivals(self) -> None:
        """Put what has arrived in the spool into the store, or send it on to its home,
        once the history has begun.
        """
        if self._offset is None:
            return
        with self.writer.lock:
            for file, texts in self.writer.read_files():
                of_engine = file.startswith(BATCH)
                own = texts
                if of_engine:
                    own = self._leave_for_homes(file, texts)
                renumbered = []
                for text in own:
                    version = text.version + self._offset
                    renumbered.append(text._replace(version=version))
                self.writer.keep_texts(file, renumbered)
                if of_engine:  # others were counted where they came from
                    self._lengths.append(responses(texts))

    def _leave_for_homes(self, file: str, texts: Texts) -> Texts:
        """Leave texts of an engine that are at home elsewhere in the spool, for
        `_send_texts`; return the others.
        """
        nodes = self._nodes  # a weight sync may change it meanwhile
        if self._is_global:
            by_home = dict.fromkeys(nodes, texts)
        else:
            by_home = _by_home(texts, nodes)
        own = by_home.pop(self._node, [])
        for node, texts_of_node in by_home.items():
            kind = f"{AWAY}-{node}"
            name = file.replace(BATCH, kind, 1)
            content = pack(texts_of_node)
            put_file(self.writer.directory, name, content)
        return own

    def _send_texts(self) -> None:
        """Send what is at home elsewhere, and remove what has arrived; what has not is
        sent again. If too much waits, the oldest is given up. Nothing is done before
        the history has begun, which tells the other nodes.
        """
        if self._offset is None:
            return
        waiting = self._drop_oldest()
        unreached_before = self._unreached
        self._unreached = set[str]()
        for path in waiting:
            _, node, rest = path.name.split("-", 2)
            try:
                if node in self._nodes:
                    self._send_file(path, node, rest)
                else:
                    self._take_back(path, node, rest)
            except (AttributeError, ValueError, ray.exceptions.RayError) as error:
                # it ended, or there is no room for the message
                if node not in unreached_before | self._unreached:
                    log_once(
                        f"das: history: texts did not reach {node} and are sent again",
                        error,
                    )
                self._unreached.add(node)
            except OSError as error:  # it is no file, or somebody took it
                self.writer.drop(path)
                log_once(f"das: history: left out: {path}", error)

    def _drop_oldest(self) -> list[Path]:
        """Return the files on their way to other nodes, in order of age, without the
        oldest if they take too much: those are removed.
        """
        waiting = []
        waiting_bytes = 0
        for path in self.writer.waiting_files(AWAY):
            status = path.lstat()
            waiting.append((path, status))
            waiting_bytes += status.st_size
        waiting.sort(key=lambda file: file[1].st_mtime)
        history = self.writer.rules.config
        max_waiting_bytes = history.max_bytes // OUTBOX
        left = []
        for path, status in waiting:
            if waiting_bytes <= max_waiting_bytes:
                left.append(path)
                continue
            waiting_bytes -= status.st_size
            self.writer.drop(path)
            self._sending.pop(path.name, None)
            self.writer.report(
                DasError(
                    f"the oldest texts for other nodes are lost: 1/{OUTBOX} of"
                    " max_bytes waits"
                )
            )
        return left

    def _send_file(self, path: Path, node: str, rest: str) -> None:
        """Send a file to the history of another node, or remove it if it has arrived
        there; `rest`: of its name.
        """
        call = self._sending.pop(path.name, None)
        if call is None:
            history = ledger.find_actor(node)
            content = read_file(path)
            name = f"{TEXTS}-{rest}"
            self._sending[path.name] = history.receive.remote(name, content)
            return
        arrived, _ = ray.wait([call], timeout=0)
        if not arrived:
            self._sending[path.name] = call
            return
        ray.get(call, timeout=_PEER_S)
        path.unlink()

    def _take_back(self, path: Path, node: str, rest: str) -> None:
        """Keep a file here whose node has gone."""
        self._sending.pop(path.name, None)
        if self._is_global:  # this node has it, too
            path.unlink()
            return
        node_id = node.rpartition(":")[2]
        name = f"{TEXTS}-{rest}-{node_id}"
        path.rename(path.with_name(name))

    def _sync_with_ledger(self, version: int, cursor: int) -> Synced | None:
        """Return what the ledger knows; None, with a line in the log, where it does not
        answer. Where it did not, one engine waits for it at each weight version.
        """
        if self._ledger.trouble and version == self._asked_version:
            return None
        self._asked_version = version

        def call() -> ray.ObjectRef:
            # the ledger has the lengths of now then
            self._send_lengths()
            return ledger.running_ledger().sync.remote(version, cursor)

        message = "das: history: the ledger does not answer"
        synced: Synced | None = ledger.ask(self._ledger, call, _LEDGER_S, message)
        if synced is not None:
            self._set_nodes(synced.nodes)
        return synced

    def _set_nodes(self, nodes: tuple[str, ...]) -> None:
        """Distribute problems over these nodes from now on, if this one is among them:
        else it joins, and the others know at the next weight sync.
        """
        if self._node in nodes:
            self._nodes = nodes

    def _send_lengths(self, wait: bool = False) -> None:
        """Send the ledger the lengths of what the engines wrote, unless it hangs;
        ValueError: there is no ledger, and the lengths are kept.
        """
        if not self._lengths or self._ledger.trouble:
            return
        run_ledger = ledger.running_ledger()
        with self.writer.lock:
            # another thread may have sent them meanwhile: then there are none
            batches = [responses(()), *self._lengths]
            self._lengths.clear()
        lengths = np.concatenate(batches)
        call = run_ledger.add.remote(lengths)
        if wait:
            wait_for_answer(call, _PEER_S)

    def _begin(self) -> None:
        """Go on with what lies in the directory, or load what the run starts with;
        nothing is done before the run's first weight sync, which says what its weight
        version is.
        """
        if self._offset is None:
            # before the lock, for which others wait
            message = "das: history: the ledger does not answer"
            answer = ledger.ask(self._ledger, _call_start, _LEDGER_S, message)
            if answer is None:
                self._asked_version = self._version
                return
            start, offset, run_version = answer
            version = max(run_version, self._version)
            if version < 0:
                return
            with self.writer.lock:  # two threads may begin
                self._choose_offset(start, offset, version)
        with self.writer.lock:
            self._load()

    def _choose_offset(self, start: str | None, offset: int, version: int) -> None:
        """Fix the offset from the run's weight versions to the store's, once."""
        if self._offset is not None:
            return
        self._set_nodes(ledger.history_names())
        store = self.writer.store
        if store.tokens:
            self._start = None
            newest_offset = store.newest - version
        else:
            self._start = start
            newest_offset = 0
        self._offset = max(offset, newest_offset)

    def _load(self) -> None:
        """Load what the run starts with; what can't be read now is tried again at the
        next weight sync.
        """
        if not self._start:
            return
        try:
            files = checkpoint.index_files(Path(self._start))
            files.sort(key=lambda path: -path.stat().st_size)
        except OSError as error:
            self.writer.report(error)
            return
        is_complete = True
        for path in files:  # the largest first
            if path in self._loaded:
                continue
            try:
                self._load_file(path)
                self._loaded.add(path)
                # everything is in each file, less in that of a late node
                if self._is_global:
                    is_complete = True
                    break
            except DasError as error:  # it is damaged
                self.writer.report(error)
                self._loaded.add(path)
            except OSError as error:
                self.writer.report(error)
                is_complete = False
        if is_complete:
            self._start = None

    def _load_file(self, path: Path) -> None:
        """Load the problems of a saved file that are at home here, with their
        prompts.
        """
        problems = problems_in(path)
        if not self._is_global:
            own_index = self._nodes.index(self._node)
            at_home = homes(problems, self._nodes) == own_index
            problems = problems[at_home]
        self.writer.store.absorb(path, problems)
        self.writer.altered = True
        prompts = read_prompts(checkpoint.prompts_file(path))
        own = prompts.keys() & problems.tolist()
        self.writer.keep_prompts((problem, prompts[problem]) for problem in own)


def _by_home(texts: Texts, nodes: Sequence[str]) -> dict[str, Texts]:
    """Return texts by the node on which their problems are at home."""
    by_home = defaultdict[str, Texts](list)
    problems = [text.problem for text in texts]
    indices = homes(problems, nodes)
    for text, index in zip(texts, indices, strict=True):
        node = nodes[index]
        by_home[node].append(text)
    return by_home


def _call_start() -> ray.ObjectRef:
    return ledger.running_ledger().start.remote()


def _own_object_store_bytes() -> int:
    """Return the size of Ray's object store on this node."""
    context = ray.get_runtime_context()
    own = context.get_node_id()
    num_bytes = 0
    for node in ray.nodes():
        if node["NodeID"] == own:
            resources = node["Resources"]
            num_bytes += int(resources.get("object_store_memory", 0))
    return num_bytes


def history_here(config: HistoryConfig, grace_s: float = GRACE_S) -> Any:
    """Return this node's history, started if need be; see
    `ledger.get_or_start_actor`.
    """
    context = ray.get_runtime_context()
    node_id = context.get_node_id()
    job = context.get_job_id()
    name = ledger.history_name()
    short_id = node_id[:_NODE_ID_CHARACTERS]
    directory = f"das-history-{job}-{short_id}"
    on_this_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
    # weight syncs wait for neither of them
    concurrency_groups = {"peers": 2, "checkpoints": 1}
    return ledger.get_or_start_actor(
        name,
        NodeHistory,
        config,
        directory,
        None,
        grace_s,
        name,
        concurrency_groups=concurrency_groups,
        scheduling_strategy=on_this_node,
    )
