"""What a request is offered to draft from, and how much of it the policy confirms.

Two sources: chances that are given, and the index itself, over recorded responses that
are written again.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from das_adapter.config import HistoryConfig
from das_adapter.core.history import HistoryRules
from das_adapter.core.index import SuffixIndex
from das_adapter.core.index.store import HistoryStore
from das_adapter.sim.requests import Floats, Ints, Requests
from das_adapter.sim.texts import Texts, offsets_of

Rates = Sequence[Sequence[float]]


class Offer(NamedTuple):
    """Drafts for some requests, as `core.steps.HistoryDrafts` has them, and what
    becomes of them.
    """

    chances: npt.NDArray[np.float32]
    offsets: Ints
    hits: Ints
    """Leading tokens of each draft that the policy would write, int64 [b]."""


class Source:
    """Where drafts come from; here one that keeps nothing."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def offer(self, rows: Ints, limits: Ints, floor: float) -> Offer:
        """Draft for running requests of one engine: at most so many tokens each, int64
        [b], down to this chance. No draft may pass a request's end.
        """
        raise NotImplementedError

    def begin(self, rows: Ints) -> None:
        """Take requests that begin, or continue where they were interrupted."""

    def end(self, rows: Ints) -> None:
        """Take requests that ended."""

    def sync(self, version: int, rows: Ints) -> None:
        """Make these finished requests history, at a weight sync."""


class Given(Source):
    """Drafts whose tokens survive with given chances, so that engines can go on without
    being asked. What a request accepts follows from the seed, the request and its
    position alone, not from when it is drafted for.
    """

    def __init__(
        self,
        requests: Requests,
        rates: Rates,
        longest: int = 32,
        seed: int = 0,
        agreement: float = 0.0,
    ) -> None:
        """Take `rates` and `agreement` as `AcceptanceBlock` has them; no draft has more
        than `longest` tokens, and with an agreement of 0 none is of what was written
        ahead.
        """
        super().__init__(requests)
        steps = np.array(
            [
                [*visit, *[visit[-1]] * longest][:longest]
                for visit in (*rates, [agreement])
            ]
        )
        self._survival = np.cumprod(steps, axis=1)
        self._seed = np.uint64(seed << 32 & 2**64 - 1)

    def offer(self, rows: Ints, limits: Ints, floor: float) -> Offer:
        counts, hits, chances = self._drafts(rows, limits, np.full(len(rows), floor))
        there = np.arange(chances.shape[1]) < counts[:, None]
        return Offer(chances[there].astype(np.float32), offsets_of(counts), hits)

    def walk(
        self,
        rows: Ints,
        bounds: Ints,
        steps: Ints,
        least: Floats,
        limit: Ints,
        tokens: Floats,
        context: Floats,
    ) -> Ints:
        """Step each of some engines so often, or until one of its requests ends; return
        how often, int64 [engines].

        Args:
            rows: their requests, engine after engine; `bounds`: where each engine's
                begin, and the end of the last.
            steps: of each engine at most.
            least, limit: of each request, as in `Walk`.
            tokens, context: float64 [engines, most steps], which get those of each
                step.
        """
        r = self._requests
        at = np.repeat(np.arange(len(steps)), np.diff(bounds))
        limit = np.where(least < np.inf, limit, 0)
        lowest = np.exp(least)
        length = r.length[rows]
        last = np.minimum(r.length[rows], r.most[rows]) - 1
        if not (limit.any() or r.draft[rows].any()):
            taken = np.minimum(
                steps, np.minimum.reduceat(length - r.written[rows], bounds[:-1])
            )
            tokens[:] = np.diff(bounds)[:, None]
            context[:] = np.add.reduceat(r.prompt[rows] + r.written[rows], bounds[:-1])[
                :, None
            ]
            context += tokens * np.arange(tokens.shape[1])
            r.written[rows] += taken[at]
            r.forwards[rows] += taken[at]
            return taken
        taken = np.zeros(len(steps), dtype=np.int64)
        ended = np.zeros(len(steps), dtype=bool)
        for step in range(tokens.shape[1]):
            drafted = r.draft[rows]
            written = r.written[rows]
            tokens[:, step] = np.bincount(at, 1 + drafted, len(steps))
            context[:, step] = np.bincount(at, r.prompt[rows] + written, len(steps))
            got = np.minimum(1 + np.minimum(drafted, r.hits[rows]), length - written)
            r.written[rows] = written = written + got
            r.forwards[rows] += 1
            r.drafted[rows] += drafted
            r.accepted[rows] += got - 1
            r.draft[rows], r.hits[rows], _ = self._drafts(
                rows, np.minimum(limit, last - written), lowest
            )
            taken[at] = step + 1
            ended[at[written >= length]] = True
            mine = ~(ended | (taken == steps))[at]
            if not mine.all():
                rows, at, limit, lowest, length, last = (
                    of[mine] for of in (rows, at, limit, lowest, length, last)
                )
                if not len(rows):
                    break
        return taken

    def _drafts(
        self, rows: Ints, limits: Ints, lowest: Floats
    ) -> tuple[Ints, Ints, Floats]:
        """Draft for requests: at most so many tokens each, down to this chance of each,
        [n]; return how many tokens each has and how many of them the policy would
        write, int64 [n], and the chances of longer drafts, [n, most].
        """
        r = self._requests
        (*visits, _) = self._survival
        written = r.written[rows]
        key = _mixed(
            _mixed(rows.astype(np.uint64) + self._seed) + written.astype(np.uint64)
        )
        luck = ((key & np.uint64(2**32 - 1)).astype(np.float64) + 0.5) * 2.0**-32
        # what diverged is a sibling's, as from a visit before
        early = written < r.ahead[rows]
        repeats = early & (written <= r.same[rows]) & (self._survival[-1, 0] > 0.0)
        known = np.minimum(r.visit[rows] + early, len(visits) - 1)
        chances = self._survival[np.where(repeats, len(visits), known)]
        counts = np.minimum(
            limits, np.where(repeats, r.ahead[rows] - written, chances.shape[1])
        )
        counts = np.clip(
            (chances >= lowest[:, None]).sum(axis=1), 0, np.maximum(counts, 0)
        )
        hits = np.where(
            repeats, r.same[rows] - written, (chances > luck[:, None]).sum(axis=1)
        )
        return counts, np.minimum(hits, counts), chances


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return what SplitMix64 makes of numbers."""
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


class Indexed(Source):
    """Drafts from the real index: each engine searches the live text of its own
    requests, and the history that all engines map, as those of a node do.
    """

    def __init__(
        self, requests: Requests, texts: Texts, engines: int, history: HistoryConfig
    ) -> None:
        super().__init__(requests)
        self._texts = texts
        self._policy = HistoryRules(history)
        self._store = HistoryStore(tempfile.mkdtemp(prefix="das-sim-"))
        weakref.finalize(self, _remove, self._store)
        self.indices = [
            SuffixIndex.attach(self._store.directory) for _ in range(engines)
        ]

    def begin(self, rows: Ints) -> None:
        r = self._requests
        for row in rows[r.handle[rows] == 0].tolist():
            index = self.indices[r.engine[row]]
            text = self._texts.rollouts[r.text[row]]
            ahead = text.ahead[: max(0, r.ahead[row])]
            r.handle[row] = index.open(
                self._policy.key(int(r.problem[row])), text.prompt, ahead=ahead
            )

    def offer(self, rows: Ints, limits: Ints, floor: float) -> Offer:
        r = self._requests
        index = self.indices[r.engine[rows[0]]]
        texts = r.text[rows]
        written = r.written[rows]
        flat = self._texts.tokens[None]
        begins = self._texts.ends[texts]
        new = rows * 0, begins + r.indexed[rows], begins + written
        tokens, chances, offsets = index.draft_rows(
            r.handle[rows], flat, *new, limits, floor
        ).result()
        r.indexed[rows] = written
        return Offer(
            chances, offsets, self._texts.agreeing(texts, written, tokens, offsets)
        )

    def end(self, rows: Ints) -> None:
        r = self._requests
        for row in rows[r.handle[rows] > 0].tolist():
            index = self.indices[r.engine[row]]
            handle = int(r.handle[row])
            index.extend(
                handle,
                self._texts.rollouts[r.text[row]].tokens[
                    r.indexed[row] : r.written[row]
                ],
            )
            index.close(handle, keep=self._policy.kept and bool(r.ahead[row] >= 0))

    def sync(self, version: int, rows: Ints) -> None:
        found = (self._texts.rollouts[i] for i in self._requests.text[rows])
        problems = self._requests.problem[rows].tolist()
        self.remember(
            (p, r.tokens.tobytes(), version)
            for p, r in zip(problems, found, strict=True)
        )

    def remember(self, written: Iterable[tuple[int, bytes, int]]) -> None:
        """Make finished responses history: problem, int32 tokens, weight version."""
        if self._policy.kept:
            self._policy.add_and_seal(self._store, written)
            while self._policy.shrink_slice(self._store):
                pass
        for index in self.indices:
            index.refresh()
            index.clear_live()


def _remove(store: HistoryStore) -> None:
    store.close()
    shutil.rmtree(store.directory)
