"""Draft tokens from a model, pass by pass: what the policy copy and the neural drafters
have in common.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from das_adapter.core.model_drafts import ModelDrafts
from das_adapter.core.steps import Ints

logger = logging.getLogger("das_adapter")

Drafts = list[list[int]]
"""Draft tokens of each request of a batch."""


class ModelSource:
    """Runs a model for those rows of the runner's batch for which the controller wants
    its drafts.
    """

    follows = False
    """Whether it must see every step of the policy, those without drafts too."""

    def __init__(self, drafter: Any, drafts: ModelDrafts):
        """`drafter`: the `Proposer` that it is a part of."""
        self.drafts = drafts
        self._drafter = drafter
        self.drawn_with: dict[str, torch.Tensor] = {}
        """Probabilities with which the model has drawn each request's present draft,
        float32 [tokens, vocab], where vLLM's own noise verifies it.
        """

    @property
    def runner(self) -> Any:
        """vLLM's model runner."""
        return self._drafter.runner

    def load(self, policy: torch.nn.Module) -> None:
        """Load the model that drafts, once vLLM has loaded the policy."""

    def forget(self) -> None:
        """Give up what is known of the running requests: nobody drafts for a while."""

    def tell_probabilities(
        self,
        _: Any,
        given: tuple[Any, ...],
    ) -> tuple[Any, ...] | None:
        """Tell vLLM's rejection sampler with which probabilities the tokens of a step
        were drawn: a forward pre-hook of it, `given` the arguments. None: all drafts
        are from the history, whose tokens are certain.
        """
        drawn_with = self.drawn_with
        self.drawn_with = {}
        if not drawn_with:
            return None
        metadata, _, *others = given
        req_ids = self.runner.input_batch.req_ids
        probabilities = of_draft_tokens(drawn_with, req_ids, metadata)
        return metadata, probabilities, *others

    def draft(
        self,
        counts: Ints,
        lengths: np.ndarray,
        tokens: np.ndarray,
        drafts: Drafts,
        able: bool = True,
    ) -> None:
        """Draft `counts` [batch] tokens for each row of the batch, into `drafts`;
        `lengths` and `tokens` as in `Proposer.propose`. Where the first rank is not
        `able` to, nobody drafts.

        Every tensor-parallel rank must call it at every step, one that has failed too;
        the first rank's counts hold. Where one of several ranks fails in the passes,
        its process ends: vLLM's executor hears of that and ends the engine, but of an
        error only from the first rank, while the others would wait for this one in a
        collective.
        """
        agreed = self._agreed(counts, able)
        if agreed is None:
            self.forget()
            return
        rows = np.flatnonzero(agreed)
        if not len(rows) and not self.follows:
            return
        row_counts = agreed[rows]
        try:
            written = self._draft(
                rows,
                row_counts,
                lengths,
                tokens,
            )
        except Exception:
            self.forget()
            if self._drafter.ranks == 1:
                raise
            logger.exception(
                "das: a rank failed while all ranks drafted; its process ends, and the"
                " engine with it"
            )
            os._exit(1)
        for row, ids in zip(rows.tolist(), written, strict=True):
            drafts[row] = ids

    def _draft(
        self,
        rows: Ints,
        counts: Ints,
        lengths: np.ndarray,
        tokens: np.ndarray,
    ) -> Drafts:
        """Return the drafts of some rows: `counts` [rows] tokens at most."""
        raise NotImplementedError

    def _agreed(self, counts: np.ndarray, able: bool) -> np.ndarray | None:
        """Return the first rank's counts, as tensor-parallel ranks run the model
        together; None where it is not able to.
        """
        host_message = np.append(counts, int(able))
        message = torch.from_numpy(host_message)
        if self._drafter.ranks > 1:
            from vllm.distributed import get_tp_group

            group = get_tp_group()
            first = group.ranks[0]
            torch.distributed.broadcast(message, src=first, group=group.cpu_group)
        received: np.ndarray = message.numpy()
        is_able = bool(received[-1])
        return received[:-1] if is_able else None


def of_draft_tokens(
    drawn_with: dict[str, torch.Tensor],
    req_ids: Sequence[str],
    metadata: Any,
) -> torch.Tensor:
    """Return the probabilities with which a step's draft tokens were drawn, float32
    [tokens, vocab]: where nobody has drawn, the token is certain; where there is none
    (-1), as where the model's are no numbers, all are 0, so that vLLM draws from the
    policy's. `drawn_with`: see `ModelSource`, the scheduler may have shortened the
    drafts; `req_ids`, `metadata`: of the batch, vLLM's SpecDecodeMetadata of its
    step.
    """
    draft_tokens = metadata.draft_token_ids.long()
    tokens = draft_tokens[:, None]
    any_drawn = next(iter(drawn_with.values()))
    _, vocab = any_drawn.shape
    found = torch.zeros(len(tokens), vocab, device=tokens.device)
    found.scatter_(1, tokens.clamp(min=0), 1.0)
    begin = 0
    for req_id, count in zip(req_ids, metadata.num_draft_tokens, strict=False):
        if count and req_id in drawn_with:
            rows = drawn_with[req_id][:count]
            end = begin + len(rows)
            found[begin:end] = rows
        begin += count
    found.masked_fill_(tokens < 0, 0.0)
    return found.nan_to_num_()


def queries(
    blocks: torch.Tensor,
    block_size: int,
    begins: Ints,
    ends: Ints,
) -> CommonAttentionMetadata:
    """Describe a pass that reads positions `begins` to `ends` (exclusive) of some
    requests, int64 [requests] each. `blocks`: of each request's KV cache, int
    [requests, most blocks], on the device.
    """
    device = blocks.device
    requests = len(begins)
    counts = ends - begins
    starts = np.concatenate([[0], np.cumsum(counts)])
    host_positions = stretches(begins, counts)
    request_numbers = np.arange(requests)
    host_rows = np.repeat(request_numbers, counts)

    def on_device(values: torch.Tensor) -> torch.Tensor:
        return values.to(device, non_blocking=True)

    def on_host(values: np.ndarray) -> torch.Tensor:
        # vLLM counts some of them on, each by itself
        return torch.from_numpy(values.astype(np.int32))

    positions = on_device(torch.from_numpy(host_positions))
    rows = on_device(torch.from_numpy(host_rows))
    block_numbers = positions // block_size
    block = blocks[rows, block_numbers].long()
    offsets = positions % block_size
    slots = block * block_size + offsets
    described = {
        "query_start_loc": on_device(on_host(starts)),
        "query_start_loc_cpu": on_host(starts),
        "seq_lens": on_device(on_host(ends)),
        "_seq_lens_cpu": on_host(ends),
        "seq_lens_cpu_upper_bound": on_host(ends),
        "_num_computed_tokens_cpu": on_host(begins),
        "positions": positions,
        "num_reqs": requests,
        "num_actual_tokens": len(positions),
        "max_query_len": int(counts.max()),
        "max_seq_len": int(ends.max()),
        "causal": True,
        "is_prefilling": torch.zeros(requests, dtype=torch.bool),
        "block_table_tensor": blocks,
        "slot_mapping": slots,
    }
    fields = CommonAttentionMetadata.__dataclass_fields__
    for name in list(described):
        if name not in fields:  # in this version of vLLM
            del described[name]
    return CommonAttentionMetadata(**described)


def stretches(begins: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return begin, begin + 1, ... for each of some stretches, one after the other,
    int64: 5, 6, 2, 3, 4 for `begins` 5, 2 and `counts` 2, 3.
    """
    before = np.cumsum(counts) - counts
    places = np.arange(counts.sum())
    shifts = np.repeat(begins - before, counts)
    return places + shifts
