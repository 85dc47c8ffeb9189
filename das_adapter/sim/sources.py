"""What a request is offered to draft from, and how much of it the policy confirms.

Two sources: chances that are given, and the index itself, over recorded responses that are written again.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from das_adapter.config import HistoryConfig
from das_adapter.core.history import HistoryPolicy
from das_adapter.core.index import SuffixIndex
from das_adapter.core.index.store import HistoryStore
from das_adapter.core.native import native
from das_adapter.sim.requests import Ints, Requests
from das_adapter.sim.texts import Texts

Rates = Sequence[Sequence[float]]
COLUMNS = ("length", "most", "prompt", "written", "forwards", "drafted", "accepted", "draft", "hits")
"""Columns of `Requests` that native steps read and write."""


class Offer(NamedTuple):
    """Drafts for some requests, as `core.steps.HistoryDrafts` has them, and what becomes of them."""

    chances: npt.NDArray[np.float32]
    offsets: Ints
    hits: Ints
    """Leading tokens of each draft that the policy would write, int64 [b]."""


class Source:
    """Where drafts come from; here one that keeps nothing."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def offer(self, rows: Ints, limits: Ints, floor: float) -> Offer:
        """Draft for running requests of one engine: at most so many tokens each, int64 [b], down to this chance. No
        draft may pass a request's end."""
        raise NotImplementedError

    def begin(self, rows: Ints) -> None:
        """Take requests that begin, or continue where they were interrupted."""

    def end(self, rows: Ints) -> None:
        """Take requests that ended."""

    def sync(self, version: int, rows: Ints) -> None:
        """Make these finished requests history, at a weight sync."""


class Given(Source):
    """Drafts whose tokens survive with given chances, so that engines can step natively (csrc/simulator.cpp). What a
    request accepts follows from the seed, the request and its position alone, not from when it is drafted for."""

    def __init__(
        self, requests: Requests, rates: Rates, longest: int = 32, seed: int = 0, agreement: float = 0.0
    ) -> None:
        """Take `rates` and `agreement` as `AcceptanceBlock` has them; no draft has more than `longest` tokens, and with
        an agreement of 0 none is of what was written ahead."""
        super().__init__(requests)
        steps = np.array([[*visit, *[visit[-1]] * longest][:longest] for visit in (*rates, [agreement])])
        self._survival, self._seed = np.cumprod(steps, axis=1), seed

    def walk(self, *batch: Any, **out: Any) -> None:
        """Step engines natively; see `walk_given` in csrc/simulator.cpp."""
        columns = {name: getattr(self._requests, name) for name in COLUMNS}
        native().walk_given(*batch, **columns, **out, **self._arguments())

    def offer(self, rows: Ints, limits: Ints, floor: float) -> Offer:
        least = math.log(floor) if floor > 0 else -math.inf
        return Offer(*native().offer_given(rows, limits, least, self._requests.written, **self._arguments()))

    def _arguments(self) -> dict[str, Any]:
        of = {name: getattr(self._requests, name) for name in ("visit", "ahead", "same")}
        return {**of, "survival": self._survival, "seed": self._seed}


class Indexed(Source):
    """Drafts from the real index: each engine searches the live text of its own requests, and the history that all
    engines map, as those of a node do."""

    def __init__(self, requests: Requests, texts: Texts, engines: int, history: HistoryConfig) -> None:
        super().__init__(requests)
        self._texts, self._policy = texts, HistoryPolicy(history)
        self._store = HistoryStore(tempfile.mkdtemp(prefix="das-sim-"))
        weakref.finalize(self, _remove, self._store)
        self.indices = [SuffixIndex.attach(self._store.directory) for _ in range(engines)]

    def begin(self, rows: Ints) -> None:
        r = self._requests
        for row in rows[r.handle[rows] == 0].tolist():
            index, text = self.indices[r.engine[row]], self._texts.rollouts[r.text[row]]
            ahead = text.ahead[: max(0, r.ahead[row])]
            r.handle[row] = index.open(self._policy.key(int(r.problem[row])), text.prompt, ahead=ahead)

    def offer(self, rows: Ints, limits: Ints, floor: float) -> Offer:
        r = self._requests
        index, texts, written = self.indices[r.engine[rows[0]]], r.text[rows], r.written[rows]
        flat, begins = self._texts.tokens[None], self._texts.ends[texts]
        new = rows * 0, begins + r.indexed[rows], begins + written
        tokens, chances, offsets = index.draft_rows(r.handle[rows], flat, *new, limits, floor).result()
        r.indexed[rows] = written
        return Offer(chances, offsets, self._texts.agreeing(texts, written, tokens, offsets))

    def end(self, rows: Ints) -> None:
        r = self._requests
        for row in rows[r.handle[rows] > 0].tolist():
            index, handle = self.indices[r.engine[row]], int(r.handle[row])
            index.extend(handle, self._texts.rollouts[r.text[row]].tokens[r.indexed[row] : r.written[row]])
            index.close(handle, keep=self._policy.kept and bool(r.ahead[row] >= 0))

    def sync(self, version: int, rows: Ints) -> None:
        found = (self._texts.rollouts[i] for i in self._requests.text[rows])
        problems = self._requests.problem[rows].tolist()
        self.remember((p, r.tokens.tobytes(), version) for p, r in zip(problems, found, strict=True))

    def remember(self, written: Iterable[tuple[int, bytes, int]]) -> None:
        """Make finished responses history: problem, int32 tokens, weight version."""
        if self._policy.kept:
            self._policy.remember(self._store, written)
            while self._policy.tidy(self._store):
                pass
        for index in self.indices:
            index.refresh()
            index.clear_live()


def _remove(store: HistoryStore) -> None:
    store.close()
    shutil.rmtree(store.directory)
