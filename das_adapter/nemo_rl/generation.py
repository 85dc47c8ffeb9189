"""NeMo-RL's `VllmGeneration` with identity, length-aware dispatch and das-adapter's
figures.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections.abc import AsyncGenerator
from contextvars import ContextVar
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict, SlicedDataDict
from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration

from das_adapter.core import routing, tuning
from das_adapter.core.length import ExpectedLengths
from das_adapter.nemo_rl import settings
from das_adapter.nemo_rl.checkpoint import save_history
from das_adapter.nemo_rl.run_ahead import NemoRunAhead
from das_adapter.nemo_rl.settings import LABELS, media_of
from das_adapter.protocol.label import Labeller
from das_adapter.protocol.metrics import figures
from das_adapter.service import ledger
from das_adapter.service.session import PATIENCE_S

logger = logging.getLogger("das_adapter")

_LENGTHS_TIMEOUT_S = 10.0
"""How long a batch waits for the ledger's lengths."""
_ANSWER_S = PATIENCE_S + 10.0
"""How long workers have to answer; one waits `PATIENCE_S` for its engine."""
_SLOTS = 256
"""Requests that a worker runs at once where its config does not say: vLLM's smallest
default.
"""

_shard: ContextVar[int | None] = ContextVar("das_shard", default=None)
"""The worker of the current request; None: NeMo-RL chooses it."""
_counting = threading.Lock()
"""Held while requests are labelled and placed: NeMo-RL's collector generates each batch
in a thread of its own.
"""
Batch: TypeAlias = BatchedDataDict[Any]
"""A batch of NeMo-RL's: tensors and lists by name, with equally many rows."""
generations: weakref.WeakSet[DasVllmGeneration] = weakref.WeakSet()
"""The generations of this process."""


class DasVllmGeneration(VllmGeneration):
    """NeMo-RL's generation; stock without an active `das:` block. It is pickled into
    NeMo-RL's trajectory collector.
    """

    run_ahead: NemoRunAhead | None = None
    """What looks ahead in a run; None: nothing does."""

    def __init__(self, cluster: Any, config: Any, *args: Any, **kwargs: Any):
        self.das = settings.check(config)
        if self.das is not None:
            ledger.ledger()
            resumed_step = config.get(settings.STEP, 0)
            self._labeller = Labeller(self.das.verify.seed, resumed=resumed_step)
            self._validating = False
            self._warned: set[str] = set()
            """Warnings that were given and are not repeated."""
            self._expected_until = 0.0
            """Until when the expected lengths are used, by the monotonic clock."""
            self._longest_first = self.das.routing == "longest_first"
            self._siblings = self._longest_first and self.das.shares_history
            vllm_kwargs = config.get("vllm_kwargs") or {}
            self._slots = vllm_kwargs.get("max_num_seqs") or _SLOTS
            self._turns: list[routing.Turn] = []
            """Turns of a synchronous engine's last batch. NeMo-RL asks for each turn of
            all trajectories in one batch.
            """
        super().__init__(cluster, config, *args, **kwargs)
        if self.das is not None:
            self._replicas = routing.Replicas(
                range(self.dp_size),
                siblings=self._siblings,
                group=config.get(settings.SAMPLES, 1),
                slots=self._slots,
            )
        generations.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Arrive in another process, such as NeMo-RL's single controller, which writes
        checkpoints itself.
        """
        self.__dict__.update(state)
        save_history.try_apply()

    def generate(self, data: Batch, greedy: bool = False) -> Batch:
        """Generate a batch; the result's rows are in the batch's order, whatever order
        they were generated in.
        """
        if self.das is None or not len(data["input_ids"]):
            return super().generate(data, greedy=greedy)
        data = self._labelled(data)
        last_turns = self._turns
        self._turns = []
        if self._host_divides(data):
            return super().generate(data, greedy=greedy)
        problems = [label.problem for label in data[LABELS]]
        prompts = _texts(data["input_ids"], data["input_lengths"])
        rows_by_worker = routing.distribute_batch(
            problems,
            expected=self._update_lengths(),
            workers=self.dp_size,
            siblings=self._siblings,
            slots=self._slots,
            begun=routing.match_next_turns(last_turns, problems, prompts),
        )
        batch = PlannedBatch(data, rows_by_worker)
        result = super().generate(batch, greedy=greedy)
        result = _restore_order(result, rows_by_worker)
        texts = _texts(result["output_ids"], result["unpadded_sequence_lengths"])
        for worker, rows in enumerate(rows_by_worker):
            for row in rows:
                turn = routing.Turn(
                    problem=problems[row],
                    prompt=len(prompts[row]),
                    text=texts[row],
                    worker=worker,
                )
                self._turns.append(turn)
        return result

    async def generate_async(
        self, data: Batch, greedy: bool = False
    ) -> AsyncGenerator[tuple[int, Batch], None]:
        """Generate one sample on the worker that `routing` chooses, or NeMo-RL's fleet
        health where it is on.
        """
        is_empty = not len(data["input_ids"])
        if self.das is not None and not is_empty:
            data = self._labelled(data)
        if is_empty or self._host_routes():
            async for result in super().generate_async(data, greedy=greedy):
                yield result
            return
        label = data[LABELS][0]
        if self.run_ahead is not None and not self._validating:
            data[LABELS] = [self.run_ahead.begin_request(label)]
        if time.monotonic() > self._expected_until:
            self._expected_until = time.monotonic() + tuning.LENGTHS_FOR_S
            await asyncio.to_thread(self._update_lengths)
        # a group stays together; else each sample is placed by itself
        is_of_group = self._longest_first and label.record
        group = None if is_of_group else 1
        with _counting:
            shard = self._replicas.pick(label.problem, group)
        _shard.set(shard)
        try:
            async for result in super().generate_async(data, greedy=greedy):
                yield result
        finally:
            with _counting:
                self._replicas.remove_request(shard, label.problem)

    def attach_fleet_health(self, monitor: Any, selector: Any) -> None:
        """Have NeMo-RL's fleet health choose the workers of single samples, among those
        that it takes to serve.
        """
        super().attach_fleet_health(monitor, selector)
        if self.das is not None and self.das.routing != "host":
            logger.warning(
                "das: routing=%r chooses no workers: async_rl.generation_fleet_health"
                " does",
                self.das.routing,
            )

    def get_step_metrics(self) -> dict[str, float]:
        """Return NeMo-RL's own figures of a step (`vllm/spec_*`) and das-adapter's
        (`das/*`).
        """
        metrics: dict[str, float] = super().get_step_metrics()
        if self.das is None:
            return metrics
        reports = []
        for worker_reports in self._on_replicas("das_report"):
            for report in worker_reports:
                if "request_forwards" in report:
                    reports.append(report)
        ours: dict[str, float] = {}
        for name, value in figures(reports, self._warned).items():
            if name.startswith("das/"):
                ours[name] = value
        if reports:
            version = max(report["weight_version"] for report in reports)
            ours["das/weight_version"] = float(version)
        if self.run_ahead is not None:
            self.run_ahead.coming.repeated = ours.get("das/run_ahead_repeated")
        return {**metrics, **ours}

    def lend(self, num_slots: int) -> list[int]:
        """Lend at most so many slots of workers for what is written ahead (see
        `Replicas.lend`); a validation lends none.
        """
        with _counting:
            self._replicas.turns = self._labeller.has_later_turns
            if self._validating:
                return []
            return self._replicas.lend(num_slots)

    def give_back(self, shard: int) -> None:
        """Take back a slot that was lent."""
        with _counting:
            self._replicas.give_back(shard)

    def labeller(self) -> Labeller:
        """Return a copy of the labeller, which labels the requests to come as they will
        be.
        """
        with _counting:
            return self._labeller.copy()

    def set_validating(self, on: bool, alone: bool = False) -> None:
        """Mark requests from now on as a validation's, whose text stays out of the
        history; off: no longer.

        A worker that does not answer in time takes requests without a label, from
        NeMo-Gym, for what they were before.

        Args:
            on: whether a validation begins, or ends.
            alone: whether no training request comes meanwhile. A rollout actor labels
                its requests with a copy of this that knows of no validation; they are
                a validation's all the same.
        """
        if self.das is not None:
            self._validating = on
            self._on_replicas("das_validation", on=on, alone=alone)

    def _labelled(self, data: Batch) -> Batch:
        """Return a batch with the column `LABELS`."""
        prompts = _texts(data["input_ids"], data["input_lengths"])
        media = media_of(data, len(prompts))
        labels = []
        with _counting:
            for prompt, hashes in zip(prompts, media, strict=True):
                label = self._labeller.label(prompt, self._validating, hashes)
                labels.append(label)
        labelled = type(data)(data.data)
        labelled[LABELS] = labels
        return labelled

    def _host_routes(self) -> bool:
        """Return whether NeMo-RL chooses the workers of single samples."""
        if self.das is None or self.das.routing == "host":
            return True
        return self.fleet_selector is not None

    def _host_divides(self, data: Batch) -> bool:
        """Return whether NeMo-RL divides a batch among the workers; where the block
        says otherwise, say once why.
        """
        assert self.das is not None
        if self.das.routing == "host":
            return True
        stop_strings = data.get("stop_strings") or ()
        different_stops = {frozenset(stops or ()) for stops in stop_strings}
        if self.vllm_dp_size > 1:
            # a rank without rows would keep the others waiting
            why = "workers share experts and step together"
        elif len(different_stops) > 1:
            # NeMo-RL's synchronous worker ends its responses at those of all its rows:
            # tokens depend on which it has
            why = "the rows of a batch differ in their stop strings"
        else:
            return False
        if why not in self._warned:
            self._warned.add(why)
            logger.warning(
                "das: %s: NeMo-RL divides such batches itself, not routing=%r",
                why,
                self.das.routing,
            )
        return True

    def _update_lengths(self) -> ExpectedLengths:
        """Ask the ledger for expected lengths where routing uses them; return those
        that are known.
        """
        if self._longest_first:
            expected = ledger.expected_lengths(timeout_s=_LENGTHS_TIMEOUT_S)
            if expected is not None:
                self._replicas.expected = expected
        return self._replicas.expected

    def _next_dp_shard_idx(self) -> int:
        """Return the worker of the current request, where NeMo-RL asks for it."""
        chosen = _shard.get()
        if chosen is None:
            return super()._next_dp_shard_idx()
        return chosen

    def _on_replicas(self, method: str, **kwargs: Any) -> list[Any]:
        """Call a method of every worker; one that does not answer in time is left out,
        with a line in the log.
        """
        calls = self.worker_group.run_all_workers_single_data(
            method,
            run_rank_0_only_axes=["tensor_parallel", "pipeline_parallel"],
            **kwargs,
        )
        return ledger.wait_for_answers(calls, _ANSWER_S, method)


def _texts(ids: torch.Tensor, lengths: torch.Tensor) -> list[npt.NDArray[np.int64]]:
    """Return the token ids of each row without padding, as views."""
    texts = []
    for row, num_tokens in zip(ids, lengths.tolist(), strict=True):
        texts.append(row[:num_tokens].numpy())
    return texts


def _restore_order(result: Batch, rows_by_worker: list[list[int]]) -> Batch:
    """Return the result of a planned batch with its rows in the batch's order.

    With rows [2, 0] on one worker and [1] on another, the result has the rows 2, 0, 1;
    its places 1, 2, 0 are those of the rows 0, 1, 2.
    """
    generated_order = []
    for rows in rows_by_worker:
        generated_order += rows
    places = torch.argsort(torch.tensor(generated_order))
    return result.select_indices(places)


class PlannedBatch(BatchedDataDict[Any]):
    """A batch that is distributed by a plan instead of in equal pieces."""

    def __init__(self, data: Batch, rows_by_worker: list[list[int]]):
        super().__init__(data.data)
        self._rows_by_worker = rows_by_worker
        self._whole = data

    def shard_by_batch_size(
        self, shards: int, *args: Any, **kwargs: Any
    ) -> list[SlicedDataDict]:
        """Return the rows of each worker."""
        assert shards == len(self._rows_by_worker)
        # no rows can be selected of images' tensors
        no_rows = {"input_ids": self._whole["input_ids"][:0]}
        pieces = []
        for rows in self._rows_by_worker:
            if rows:
                columns = self._whole.select_indices(rows).data
            else:
                columns = no_rows
            pieces.append(SlicedDataDict(columns))
        return pieces
