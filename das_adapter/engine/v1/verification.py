"""Lossless verification inside vLLM's V1 model runner: the target is sampled with keyed
noise, a draft token is accepted iff it equals the sample (drafter-invariant
verification, arXiv 2408.07978).

Every row of logits, of a drafted position or not, goes through the same `KeyedSampler`,
so a token and its log-probability are the same bit for bit, whatever was drafted.
Models draw their drafts as it draws (`draw`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import (
    BatchUpdate,
    LogitsProcessors,
    MoveDirectionality,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, RejectionSampler
from vllm.v1.sample.sampler import _SAMPLING_EPS, Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from das_adapter.core.steps import Ints
from das_adapter.engine.v1.keyed_sample import Keys, keyed_sample

_CHUNK_BYTES = 2**30
"""Size of the float32 logits that are processed at once: of a verified batch they would
not fit.
"""


class KeyedSampler(Sampler):
    """vLLM's sampler with its random draw replaced; everything around the draw is
    inherited.
    """

    keys: Keys | None = None
    """Keys of the rows of the next call; None in dummy runs."""

    def __init__(self, logprobs_mode: Any = "raw_logprobs") -> None:
        super().__init__(logprobs_mode)
        self.topk_topp_sampler.forward = self._draw

    def apply_logits_processors(
        self,
        logits: torch.Tensor,
        sampling: SamplingMetadata,
        *args: Any,
    ) -> torch.Tensor:
        """Apply vLLM's logits processors. With thinking budgets each request has one
        row (`expands`); where an engine speculates, vLLM looks for as many as it has
        draft tokens.
        """
        if _has_thinking_budgets(sampling):
            sampling.thinking_budget_state_holder.in_spec_mode = False
            sampling = replace(sampling, spec_token_ids=None)
        return super().apply_logits_processors(logits, sampling, *args)

    def _draw(
        self,
        logits: torch.Tensor,
        _: Any,
        top_k: torch.Tensor | None,
        top_p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draw from logits float32 [rows, vocab], which are changed in place: tokens
        int64 [rows]; see vLLM's `TopKTopPSampler.forward`.
        """
        logits = truncate(logits, top_k, top_p)
        processed = None
        if self.logprobs_mode == "processed_logits":
            processed = logits
        elif self.logprobs_mode == "processed_logprobs":
            processed = self.compute_logprobs(logits)
        keys = self.keys
        if keys is None:
            zeros = torch.zeros(
                len(logits),
                dtype=torch.int64,
                device=logits.device,
            )
            keys = Keys(zeros, zeros)
        tokens = keyed_sample(logits, keys)
        return tokens, processed


class KeyedRejectionSampler(RejectionSampler):
    """Accepts the prefix of a draft that the keyed sampler would have written
    itself.
    """

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Verify a batch; see `RejectionSampler.forward`.

        Args:
            metadata: the drafts, [num_draft_tokens] in total over [batch] requests.
            draft_probs: not used: whether a draft token is accepted does not depend on
                how it was found.
            logits: [num_draft_tokens + batch, vocab]; request after request, its
                drafted positions, then one more.
            sampling_metadata: per request.

        Returns:
            Tokens int32 [batch, max_spec_len + 1] with -1 after the last one accepted,
            and, if asked for, their log-probabilities in the same padded order.
        """
        num_drafted = np.asarray(metadata.num_draft_tokens, dtype=np.int64)
        starts = np.cumsum(num_drafted + 1) - num_drafted - 1
        if expands(sampling_metadata):
            output = self._sample_rows(metadata, logits, sampling_metadata, starts)
        else:
            # a state that only vLLM can advance: sample one position, drop the drafts
            first_rows = beside(starts, logits)
            first_logits = logits[first_rows]
            output = self._sample(first_logits, sampling_metadata, first_rows)
            num_drafted = np.zeros_like(num_drafted)
            starts = np.arange(len(num_drafted))

        # Of two requests with 2 and 0 draft tokens, a b, the rows are 0 1 2 and 3:
        #   row    0 1 2 | 3 3 3   whose samples stand at a place of the answer
        #   place  0 1   | 2 2     of the draft token that the sample must equal;
        #                          behind the last one stands one that none equals
        requests = np.arange(len(num_drafted))
        first_row = starts[:, None]
        first_draft = first_row - requests[:, None]
        offset = np.arange(metadata.max_spec_len + 1)
        last_row = len(output.sampled_token_ids) - 1
        host_row = np.minimum(first_row + offset, last_row)
        row = beside(host_row, logits)
        draft_offset = offset[:-1]
        is_drafted = draft_offset < num_drafted[:, None]
        behind = len(metadata.draft_token_ids)
        draft_place = first_draft + draft_offset
        host_place = np.where(is_drafted, draft_place, behind)
        place = beside(host_place, logits)
        padded_draft = torch.nn.functional.pad(
            metadata.draft_token_ids,
            (0, 1),
            value=PLACEHOLDER_TOKEN_ID,
        )
        draft = padded_draft[place]
        sampled_rows = output.sampled_token_ids.squeeze(-1)
        sampled = sampled_rows[row]
        equals = sampled[:, :-1] == draft
        accepted = torch.cumprod(equals.to(torch.int32), dim=1).bool()
        kept = torch.nn.functional.pad(accepted, (1, 0), value=True)
        logprobs = output.logprobs_tensors
        if logprobs is not None:
            flat_row = row.flatten()
            logprobs = LogprobsTensors(
                logprobs.logprob_token_ids[flat_row],
                logprobs.logprobs[flat_row],
                logprobs.selected_token_ranks[flat_row],
            )
        tokens = sampled.masked_fill(~kept, PLACEHOLDER_TOKEN_ID)
        return SamplerOutput(
            sampled_token_ids=tokens,
            logprobs_tensors=logprobs,
        )

    def _sample_rows(
        self,
        metadata: SpecDecodeMetadata,
        logits: torch.Tensor,
        sampling: SamplingMetadata,
        starts: Ints,
    ) -> SamplerOutput:
        """Sample every row of logits, some at a time; `starts`: each request's first
        row, [batch].
        """
        rows_at_once = max(1, _CHUNK_BYTES // (4 * logits.shape[1]))
        parts = []
        num_rows = len(logits)
        for begin in range(0, num_rows, rows_at_once):
            end = min(begin + rows_at_once, num_rows)
            rows = slice(begin, end)
            row_sampling = by_row(sampling, metadata, rows, starts)
            part = self._sample(logits[rows], row_sampling, rows)
            parts.append(part)
        return _joined(parts)

    def _sample(
        self,
        logits: torch.Tensor,
        metadata: SamplingMetadata,
        rows: torch.Tensor | slice,
    ) -> SamplerOutput:
        """Sample some rows of a batch, of which `logits` are given."""
        keys = self.sampler.keys
        try:
            if keys is not None:
                self.sampler.keys = keys.at(rows)
            # The sampler changes them in place; where it fails, the step is drawn from
            # them again without drafts.
            return self.sampler(logits.to(torch.float32, copy=True), metadata)
        finally:
            self.sampler.keys = keys


def beside(values: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Copy numbers to the device of a tensor, without waiting for it."""
    on_host = torch.as_tensor(values)
    return on_host.to(tensor.device, non_blocking=True)


def by_row(
    sampling: SamplingMetadata,
    metadata: SpecDecodeMetadata,
    rows: slice,
    starts: Ints,
) -> SamplingMetadata:
    """Return sampling metadata with one entry for each of some rows of logits instead
    of one for each request of the batch; `starts`: each request's first row,
    [batch].
    """
    row_numbers = np.arange(rows.start, rows.stop)
    behind_request = np.searchsorted(starts, row_numbers, side="right")
    requests = behind_request - 1
    at = beside(requests, metadata.draft_token_ids)
    names = [
        "temperature",
        "top_p",
        "top_k",
        "allowed_token_ids_mask",
    ]
    if not sampling.no_penalties:
        names += [
            "prompt_token_ids",
            "frequency_penalties",
            "presence_penalties",
            "repetition_penalties",
        ]
    spread: dict[str, Any] = {}
    for name in names:
        value = getattr(sampling, name)
        spread[name] = None if value is None else value[at]
    if sampling.bad_words_token_ids or not sampling.no_penalties:
        drafts = metadata.draft_token_ids.tolist()
        texts = []
        words = {}
        for i, request in enumerate(requests.tolist()):
            first_row = int(starts[request])
            row = rows.start + i
            # each request before it has one row more than draft tokens
            first_draft = first_row - request
            next_draft = row - request
            drafts_before = drafts[first_draft:next_draft]
            written = sampling.output_token_ids[request]
            texts.append(written + drafts_before)
            if request in sampling.bad_words_token_ids:
                words[i] = sampling.bad_words_token_ids[request]
        spread["output_token_ids"] = texts
        spread["bad_words_token_ids"] = words
    spread["logitsprocs"] = _at_rows(sampling.logitsprocs, rows, starts)
    return replace(
        sampling,
        generators={},
        spec_token_ids=None,
        **spread,
    )


def _at_rows(
    processors: LogitsProcessors,
    rows: slice,
    starts: Ints,
) -> LogitsProcessors:
    """Return vLLM's logits processors for some rows of logits: beside drafts there is
    that of `min_tokens` alone, and a request whose end it still excludes has no draft,
    and one row.
    """
    found = []
    for processor in processors.all:
        held_by_row = {}
        for request, held in processor.min_toks.items():
            first_row = int(starts[request])
            if rows.start <= first_row < rows.stop:
                held_by_row[first_row - rows.start] = held
        processor = copy.copy(processor)
        processor.min_toks = held_by_row
        # tensors anew
        moved = []
        for row in held_by_row:
            move = (row, row, MoveDirectionality.UNIDIRECTIONAL)
            moved.append(move)
        update = BatchUpdate(
            len(moved),
            removed=[],
            added=[],
            moved=moved,
        )
        processor.update_state(update)
        found.append(processor)
    return LogitsProcessors(found)


def _joined(parts: Sequence[SamplerOutput]) -> SamplerOutput:
    """Return the output of a step that was sampled in parts."""
    tokens = []
    logprobs = []
    for part in parts:
        tokens.append(part.sampled_token_ids)
        if part.logprobs_tensors is not None:
            logprobs.append(part.logprobs_tensors[:3])
    joined = None
    if logprobs:
        by_field = zip(*logprobs, strict=True)
        joined = LogprobsTensors(*map(torch.cat, by_field))
    return SamplerOutput(
        sampled_token_ids=torch.cat(tokens),
        logprobs_tensors=joined,
    )


def expands(sampling: SamplingMetadata) -> bool:
    """Return whether a step verifies its drafts: thinking budgets and log-probabilities
    of chosen tokens can't be spread over a request's rows.
    """
    return not _has_thinking_budgets(sampling) and not sampling.logprob_token_ids


def _has_thinking_budgets(sampling: SamplingMetadata) -> bool:
    holder = getattr(sampling, "thinking_budget_state_holder", None)
    return holder is not None and holder.has_tracked_requests()


def of_rows(sampling: SamplingMetadata, rows: torch.Tensor) -> SamplingMetadata:
    """Return the sampling metadata with which a model drafts for some rows of the
    batch, int64 [rows].
    """
    chosen = {}
    for name in ("temperature", "top_k", "top_p"):
        value = getattr(sampling, name)
        if value is not None:
            chosen[name] = value[rows]
    return replace(sampling, **chosen)


def draw(
    logits: torch.Tensor,
    keys: Keys | None,
    sampling: SamplingMetadata,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Draw one token a row with the temperature, top-k and top-p of the policy's
    sampler.

    Args:
        logits: [rows, vocab] of the drafter.
        keys: of the policy's noise; None: the policy draws with vLLM's own noise, which
            is not known beforehand.
        sampling: of the rows.

    Returns:
        The tokens, int64 [rows], and the probabilities with which they were drawn,
        float32 [rows, vocab]; None for these where the logits and the keys decide.
    """
    if sampling.all_greedy:
        return logits.argmax(dim=-1), None
    scaled = logits.to(torch.float32, copy=True)
    scaled = Sampler.apply_temperature(
        scaled,
        sampling.temperature,
        sampling.all_random,
    )
    scaled = truncate(scaled, sampling.top_k, sampling.top_p)
    probabilities = None
    if keys is None:
        probabilities = scaled.softmax(dim=-1)
        drawn = topk_topp_sampler.random_sample(probabilities.clone(), {})
    else:
        drawn = keyed_sample(scaled, keys)
    if not sampling.all_random:
        is_greedy = sampling.temperature < _SAMPLING_EPS
        likeliest = logits.argmax(dim=-1)
        drawn = torch.where(is_greedy, likeliest, drawn)
    return drawn, probabilities


def truncate(
    logits: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
) -> torch.Tensor:
    """Exclude (-inf) what lies outside top-k and top-p, in place, on a GPU with vLLM's
    Triton kernels alone.

    Up to 0.29 vLLM itself sorts below eight rows. The two may round a row's cumulative
    probabilities differently, and then what a row keeps would depend on how many rows
    draft. From 0.30 on it may all the same, by as little: up to 64 rows, the fewer
    there are, the more parts these kernels add up a row's top-p in. Arguments are
    float32 [rows, vocab], int32 [rows] and float32 [rows]; None: no limit.
    """
    is_limited = top_k is not None or top_p is not None
    if is_limited and logits.is_cuda and topk_topp_sampler.HAS_TRITON:
        return topk_topp_sampler.apply_top_k_top_p_triton(logits, top_k, top_p)
    return topk_topp_sampler.apply_top_k_top_p(logits, top_k, top_p)
