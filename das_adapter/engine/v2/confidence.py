"""How sure a model is of the tokens that it drafts, on the device: their kinds, and the
chance of each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from das_adapter.core import confidence
from das_adapter.core.steps import Chances

KINDS = tl.constexpr(confidence.KINDS)
EVEN = tl.constexpr(confidence.EVEN)
LEAST = tl.constexpr(1e-9)
"""Odds against a token that count as none, and their inverse as certain."""
MAX_LOG = tl.constexpr(40.0)
"""Logarithm of the greatest probability beside that of the drawn token that counts: its
exponential, and the sum of many, are float32.
"""
_BLOCK = 4096
"""Tokens whose probabilities a program sums."""


class DraftConfidence:
    """The kinds of the draft tokens of a step (`core.confidence`), and their
    chances.
    """

    def __init__(self, chances: torch.Tensor) -> None:
        """`chances`: where the chance of each token is written, given those before it,
        float32 [requests, steps].
        """
        self.chances = chances
        self._table = chances.new_zeros(confidence.KINDS)
        self.kinds = torch.zeros_like(chances, dtype=torch.uint8)
        """Kinds of the draft tokens, uint8 [requests, steps]."""

    def learn(self, table: Chances) -> None:
        """Take the chance of each kind, float32 [KINDS]."""
        sent = torch.from_numpy(table)
        if self._table.is_cuda:
            sent = sent.pin_memory()
        self._table.copy_(sent, non_blocking=True)

    def judge(
        self,
        logits: torch.Tensor,
        drawn: torch.Tensor,
        slots: torch.Tensor,
        temperature: torch.Tensor,
        step: torch.Tensor,
    ) -> None:
        """Write down the kind and the chance of drafted tokens.

        Args:
            logits: [rows, vocab], before the temperature.
            drawn: int64 [rows], the tokens.
            slots: int64 [rows], -1: of no request.
            temperature: float32 [slots].
            step: place of the tokens in their drafts, of all, or int [rows]: then a
                request has a row for each.
        """
        rows, vocab = logits.shape
        blocks = triton.cdiv(vocab, _BLOCK)
        max_tokens = self.kinds.shape[1]
        parts = logits.new_empty(rows, blocks, dtype=torch.float32)
        slots = slots.contiguous()
        sum_others[(rows, blocks)](
            parts=parts,
            logits=logits,
            stride=logits.stride(0),
            drawn=drawn.contiguous(),
            slots=slots,
            temperature=temperature,
            vocab=vocab,
            BLOCK=_BLOCK,
        )
        rows_each = 1
        if step.dim():
            rows_each = max_tokens
            step = step.contiguous()
        write_kind[(rows,)](
            kinds=self.kinds,
            chances=self.chances,
            parts=parts,
            slots=slots,
            steps=step,
            table=self._table,
            blocks=blocks,
            max_tokens=max_tokens,
            EACH=rows_each,
            PADDED=triton.next_power_of_2(blocks),
        )


@triton.jit
def sum_others(
    parts,  # float32 [rows, blocks]: written
    logits,  # float [rows, vocab]: before the temperature
    stride,  # int: values from one row to the next
    drawn,  # int64 [rows]: the tokens
    slots,  # int64 [rows]; -1: of no request
    temperature,  # float32 [slots]; 0: greedy, as 1 here
    vocab,  # int
    BLOCK: tl.constexpr,  # tokens of a program
):
    """Sum the probabilities of a block of tokens but the drawn one, each beside that of
    the drawn one.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    blocks = tl.num_programs(1)
    slot = tl.load(slots + row)
    if slot >= 0:
        heat = tl.load(temperature + slot)
        is_drawn = heat > 0
        heat = tl.where(is_drawn, heat, 1.0)
        token = tl.load(drawn + row)
        logits = logits + row * stride
        own = tl.load(logits + token).to(tl.float32)
        lane = block * BLOCK + tl.arange(0, BLOCK)
        is_token = lane < vocab
        is_other = lane != token
        others = is_token & is_other
        logit_at = logits + lane
        value = tl.load(logit_at, mask=others, other=-float("inf"))
        value = value.to(tl.float32)
        log_beside = (value - own) / heat
        log_beside = tl.minimum(log_beside, MAX_LOG)
        beside = tl.exp(log_beside)
        part_at = parts + row * blocks + block
        tl.store(part_at, tl.sum(beside, axis=0))


@triton.jit
def write_kind(
    kinds,  # uint8 [requests, max_tokens]: written
    chances,  # float32 [requests, max_tokens]: written
    parts,  # float32 [rows, blocks]: of `sum_others`
    slots,  # int64 [rows]; -1: of no request
    steps,  # int [1 or rows]: place of the tokens in their drafts
    table,  # float32 [KINDS]: chance of each kind
    blocks,  # int
    max_tokens,  # int: of a draft
    EACH: tl.constexpr,  # rows of a request; 1: `steps` is one for all
    PADDED: tl.constexpr,  # power of 2, `blocks` at least
):
    """Write down the kind of a row's token, and its chance."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(slots + row) >= 0:
        block = tl.arange(0, PADDED)
        own_parts = parts + row * blocks
        is_block = block < blocks
        part_at = own_parts + block
        part = tl.load(part_at, mask=is_block, other=0.0)
        against = tl.sum(part, axis=0)
        against = tl.maximum(against, LEAST)
        log_odds = -tl.log2(against)
        kind = tl.floor(log_odds).to(tl.int32) + EVEN
        kind = tl.maximum(kind, 0)
        kind = tl.minimum(kind, KINDS - 1)
        step_at = steps + row * (EACH > 1)
        step = tl.load(step_at)
        request = row // EACH
        place = request * max_tokens + step
        chance = tl.load(table + kind)
        tl.store(kinds + place, kind.to(tl.uint8))
        tl.store(chances + place, chance)
