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


class SamplingLimits:
    """Min-p, top-k and top-p by slot, where CUDA graphs of a speculator read them."""

    def __init__(self, runner: Any) -> None:
        """`runner`: vLLM's model runner, which draws within them."""
        self._runner = runner
        slots = runner.max_num_reqs
        device = runner.device
        vocab = runner.vocab_size
        self._top_k = torch.full((slots,), vocab, dtype=torch.int32, device=device)
        self._top_p = torch.ones(slots, device=device)
        self._min_p = torch.zeros(slots, device=device)

    def copy_from_sampler(self) -> None:
        """Copy the limits of the present step from vLLM's sampler."""
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
        leave_out[(rows,)](
            logits,
            logits.stride(0),
            slots.contiguous(),
            temperature,
            self._top_k,
            self._top_p,
            self._min_p,
            vocab,
            BLOCK=16384,
            num_warps=16,
        )


@triton.jit
def leave_out(
    logits,  # float [rows, vocab]: before the temperature; changed
    stride,  # int: values from one row to the next
    slots,  # int64 [rows]; -1: of no request
    temperature,  # float32 [slots]; 0: greedy
    top_k,  # int32 [slots]; vocab: no limit
    top_p,  # float32 [slots]; 1: no limit
    min_p,  # float32 [slots]; 0: no limit
    vocab,  # int
    BLOCK: tl.constexpr,  # values that are read at once
):
    """Leave out what lies outside a row's min-p, then top-k, then top-p of what is
    left. One program a row.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    known = slot >= 0
    k = tl.load(top_k + slot, mask=known, other=vocab)
    p = tl.load(top_p + slot, mask=known, other=1.0)
    least_share = tl.load(min_p + slot, mask=known, other=0.0)
    heat = tl.load(temperature + slot, mask=known, other=0.0)
    is_limited = (k < vocab) | (p < 1) | (least_share > 0)
    if (heat > 0) & is_limited:
        logits += row * stride
        lane = tl.arange(0, BLOCK)
        never = -float("inf")
        best = tl.full([BLOCK], never, tl.float32)
        for begin in range(0, vocab, BLOCK):
            token = begin + lane
            value = tl.load(logits + token, mask=token < vocab, other=never)
            best = tl.maximum(best, value.to(tl.float32))
        most = tl.max(best, axis=0)
        least = most + heat * tl.log(tl.maximum(least_share, LEAST))
        if k < vocab:
            number = k.to(tl.float32)
            least = _threshold(logits, vocab, least, most, heat, number, False, BLOCK)
        if p < 1:
            mass = p * _above(logits, vocab, least, most, heat, True, BLOCK)
            least = _threshold(logits, vocab, least, most, heat, mass, True, BLOCK)
        for begin in range(0, vocab, BLOCK):
            token = begin + lane
            value = tl.load(logits + token, mask=token < vocab, other=0.0)
            outside = (token < vocab) & (value.to(tl.float32) < least)
            nothing = tl.full([BLOCK], never, value.dtype)
            tl.store(logits + token, nothing, mask=outside)


@triton.jit
def _threshold(
    logits, vocab, least, most, heat, goal, MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """Return about the largest logit above which there is as much as the `goal`, see
    `_above`.
    """
    high = most
    for _ in range(HALVINGS):
        middle = (least + high) * 0.5
        reached = _above(logits, vocab, middle, most, heat, MASS, BLOCK) >= goal
        least = tl.where(reached, middle, least)
        high = tl.where(reached, high, middle)
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
        token = begin + lane
        value = tl.load(logits + token, mask=token < vocab, other=-float("inf"))
        value = value.to(tl.float32)
        amount = 1.0
        if MASS:
            amount = tl.exp((value - most) / heat)
        total += tl.where(value >= threshold, amount, 0.0)
    return tl.sum(total, axis=0)
