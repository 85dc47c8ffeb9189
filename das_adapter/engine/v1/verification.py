"""Lossless verification inside vLLM's V1 model runner: the target is sampled with keyed noise, a draft token is
accepted iff it equals the sample (drafter-invariant verification, arXiv 2408.07978).

Every row of logits, of a drafted position or not, goes through the same `KeyedSampler`, so a token and its
log-probability are the same bit for bit, whatever was drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, cast

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, RejectionSampler
from vllm.v1.sample.sampler import _SAMPLING_EPS, Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from das_adapter.engine.v1.keyed_sample import Keys, Scores, divide, keyed_sample
from das_adapter.engine.v1.truncation import truncate
from das_adapter.errors import UnsupportedHost

_SCORES: dict[str, Scores] = {"raw_logprobs": "raw", "processed_logprobs": "processed"}
_CHUNK_BYTES = 2**30
"""Size of the float32 logits that are processed at once where requests truncate or shift their distribution."""


class KeyedSampler(Sampler):
    """vLLM's sampler with its random draw replaced. Where requests only have a temperature, one fused draw takes the
    place of the whole chain; else everything around the draw is inherited."""

    keys: Keys | None = None
    """Of the rows of the next call; None in dummy runs."""

    def forward(
        self,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        predict_bonus_token: bool = False,
        logprobs_mode_override: Any = None,
    ) -> SamplerOutput:
        """Sample each row; see `Sampler.forward`.

        Args:
            logits: [rows, vocab] in the policy's dtype.
            sampling_metadata: of the rows.
            predict_bonus_token, logprobs_mode_override: as in the base class.

        Returns:
            int32 [rows, 1] tokens, and their log-probabilities if asked for.
        """
        if self.keys is None:  # a dummy run: what the first steps of a rollout would compile is compiled here
            for x, scores in product((logits[:1], logits[:1].float()), (None, "raw", "processed")):
                keyed_sample(x, None, self._keys_of(x), cast(Scores | None, scores))
        if not self.fused(sampling_metadata, logprobs_mode_override):
            for processor in sampling_metadata.logitsprocs.non_argmax_invariant:
                if isinstance(processor, MinTokens):
                    processor.positions = self._keys_of(logits).positions
            return super().forward(logits, sampling_metadata, predict_bonus_token, logprobs_mode_override)
        asked = sampling_metadata.max_num_logprobs is not None
        temperature = (
            logits.new_zeros(len(logits), dtype=torch.float32)
            if sampling_metadata.all_greedy
            else (sampling_metadata.temperature)
        )
        scores = _SCORES[logprobs_mode_override or self.logprobs_mode] if asked else None
        drawn = keyed_sample(logits, temperature, self._keys_of(logits), scores)
        tokens, logprobs = drawn.tokens.to(torch.int32)[:, None], None
        if drawn.logprobs is not None and drawn.ranks is not None:
            logprobs = LogprobsTensors(tokens, drawn.logprobs[:, None], drawn.ranks)
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=logprobs)

    def fused(self, sampling_metadata: SamplingMetadata, logprobs_mode_override: Any = None) -> bool:
        """Return whether a batch needs no more than the fused draw: nothing changes its logits but the temperature, and
        at most the log-probability of the drawn token is asked for."""
        asked, mode = sampling_metadata.max_num_logprobs, logprobs_mode_override or self.logprobs_mode
        return _only_temperature(sampling_metadata) and (asked is None or (asked == 0 and mode in _SCORES))

    def sample(
        self, logits: torch.Tensor, sampling_metadata: SamplingMetadata, logprobs_mode_override: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draw from processed logits; see `Sampler.sample`.

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
        logits = divide(logits, sampling_metadata.temperature)
        for processor in sampling_metadata.logitsprocs.argmax_invariant:
            logits = processor.apply(logits)
        logits = truncate(logits, sampling_metadata.top_k, sampling_metadata.top_p)

        mode = logprobs_mode_override or self.logprobs_mode
        processed = None
        if mode == "processed_logits":
            processed = logits
        elif mode == "processed_logprobs":
            processed = self.compute_logprobs(logits)

        sampled = keyed_sample(logits, None, self._keys_of(logits)).tokens
        if greedy is not None:
            sampled = torch.where(sampling_metadata.temperature < _SAMPLING_EPS, greedy, sampled)
        return sampled, processed

    def _keys_of(self, logits: torch.Tensor) -> Keys:
        if self.keys is not None:
            return self.keys
        none = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        return Keys(none, none)


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
        if not _expands(sampling_metadata):  # a state that only vLLM can advance: sample one position, drop the drafts
            output = self._sample(logits[rows.start], sampling_metadata, rows.start)
            return replace_tokens(output, metadata.max_spec_len)

        output = self._sample_rows(logits, sampling_metadata, metadata, rows)
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

    def _sample_rows(
        self, logits: torch.Tensor, per_request: SamplingMetadata, metadata: SpecDecodeMetadata, rows: Rows
    ) -> SamplerOutput:
        """Sample every row; where the logits are copied to be processed, so many requests at a time that the copy's
        size is bounded."""
        counts = np.asarray(metadata.num_draft_tokens, dtype=np.int64)
        ends = np.cumsum(counts + 1)
        most = len(logits) if self.sampler.fused(per_request) else max(1, _CHUNK_BYTES // (4 * logits.shape[1]))
        parts, first, begin = [], 0, 0
        while first < len(counts):
            last = max(first + 1, int(np.searchsorted(ends, begin + most, side="right")))
            end = int(ends[last - 1])
            at, keys = slice(begin, end), self.sampler.keys
            positions = None if keys is None else keys.positions[at]
            chunk = _row_metadata(per_request, metadata, rows.request[at], first, last, positions)
            parts.append(self._sample(logits[at], chunk, at))
            first, begin = last, end
        return parts[0] if len(parts) == 1 else _joined(parts)

    def _sample(self, logits: torch.Tensor, metadata: SamplingMetadata, rows: torch.Tensor | slice) -> SamplerOutput:
        keys = self.sampler.keys
        try:
            self.sampler.keys = None if keys is None else keys.at(rows)
            return self.sampler(logits, metadata)
        finally:
            self.sampler.keys = keys


def _joined(parts: Sequence[SamplerOutput]) -> SamplerOutput:
    tokens = torch.cat([part.sampled_token_ids for part in parts])
    logprobs = [part.logprobs_tensors for part in parts]
    if logprobs[0] is None:
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=None)
    joined = (
        torch.cat([getattr(x, name) for x in logprobs])
        for name in ("logprob_token_ids", "logprobs", "selected_token_ranks")
    )
    return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=LogprobsTensors(*joined))


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


def _expands(per_request: SamplingMetadata) -> bool:
    """Return whether the metadata of requests can be spread over their rows: not with thinking budgets or
    log-probabilities of chosen tokens."""
    holder = getattr(per_request, "thinking_budget_state_holder", None)
    return not (holder is not None and holder.has_tracked_requests()) and not per_request.logprob_token_ids


def _only_temperature(sampling: SamplingMetadata) -> bool:
    """Return whether nothing but the temperature changes the logits."""
    processors = sampling.logitsprocs
    return (
        (sampling.top_k is None and sampling.top_p is None and sampling.no_penalties)
        and (sampling.allowed_token_ids_mask is None and not sampling.bad_words_token_ids and _expands(sampling))
        and not any(map(_acts, (*processors.argmax_invariant, *processors.non_argmax_invariant)))
    )


def _acts(processor: Any) -> bool:
    """Return whether a logits processor changes the logits of any request of the batch."""
    for kind, state in (
        (MinPLogitsProcessor, "min_p_count"),
        (LogitBiasLogitsProcessor, "biases"),
        (MinTokensLogitsProcessor, "min_toks"),
    ):
        if isinstance(processor, kind):
            return bool(getattr(processor, state))
    return True


def _row_metadata(
    per_request: SamplingMetadata,
    metadata: SpecDecodeMetadata,
    at: torch.Tensor,
    first: int,
    last: int,
    positions: torch.Tensor | None,
) -> SamplingMetadata:
    """Return the sampling metadata of the requests from `first` to before `last`, with one entry per row instead of one
    per request; `at`: int64 [rows], the request of each row; `positions`: as in `Keys`."""
    counts = metadata.num_draft_tokens[first:last]
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
        before = sum(metadata.num_draft_tokens[:first])
        ids = metadata.draft_token_ids[before : before + sum(counts)].cpu().numpy()
        drafts = np.split(ids, np.cumsum(counts)[:-1])
        texts = [
            out + drafts[i][:j].tolist()
            for i, out in enumerate(per_request.output_token_ids[first:last])
            for j in range(counts[i] + 1)
        ]
        bad_words = {
            int(starts[i - first]) + j: words
            for i, words in per_request.bad_words_token_ids.items()
            if first <= i < last
            for j in range(counts[i - first] + 1)
        }
        spread |= {"output_token_ids": texts, "bad_words_token_ids": bad_words}
    return replace(
        per_request,
        generators={},
        spec_token_ids=None,
        logitsprocs=_RowProcessors(per_request.logitsprocs, starts, counts, first, positions),
        **spread,
    )


class MinTokens(MinTokensLogitsProcessor):
    """vLLM's `min_tokens`, by what each row's position says that a request has written. vLLM goes by a list that, under
    asynchronous scheduling, holds all draft tokens of the step before, which may yet be rejected: stops would be
    allowed by so many tokens too early."""

    positions: torch.Tensor | None = None
    """Of the requests' rows in the next call of `apply`, as in `Keys`."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool):
        super().__init__(vllm_config, device, is_pin_memory)
        unsure = 2 * (vllm_config.speculative_config.num_speculative_tokens + 1)
        stock: Callable[..., Any] = MinTokensLogitsProcessor.add_request

        def add_request(params: Any, prompt: list[int] | None, output: list[int]) -> Any:
            if params.min_tokens and prompt is None:
                raise UnsupportedHost(
                    "das: found min_tokens with prompt embeddings, allowed with drafts: a prompt of tokens"
                )
            return stock(params, prompt, _Written(output, len(prompt or ()), unsure))

        self.add_request: Callable[..., Any] = add_request

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Exclude what would end a request too early; one row a request, as `LogitsProcessor.apply`."""
        return self.ban(logits, self.positions, lambda request: slice(request, request + 1))

    def ban(
        self, logits: torch.Tensor, positions: torch.Tensor | None, rows_of: Callable[[int], slice | None]
    ) -> torch.Tensor:
        """Exclude what would end a request too early, in place.

        Args:
            logits: [rows, vocab].
            positions: int64 [rows], as in `Keys`.
            rows_of: the rows of a request, None if they are not among these.
        """
        for request, (least, written, stops, *_) in self.min_toks.items():
            rows = rows_of(request)
            if rows is None or not stops:
                continue
            assert positions is not None and isinstance(written, _Written)
            short, tokens, mine = (
                positions[rows] < written.prompt + least - 1,
                _there(sorted(stops), logits),
                logits[rows],
            )
            before = mine[:, tokens]
            mine[:, tokens] = before.masked_fill(short[:, None], -float("inf"))
            # A grammar may allow only to stop; then it overrides min_tokens, as in vLLM since 0.30.
            over = mine.isneginf().all(dim=1, keepdim=True)
            mine[:, tokens] = torch.where(over, before, mine[:, tokens])
        return logits


@dataclass(frozen=True)
class _Written(Sequence[int]):
    """What a request has written for sure, as far as vLLM looks at its length."""

    output: list[int]
    prompt: int
    """Tokens of the prompt."""
    unsure: int

    def __len__(self) -> int:
        return max(0, len(self.output) - self.unsure)

    def __getitem__(self, at: Any) -> Any:
        return self.output[at]


class _RowProcessors:
    """vLLM's built-in logits processors, applied to rows instead of requests."""

    def __init__(
        self, processors: Any, starts: np.ndarray, counts: Sequence[int], first: int, positions: torch.Tensor | None
    ):
        """
        Args:
            processors: vLLM's, of the whole batch.
            starts: int64 [requests + 1], where the rows of some requests begin.
            counts: [requests], their draft tokens.
            first: index of the first of them in the batch.
            positions: of the rows, as in `Keys`.
        """
        self._starts, self._counts, self._first = starts, counts, first
        self.argmax_invariant: list[_Apply] = []
        self.non_argmax_invariant: list[_Apply] = []
        for processor in (*processors.argmax_invariant, *processors.non_argmax_invariant):
            if not _acts(processor):
                continue
            if isinstance(processor, MinPLogitsProcessor):
                self.argmax_invariant.append(_Apply(lambda x, p=processor: self._min_p(p, x)))
            elif isinstance(processor, LogitBiasLogitsProcessor):
                self.non_argmax_invariant.append(_Apply(lambda x, p=processor: self._logit_bias(p, x)))
            elif isinstance(processor, MinTokens):
                self.non_argmax_invariant.append(_Apply(lambda x, p=processor: p.ban(x, positions, self._rows)))
            else:
                raise UnsupportedHost(
                    f"das: found logits processor {type(processor)}, allowed with drafts: vLLM's built-in ones"
                )

    def _rows(self, request: int) -> slice | None:
        """Return the rows of a request of the batch, None if they are not among these."""
        i = request - self._first
        return slice(int(self._starts[i]), int(self._starts[i + 1])) if 0 <= i < len(self._counts) else None

    def _min_p(self, processor: MinPLogitsProcessor, logits: torch.Tensor) -> torch.Tensor:
        mine = processor.min_p_cpu[self._first : self._first + len(self._counts)]
        min_p = np.repeat(mine, np.asarray(self._counts) + 1)
        probs = logits.softmax(dim=-1)
        floor = probs.amax(dim=-1, keepdim=True) * torch.from_numpy(min_p).to(logits.device, non_blocking=True)[:, None]
        return logits.masked_fill_(probs < floor, -float("inf"))

    def _logit_bias(self, processor: LogitBiasLogitsProcessor, logits: torch.Tensor) -> torch.Tensor:
        for request, biases in processor.biases.items():
            if (rows := self._rows(request)) is not None:
                logits[rows, _there(list(biases), logits)] += _there(list(biases.values()), logits)
        return logits


def _there(values: list[Any], logits: torch.Tensor) -> torch.Tensor:
    """Return a tensor of numbers beside the logits, without waiting for the device."""
    return torch.tensor(values).to(logits.device, non_blocking=True)


@dataclass(frozen=True)
class _Apply:
    apply: Any
