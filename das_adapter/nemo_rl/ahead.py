"""Run-ahead in NeMo-RL: workers that have nothing left write what the requests of the
next steps will begin with.

The driver of a synchronous run has all that is needed: the data loader, the labeller
that will give the requests their seeds, and the count of what each worker has. What is
written stays in it, and travels with the request when it comes.
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
    """As NeMo-RL sends them with a request; None: it has none."""
    label: Label
    """That of its first request."""


class Ahead:
    """Looks at the batches that come, and lets idle workers write ahead. It does so on
    a thread and an event loop of its own: NeMo-RL's lasts for one rollout.
    """

    def __init__(
        self, generation: Any, batches: LookAhead, config: Any, trained: int
    ) -> None:
        """`generation`: `DasVllmGeneration`; `config`: of the run; `trained`: its steps
        before this one.
        """
        self._generation = generation
        self._batches = batches
        self._trained = trained
        self._samples = config.grpo.num_generations_per_prompt
        self._last = config.grpo.max_num_steps
        self.coming = UpcomingBatches(batches)
        self._step = 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(
            target=self._loop.run_forever, name="das run-ahead", daemon=True
        ).start()
        self._writing = AheadWriter(self._lend, generation.give_back, self._write)

    def begin(self, label: Label) -> Label:
        """Let a request begin, on NeMo-RL's event loop; return its label with what was
        written ahead of it. The first one of a step has the next batches looked at, as
        soon as all that begin with it are on their way.
        """
        step = self._trained + self._batches.taken
        if step > self._step:
            self._step = step
            self._loop.call_soon_threadsafe(self._writing.stop, step)
            asyncio.get_running_loop().call_soon(self._show)
        return replace(label, ahead=pop_text(label.seed))

    def close(self) -> None:
        """Begin nothing more."""
        self._generation.ahead = None
        self._loop.call_soon_threadsafe(self._writing.stop, self._last)

    def _show(self) -> None:
        """Take the batches that come; an error ends nothing but run-ahead."""
        try:
            labeller = self._generation.labeller()
            for step, batch, new in self.coming.show(self._step, self._last):
                jobs = jobs_of(
                    batch, self._samples, labeller, new_step_texts() if new else {}
                )
                if new:
                    self._loop.call_soon_threadsafe(self._writing.add, step, jobs)
        except Exception:
            logger.exception(
                "das: no responses are written ahead any more; the run goes on"
            )
            self.close()

    async def _lend(self, most: int) -> Sequence[int]:
        return self._generation.lend(most)

    async def _write(self, job: NemoJob, worker: int) -> None:
        ids = torch.cat([job.prompt, torch.tensor(job.text, dtype=torch.long)])[None]
        label = replace(job.label, record=False, start=len(job.prompt))
        data = BatchedDataDict(
            {
                "input_ids": ids,
                "input_lengths": torch.tensor([ids.shape[1]]),
                LABELS: [label],
            }
        )
        data["stop_strings"] = [job.stop_strings]
        group = self._generation.worker_group
        leader = group.get_dp_leader_worker_idx(worker)
        job.add(
            label.seed,
            *await group.run_single_worker_single_data(
                "das_write_ahead", leader, data=data
            ),
        )


def jobs_of(
    batch: Any, samples: int, labeller: Labeller, texts: dict[int, array[int]]
) -> list[NemoJob]:
    """Return the samples of a batch of NeMo-RL's data loader, the first of all rows in
    front, with the labels that their first requests get from a labeller; none of a row
    with images, sound or video. `texts`: of the step.
    """
    jobs = []
    logs = batch["message_log"]
    stops = batch.get("stop_strings") or [None] * len(logs)
    for log, stop, *media in zip(
        logs, stops, *(batch[name] for name in MEDIA if name in batch), strict=True
    ):
        if any(media):
            continue
        prompt = torch.cat([message["token_ids"] for message in log])
        labels = [
            labeller.label(prompt.numpy(), validate=False) for _ in range(samples)
        ]
        jobs.append(
            [
                NemoJob(texts=texts, prompt=prompt, stop_strings=stop, label=label)
                for label in labels
            ]
        )
    return [job for of_rows in zip(*jobs, strict=True) for job in of_rows]
