"""Run-ahead, whatever the host: the batches that come, what is written ahead of them,
and the order in which it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import ray

from das_adapter.core import tuning
from das_adapter.core.backoff import Backoff

logger = logging.getLogger("das_adapter")

LAST_PRIORITY = 2**62
"""Priority of what is written ahead, as vLLM counts it: after all requests."""
_ABORT_POLL_S = 0.01
"""How long an engine has to end what it writes ahead before it is asked again."""


class LookAhead:
    """A host's stateful data loader, of which the next batches of an epoch can be seen
    before they are taken. Whoever takes batches or saves the state finds what the
    loader alone would give: what was only seen is not taken yet.
    """

    def __init__(self, loader: Any) -> None:
        """Look ahead of `loader`: torchdata's `StatefulDataLoader`, or one like it."""
        self._loader = loader
        self._iterator = iter(())
        self._seen = deque[tuple[Any, Future[Any]]]()
        """The loader's state before each batch that was read and is not taken yet; and
        the batch, or what was raised in its place: at the end of an epoch,
        `StopIteration`.
        """
        self.taken = 0
        """Batches that were taken."""

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # not yet there in a copy
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> LookAhead:
        self._seen.clear()
        self._iterator = iter(self._loader)
        return self

    def __next__(self) -> Any:
        if self._seen:
            _, read = self._seen.popleft()
            batch = read.result()
        else:
            batch = next(self._iterator)
        self.taken += 1
        return batch

    def peek(self, count: int) -> list[Any]:
        """Return the batches that are taken next, at most so many: fewer where the
        epoch ends before, or one can't be read, which is an error when it is taken.
        """
        while len(self._seen) < count and not self._has_failed():
            state = self._loader.state_dict()
            read = Future[Any]()
            self._seen.append((state, read))
            try:
                read.set_result(next(self._iterator))
            except Exception as error:
                read.set_exception(error)
        batches = []
        for _, read in self._seen:
            if read.exception() is None:
                batches.append(read.result())
        return batches

    def _has_failed(self) -> bool:
        """Return whether the last batch that was read could not be."""
        if not self._seen:
            return False
        _, last = self._seen[-1]
        return last.exception() is not None

    def state_dict(self) -> Any:
        """Return the state in which the batch that is taken next has not been read."""
        if not self._seen:
            return self._loader.state_dict()
        state, _ = self._seen[0]
        return state


class UpcomingBatches:
    """The batches of the next steps, as long as it pays to write ahead for them."""

    def __init__(self, batches: LookAhead) -> None:
        self._batches = batches
        self.repeated: float | None = None
        """Share of what was written ahead that was repeated, as logged last; None: none
        was, or it is judged.
        """
        self._rest = Backoff(
            tuning.RUN_AHEAD_REST_STEPS, tuning.RUN_AHEAD_MAX_REST_STEPS
        )
        self._last_shown = 0
        """The last step whose batch was shown."""

    def show(self, now: int, last: int) -> Iterator[tuple[int, Any, bool]]:
        """Yield the steps after the present one, up to the end of the epoch and to the
        run's last step: each with its batch, and whether this is the first time that it
        is shown; none where it does not pay.
        """
        count = 0
        if self._pays(now):
            count = max(0, min(tuning.RUN_AHEAD_STEPS, last - now))
        batches = self._batches.peek(count)[:count]
        for step, batch in enumerate(batches, now + 1):
            new = step > self._last_shown
            self._last_shown = max(step, self._last_shown)
            yield step, batch, new

    def _pays(self, step: int) -> bool:
        """Return whether what was written ahead in the last steps was repeated; what of
        it is left at rest is not judged.
        """
        repeated = self.repeated
        self.repeated = None
        if repeated is not None and self._rest.due(step):
            if repeated >= tuning.RUN_AHEAD_MIN_REPEATED_SHARE:
                self._rest.restart()
            else:
                self._rest.done(step)
                logger.warning(
                    "das: requests repeat %.3f of what was written ahead: nothing is"
                    " for a while",
                    repeated,
                )
        return self._rest.due(step)


StepTexts = dict[int, "array[int]"]
"""What is written ahead for the requests of a step, int32 token ids, by the seeds of
their noise.
"""
texts: deque[StepTexts] = deque(maxlen=1 + tuning.RUN_AHEAD_STEPS)
"""What is written ahead for the requests of this process: for the step that goes on,
and for those after it.
"""


def new_step_texts() -> StepTexts:
    """Return where the texts of another step go; those of the oldest are forgotten."""
    of_step: StepTexts = {}
    texts.append(of_step)
    return of_step


def pop_text(seed: int | None) -> bytes | None:
    """Return the response of a request that begins, int32 token ids; None: nothing is
    written.
    """
    if not seed:
        return None
    for of_step in texts:
        if seed in of_step:
            text = of_step.pop(seed)
            return text.tobytes()
    return None


@dataclass(eq=False, kw_only=True)
class AheadSample:
    """A sample of one of the next steps, whose first response is written ahead in one
    piece or several.
    """

    texts: StepTexts
    """Where the text goes when there is any: those of its step."""
    text: array[int] = field(default_factory=lambda: array("i"))
    """What is written, int32 token ids."""
    ended: bool = False
    """Whether the response ends with that text."""

    def add(self, seed: int | None, tokens: Sequence[int], ended: bool) -> None:
        """Add a piece, and say whether it is the last one; `seed`: of the noise."""
        self.ended = ended
        self.text.extend(tokens)
        if self.text and seed is not None:
            self.texts[seed] = self.text


Lend = Callable[[int], Awaitable[Sequence[Any]]]
"""Returns at most so many slots of idle replicas."""
GiveBack = Callable[[Any], object]
"""Takes a slot back."""
WriteSample = Callable[[Any, Any], Awaitable[object]]
"""Lets the replica of a slot go on with a host's `AheadSample`."""


class AheadWriter:
    """Writes ahead on idle replicas, the next step first: the first sample of each row,
    then the second, and so on. No more is written at once than a step has samples:
    later steps do not slow the next one down. Its calls are of one event loop.
    """

    def __init__(
        self, lend: Lend, give_back: GiveBack, write_sample: WriteSample
    ) -> None:
        self._lend = lend
        self._give_back = give_back
        self._write_sample = write_sample
        self._waiting: dict[int, deque[AheadSample]] = {}
        """Samples that wait for a replica, by their steps, which come in any order."""
        self._step_samples = 0
        """Number of samples of a step."""
        self._tasks = set[asyncio.Task[None]]()
        """Tasks of the samples that are being written."""
        self.task: asyncio.Task[None] | None = None
        """The task that begins samples, as long as there are any."""

    def add(self, step: int, samples: Sequence[AheadSample]) -> None:
        """Write a step ahead, too, behind those that wait."""
        self._waiting[step] = deque(samples)
        self._step_samples = len(samples)
        if self.task is None or self.task.done():
            self.task = asyncio.create_task(self._run())

    def stop(self, step: int) -> None:
        """Begin nothing more for a step that begins, and those before it."""
        for waiting_step in list(self._waiting):
            if waiting_step <= step:
                self._waiting.pop(waiting_step).clear()

    async def _run(self) -> None:
        """Begin samples whenever replicas are idle."""
        while any(self._waiting.values()) or self._tasks:
            await asyncio.sleep(tuning.RUN_AHEAD_POLL_S)
            samples = self._next_samples()
            may_begin = self._step_samples - len(self._tasks)
            count = min(len(samples), may_begin)
            try:
                for slot in await self._lend(count):
                    self._begin(samples, slot)
            except ray.exceptions.RayError as error:
                logger.warning(
                    "das: nothing is written ahead for the next steps: %r", error
                )
                return

    def _next_samples(self) -> deque[AheadSample]:
        """Return the samples of the next step that has some waiting; those of a later
        one wait until these have begun.
        """
        for _, samples in sorted(self._waiting.items()):
            if samples:
                return samples
        return deque()

    def _begin(self, samples: deque[AheadSample], slot: Any) -> None:
        if not samples:
            self._give_back(slot)
            return
        sample = samples.popleft()
        task = asyncio.create_task(self._write(sample, samples, slot))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write(
        self, sample: AheadSample, samples: deque[AheadSample], slot: Any
    ) -> None:
        try:
            sample.ended = True  # unless the host sends a request for it
            await self._write_sample(sample, slot)
            if not sample.ended:
                samples.appendleft(sample)
        except Exception as error:
            logger.warning("das: a response is not written ahead: %r", error)
        finally:
            self._give_back(slot)


Piece = tuple[Sequence[int], bool]
"""Token ids that were written ahead, and whether they are the whole response."""


class AheadRequests:
    """What an engine writes ahead, beside its requests: while it has none, and a
    rollout goes on. `request` and `end` belong on the event loop on which the engine is
    called.
    """

    def __init__(self, abort: Callable[[list[str]], Awaitable[None]]) -> None:
        """Write nothing yet; `abort`: the engine's, of requests by their ids."""
        self._abort = abort
        self.ids = set[str]()
        """Ids of the requests with which it writes ahead."""
        self._num_calls = 0
        """Calls that write ahead: their requests may still be on the way to the
        engine.
        """
        self._num_requests = 0
        """Requests that do not write ahead."""
        self._rests = True
        """Whether no rollout goes on."""
        self._ending: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Have a request answered; what is written ahead ends within a step."""
        self._num_requests += 1
        self._rests = False
        ends_already = self._ending is not None and not self._ending.done()
        if self._num_calls and not ends_already:
            self._ending = asyncio.create_task(self._end())
        try:
            yield
        finally:
            self._num_requests -= 1

    async def write(self, send: Callable[[], Awaitable[Piece]]) -> Piece:
        """Write ahead what a request will begin with, until the engine has others or
        the rollout ends; `send` sends the request to the engine.
        """
        # first: a request may begin at the same moment, on another thread
        self._num_calls += 1
        try:
            if self._num_requests or self._rests:
                return [], False
            return await send()
        finally:
            self._num_calls -= 1

    async def end(self) -> None:
        """End what is written ahead, as the rollout has ended; nothing more is before
        the next request.
        """
        self._rests = True
        await self._end()

    async def _end(self) -> None:
        while self._num_calls:  # again for what reaches the engine meanwhile
            await self._abort(list(self.ids))
            await asyncio.sleep(_ABORT_POLL_S)
