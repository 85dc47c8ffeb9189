"""What a neural drafter has not read of its requests' texts, on vLLM's V2 model runner:
in a step that has no use for its drafts it does not run, and when it is wanted again it
reads what it has missed in one pass.

All but a draft model read the policy's hidden states beside the text: these are kept
until then, of `KEPT_TOKENS` tokens at most.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

KEPT_TOKENS = 2048
"""Tokens that a drafter may miss before it reads them."""
_PARALLEL = ("DFlashSpeculator", "DSparkSpeculator")
"""Speculators that draft all tokens in one pass, and say themselves what its attention
reads.
"""
_STANDALONE = ("StandaloneARSpeculator", "PlainDraftModelSpeculator")
"""Those of draft models; the second is vLLM 0.31's: remove it when 0.32 is the oldest
vLLM with a V2 runner.
"""


class Inputs(NamedTuple):
    """What vLLM's speculators read, the first arguments of `BaseSpeculator.propose`."""

    batch: Any
    """`InputBatch`."""
    attention: dict[str, Any]
    slots: dict[str, torch.Tensor]
    hidden: torch.Tensor
    """The policy's, [tokens, size]."""
    layers: list[torch.Tensor] | None
    """Those of some layers, where the drafter reads them, [tokens, size] each."""


class MissedText:
    """Counts the tokens that each request got in steps in which the drafter did not
    run, and brings them along.
    """

    def __init__(self, speculator: Any, texts: torch.Tensor) -> None:
        """`speculator`: vLLM's; `texts`: int32 [slots, length], the text of the request
        in each slot.
        """
        self._speculator = speculator
        self._texts = texts
        self._most = min(KEPT_TOKENS, speculator.max_num_tokens)
        self._reads_hidden = not reads_text_alone(speculator)
        self._missed: dict[str, int] = {}
        self._kept: list[tuple[list[str], torch.Tensor]] = []

    def may_miss(self, batch: Any) -> bool:
        """Whether the drafter need not run in the step of a batch: every request
        decodes a single token there, so that the host knows how far each is, and what
        is missed then can still be read in one pass.
        """
        if batch.has_prefill or batch.num_tokens != batch.num_reqs:
            return False
        return (
            sum(self._missed.get(req_id, 0) + 2 for req_id in batch.req_ids)
            <= self._most
        )

    def miss(self, inputs: Inputs) -> None:
        """Note a step in which the drafter does not run."""
        batch = inputs.batch
        for req_id in batch.req_ids:
            self._missed[req_id] = self._missed.get(req_id, 0) + 1
        if self._reads_hidden:
            self._kept.append(
                (list(batch.req_ids), _hidden(inputs)[: batch.num_reqs].clone())
            )

    def read_up(self, inputs: Inputs) -> Inputs:
        """Return what the drafter reads instead, where each request's part begins with
        what was missed; `inputs` if nothing was. It never reads what finds no room
        beside the step's own tokens: drafts are worse then.
        """
        batch = inputs.batch
        missed = np.array(
            [self._missed.get(req_id, 0) for req_id in batch.req_ids], dtype=np.int64
        )
        missed[batch.is_prefilling_np] = 0  # it was preempted since, and is read anew
        missed[missed.cumsum() > self._speculator.max_num_tokens - batch.num_tokens] = 0
        kept = self._kept
        self._missed = {}
        self._kept = []
        if not missed.any():
            return inputs
        device = batch.input_ids.device
        requests = batch.num_reqs
        total = batch.num_tokens + int(missed.sum())
        more = async_tensor_h2d(missed, device)
        begins = batch.query_start_loc[: requests + 1].long()
        # which the device alone knows where requests have drafts of their own lengths
        counts = begins.diff() + more
        ends = counts.cumsum(0)
        row = torch.repeat_interleave(counts, output_size=total)
        # of the first token of the step
        ahead = torch.arange(total, device=device) - (ends - counts + more)[row]
        step = begins[row] + ahead.clamp(min=0)
        positions = batch.positions[begins[:-1]][row] + ahead
        before = self._texts[batch.idx_mapping.long()[row], positions]
        most = (
            np.asarray(batch.num_scheduled_tokens[:requests], dtype=np.int64) + missed
        )
        longer = of_unequal_lengths(
            batch,
            num_tokens=total,
            num_tokens_after_padding=total,
            num_scheduled_tokens=most.astype(np.int32),
            input_ids=torch.where(ahead < 0, before, batch.input_ids[step]),
            positions=positions,
            query_start_loc=torch.nn.functional.pad(ends, (1, 0)).int(),
            query_start_loc_np=np.append(
                0, told_lengths(batch, missed).cumsum()
            ).astype(np.int32),
        )
        if not self._reads_hidden:
            return inputs._replace(batch=longer)
        # number of the token among all that were missed
        behind = more.cumsum(0)[row] + ahead
        hidden = self._hidden_of(
            inputs,
            kept,
            missed,
            torch.where(ahead < 0, behind, int(missed.sum()) + step),
        )
        read = inputs._replace(batch=longer, hidden=hidden, layers=None)
        if type(self._speculator).__name__ in _PARALLEL:
            return read
        attention, slots = self._attention(longer)
        return read._replace(attention=attention, slots=slots)

    def _hidden_of(
        self,
        inputs: Inputs,
        kept: list[tuple[list[str], torch.Tensor]],
        missed: np.ndarray,
        places: torch.Tensor,
    ) -> torch.Tensor:
        """Return what the drafter reads of the policy, [tokens, size]; `missed`: tokens
        of each request; `places`: of each token among these, request after request, and
        behind them those of the step.
        """
        counts = dict(zip(inputs.batch.req_ids, missed.tolist(), strict=True))
        parts: dict[str, list[torch.Tensor]] = {req_id: [] for req_id in counts}
        for req_ids, hidden in kept:
            for i, req_id in enumerate(req_ids):
                if counts.get(req_id):
                    parts[req_id].append(hidden[i : i + 1])
        everything = torch.cat(
            [part for mine in parts.values() for part in mine] + [_hidden(inputs)]
        )[places]
        return (
            self._speculator.model.combine_hidden_states(everything)
            if inputs.layers
            else everything
        )

    def _attention(self, batch: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return attention metadata and slot mappings of a longer batch, for the
        drafter's layers.
        """
        from vllm.config.compilation import CUDAGraphMode
        from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
        from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

        speculator = self._speculator
        requests = batch.num_reqs
        tokens = batch.num_tokens
        buffers = speculator.input_buffers
        bound = batch.seq_lens_cpu_upper_bound
        buffers.query_start_loc[: requests + 1].copy_(batch.query_start_loc)
        buffers.seq_lens[:requests].copy_(batch.seq_lens[:requests])
        buffers.positions[:tokens].copy_(batch.positions)
        speculator.draft_max_seq_len = min(
            int(bound[:requests].max()) + speculator.num_speculative_steps,
            speculator.max_model_len,
        )
        slots = speculator.block_tables.compute_slot_mappings(
            batch.idx_mapping, batch.query_start_loc, batch.positions, tokens
        )
        plain = BatchExecutionDescriptor(
            cg_mode=CUDAGraphMode.NONE, num_tokens=tokens, num_reqs=requests
        )
        shape: dict[str, Any] = {"batch_desc": plain}
        if hasattr(speculator, "_build_attn_metadata"):
            build = speculator._build_attn_metadata
        else:  # vLLM 0.29: remove this when 0.30 is the oldest vLLM with a V2 runner
            build = speculator._build_draft_attn_metadata
            shape = {"num_reqs_padded": requests}
            shape["num_tokens_padded"] = tokens
        attention = build(
            num_reqs=requests,
            query_start_loc_np=batch.query_start_loc_np,
            seq_lens_cpu_upper_bound=bound,
            step=0,
            **shape,
        )
        return attention, build_slot_mappings_by_layer(
            slots, speculator.kv_cache_config
        )


def of_unequal_lengths(batch: Any, **changed: Any) -> Any:
    """Return a batch with some fields changed, for which a drafter replays no CUDA
    graph of one length.
    """
    # Before vLLM 0.31 a drafter asks whether a prompt is read. Remove this when 0.31 is
    # the oldest with a V2 runner.
    told = (
        {"decode_graph_eligible": False}
        if hasattr(batch, "decode_graph_eligible")
        else {"has_prefill": True}
    )
    return dataclasses.replace(batch, **told, **changed)


def told_lengths(batch: Any, missed: np.ndarray) -> np.ndarray:
    """Return the lengths of a batch's requests that the host tells the drafter's
    attention, int64 [requests], behind the `missed` tokens of each. The device alone
    may know whose drafts are in the step: here it is those of the longest requests, so
    that none is longer there than the longest one here. Prompts have their own lengths.
    """
    every = batch.num_draft_tokens_per_req
    lengths = batch.num_scheduled_tokens[: batch.num_reqs] + missed
    if every is None:
        return lengths
    drafts = np.minimum(every, batch.num_draft_tokens)
    lengths += drafts - every
    order = lengths.argsort()
    lengths[order] -= np.diff(
        np.minimum(drafts[order].cumsum(), drafts.sum() - batch.num_draft_tokens),
        prepend=0,
    )
    return lengths


def may_miss_steps(speculator: Any) -> bool:
    """Whether a speculator can do without running in every step."""
    return type(speculator).__name__ in (
        "EagleSpeculator",
        "MTPSpeculator",
        *_STANDALONE,
        *_PARALLEL,
    )


def reads_text_alone(speculator: Any) -> bool:
    """Whether a speculator is a draft model: all others read the policy's hidden states
    beside the text.
    """
    # vLLM 0.29 and 0.30 have no draft model on V2
    return getattr(speculator, "num_extra_query_per_req", 0) > 0


def _hidden(inputs: Inputs) -> torch.Tensor:
    """Return what the drafter reads of the policy, [tokens, size]."""
    return torch.cat(inputs.layers, dim=-1) if inputs.layers else inputs.hidden
