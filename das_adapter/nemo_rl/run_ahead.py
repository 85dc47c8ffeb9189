"""Run-ahead in NeMo-RL: idle workers write what the requests of the next steps will
begin with.

The driver of a synchronous run has all that is needed: the data loader, the labeller
that will give the requests their seeds, and the count of what each worker has. What is
written stays in the driver, and travels with the request when it comes.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

from das_adapter.nemo_rl.settings import LABELS, MEDIA
from das_adapter.protocol.label import Label, Labeller
from das_adapter.service.run_ahead import (
    AheadSample,
    AheadWriter,
    LookAhead,
    UpcomingBatches,
    new_step_texts,
    pop_text,
)

logger = logging.getLogger("das_adapter")


@dataclass(eq=False, kw_only=True)
class NemoJob(AheadSample):
    """A sample of one of the next steps."""

    prompt: torch.Tensor
    """Token ids, int64 [tokens]."""
    stop_strings: Any
    """Stop strings as NeMo-RL sends them with a request; None: it has none."""
    label: Label
    """The label of its first request."""


class NemoRunAhead:
    """Looks at the batches that come, and lets idle workers write ahead. It does so on
    a thread and an event loop of its own: NeMo-RL's lasts for one rollout.
    """

    def __init__(
        self, generation: Any, batches: LookAhead, config: Any, trained_steps: int
    ) -> None:
        """Start the thread.

        Args:
            generation: the run's `DasVllmGeneration`.
            batches: the run's data loader.
            config: the run's config.
            trained_steps: training steps before this run.
        """
        self._generation = generation
        self._batches = batches
        self._trained_steps = trained_steps
        self._num_samples = config.grpo.num_generations_per_prompt
        self._last_step = config.grpo.max_num_steps
        self._step = 0
        """The step that goes on."""
        self.coming = UpcomingBatches(batches)
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(
            target=self._loop.run_forever,
            name="das run-ahead",
            daemon=True,
        )
        thread.start()
        self._writing = AheadWriter(self._lend, generation.give_back, self._write)

    def begin_request(self, label: Label) -> Label:
        """Let a request begin, on NeMo-RL's event loop; return its label with what was
        written ahead of it. The first request of a step has the next batches looked at
        as soon as all that begin with it are on their way.
        """
        step = self._trained_steps + self._batches.taken
        if step > self._step:
            self._step = step
            self._loop.call_soon_threadsafe(self._writing.stop, step)
            asyncio.get_running_loop().call_soon(self._add_next_batches)
        written_ahead = pop_text(label.seed)
        return replace(label, ahead=written_ahead)

    def close(self) -> None:
        """Begin nothing more."""
        self._generation.run_ahead = None
        self._loop.call_soon_threadsafe(self._writing.stop, self._last_step)

    def _add_next_batches(self) -> None:
        """Have the next batches written ahead; an error ends nothing but run-ahead."""
        try:
            labeller = self._generation.labeller()
            shown = self.coming.show(self._step, self._last_step)
            for step, batch, is_new in shown:
                # a batch that is not new is labelled again, for the seeds behind it
                texts = new_step_texts() if is_new else {}
                jobs = make_jobs(batch, self._num_samples, labeller, texts)
                if is_new:
                    self._loop.call_soon_threadsafe(self._writing.add, step, jobs)
        except Exception:
            logger.exception(
                "das: no responses are written ahead any more; the run goes on"
            )
            self.close()

    async def _lend(self, num_slots: int) -> Sequence[int]:
        return self._generation.lend(num_slots)

    async def _write(self, job: NemoJob, worker: int) -> None:
        """Let a worker go on with the response of a job."""
        text = torch.tensor(job.text, dtype=torch.long)
        tokens_so_far = torch.cat([job.prompt, text])
        label = replace(job.label, record=False, start=len(job.prompt))
        data = BatchedDataDict(
            {
                "input_ids": tokens_so_far[None],
                "input_lengths": torch.tensor([len(tokens_so_far)]),
                LABELS: [label],
            }
        )
        data["stop_strings"] = [job.stop_strings]
        group = self._generation.worker_group
        leader = group.get_dp_leader_worker_idx(worker)
        tokens, ended = await group.run_single_worker_single_data(
            "das_write_ahead", leader, data=data
        )
        job.add(label.seed, tokens, ended)


def make_jobs(
    batch: Any, num_samples: int, labeller: Labeller, texts: dict[int, array[int]]
) -> list[NemoJob]:
    """Return the samples of a batch: the first sample of each row, then the second of
    each, and so on. A row with images, sound or video has none.

    Args:
        batch: a batch of NeMo-RL's data loader.
        num_samples: samples of a row.
        labeller: gives the labels that their first requests will have.
        texts: where the texts of the step go.
    """
    logs = batch["message_log"]
    stop_strings = batch.get("stop_strings") or [None] * len(logs)
    jobs_by_row: list[list[NemoJob]] = []
    for row, log in enumerate(logs):
        if _has_media(batch, row):
            continue
        turns = [message["token_ids"] for message in log]
        prompt = torch.cat(turns)
        jobs = []
        for _ in range(num_samples):
            label = labeller.label(prompt.numpy(), validate=False)
            job = NemoJob(
                texts=texts,
                prompt=prompt,
                stop_strings=stop_strings[row],
                label=label,
            )
            jobs.append(job)
        jobs_by_row.append(jobs)
    ordered: list[NemoJob] = []
    for jobs_of_sample in zip(*jobs_by_row, strict=True):
        ordered.extend(jobs_of_sample)
    return ordered


def _has_media(batch: Any, row: int) -> bool:
    return any(name in batch and batch[name][row] for name in MEDIA)
