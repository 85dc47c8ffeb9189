"""The history as a speculator of vLLM's V2 model runner: its drafts are made on the device, behind the sampler, and the
host goes on scheduling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from das_adapter.config import DasConfig
from das_adapter.core.controller import LEAST_CHANCE
from das_adapter.engine.v2.device_index import DeviceIndex

LOOK_STEPS = 16
"""Steps without drafts after which one looks what there is to draft."""


def min_chance(config: DasConfig) -> float:
    """Return the chance under which a draft ends on the device. All ranks draft alike, so it never changes."""
    policy = config.budget.policy
    return LEAST_CHANCE if policy == "optimal" else 0.0 if policy == "unlimited" else config.budget.min_chance


class Offer:
    """What was drafted for the requests of a step, on its way to the host."""

    def __init__(self, index: DeviceIndex, requests: int, streams: tuple[Any, Any] | None) -> None:
        """
        Args:
            index: has just drafted.
            requests: of the batch.
            streams: on which it drafted, and on which the copy goes; None: on a CPU.
        """
        self.event: Any = None
        if streams is None:
            self._real, self._confidence = index.real[:requests].clone(), index.confidence[:requests].clone()
            return
        main, copy = streams
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copy.wait_stream(main)
        with torch.cuda.stream(copy):
            self._real = index.real[:requests].to("cpu", non_blocking=True)
            self._confidence = index.confidence[:requests].to("cpu", non_blocking=True)
            self.event.record(copy)

    @property
    def arrived(self) -> bool:
        """Whether it can be read without waiting."""
        return self.event is None or self.event.query()

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the drafts' lengths, int64 [requests], and the chance of each token to be reached and accepted,
        float32 [requests, steps]."""
        return self._real.numpy().astype(np.int64), np.cumprod(self._confidence.numpy(), axis=1)


class HistorySpeculator(BaseSpeculator):
    """Drafts from the history. Has the attributes that vLLM's model runner asks of a speculator without weights.

    In a tensor-parallel engine the first rank drafts and sends its drafts to the others, which must read the same
    tokens whatever becomes of the history of one of them.
    """

    supports_mm_inputs = False
    draft_logits = None
    pcp_manager: Any = None

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any, config: DasConfig) -> None:
        """
        Args:
            vllm_config, device, req_states: as vLLM's `init_speculator` gets them.
            config: the block.
        """
        slots, steps = vllm_config.scheduler_config.max_num_seqs, vllm_config.speculative_config.num_speculative_tokens
        self._group = get_tp_group()
        self._states = req_states
        self.index: DeviceIndex | None = None
        """None: another rank drafts."""
        if self._group.rank_in_group == 0:
            self.index = DeviceIndex(
                req_states.all_token_ids.gpu,
                steps,
                config.history.device_bytes // 4,
                min_chance(config),
                vllm_config.model_config.get_vocab_size(),
                copy=lambda array, tensor: async_tensor_h2d(array, out=tensor),
            )
        self._drafts = self.index.drafts if self.index else torch.zeros(slots, steps, dtype=torch.int64, device=device)
        self.draft_token_confidence_probs = (
            self.index.confidence if self.index else torch.zeros(slots, steps, dtype=torch.float32, device=device)
        )
        self.enable_adaptive_verification = config.budget.admission == "request"
        self.on_failure: Callable[[Exception], None] | None = None
        """Told why drafting failed; it drafts no more until `resume`."""
        self.streams: tuple[Any, Any] | None = None
        """Streams of the model runner: where it computes, and where it copies outputs."""
        self._failed = False
        self._offer: Offer | None = None
        self._copied: Any = None
        self._idle = -1
        self._capture_sizes = [s for s in vllm_config.compilation_config.cudagraph_capture_sizes or [] if s <= slots]

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Nothing to prepare: a step is captured in `capture`."""

    def capture(self, *_: Any) -> None:
        """Capture a step for the batch sizes that vLLM has graphs of."""
        if self.index is not None and self.index.device.type == "cuda":
            try:
                self.index.capture(self._capture_sizes)
            except Exception as error:
                self.fail(error)

    def take_offer(self) -> Offer | None:
        """Return what was drafted in this step, once; None: nothing was looked for."""
        offer, self._offer = self._offer, None
        return offer

    def fail(self, error: Exception) -> None:
        """Draft no more until `resume`."""
        self._failed = True
        if self.on_failure:
            self.on_failure(error)

    def resume(self) -> None:
        """Draft again, after a weight sync."""
        self._failed = False

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,
        *_: Any,
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **__: Any,
    ) -> torch.Tensor:
        """Draft for every request of the batch; see `BaseSpeculator.propose`.

        Returns:
            int64 [requests, steps]; beyond a draft the request's last token, which the policy can read.
        """
        drafts = self._drafts[: input_batch.num_reqs]
        if dummy_run:
            return drafts
        if self.index is not None:
            try:
                self._draft(input_batch, num_sampled, num_speculative_tokens)
            except Exception as error:
                self.fail(error)
            if self._failed:
                drafts.zero_()
        if num_speculative_tokens != 0 and self._group.world_size > 1:
            self._group.broadcast(drafts, src=0)
        return drafts

    def _draft(self, input_batch: Any, num_sampled: torch.Tensor, wanted: int | None) -> None:
        self._idle = self._idle + 1 if wanted == 0 else 0
        if self._failed or self.index is None or self._idle % LOOK_STEPS:
            return
        if self._copied is not None and self.streams is not None:
            self.streams[0].wait_event(self._copied)  # on the device: what is being copied is written again
        self.index.draft(input_batch.idx_mapping, num_sampled, self._states.total_len.gpu)
        self._offer = Offer(self.index, input_batch.num_reqs, self.streams)
        self._copied = self._offer.event
