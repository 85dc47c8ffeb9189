"""Run-ahead in veRL: engines that have nothing left write what the requests of the next steps will begin with.

The trainer looks at the next batches and shows each agent loop worker the rows that it will have. A worker runs the
agent loops of these rows up to their first request, which an idle replica answers with the noise of the request to
come. The answer stays in the worker, and travels with that request when it comes.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import ray

from das_adapter.config import DasConfig
from das_adapter.core.backoff import Backoff
from das_adapter.patching import patch
from das_adapter.protocol.label import Label

logger = logging.getLogger("das_adapter")

STEPS = 4
"""Steps that are written ahead. A step that was written ahead leaves hardly an engine idle: with one, the step after it
is not written ahead. A long tail is enough for several; what was written more weight syncs ago is repeated less."""
LEAST = 0.05
"""Share of the tokens written ahead that requests must repeat, or nothing is written ahead for a while."""
_REST, _LONGEST = 8, 64
"""Steps without, after one that was not worth it, and at most."""
POLL_S = 0.2
"""How often a worker asks for idle replicas."""


class Written(BaseException):
    """Ends an agent loop whose first request was written ahead. It is no `Exception`, which agent loops catch."""


# In the trainer


def no_effect(trainer: Any) -> str | None:
    """Say why nothing is written ahead in a run; None: it is."""
    config, kind = trainer.config, f"{type(trainer).__module__}.{type(trainer).__name__}"
    if getattr(trainer, "trainer_mode", "sync") != "sync":
        return "rollout and training do not take turns"
    if not hasattr(trainer, "trainer_mode") and kind != "verl.trainer.ppo.ray_trainer.RayPPOTrainer":
        return f"{kind} may choose its batches otherwise than veRL's own trainers"
    loader, batch = trainer.train_dataloader, config.data.train_batch_size
    filters = config.algorithm.get("filter_groups") or {}
    if filters.get("enable") or (config.data.get("gen_batch_size") or batch) != batch:
        return "the next batch depends on the rollouts of this one"
    if hasattr(loader.sampler, "update") or hasattr(loader.dataset, "on_batch_end"):
        return "the data set or its sampler changes after each step"
    if config.algorithm.adv_estimator == "remax":
        return "algorithm.adv_estimator=remax has greedy samples beside the others"
    return None


class LookAhead:
    """A host's stateful data loader, of which the next batches of an epoch can be seen before they are taken. Whoever
    takes batches or saves the state finds what the loader alone would give: what was only seen is not taken yet."""

    def __init__(self, loader: Any) -> None:
        """`loader`: torchdata's `StatefulDataLoader`, or one like it."""
        self._loader, self._iterator = loader, iter(())
        self._seen = deque[tuple[Any, Future[Any]]]()
        """The loader's state before each batch that was read and is not taken yet; and the batch, or what was raised in
        its place: at the end of an epoch, `StopIteration`."""

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
        return self._seen.popleft()[1].result() if self._seen else next(self._iterator)

    def peek(self, count: int) -> list[Any]:
        """Return the batches that are taken next, at most so many: fewer where the epoch ends before, or one can't be
        read, which is an error when it is taken."""
        while len(self._seen) < count and not (self._seen and self._seen[-1][1].exception()):
            self._seen.append((self._loader.state_dict(), batch := Future[Any]()))
            try:
                batch.set_result(next(self._iterator))
            except Exception as error:
                batch.set_exception(error)
        return [batch.result() for _, batch in self._seen if not batch.exception()]

    def state_dict(self) -> Any:
        """Return the state in which the batch that is taken next has not been read."""
        return self._seen[0][0] if self._seen else self._loader.state_dict()


class Ahead:
    """Shows agent loop workers the batches of the next steps."""

    running: Ahead | None = None
    """Of the run that this process trains; None: it has none."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        trainer.train_dataloader = self._batches = LookAhead(trainer.train_dataloader)
        self.repeated: float | None = None
        """Share of what was written ahead that was repeated, as logged last; None: none was, or it is judged."""
        self._pays = Backoff(_REST, _LONGEST)
        self._shown = 0
        """The last step whose batch they were shown."""

    @classmethod
    def begin(cls, trainer: Any, das: DasConfig) -> None:
        """Look ahead in a run from now on, or say in the log why it has no effect."""
        if das.history.run_ahead == "off":
            return
        if reason := no_effect(trainer):
            logger.warning("das: history.run_ahead=%r has no effect: %s", das.history.run_ahead, reason)
        else:
            cls.running = cls(trainer)

    def show(self, manager: Any, name_rows: Callable[[Any], Any]) -> None:
        """Show the workers of an agent loop manager what comes after the batch that they have. An error ends nothing
        but run-ahead. `name_rows`: names the rows of a batch."""
        try:
            for batch in self._new() if self.worth() else ():
                name_rows(batch)
                workers = manager.agent_loop_workers
                for worker, part in zip(workers, batch.chunk(len(workers)), strict=False):
                    worker.das_write_ahead.remote(part)
        except Exception:
            logger.exception("das: no responses are written ahead any more; the run goes on")
            Ahead.running = None

    def worth(self) -> bool:
        """Whether what was written ahead in the last steps was repeated; what of it is left at rest is not judged."""
        step, repeated, self.repeated = self._trainer.global_steps, self.repeated, None
        if repeated is not None and self._pays.due(step):
            if repeated < LEAST:
                self._pays.done(step)
                logger.warning("das: requests repeat %.3f of what was written ahead: nothing is for a while", repeated)
            else:
                self._pays.restart()
        return self._pays.due(step)

    def _new(self) -> Iterator[Any]:
        """Yield the batches of the next steps that workers do not know, up to the end of the epoch and of the run."""
        now = self._trainer.global_steps
        count = min(STEPS, self._trainer.total_training_steps - now)
        for step, seen in enumerate(self._batches.peek(count), now + 1):
            if step > self._shown:
                self._shown = step
                yield self._batch(seen, step)

    def _batch(self, seen: dict[str, Any], step: int) -> Any:
        """Return a batch as the trainer will dispatch it in a step: veRL's `DataProto` or a `TensorDict`."""
        from verl import DataProto
        from verl.utils import tensordict_utils

        trainer = self._trainer
        rows = {**seen, "uid": np.array([""] * len(seen["raw_prompt"]), dtype=object)}
        if hasattr(trainer, "trainer_mode"):
            batch = tensordict_utils.get_tensordict(rows)
            tensordict_utils.assign_non_tensor_data(batch, "global_steps", step)
            return batch
        batch = trainer._get_gen_batch(DataProto.from_single_dict(rows))
        batch.meta_info["global_steps"] = step
        return batch.repeat(repeat_times=trainer.config.actor_rollout_ref.rollout.n, interleave=True)


# In an agent loop worker


@dataclass(eq=False)
class Job:
    """A sample of one of the next steps."""

    params: dict[str, Any]
    """Sampling parameters, with which its agent loop begins."""
    trajectory: dict[str, Any]
    fields: dict[str, Any]
    """Further arguments of `_run_agent_loop`."""
    texts: dict[int, array[int]]
    """Where the text goes when there is any: those of its step, by the seeds of their noise."""
    text: array[int] = field(default_factory=lambda: array("i"))
    """What is written ahead of its first response, int32 token ids."""
    ended: bool = False
    """Whether that is all."""

    async def write(self, server: Any, label: Label, prompt: list[int], params: dict[str, Any]) -> None:
        """Let a replica go on with the response to a request."""
        params = replace(label, record=False).put_into(params)
        tokens, self.ended = await server.write_ahead.remote([*prompt, *self.text], params)
        self.text.extend(tokens)
        if self.text and label.seed is not None:
            self.texts[label.seed] = self.text


texts: deque[dict[int, array[int]]] = deque(maxlen=1 + STEPS)
"""What is written ahead for the requests of the worker in this process, by the seeds of their noise: for the step that
goes on, and for those after it."""


def take(seed: int | None) -> bytes | None:
    """Return the response of a request that begins, int32 token ids; None: nothing is written."""
    text = next((written.pop(seed) for written in texts if seed in written), None) if seed else None
    return None if text is None else text.tobytes()


class Writing:
    """Writes ahead for the rows of a worker, the next step first: the first sample of each, then the second, and so on.
    No more is written at once than a step has samples: later steps do not slow the next one down."""

    def __init__(self, worker: Any) -> None:
        self._worker = copy.copy(worker)
        self._worker._agent_loop_postprocess = _drop
        self._balancer = worker.llm_client._load_balancer
        self._waiting: dict[int, deque[Job]] = {}
        """Samples that wait for a replica, by their steps, which come in any order."""
        self._most = 0
        """Samples of a step."""
        self._at_work = set[asyncio.Task[None]]()
        self.task: asyncio.Task[None] | None = None

    def add(self, step: int, jobs: list[Job]) -> None:
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
            jobs = next(waiting, deque[Job]())  # a later step asks when these have begun
            most = min(len(jobs), self._most - len(self._at_work))
            try:
                for name, server in await self._balancer.lend.remote(most):
                    self._begin(jobs, name, server)
            except ray.exceptions.RayError as error:
                logger.warning("das: nothing is written ahead for the next steps: %r", error)
                return

    def _begin(self, jobs: deque[Job], name: str, server: Any) -> None:
        if not jobs:
            self._balancer.give_back.remote(name)
            return
        task = asyncio.create_task(self._write(jobs.popleft(), jobs, name, server))
        self._at_work.add(task)
        task.add_done_callback(self._at_work.discard)

    async def _write(self, job: Job, jobs: deque[Job], name: str, server: Any) -> None:
        try:
            job.ended = True  # unless it asks, and hears otherwise
            fields = {**job.fields, "trace": False, "das_job": (job, server)}
            await self._worker._run_agent_loop(job.params, job.trajectory, **fields)
            if not job.ended:
                jobs.appendleft(job)
        except Exception as error:
            logger.warning("das: a response is not written ahead: %r", error)
        finally:
            self._balancer.give_back.remote(name)


async def _drop(*_: Any, **__: Any) -> None:
    """Take the output of an agent loop that has asked for nothing."""


@patch("verl.experimental.agent_loop.agent_loop:AgentLoopWorker.das_write_ahead", since="0.9.1", adds=True)
def write_ahead(stock: None) -> Any:
    """Without it the trainer cannot show agent loop workers the next batch. Remove this patch when veRL lets plug-ins
    add methods to its agent loop workers."""

    async def das_write_ahead(self: Any, batch: Any) -> None:
        try:
            jobs, step = await jobs_of(self, batch)
            self.das_writing = getattr(self, "das_writing", None) or Writing(self)
            self.das_writing.add(step, jobs)
        except Exception:
            logger.exception("das: a step is not written ahead")

    return das_write_ahead


async def jobs_of(worker: Any, batch: Any) -> tuple[list[Job], int]:
    """Return the samples of a batch, and its step: as veRL's workers make them."""
    from verl.experimental.agent_loop.agent_loop import get_trajectory_info

    written: dict[int, array[int]] = {}
    texts.append(written)  # here: a method of the worker's class is pickled with what it names
    rollout, tensors = worker.rollout_config, not hasattr(batch, "non_tensor_batch")
    params = {"temperature": rollout.temperature, "top_p": rollout.top_p, "top_k": rollout.top_k}
    params |= {"repetition_penalty": 1.0, "logprobs": False}
    step = batch["global_steps"] if tensors else batch.meta_info["global_steps"]
    rows = [_row(batch if tensors else batch.non_tensor_batch, row) for row in range(len(batch))]
    index = [row.get("index", number) for number, row in enumerate(rows)]
    jobs = []
    for row, trajectory in zip(rows, await get_trajectory_info(step, index, False), strict=True):
        row.setdefault("agent_name", rollout.agent.default_agent_loop)
        count, sampled = row.pop("__rollout_n__", rollout.n), row.pop("__do_sample__", True)
        if not tensors:  # each sample has a row
            jobs.append((trajectory["rollout_n"], Job(params, trajectory, row, written)))
        elif sampled:
            jobs += [(n, Job(params, trajectory, {**row, "session_id": n}, written)) for n in range(count)]
    return [job for _, job in sorted(jobs, key=lambda numbered: numbered[0])], int(step)


def _row(columns: Any, row: int) -> dict[str, Any]:
    """Return a row of a batch's columns: those of a `TensorDict` may have one value for all rows."""
    from tensordict import NonTensorData, NonTensorStack

    found = {}
    for name, column in columns.items():
        value = column if isinstance(column, NonTensorData) else column[row]
        found[name] = value.data if isinstance(column, NonTensorData | NonTensorStack) else value
    return found
