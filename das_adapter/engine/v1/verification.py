"""Lossless verification inside vLLM's V1 model runner: the target is sampled with keyed noise, a draft token is
accepted iff it equals the sample (drafter-invariant verification, arXiv 2408.07978).

Every row of logits, of a drafted position or not, goes through the same `KeyedSampler`, so a token and its
log-probability are the same bit for bit, whatever was drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, cast

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, RejectionSampler
from vllm.v1.sample.sampler import _SAMPLING_EPS, Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from das_adapter.engine.v1.keyed_sample import Keys, Scores, divide, keyed_sample
from das_adapter.engine.v1.processors import MinTokens, acts, beside
from das_adapter.engine.v1.rows import Rows, by_row
from das_adapter.engine.v1.truncation import truncate

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
        """Sample each row of logits [rows, vocab] in the policy's dtype: tokens int32 [rows, 1]; see
        `Sampler.forward`."""
        if self.keys is None:  # a dummy run: what the first steps of a rollout would compile is compiled here
            for x, scores in product((logits[:1], logits[:1].float()), (None, "raw", "processed")):
                keyed_sample(x, None, self._keys_of(x), cast(Scores | None, scores))
        if not self.fused(sampling_metadata, logprobs_mode_override):
            for processor in sampling_metadata.logitsprocs.non_argmax_invariant:
                if isinstance(processor, MinTokens):
                    processor.positions = self._keys_of(logits).positions
            return super().forward(logits, sampling_metadata, predict_bonus_token, logprobs_mode_override)
        asked = sampling_metadata.max_num_logprobs is not None
        temperature = sampling_metadata.temperature
        if sampling_metadata.all_greedy:
            temperature = logits.new_zeros(len(logits), dtype=torch.float32)
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
        """Draw from logits float32 [rows, vocab] after penalties, which are changed in place: tokens int64 [rows]; see
        `Sampler.sample`."""
        if sampling_metadata.all_greedy:
            return super().sample(logits, sampling_metadata, logprobs_mode_override)
        greedy = None if sampling_metadata.all_random else logits.argmax(dim=-1)
        assert sampling_metadata.temperature is not None
        logits = divide(logits, sampling_metadata.temperature)
        for processor in sampling_metadata.logitsprocs.argmax_invariant:
            logits = processor.apply(logits)
        logits = truncate(logits, sampling_metadata.top_k, sampling_metadata.top_p)

        mode, processed = logprobs_mode_override or self.logprobs_mode, None
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
        rows = Rows(np.asarray(metadata.num_draft_tokens, dtype=np.int64))
        if _expands(sampling_metadata):
            output = self._sample_rows(logits, sampling_metadata, metadata, rows)
        else:  # a state that only vLLM can advance: sample one position, drop the drafts
            first = beside(rows.starts[:-1], logits)
            output = self._sample(logits[first], sampling_metadata, first)
            rows = Rows(np.zeros_like(rows.drafted))
        fed = torch.nn.functional.pad(metadata.draft_token_ids, (0, 1), value=PLACEHOLDER_TOKEN_ID)
        place, at = (beside(x, logits) for x in rows.padded(metadata.max_spec_len, nothing=len(fed) - 1))
        sampled = output.sampled_token_ids.squeeze(-1)[place]
        kept = torch.cumprod((sampled[:, :-1] == fed[at]).to(torch.int32), dim=1).bool()
        kept = torch.nn.functional.pad(kept, (1, 0), value=True)
        logprobs = output.logprobs_tensors
        return SamplerOutput(
            sampled_token_ids=sampled.masked_fill(~kept, PLACEHOLDER_TOKEN_ID),
            logprobs_tensors=logprobs and LogprobsTensors(*(x[place.flatten()] for x in logprobs[:3])),
        )

    def _sample_rows(
        self, logits: torch.Tensor, sampling: SamplingMetadata, metadata: SpecDecodeMetadata, rows: Rows
    ) -> SamplerOutput:
        """Sample every row; where the logits are copied to be processed, so many requests at a time that the copy's
        size is bounded."""
        most = len(logits) if self.sampler.fused(sampling) else max(1, _CHUNK_BYTES // (4 * logits.shape[1]))
        keys, outputs = self.sampler.keys, []
        for part in rows.parts(most):
            here = logits[part.span]
            positions = keys and keys.positions[part.span]
            outputs.append(self._sample(here, by_row(sampling, metadata, part, here, positions), part.span))
        return _joined(outputs)

    def _sample(self, logits: torch.Tensor, metadata: SamplingMetadata, rows: torch.Tensor | slice) -> SamplerOutput:
        keys = self.sampler.keys
        try:
            self.sampler.keys = keys and keys.at(rows)
            return self.sampler(logits, metadata)
        finally:
            self.sampler.keys = keys


def _joined(parts: Sequence[SamplerOutput]) -> SamplerOutput:
    if len(parts) == 1:
        return parts[0]
    logprobs = [part.logprobs_tensors[:3] for part in parts if part.logprobs_tensors is not None]
    return SamplerOutput(
        sampled_token_ids=torch.cat([part.sampled_token_ids for part in parts]),
        logprobs_tensors=LogprobsTensors(*map(torch.cat, zip(*logprobs, strict=True))) if logprobs else None,
    )


def _expands(sampling: SamplingMetadata) -> bool:
    """Return whether the metadata of requests can be spread over their rows: not with thinking budgets or
    log-probabilities of chosen tokens."""
    holder = getattr(sampling, "thinking_budget_state_holder", None)
    return not (holder is not None and holder.has_tracked_requests()) and not sampling.logprob_token_ids


def _only_temperature(sampling: SamplingMetadata) -> bool:
    """Return whether nothing but the temperature changes the logits."""
    processors = sampling.logitsprocs
    return (
        (sampling.top_k is None and sampling.top_p is None and sampling.no_penalties)
        and (sampling.allowed_token_ids_mask is None and not sampling.bad_words_token_ids and _expands(sampling))
        and not any(map(acts, (*processors.argmax_invariant, *processors.non_argmax_invariant)))
    )
