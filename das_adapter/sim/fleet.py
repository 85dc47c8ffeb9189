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
    ) -> None:
        """Make engines that run `slots` requests at once in `kv` blocks of KV cache."""
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
        # a heap for each engine
        self._waiting: list[list[Waiting]] = [[] for _ in range(engines)]
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
        requests = self.requests
        prompts = requests.num_prompt_tokens[rows]
        tokens = prompts + requests.num_output_tokens[rows]
        blocks = tokens // BLOCK + 1
        needed = int(blocks.max(initial=0))
        if needed > self.kv_blocks:
            raise DasError(
                f"engine: a request needs {needed} blocks of KV cache, an engine has "
                f"{self.kv_blocks}: more devices an engine, or shorter responses"
            )
        requests.engine[rows] = engines
        busy = self.busy[engines]
        idle = engines[~busy]
        self.clock[idle] = np.maximum(self.clock[idle], at)
        self._may_admit[engines] = True
        for row, engine, priority in zip(
            rows.tolist(), engines.tolist(), priorities.tolist(), strict=True
        ):
            self._queue(row, engine, priority)

    def withdraw(self) -> None:
        """Remove all requests from the engines, between two steps; those that have
        ended keep their results.
        """
        requests = self.requests
        waiting = list[int]()
        for queue in self._waiting:
            waiting += [entry.row for entry in queue]
        waiting_rows = np.array(waiting, np.int64)
        rows = np.append(self.running, waiting_rows)
        self.drafting.end(rows)
        requests.clear_drafts(rows)
        requests.handle[rows] = 0
        requests.num_indexed[rows] = 0
        requests.slot[rows] = -1
        self.running = self.running[:0]
        self._waiting = [[] for _ in range(self.engines)]
        self._num_waiting[:] = 0
        self._may_admit[:] = False

    @property
    def counts(self) -> Ints:
        """Number of requests of each engine, int64 [engines]."""
        engine = self.requests.engine[self.running]
        running = self._by_engine(engine).astype(np.int64)
        return running + self._num_waiting

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
            behind = self.busy & (self.clock < until)
            if not behind.any():
                return
            earliest = self.clock[behind].min()
            active = behind & (self.clock <= earliest + slack)
            stepped, done = self._take_free_steps(active, max_steps)
            others = active & ~stepped
            if others.any():
                done = np.append(done, self._take_step(others))
            if ended is None or not len(done):
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
        has_unread = requests.num_unread[self.running] > 0
        num_reading = self._by_engine(engine[has_unread])
        active = active & ~self._may_admit & (num_reading == 0)
        rows = self.running[active[engine]]
        if not len(rows):
            return none, nothing
        free = self.drafting.free_steps(rows)
        if free is None:
            return none, nothing
        engine = requests.engine[rows]
        num_requests = self._by_engine(engine)
        limit = np.full(self.engines, max_steps)
        steps = np.minimum(free.steps, limit)
        step_tokens = 1 + free.max_draft_tokens.max(initial=0)
        room_tokens = self._kv_room_tokens(rows, num_requests)
        steps = np.minimum(steps, room_tokens // step_tokens)
        active &= (steps > 0) & (num_requests > 0)
        if not active.any():
            return active, nothing
        kept = active[engine]
        self._step_freely(free, rows, kept, steps)
        ended = self._end(rows[kept])
        return active, ended

    def _step_freely(
        self, free: FreeSteps, rows: Ints, kept: Bools, steps: Ints
    ) -> None:
        """Let engines step so often, or until one of their requests ends.

        Args:
            rows: the requests of `free`.
            kept: which of them are on the engines that step, bool [rows].
            steps: maximum number of steps of each engine, int64 [engines].
        """
        rows = rows[kept]
        engines, counts = np.unique(self.requests.engine[rows], return_counts=True)
        shape = (len(engines), int(steps[engines].max()))
        tokens = np.zeros(shape)
        context = np.zeros(shape)
        num_steps = free.source.take_free_steps(
            rows=rows,
            bounds=offsets_of(counts),
            steps=steps[engines],
            log_min_chance=free.log_min_chance[kept],
            max_draft_tokens=free.max_draft_tokens[kept],
            tokens=tokens,
            context=context,
        )
        step_numbers = np.arange(tokens.shape[1])
        taken = step_numbers < num_steps[:, None]
        tokens_of_step = tokens[taken]
        context_of_step = context[taken]
        num_requests = counts.astype(np.float64)
        requests_of_step = np.repeat(num_requests, num_steps)
        decode_s = self.steps.decode(
            requests=requests_of_step,
            tokens=tokens_of_step,
            context=context_of_step,
        )
        draft_s = free.seconds(requests_of_step, context_of_step)
        seconds = decode_s + draft_s
        engine_of_step = np.repeat(engines, num_steps)
        by_engine = self._by_engine(engine_of_step, seconds)
        self._pass_time(engines, by_engine[engines], num_steps)
        steps_of_all = int_zeros(self.engines)
        steps_of_all[engines] = num_steps
        self.drafting.record_free_steps(steps_of_all)

    def _take_step(self, active: Bools) -> Ints:
        """Take one step of each of these engines; return the requests that ended."""
        self._admit(active)
        self._preempt(active)
        requests = self.requests
        engine_of = requests.engine[self.running]
        rows = self.running[active[engine_of]]
        reading = requests.num_unread[rows] > 0
        decoding = rows[~reading]
        engine = requests.engine[decoding]
        drafted = requests.verified(decoding)
        num_requests = self._by_engine(engine)
        tokens = num_requests + self._by_engine(engine, drafted)
        context = self._by_engine(engine, requests.context(decoding))
        prompts = rows[reading]
        begun, prompt_tokens = self._prefill(prompts, tokens)
        decode_s = self.steps.decode(num_requests, tokens, context)
        prefill_s = self.steps.prefill(prompt_tokens)
        seconds = decode_s + prefill_s
        got = self._received(decoding)
        # a request whose prompt was read receives one token
        stepped = np.append(decoding, begun)
        got = np.append(got, np.ones_like(begun))
        drafted = np.append(drafted, np.zeros_like(begun))
        requests.num_written[stepped] += got
        requests.num_forwards[stepped] += 1
        requests.num_drafted[stepped] += drafted
        requests.num_accepted[stepped] += got - 1
        timed = prompt_tokens == 0
        extra_s = self._draft(
            rows=stepped,
            got=got,
            drafted=drafted,
            tokens=tokens,
            seconds=seconds,
            timed=timed,
        )
        seconds = seconds + extra_s
        engines = np.unique(requests.engine[rows])
        self._pass_time(engines, seconds[engines], 1)
        return self._end(stepped)

    def _received(self, rows: Ints) -> Ints:
        """Return how many tokens each request receives from a step: one and the draft
        tokens that are accepted, up to its end, int64 [b].
        """
        requests = self.requests
        draft = requests.num_draft_tokens[rows]
        accepted = np.minimum(draft, requests.num_draft_hits[rows])
        draft = requests.num_model_tokens[rows]
        of_model = np.minimum(draft, requests.num_model_hits[rows])
        left = requests.num_output_tokens[rows] - requests.num_written[rows]
        return np.minimum(1 + accepted + of_model, left)

    def _pass_time(self, engines: Ints, seconds: Floats, steps: Ints | int) -> None:
        self.clock[engines] += seconds
        self.busy_s[engines] += seconds
        self.step_count[engines] += steps

    def _by_engine(self, engine: Ints, values: Ints | Floats | None = None) -> Floats:
        """Add up values by engine; None: count them. Return float64 [engines]."""
        return np.bincount(engine, values, self.engines).astype(np.float64)

    def _end(self, rows: Ints) -> Ints:
        """End those of these requests that have written all; return them."""
        requests = self.requests
        done = rows[~requests.unfinished(rows)]
        if not len(done):
            return done
        engines = requests.engine[done]
        requests.ended_s[done] = self.clock[engines]
        requests.clear_drafts(done)
        self.drafting.end(done)
        running = self.running
        self.running = running[requests.unfinished(running)]
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
        requests = self.requests
        engine_of = requests.engine[rows]
        order = np.argsort(engine_of, kind="stable")
        changes = np.diff(engine_of[order])
        begins = np.flatnonzero(changes) + 1
        results = []
        for places in np.split(order, begins):
            engine = int(engine_of[places[0]])
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
        extra[engines] = self.drafting.step(results)
        return extra

    def _kv_room_tokens(self, rows: Ints, num_requests: Floats) -> Ints:
        """Return how many tokens each request of an engine can write before the KV
        cache may be full, int64 [engines].
        """
        engine = self.requests.engine[rows]
        used = self._by_engine(engine, self._blocks(rows))
        free = self.kv_blocks - used
        requests_or_one = np.maximum(num_requests, 1)
        blocks_each = free / requests_or_one - 1
        tokens_each = np.floor(blocks_each) * BLOCK
        room: Ints = tokens_each.astype(np.int64)
        return room

    def _blocks(self, rows: Ints) -> Ints:
        """Return the KV blocks that requests need for their next step."""
        requests = self.requests
        next_tokens = 1 + requests.verified(rows)
        tokens = requests.context(rows) + next_tokens
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
        requests = self.requests
        preempted = list[int]()
        engine_of = requests.engine[self.running]
        full = active & (self.used_blocks() > self.kv_blocks)
        for engine in np.flatnonzero(full).tolist():
            last_first = self.running[engine_of == engine][::-1]
            blocks = self._blocks(last_first)
            excess = blocks.sum() - self.kv_blocks
            freed = np.cumsum(blocks)
            place = int(np.searchsorted(freed, excess))
            count = place + 1
            for row in last_first[:count].tolist():
                requests.clear_drafts(row)
                requests.num_preemptions[row] += 1
                self._queue(row, engine, FIRST_PRIORITY)
                preempted.append(row)
        kept = ~np.isin(self.running, preempted)
        self.running = self.running[kept]

    def _queue(self, row: int, engine: int, priority: int) -> None:
        entry = Waiting(priority, self._arrived, row)
        heapq.heappush(self._waiting[engine], entry)
        self._arrived += 1
        self._num_waiting[engine] += 1

    def _admit(self, active: Bools) -> None:
        """Start waiting requests where there are a slot and KV blocks."""
        requests = self.requests
        engines = np.flatnonzero(self._may_admit & active)
        if not len(engines):
            return
        num_running = self._by_engine(requests.engine[self.running])
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
        all_rows = np.concatenate([self.running, rows])
        order = np.argsort(requests.engine[all_rows], kind="stable")
        self.running = all_rows[order]
        self.drafting.begin(rows)

    def _admit_to(self, engine: int, free_blocks: int, num_running: int) -> list[int]:
        """Start waiting requests of one engine; return their rows. An engine without a
        running request admits one in any case.
        """
        requests = self.requests
        waiting = self._waiting[engine]
        admitted = list[int]()
        while waiting and num_running < self.slots:
            row = waiting[0].row
            prompt_tokens = int(requests.num_prompt_tokens[row])
            tokens = prompt_tokens + int(requests.num_written[row])
            blocks = -(-(tokens + 1) // BLOCK)
            if blocks > free_blocks and num_running:
                break
            heapq.heappop(waiting)
            self._num_waiting[engine] -= 1
            free_blocks -= blocks
            num_running += 1
            unread = tokens - self._cached_tokens(engine, row)
            requests.num_unread[row] = max(1, unread)
            admitted.append(row)
        return admitted

    def _cached_tokens(self, engine: int, row: int) -> int:
        """Return how many tokens of a request's prompt an engine has cached; from now
        on it has the whole prompt.
        """
        problem = int(self.requests.problem[row])
        cached = self._cached[engine]
        if problem in cached:
            return int(self.requests.num_prompt_tokens[row])
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
        before = np.cumsum(unread) - unread
        first_of_engine = np.ones(len(rows), dtype=bool)
        first_of_engine[1:] = engine[1:] != engine[:-1]
        before_engine = np.where(first_of_engine, before, 0)
        before -= np.maximum.accumulate(before_engine)
        room = np.maximum(BATCHED_TOKENS - decoding, 1)
        room_of_request = room.astype(np.int64)[engine]
        left = room_of_request - before
        chunk = np.clip(left, 0, unread)
        requests.num_unread[rows] -= chunk
        read = requests.num_unread[rows] == 0
        chunk_tokens = self._by_engine(engine, chunk)
        return rows[read], chunk_tokens
