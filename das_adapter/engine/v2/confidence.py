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
_BLOCK = 4096


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
        """Of the draft tokens, [requests, steps]."""

    def learn(self, table: Chances) -> None:
        """Take the chance of each kind, float32 [KINDS]."""
        told = torch.from_numpy(table)
        self._table.copy_(
            told.pin_memory() if self._table.is_cuda else told, non_blocking=True
        )

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
        most = self.kinds.shape[1]
        parts = logits.new_empty(rows, blocks, dtype=torch.float32)
        slots = slots.contiguous()
        sum_others[(rows, blocks)](
            parts,
            logits,
            logits.stride(0),
            drawn.contiguous(),
            slots,
            temperature,
            vocab,
            BLOCK=_BLOCK,
        )
        each, steps = (most, step.contiguous()) if step.dim() else (1, step)
        write_kind[(rows,)](
            self.kinds,
            self.chances,
            parts,
            slots,
            steps,
            self._table,
            blocks,
            most,
            EACH=each,
            PADDED=triton.next_power_of_2(blocks),
        )


@triton.jit
def sum_others(
    parts, logits, stride, drawn, slots, temperature, vocab, BLOCK: tl.constexpr
):
    """Sum the probabilities of a block of tokens but the drawn one, each beside that of
    the drawn one.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    slot = tl.load(slots + row)
    if slot >= 0:
        heat = tl.load(temperature + slot)
        heat = tl.where(heat > 0, heat, 1.0)
        token = tl.load(drawn + row)
        logits = logits + row * stride
        own = tl.load(logits + token).to(tl.float32)
        lane = block * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(
            logits + lane, mask=(lane < vocab) & (lane != token), other=-float("inf")
        ).to(tl.float32)
        beside = tl.exp(tl.minimum((value - own) / heat, 40.0))
        tl.store(parts + row * tl.num_programs(1) + block, tl.sum(beside, axis=0))


@triton.jit
def write_kind(
    kinds,
    chances,
    parts,
    slots,
    steps,
    table,
    blocks,
    most,
    EACH: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Write down the kind of a row's token, and its chance."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(slots + row) >= 0:
        block = tl.arange(0, PADDED)
        against = tl.sum(
            tl.load(parts + row * blocks + block, mask=block < blocks, other=0.0),
            axis=0,
        )
        odds = -tl.log2(tl.maximum(against, LEAST))
        kind = tl.minimum(tl.maximum(tl.floor(odds).to(tl.int32) + EVEN, 0), KINDS - 1)
        step = tl.load(steps + row * (EACH > 1))
        place = row // EACH * most + step
        tl.store(kinds + place, kind.to(tl.uint8))
        tl.store(chances + place, tl.load(table + kind))
