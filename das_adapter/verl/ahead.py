"""Run-ahead in veRL: engines that have nothing left write what the requests of the next
steps will begin with.

The trainer looks at the next batches and shows each agent loop worker the rows that it
will have. A worker runs the agent loops of these rows up to their first request, which
an idle replica answers with the noise of the request to come. The answer stays in the
worker, and travels with that request when it comes.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from das_adapter.config import DasConfig
from das_adapter.patching import patch
from das_adapter.protocol.label import Label
from das_adapter.service.run_ahead import (
    AheadSample,
    AheadWriter,
    LookAhead,
    UpcomingBatches,
    new_step_texts,
)

logger = logging.getLogger("das_adapter")


class Written(BaseException):
    """Ends an agent loop whose first request was written ahead. It is no `Exception`,
    which agent loops catch.
    """


# In the trainer


def no_effect(trainer: Any) -> str | None:
    """Say why nothing is written ahead in a run; None: it is."""
    config = trainer.config
    kind = f"{type(trainer).__module__}.{type(trainer).__name__}"
    if getattr(trainer, "trainer_mode", "sync") != "sync":
        return "rollout and training do not take turns"
    if (
        not hasattr(trainer, "trainer_mode")
        and kind != "verl.trainer.ppo.ray_trainer.RayPPOTrainer"
    ):
        return f"{kind} may choose its batches otherwise than veRL's own trainers"
    loader = trainer.train_dataloader
    batch = config.data.train_batch_size
    filters = config.algorithm.get("filter_groups") or {}
    if filters.get("enable") or (config.data.get("gen_batch_size") or batch) != batch:
        return "the next batch depends on the rollouts of this one"
    if hasattr(loader.sampler, "update") or hasattr(loader.dataset, "on_batch_end"):
        return "the data set or its sampler changes after each step"
    if config.algorithm.adv_estimator == "remax":
        return "algorithm.adv_estimator=remax has greedy samples beside the others"
    return None


class Ahead:
    """Shows agent loop workers the batches of the next steps."""

    running: Ahead | None = None
    """Of the run that this process trains; None: it has none."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        trainer.train_dataloader = batches = LookAhead(trainer.train_dataloader)
        self.coming = UpcomingBatches(batches)

    @classmethod
    def begin(cls, trainer: Any, das: DasConfig) -> None:
        """Look ahead in a run from now on, or say in the log why it has no effect."""
        if das.history.run_ahead == "off":
            return
        if reason := no_effect(trainer):
            logger.warning(
                "das: history.run_ahead=%r has no effect: %s",
                das.history.run_ahead,
                reason,
            )
        else:
            cls.running = cls(trainer)

    def show(self, manager: Any, name_rows: Callable[[Any], Any]) -> None:
        """Show the workers of an agent loop manager what comes after the batch that
        they have. An error ends nothing but run-ahead. `name_rows`: names the rows of a
        batch.
        """
        try:
            for batch in self._new():
                name_rows(batch)
                workers = manager.agent_loop_workers
                for worker, part in zip(
                    workers, batch.chunk(len(workers)), strict=False
                ):
                    worker.das_write_ahead.remote(part)
        except Exception:
            logger.exception(
                "das: no responses are written ahead any more; the run goes on"
            )
            Ahead.running = None

    def _new(self) -> Iterator[Any]:
        """Yield the batches of the next steps that workers do not know."""
        shown = self.coming.show(
            self._trainer.global_steps, self._trainer.total_training_steps
        )
        yield from (self._batch(seen, step) for step, seen, new in shown if new)

    def _batch(self, seen: dict[str, Any], step: int) -> Any:
        """Return a batch as the trainer will dispatch it in a step: veRL's `DataProto`
        or a `TensorDict`.
        """
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
        return batch.repeat(
            repeat_times=trainer.config.actor_rollout_ref.rollout.n, interleave=True
        )


# In an agent loop worker


@dataclass(eq=False, kw_only=True)
class VerlJob(AheadSample):
    """A sample of one of the next steps, as an agent loop begins with it."""

    params: dict[str, Any]
    """Sampling parameters."""
    trajectory: dict[str, Any]
    fields: dict[str, Any]
    """Further arguments of `_run_agent_loop`."""

    async def write(
        self, server: Any, label: Label, prompt: list[int], params: dict[str, Any]
    ) -> None:
        """Let a replica go on with the response to a request."""
        params = replace(label, record=False).put_into(params)
        self.add(
            label.seed, *await server.write_ahead.remote([*prompt, *self.text], params)
        )


def writing(worker: Any) -> AheadWriter:
    """Return what writes ahead for the rows of a worker, on the replicas that its
    balancer lends.
    """
    worker = copy.copy(worker)
    worker._agent_loop_postprocess = _drop
    balancer = worker.llm_client._load_balancer

    async def write(job: VerlJob, slot: tuple[str, Any]) -> None:
        fields = {**job.fields, "trace": False, "das_job": (job, slot[1])}
        await worker._run_agent_loop(job.params, job.trajectory, **fields)

    return AheadWriter(
        balancer.lend.remote, lambda slot: balancer.give_back.remote(slot[0]), write
    )


async def _drop(*_: Any, **__: Any) -> None:
    """Take the output of an agent loop that has asked for nothing."""


@patch(
    "verl.experimental.agent_loop.agent_loop:AgentLoopWorker.das_write_ahead",
    since="0.9.1",
    adds=True,
    feature="run-ahead",
)
def write_ahead(stock: None) -> Any:
    """Without it the trainer cannot show agent loop workers the next batch. Remove this
    patch when veRL lets plug-ins add methods to its agent loop workers.
    """

    async def das_write_ahead(self: Any, batch: Any) -> None:
        try:
            jobs, step = await jobs_of(self, batch)
            self.das_writing = getattr(self, "das_writing", None) or writing(self)
            self.das_writing.add(step, jobs)
        except Exception:
            logger.exception("das: a step is not written ahead")

    return das_write_ahead


async def jobs_of(worker: Any, batch: Any) -> tuple[list[VerlJob], int]:
    """Return the samples of a batch, and its step: as veRL's workers make them."""
    from verl.experimental.agent_loop.agent_loop import get_trajectory_info

    rollout = worker.rollout_config
    tensors = not hasattr(batch, "non_tensor_batch")
    params = {
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
    }
    params |= {"repetition_penalty": 1.0, "logprobs": False}
    step = batch["global_steps"] if tensors else batch.meta_info["global_steps"]
    rows = [
        _row(batch if tensors else batch.non_tensor_batch, row)
        for row in range(len(batch))
    ]
    index = [row.get("index", number) for number, row in enumerate(rows)]
    job = functools.partial(VerlJob, params=params, texts=new_step_texts())
    jobs = []
    for row, trajectory in zip(
        rows, await get_trajectory_info(step, index, False), strict=True
    ):
        row.setdefault("agent_name", rollout.agent.default_agent_loop)
        count = row.pop("__rollout_n__", rollout.n)
        sampled = row.pop("__do_sample__", True)
        if not tensors:  # each sample has a row
            jobs.append(
                (trajectory["rollout_n"], job(trajectory=trajectory, fields=row))
            )
        elif sampled:
            jobs += [
                (n, job(trajectory=trajectory, fields={**row, "session_id": n}))
                for n in range(count)
            ]
    return [job for _, job in sorted(jobs, key=lambda numbered: numbered[0])], int(step)


def _row(columns: Any, row: int) -> dict[str, Any]:
    """Return a row of a batch's columns: those of a `TensorDict` may have one value for
    all rows.
    """
    from tensordict import NonTensorData, NonTensorStack

    found = {}
    for name, column in columns.items():
        value = column if isinstance(column, NonTensorData) else column[row]
        found[name] = (
            value.data if isinstance(column, NonTensorData | NonTensorStack) else value
        )
    return found
