"""What a neural drafter has not read of its requests' texts, on vLLM's V2 model runner:
in a step that has no use for its drafts it does not run, and when it is wanted again it
reads what it has missed in one pass.

All but a draft model read the policy's hidden states beside the text: these are kept
until then, of `tuning.MISSED_TOKENS` tokens at most.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from das_adapter.core import tuning
from das_adapter.engine.v2 import versions

_PARALLEL = ("DFlashSpeculator", "DSparkSpeculator")
"""Speculators that draft all tokens in one pass, and say themselves what its attention
reads.
"""
_MAY_MISS = (
    "EagleSpeculator",
    "MTPSpeculator",
    *versions.DRAFT_MODELS,
    *_PARALLEL,
)
"""Speculators that can do without running in every step."""


Attention = dict[str, Any]
"""Metadata of vLLM's attention by layer."""
LayerSlots = dict[str, torch.Tensor]
"""Slots of the KV cache by layer, int64 [tokens]."""


class Inputs(NamedTuple):
    """What vLLM's speculators read, the first arguments of `BaseSpeculator.propose`."""

    batch: Any
    """`InputBatch`."""
    attention: Attention
    slots: LayerSlots
    hidden: torch.Tensor
    """The policy's hidden states, [tokens, size]."""
    layers: list[torch.Tensor] | None
    """Hidden states of some layers, where the drafter reads these, [tokens, size]
    each.
    """


class KeptHidden(NamedTuple):
    """What the policy computed in a step that a drafter has missed."""

    req_ids: list[str]
    """Requests of the step, each of which decoded one token."""
    hidden: torch.Tensor
    """Hidden states of these tokens, [requests, size]."""


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
        max_tokens = speculator.max_num_tokens
        self._max_tokens = min(tuning.MISSED_TOKENS, max_tokens)
        self._reads_hidden = not reads_text_alone(speculator)
        self._missed: dict[str, int] = {}
        """Tokens that each request has missed."""
        self._kept: list[KeptHidden] = []
        """Of each step that was missed."""

    def may_miss(self, batch: Any) -> bool:
        """Return whether the drafter need not run in the step of a batch: every request
        decodes a single token there, so that the host knows how far each is, and what
        is missed then can still be read in one pass.
        """
        is_single = batch.num_tokens == batch.num_reqs
        if batch.has_prefill or not is_single:
            return False
        # of each request: that of this step, and that of the step that reads it
        num_tokens = 2 * len(batch.req_ids)
        for req_id in batch.req_ids:
            num_tokens += self._missed.get(req_id, 0)
        return num_tokens <= self._max_tokens

    def miss(self, inputs: Inputs) -> None:
        """Note a step in which the drafter does not run."""
        batch = inputs.batch
        for req_id in batch.req_ids:
            num_missed = self._missed.get(req_id, 0)
            self._missed[req_id] = num_missed + 1
        if self._reads_hidden:
            hidden = _hidden(inputs)
            own_hidden = hidden[: batch.num_reqs]
            kept = KeptHidden(
                req_ids=list(batch.req_ids),
                hidden=own_hidden.clone(),
            )
            self._kept.append(kept)

    def read_up(self, inputs: Inputs) -> Inputs:
        """Return what the drafter reads instead, where each request's part begins with
        what was missed; `inputs` if nothing was. It never reads what finds no room
        beside the step's own tokens: drafts are worse then.

        Two requests, of which a has missed 2 tokens and b 1. The step reads 1 token of
        a, at position 8, and 2 of b, from position 5 on. The drafter reads 6 tokens:

            token_request    0   0   0   1   1   1
            from_step       -2  -1   0  -1   0   1   below 0: missed
            positions        6   7   8   4   5   6
            step_token       0   0   0   1   1   2   of the step's own tokens
            missed_token     0   1   -   2   -   -   of those that were missed
        """
        batch = inputs.batch
        missed = self._missed_of(batch)
        kept = self._kept
        self._missed = {}
        self._kept = []
        if not missed.any():
            return inputs
        device = batch.input_ids.device
        requests = batch.num_reqs
        num_missed = int(missed.sum())
        total = batch.num_tokens + num_missed

        # What the device alone knows where requests have drafts of their own lengths.
        missed_counts = async_tensor_h2d(missed, device)
        num_ranges = requests + 1
        step_ranges = batch.query_start_loc[:num_ranges].long()
        step_begins = step_ranges[:-1]
        counts = step_ranges.diff() + missed_counts
        ends = counts.cumsum(0)
        ranges = torch.nn.functional.pad(ends, (1, 0))
        begins = ranges[:-1]

        # Of each token that is read: its request, and its place from the first token of
        # the step on.
        token_request = torch.repeat_interleave(counts, output_size=total)
        first_of_step = begins + missed_counts
        first_of_own_step = first_of_step[token_request]
        place = torch.arange(total, device=device)
        from_step = place - first_of_own_step
        is_missed = from_step < 0
        place_in_step = from_step.clamp(min=0)
        step_begin = step_begins[token_request]
        step_token = step_begin + place_in_step
        first_position = batch.positions[step_begins]
        first_own_position = first_position[token_request]
        positions = first_own_position + from_step
        request_slots = batch.idx_mapping.long()
        slots = request_slots[token_request]
        text = self._texts[slots, positions]
        step_ids = batch.input_ids[step_token]
        input_ids = torch.where(is_missed, text, step_ids)

        # What the host tells.
        num_scheduled = batch.num_scheduled_tokens[:requests]
        scheduled = np.asarray(num_scheduled, dtype=np.int64)
        num_read = scheduled + missed
        told = told_lengths(batch, missed)
        told_ends = told.cumsum()
        told_ranges = np.append(0, told_ends)
        longer = of_unequal_lengths(
            batch,
            num_tokens=total,
            num_tokens_after_padding=total,
            num_scheduled_tokens=num_read.astype(np.int32),
            input_ids=input_ids,
            positions=positions,
            query_start_loc=ranges.int(),
            query_start_loc_np=told_ranges.astype(np.int32),
        )
        if not self._reads_hidden:
            return inputs._replace(batch=longer)
        missed_ends = missed_counts.cumsum(0)
        missed_end = missed_ends[token_request]
        missed_token = missed_end + from_step
        kept_token = num_missed + step_token
        hidden = self._hidden_of(
            inputs,
            kept=kept,
            missed=missed,
            places=torch.where(is_missed, missed_token, kept_token),
        )
        read = inputs._replace(
            batch=longer,
            hidden=hidden,
            layers=None,
        )
        if _name_of(self._speculator) in _PARALLEL:
            return read
        attention, kv_slots = self._attention(longer)
        return read._replace(
            attention=attention,
            slots=kv_slots,
        )

    def _missed_of(self, batch: Any) -> np.ndarray:
        """Return how many tokens that it has missed each request of a batch reads,
        int64 [requests].
        """
        requests = len(batch.req_ids)
        missed = np.zeros(requests, dtype=np.int64)
        for i, req_id in enumerate(batch.req_ids):
            num_missed = self._missed.get(req_id, 0)
            missed[i] = num_missed
        # it was preempted since, and is read anew
        missed[batch.is_prefilling_np] = 0
        room = self._speculator.max_num_tokens - batch.num_tokens
        lacks_room = missed.cumsum() > room
        missed[lacks_room] = 0
        return missed

    def _hidden_of(
        self,
        inputs: Inputs,
        kept: list[KeptHidden],
        missed: np.ndarray,
        places: torch.Tensor,
    ) -> torch.Tensor:
        """Return what the drafter reads of the policy, [tokens, size]; `missed`: tokens
        of each request; `places`: of each token among these, request after request, and
        behind them those of the step.
        """
        parts_of: dict[str, list[torch.Tensor]] = {}
        req_ids = inputs.batch.req_ids
        for req_id, num_missed in zip(req_ids, missed, strict=True):
            if num_missed > 0:
                parts_of[req_id] = []
        for step in kept:
            for i, req_id in enumerate(step.req_ids):
                if req_id in parts_of:
                    end = i + 1
                    part = step.hidden[i:end]
                    parts_of[req_id].append(part)
        parts = []
        for own_parts in parts_of.values():
            parts += own_parts
        step_hidden = _hidden(inputs)
        parts.append(step_hidden)
        hidden = torch.cat(parts)
        read = hidden[places]
        if inputs.layers:
            return self._speculator.model.combine_hidden_states(read)
        return read

    def _attention(self, batch: Any) -> tuple[Attention, LayerSlots]:
        """Return attention metadata and slots of a longer batch, for the drafter's
        layers.
        """
        from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer

        speculator = self._speculator
        requests = batch.num_reqs
        tokens = batch.num_tokens
        ranges = batch.query_start_loc
        buffers = speculator.input_buffers
        bound = batch.seq_lens_cpu_upper_bound
        num_ranges = requests + 1
        read_ranges = buffers.query_start_loc[:num_ranges]
        read_ranges.copy_(ranges)
        read_lens = buffers.seq_lens[:requests]
        lens = batch.seq_lens[:requests]
        read_lens.copy_(lens)
        read_positions = buffers.positions[:tokens]
        read_positions.copy_(batch.positions)
        own_bound = bound[:requests]
        longest = int(own_bound.max())
        longest_drafted = longest + speculator.num_speculative_steps
        speculator.draft_max_seq_len = min(longest_drafted, speculator.max_model_len)
        slots = speculator.block_tables.compute_slot_mappings(
            batch.idx_mapping,
            ranges,
            batch.positions,
            tokens,
        )
        attention = versions.first_pass_attention(
            speculator,
            batch=batch,
            begins=batch.query_start_loc_np,
            longest=bound,
        )
        by_layer = build_slot_mappings_by_layer(slots, speculator.kv_cache_config)
        return attention, by_layer


def of_unequal_lengths(batch: Any, **changed: Any) -> Any:
    """Return a batch with some fields changed, for which a drafter replays no CUDA
    graph of one length.
    """
    no_graphs = versions.without_graphs(batch)
    return dataclasses.replace(batch, **no_graphs, **changed)


def told_lengths(batch: Any, missed: np.ndarray) -> np.ndarray:
    """Return the lengths of a batch's requests that the host tells the drafter's
    attention, int64 [requests], behind the `missed` tokens of each. The device alone
    may know whose drafts are in the step: here it is those of the longest requests, so
    that none is longer there than the longest one here. Prompts have their own lengths.
    """
    requests = batch.num_reqs
    max_drafts = batch.num_draft_tokens_per_req
    num_scheduled = batch.num_scheduled_tokens[:requests]
    lengths = num_scheduled + missed
    if max_drafts is None:
        return lengths
    drafts = np.minimum(max_drafts, batch.num_draft_tokens)
    lengths += drafts - max_drafts
    # the tokens that are too many are taken from the shortest requests
    num_surplus = drafts.sum() - batch.num_draft_tokens
    shortest_first = lengths.argsort()
    own_drafts = drafts[shortest_first]
    draft_ends = own_drafts.cumsum()
    taken_ends = np.minimum(draft_ends, num_surplus)
    taken = np.diff(taken_ends, prepend=0)
    lengths[shortest_first] -= taken
    return lengths


def may_miss_steps(speculator: Any) -> bool:
    """Return whether a speculator can do without running in every step."""
    return _name_of(speculator) in _MAY_MISS


def reads_text_alone(speculator: Any) -> bool:
    """Return whether a speculator is a draft model: all others read the policy's hidden
    states beside the text.
    """
    # vLLM 0.29 and 0.30 have no draft model on V2
    num_extra = getattr(speculator, "num_extra_query_per_req", 0)
    return num_extra > 0


def _name_of(speculator: Any) -> str:
    """Return the name of a speculator's class."""
    return type(speculator).__name__


def _hidden(inputs: Inputs) -> torch.Tensor:
    """Return what the drafter reads of the policy, [tokens, size]."""
    if inputs.layers:
        return torch.cat(inputs.layers, dim=-1)
    return inputs.hidden
