"""Min-p, top-k and top-p of the requests that a model drafts for: the policy draws
within them, and so must the model, or its tokens are accepted less often.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

LEAST = tl.constexpr(2e-9)
"""Smallest min-p: what is less likely, beside the most likely token, is left out
whatever the limit.
"""
HALVINGS = tl.constexpr(12)
"""Halvings of the way to `LEAST` after which a limit is near enough: drafts need not be
exact to the last bit.
"""


class Limits:
    """Min-p, top-k and top-p by slot, where CUDA graphs of a speculator read them."""

    def __init__(self, runner: Any) -> None:
        """`runner`: vLLM's model runner, which draws within them."""
        self._runner = runner
        slots = runner.max_num_reqs
        self._top_k = torch.full(
            (slots,), runner.vocab_size, dtype=torch.int32, device=runner.device
        )
        self._top_p = torch.ones(slots, device=runner.device)
        self._min_p = torch.zeros(slots, device=runner.device)

    def take(self) -> None:
        """Take those of the present step."""
        sampling = self._runner.sampler.sampling_states
        self._top_k.copy_(sampling.top_k.gpu)
        self._top_p.copy_(sampling.top_p.gpu)
        self._min_p.copy_(sampling.min_p.gpu)

    def apply(
        self, logits: torch.Tensor, slots: torch.Tensor, temperature: torch.Tensor
    ) -> None:
        """Leave out, in place, what lies outside a row's limits; rows without limits
        are not read.

        Args:
            logits: [rows, vocab], before the temperature.
            slots: int64 [rows], -1: of no request.
            temperature: float32 [slots].
        """
        rows, vocab = logits.shape
        limited = self._top_k, self._top_p, self._min_p
        leave_out[(rows,)](
            logits,
            logits.stride(0),
            slots.contiguous(),
            temperature,
            *limited,
            vocab,
            BLOCK=16384,
            num_warps=16,
        )


@triton.jit
def leave_out(
    logits, stride, slots, temperature, top_k, top_p, min_p, vocab, BLOCK: tl.constexpr
):
    """Leave out what lies outside a row's min-p, then top-k, then top-p of what is
    left. One program a row.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    known = slot >= 0
    k = tl.load(top_k + slot, mask=known, other=vocab)
    p = tl.load(top_p + slot, mask=known, other=1.0)
    part = tl.load(min_p + slot, mask=known, other=0.0)
    heat = tl.load(temperature + slot, mask=known, other=0.0)
    if (heat > 0) & ((k < vocab) | (p < 1) | (part > 0)):
        logits += row * stride
        lane = tl.arange(0, BLOCK)
        best = tl.full([BLOCK], -float("inf"), tl.float32)
        for begin in range(0, vocab, BLOCK):
            value = tl.load(
                logits + begin + lane, mask=begin + lane < vocab, other=-float("inf")
            )
            best = tl.maximum(best, value.to(tl.float32))
        most = tl.max(best, axis=0)
        least = most + heat * tl.log(tl.maximum(part, LEAST))
        if k < vocab:
            least = _search(
                logits, vocab, least, most, heat, k.to(tl.float32), False, BLOCK
            )
        if p < 1:
            goal = p * _above(logits, vocab, least, most, heat, True, BLOCK)
            least = _search(logits, vocab, least, most, heat, goal, True, BLOCK)
        for begin in range(0, vocab, BLOCK):
            inside = begin + lane < vocab
            value = tl.load(logits + begin + lane, mask=inside, other=0.0)
            outside = inside & (value.to(tl.float32) < least)
            tl.store(
                logits + begin + lane,
                tl.full([BLOCK], -float("inf"), value.dtype),
                mask=outside,
            )


@triton.jit
def _search(
    logits, vocab, least, most, heat, goal, MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """Return about the largest logit above which there is as much as the `goal`."""
    high = most
    for _ in range(HALVINGS):
        middle = (least + high) * 0.5
        enough = _above(logits, vocab, middle, most, heat, MASS, BLOCK) >= goal
        least = tl.where(enough, middle, least)
        high = tl.where(enough, high, middle)
    return least


@triton.jit
def _above(
    logits, vocab, threshold, most, heat, MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """Return how many logits are above a threshold, or with MASS their probability
    beside that of the largest.
    """
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, vocab, BLOCK):
        value = tl.load(
            logits + begin + lane, mask=begin + lane < vocab, other=-float("inf")
        ).to(tl.float32)
        amount = 1.0
        if MASS:
            amount = tl.exp((value - most) / heat)
        total += tl.where(value >= threshold, amount, 0.0)
    return tl.sum(total, axis=0)
