"""NeMo-RL's `VllmGeneration` with identity, length-aware dispatch and das-adapter's
figures.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
import weakref
from collections.abc import AsyncGenerator
from contextvars import ContextVar
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict, SlicedDataDict
from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration

from das_adapter.core import routing
from das_adapter.core.length import ExpectedLengths
from das_adapter.nemo_rl import settings
from das_adapter.nemo_rl.ahead import Ahead
from das_adapter.nemo_rl.checkpoint import save_history
from das_adapter.nemo_rl.settings import LABELS, media_of
from das_adapter.protocol.label import Labeller
from das_adapter.protocol.metrics import figures
from das_adapter.service import ledger
from das_adapter.service.session import PATIENCE_S

logger = logging.getLogger("das_adapter")

_LENGTHS_FOR_S = 10.0
"""How long an asynchronous run uses the same expected lengths."""
_ANSWER_S = PATIENCE_S + 10.0
"""How long workers have to answer; one waits `PATIENCE_S` for its engine."""
_SLOTS = 256
"""Requests that a worker runs at once where its config does not say: vLLM's smallest
default.
"""

_shard: ContextVar[int | None] = ContextVar("das_shard", default=None)
_counting = threading.Lock()
"""Held while requests are labelled and placed: NeMo-RL's collector generates each batch
in a thread of its own.
"""
live: weakref.WeakSet[DasVllmGeneration] = weakref.WeakSet()
"""The generations of this process."""


class DasVllmGeneration(VllmGeneration):
    """NeMo-RL's generation; stock without an active `das:` block. It is pickled into
    NeMo-RL's trajectory collector.
    """

    ahead: Ahead | None = None
    """Where a run is looked ahead in."""

    def __init__(self, cluster: Any, config: Any, *args: Any, **kwargs: Any):
        self.das = settings.check(config)
        if self.das is not None:
            ledger.ledger()
            self._labeller = Labeller(
                self.das.verify.seed, resumed=config.get(settings.STEP, 0)
            )
            self._validating = False
            self._told: set[str] = set()
            self._expected_until = 0.0
            self._longest_first = self.das.routing == "longest_first"
            self._siblings = self._longest_first and self.das.shares_history
            self._slots = (config.get("vllm_kwargs") or {}).get(
                "max_num_seqs"
            ) or _SLOTS
            self._turns: list[routing.Turn] = []
            """Of a synchronous engine's last batch. NeMo-RL asks for each turn of all
            trajectories in one batch.
            """
        super().__init__(cluster, config, *args, **kwargs)
        if self.das is not None:
            group = config.get(settings.SAMPLES, 1)
            self._replicas = routing.Replicas(
                range(self.dp_size), self._siblings, group, self._slots
            )
        live.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Arrive in another process, such as NeMo-RL's single controller, which writes
        checkpoints itself.
        """
        self.__dict__.update(state)
        save_history.try_apply()

    def generate(
        self, data: BatchedDataDict[Any], greedy: bool = False
    ) -> BatchedDataDict[Any]:
        """Generate a batch; the result's rows are in the batch's order, whatever order
        they were generated in.
        """
        if self.das is None or not len(data["input_ids"]):
            return super().generate(data, greedy=greedy)
        data = self._labelled(data)
        before = self._turns
        self._turns = []
        if self._host_divides(data):
            return super().generate(data, greedy=greedy)
        problems = [label.problem for label in data[LABELS]]
        prompts = _texts(data["input_ids"], data["input_lengths"])
        begun = routing.match_next_turns(before, problems, prompts)
        plan = routing.distribute_batch(
            problems, self._predict(), self.dp_size, self._siblings, self._slots, begun
        )
        result = super().generate(Planned(data, plan), greedy=greedy)
        result = result.select_indices(
            torch.argsort(torch.tensor([row for rows in plan for row in rows]))
        )
        texts = _texts(result["output_ids"], result["unpadded_sequence_lengths"])
        self._turns = [
            routing.Turn(problems[row], len(prompts[row]), texts[row], worker)
            for worker, rows in enumerate(plan)
            for row in rows
        ]
        return result

    async def generate_async(
        self, data: BatchedDataDict[Any], greedy: bool = False
    ) -> AsyncGenerator[tuple[int, BatchedDataDict[Any]], None]:
        """Generate one sample on the worker that `routing` chooses, or NeMo-RL's fleet
        health where it is on.
        """
        if self.das is not None and len(data["input_ids"]):
            data = self._labelled(data)
        stock = (
            self.das is None
            or self.das.routing == "host"
            or self.fleet_selector is not None
        )
        if stock or not len(data["input_ids"]):
            async for result in super().generate_async(data, greedy=greedy):
                yield result
            return
        label = data[LABELS][0]
        if self.ahead is not None and not self._validating:
            data[LABELS] = [self.ahead.begin(label)]
        if time.monotonic() > self._expected_until:
            self._expected_until = time.monotonic() + _LENGTHS_FOR_S
            await asyncio.to_thread(self._predict)
        group = None if self._longest_first and label.record else 1
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
        answers = itertools.chain.from_iterable(self._on_replicas("das_report"))
        reports = [report for report in answers if "request_forwards" in report]
        ours = {
            name: value
            for name, value in figures(reports, self._told).items()
            if name.startswith("das/")
        }
        if reports:
            ours["das/weight_version"] = float(
                max(r["weight_version"] for r in reports)
            )
        if self.ahead is not None:
            self.ahead.coming.repeated = ours.get("das/run_ahead_repeated")
        return {**metrics, **ours}

    def lend(self, most: int) -> list[int]:
        """Lend at most so many slots of workers for what is written ahead (see
        `Replicas.lend`); a validation lends none.
        """
        with _counting:
            self._replicas.turns = self._labeller.turns
            return [] if self._validating else self._replicas.lend(most)

    def give_back(self, shard: int) -> None:
        """Take back a slot that was lent."""
        with _counting:
            self._replicas.give_back(shard)

    def labeller(self) -> Labeller:
        """Return one that labels the requests to come as they will be."""
        with _counting:
            return self._labeller.copy()

    def set_validating(self, on: bool, alone: bool = False) -> None:
        """Mark requests from now on as a validation's, whose text stays out of the
        history; off: no longer. A worker that does not answer in time takes requests
        without a label, from NeMo-Gym, for what they were before; `alone`: and those of
        a rollout actor, which labels them with a copy of this that knows of no
        validation.
        """
        if self.das is not None:
            self._validating = on
            self._on_replicas("das_validation", on=on, alone=alone)

    def _labelled(self, data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        prompts = _texts(data["input_ids"], data["input_lengths"])
        labelled = type(data)(data.data)
        media = media_of(data, len(data["input_ids"]))
        with _counting:
            labelled[LABELS] = [
                self._labeller.label(prompt, self._validating, images)
                for prompt, images in zip(prompts, media, strict=True)
            ]
        return labelled

    def _host_divides(self, data: BatchedDataDict[Any]) -> bool:
        """Return whether NeMo-RL divides a batch among the workers; where the block
        says otherwise, say once why.
        """
        assert self.das is not None
        if self.das.routing == "host":
            return True
        why = None
        if self.vllm_dp_size > 1:  # ranks that would wait for one without rows
            why = "workers share experts and step together"
        elif (
            len({frozenset(stops or ()) for stops in data.get("stop_strings") or ()})
            > 1
        ):
            # NeMo-RL's synchronous worker ends its responses at those of all its rows:
            # tokens depend on which it has.
            why = "the rows of a batch differ in their stop strings"
        if why and why not in self._told:
            self._told.add(why)
            logger.warning(
                "das: %s: NeMo-RL divides such batches itself, not routing=%r",
                why,
                self.das.routing,
            )
        return why is not None

    def _predict(self) -> ExpectedLengths:
        if self._longest_first:
            self._replicas.expected = (
                ledger.expected(timeout=10) or self._replicas.expected
            )
        return self._replicas.expected

    def _next_dp_shard_idx(self) -> int:
        chosen = _shard.get()
        return super()._next_dp_shard_idx() if chosen is None else chosen

    def _on_replicas(self, method: str, **kwargs: Any) -> list[Any]:
        """Call a method of every worker; one that does not answer in time is left out,
        with a line in the log.
        """
        calls = self.worker_group.run_all_workers_single_data(
            method,
            run_rank_0_only_axes=["tensor_parallel", "pipeline_parallel"],
            **kwargs,
        )
        return ledger.answers(calls, _ANSWER_S, method)


def _texts(ids: torch.Tensor, lengths: torch.Tensor) -> list[npt.NDArray[np.int64]]:
    """Return the token ids of each row without padding; they are views."""
    return [row[:n].numpy() for row, n in zip(ids, lengths.tolist(), strict=True)]


class Planned(BatchedDataDict[Any]):
    """A batch that is distributed by a plan instead of in equal pieces."""

    def __init__(self, data: BatchedDataDict[Any], plan: list[list[int]]):
        super().__init__(data.data)
        self._plan = plan
        self._whole = data

    def shard_by_batch_size(
        self, shards: int, *args: Any, **kwargs: Any
    ) -> list[SlicedDataDict]:
        assert shards == len(self._plan)
        # no rows can be selected of images' tensors
        nothing = {"input_ids": self._whole["input_ids"][:0]}
        return [
            SlicedDataDict(self._whole.select_indices(rows).data if rows else nothing)
            for rows in self._plan
        ]
