"""The histories of a run's nodes, as one of them sees the others: each problem has a home, where its text is kept."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import ray

from das_adapter.core.homes import homes
from das_adapter.protocol.messages import Trajectory
from das_adapter.protocol.spool import BATCH, SEGMENTS, write
from das_adapter.service.ledger import ask
from das_adapter.service.outbox import Outbox
from das_adapter.service.writer import HERE, Writer

Problems = npt.NDArray[np.uint64]

PEER_S = 20.0
"""Maximum time that a history waits for another node's answer, beside the engines' way."""
_FETCH_S = 5.0
"""How long the history of a problem is worth waiting for, once a request about it has begun."""
_MOVE_S = 0.25
"""Maximum time that history is moved for, before other work has its turn."""
_SLICE = 8 << 20
"""Bytes of history that move to another node at once."""


class Peers:
    """Texts go to the histories where their problems are at home, through outboxes; history moves when nodes come or
    go; and the history of problems at home elsewhere is fetched for requests that run here."""

    def __init__(self, writer: Writer, own: str) -> None:
        """`own`: name of this node's history."""
        self.nodes: tuple[str, ...] = (own,)
        self._writer, self._own = writer, own
        self._everywhere = writer.policy.config.scope == "global"
        """Whether all nodes are home to everything."""
        self._outboxes: dict[str, Outbox] = {}
        self._joined: Sequence[str] = ()
        """Nodes to which history may have to move."""
        self._moves: list[tuple[str, Problems]] = []
        """Problems that move to other nodes, a slice at a time."""
        self._guests: list[dict[int, Path]] = [{}, {}]
        """Files with the history of problems at home elsewhere, fetched in the last weight version and in this one."""

    def distribute(self, file: str, texts: Sequence[Trajectory], offset: int) -> None:
        """Give the texts of a file to the store, their weight versions moved by `offset`, and to the outboxes."""
        if self._everywhere:
            to = self.nodes if file.startswith(BATCH) else (self._own,)
            parts = {home: [*texts] for home in to}
        else:
            parts = {}
            for text, home in zip(texts, homes([text.problem for text in texts], self.nodes), strict=True):
                parts.setdefault(self.nodes[home], []).append(text)
        self._writer.spool.expect(file, [HERE if home == self._own else home for home in parts])
        for home, part in parts.items():
            if home == self._own:
                self._writer.keep(file, [text._replace(version=text.version + offset) for text in part])
            else:
                self._outboxes.setdefault(home, Outbox(home, self._writer)).add(file, part)

    def reorder(self, nodes: tuple[str, ...]) -> list[tuple[str, list[Trajectory]]]:
        """Take the run's nodes, after some came or went; return the texts that were for the latter, by file."""
        before, self.nodes = self.nodes, nodes
        again: dict[str, list[Trajectory]] = {}
        for peer in self._outboxes.keys() - set(nodes):
            for file, text in self._outboxes.pop(peer).texts:
                again.setdefault(file, []).append(text)
                self._writer.spool.expect(file, [""], instead=peer)
        if not self._everywhere:
            self._joined = nodes
        elif self._own == min({*before} & {*nodes}, default=""):
            self._joined = [node for node in nodes if node not in before]
        return list(again.items())

    @property
    def outboxes(self) -> list[Outbox]:
        """One for each node that was sent texts."""
        return list(self._outboxes.values())

    def move(self) -> None:
        """Send some slices of history to their home, as long as nobody waits."""
        if self._joined and not self._writer.store.staged:
            self._moves, self._joined = self._slices(self._joined), ()
        until = time.monotonic() + _MOVE_S
        while self._moves and time.monotonic() < until:
            peer, problems = self._moves[0]
            ask(ray.get_actor(peer).receive.remote(SEGMENTS, self.given(problems)), PEER_S)
            self._moves.pop(0)
            if not self._everywhere:
                self._writer.store.forget(problems)
                self._writer.altered = True

    def fetch(self, problems: Sequence[int]) -> list[str]:
        """Return files to `SuffixIndex.visit` with the history of problems at home elsewhere, as far as it can be had;
        each problem is fetched once in a weight version."""
        guests = self._guests[-1]
        keys = np.array([p for p in problems if p not in guests], dtype=np.uint64)
        calls = {}
        for peer, chosen in self.by_home(keys).items():
            if peer != self._own:
                with contextlib.suppress(ValueError):  # it ended
                    calls[ray.get_actor(peer).give.remote(chosen.tolist())] = chosen
        answers, _ = ray.wait(list(calls), num_returns=len(calls), timeout=_FETCH_S) if calls else ([], [])
        for answer in answers:
            with contextlib.suppress(ray.exceptions.RayError):
                path, content = self._temporary(), ray.get(answer)
                write(path, content)
                guests.update(dict.fromkeys(calls[answer].tolist(), path))
        return sorted({str(guests[problem]) for problem in problems if problem in guests})

    def drop_guests(self) -> None:
        """Forget what was fetched in the weight version before; engines have it mapped."""
        for path in set(self._guests.pop(0).values()):
            path.unlink(missing_ok=True)
        self._guests.append({})

    def given(self, problems: Problems) -> bytes:
        """Return the history of some problems, see `HistoryStore.give`."""
        path = self._temporary()
        try:
            self._writer.store.give(path, problems)
            return path.read_bytes()
        finally:
            path.unlink(missing_ok=True)

    def by_home(self, problems: Problems) -> dict[str, Problems]:
        """Sort problems by the histories that they should move to or be fetched from."""
        if not len(problems):
            return {}
        if self._everywhere:
            return dict.fromkeys(self.nodes, problems)
        found = homes(problems, self.nodes)
        return {self.nodes[home]: problems[found == home] for home in np.unique(found).tolist()}

    def _slices(self, nodes: Sequence[str]) -> list[tuple[str, Problems]]:
        """Cut what is at home at some nodes, and not here, in slices."""
        problems, sizes = self._writer.store.contents()
        moves = []
        for peer, chosen in self.by_home(problems).items():
            if peer in nodes and peer != self._own:
                ends = np.cumsum(sizes[np.isin(problems, chosen)]) // _SLICE
                moves += [(peer, part) for part in np.split(chosen, np.flatnonzero(np.diff(ends)) + 1)]
        return moves

    def _temporary(self) -> Path:
        """Return the path of a file that the next store of the directory removes."""
        return self._writer.directory / f"{uuid.uuid4().hex}.tmp"
