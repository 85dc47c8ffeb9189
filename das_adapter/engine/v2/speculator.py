"""The history as a speculator of vLLM's V2 model runner: its drafts are made on the
device, behind the sampler, and the host goes on scheduling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from das_adapter.config import DasConfig
from das_adapter.core.policy import fixed_min_chance
from das_adapter.engine.controller import EngineController
from das_adapter.engine.plan import PlanInForce
from das_adapter.engine.timing import an_eighth_apart
from das_adapter.engine.v2.device_index import DeviceIndex
from das_adapter.engine.v2.survival import on_all_ranks


def keep_texts_on_device(states: Any) -> None:
    """Put the texts of a new `RequestState` in the device's own memory: vLLM up to 0.31
    keeps them in the host's, where the device reads them slowly; so do later ones
    beside a neural drafter.
    """
    texts = states.all_token_ids
    if hasattr(texts, "_uva_buf"):
        kind = type(texts)
        states.all_token_ids = kind(
            tuple(texts.gpu.shape),
            dtype=texts.dtype,
            device=texts.device,
        )


def looked_up_sizes(vllm_config: Any) -> list[int]:
    """Return the numbers of requests for which looking up drafts is captured as a CUDA
    graph.
    """
    most_requests = vllm_config.scheduler_config.max_num_seqs
    captured = vllm_config.compilation_config.cudagraph_capture_sizes or ()
    sizes = [size for size in captured if size <= most_requests]
    return an_eighth_apart(sizes)


class DeviceOffer:
    """What was drafted for the requests of a step, on its way to the host: it is there
    when the output of the next step is.
    """

    def __init__(self, index: DeviceIndex, requests: int) -> None:
        self.lengths = to_host(index.real[:requests])
        """Tokens of each draft, int32 [requests]."""
        self.chances = to_host(index.confidence[:requests])
        """Chance of each token, given those before it, float32 [requests, steps]."""
        self.by_model = torch.zeros(requests, dtype=torch.int64)
        """Tokens of a model's draft that stands in the place of that from the history;
        0: none does.
        """


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host, which is complete when a later copy of the same stream
    is.
    """
    return tensor.to("cpu", non_blocking=True, copy=True)


class HistorySpeculator(BaseSpeculator):
    """Drafts from the history. Has the attributes that vLLM's model runner asks of a
    speculator without weights.

    In a tensor-parallel engine the first rank drafts and sends its drafts to the
    others, which must read the same tokens whatever becomes of the history of one of
    them.
    """

    supports_mm_inputs = False
    draft_logits = None
    pcp_manager: Any = None

    def __init__(
        self,
        vllm_config: Any,
        device: torch.device,
        config: DasConfig,
    ) -> None:
        """`vllm_config`, `device`: as vLLM's `init_speculator` gets them."""
        slots = vllm_config.scheduler_config.max_num_seqs
        steps = vllm_config.speculative_config.num_speculative_tokens
        self._group = get_tp_group()
        self._config = config
        self._vocabulary = vllm_config.model_config.get_vocab_size()
        self.index: DeviceIndex | None = None
        """None: another rank drafts."""
        self._in_force = PlanInForce()
        self.offer: DeviceOffer | None = None
        """What was drafted in the present step; None: nothing was looked for."""
        self._drafts = torch.zeros(
            slots,
            steps,
            dtype=torch.int64,
            device=device,
        )
        self.draft_token_confidence_probs = torch.zeros(
            slots,
            steps,
            dtype=torch.float32,
            device=device,
        )
        """Chance of each draft token, given those before it, under vLLM's name; 0
        beyond a draft.
        """
        self.admits = False
        """Whether each request has its own number of draft tokens, so that all ranks
        rank the chances.
        """
        self._engine: EngineController | None = None
        self._capture_sizes = looked_up_sizes(vllm_config)

    def bind(
        self,
        states: Any,
        engine: EngineController | None,
        in_force: PlanInForce,
        failed: Callable[[Exception], None],
    ) -> None:
        """Draft for the requests of vLLM's `RequestState`, before memory is measured.

        Args:
            engine: what decides; None: another rank drafts.
            in_force: the plan of the present step.
            failed: is told why a step ends without drafts.
        """
        self._states = states
        self._in_force = in_force
        self._engine = engine
        self._failed = failed
        if self._group.world_size > 1:
            # the first one allocates buffers, which count as memory
            self._group.broadcast(self._drafts[:1], src=0)
        if engine is not None and engine.history is not None:
            _, steps = self._drafts.shape
            index = DeviceIndex(
                states.all_token_ids.gpu,
                steps,
                self._config.history.device_bytes // 4,
                fixed_min_chance(self._config.budget),
                self._vocabulary,
            )
            self.index = index
            self._drafts = index.drafts
            self.draft_token_confidence_probs = index.confidence

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Do nothing: a step is captured in `capture`."""

    def capture(self, *_: Any) -> None:
        """Capture a step for the batch sizes that vLLM has graphs of."""
        if self._engine is None or self.index is None:
            return
        if self.index.device.type != "cuda":
            return
        try:
            self.index.capture(self._capture_sizes)
        except Exception as error:
            self._engine.fail(error)

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        *inputs: Any,
        dummy_run: bool = False,
        **_: Any,
    ) -> torch.Tensor:
        """Draft for every request of the batch, int64 [requests, steps]; beyond a draft
        0, which the policy can read. See `BaseSpeculator.propose`.
        """
        drafts = self._drafts[: input_batch.num_reqs]
        if dummy_run:
            return drafts
        try:
            _, _, _, _, num_sampled = inputs[:5]
            self.draft(input_batch, num_sampled)
            self.share(input_batch.num_reqs)
        except Exception as error:
            if not on_all_ranks(error):
                raise
            self._failed(error)
            drafts.zero_()
        return drafts

    def draft(self, input_batch: Any, num_sampled: torch.Tensor) -> None:
        """Look up a draft for every request of the batch, on the rank that drafts."""
        self.offer = None
        requests = input_batch.num_reqs
        if self._engine is None or self.index is None or not self._in_force.looks_up:
            return
        if not self._engine.failed:
            try:
                self.index.draft(
                    input_batch.idx_mapping,
                    num_sampled,
                    self._states.total_len.gpu,
                )
                self.offer = DeviceOffer(self.index, requests)
            except Exception as error:
                self._engine.fail(error)
        if self._engine.failed:
            self._drafts[:requests].zero_()

    def put_better_drafts(
        self,
        drafts: torch.Tensor,
        tokens: int,
        model_chances: torch.Tensor,
    ) -> None:
        """Put a model's drafts, int64 [requests, steps], of which `tokens` count, and
        the chances of these, float32 [requests, steps], where those from the history
        are expected to bring less.
        """
        if self.offer is None:
            return
        requests = len(drafts)
        model_drafts = drafts[:, :tokens]
        history_drafts = self._drafts[:requests, :tokens]
        chances = self.draft_token_confidence_probs[:requests]
        _, steps = chances.shape
        model_chances = torch.nn.functional.pad(
            model_chances[:, :tokens],
            (0, steps - tokens),
        )
        planned_chances = chances[:, : self._in_force.num_draft_tokens]
        expected_of_history = planned_chances.cumprod(1).sum(1)
        expected_of_model = model_chances.cumprod(1).sum(1)
        by_model = expected_of_history < expected_of_model
        takes_model = by_model[:, None]
        torch.where(
            takes_model,
            model_drafts,
            history_drafts,
            out=history_drafts,
        )
        torch.where(
            takes_model,
            model_chances,
            chances,
            out=chances,
        )
        self.offer.by_model = to_host(by_model * tokens)

    def share(self, requests: int) -> torch.Tensor:
        """Send the drafts of a batch to the other ranks; return them, int64 [requests,
        steps].
        """
        drafts = self._drafts[:requests]
        if self._in_force.num_draft_tokens != 0 and self._group.world_size > 1:
            self._group.broadcast(drafts, src=0)
            if self.admits:
                chances = self.draft_token_confidence_probs[:requests]
                self._group.broadcast(chances, src=0)
        return drafts
