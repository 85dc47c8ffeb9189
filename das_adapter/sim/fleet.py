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
from typing import NamedTuple

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


class Waiting(NamedTuple):
    """A request that waits for a slot; the smallest starts first."""

    priority: int
    arrival: int
    """Number of arrival: of equal priorities the first starts first."""
    row: int


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
        state: int = 0,
    ) -> None:
        """Make engines that run `slots` requests at once in `kv` blocks of KV cache, of
        which each takes `state` for its recurrent state.
        """
        self.engines = engines
        self.requests = requests
        self.slots = slots
        self.kv_blocks = kv
        self.state_blocks = state
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
        # a heap for each engine
        self._waiting: list[list[Waiting]] = [[] for _ in range(engines)]
        self._num_waiting = int_zeros(engines)
        # whether a waiting request might be admitted
        self._may_admit = np.zeros(engines, dtype=bool)
        self._arrived = 0
        # problems whose prompt is cached
        self._cached: list[set[int]] = [set() for _ in range(engines)]

    def submit(
        self,
        rows: Ints,
        engines: Ints,
        priorities: Ints,
        at: float,
    ) -> None:
        """Send requests to engines at a time; the lowest priority starts first.

        Raises:
            DasError: a request that no engine can hold.
        """
        self._refuse_too_long(rows)
        self.requests.engine[rows] = engines
        busy = self.busy[engines]
        idle = engines[~busy]
        clock = self.clock[idle]
        self.clock[idle] = np.maximum(clock, at)
        self._may_admit[engines] = True
        queued = zip(
            rows.tolist(),
            engines.tolist(),
            priorities.tolist(),
            strict=True,
        )
        for row, engine, priority in queued:
            self._queue(row, engine, priority)

    def _refuse_too_long(self, rows: Ints) -> None:
        """Check that an empty engine can hold each of these requests.

        Raises:
            DasError: a request that no engine can hold.
        """
        requests = self.requests
        prompts = requests.num_prompt_tokens[rows]
        responses = requests.num_output_tokens[rows]
        tokens = prompts + responses
        blocks = tokens // BLOCK + 1 + self.state_blocks
        most_blocks = blocks.max(initial=0)
        needed = int(most_blocks)
        if needed > self.kv_blocks:
            raise DasError(
                f"engine: a request needs {needed} blocks of KV cache, an engine has "
                f"{self.kv_blocks}: more devices an engine, or shorter responses"
            )

    def withdraw(self) -> None:
        """Remove all requests from the engines, between two steps; those that have
        ended keep their results.
        """
        requests = self.requests
        waiting = list[int]()
        for queue in self._waiting:
            for entry in queue:
                waiting.append(entry.row)
        waiting_rows = np.array(waiting, np.int64)
        rows = np.append(self.running, waiting_rows)
        self.drafting.end(rows)
        requests.clear_drafts(rows)
        requests.handle[rows] = 0
        requests.num_indexed[rows] = 0
        requests.slot[rows] = -1
        self.running = int_zeros(0)
        self._waiting = [[] for _ in range(self.engines)]
        self._num_waiting[:] = 0
        self._may_admit[:] = False

    @property
    def counts(self) -> Ints:
        """Number of requests of each engine, int64 [engines]."""
        num_running = self._num_running().astype(np.int64)
        return num_running + self._num_waiting

    def _num_running(self) -> Floats:
        """Return the number of admitted requests of each engine, float64 [engines]."""
        engine = self.requests.engine[self.running]
        return self._by_engine(engine)

    @property
    def busy(self) -> Bools:
        """Whether each engine has requests, bool [engines]."""
        return self.counts > 0

    def pause(self, at: float, seconds: float) -> None:
        """Stop all engines at a time, for a weight sync; their requests stay, and
        cached prompts, whose keys and values are of an older policy, are forgotten.
        """
        stopped = np.maximum(self.clock, at)
        self.clock = stopped + seconds
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
            early = self.clock < until
            behind = early & self.busy
            if not behind.any():
                return
            earliest = self.clock[behind].min()
            near = self.clock <= earliest + slack
            active = behind & near
            stepped, done = self._take_free_steps(active, max_steps)
            others = active & ~stepped
            if others.any():
                done_after_step = self._take_step(others)
                done = np.append(done, done_after_step)
            if ended is None:
                continue
            if not len(done):
                continue
            if ended(done):
                return

    # Inside

    def _take_free_steps(self, active: Bools, max_steps: int) -> tuple[Bools, Ints]:
        """Let engines go on until their drafter must be asked, a request ends, or the
        KV cache may be full; return which engines these are, and the requests that
        ended.
        """
        none = np.zeros(self.engines, dtype=bool)
        nothing = int_zeros(0)
        requests = self.requests
        engine = requests.engine[self.running]
        reading = self._reading(self.running)
        num_reading = self._by_engine(engine[reading])
        only_decoding = num_reading == 0
        active = active & only_decoding
        active &= ~self._may_admit
        on_active = active[engine]
        rows = self.running[on_active]
        if not len(rows):
            return none, nothing
        free = self.drafting.free_steps(rows)
        if free is None:
            return none, nothing
        engine = requests.engine[rows]
        num_requests = self._by_engine(engine)
        limit = np.full(self.engines, max_steps)
        steps = np.minimum(free.steps, limit)
        longest_draft = free.max_draft_tokens.max(initial=0)
        step_tokens = 1 + longest_draft
        room_tokens = self._kv_room_tokens(rows, num_requests)
        room_steps = room_tokens // step_tokens
        steps = np.minimum(steps, room_steps)
        active &= steps > 0
        active &= num_requests > 0
        if not active.any():
            return active, nothing
        kept = active[engine]
        self._step_freely(free, rows, kept, steps)
        stepped = rows[kept]
        ended = self._end(stepped)
        return active, ended

    def _reading(self, rows: Ints) -> Bools:
        """Return whether each request has prompt tokens to read, bool [n]."""
        num_unread = self.requests.num_unread[rows]
        return num_unread > 0

    def _step_freely(
        self,
        free: FreeSteps,
        rows: Ints,
        kept: Bools,
        steps: Ints,
    ) -> None:
        """Let engines step so often, or until one of their requests ends.

        Args:
            rows: the requests of `free`.
            kept: which of them are on the engines that step, bool [rows].
            steps: maximum number of steps of each engine, int64 [engines].
        """
        rows = rows[kept]
        engine = self.requests.engine[rows]
        engines, counts = np.unique(engine, return_counts=True)
        num_engines = len(engines)
        steps = steps[engines]
        max_steps = int(steps.max())
        shape = (num_engines, max_steps)
        tokens = np.zeros(shape)
        context = np.zeros(shape)
        num_steps = free.source.take_free_steps(
            rows=rows,
            bounds=offsets_of(counts),
            steps=steps,
            log_min_chance=free.log_min_chance[kept],
            max_draft_tokens=free.max_draft_tokens[kept],
            tokens=tokens,
            context=context,
        )
        # one entry for each step that was taken, engine after engine
        step_numbers = np.arange(max_steps)
        taken = step_numbers < num_steps[:, None]
        tokens_of_step = tokens[taken]
        context_of_step = context[taken]
        num_requests = counts.astype(np.float64)
        requests_of_step = np.repeat(num_requests, num_steps)
        engine_of_step = np.repeat(engines, num_steps)
        decode_s = self.steps.decode(
            requests=requests_of_step,
            tokens=tokens_of_step,
            context=context_of_step,
        )
        draft_s = free.seconds(requests_of_step, context_of_step)
        step_s = decode_s + draft_s
        engine_s = self._by_engine(engine_of_step, step_s)
        self._pass_time(engines, engine_s[engines], num_steps)
        steps_of_all = int_zeros(self.engines)
        steps_of_all[engines] = num_steps
        self.drafting.record_free_steps(steps_of_all)

    def _take_step(self, active: Bools) -> Ints:
        """Take one step of each of these engines; return the requests that ended."""
        self._admit(active)
        self._preempt(active)
        requests = self.requests
        engine = requests.engine[self.running]
        on_active = active[engine]
        rows = self.running[on_active]
        reading = self._reading(rows)
        prompts = rows[reading]
        decoding = rows[~reading]
        drafted = requests.verified(decoding)
        engine = requests.engine[decoding]
        num_requests = self._by_engine(engine)
        draft_tokens = self._by_engine(engine, drafted)
        tokens = num_requests + draft_tokens
        context_of_request = requests.context(decoding)
        context = self._by_engine(engine, context_of_request)
        begun, prompt_tokens = self._prefill(prompts, tokens)
        decode_s = self.steps.decode(num_requests, tokens, context)
        prefill_s = self.steps.prefill(prompt_tokens)
        seconds = decode_s + prefill_s
        received = self._received(decoding)
        # a request whose prompt was read receives one token
        stepped = np.append(decoding, begun)
        got = np.append(received, np.ones_like(begun))
        drafted = np.append(drafted, np.zeros_like(begun))
        requests.num_written[stepped] += got
        requests.num_forwards[stepped] += 1
        requests.num_drafted[stepped] += drafted
        requests.num_accepted[stepped] += got - 1
        draft_s = self._draft(
            rows=stepped,
            got=got,
            drafted=drafted,
            tokens=tokens,
            seconds=seconds,
            timed=prompt_tokens == 0,
        )
        seconds = seconds + draft_s
        engines = np.unique(requests.engine[rows])
        self._pass_time(engines, seconds[engines], 1)
        return self._end(stepped)

    def _received(self, rows: Ints) -> Ints:
        """Return how many tokens each request receives from a step: one and the draft
        tokens that are accepted, up to its end, int64 [b].
        """
        requests = self.requests
        drafted = requests.num_draft_tokens[rows]
        hits = requests.num_draft_hits[rows]
        of_history = np.minimum(drafted, hits)
        drafted = requests.num_model_tokens[rows]
        hits = requests.num_model_hits[rows]
        of_model = np.minimum(drafted, hits)
        written = requests.num_written[rows]
        left = requests.num_output_tokens[rows] - written
        accepted = of_history + of_model
        return np.minimum(1 + accepted, left)

    def _pass_time(self, engines: Ints, seconds: Floats, steps: Ints | int) -> None:
        self.clock[engines] += seconds
        self.busy_s[engines] += seconds
        self.step_count[engines] += steps

    def _by_engine(
        self,
        engine: Ints,
        values: Ints | Floats | None = None,
    ) -> Floats:
        """Add up values by engine; None: count them. Return float64 [engines]."""
        sums = np.bincount(engine, values, self.engines)
        return sums.astype(np.float64)

    def _end(self, rows: Ints) -> Ints:
        """End those of these requests that have written all; return them."""
        requests = self.requests
        unfinished = requests.unfinished(rows)
        done = rows[~unfinished]
        if not len(done):
            return done
        engines = requests.engine[done]
        requests.ended_s[done] = self.clock[engines]
        requests.clear_drafts(done)
        self.drafting.end(done)
        unfinished = requests.unfinished(self.running)
        self.running = self.running[unfinished]
        num_waiting = self._num_waiting[engines]
        self._may_admit[engines] = num_waiting > 0
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
        extra_s = np.zeros(self.engines)
        if not len(rows):
            return extra_s
        requests = self.requests
        engine_of = requests.engine[rows]
        order = np.argsort(engine_of, kind="stable")
        changes = np.diff(engine_of[order])
        begins = np.flatnonzero(changes) + 1
        results = []
        for places in np.split(order, begins):
            first = places[0]
            engine = int(engine_of[first])
            of_engine = rows[places]
            result = EngineStep(
                engine=engine,
                rows=of_engine,
                got=got[places],
                carried=drafted[places],
                copied=requests.num_model_tokens[of_engine],
                tokens=int(tokens[engine]),
                seconds=float(seconds[engine]),
                timed=bool(timed[engine]),
            )
            results.append(result)
        engines = [result.engine for result in results]
        extra_s[engines] = self.drafting.step(results)
        return extra_s

    def _kv_room_tokens(self, rows: Ints, num_requests: Floats) -> Ints:
        """Return how many tokens each request of an engine can write before the KV
        cache may be full, int64 [engines].
        """
        engine = self.requests.engine[rows]
        blocks = self._blocks(rows)
        used = self._by_engine(engine, blocks)
        free = self.kv_blocks - used
        divisor = np.maximum(num_requests, 1)
        blocks_each = free / divisor - 1
        tokens_each = np.floor(blocks_each) * BLOCK
        room: Ints = tokens_each.astype(np.int64)
        return room

    def _blocks(self, rows: Ints) -> Ints:
        """Return the KV blocks that requests need for their next step."""
        requests = self.requests
        context = requests.context(rows)
        drafted = requests.verified(rows)
        tokens = context + 1 + drafted
        return self.state_blocks + -(-tokens // BLOCK)

    def used_blocks(self) -> Ints:
        """Return the KV blocks that each engine's requests take, int64 [engines]."""
        engine = self.requests.engine[self.running]
        blocks = self._blocks(self.running)
        used = self._by_engine(engine, blocks)
        return used.astype(np.int64)

    def _preempt(self, active: Bools) -> None:
        """Stop the requests that were admitted last, where the KV cache is full, and
        queue them again.
        """
        requests = self.requests
        preempted = list[int]()
        engine_of = requests.engine[self.running]
        over_full = self.used_blocks() > self.kv_blocks
        full = active & over_full
        for engine in np.flatnonzero(full).tolist():
            of_engine = engine_of == engine
            last_first = self.running[of_engine][::-1]
            blocks = self._blocks(last_first)
            excess = blocks.sum() - self.kv_blocks
            freed = np.cumsum(blocks)
            last = np.searchsorted(freed, excess)
            count = int(last) + 1
            stopped = last_first[:count]
            for row in stopped.tolist():
                requests.clear_drafts(row)
                requests.num_preemptions[row] += 1
                self._queue(row, engine, FIRST_PRIORITY)
                preempted.append(row)
        gone = np.isin(self.running, preempted)
        self.running = self.running[~gone]

    def _queue(self, row: int, engine: int, priority: int) -> None:
        entry = Waiting(priority, self._arrived, row)
        heapq.heappush(self._waiting[engine], entry)
        self._arrived += 1
        self._num_waiting[engine] += 1

    def _admit(self, active: Bools) -> None:
        """Start waiting requests where there are a slot and KV blocks."""
        may_admit = self._may_admit & active
        engines = np.flatnonzero(may_admit)
        if not len(engines):
            return
        num_running = self._num_running()
        free_blocks = self.kv_blocks - self.used_blocks()
        admitted = list[int]()
        for engine in engines.tolist():
            admitted += self._admit_to(
                engine,
                free_blocks=int(free_blocks[engine]),
                num_running=int(num_running[engine]),
            )
            self._may_admit[engine] = False
        rows = np.array(admitted, dtype=np.int64)
        running = np.append(self.running, rows)
        engine_of = self.requests.engine[running]
        order = np.argsort(engine_of, kind="stable")
        self.running = running[order]
        self.drafting.begin(rows)

    def _admit_to(
        self,
        engine: int,
        free_blocks: int,
        num_running: int,
    ) -> list[int]:
        """Start waiting requests of one engine; return their rows. An engine without a
        running request admits one in any case.
        """
        requests = self.requests
        waiting = self._waiting[engine]
        admitted = list[int]()
        while waiting:
            if num_running >= self.slots:
                break
            first = waiting[0]
            row = first.row
            prompt_tokens = int(requests.num_prompt_tokens[row])
            written = int(requests.num_written[row])
            tokens = prompt_tokens + written
            blocks = self.state_blocks + -(-(tokens + 1) // BLOCK)
            if blocks > free_blocks and num_running:
                break
            heapq.heappop(waiting)
            self._num_waiting[engine] -= 1
            free_blocks -= blocks
            num_running += 1
            cached_tokens = self._cached_tokens(engine, row)
            unread = tokens - cached_tokens
            requests.num_unread[row] = max(1, unread)
            admitted.append(row)
        return admitted

    def _cached_tokens(self, engine: int, row: int) -> int:
        """Return how many tokens of a request's prompt an engine has cached; from now
        on it has the whole prompt.
        """
        requests = self.requests
        problem = int(requests.problem[row])
        cached = self._cached[engine]
        if problem in cached:
            prompt_tokens = requests.num_prompt_tokens[row]
            return int(prompt_tokens)
        cached.add(problem)
        return 0

    def _prefill(self, rows: Ints, decoding: Floats) -> tuple[Ints, Floats]:
        """Read the next chunk of prompts; return the requests whose prompts are read,
        and tokens read by engine.

        Args:
            rows: requests that read their prompts, engine after engine.
            decoding: tokens of each engine's step that are no prompt, [engines].
        """
        requests = self.requests
        engine = requests.engine[rows]
        unread = requests.num_unread[rows]
        # unread tokens of the requests before each on its engine
        up_to = np.cumsum(unread)
        before = up_to - unread
        first_of_engine = np.ones(len(rows), dtype=bool)
        first_of_engine[1:] = engine[1:] != engine[:-1]
        begins = np.where(first_of_engine, before, 0)
        before_engine = np.maximum.accumulate(begins)
        before -= before_engine
        room = np.maximum(BATCHED_TOKENS - decoding, 1)
        room_tokens = room.astype(np.int64)
        left = room_tokens[engine] - before
        chunk = np.clip(left, 0, unread)
        unread = unread - chunk
        requests.num_unread[rows] = unread
        read = unread == 0
        chunk_tokens = self._by_engine(engine, chunk)
        return rows[read], chunk_tokens
