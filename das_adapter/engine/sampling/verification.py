"""Lossless verification inside vLLM's V1 model runner: the target is sampled with keyed noise, a draft token is
accepted iff it equals the sample (drafter-invariant verification, arXiv 2408.07978).

Every row of logits, of a drafted position or not, goes through the same `KeyedSampler`, so a token and its
log-probability are the same bit for bit, whatever was drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, RejectionSampler
from vllm.v1.sample.sampler import _SAMPLING_EPS, Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from das_adapter.engine.sampling.keyed_sample import keyed_sample
from das_adapter.errors import UnsupportedHost


class KeyedSampler(Sampler):
    """vLLM's sampler with its random draw replaced; everything around the draw is inherited."""

    keys: torch.Tensor | None = None
    """int64 [rows]: bits of the row keys (`das_adapter.core.noise.row_keys`) of the next call. None in dummy runs."""

    def sample(
        self, logits: torch.Tensor, sampling_metadata: SamplingMetadata, logprobs_mode_override: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sample each row; see `Sampler.sample`.

        Args:
            logits: float32 [rows, vocab], after penalties; changed in place.
            sampling_metadata: of the rows.
            logprobs_mode_override: as in the base class.

        Returns:
            int64 [rows] tokens, and the processed log-probabilities or logits if that mode is on.
        """
        if sampling_metadata.all_greedy:
            return super().sample(logits, sampling_metadata, logprobs_mode_override)
        greedy = None if sampling_metadata.all_random else logits.argmax(dim=-1)
        assert sampling_metadata.temperature is not None
        logits = self.apply_temperature(logits, sampling_metadata.temperature, sampling_metadata.all_random)
        for processor in sampling_metadata.logitsprocs.argmax_invariant:
            logits = processor.apply(logits)
        logits = apply_top_k_top_p(logits, sampling_metadata.top_k, sampling_metadata.top_p)

        mode = logprobs_mode_override or self.logprobs_mode
        processed = None
        if mode == "processed_logits":
            processed = logits
        elif mode == "processed_logprobs":
            processed = self.compute_logprobs(logits)

        keys = self.keys
        if keys is None:
            keys = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
        sampled = keyed_sample(logits, keys)
        if greedy is not None:
            sampled = torch.where(sampling_metadata.temperature < _SAMPLING_EPS, greedy, sampled)
        return sampled, processed


class KeyedRejectionSampler(RejectionSampler):
    """Accepts the prefix of a draft that the keyed sampler would have written itself."""

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
            draft_probs: not used: whether a draft token is accepted does not depend on how it was found.
            logits: [num_draft_tokens + batch, vocab]; request after request, its drafted positions, then one more.
            sampling_metadata: per request.

        Returns:
            Tokens int32 [batch, max_spec_len + 1] with -1 after the last one accepted, and, if asked for, their
            log-probabilities in the same padded order.
        """
        rows = Rows.of(metadata, logits.device)
        verifiable = _row_metadata(sampling_metadata, metadata, rows)
        if verifiable is None:  # a state that only vLLM can advance: sample the first position, drop the drafts
            first = logits[rows.start]
            keys = self.sampler.keys
            self.sampler.keys = None if keys is None else keys[rows.start]
            output = self.sampler(first, sampling_metadata)
            return replace_tokens(output, metadata.max_spec_len)

        output = self.sampler(logits, verifiable)
        tokens = output.sampled_token_ids.squeeze(-1)
        place = rows.padded(metadata.max_spec_len, len(tokens))
        drafts = torch.cat([metadata.draft_token_ids, metadata.draft_token_ids.new_full((1,), PLACEHOLDER_TOKEN_ID)])
        padded, drafted = tokens[place], drafts[rows.padded_drafts(metadata.max_spec_len, len(drafts) - 1)]
        kept = torch.cumprod((padded[:, :-1] == drafted).to(torch.int32), dim=1).bool()
        kept = torch.cat([kept.new_ones(len(kept), 1), kept], dim=1)
        logprobs = output.logprobs_tensors
        if logprobs is not None:
            flat = place.flatten()
            logprobs = LogprobsTensors(
                logprobs.logprob_token_ids[flat], logprobs.logprobs[flat], logprobs.selected_token_ranks[flat]
            )
        return SamplerOutput(
            sampled_token_ids=padded.masked_fill(~kept, PLACEHOLDER_TOKEN_ID), logprobs_tensors=logprobs
        )


def replace_tokens(output: SamplerOutput, max_spec_len: int) -> SamplerOutput:
    """Pad an output of one token per request to the layout of a verified batch."""
    tokens = torch.nn.functional.pad(output.sampled_token_ids, (0, max_spec_len), value=PLACEHOLDER_TOKEN_ID)
    logprobs = output.logprobs_tensors
    if logprobs is not None:
        width = max_spec_len + 1
        logprobs = LogprobsTensors(
            logprobs.logprob_token_ids.repeat_interleave(width, dim=0),
            logprobs.logprobs.repeat_interleave(width, dim=0),
            logprobs.selected_token_ranks.repeat_interleave(width, dim=0),
        )
    return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=logprobs)


@dataclass(frozen=True)
class Rows:
    """Which rows of a verified batch's logits belong to which request. All int64, on the logits' device."""

    request: torch.Tensor  # [rows]: index of the request
    start: torch.Tensor  # [batch]: its first row
    count: torch.Tensor  # [batch]: its drafted positions (one row less than it has)

    @classmethod
    def of(cls, metadata: SpecDecodeMetadata, device: torch.device) -> Rows:
        counts = np.asarray(metadata.num_draft_tokens, dtype=np.int64)
        starts = np.cumsum(counts + 1) - (counts + 1)
        request = np.repeat(np.arange(len(counts)), counts + 1)
        request_, start, count = (torch.from_numpy(x).to(device, non_blocking=True) for x in (request, starts, counts))
        return cls(request_, start, count)

    def padded(self, max_spec_len: int, rows: int) -> torch.Tensor:
        """Return each position's row, int64 [batch, max_spec_len + 1]; positions past the last repeat a valid row."""
        offsets = torch.arange(max_spec_len + 1, device=self.start.device)
        return (self.start[:, None] + offsets).clamp(max=rows - 1)

    def padded_drafts(self, max_spec_len: int, nothing: int) -> torch.Tensor:
        """Return the index of each draft token, int64 [batch, max_spec_len]; `nothing` where the draft is shorter."""
        offsets = torch.arange(max_spec_len, device=self.start.device)
        first = self.start - torch.arange(len(self.start), device=self.start.device)
        return torch.where(offsets < self.count[:, None], first[:, None] + offsets, nothing)


def _row_metadata(per_request: SamplingMetadata, metadata: SpecDecodeMetadata, rows: Rows) -> SamplingMetadata | None:
    """Return the sampling metadata with one entry per row instead of one per request; None where that can't be
    expressed (thinking budgets, log-probabilities of chosen tokens)."""
    holder = getattr(per_request, "thinking_budget_state_holder", None)
    if (holder is not None and holder.has_tracked_requests()) or per_request.logprob_token_ids:
        return None
    counts = metadata.num_draft_tokens
    at = rows.request
    needs_text = bool(per_request.bad_words_token_ids) or not per_request.no_penalties
    spread: dict[str, Any] = {}
    for name in ("temperature", "top_p", "top_k"):
        value = getattr(per_request, name)
        spread[name] = None if value is None else value[at]
    if not per_request.no_penalties:
        for name in ("prompt_token_ids", "frequency_penalties", "presence_penalties", "repetition_penalties"):
            spread[name] = getattr(per_request, name)[at]
    if per_request.allowed_token_ids_mask is not None:
        spread["allowed_token_ids_mask"] = per_request.allowed_token_ids_mask[at]
    starts = np.cumsum([0, *(n + 1 for n in counts)])
    if needs_text:
        drafts = np.split(metadata.draft_token_ids.cpu().numpy(), np.cumsum(counts)[:-1])
        texts = [out + drafts[i][:j].tolist() for i, out in enumerate(per_request.output_token_ids[: len(counts)])
                 for j in range(counts[i] + 1)]  # fmt: skip
        bad_words = {int(starts[i]) + j: words for i, words in per_request.bad_words_token_ids.items()
                     for j in range(counts[i] + 1)}  # fmt: skip
        spread |= {"output_token_ids": texts, "bad_words_token_ids": bad_words}
    return replace(
        per_request,
        generators={},
        spec_token_ids=None,
        logitsprocs=_RowProcessors(per_request.logitsprocs, starts, counts),
        **spread,
    )


class _RowProcessors:
    """vLLM's built-in logits processors, applied to rows instead of requests."""

    def __init__(self, processors: Any, starts: np.ndarray, counts: Sequence[int]):
        self._starts, self._counts = starts, counts
        self.argmax_invariant: list[_Apply] = []
        self.non_argmax_invariant: list[_Apply] = []
        for processor in (*processors.argmax_invariant, *processors.non_argmax_invariant):
            if isinstance(processor, MinPLogitsProcessor):
                if processor.min_p_count:
                    self.argmax_invariant.append(_Apply(lambda x, p=processor: self._min_p(p, x)))
            elif isinstance(processor, LogitBiasLogitsProcessor):
                if processor.biases:
                    self.non_argmax_invariant.append(_Apply(lambda x, p=processor: self._logit_bias(p, x)))
            elif isinstance(processor, MinTokensLogitsProcessor):
                if processor.min_toks:
                    self.non_argmax_invariant.append(_Apply(lambda x, p=processor: self._min_tokens(p, x)))
            else:
                raise UnsupportedHost(
                    f"das: found logits processor {type(processor)}, allowed with drafts: vLLM's built-in ones"
                )

    def _rows(self, request: int) -> slice:
        return slice(int(self._starts[request]), int(self._starts[request + 1]))

    def _min_p(self, processor: MinPLogitsProcessor, logits: torch.Tensor) -> torch.Tensor:
        min_p = np.repeat(processor.min_p_cpu[: len(self._counts)], np.asarray(self._counts) + 1)
        probs = logits.softmax(dim=-1)
        floor = probs.amax(dim=-1, keepdim=True) * torch.from_numpy(min_p).to(logits.device)[:, None]
        return logits.masked_fill_(probs < floor, -float("inf"))

    def _logit_bias(self, processor: LogitBiasLogitsProcessor, logits: torch.Tensor) -> torch.Tensor:
        for request, biases in processor.biases.items():
            tokens = torch.tensor(list(biases), device=logits.device)
            logits[self._rows(request), tokens] += torch.tensor(list(biases.values()), device=logits.device)
        return logits

    def _min_tokens(self, processor: MinTokensLogitsProcessor, logits: torch.Tensor) -> torch.Tensor:
        for request, (min_tokens, output, stops, *_) in processor.min_toks.items():
            rows = self._rows(request)
            short = logits[rows.start : min(rows.stop, rows.start + max(0, min_tokens - len(output)))]
            tokens = torch.tensor(sorted(stops), device=logits.device)
            before = short[:, tokens]
            short[:, tokens] = -float("inf")
            # A grammar may allow only to stop; then it overrides min_tokens, as in vLLM since 0.30.
            over = short.isneginf().all(dim=1, keepdim=True)
            short[:, tokens] = torch.where(over, before, short[:, tokens])
        return logits


@dataclass(frozen=True)
class _Apply:
    apply: Any
