"""Run-ahead in veRL: idle engines write what the requests of the next steps will begin
with.

The trainer looks at the next batches and shows each agent loop worker the rows that it
will have. A worker runs the agent loops of these rows up to their first request, which
an idle replica answers with the noise of the request to come. The answer stays in the
worker, and travels with that request when it comes.
"""

from __future__ import annotations

import copy
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

_V0_TRAINER = "verl.trainer.ppo.ray_trainer.RayPPOTrainer"
"""The trainer without `trainer_mode` whose batches are known to follow the loader."""


class FirstRequestWritten(BaseException):
    """Ends an agent loop whose first request was written ahead. It is no `Exception`,
    which agent loops catch.
    """


# In the trainer


def run_ahead_obstacle(trainer: Any) -> str | None:
    """Return why nothing can be written ahead in a run; None where nothing prevents
    it.
    """
    config = trainer.config
    kind = type(trainer)
    trainer_class = f"{kind.__module__}.{kind.__name__}"
    if not hasattr(trainer, "trainer_mode"):
        if trainer_class != _V0_TRAINER:
            return (
                f"{trainer_class} may choose its batches otherwise than veRL's own"
                " trainers"
            )
    elif trainer.trainer_mode != "sync":
        return "rollout and training do not take turns"
    filters = config.algorithm.get("filter_groups")
    if filters and filters.get("enable"):
        return "the next batch depends on the rollouts of this one"
    generated_rows = config.data.get("gen_batch_size")
    if generated_rows and generated_rows != config.data.train_batch_size:
        return "the next batch depends on the rollouts of this one"
    loader = trainer.train_dataloader
    sampler_learns = hasattr(loader.sampler, "update")
    dataset_learns = hasattr(loader.dataset, "on_batch_end")
    if sampler_learns or dataset_learns:
        return "the data set or its sampler changes after each step"
    if config.algorithm.adv_estimator == "remax":
        return "algorithm.adv_estimator=remax has greedy samples beside the others"
    return None


class VerlRunAhead:
    """Shows agent loop workers the batches of the next steps."""

    running: VerlRunAhead | None = None
    """The run-ahead of the run that this process trains; None where it has none."""

    def __init__(self, trainer: Any) -> None:
        batches = LookAhead(trainer.train_dataloader)
        trainer.train_dataloader = batches
        self._trainer = trainer
        self.coming = UpcomingBatches(batches)

    @classmethod
    def start(cls, trainer: Any, das: DasConfig) -> None:
        """Look ahead in a run from now on, or say in the log why it has no effect."""
        if das.history.run_ahead == "off":
            return
        obstacle = run_ahead_obstacle(trainer)
        if obstacle is None:
            cls.running = cls(trainer)
            return
        logger.warning(
            "das: history.run_ahead=%r has no effect: %s",
            das.history.run_ahead,
            obstacle,
        )

    def show_next_batches(self, manager: Any, name_rows: Callable[[Any], Any]) -> None:
        """Show the workers of an agent loop manager what comes after the batch that
        they have. An error ends nothing but run-ahead.

        Args:
            manager: veRL's agent loop manager.
            name_rows: names the rows of a batch.
        """
        workers = manager.agent_loop_workers
        try:
            for batch in self._new_batches():
                name_rows(batch)
                parts = batch.chunk(len(workers))
                for worker, part in zip(workers, parts, strict=False):
                    worker.das_write_ahead.remote(part)
        except Exception:
            logger.exception(
                "das: no responses are written ahead any more; the run goes on"
            )
            VerlRunAhead.running = None

    def _new_batches(self) -> Iterator[Any]:
        """Yield the batches of the next steps that workers do not know."""
        now = self._trainer.global_steps
        last = self._trainer.total_training_steps
        for step, columns, is_new in self.coming.show(now, last):
            if is_new:
                yield self._build_batch(columns, step)

    def _build_batch(self, columns: dict[str, Any], step: int) -> Any:
        """Return the batch of a step as the trainer will dispatch it: veRL's
        `DataProto`, or a `TensorDict`.
        """
        from verl import DataProto
        from verl.utils import tensordict_utils

        trainer = self._trainer
        num_rows = len(columns["raw_prompt"])
        no_names = [""] * num_rows
        rows = {**columns, "uid": np.array(no_names, dtype=object)}
        if hasattr(trainer, "trainer_mode"):
            batch = tensordict_utils.get_tensordict(rows)
            tensordict_utils.assign_non_tensor_data(batch, "global_steps", step)
            return batch
        all_columns = DataProto.from_single_dict(rows)
        batch = trainer._get_gen_batch(all_columns)
        batch.meta_info["global_steps"] = step
        num_samples = trainer.config.actor_rollout_ref.rollout.n
        return batch.repeat(repeat_times=num_samples, interleave=True)


# In an agent loop worker


@dataclass(eq=False, kw_only=True)
class VerlJob(AheadSample):
    """A sample of one of the next steps, as an agent loop begins with it."""

    params: dict[str, Any]
    """Sampling parameters."""
    trajectory: dict[str, Any]
    """What veRL's `get_trajectory_info` says of the sample."""
    fields: dict[str, Any]
    """Further arguments of `_run_agent_loop`."""

    async def write(
        self, server: Any, label: Label, prompt: list[int], params: dict[str, Any]
    ) -> None:
        """Let a replica go on with the response to a request."""
        unrecorded = replace(label, record=False)
        text_so_far = [*prompt, *self.text]
        tokens, ended = await server.write_ahead.remote(
            text_so_far, unrecorded.put_into(params)
        )
        self.add(label.seed, tokens, ended)


def make_writing(worker: Any) -> AheadWriter:
    """Return what writes ahead for the rows of a worker, on the replicas that its
    balancer lends.
    """
    worker = copy.copy(worker)
    worker._agent_loop_postprocess = _ignore_output
    balancer = worker.llm_client._load_balancer

    async def write(job: VerlJob, slot: tuple[str, Any]) -> None:
        _, server = slot
        fields = {**job.fields, "trace": False}
        fields["das_job"] = (job, server)
        await worker._run_agent_loop(job.params, job.trajectory, **fields)

    def give_back(slot: tuple[str, Any]) -> object:
        server_id, _ = slot
        return balancer.give_back.remote(server_id)

    return AheadWriter(balancer.lend.remote, give_back, write)


async def _ignore_output(*_: Any, **__: Any) -> None:
    """Drop the output of an agent loop that has asked for nothing."""


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
            jobs, step = await make_jobs(self, batch)
            if getattr(self, "das_writing", None) is None:
                self.das_writing = make_writing(self)
            self.das_writing.add(step, jobs)
        except Exception:
            logger.exception("das: a step is not written ahead")

    return das_write_ahead


async def make_jobs(worker: Any, batch: Any) -> tuple[list[VerlJob], int]:
    """Return the samples of a batch as veRL's workers make them, and its step: the
    first sample of each row, then the second of each, and so on.
    """
    from verl.experimental.agent_loop.agent_loop import get_trajectory_info

    rollout = worker.rollout_config
    is_tensordict = not hasattr(batch, "non_tensor_batch")
    if is_tensordict:
        step = batch["global_steps"]
        columns = batch
    else:
        step = batch.meta_info["global_steps"]
        columns = batch.non_tensor_batch
    rows = []
    indices = []
    for number in range(len(batch)):
        row = _read_row(columns, number)
        rows.append(row)
        indices.append(row.get("index", number))
    trajectories = await get_trajectory_info(step, indices, False)
    params = {
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "repetition_penalty": 1.0,
        "logprobs": False,
    }
    texts = new_step_texts()
    jobs: list[VerlJob] = []
    sample_numbers: list[int] = []
    """Number of each job's sample among those of its row."""
    for row, trajectory in zip(rows, trajectories, strict=True):
        row.setdefault("agent_name", rollout.agent.default_agent_loop)
        num_samples = row.pop("__rollout_n__", rollout.n)
        is_sampled = row.pop("__do_sample__", True)
        if not is_tensordict:  # each sample has a row
            samples = {trajectory["rollout_n"]: row}
        elif is_sampled:
            samples = {}
            for sample_number in range(num_samples):
                samples[sample_number] = {**row, "session_id": sample_number}
        else:
            samples = {}
        for sample_number, fields in samples.items():
            sample_numbers.append(sample_number)
            job = VerlJob(
                params=params,
                texts=texts,
                trajectory=trajectory,
                fields=fields,
            )
            jobs.append(job)
    order = np.argsort(sample_numbers, kind="stable")
    jobs = [jobs[place] for place in order]
    return jobs, int(step)


def _read_row(columns: Any, number: int) -> dict[str, Any]:
    """Return a row of a batch's columns. Those of a `TensorDict` may have one value for
    all rows.
    """
    from tensordict import NonTensorData, NonTensorStack

    row: dict[str, Any] = {}
    for name, column in columns.items():
        if isinstance(column, NonTensorData):
            value = column
        else:
            value = column[number]
        if isinstance(value, NonTensorData | NonTensorStack):
            value = value.data
        row[name] = value
    return row
