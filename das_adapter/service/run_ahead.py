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

from das_adapter.core.backoff import Backoff

logger = logging.getLogger("das_adapter")

STEPS = 4
"""Steps that are written ahead. A step that was written ahead leaves hardly an engine
idle: with one, the step after it is not written ahead. A long tail is enough for
several; what was written more weight syncs ago is repeated less.
"""
LEAST = 0.05
"""Share of the tokens written ahead that requests must repeat, or nothing is written
ahead for a while.
"""
_REST, _LONGEST = 8, 64
"""Steps without, after one that was not worth it, and at most."""
POLL_S = 0.2
"""How often idle replicas are asked for."""


class LookAhead:
    """A host's stateful data loader, of which the next batches of an epoch can be seen
    before they are taken. Whoever takes batches or saves the state finds what the
    loader alone would give: what was only seen is not taken yet.
    """

    def __init__(self, loader: Any) -> None:
        """`loader`: torchdata's `StatefulDataLoader`, or one like it."""
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
        batch = self._seen.popleft()[1].result() if self._seen else next(self._iterator)
        self.taken += 1
        return batch

    def peek(self, count: int) -> list[Any]:
        """Return the batches that are taken next, at most so many: fewer where the
        epoch ends before, or one can't be read, which is an error when it is taken.
        """
        while len(self._seen) < count and not (
            self._seen and self._seen[-1][1].exception()
        ):
            self._seen.append((self._loader.state_dict(), batch := Future[Any]()))
            try:
                batch.set_result(next(self._iterator))
            except Exception as error:
                batch.set_exception(error)
        return [batch.result() for _, batch in self._seen if not batch.exception()]

    def state_dict(self) -> Any:
        """Return the state in which the batch that is taken next has not been read."""
        return self._seen[0][0] if self._seen else self._loader.state_dict()


class Coming:
    """The batches of the next steps, as long as it pays to write ahead for them."""

    def __init__(self, batches: LookAhead) -> None:
        self._batches = batches
        self.repeated: float | None = None
        """Share of what was written ahead that was repeated, as logged last; None: none
        was, or it is judged.
        """
        self._pays = Backoff(_REST, _LONGEST)
        self._shown = 0
        """The last step whose batch was shown."""

    def show(self, now: int, last: int) -> Iterator[tuple[int, Any, bool]]:
        """Yield the steps after the present one, up to the end of the epoch and to the
        run's last step: each with its batch, and whether this is the first time that it
        is shown; none where it does not pay.
        """
        count = min(STEPS, last - now) if self._worth(now) else 0
        for step, batch in enumerate(
            self._batches.peek(count)[: max(0, count)], now + 1
        ):
            new = step > self._shown
            self._shown = max(step, self._shown)
            yield step, batch, new

    def _worth(self, step: int) -> bool:
        """Whether what was written ahead in the last steps was repeated; what of it is
        left at rest is not judged.
        """
        repeated = self.repeated
        self.repeated = None
        if repeated is not None and self._pays.due(step):
            if repeated < LEAST:
                self._pays.done(step)
                logger.warning(
                    "das: requests repeat %.3f of what was written ahead: nothing is"
                    " for a while",
                    repeated,
                )
            else:
                self._pays.restart()
        return self._pays.due(step)


texts: deque[dict[int, array[int]]] = deque(maxlen=1 + STEPS)
"""What is written ahead for the requests of this process, by the seeds of their noise:
for the step that goes on, and for those after it.
"""


def new_texts() -> dict[int, array[int]]:
    """Return where the texts of another step go; those of the oldest are forgotten."""
    texts.append({})
    return texts[-1]


def take(seed: int | None) -> bytes | None:
    """Return the response of a request that begins, int32 token ids; None: nothing is
    written.
    """
    text = (
        next((written.pop(seed) for written in texts if seed in written), None)
        if seed
        else None
    )
    return None if text is None else text.tobytes()


@dataclass(eq=False, kw_only=True)
class Job:
    """A sample of one of the next steps, whose first response is written ahead in one
    piece or several.
    """

    texts: dict[int, array[int]]
    """Where the text goes when there is any: those of its step."""
    text: array[int] = field(default_factory=lambda: array("i"))
    """What is written, int32 token ids."""
    ended: bool = False
    """Whether that is all."""

    def add(self, seed: int | None, tokens: Sequence[int], ended: bool) -> None:
        """Take a piece, and whether it is the last one; `seed`: of the noise."""
        self.ended = ended
        self.text.extend(tokens)
        if self.text and seed is not None:
            self.texts[seed] = self.text


class Writing:
    """Writes ahead on idle replicas, the next step first: the first sample of each row,
    then the second, and so on. No more is written at once than a step has samples:
    later steps do not slow the next one down. Its calls are of one event loop.
    """

    def __init__(
        self,
        lend: Callable[[int], Awaitable[Sequence[Any]]],
        give_back: Callable[[Any], object],
        write: Callable[[Any, Any], Awaitable[object]],
    ) -> None:
        """`lend`: returns at most so many slots of idle replicas; `write`: lets the
        replica of a slot go on with a host's `Job`.
        """
        self._lend = lend
        self._give_back = give_back
        self._ask = write
        self._waiting: dict[int, deque[Job]] = {}
        """Samples that wait for a replica, by their steps, which come in any order."""
        self._most = 0
        """Samples of a step."""
        self._at_work = set[asyncio.Task[None]]()
        self.task: asyncio.Task[None] | None = None

    def add(self, step: int, jobs: Sequence[Job]) -> None:
        """Write a step ahead, too, behind those that wait."""
        self._waiting[step] = deque(jobs)
        self._most = len(jobs)
        if self.task is None or self.task.done():
            self.task = asyncio.create_task(self._run())

    def stop(self, step: int) -> None:
        """Begin nothing more for a step that begins, and those before it."""
        for over in [number for number in self._waiting if number <= step]:
            self._waiting.pop(over).clear()

    async def _run(self) -> None:
        while any(self._waiting.values()) or self._at_work:
            await asyncio.sleep(POLL_S)
            waiting = (jobs for _, jobs in sorted(self._waiting.items()) if jobs)
            # a later step asks when these have begun
            jobs = next(waiting, deque[Job]())
            most = min(len(jobs), self._most - len(self._at_work))
            try:
                for slot in await self._lend(most):
                    self._begin(jobs, slot)
            except ray.exceptions.RayError as error:
                logger.warning(
                    "das: nothing is written ahead for the next steps: %r", error
                )
                return

    def _begin(self, jobs: deque[Job], slot: Any) -> None:
        if not jobs:
            self._give_back(slot)
            return
        task = asyncio.create_task(self._write(jobs.popleft(), jobs, slot))
        self._at_work.add(task)
        task.add_done_callback(self._at_work.discard)

    async def _write(self, job: Job, jobs: deque[Job], slot: Any) -> None:
        try:
            job.ended = True  # unless it asks, and hears otherwise
            await self._ask(job, slot)
            if not job.ended:
                jobs.appendleft(job)
        except Exception as error:
            logger.warning("das: a response is not written ahead: %r", error)
        finally:
            self._give_back(slot)


class Aside:
    """What an engine writes ahead, beside its requests: while it has none, and a
    rollout goes on. `request` and `end` belong on the event loop on which the engine is
    called.
    """

    def __init__(self, abort: Callable[[list[str]], Awaitable[None]]) -> None:
        """`abort`: the engine's, of requests by their ids."""
        self._abort = abort
        self.ids = set[str]()
        """Of the requests with which it writes ahead."""
        self._calls = 0
        """Calls that write ahead: their requests may still be on the way to the
        engine.
        """
        self._requests, self._rests = 0, True
        """Other requests, and whether no rollout goes on."""
        self._ending: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Have a request answered; what is written ahead ends within a step."""
        self._requests = self._requests + 1
        self._rests = False
        if self._calls and (self._ending is None or self._ending.done()):
            self._ending = asyncio.create_task(self._end())
        try:
            yield
        finally:
            self._requests -= 1

    async def write(
        self, ask: Callable[[], Awaitable[tuple[Sequence[int], bool]]]
    ) -> tuple[Sequence[int], bool]:
        """Write ahead what a request will begin with, until the engine has others or
        the rollout ends; return that, and whether it is the whole response. `ask`:
        sends the request, and returns the same.
        """
        self._calls += (
            1  # first: a request may begin at the same moment, on another thread
        )
        try:
            return ([], False) if self._requests or self._rests else await ask()
        finally:
            self._calls -= 1

    async def end(self) -> None:
        """End what is written ahead, as the rollout has ended; nothing more is before
        the next request.
        """
        self._rests = True
        await self._end()

    async def _end(self) -> None:
        while self._calls:  # again for what reaches the engine meanwhile
            await self._abort(list(self.ids))
            await asyncio.sleep(0.01)
