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


class Inputs(NamedTuple):
    """What vLLM's speculators read, the first arguments of `BaseSpeculator.propose`."""

    batch: Any
    """`InputBatch`."""
    attention: dict[str, Any]
    """Metadata by layer."""
    slots: dict[str, torch.Tensor]
    """Slots of the KV cache by layer, int64 [tokens]."""
    hidden: torch.Tensor
    """The policy's hidden states, [tokens, size]."""
    layers: list[torch.Tensor] | None
    """Hidden states of some layers, where the drafter reads these, [tokens, size]
    each.
    """


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
        self._most = min(tuning.MISSED_TOKENS, speculator.max_num_tokens)
        self._reads_hidden = not reads_text_alone(speculator)
        self._missed: dict[str, int] = {}
        """Tokens that each request has missed."""
        self._kept: list[tuple[list[str], torch.Tensor]] = []
        """Requests of each step that was missed, and the hidden states of their tokens,
        [requests, size].
        """

    def may_miss(self, batch: Any) -> bool:
        """Whether the drafter need not run in the step of a batch: every request
        decodes a single token there, so that the host knows how far each is, and what
        is missed then can still be read in one pass.
        """
        if batch.has_prefill or batch.num_tokens != batch.num_reqs:
            return False
        tokens = 0
        for req_id in batch.req_ids:
            # that of this step, and that of the step that reads it
            tokens += self._missed.get(req_id, 0) + 2
        return tokens <= self._most

    def miss(self, inputs: Inputs) -> None:
        """Note a step in which the drafter does not run."""
        batch = inputs.batch
        for req_id in batch.req_ids:
            self._missed[req_id] = self._missed.get(req_id, 0) + 1
        if self._reads_hidden:
            hidden = _hidden(inputs)[: batch.num_reqs].clone()
            self._kept.append((list(batch.req_ids), hidden))

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
        step_begins = batch.query_start_loc[: requests + 1].long()
        counts = step_begins.diff() + missed_counts
        ends = counts.cumsum(0)
        begins = torch.nn.functional.pad(ends, (1, 0))

        # Of each token that is read: its request, and its place from the first token of
        # the step on.
        token_request = torch.repeat_interleave(counts, output_size=total)
        first_of_step = begins[:-1] + missed_counts
        from_step = torch.arange(total, device=device) - first_of_step[token_request]
        is_missed = from_step < 0
        step_token = step_begins[token_request] + from_step.clamp(min=0)
        first_position = batch.positions[step_begins[:-1]]
        positions = first_position[token_request] + from_step
        slots = batch.idx_mapping.long()[token_request]
        text = self._texts[slots, positions]
        input_ids = torch.where(is_missed, text, batch.input_ids[step_token])

        scheduled = np.asarray(batch.num_scheduled_tokens[:requests], dtype=np.int64)
        told_ends = told_lengths(batch, missed).cumsum()
        longer = of_unequal_lengths(
            batch,
            num_tokens=total,
            num_tokens_after_padding=total,
            num_scheduled_tokens=(scheduled + missed).astype(np.int32),
            input_ids=input_ids,
            positions=positions,
            query_start_loc=begins.int(),
            query_start_loc_np=np.append(0, told_ends).astype(np.int32),
        )
        if not self._reads_hidden:
            return inputs._replace(batch=longer)
        missed_ends = missed_counts.cumsum(0)
        missed_token = missed_ends[token_request] + from_step
        source = torch.where(is_missed, missed_token, num_missed + step_token)
        hidden = self._hidden_of(inputs, kept, missed, source)
        read = inputs._replace(batch=longer, hidden=hidden, layers=None)
        if type(self._speculator).__name__ in _PARALLEL:
            return read
        attention, kv_slots = self._attention(longer)
        return read._replace(attention=attention, slots=kv_slots)

    def _missed_of(self, batch: Any) -> np.ndarray:
        """Return how many tokens that it has missed each request of a batch reads,
        int64 [requests].
        """
        missed = np.array(
            [self._missed.get(req_id, 0) for req_id in batch.req_ids], dtype=np.int64
        )
        missed[batch.is_prefilling_np] = 0  # it was preempted since, and is read anew
        room = self._speculator.max_num_tokens - batch.num_tokens
        missed[missed.cumsum() > room] = 0
        return missed

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
        of_request: dict[str, list[torch.Tensor]] = {req_id: [] for req_id in counts}
        for req_ids, hidden in kept:
            for i, req_id in enumerate(req_ids):
                if counts.get(req_id):
                    of_request[req_id].append(hidden[i : i + 1])
        parts = []
        for own_parts in of_request.values():
            parts += own_parts
        parts.append(_hidden(inputs))
        read = torch.cat(parts)[places]
        if inputs.layers:
            return self._speculator.model.combine_hidden_states(read)
        return read

    def _attention(self, batch: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return attention metadata and slot mappings of a longer batch, for the
        drafter's layers.
        """
        from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer

        speculator = self._speculator
        requests = batch.num_reqs
        tokens = batch.num_tokens
        buffers = speculator.input_buffers
        bound = batch.seq_lens_cpu_upper_bound
        buffers.query_start_loc[: requests + 1].copy_(batch.query_start_loc)
        buffers.seq_lens[:requests].copy_(batch.seq_lens[:requests])
        buffers.positions[:tokens].copy_(batch.positions)
        longest = int(bound[:requests].max()) + speculator.num_speculative_steps
        speculator.draft_max_seq_len = min(longest, speculator.max_model_len)
        slots = speculator.block_tables.compute_slot_mappings(
            batch.idx_mapping, batch.query_start_loc, batch.positions, tokens
        )
        attention = versions.first_pass_attention(
            speculator, batch, batch.query_start_loc_np, bound
        )
        by_layer = build_slot_mappings_by_layer(slots, speculator.kv_cache_config)
        return attention, by_layer


def of_unequal_lengths(batch: Any, **changed: Any) -> Any:
    """Return a batch with some fields changed, for which a drafter replays no CUDA
    graph of one length.
    """
    return dataclasses.replace(batch, **versions.without_graphs(batch), **changed)


def told_lengths(batch: Any, missed: np.ndarray) -> np.ndarray:
    """Return the lengths of a batch's requests that the host tells the drafter's
    attention, int64 [requests], behind the `missed` tokens of each. The device alone
    may know whose drafts are in the step: here it is those of the longest requests, so
    that none is longer there than the longest one here. Prompts have their own lengths.
    """
    most_drafts = batch.num_draft_tokens_per_req
    lengths = batch.num_scheduled_tokens[: batch.num_reqs] + missed
    if most_drafts is None:
        return lengths
    drafts = np.minimum(most_drafts, batch.num_draft_tokens)
    lengths += drafts - most_drafts
    # the tokens that are too many are taken from the shortest requests
    num_surplus = drafts.sum() - batch.num_draft_tokens
    shortest_first = lengths.argsort()
    taken = np.minimum(drafts[shortest_first].cumsum(), num_surplus)
    lengths[shortest_first] -= np.diff(taken, prepend=0)
    return lengths


def may_miss_steps(speculator: Any) -> bool:
    """Whether a speculator can do without running in every step."""
    return type(speculator).__name__ in (
        "EagleSpeculator",
        "MTPSpeculator",
        *versions.DRAFT_MODELS,
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
