"""The history as a speculator of vLLM's V2 model runner: its drafts are made on the device, behind the sampler, and the
host goes on scheduling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from das_adapter.config import DasConfig
from das_adapter.core.controller import least_chance
from das_adapter.engine.v2.device_index import DeviceIndex

LOOK_STEPS = 16
"""Steps without drafts after which one looks what there is to draft; the first looks come after 1, 2, 4 and 8."""


def looks(idle: int) -> bool:
    """Say whether one looks what there is to draft after so many steps without drafts."""
    return idle % LOOK_STEPS == 0 or idle & (idle - 1) == 0


def keep_texts_on_device(states: Any) -> None:
    """Put the texts of a new `RequestState` in the device's own memory: vLLM 0.31 keeps them in the host's, where the
    device reads them slowly; so do later ones beside a neural drafter."""
    texts = states.all_token_ids
    if hasattr(texts, "_uva_buf"):
        states.all_token_ids = type(texts)(tuple(texts.gpu.shape), dtype=texts.dtype, device=texts.device)


class Offer:
    """What was drafted for the requests of a step, on its way to the host."""

    def __init__(self, index: DeviceIndex, requests: int, streams: tuple[Any, Any] | None) -> None:
        """`streams`: on which the index has just drafted, and on which the copy goes; None: on a CPU."""
        self.event: Any = None if streams is None else torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._streams = streams
        self._by_model: torch.Tensor | None = None
        self._real, self._confidence = self._copied(index.real[:requests], index.confidence[:requests])

    def note(self, by_model: torch.Tensor) -> None:
        """Take for which requests a model's draft stands in the place of that from the history, bool [requests]."""
        (self._by_model,) = self._copied(by_model)
        if self._streams is not None:
            by_model.record_stream(self._streams[1])

    def _copied(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        if self._streams is None:
            return [tensor.clone() for tensor in tensors]
        main, copy = self._streams
        copy.wait_stream(main)
        with torch.cuda.stream(copy):
            copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
            self.event.record(copy)
        return copies

    def modelled(self, req_ids: Sequence[str]) -> set[str]:
        """Return for which of the batch's requests a model drafted."""
        if self._by_model is None:
            return set()
        return {req_id for req_id, mine in zip(req_ids, self._by_model.tolist(), strict=True) if mine}

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

    def __init__(self, vllm_config: Any, device: torch.device, config: DasConfig) -> None:
        """`vllm_config`, `device`: as vLLM's `init_speculator` gets them."""
        slots, steps = vllm_config.scheduler_config.max_num_seqs, vllm_config.speculative_config.num_speculative_tokens
        self._group = get_tp_group()
        self._config, self._vocabulary = config, vllm_config.model_config.get_vocab_size()
        self.index: DeviceIndex | None = None
        """None: another rank drafts."""
        self.wanted: int | None = None
        """Tokens of each draft of the present step; None: as many as there can be."""
        self._drafts = torch.zeros(slots, steps, dtype=torch.int64, device=device)
        self.draft_token_confidence_probs = torch.zeros(slots, steps, dtype=torch.float32, device=device)
        self.on_failure: Callable[[Exception], None] | None = None
        """Told why drafting failed; it drafts no more until `resume`."""
        self.streams: tuple[Any, Any] | None = None
        """Streams of the model runner: where it computes, and where it copies outputs."""
        self._failed = False
        self._offer: Offer | None = None
        self._copied: Any = None
        self._idle = -1
        self._capture_sizes = [s for s in vllm_config.compilation_config.cudagraph_capture_sizes or [] if s <= slots]

    def read(self, states: Any) -> None:
        """Draft for the requests of vLLM's `RequestState`, before memory is measured."""
        self._states = states
        if self._group.rank_in_group == 0:
            self.index = DeviceIndex(
                states.all_token_ids.gpu,
                self._drafts.shape[1],
                self._config.history.device_bytes // 4,
                least_chance(self._config.budget),
                self._vocabulary,
                copy=lambda array, tensor: async_tensor_h2d(array, out=tensor),
            )
            self._drafts, self.draft_token_confidence_probs = self.index.drafts, self.index.confidence

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
        **__: Any,
    ) -> torch.Tensor:
        """Draft for every request of the batch, int64 [requests, steps]; beyond a draft the request's last token, which
        the policy can read. See `BaseSpeculator.propose`."""
        if not dummy_run:
            self.draft(input_batch, num_sampled)
            self.share(input_batch.num_reqs)
        return self._drafts[: input_batch.num_reqs]

    def draft(self, input_batch: Any, num_sampled: torch.Tensor) -> None:
        """Look up a draft for every request of the batch, on the rank that drafts."""
        if self.index is not None:
            try:
                self._draft(input_batch, num_sampled)
            except Exception as error:
                self.fail(error)
            if self._failed:
                self._drafts[: input_batch.num_reqs].zero_()

    def take_better(self, drafts: torch.Tensor, tokens: int, worth: float) -> None:
        """Put a model's drafts, int64 [requests, steps], of which `tokens` count and `worth` are expected to be
        accepted, where that from the history is expected to bring less."""
        if self._offer is None or not self.wanted:
            return
        chances = self.draft_token_confidence_probs[: len(drafts), : self.wanted].cumprod(1)
        by_model = chances.sum(1) < worth
        mine = self._drafts[: len(drafts), :tokens]
        torch.where(by_model[:, None], drafts[:, :tokens], mine, out=mine)
        self._offer.note(by_model)

    def share(self, requests: int) -> torch.Tensor:
        """Send the drafts of a batch to the other ranks; return them, int64 [requests, steps]."""
        drafts = self._drafts[:requests]
        if self.wanted != 0 and self._group.world_size > 1:
            self._group.broadcast(drafts, src=0)
        return drafts

    def _draft(self, input_batch: Any, num_sampled: torch.Tensor) -> None:
        self._idle = self._idle + 1 if self.wanted == 0 else 0
        if self._failed or self.index is None or not looks(self._idle):
            return
        if self._copied is not None and self.streams is not None:
            self.streams[0].wait_event(self._copied)  # on the device: what is being copied is written again
        self.index.draft(input_batch.idx_mapping, num_sampled, self._states.total_len.gpu)
        self._offer = Offer(self.index, input_batch.num_reqs, self.streams)
        self._copied = self._offer.event
