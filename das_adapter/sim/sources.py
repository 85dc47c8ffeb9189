"""What a request is offered to draft from, and how much of it the policy confirms.

Three sources: chances that are given, a trace (what the index offered at each token of recorded responses), and the
index itself, over recorded responses that are written again.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple, Protocol

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
"""Of problems that are told apart where chances differ from problem to problem."""


class Offer(NamedTuple):
    """Drafts for some requests, as `core.controller.HistoryDrafts` has them, and what becomes of them."""

    chances: Chances
    offsets: Ints
    hits: Ints
    """Leading tokens of each draft that the policy would write, int64 [b]."""


class Walker(NamedTuple):
    """Which of the native functions `walk_*` and `offer_*` know the drafts of a source, and what they need."""

    kind: str
    arguments: dict[str, Any]

    def offer(self, requests: Requests, rows: Ints, limits: Ints, floor: float) -> Offer:
        """Draft for requests, as `Source.offer`."""
        least, make = math.log(floor) if floor > 0 else -math.inf, getattr(native(), f"offer_{self.kind}")
        return Offer(*make(rows, limits, least, requests.written, **self.arguments))


class Source(Protocol):
    """Where drafts come from."""

    def walker(self) -> Walker | None:
        """Return what steps engines natively; None: drafts have to be asked for at each step."""
        ...

    def begin(self, rows: Ints) -> None:
        """Take requests that begin, or go on where they were interrupted."""
        ...

    def offer(self, rows: Ints, limits: Ints, floor: float) -> Offer:
        """Draft for running requests of one engine, or of several: at most so many tokens each, int64 [b], down to this
        chance. No draft may pass a request's end."""
        ...

    def known(self, rows: Ints) -> npt.NDArray[np.bool_]:
        """Return whether there is history of the requests' problems."""
        ...

    def end(self, rows: Ints) -> None:
        """Take requests that ended."""
        ...

    def sync(self, version: int, rows: Ints) -> None:
        """Make these finished requests history, at a weight sync."""
        ...


@dataclass
class Given:
    """Drafts whose tokens survive with given chances. What a request accepts follows from the seed, the request and its
    position alone, so that it does not depend on when it is drafted for."""

    requests: Requests
    rates: Sequence[Sequence[float]]
    """Chance of each position of a draft, if those before survived, by visit of the problem; the last position's and
    the last visit's go on."""
    coverage: float = 1.0
    """Share of the positions of a response at which there is a draft at all."""
    longest: int = 32
    seed: int = 0
    spread: float = 0.0
    """Standard deviation of the logarithm of the odds from problem to problem."""

    def __post_init__(self) -> None:
        steps = [[*visit, *[visit[-1]] * self.longest][: self.longest] for visit in self.rates]
        with np.errstate(divide="ignore"):
            odds = np.array(steps)[:, None] / (1.0 - np.array(steps)[:, None])  # [visits, 1, longest]
        if self.spread:
            places = [NormalDist().inv_cdf((kind + 0.5) / KINDS) for kind in range(KINDS)]
            odds = odds * np.exp(self.spread * np.array(places))[:, None]
        chances = np.where(np.isinf(odds), 1.0, odds / (1.0 + np.where(np.isinf(odds), 0.0, odds)))
        self._survival = np.cumprod(chances.reshape(-1, self.longest), axis=1)

    def _kind(self) -> Ints:
        """Row of each request's chances: by its visit, and by its problem where problems differ."""
        if not self.spread:
            return self.requests.visit
        problem = self.requests.problem.astype(np.uint64) + np.uint64(self.seed)
        kind = (problem * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(40)) % np.uint64(KINDS)
        return np.minimum(self.requests.visit, len(self.rates) - 1) * KINDS + kind.astype(np.int64)

    def walker(self) -> Walker:
        """See `Source`."""
        return Walker(
            "given", {"visit": self._kind(), "survival": self._survival, "coverage": self.coverage, "seed": self.seed}
        )

    def begin(self, rows: Ints) -> None:
        """See `Source`."""

    def known(self, rows: Ints) -> npt.NDArray[np.bool_]:
        """See `Source`."""
        return self.requests.visit[rows] > 0

    def offer(self, rows: Ints, limits: Ints, floor: float) -> Offer:
        """See `Source`."""
        return self.walker().offer(self.requests, rows, limits, floor)

    def end(self, rows: Ints) -> None:
        """See `Source`."""

    def sync(self, version: int, rows: Ints) -> None:
        """See `Source`."""


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


@dataclass
class Traced:
    """Drafts as a trace has them: at any size, since nothing is searched."""

    requests: Requests
    texts: Texts
    trace: Trace

    def __post_init__(self) -> None:
        with np.errstate(divide="ignore"):
            self._log_first, self._log_ratio = (
                np.log(part.astype(np.float32)) for part in (self.trace.first, self.trace.ratio)
            )

    def walker(self) -> Walker:
        """See `Source`."""
        trace = self.trace
        return Walker(
            "traced",
            {
                "text": self.requests.text,
                "ends": self.texts.ends,
                "log_first": self._log_first,
                "log_ratio": self._log_ratio,
                "trace_drafted": trace.drafted,
                "trace_hits": trace.hits,
            },
        )

    def begin(self, rows: Ints) -> None:
        """See `Source`."""

    def known(self, rows: Ints) -> npt.NDArray[np.bool_]:
        """See `Source`."""
        return self.trace.known[self.requests.text[rows]]

    def offer(self, rows: Ints, limits: Ints, floor: float) -> Offer:
        """See `Source`."""
        return self.walker().offer(self.requests, rows, limits, floor)

    def end(self, rows: Ints) -> None:
        """See `Source`."""

    def sync(self, version: int, rows: Ints) -> None:
        """See `Source`."""


class Indexed:
    """Drafts from the real index: each engine searches the live text of its own requests and the history of all.

    One engine has a history of its own; several map a `HistoryStore`, as the engines of a node do.
    """

    def __init__(self, requests: Requests, texts: Texts, engines: int, history: HistoryConfig) -> None:
        self._requests, self._texts = requests, texts
        self._policy = HistoryPolicy(history)
        self._store: SuffixIndex | HistoryStore
        if engines == 1:
            self._store = SuffixIndex()
            self._indices = [self._store]
        else:
            self._directory = tempfile.TemporaryDirectory(prefix="das-sim-")
            self._store = HistoryStore(f"{self._directory.name}/history")
            self._indices = [SuffixIndex.attach(self._store.directory) for _ in range(engines)]
        self._handles = np.zeros(0, dtype=np.int64)
        self._grown = np.zeros(0, dtype=np.int64)  # tokens of each request that its index knows
        self._known = np.zeros(0, dtype=bool)

    def walker(self) -> Walker | None:
        """See `Source`."""
        return None

    def close(self) -> None:
        """Remove the store's files."""
        if isinstance(self._store, HistoryStore):
            self._store.close()
            self._directory.cleanup()

    def begin(self, rows: Ints) -> None:
        """See `Source`."""
        size = len(self._requests)
        if size > len(self._handles):
            more = size - len(self._handles)
            self._handles = np.concatenate([self._handles, np.zeros(more, np.int64)])
            self._grown = np.concatenate([self._grown, np.zeros(more, np.int64)])
            self._known = np.concatenate([self._known, np.zeros(more, bool)])
        for row in rows.tolist():
            if self._handles[row]:
                continue
            index = self._indices[self._requests.engine[row]]
            prompt = self._texts.rollouts[self._requests.text[row]].prompt
            self._handles[row] = index.open(self._policy.key(int(self._requests.problem[row])), prompt)
            self._known[row] = index.age(int(self._handles[row])) is not None

    def known(self, rows: Ints) -> npt.NDArray[np.bool_]:
        """See `Source`."""
        return self._known[rows]

    def offer(self, rows: Ints, limits: Ints, floor: float) -> Offer:
        """See `Source`; `rows` of one engine."""
        index, texts = self._indices[self._requests.engine[rows[0]]], self._requests.text[rows]
        written = self._requests.written[rows]
        behind = written > self._grown[rows]
        if behind.any():
            late = rows[behind]
            index.extend_many(self._handles[late], *self._texts.part(texts[behind], self._grown[late], written[behind]))
            self._grown[late] = written[behind]
        tokens, chances, offsets = index.draft_flat(self._handles[rows], limits, floor)
        return Offer(chances, offsets, self._texts.agreeing(texts, written, tokens, offsets))

    def end(self, rows: Ints) -> None:
        """See `Source`."""
        for row in rows.tolist():
            engine, text = self._requests.engine[row], self._requests.text[row : row + 1]
            index, handle, whole = self._indices[engine], int(self._handles[row]), self._texts.lengths(text)
            index.extend(handle, self._texts.part(text, self._grown[row : row + 1], whole)[0])
            index.close(handle, keep=self._policy.kept)

    def sync(self, version: int, rows: Ints) -> None:
        """See `Source`."""
        if self._policy.kept:
            found = (self._texts.rollouts[i] for i in self._requests.text[rows])
            problems = self._requests.problem[rows].tolist()
            written = ((p, r.tokens.tobytes(), version) for p, r in zip(problems, found, strict=True))
            self._policy.remember(self._store, written)
            self._policy.tidy(self._store)
        for index in self._indices:
            if isinstance(self._store, HistoryStore):
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
        longest: most tokens of a draft, at most 255.
        history: what is kept; None: the defaults.
        floor: chance under which a draft ends.
        progress: hears what share of the tokens is written.
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
        problem, prompt = (
            np.array(x, dtype=np.int64) for x in ([r.problem for r in step], [len(r.prompt) for r in step])
        )
        lengths = texts.lengths(text)
        rows = requests.add(problem, np.zeros_like(text), text, prompt, lengths, lengths)
        requests.engine[rows] = 0
        source.begin(rows)
        known[rows] = source.known(rows)
        live = rows
        for at in range(int(lengths.max())):
            done = requests.length[live] <= at
            source.end(live[done])
            live = live[~done]
            requests.written[live] = at
            offer = source.offer(live, np.minimum(longest, requests.length[live] - at - 1), floor)
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
    return Trace(drafted, hits, first, ratio, known)
