"""The engines of a rollout: slots, KV blocks, preemption, prefill, and steps that take
their time.

Each engine has a clock. All that are behind the same moment step together, in arrays,
so that a step of many engines costs about as much as a step of one. Where nobody waits
for what another engine does, all of them step together until they are done; elsewhere
only those within `slack` of the earliest.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from das_adapter.errors import DasError
from das_adapter.sim.drafting import Drafting, Ticked
from das_adapter.sim.requests import Bools, Floats, Ints, Requests
from das_adapter.sim.steps import Steps
from das_adapter.sim.texts import offsets_of

LEAP = 256
"""Maximum number of steps that an engine takes at once."""
UNLIMITED = 2**40
"""KV blocks of an engine that has more than any rollout takes."""
BLOCK = 16
"""Tokens of a KV block, as vLLM has them by default."""
BATCHED_TOKENS = 8192
"""Maximum tokens of a forward pass, as vLLM's `max_num_batched_tokens`; prompts are
read in such chunks.
"""


class Fleet:
    """Engines that are alike, and the requests on them. Siblings on one engine read
    their prompt once.
    """

    def __init__(
        self,
        engines: int,
        requests: Requests,
        steps: Steps,
        drafting: Drafting,
        slots: int = 256,
        kv: int = UNLIMITED,
    ) -> None:
        """Each engine runs `slots` requests at once, whose KV cache has `kv` blocks."""
        self.engines = engines
        self.requests = requests
        self.slots = slots
        self.kv_blocks = kv
        self.steps = steps
        self.drafting = drafting
        self.clock: Floats = np.zeros(engines)
        self.busy_s: Floats = np.zeros(engines)
        """Seconds of steps."""
        self.step_count: Ints = np.zeros(engines, dtype=np.int64)
        self.running: Ints = np.zeros(0, dtype=np.int64)
        """Rows of admitted requests, engine after engine, in the order of their
        admission.
        """
        self._waiting: list[list[tuple[int, int, int]]] = [[] for _ in range(engines)]
        self._queued = np.zeros(engines, dtype=np.int64)
        # whether somebody who waits might be admitted
        self._open = np.zeros(engines, dtype=bool)
        self._arrived = 0
        # problems whose prompt is cached
        self._read: list[set[int]] = [set() for _ in range(engines)]

    def submit(self, rows: Ints, engines: Ints, priorities: Ints, at: float) -> None:
        """Send requests to engines at a time; the lowest priority starts first.

        Raises:
            DasError: a request that no engine can hold.
        """
        r = self.requests
        needed = int(((r.prompt[rows] + r.length[rows]) // BLOCK + 1).max(initial=0))
        if needed > self.kv_blocks:
            raise DasError(
                f"engine: a request needs {needed} blocks of KV cache, an engine has "
                f"{self.kv_blocks}: more devices an engine, or shorter responses"
            )
        r.engine[rows] = engines
        idle = engines[~self.busy[engines]]
        self.clock[idle] = np.maximum(self.clock[idle], at)
        self._open[engines] = True
        for row, engine, priority in zip(
            rows.tolist(), engines.tolist(), priorities.tolist(), strict=True
        ):
            self._queue(row, engine, priority)

    def withdraw(self) -> None:
        """Take back all requests, between two steps; those that have ended stay what
        they are.
        """
        waiting = [row for queue in self._waiting for _, _, row in queue]
        r = self.requests
        rows = np.append(self.running, np.array(waiting, np.int64))
        self.drafting.end(rows)
        r.draft[rows] = r.copied[rows] = r.handle[rows] = r.indexed[rows] = 0
        r.slot[rows] = -1
        self.running = self.running[:0]
        self._waiting = [[] for _ in range(self.engines)]
        self._queued[:] = 0
        self._open[:] = False

    @property
    def counts(self) -> Ints:
        """How many requests each engine has."""
        return (
            self._sums(self.requests.engine[self.running]).astype(np.int64)
            + self._queued
        )

    @property
    def busy(self) -> Bools:
        """Whether each engine has requests."""
        return self.counts > 0

    def pause(self, at: float, seconds: float) -> None:
        """Stop all engines at a time, for a weight sync; their requests stay, and
        cached prompts, whose keys and values are of an older policy, are forgotten.
        """
        self.clock = np.maximum(self.clock, at) + seconds
        self._read = [set() for _ in range(self.engines)]

    def run(
        self,
        until: float = np.inf,
        slack: float = np.inf,
        ended: Callable[[Ints], bool] | None = None,
    ) -> None:
        """Step until nobody is left, all clocks have reached `until`, or `ended` says
        so, which receives the requests that ended; without it, nobody steps on after
        `until`. Engines step together whose clocks are within `slack` seconds.
        """
        leap = LEAP if until == np.inf else 1 if ended is None else LEAP // 16
        while True:
            busy = self.busy & (self.clock < until)
            if not busy.any():
                return
            active = busy & (self.clock <= self.clock[busy].min() + slack)
            walked, done = self._walk(active, leap)
            if (active & ~walked).any():
                done = np.concatenate([done, self._tick(active & ~walked)])
            if ended is not None and len(done) and ended(done):
                return

    # Inside

    def _walk(self, active: Bools, leap: int) -> tuple[Bools, Ints]:
        """Let engines go on until their drafter must be asked, a request ends, or the
        KV cache may be full; return which engines these are, and the requests that
        ended.
        """
        r = self.requests
        engine = self.requests.engine[self.running]
        reading = (
            np.bincount(engine[r.unread[self.running] > 0], minlength=self.engines) > 0
        )
        active = active & ~self._open & ~reading
        rows = self.running[active[engine]]
        walk = self.drafting.walk(rows) if len(rows) else None
        if walk is None:
            return np.zeros(self.engines, dtype=bool), rows[:0]
        at = r.engine[rows]
        requests = self._sums(r.engine[rows])
        steps = np.minimum(walk.steps, np.full(self.engines, leap))
        steps = np.minimum(
            steps, self._room(rows, requests) // (1 + walk.limit.max(initial=0))
        )
        active &= (steps > 0) & (requests > 0)
        chosen = np.flatnonzero(active)
        mine = active[at]
        if not len(chosen):
            return active, rows[:0]
        rows = rows[mine]
        counts = requests[chosen]
        tokens, context = np.zeros((2, len(chosen), int(steps[chosen].max())))
        bounds = offsets_of(counts.astype(np.int64))
        drafts = (
            walk.least[mine],
            walk.limit[mine],
        )
        taken = walk.source.walk(rows, bounds, steps[chosen], *drafts, tokens, context)
        there = np.arange(tokens.shape[1]) < taken[:, None]
        which = np.repeat(chosen, taken)
        each = self.steps.decode(requests[which], tokens[there], context[there])
        each += walk.seconds(requests[which], context[there])
        self._pass_time(chosen, self._sums(which, each)[chosen], taken)
        went = np.zeros(self.engines, dtype=np.int64)
        went[chosen] = taken
        self.drafting.walked(went)
        return active, self._end(rows)

    def _tick(self, active: Bools) -> Ints:
        """Take one step of each of these engines; return the requests that ended."""
        r = self.requests
        self._admit(active)
        self._preempt(active)
        rows = self.running[active[r.engine[self.running]]]
        reading = r.unread[rows] > 0
        decoding = rows[~reading]
        at = r.engine[decoding]
        drafted = r.draft[decoding] + r.copied[decoding]
        requests = self._sums(at)
        tokens = requests + self._sums(at, drafted)
        context = self._sums(at, r.prompt[decoding] + r.written[decoding])
        begun, prompts = self._prefill(rows[reading], tokens)
        seconds = self.steps.decode(requests, tokens, context) + self.steps.prefill(
            prompts
        )
        kept = np.minimum(r.draft[decoding], r.hits[decoding]) + np.minimum(
            r.copied[decoding], r.copy_hits[decoding]
        )
        got = np.minimum(1 + kept, r.length[decoding] - r.written[decoding])
        got = np.concatenate([got, np.ones(len(begun), np.int64)])
        drafted = np.concatenate([drafted, np.zeros(len(begun), np.int64)])
        stepped = np.concatenate([decoding, begun])
        r.written[stepped] += got
        r.forwards[stepped] += 1
        r.drafted[stepped] += drafted
        r.accepted[stepped] += got - 1
        extra = self._draft(stepped, got, drafted, tokens, seconds, prompts == 0)
        chosen = np.unique(r.engine[rows])
        self._pass_time(chosen, (seconds + extra)[chosen], 1)
        return self._end(stepped)

    def _pass_time(self, engines: Ints, seconds: Floats, steps: Ints | int) -> None:
        self.clock[engines] += seconds
        self.busy_s[engines] += seconds
        self.step_count[engines] += steps

    def _sums(self, engine: Ints, values: Ints | Floats | None = None) -> Floats:
        """Add up values by engine; None: count them."""
        return np.bincount(engine, values, self.engines).astype(np.float64)

    def _end(self, rows: Ints) -> Ints:
        r = self.requests
        done = rows[r.written[rows] >= r.length[rows]]
        if len(done):
            r.ended[done] = self.clock[r.engine[done]]
            r.draft[done] = r.copied[done] = 0
            self.drafting.end(done)
            self.running = self.running[
                r.written[self.running] < r.length[self.running]
            ]
            self._open[r.engine[done]] = self._queued[r.engine[done]] > 0
        return done

    def _draft(
        self,
        rows: Ints,
        got: Ints,
        drafted: Ints,
        tokens: Floats,
        seconds: Floats,
        timed: Bools,
    ) -> Floats:
        """Let the drafter take the steps; return the seconds that this takes each
        engine.
        """
        extra = np.zeros(self.engines)
        if not len(rows):
            return extra
        r = self.requests
        order = np.argsort(r.engine[rows], kind="stable")
        ticks = []
        for mine in np.split(order, np.flatnonzero(np.diff(r.engine[rows[order]])) + 1):
            e = int(r.engine[rows[mine[0]]])
            some = rows[mine]
            step = int(tokens[e]), float(seconds[e]), bool(timed[e])
            ticks.append(
                Ticked(e, some, got[mine], drafted[mine], r.copied[some], *step)
            )
        extra[[tick.engine for tick in ticks]] = self.drafting.step(ticks)
        return extra

    def _room(self, rows: Ints, requests: Floats) -> Ints:
        """Return how many tokens each request of an engine can write before the KV
        cache may be full.
        """
        free = self.kv_blocks - self._sums(
            self.requests.engine[rows], self._blocks(rows)
        )
        room: Ints = (np.floor(free / np.maximum(requests, 1) - 1) * BLOCK).astype(
            np.int64
        )
        return room

    def _blocks(self, rows: Ints) -> Ints:
        """Return the blocks that requests need for their next step."""
        r = self.requests
        tokens = r.prompt[rows] + r.written[rows] + 1 + r.draft[rows] + r.copied[rows]
        return -(-tokens // BLOCK)

    def used_blocks(self) -> Ints:
        """Return the KV blocks that each engine's requests take."""
        return self._sums(
            self.requests.engine[self.running], self._blocks(self.running)
        ).astype(np.int64)

    def _preempt(self, active: Bools) -> None:
        """Take their place from the requests that were admitted last, where the KV
        cache is full.
        """
        r = self.requests
        lost = list[int]()
        for e in np.flatnonzero(
            active & (self.used_blocks() > self.kv_blocks)
        ).tolist():
            mine = self.running[r.engine[self.running] == e]
            blocks = self._blocks(mine)
            excess = blocks.sum() - self.kv_blocks
            count = int(np.searchsorted(np.cumsum(blocks[::-1]), excess)) + 1
            for row in mine[::-1][:count].tolist():
                r.draft[row] = r.copied[row] = 0
                r.preempted[row] += 1
                self._queue(row, e, -(2**62))
                lost.append(row)
        self.running = self.running[~np.isin(self.running, lost)]

    def _queue(self, row: int, engine: int, priority: int) -> None:
        heapq.heappush(self._waiting[engine], (priority, self._arrived, row))
        self._arrived += 1
        self._queued[engine] += 1

    def _admit(self, active: Bools) -> None:
        """Start waiting requests where there are a slot and KV blocks."""
        r = self.requests
        if not (self._open & active).any():
            return
        occupied = self._sums(r.engine[self.running])
        used = self.used_blocks()
        admitted: list[int] = []
        for e in np.flatnonzero(self._open & active).tolist():
            waiting = self._waiting[e]
            free = self.kv_blocks - int(used[e])
            count = int(occupied[e])
            while waiting and count < self.slots:
                row = waiting[0][2]
                tokens = int(r.prompt[row] + r.written[row])
                blocks = -(-(tokens + 1) // BLOCK)
                if blocks > free and count:
                    break
                heapq.heappop(waiting)
                self._queued[e] -= 1
                free = free - blocks
                count = count + 1
                problem = int(r.problem[row])
                known = int(r.prompt[row]) if problem in self._read[e] else 0
                self._read[e].add(problem)
                r.unread[row] = max(1, tokens - known)
                admitted.append(row)
            self._open[e] = False
        rows = np.array(admitted, dtype=np.int64)
        self.running = np.concatenate([self.running, rows])
        self.running = self.running[np.argsort(r.engine[self.running], kind="stable")]
        self.drafting.begin(rows)

    def _prefill(self, rows: Ints, decoding: Floats) -> tuple[Ints, Floats]:
        """Read the next chunk of prompts; return the requests whose prompts are read,
        and tokens read by engine.
        """
        r = self.requests
        engine = r.engine[rows]
        unread = r.unread[rows]
        before = np.cumsum(unread) - unread
        first = np.r_[True, engine[1:] != engine[:-1]][: len(rows)]
        before -= np.maximum.accumulate(np.where(first, before, 0))
        room = np.maximum(BATCHED_TOKENS - decoding, 1).astype(np.int64)
        chunk = np.clip(room[engine] - before, 0, unread)
        r.unread[rows] -= chunk
        return rows[r.unread[rows] == 0], self._sums(engine, chunk)
