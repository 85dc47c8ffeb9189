"""The engines of a rollout: slots, KV blocks, preemption, prefill, and steps that take
their time.

Each engine has a clock. All that are behind the same moment step together, in arrays,
so that a step of many engines costs about as much as a step of one. Where nobody waits
for what another engine does, all of them step together until they are done; elsewhere
only those within `slack` of the earliest.

Arrays are of requests or of engines. `Fleet.running` orders requests by engine, for
example of two engines with two requests each:

    running    7  2  4  9      rows of `Requests`
    engine     0  0  1  1      `Requests.engine` of these rows
    bounds     0     2     4   where the requests of each engine begin and end
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from das_adapter.errors import DasError
from das_adapter.sim.drafting import Drafting, EngineStep, FreeSteps
from das_adapter.sim.requests import Bools, Floats, Ints, Requests, int_zeros
from das_adapter.sim.steps import Steps
from das_adapter.sim.texts import offsets_of

FREE_STEPS = 256
"""Maximum number of steps that an engine takes at once."""
UNLIMITED = 2**40
"""KV blocks of an engine that has more than any rollout takes."""
BLOCK = 16
"""Tokens of a KV block, as vLLM has them by default."""
BATCHED_TOKENS = 8192
"""Maximum tokens of a forward pass, as vLLM's `max_num_batched_tokens`; prompts are
read in such chunks.
"""
FIRST_PRIORITY = -(2**62)
"""Priority of a request that was preempted: it starts before all others."""


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
        """Time of each engine, seconds, float64 [engines]."""
        self.busy_s: Floats = np.zeros(engines)
        """Seconds of each engine's steps, float64 [engines]."""
        self.step_count: Ints = int_zeros(engines)
        """Steps that each engine has taken, int64 [engines]."""
        self.running: Ints = int_zeros(0)
        """Rows of admitted requests, engine after engine, in the order of their
        admission.
        """
        # heaps of (priority, number of arrival, row)
        self._waiting: list[list[tuple[int, int, int]]] = [[] for _ in range(engines)]
        self._num_waiting = int_zeros(engines)
        # whether a waiting request might be admitted
        self._may_admit = np.zeros(engines, dtype=bool)
        self._arrived = 0
        # problems whose prompt is cached
        self._cached: list[set[int]] = [set() for _ in range(engines)]

    def submit(self, rows: Ints, engines: Ints, priorities: Ints, at: float) -> None:
        """Send requests to engines at a time; the lowest priority starts first.

        Raises:
            DasError: a request that no engine can hold.
        """
        r = self.requests
        tokens = r.prompt[rows] + r.length[rows]
        needed = int((tokens // BLOCK + 1).max(initial=0))
        if needed > self.kv_blocks:
            raise DasError(
                f"engine: a request needs {needed} blocks of KV cache, an engine has "
                f"{self.kv_blocks}: more devices an engine, or shorter responses"
            )
        r.engine[rows] = engines
        idle = engines[~self.busy[engines]]
        self.clock[idle] = np.maximum(self.clock[idle], at)
        self._may_admit[engines] = True
        sent = zip(rows.tolist(), engines.tolist(), priorities.tolist(), strict=True)
        for row, engine, priority in sent:
            self._queue(row, engine, priority)

    def withdraw(self) -> None:
        """Remove all requests from the engines, between two steps; those that have
        ended keep their results.
        """
        r = self.requests
        waiting = [row for queue in self._waiting for _, _, row in queue]
        rows = np.append(self.running, np.array(waiting, np.int64))
        self.drafting.end(rows)
        r.clear_drafts(rows)
        r.handle[rows] = 0
        r.indexed[rows] = 0
        r.slot[rows] = -1
        self.running = self.running[:0]
        self._waiting = [[] for _ in range(self.engines)]
        self._num_waiting[:] = 0
        self._may_admit[:] = False

    @property
    def counts(self) -> Ints:
        """How many requests each engine has, int64 [engines]."""
        running = self._by_engine(self.requests.engine[self.running])
        return running.astype(np.int64) + self._num_waiting

    @property
    def busy(self) -> Bools:
        """Whether each engine has requests, bool [engines]."""
        return self.counts > 0

    def pause(self, at: float, seconds: float) -> None:
        """Stop all engines at a time, for a weight sync; their requests stay, and
        cached prompts, whose keys and values are of an older policy, are forgotten.
        """
        self.clock = np.maximum(self.clock, at) + seconds
        self._cached = [set() for _ in range(self.engines)]

    def run(
        self,
        until: float = np.inf,
        slack: float = np.inf,
        ended: Callable[[Ints], bool] | None = None,
    ) -> None:
        """Step until no request is left, all clocks have reached `until`, or `ended`
        returns true. `ended` receives the requests that ended; without it, no engine
        steps on after `until`. Engines step together whose clocks are within `slack`
        seconds.
        """
        if until == np.inf:
            max_steps = FREE_STEPS
        elif ended is None:
            max_steps = 1
        else:
            max_steps = FREE_STEPS // 16
        while True:
            behind = self.busy & (self.clock < until)
            if not behind.any():
                return
            earliest = self.clock[behind].min()
            active = behind & (self.clock <= earliest + slack)
            stepped, done = self._take_free_steps(active, max_steps)
            others = active & ~stepped
            if others.any():
                done = np.concatenate([done, self._take_step(others)])
            if ended is not None and len(done) and ended(done):
                return

    # Inside

    def _take_free_steps(self, active: Bools, max_steps: int) -> tuple[Bools, Ints]:
        """Let engines go on until their drafter must be asked, a request ends, or the
        KV cache may be full; return which engines these are, and the requests that
        ended.
        """
        r = self.requests
        engine = r.engine[self.running]
        prompts = engine[r.unread[self.running] > 0]
        reading = np.bincount(prompts, minlength=self.engines) > 0
        active = active & ~self._may_admit & ~reading
        rows = self.running[active[engine]]
        free = self.drafting.free_steps(rows) if len(rows) else None
        if free is None:
            return np.zeros(self.engines, dtype=bool), rows[:0]
        engine = r.engine[rows]
        requests = self._by_engine(engine)
        steps = np.minimum(free.steps, np.full(self.engines, max_steps))
        longest_draft = free.max_draft_tokens.max(initial=0)
        until_full = self._kv_room_tokens(rows, requests) // (1 + longest_draft)
        steps = np.minimum(steps, until_full)
        active &= (steps > 0) & (requests > 0)
        chosen = np.flatnonzero(active)
        if not len(chosen):
            return active, rows[:0]
        kept = active[engine]
        bounds = offsets_of(requests[chosen].astype(np.int64))
        self._step_freely(free, rows, kept, chosen, bounds, steps[chosen])
        return active, self._end(rows[kept])

    def _step_freely(
        self,
        free: FreeSteps,
        rows: Ints,
        kept: Bools,
        engines: Ints,
        bounds: Ints,
        steps: Ints,
    ) -> None:
        """Let some engines step so often, or until one of their requests ends.

        Args:
            rows: the requests of `free`.
            kept: which of them are on these engines, bool [rows].
            bounds: where the requests of each engine begin in `rows[kept]`, and the
                end of the last.
            steps: maximum number of steps of each engine, int64 [engines].
        """
        shape = (len(engines), int(steps.max()))
        tokens = np.zeros(shape)
        context = np.zeros(shape)
        num_steps = free.source.take_free_steps(
            rows[kept],
            bounds,
            steps,
            free.log_min_chance[kept],
            free.max_draft_tokens[kept],
            tokens,
            context,
        )
        taken = np.arange(tokens.shape[1]) < num_steps[:, None]
        engine_of_step = np.repeat(engines, num_steps)
        requests = self._by_engine(self.requests.engine[rows])[engine_of_step]
        seconds = self.steps.decode(requests, tokens[taken], context[taken])
        seconds += free.seconds(requests, context[taken])
        by_engine = self._by_engine(engine_of_step, seconds)
        self._pass_time(engines, by_engine[engines], num_steps)
        steps_of_all = int_zeros(self.engines)
        steps_of_all[engines] = num_steps
        self.drafting.record_free_steps(steps_of_all)

    def _take_step(self, active: Bools) -> Ints:
        """Take one step of each of these engines; return the requests that ended."""
        r = self.requests
        self._admit(active)
        self._preempt(active)
        rows = self.running[active[r.engine[self.running]]]
        reading = r.unread[rows] > 0
        decoding = rows[~reading]
        engine = r.engine[decoding]
        drafted = r.verified(decoding)
        requests = self._by_engine(engine)
        tokens = requests + self._by_engine(engine, drafted)
        context = self._by_engine(engine, r.context(decoding))
        begun, prompt_tokens = self._prefill(rows[reading], tokens)
        seconds = self.steps.decode(requests, tokens, context)
        seconds = seconds + self.steps.prefill(prompt_tokens)
        # a request whose prompt was read receives one token
        got = np.append(self._received(decoding), np.ones(len(begun), np.int64))
        drafted = np.append(drafted, np.zeros(len(begun), np.int64))
        stepped = np.append(decoding, begun)
        r.written[stepped] += got
        r.forwards[stepped] += 1
        r.drafted[stepped] += drafted
        r.accepted[stepped] += got - 1
        timed = prompt_tokens == 0
        extra = self._draft(stepped, got, drafted, tokens, seconds, timed)
        chosen = np.unique(r.engine[rows])
        self._pass_time(chosen, (seconds + extra)[chosen], 1)
        return self._end(stepped)

    def _received(self, rows: Ints) -> Ints:
        """Return how many tokens each request receives from a step: one and the draft
        tokens that are accepted, up to its end, int64 [b].
        """
        r = self.requests
        accepted = np.minimum(r.draft[rows], r.hits[rows])
        accepted = accepted + np.minimum(r.copied[rows], r.copy_hits[rows])
        return np.minimum(1 + accepted, r.length[rows] - r.written[rows])

    def _pass_time(self, engines: Ints, seconds: Floats, steps: Ints | int) -> None:
        self.clock[engines] += seconds
        self.busy_s[engines] += seconds
        self.step_count[engines] += steps

    def _by_engine(self, engine: Ints, values: Ints | Floats | None = None) -> Floats:
        """Add up values by engine; None: count them. Return float64 [engines]."""
        return np.bincount(engine, values, self.engines).astype(np.float64)

    def _end(self, rows: Ints) -> Ints:
        """End those of these requests that have written all; return them."""
        r = self.requests
        done = rows[~r.unfinished(rows)]
        if not len(done):
            return done
        engines = r.engine[done]
        r.ended[done] = self.clock[engines]
        r.clear_drafts(done)
        self.drafting.end(done)
        running = self.running
        self.running = running[r.unfinished(running)]
        self._may_admit[engines] = self._num_waiting[engines] > 0
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
        """Let the drafter learn from the steps and draft for the next; return the
        seconds that this takes each engine, float64 [engines].

        Args:
            rows, got, drafted: requests that received tokens, how many, and the draft
                tokens that they had, [b].
            tokens, seconds, timed: of each engine's step, [engines], as in
                `EngineStep`.
        """
        extra = np.zeros(self.engines)
        if not len(rows):
            return extra
        r = self.requests
        engine_of = r.engine[rows]
        order = np.argsort(engine_of, kind="stable")
        begins = np.flatnonzero(np.diff(engine_of[order])) + 1
        results = []
        for places in np.split(order, begins):
            engine = int(engine_of[places[0]])
            result = EngineStep(
                engine=engine,
                rows=rows[places],
                got=got[places],
                carried=drafted[places],
                copied=r.copied[rows[places]],
                tokens=int(tokens[engine]),
                seconds=float(seconds[engine]),
                timed=bool(timed[engine]),
            )
            results.append(result)
        engines = [result.engine for result in results]
        extra[engines] = self.drafting.step(results)
        return extra

    def _kv_room_tokens(self, rows: Ints, requests: Floats) -> Ints:
        """Return how many tokens each request of an engine can write before the KV
        cache may be full, int64 [engines].
        """
        used = self._by_engine(self.requests.engine[rows], self._blocks(rows))
        free = self.kv_blocks - used
        blocks_each = free / np.maximum(requests, 1) - 1
        tokens: Ints = (np.floor(blocks_each) * BLOCK).astype(np.int64)
        return tokens

    def _blocks(self, rows: Ints) -> Ints:
        """Return the KV blocks that requests need for their next step."""
        r = self.requests
        tokens = r.context(rows) + 1 + r.verified(rows)
        return -(-tokens // BLOCK)

    def used_blocks(self) -> Ints:
        """Return the KV blocks that each engine's requests take, int64 [engines]."""
        engine = self.requests.engine[self.running]
        used = self._by_engine(engine, self._blocks(self.running))
        return used.astype(np.int64)

    def _preempt(self, active: Bools) -> None:
        """Stop the requests that were admitted last, where the KV cache is full, and
        queue them again.
        """
        r = self.requests
        preempted = list[int]()
        full = active & (self.used_blocks() > self.kv_blocks)
        for engine in np.flatnonzero(full).tolist():
            rows = self.running[r.engine[self.running] == engine]
            blocks = self._blocks(rows)
            excess = blocks.sum() - self.kv_blocks
            freed = np.cumsum(blocks[::-1])
            count = int(np.searchsorted(freed, excess)) + 1
            for row in rows[::-1][:count].tolist():
                r.clear_drafts(row)
                r.preempted[row] += 1
                self._queue(row, engine, FIRST_PRIORITY)
                preempted.append(row)
        self.running = self.running[~np.isin(self.running, preempted)]

    def _queue(self, row: int, engine: int, priority: int) -> None:
        heapq.heappush(self._waiting[engine], (priority, self._arrived, row))
        self._arrived += 1
        self._num_waiting[engine] += 1

    def _admit(self, active: Bools) -> None:
        """Start waiting requests where there are a slot and KV blocks."""
        r = self.requests
        engines = np.flatnonzero(self._may_admit & active)
        if not len(engines):
            return
        occupied = self._by_engine(r.engine[self.running])
        free_blocks = self.kv_blocks - self.used_blocks()
        admitted = list[int]()
        for engine in engines.tolist():
            free = int(free_blocks[engine])
            admitted += self._admit_to(engine, free, int(occupied[engine]))
            self._may_admit[engine] = False
        rows = np.array(admitted, dtype=np.int64)
        running = np.concatenate([self.running, rows])
        order = np.argsort(r.engine[running], kind="stable")
        self.running = running[order]
        self.drafting.begin(rows)

    def _admit_to(self, engine: int, free_blocks: int, num_running: int) -> list[int]:
        """Start waiting requests of one engine; return their rows. An engine without a
        running request admits one in any case.
        """
        r = self.requests
        waiting = self._waiting[engine]
        admitted = list[int]()
        while waiting and num_running < self.slots:
            row = waiting[0][2]
            tokens = int(r.prompt[row] + r.written[row])
            blocks = -(-(tokens + 1) // BLOCK)
            if blocks > free_blocks and num_running:
                break
            heapq.heappop(waiting)
            self._num_waiting[engine] -= 1
            free_blocks -= blocks
            num_running += 1
            r.unread[row] = max(1, tokens - self._cached_tokens(engine, row))
            admitted.append(row)
        return admitted

    def _cached_tokens(self, engine: int, row: int) -> int:
        """Return how many tokens of a request's prompt an engine has cached; from now
        on it has the whole prompt.
        """
        problem = int(self.requests.problem[row])
        cached = self._cached[engine]
        if problem in cached:
            return int(self.requests.prompt[row])
        cached.add(problem)
        return 0

    def _prefill(self, rows: Ints, decoding: Floats) -> tuple[Ints, Floats]:
        """Read the next chunk of prompts; return the requests whose prompts are read,
        and tokens read by engine.

        Args:
            rows: requests that read their prompts, engine after engine.
            decoding: tokens of each engine's step that are no prompt, [engines].
        """
        r = self.requests
        engine = r.engine[rows]
        unread = r.unread[rows]
        # unread tokens of the requests before each on its engine
        before = np.cumsum(unread) - unread
        first_of_engine = np.r_[True, engine[1:] != engine[:-1]][: len(rows)]
        before -= np.maximum.accumulate(np.where(first_of_engine, before, 0))
        room = np.maximum(BATCHED_TOKENS - decoding, 1).astype(np.int64)
        chunk = np.clip(room[engine] - before, 0, unread)
        r.unread[rows] -= chunk
        finished = rows[r.unread[rows] == 0]
        return finished, self._by_engine(engine, chunk)
