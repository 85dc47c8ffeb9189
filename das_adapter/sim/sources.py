"""The drafts that requests are offered, and how much of them the policy confirms.

Two sources: chances that are given, and the index itself, over recorded responses that
are written again.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from das_adapter.config import HistoryConfig
from das_adapter.core.history import HistoryRules
from das_adapter.core.index import SuffixIndex
from das_adapter.core.index.store import HistoryStore
from das_adapter.sim.requests import Bools, Floats, Ints, Requests, int_zeros
from das_adapter.sim.rollouts import RecordedResponse
from das_adapter.sim.texts import Texts, offsets_of

Rates = Sequence[Sequence[float]]


class SimOffer(NamedTuple):
    """Drafts for some requests, as `core.steps.HistoryDrafts` has them, with the number
    of tokens that the policy would write.
    """

    chances: npt.NDArray[np.float32]
    """Chance of each draft token, request after request."""
    offsets: Ints
    """Begin of the draft of each request in `chances`, int64 [b + 1]."""
    hits: Ints
    """Leading tokens of each draft that the policy would write, int64 [b]."""


class Source:
    """A source of drafts; this one keeps nothing."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def offer(self, rows: Ints, limits: Ints, floor: float) -> SimOffer:
        """Draft for running requests of one engine: at most `limits` tokens each, int64
        [b], down to this chance. No draft may pass a request's end.
        """
        raise NotImplementedError

    def begin(self, rows: Ints) -> None:
        """Open requests that begin, or continue where they were interrupted."""

    def end(self, rows: Ints) -> None:
        """Close requests that ended."""

    def sync(self, version: int, rows: Ints) -> None:
        """Make these finished requests history, at a weight sync."""


@dataclass
class _RequestsOfSteps:
    """The requests of engines in their free steps, engine after engine, [n]."""

    rows: Ints
    engine: Ints
    """Place of its engine among these engines."""
    max_draft_tokens: Ints
    min_chance: Floats
    """Chance under which its draft ends."""
    length: Ints
    """Tokens that it is going to write."""
    last_draftable: Ints
    """Tokens after which it needs no draft."""

    def keep(self, kept: Bools) -> None:
        """Drop all requests but these, bool [n]."""
        for column in fields(self):
            values = getattr(self, column.name)
            setattr(self, column.name, values[kept])


class Given(Source):
    """Drafts whose tokens survive with given chances, so that engines can go on without
    asking. What a request accepts follows from the seed, the request and its position
    alone, not from when it is drafted for.
    """

    def __init__(
        self,
        requests: Requests,
        rates: Rates,
        longest: int = 32,
        seed: int = 0,
        agreement: float = 0.0,
    ) -> None:
        """Make a source with `rates` and `agreement` as `AcceptanceBlock` has them; no
        draft has more than `longest` tokens, and with an agreement of 0 none is of what
        was written ahead.
        """
        super().__init__(requests)
        visits = [*rates, [agreement]]
        chances = [_repeat_last(visit, longest) for visit in visits]
        # [visits + 1, longest]; the last row is of text that was written ahead
        self._survival = np.cumprod(np.array(chances), axis=1)
        high_bits = seed << 32
        self._seed = np.uint64(high_bits % 2**64)

    def offer(self, rows: Ints, limits: Ints, floor: float) -> SimOffer:
        floors = np.full(len(rows), floor)
        counts, hits, chances = self._drafts(rows, limits, floors)
        num_positions = chances.shape[1]
        positions = np.arange(num_positions)
        drafted = positions < counts[:, None]
        of_drafts = chances[drafted]
        return SimOffer(
            chances=of_drafts.astype(np.float32),
            offsets=offsets_of(counts),
            hits=hits,
        )

    def take_free_steps(
        self,
        rows: Ints,
        bounds: Ints,
        steps: Ints,
        log_min_chance: Floats,
        max_draft_tokens: Ints,
        tokens: Floats,
        context: Floats,
    ) -> Ints:
        """Step each of some engines so often, or until one of its requests ends; return
        how often, int64 [engines].

        Args:
            rows: their requests, engine after engine.
            bounds: where the requests of each engine begin, and the end of the last,
                int64 [engines + 1].
            steps: maximum number of steps of each engine, int64 [engines].
            log_min_chance, max_draft_tokens: of each request, as in `FreeSteps`.
            tokens, context: float64 [engines, largest of `steps`], which receive the
                tokens of each forward pass, and the context that its requests have.
        """
        requests = self._requests
        drafts = log_min_chance < np.inf
        limits = np.where(drafts, max_draft_tokens, 0)
        has_draft = requests.num_draft_tokens[rows] > 0
        may_draft = limits.any()
        if not may_draft and not has_draft.any():
            return self._take_undrafted_steps(rows, bounds, steps, tokens, context)
        num_engines = len(steps)
        counts = np.diff(bounds)
        length = requests.num_output_tokens[rows]
        max_tokens = requests.max_tokens[rows]
        end = np.minimum(length, max_tokens)
        running = _RequestsOfSteps(
            rows=rows,
            engine=np.repeat(np.arange(num_engines), counts),
            max_draft_tokens=limits,
            min_chance=np.exp(log_min_chance),
            length=length,
            last_draftable=end - 1,
        )
        taken = int_zeros(num_engines)
        ended = np.zeros(num_engines, dtype=bool)
        max_steps = tokens.shape[1]
        for step in range(max_steps):
            rows = running.rows
            engine = running.engine
            forward_tokens = 1 + requests.num_draft_tokens[rows]
            context_tokens = requests.context(rows)
            tokens[:, step] = np.bincount(engine, forward_tokens, num_engines)
            context[:, step] = np.bincount(engine, context_tokens, num_engines)
            self._write_and_draft(running)
            taken[engine] = step + 1
            written = requests.num_written[rows]
            finished = written >= running.length
            ended[engine[finished]] = True
            at_limit = taken == steps
            stopped = ended | at_limit
            kept = ~stopped[engine]
            if not kept.any():
                break
            if not kept.all():
                running.keep(kept)
        return taken

    def _take_undrafted_steps(
        self,
        rows: Ints,
        bounds: Ints,
        steps: Ints,
        tokens: Floats,
        context: Floats,
    ) -> Ints:
        """Step engines whose requests have no drafts, as `take_free_steps` does."""
        requests = self._requests
        begins = bounds[:-1]
        counts = np.diff(bounds)
        written = requests.num_written[rows]
        left = requests.num_output_tokens[rows] - written
        until_end = np.minimum.reduceat(left, begins)
        taken = np.minimum(steps, until_end)
        of_requests = requests.context(rows)
        context_tokens = np.add.reduceat(of_requests, begins)
        max_steps = tokens.shape[1]
        step_numbers = np.arange(max_steps)
        tokens[:] = counts[:, None]
        context[:] = context_tokens[:, None]
        # each request adds a token in each step
        context += tokens * step_numbers
        of_request = np.repeat(taken, counts)
        requests.num_written[rows] += of_request
        requests.num_forwards[rows] += of_request
        return taken

    def _write_and_draft(self, running: _RequestsOfSteps) -> None:
        """Take one step of some requests, and draft for their next."""
        requests = self._requests
        rows = running.rows
        drafted = requests.num_draft_tokens[rows]
        hits = requests.num_draft_hits[rows]
        written = requests.num_written[rows]
        accepted = np.minimum(drafted, hits)
        left = running.length - written
        got = np.minimum(1 + accepted, left)
        written = written + got
        requests.num_written[rows] = written
        requests.num_forwards[rows] += 1
        requests.num_drafted[rows] += drafted
        requests.num_accepted[rows] += got - 1
        room = running.last_draftable - written
        limits = np.minimum(running.max_draft_tokens, room)
        counts, hits, _ = self._drafts(
            rows=rows,
            limits=limits,
            min_chances=running.min_chance,
        )
        requests.num_draft_tokens[rows] = counts
        requests.num_draft_hits[rows] = hits

    def _drafts(
        self,
        rows: Ints,
        limits: Ints,
        min_chances: Floats,
    ) -> tuple[Ints, Ints, Floats]:
        """Draft for requests: at most `limits` tokens each, down to a chance of each,
        [n].

        Returns:
            How many tokens each has and how many of them the policy would write, int64
            [n]; and the chances of drafts of the greatest length, float64 [n, longest].
        """
        requests = self._requests
        survival = self._survival
        # the last row of the table is no visit's
        ahead_row = len(survival) - 1
        written = requests.num_written[rows]
        same = requests.num_same[rows]
        ahead = requests.num_ahead[rows]
        # after the first token that differs, what was written ahead is the text of a
        # sibling, as from a visit before
        in_ahead = written < ahead
        before_difference = written <= same
        agrees = survival[-1, 0] > 0.0
        repeats = in_ahead & before_difference & agrees
        visit = requests.visit[rows] + in_ahead
        visit = np.minimum(visit, ahead_row - 1)
        table_rows = np.where(repeats, ahead_row, visit)
        chances = survival[table_rows]
        max_positions = chances.shape[1]
        left_ahead = ahead - written
        longest = np.where(repeats, left_ahead, max_positions)
        longest = np.minimum(limits, longest)
        longest = np.maximum(longest, 0)
        allowed = chances >= min_chances[:, None]
        num_allowed = allowed.sum(axis=1)
        counts = np.clip(num_allowed, 0, longest)
        luck = self._luck(rows, written)
        survives = chances > luck[:, None]
        num_survivors = survives.sum(axis=1)
        num_same = same - written
        hits = np.where(repeats, num_same, num_survivors)
        hits = np.minimum(hits, counts)
        return counts, hits, chances

    def _luck(self, rows: Ints, written: Ints) -> Floats:
        """Return a number between 0 and 1 for each request at its position, float64
        [n], the same in each run.
        """
        row_key = rows.astype(np.uint64) + self._seed
        request_key = _mixed(row_key)
        position = written.astype(np.uint64)
        key = _mixed(request_key + position)
        low_mask = np.uint64(2**32 - 1)
        low_bits = key & low_mask
        middle = low_bits.astype(np.float64) + 0.5
        return middle * 2.0**-32


def _repeat_last(values: Sequence[float], count: int) -> list[float]:
    """Return the first values, so many; the last goes on where there are fewer."""
    found = list(values)
    while len(found) < count:
        found.append(found[-1])
    return found[:count]


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return what SplitMix64 makes of numbers, uint64 [n]."""
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x = x ^ _high_bits(x, 30)
    x = x * np.uint64(0xBF58476D1CE4E5B9)
    x = x ^ _high_bits(x, 27)
    x = x * np.uint64(0x94D049BB133111EB)
    return x ^ _high_bits(x, 31)


def _high_bits(x: npt.NDArray[np.uint64], shift: int) -> npt.NDArray[np.uint64]:
    """Return the bits of numbers from a place on, uint64 [n]."""
    return x >> np.uint64(shift)


class Indexed(Source):
    """Drafts from the real index: each engine searches the live text of its own
    requests, and the history that all engines map, as those of a node do.
    """

    def __init__(
        self,
        requests: Requests,
        texts: Texts,
        engines: int,
        history: HistoryConfig,
    ) -> None:
        super().__init__(requests)
        self._texts = texts
        self._rules = HistoryRules(history)
        folder = tempfile.mkdtemp(prefix="das-sim-")
        self._store = self._rules.store(folder)
        weakref.finalize(self, _remove, self._store)
        directory = self._store.directory
        self.indices = []
        for _ in range(engines):
            index = SuffixIndex.attach(directory)
            self.indices.append(index)

    def begin(self, rows: Ints) -> None:
        requests = self._requests
        handles = requests.handle[rows]
        unopened = rows[handles == 0]
        for row in unopened.tolist():
            response = self._response(row)
            num_ahead = max(0, requests.num_ahead[row])
            problem = int(requests.problem[row])
            requests.handle[row] = self._index(row).open(
                self._rules.key(problem),
                response.prompt,
                ahead=response.ahead[:num_ahead],
            )

    def _response(self, row: int) -> RecordedResponse:
        """Return the recorded response that a request writes again."""
        text = self._requests.text[row]
        return self._texts.responses[text]

    def _index(self, row: int) -> SuffixIndex:
        """Return the index of a request's engine."""
        engine = self._requests.engine[row]
        return self.indices[engine]

    def offer(self, rows: Ints, limits: Ints, floor: float) -> SimOffer:
        requests = self._requests
        texts = requests.text[rows]
        written = requests.num_written[rows]
        indexed = requests.num_indexed[rows]
        text_begins = self._texts.ends[texts]
        index = self._index(rows[0])
        # all texts are one row; each request's new tokens are a span of it
        found = index.draft_rows(
            requests.handle[rows],
            self._texts.tokens[None],
            np.zeros_like(rows),
            text_begins + indexed,
            text_begins + written,
            limits,
            floor,
        )
        tokens, chances, offsets = found.result()
        requests.num_indexed[rows] = written
        hits = self._texts.agreeing(texts, written, tokens, offsets)
        return SimOffer(chances, offsets, hits)

    def end(self, rows: Ints) -> None:
        requests = self._requests
        handles = requests.handle[rows]
        opened = rows[handles > 0]
        for row in opened.tolist():
            index = self._index(row)
            handle = int(requests.handle[row])
            indexed = requests.num_indexed[row]
            written = requests.num_written[row]
            text = self._response(row).tokens
            index.extend(handle, text[indexed:written])
            own_request = bool(requests.num_ahead[row] >= 0)
            keep = self._rules.keeps_texts and own_request
            index.close(handle, keep=keep)

    def sync(self, version: int, rows: Ints) -> None:
        requests = self._requests
        written = []
        for row in rows.tolist():
            response = self._response(row)
            problem = int(requests.problem[row])
            text = response.tokens.tobytes()
            written.append((problem, text, version))
        self.remember(written)

    def remember(self, written: Iterable[tuple[int, bytes, int]]) -> None:
        """Make finished responses history: problem, int32 tokens, weight version."""
        rules = self._rules
        if rules.keeps_texts:
            rules.add_and_seal(self._store, written)
            unfinished = True
            while unfinished:
                unfinished = rules.shrink_slice(self._store)
        for index in self.indices:
            index.refresh()
            index.clear_live()
            index.forget_chances()


def _remove(store: HistoryStore) -> None:
    store.close()
    shutil.rmtree(store.directory)
