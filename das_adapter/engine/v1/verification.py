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
    """Of the rows of the next call; None in dummy runs."""

    def __init__(self, logprobs_mode: Any = "raw_logprobs") -> None:
        super().__init__(logprobs_mode)
        self.topk_topp_sampler.forward = self._draw

    def apply_logits_processors(
        self, logits: torch.Tensor, sampling: SamplingMetadata, *args: Any
    ) -> torch.Tensor:
        """As vLLM's. With thinking budgets each request has one row (`expands`); where
        an engine speculates, vLLM looks for as many as it has draft tokens.
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
        none = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        return keyed_sample(logits, self.keys or Keys(none, none)), processed


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
        drafted = np.asarray(metadata.num_draft_tokens, dtype=np.int64)
        starts = np.cumsum(drafted + 1) - drafted - 1
        if expands(sampling_metadata):
            most = max(1, _CHUNK_BYTES // (4 * logits.shape[1]))
            parts = []
            for begin in range(0, len(logits), most):
                rows = slice(begin, min(begin + most, len(logits)))
                parts.append(
                    self._sample(
                        logits[rows],
                        by_row(sampling_metadata, metadata, rows, starts),
                        rows,
                    )
                )
            output = _joined(parts)
        else:
            # a state that only vLLM can advance: sample one position, drop the drafts
            first = beside(starts, logits)
            output = self._sample(logits[first], sampling_metadata, first)
            drafted, starts = np.zeros_like(drafted), np.arange(len(drafted))
        requests = np.arange(len(drafted))[:, None]
        ahead = np.arange(metadata.max_spec_len + 1)
        row = np.minimum(starts[:, None] + ahead, len(output.sampled_token_ids) - 1)
        inside = ahead[:-1] < drafted[:, None]
        draft = np.where(
            inside,
            starts[:, None] - requests + ahead[:-1],
            len(metadata.draft_token_ids),
        )
        fed = torch.nn.functional.pad(
            metadata.draft_token_ids, (0, 1), value=PLACEHOLDER_TOKEN_ID
        )
        place = beside(row, logits)
        sampled = output.sampled_token_ids.squeeze(-1)[place]
        kept = torch.cumprod(
            (sampled[:, :-1] == fed[beside(draft, logits)]).to(torch.int32), dim=1
        ).bool()
        kept = torch.nn.functional.pad(kept, (1, 0), value=True)
        logprobs = output.logprobs_tensors
        return SamplerOutput(
            sampled_token_ids=sampled.masked_fill(~kept, PLACEHOLDER_TOKEN_ID),
            logprobs_tensors=logprobs
            and LogprobsTensors(*(x[place.flatten()] for x in logprobs[:3])),
        )

    def _sample(
        self,
        logits: torch.Tensor,
        metadata: SamplingMetadata,
        rows: torch.Tensor | slice,
    ) -> SamplerOutput:
        keys = self.sampler.keys
        try:
            self.sampler.keys = keys and keys.at(rows)
            # The sampler changes them in place; where it fails, the step is drawn from
            # them again without drafts.
            return self.sampler(logits.to(torch.float32, copy=True), metadata)
        finally:
            self.sampler.keys = keys


def beside(values: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Copy numbers to the device of a tensor, without waiting for it."""
    return torch.as_tensor(values).to(tensor.device, non_blocking=True)


def by_row(
    sampling: SamplingMetadata, metadata: SpecDecodeMetadata, rows: slice, starts: Ints
) -> SamplingMetadata:
    """Return sampling metadata with one entry for each of some rows of logits instead
    of one for each request of the batch; `starts`: each request's first row,
    [batch].
    """
    requests = (
        np.searchsorted(starts, np.arange(rows.start, rows.stop), side="right") - 1
    )
    at = beside(requests, metadata.draft_token_ids)
    names = ["temperature", "top_p", "top_k", "allowed_token_ids_mask"]
    if not sampling.no_penalties:
        names += [
            "prompt_token_ids",
            "frequency_penalties",
            "presence_penalties",
            "repetition_penalties",
        ]
    given = {name: getattr(sampling, name) for name in names}
    spread: dict[str, Any] = {
        name: None if value is None else value[at] for name, value in given.items()
    }
    if sampling.bad_words_token_ids or not sampling.no_penalties:
        drafts = metadata.draft_token_ids.tolist()
        texts = []
        words = {}
        for i, request in enumerate(requests.tolist()):
            first = int(starts[request])
            before = drafts[first - request : rows.start + i - request]
            texts.append(sampling.output_token_ids[request] + before)
            if request in sampling.bad_words_token_ids:
                words[i] = sampling.bad_words_token_ids[request]
        spread |= {"output_token_ids": texts, "bad_words_token_ids": words}
    spread["logitsprocs"] = _at_rows(sampling.logitsprocs, rows, starts)
    return replace(sampling, generators={}, spec_token_ids=None, **spread)


def _at_rows(
    processors: LogitsProcessors, rows: slice, starts: Ints
) -> LogitsProcessors:
    """Return vLLM's logits processors for some rows of logits: beside drafts there is
    that of `min_tokens` alone, and a request whose end it still excludes has no draft,
    and one row.
    """
    found = []
    for processor in processors.all:
        first = {
            int(starts[request]) - rows.start: held
            for request, held in processor.min_toks.items()
        }
        processor = copy.copy(processor)
        processor.min_toks = {
            row: held
            for row, held in first.items()
            if 0 <= row < rows.stop - rows.start
        }
        # tensors anew
        moved = [
            (row, row, MoveDirectionality.UNIDIRECTIONAL) for row in processor.min_toks
        ]
        processor.update_state(
            BatchUpdate(len(moved), removed=[], added=[], moved=moved)
        )
        found.append(processor)
    return LogitsProcessors(found)


def _joined(parts: Sequence[SamplerOutput]) -> SamplerOutput:
    logprobs = [
        part.logprobs_tensors[:3] for part in parts if part.logprobs_tensors is not None
    ]
    return SamplerOutput(
        sampled_token_ids=torch.cat([part.sampled_token_ids for part in parts]),
        logprobs_tensors=(
            LogprobsTensors(*map(torch.cat, zip(*logprobs, strict=True)))
            if logprobs
            else None
        ),
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
    given = {
        name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")
    }
    return replace(
        sampling,
        **{name: value[rows] for name, value in given.items() if value is not None},
    )


def draw(
    logits: torch.Tensor, keys: Keys | None, sampling: SamplingMetadata
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
    scaled = Sampler.apply_temperature(
        logits.to(torch.float32, copy=True), sampling.temperature, sampling.all_random
    )
    scaled = truncate(scaled, sampling.top_k, sampling.top_p)
    probabilities = None
    if keys is None:
        probabilities = scaled.softmax(dim=-1)
        drawn = topk_topp_sampler.random_sample(probabilities.clone(), {})
    else:
        drawn = keyed_sample(scaled, keys)
    if not sampling.all_random:
        drawn = torch.where(
            sampling.temperature < _SAMPLING_EPS, logits.argmax(dim=-1), drawn
        )
    return drawn, probabilities


def truncate(
    logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None
) -> torch.Tensor:
    """Exclude (-inf) what lies outside top-k and top-p, in place, on a GPU with vLLM's
    Triton kernels alone.

    Up to 0.29 vLLM itself sorts below eight rows. The two may round a row's cumulative
    probabilities differently, and then what a row keeps would depend on how many rows
    draft. From 0.30 on it may all the same, by as little: up to 64 rows, the fewer
    there are, the more parts these kernels add up a row's top-p in. Arguments are
    float32 [rows, vocab], int32 [rows] and float32 [rows]; None: no limit.
    """
    if (
        (top_k is not None or top_p is not None)
        and logits.is_cuda
        and topk_topp_sampler.HAS_TRITON
    ):
        return topk_topp_sampler.apply_top_k_top_p_triton(logits, top_k, top_p)
    return topk_topp_sampler.apply_top_k_top_p(logits, top_k, top_p)
