"""What a request is offered to draft from, and how much of it the policy confirms.

Three sources: chances that are given, a trace (what the index offered at each token of recorded responses), and the
index itself, over recorded responses that are written again.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from das_adapter.config import HistoryConfig
from das_adapter.core.history import HistoryPolicy
from das_adapter.core.index import SuffixIndex
from das_adapter.core.index.store import HistoryStore
from das_adapter.core.native import native
from das_adapter.sim.requests import Bools, Ints, Requests
from das_adapter.sim.rollouts import Rollout, steps_of
from das_adapter.sim.texts import Texts

FLOOR = 0.005
"""Chance under which a recorded draft ends."""
KINDS = 8
"""Kinds of problems that are told apart where chances differ from problem to problem."""
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

    def known(self, rows: Ints) -> Bools:
        """Return whether there is history of the requests' problems."""
        return np.zeros(len(rows), dtype=bool)

    def end(self, rows: Ints) -> None:
        """Take requests that ended."""

    def sync(self, version: int, rows: Ints) -> None:
        """Make these finished requests history, at a weight sync."""

    def close(self) -> None:
        """Remove the source's files."""


class Native(Source):
    """A source that csrc/simulator.cpp knows as `name`, so that engines can step natively."""

    name = ""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the native functions that describe the source."""
        raise NotImplementedError

    def walk(self, *batch: Any, **out: Any) -> None:
        """Step engines natively; see `walk_traced` in csrc/simulator.cpp."""
        columns = {name: getattr(self._requests, name) for name in COLUMNS}
        getattr(native(), f"walk_{self.name}")(*batch, **columns, **out, **self.arguments())

    def offer(self, rows: Ints, limits: Ints, floor: float) -> Offer:
        least = math.log(floor) if floor > 0 else -math.inf
        make = getattr(native(), f"offer_{self.name}")
        return Offer(*make(rows, limits, least, self._requests.written, **self.arguments()))


class Given(Native):
    """Drafts whose tokens survive with given chances. What a request accepts follows from the seed, the request and its
    position alone, so that it does not depend on when it is drafted for."""

    name = "given"

    def __init__(
        self,
        requests: Requests,
        rates: Sequence[Sequence[float]],
        longest: int = 32,
        seed: int = 0,
        spread: float = 0.0,
    ) -> None:
        """Take `rates` and `spread` as `AcceptanceBlock` has them; no draft has more than `longest` tokens."""
        super().__init__(requests)
        self._visits, self._seed, self._spread = len(rates), seed, spread
        steps = np.array([[*visit, *[visit[-1]] * longest][:longest] for visit in rates])
        odds = (steps / (1.0 - steps))[:, None]  # [visits, 1, longest]
        if spread:
            places = [NormalDist().inv_cdf((kind + 0.5) / KINDS) for kind in range(KINDS)]
            odds = odds * np.exp(spread * np.array(places))[:, None]
        self._survival = np.cumprod((odds / (1.0 + odds)).reshape(-1, longest), axis=1)

    def arguments(self) -> dict[str, Any]:
        kind = self._requests.visit  # row of each request's chances
        if self._spread:
            problem = self._requests.problem.astype(np.uint64) + np.uint64(self._seed)
            hashed = (problem * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(40)) % np.uint64(KINDS)
            kind = np.minimum(kind, self._visits - 1) * KINDS + hashed.astype(np.int64)
        return {"visit": kind, "survival": self._survival, "seed": self._seed}

    def known(self, rows: Ints) -> Bools:
        return self._requests.visit[rows] > 0


@dataclass(frozen=True)
class Trace:
    """What the index offered at each token of recorded responses, in the order of `Texts.tokens`."""

    drafted: npt.NDArray[np.uint8]
    """Tokens of the draft."""
    hits: npt.NDArray[np.uint8]
    """Those of them that the response confirms."""
    first: npt.NDArray[np.float16]
    """Chance of the first token of the draft."""
    ratio: npt.NDArray[np.float16]
    """Of the chances of two tokens that follow each other, geometric mean."""
    known: npt.NDArray[np.bool_]
    """By response: whether it began with history."""


class Traced(Native):
    """Drafts as a trace has them: at any size, since nothing is searched."""

    name = "traced"

    def __init__(self, requests: Requests, texts: Texts, trace: Trace) -> None:
        super().__init__(requests)
        self._known = trace.known
        with np.errstate(divide="ignore"):
            first, ratio = (np.log(part.astype(np.float32)) for part in (trace.first, trace.ratio))
        self._trace = {
            "ends": texts.ends,
            "log_first": first,
            "log_ratio": ratio,
            "trace_drafted": trace.drafted,
            "trace_hits": trace.hits,
        }

    def arguments(self) -> dict[str, Any]:
        return {"text": self._requests.text, **self._trace}

    def known(self, rows: Ints) -> Bools:
        return self._known[self._requests.text[rows]]


class Indexed(Source):
    """Drafts from the real index: each engine searches the live text of its own requests, and the history that all
    engines map, as those of a node do."""

    def __init__(self, requests: Requests, texts: Texts, engines: int, history: HistoryConfig) -> None:
        super().__init__(requests)
        self._texts, self._policy = texts, HistoryPolicy(history)
        self._directory = tempfile.TemporaryDirectory(prefix="das-sim-")
        self._store = HistoryStore(f"{self._directory.name}/history")
        self.indices = [SuffixIndex.attach(self._store.directory) for _ in range(engines)]

    def close(self) -> None:
        self._store.close()
        self._directory.cleanup()

    def begin(self, rows: Ints) -> None:
        r = self._requests
        for row in rows[r.handle[rows] == 0].tolist():
            index, prompt = self.indices[r.engine[row]], self._texts.rollouts[r.text[row]].prompt
            r.handle[row] = index.open(self._policy.key(int(r.problem[row])), prompt)
            r.known[row] = index.age(int(r.handle[row])) is not None

    def known(self, rows: Ints) -> Bools:
        return self._requests.known[rows] > 0

    def offer(self, rows: Ints, limits: Ints, floor: float) -> Offer:
        r = self._requests
        index, texts, written = self.indices[r.engine[rows[0]]], r.text[rows], r.written[rows]
        behind = written > r.indexed[rows]
        if behind.any():
            late = rows[behind]
            index.extend_many(r.handle[late], *self._texts.part(texts[behind], r.indexed[late], written[behind]))
            r.indexed[late] = written[behind]
        tokens, chances, offsets = index.draft_flat(r.handle[rows], limits, floor)
        return Offer(chances, offsets, self._texts.agreeing(texts, written, tokens, offsets))

    def end(self, rows: Ints) -> None:
        r = self._requests
        for row in rows.tolist():
            index, handle = self.indices[r.engine[row]], int(r.handle[row])
            index.extend(handle, self._texts.rollouts[r.text[row]].tokens[r.indexed[row] :])
            index.close(handle, keep=self._policy.kept)

    def sync(self, version: int, rows: Ints) -> None:
        found = (self._texts.rollouts[i] for i in self._requests.text[rows])
        problems = self._requests.problem[rows].tolist()
        self.remember((p, r.tokens.tobytes(), version) for p, r in zip(problems, found, strict=True))

    def remember(self, written: Iterable[tuple[int, bytes, int]]) -> None:
        """Make finished responses history: problem, int32 tokens, weight version."""
        if self._policy.kept:
            self._policy.remember(self._store, written)
            self._policy.tidy(self._store)
        for index in self.indices:
            index.refresh()
            index.clear_live()


def record(
    rollouts: Sequence[Rollout],
    longest: int = 16,
    history: HistoryConfig | None = None,
) -> Trace:
    """Write recorded responses again, a token a step, and ask the index at each token for at most `longest` (up to 255)
    tokens. Rollouts are in the order of `steps_of`; siblings grow side by side, and earlier steps are history."""
    texts, requests = Texts(rollouts), Requests()
    source = Indexed(requests, texts, 1, history or HistoryConfig())
    size = len(texts.tokens)
    drafted, hits = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    first, ratio = np.zeros(size, np.float16), np.ones(size, np.float16)
    known = np.zeros(len(rollouts), dtype=bool)
    for number, step in enumerate(steps_of(rollouts), 1):
        text = np.arange(len(requests), len(requests) + len(step))
        assert all(rollouts[i] is r for i, r in zip(text.tolist(), step, strict=True)), "not in the order of steps"
        lengths = texts.lengths(text)
        problem, prompt = np.array([r.problem for r in step]), np.array([len(r.prompt) for r in step])
        rows = live = requests.add(
            problem=problem, visit=text * 0, text=text, prompt=prompt, length=lengths, most=lengths
        )
        source.begin(rows)
        known[rows] = source.known(rows)
        for at in range(int(lengths.max())):
            done = requests.length[live] <= at
            source.end(live[done])
            live = live[~done]
            requests.written[live] = at
            offer = source.offer(live, np.minimum(longest, requests.room(live)), FLOOR)
            place, counts = texts.ends[live] + at, np.diff(offer.offsets)
            some = counts > 0
            drafted[place], hits[place] = counts, offer.hits
            begin, last = offer.chances[offer.offsets[:-1][some]], offer.chances[offer.offsets[1:][some] - 1]
            first[place[some]] = begin
            ratio[place[some]] = (last / begin) ** (1.0 / np.maximum(counts[some] - 1, 1))
        source.end(live)
        source.sync(number, rows)
    source.close()
    return Trace(drafted, hits, first, ratio, known)
