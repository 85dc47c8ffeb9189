"""The engines of a rollout: slots, KV blocks, preemption, prefill, and steps that take their time.

Each engine has a clock. All that are behind the same moment step together, in arrays, so that a step of many engines
costs about as much as a step of one. Where nobody waits for what another engine does, all of them step together until
they are done; elsewhere only those within `slack` of the earliest.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from das_adapter.core.native import native
from das_adapter.errors import DasError
from das_adapter.sim.drafting import Drafting, Ticked
from das_adapter.sim.requests import Requests
from das_adapter.sim.steps import Steps
from das_adapter.sim.texts import offsets_of

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
LEAP = 256
"""Most steps without drafts that are taken at once."""


@dataclass(frozen=True)
class Settings:
    """What an engine can hold; vLLM's names and defaults."""

    max_num_seqs: int = 256
    kv_blocks: int = 2**40
    """Blocks of the KV cache."""
    block: int = 16
    """Tokens of a block."""
    max_num_batched_tokens: int = 8192
    """Tokens of a forward pass; prompts are read in such chunks."""
    prefix_caching: bool = True
    """Whether siblings on one engine read their prompt once."""


class Fleet:
    """Engines that are alike, and the requests on them."""

    def __init__(self, engines: int, requests: Requests, settings: Settings, steps: Steps, drafting: Drafting) -> None:
        self.engines, self.requests, self.settings = engines, requests, settings
        self.steps, self.drafting = steps, drafting
        self.clock: Floats = np.zeros(engines)
        self.busy_s: Floats = np.zeros(engines)
        """Seconds of steps."""
        self.step_count: Ints = np.zeros(engines, dtype=np.int64)
        self.drafting_s: Floats = np.zeros(engines)
        """Seconds of drafting, in `busy_s`."""
        self.prefilled = 0
        """Tokens read."""
        self.running: Ints = np.zeros(0, dtype=np.int64)
        """Rows of admitted requests, engine after engine, in the order of their admission."""
        self._waiting: list[list[tuple[int, int, int]]] = [[] for _ in range(engines)]
        self._queued = np.zeros(engines, dtype=np.int64)
        self._open = np.zeros(engines, dtype=bool)  # whether somebody who waits might be admitted
        self._arrived = 0
        self._read: list[set[int]] = [set() for _ in range(engines)]  # problems whose prompt is cached

    def submit(self, rows: Ints, engines: Ints, priorities: Ints, at: float) -> None:
        """Send requests to engines at a time; the lowest priority starts first.

        Raises:
            DasError: a request that no engine can hold.
        """
        r = self.requests
        needed = int(((r.prompt[rows] + r.length[rows]) // self.settings.block + 1).max(initial=0))
        if needed > self.settings.kv_blocks:
            raise DasError(
                f"engine: a request needs {needed} blocks of KV cache, an engine has "
                f"{self.settings.kv_blocks}: more devices an engine, or shorter responses"
            )
        r.engine[rows], r.sent[rows] = engines, at
        for row, engine, priority in zip(rows.tolist(), engines.tolist(), priorities.tolist(), strict=True):
            heapq.heappush(self._waiting[engine], (priority, self._arrived, row))
            self._arrived += 1
            if not self._queued[engine] and not self._occupied[engine]:
                self.clock[engine] = max(self.clock[engine], at)
            self._queued[engine] += 1
            self._open[engine] = True

    @property
    def _occupied(self) -> Ints:
        return np.bincount(self.requests.engine[self.running], minlength=self.engines)

    @property
    def busy(self) -> Bools:
        """Whether each engine has requests."""
        return (self._occupied > 0) | (self._queued > 0)

    def pause(self, at: float, seconds: float) -> None:
        """Stop all engines at a time, for a weight sync; their requests and prompts stay."""
        self.clock = np.maximum(self.clock, at) + seconds

    def forget_prompts(self) -> None:
        """Forget the cached prompts, whose keys and values are of an older policy."""
        self._read = [set() for _ in range(self.engines)]

    def run(self, until: float = np.inf, slack: float = np.inf, ended: Callable[[Ints], bool] | None = None) -> None:
        """Step until nobody is left or all clocks have reached `until`.

        Args:
            until: seconds.
            slack: engines step together whose clocks are so close, seconds.
            ended: hears which requests ended, and says whether to stop.
        """
        while True:
            occupied = self._occupied
            busy = (occupied > 0) | (self._queued > 0)
            busy &= self.clock < until
            if not busy.any():
                return
            active = busy & (self.clock <= self.clock[busy].min() + slack)
            walked, done = self._walk(active, until)
            if (active & ~walked).any():
                done = np.concatenate([done, self._tick(active & ~walked, until)])
            if ended is not None and len(done) and ended(done):
                return

    # Inside

    def _walk(self, active: Bools, until: float) -> tuple[Bools, Ints]:
        """Let engines go on whose drafter needs not be asked, until it must be or something else changes; return which
        ones these are, and the requests that ended."""
        r, none = self.requests, (np.zeros(self.engines, dtype=bool), np.zeros(0, dtype=np.int64))
        active = active & ~self._open
        if self.drafting.plain or not active.any():
            return none
        engine = r.engine[self.running]
        active &= ~np.bincount(engine[r.unread[self.running] > 0], minlength=self.engines).astype(bool)
        rows = self.running[active[engine]]
        at = r.engine[rows]
        requests = np.bincount(at, minlength=self.engines).astype(float)
        walk = self.drafting.walk(rows, requests)
        if walk is None:
            return none
        steps = np.minimum(walk.steps, LEAP if until == np.inf else 16)
        if self.settings.kv_blocks < 2**40:
            steps = np.minimum(steps, self._room(rows, at, requests) // (1 + walk.limit.max(initial=0)))
        active &= (steps > 0) & (requests > 0)
        if not active.any():
            return none
        chosen, mine = np.flatnonzero(active), active[at]
        rows, counts, width = rows[mine], requests[chosen], int(steps[chosen].max())
        taken = np.zeros(len(chosen), dtype=np.int64)
        tokens, context = np.zeros((2, len(chosen), width))
        columns = ("length", "most", "prompt", "written", "forwards", "drafted", "accepted", "draft", "hits")
        getattr(native(), f"walk_{walk.walker.kind}")(
            rows,
            offsets_of(counts.astype(np.int64)),
            steps[chosen],
            walk.least[mine],
            walk.limit[mine],
            **{name: getattr(r, name) for name in columns},
            taken=taken,
            tokens=tokens,
            context=context,
            **walk.walker.arguments,
        )
        there = np.arange(width) < taken[:, None]
        which = np.repeat(np.arange(len(chosen)), taken)
        each = self.steps.decode(counts[which], tokens[there], context[there])
        drafting = _sums(which, walk.seconds(counts[which], context[there]), len(chosen))
        seconds = drafting + _sums(which, each, len(chosen))
        self.clock[chosen] += seconds
        self.busy_s[chosen] += seconds
        self.drafting_s[chosen] += drafting
        self.step_count[chosen] += taken
        went = np.zeros(self.engines, dtype=np.int64)
        went[chosen] = taken
        self.drafting.walked(went)
        return active, self._end(rows)

    def _tick(self, active: Bools, until: float) -> Ints:
        r, settings = self.requests, self.settings
        if (self._open & active).any():
            self._admit(active)
        whole = bool(active.all())
        engine = r.engine[self.running]
        rows = self.running if whole else self.running[active[engine]]
        if settings.kv_blocks < 2**40:
            lost = self._preempt(rows)
            if len(lost):
                gone = np.isin(self.running, lost)
                self.running = self.running[~gone]
                rows = rows[~np.isin(rows, lost)]
        engine = r.engine[rows]
        reading = r.unread[rows] > 0
        decoding = rows[~reading] if reading.any() else rows
        at = r.engine[decoding]
        requests = np.bincount(at, minlength=self.engines).astype(float)
        drafted = r.draft[decoding] + r.copied[decoding]
        tokens = requests + _sums(at, drafted, self.engines)
        context = _sums(at, r.prompt[decoding] + r.written[decoding], self.engines)
        some = active & (np.bincount(engine, minlength=self.engines) > 0)
        timed = np.ones(self.engines, dtype=bool)
        finished_reading, leap = rows[:0], np.ones(self.engines, dtype=np.int64)
        if reading.any():
            finished_reading, prompts = self._prefill(rows[reading], tokens)
            timed = prompts == 0
            seconds = self.steps.decode(requests, tokens, context) + self.steps.prefill(prompts)
        else:
            seconds = self.steps.decode(requests, tokens, context)
            if self.drafting.plain:
                leap = self._leap(decoding, at, requests, until)
                last = self.steps.decode(requests, tokens, context + requests * (leap - 1))
                seconds = 0.5 * (seconds + last) * leap
        forwards = leap[at]
        got = forwards.copy()
        if not self.drafting.plain:
            got += np.minimum(r.draft[decoding], r.hits[decoding])
            if r.copied[decoding].any():
                got += np.minimum(r.copied[decoding], r.copy_hits[decoding])
            np.minimum(got, r.length[decoding] - r.written[decoding], out=got)
        r.written[decoding] += got
        r.forwards[decoding] += forwards
        r.drafted[decoding] += drafted
        r.accepted[decoding] += got - forwards
        if len(finished_reading):
            first = np.minimum(1, r.length[finished_reading] - r.written[finished_reading])
            r.written[finished_reading] += first
            r.forwards[finished_reading] += 1
            decoding = np.concatenate([decoding, finished_reading])
            got = np.concatenate([got, first])
            drafted = np.concatenate([drafted, np.zeros(len(finished_reading), np.int64)])
        if not self.drafting.plain:
            extra = self._draft(decoding, got, drafted, tokens, seconds, timed, some)
            seconds = seconds + extra
            self.drafting_s[some] += extra[some]
        self.clock[some] += seconds[some]
        self.busy_s[some] += seconds[some]
        self.step_count[some] += leap[some]
        return self._end(decoding)

    def _end(self, rows: Ints) -> Ints:
        r = self.requests
        done = rows[r.written[rows] >= r.length[rows]]
        if len(done):
            r.ended[done] = self.clock[r.engine[done]]
            r.draft[done] = r.copied[done] = 0
            self.drafting.end(done)
            self.running = self.running[r.written[self.running] < r.length[self.running]]
            self._open[r.engine[done]] = self._queued[r.engine[done]] > 0
        return done

    def _draft(
        self, rows: Ints, got: Ints, drafted: Ints, tokens: Floats, seconds: Floats, timed: Bools, some: Bools
    ) -> Floats:
        """Let the drafter take the steps; return the seconds that this takes each engine."""
        extra = np.zeros(self.engines)
        if not len(rows):
            return extra
        r = self.requests
        order = np.argsort(r.engine[rows], kind="stable")
        rows, got, drafted = rows[order], got[order], drafted[order]
        engine, copied = r.engine[rows], r.copied[rows]
        bounds = np.flatnonzero(np.r_[True, engine[1:] != engine[:-1], True]).tolist()
        ticks = [
            Ticked(
                int(engine[a]),
                rows[a:b],
                got[a:b],
                drafted[a:b],
                copied[a:b],
                int(tokens[engine[a]]),
                float(seconds[engine[a]]),
                bool(timed[engine[a]]),
            )
            for a, b in itertools.pairwise(bounds)
        ]
        extra[[tick.engine for tick in ticks]] = self.drafting.step(ticks)
        return extra

    def _leap(self, rows: Ints, at: Ints, requests: Floats, until: float) -> Ints:
        """Steps until something changes: a request ends, or the KV cache may be full."""
        r = self.requests
        most = np.full(self.engines, LEAP if until == np.inf else 16, dtype=np.int64)
        np.minimum.at(most, at, r.length[rows] - r.written[rows])
        if self.settings.kv_blocks < 2**40:
            most = np.minimum(most, self._room(rows, at, requests))
        return np.maximum(most, 1)

    def _room(self, rows: Ints, at: Ints, requests: Floats) -> Ints:
        """Tokens that each request of an engine can write before the KV cache may be full."""
        free = self.settings.kv_blocks - np.bincount(at, self._blocks(rows), self.engines)
        room: Ints = (np.floor(free / np.maximum(requests, 1) - 1) * self.settings.block).astype(np.int64)
        return room

    def _blocks(self, rows: Ints) -> Ints:
        """Blocks that requests need for their next step."""
        r = self.requests
        tokens = r.prompt[rows] + r.written[rows] + 1 + r.draft[rows] + r.copied[rows]
        return -(-tokens // self.settings.block)

    def used_blocks(self) -> Ints:
        """Return the KV blocks that each engine's requests take."""
        running = self.running
        return np.bincount(self.requests.engine[running], self._blocks(running), self.engines).astype(np.int64)

    def _preempt(self, rows: Ints) -> Ints:
        """Take their place from the requests that were admitted last, where the KV cache is full."""
        r = self.requests
        blocks, engine = self._blocks(rows), r.engine[rows]
        used = np.bincount(engine, blocks, self.engines)
        lost: list[int] = []
        for e in np.flatnonzero(used > self.settings.kv_blocks).tolist():
            mine = np.flatnonzero(engine == e)
            excess = used[e] - self.settings.kv_blocks
            for i in mine[::-1].tolist():
                if excess <= 0:
                    break
                excess -= blocks[i]
                lost.append(int(rows[i]))
        for row in lost:
            e = int(r.engine[row])
            r.draft[row] = r.copied[row] = 0
            r.preempted[row] += 1
            heapq.heappush(self._waiting[e], (-(2**62), self._arrived, row))
            self._arrived += 1
            self._queued[e] += 1
        return np.array(lost, dtype=np.int64)

    def _admit(self, active: Bools) -> None:
        """Admit waiting requests to engines with a free slot and free KV blocks."""
        r, settings = self.requests, self.settings
        occupied, used = self._occupied, self.used_blocks()
        admitted: list[int] = []
        for e in np.flatnonzero(self._open & active).tolist():
            waiting, free = self._waiting[e], settings.kv_blocks - int(used[e])
            count = int(occupied[e])
            while waiting and count < settings.max_num_seqs:
                row = waiting[0][2]
                tokens = int(r.prompt[row] + r.written[row])
                blocks = -(-(tokens + 1) // settings.block)
                if blocks > free and count:
                    break
                heapq.heappop(waiting)
                self._queued[e] -= 1
                free, count = free - blocks, count + 1
                problem = int(r.problem[row])
                known = int(r.prompt[row]) if settings.prefix_caching and problem in self._read[e] else 0
                self._read[e].add(problem)
                r.unread[row] = max(1, tokens - known)
                r.begun[row] = self.clock[e]
                admitted.append(row)
            self._open[e] = False
        if admitted:
            rows = np.array(admitted, dtype=np.int64)
            self.running = np.concatenate([self.running, rows])
            self.running = self.running[np.argsort(r.engine[self.running], kind="stable")]
            self.drafting.begin(rows)

    def _prefill(self, rows: Ints, decoding: Floats) -> tuple[Ints, Floats]:
        """Read the next chunk of prompts; return the requests whose prompts are read, and tokens read by engine."""
        r = self.requests
        engine, unread = r.engine[rows], r.unread[rows]
        before = np.cumsum(unread) - unread
        first = np.r_[True, engine[1:] != engine[:-1]]
        before -= np.maximum.accumulate(np.where(first, before, 0))
        room = np.maximum(self.settings.max_num_batched_tokens - decoding, 1).astype(np.int64)
        chunk = np.clip(room[engine] - before, 0, unread)
        r.unread[rows] -= chunk
        self.prefilled += int(chunk.sum())
        return rows[r.unread[rows] == 0], _sums(engine, chunk, self.engines)


def _sums(engine: Ints, values: Ints | Floats, engines: int) -> Floats:
    return np.bincount(engine, values, engines).astype(np.float64)
