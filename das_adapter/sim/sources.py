"""What a request is offered to draft from, and how much of it the policy confirms.

Three sources: chances that are given, a trace (what the index offered at each token of recorded responses), and the
index itself, over recorded responses that are written again.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Sequence
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
from das_adapter.sim.requests import Requests
from das_adapter.sim.rollouts import Rollout, steps_of
from das_adapter.sim.texts import Texts

Ints = npt.NDArray[np.int64]
Chances = npt.NDArray[np.float32]
KINDS = 8
"""Kinds of problems that are told apart where chances differ from problem to problem."""
COLUMNS = ("length", "most", "prompt", "written", "forwards", "drafted", "accepted", "draft", "hits")
"""Columns of `Requests` that native steps read and write."""


class Offer(NamedTuple):
    """Drafts for some requests, as `core.steps.HistoryDrafts` has them, and what becomes of them."""

    chances: Chances
    offsets: Ints
    hits: Ints
    """Leading tokens of each draft that the policy would write, int64 [b]."""


class Source:
    """Where drafts come from."""

    walks = True
    """Whether engines can step natively with this source."""
    kind = ""
    """Which of the native functions `walk_*` and `offer_*` know the source."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the native functions that describe the source."""
        return {}

    def walk(self, *batch: Any, **out: Any) -> None:
        """Step engines natively; see `walk_traced` in csrc/simulator.cpp."""
        columns = {name: getattr(self._requests, name) for name in COLUMNS}
        getattr(native(), f"walk_{self.kind}")(*batch, **columns, **out, **self.arguments())

    def offer(self, rows: Ints, limits: Ints, floor: float) -> Offer:
        """Draft for running requests: at most so many tokens each, int64 [b], down to this chance. No draft may pass a
        request's end."""
        least = math.log(floor) if floor > 0 else -math.inf
        make = getattr(native(), f"offer_{self.kind}")
        return Offer(*make(rows, limits, least, self._requests.written, **self.arguments()))

    def begin(self, rows: Ints) -> None:
        """Take requests that begin, or continue where they were interrupted."""

    def known(self, rows: Ints) -> npt.NDArray[np.bool_]:
        """Return whether there is history of the requests' problems."""
        return self._requests.visit[rows] > 0

    def end(self, rows: Ints) -> None:
        """Take requests that ended."""

    def sync(self, version: int, rows: Ints) -> None:
        """Make these finished requests history, at a weight sync."""

    def close(self) -> None:
        """Remove the source's files."""


class Given(Source):
    """Drafts whose tokens survive with given chances. What a request accepts follows from the seed, the request and its
    position alone, so that it does not depend on when it is drafted for."""

    kind = "given"

    def __init__(
        self,
        requests: Requests,
        rates: Sequence[Sequence[float]],
        longest: int = 32,
        seed: int = 0,
        spread: float = 0.0,
    ) -> None:
        """
        Args:
            requests: of the fleet.
            rates: chance of each position of a draft, if those before survived, by visit of the problem; the last
                position's and the last visit's continue.
            longest: maximum tokens of a draft.
            seed: of the luck.
            spread: standard deviation of the logarithm of the odds from problem to problem.
        """
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
        return {"visit": kind, "survival": self._survival, "coverage": 1.0, "seed": self._seed}


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


class Traced(Source):
    """Drafts as a trace has them: at any size, since nothing is searched."""

    kind = "traced"

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

    def known(self, rows: Ints) -> npt.NDArray[np.bool_]:
        return self._known[self._requests.text[rows]]


class Indexed(Source):
    """Drafts from the real index: each engine searches the live text of its own requests, and the history that all
    engines map, as those of a node do."""

    walks = False

    def __init__(self, requests: Requests, texts: Texts, engines: int, history: HistoryConfig) -> None:
        super().__init__(requests)
        self._texts, self._policy = texts, HistoryPolicy(history)
        self._directory = tempfile.TemporaryDirectory(prefix="das-sim-")
        self._store = HistoryStore(f"{self._directory.name}/history")
        self.indices = [SuffixIndex.attach(self._store.directory) for _ in range(engines)]
        self._handles = np.zeros(0, dtype=np.int64)
        self._grown = np.zeros(0, dtype=np.int64)  # tokens of each request that its index knows
        self._known = np.zeros(0, dtype=bool)

    def close(self) -> None:
        self._store.close()
        self._directory.cleanup()

    def begin(self, rows: Ints) -> None:
        r, more = self._requests, len(self._requests) - len(self._handles)
        self._handles = np.append(self._handles, np.zeros(more, np.int64))
        self._grown = np.append(self._grown, np.zeros(more, np.int64))
        self._known = np.append(self._known, np.zeros(more, bool))
        for row in rows[self._handles[rows] == 0].tolist():
            index, prompt = self.indices[r.engine[row]], self._texts.rollouts[r.text[row]].prompt
            self._handles[row] = index.open(self._policy.key(int(r.problem[row])), prompt)
            self._known[row] = index.age(int(self._handles[row])) is not None

    def known(self, rows: Ints) -> npt.NDArray[np.bool_]:
        return self._known[rows]

    def offer(self, rows: Ints, limits: Ints, floor: float) -> Offer:
        """Draft for running requests of one engine."""
        index, texts = self.indices[self._requests.engine[rows[0]]], self._requests.text[rows]
        written = self._requests.written[rows]
        behind = written > self._grown[rows]
        if behind.any():
            late = rows[behind]
            index.extend_many(self._handles[late], *self._texts.part(texts[behind], self._grown[late], written[behind]))
            self._grown[late] = written[behind]
        tokens, chances, offsets = index.draft_flat(self._handles[rows], limits, floor)
        return Offer(chances, offsets, self._texts.agreeing(texts, written, tokens, offsets))

    def end(self, rows: Ints) -> None:
        for row in rows.tolist():
            text = self._requests.text[row : row + 1]
            index, handle = self.indices[self._requests.engine[row]], int(self._handles[row])
            index.extend(handle, self._texts.part(text, self._grown[row : row + 1], self._texts.lengths(text))[0])
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
    floor: float = 0.005,
    progress: Callable[[float], None] | None = None,
) -> Trace:
    """Write recorded responses again, a token a step, and ask the index at each token.

    Args:
        rollouts: in the order of `steps_of`; siblings grow side by side, and earlier steps are history.
        longest: maximum tokens of a draft, at most 255.
        history: what is kept; None: the defaults.
        floor: chance under which a draft ends.
        progress: receives the share of the tokens that is written.
    """
    texts, requests = Texts(rollouts), Requests()
    source = Indexed(requests, texts, 1, history or HistoryConfig())
    size, written = len(texts.tokens), 0
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
            offer = source.offer(live, np.minimum(longest, requests.room(live)), floor)
            place, counts = texts.ends[live] + at, np.diff(offer.offsets)
            some = counts > 0
            drafted[place], hits[place] = counts, offer.hits
            begin, last = offer.chances[offer.offsets[:-1][some]], offer.chances[offer.offsets[1:][some] - 1]
            first[place[some]] = begin
            ratio[place[some]] = (last / begin) ** (1.0 / np.maximum(counts[some] - 1, 1))
            written += len(live)
            if progress is not None and at % 256 == 0:
                progress(written / size)
        source.end(live)
        source.sync(number, rows)
    source.close()
    return Trace(drafted, hits, first, ratio, known)
