"""Lossless verification inside vLLM's V2 model runner: every row is drawn as stock vLLM
draws a token without drafts, with noise keyed by (request seed, position); a draft
token is accepted iff it equals the draw (drafter-invariant verification, arXiv
2408.07978).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from das_adapter.patching import patch


@patch(
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler:rejection_sample",
    since="0.29",
    needs=(
        "target_logits, draft_sampled, cu_num_logits, pos, expanded_idx_mapping,"
        " expanded_local_pos, temperature, seed, num_speculative_steps"
    ),
)
def verify_by_equality(stock: Any) -> Any:
    """Without it vLLM accepts drafts by the ratio of probabilities, and tokens depend
    on the drafter (V2 runner). It holds for all engines of the process. Remove this
    patch when vLLM verifies drafts by the token that it would have drawn.
    """
    return accept_drawn


def accept_drawn(
    logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    fed: torch.Tensor,
    cu_num_logits: torch.Tensor,
    pos: torch.Tensor,
    idx_mapping: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    num_speculative_steps: int,
    synthetic_conditional_rates: torch.Tensor | None = None,
    use_fp64: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Verify a batch, with the arguments of vLLM's `rejection_sample`; does not wait
    for the device.

    Args:
        logits: float32 [rows, vocab], processed; request after request, its drafted
            positions and one more.
        fed: int [rows], the token that was read at each row; -1: it may not be
            accepted.
        cu_num_logits: int32 [requests + 1], first row of each request.
        pos: int64 [rows], position of the row's token.
        expanded_idx_mapping: int64 [rows], slot of the row's request.
        expanded_local_pos: int32 [rows], number of the row within its request.
        temperature, seed: [slots].

    Returns:
        int64 [requests, num_speculative_steps + 1], the tokens, of which the first
        `num_sampled` count; and that, int32 [requests].
    """
    from vllm.v1.worker.gpu.sample import gumbel

    from das_adapter.engine.v2 import votes

    drawn = gumbel.gumbel_sample(
        logits,
        expanded_idx_mapping,
        temperature,
        seed,
        pos,
        apply_temperature=False,
        is_drafting=False,
        use_fp64=use_fp64,
    )
    requests = cu_num_logits.shape[0] - 1
    width = num_speculative_steps + 1
    rows = 32
    sampled = drawn.new_empty(requests, width)
    num_sampled = cu_num_logits.new_empty(requests, dtype=torch.int32)
    padded = 1 << num_speculative_steps.bit_length()
    votes.accept[(-(-requests // rows),)](
        drawn,
        fed,
        cu_num_logits,
        sampled,
        num_sampled,
        requests,
        WIDTH=width,
        PADDED=padded,
        ROWS=rows,
    )
    return sampled, num_sampled


@patch(
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler.__call__",
    since="0.29",
    needs="logits, input_batch",
)
def drop_drafts_beside_chosen_tokens(stock: Any) -> Any:
    """Without it a request with `logprob_token_ids` gets no log-probabilities of these
    tokens in a step with drafts (V2 runner). It holds for all engines of the process.
    Remove this patch when vLLM returns them beside drafts.
    """

    def call(
        self: Any,
        logits: torch.Tensor,
        input_batch: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if self.sampler.logprob_token_ids_state.max_num_token_ids(
            input_batch.idx_mapping_np
        ):
            return draw_without_drafts(self.sampler, logits, input_batch)
        return stock(self, logits, input_batch, *args, **kwargs)

    return call


def draw_without_drafts(
    sampler: Any,
    logits: torch.Tensor,
    batch: Any,
    *_: Any,
) -> Any:
    """Draw one token of each request with vLLM's sampler, and reject all drafts.

    Args:
        logits: float32 [rows, vocab]; request after request, its drafted positions and
            one more.
        batch: vLLM's `InputBatch`.
        _: what else vLLM gives its rejection sampler.

    Returns:
        vLLM's `SamplerOutput`, of one row a request.
    """
    first = batch.cu_num_logits[:-1]
    bounds = np.arange(batch.num_reqs + 1, dtype=np.int32)
    plain = replace(
        batch,
        num_draft_tokens=0,
        expanded_idx_mapping=batch.idx_mapping,
        expanded_local_pos=torch.zeros_like(first),
        logits_indices=batch.logits_indices[first],
        cu_num_logits=torch.arange(len(bounds), dtype=first.dtype, device=first.device),
        cu_num_logits_np=bounds,
    )
    output = sampler(logits[first], plain)
    output.num_rejected += batch.cu_num_logits.diff() - 1
    return output
