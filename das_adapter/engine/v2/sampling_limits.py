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


_BLOCK = 16384
"""Logits that are read at once."""


class SamplingLimits:
    """Min-p, top-k and top-p by slot, where CUDA graphs of a speculator read them."""

    def __init__(self, runner: Any) -> None:
        """`runner`: vLLM's model runner, which draws within them."""
        self._runner = runner
        slots = runner.max_num_reqs
        device = runner.device
        vocab = runner.vocab_size
        self._top_p = torch.ones(slots, device=device)
        self._min_p = torch.zeros(slots, device=device)
        self._top_k = torch.full(
            (slots,),
            vocab,
            dtype=torch.int32,
            device=device,
        )

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
            logits=logits,
            stride=logits.stride(0),
            slots=slots.contiguous(),
            temperature=temperature,
            top_k=self._top_k,
            top_p=self._top_p,
            min_p=self._min_p,
            vocab=vocab,
            BLOCK=_BLOCK,
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
    k_at = top_k + slot
    p_at = top_p + slot
    least_share_at = min_p + slot
    heat_at = temperature + slot
    k = tl.load(k_at, mask=known, other=vocab)
    p = tl.load(p_at, mask=known, other=1.0)
    least_share = tl.load(least_share_at, mask=known, other=0.0)
    heat = tl.load(heat_at, mask=known, other=0.0)
    has_top_k = k < vocab
    has_top_p = p < 1
    has_min_p = least_share > 0
    is_limited = has_top_k | has_top_p | has_min_p
    is_drawn = heat > 0
    if is_drawn & is_limited:
        logits += row * stride
        greatest = _greatest_logit(logits, vocab, BLOCK)
        least_share = tl.maximum(least_share, LEAST)
        least = greatest + heat * tl.log(least_share)
        if has_top_k:
            least = _threshold(
                logits=logits,
                vocab=vocab,
                least=least,
                greatest=greatest,
                heat=heat,
                goal=k.to(tl.float32),
                MASS=False,
                BLOCK=BLOCK,
            )
        if has_top_p:
            mass = _above(
                logits=logits,
                vocab=vocab,
                threshold=least,
                greatest=greatest,
                heat=heat,
                MASS=True,
                BLOCK=BLOCK,
            )
            least = _threshold(
                logits=logits,
                vocab=vocab,
                least=least,
                greatest=greatest,
                heat=heat,
                goal=p * mass,
                MASS=True,
                BLOCK=BLOCK,
            )
        lane = tl.arange(0, BLOCK)
        never = -float("inf")
        for begin in range(0, vocab, BLOCK):
            token = begin + lane
            is_token = token < vocab
            logit_at = logits + token
            value = tl.load(logit_at, mask=is_token, other=0.0)
            is_below = value.to(tl.float32) < least
            outside = is_token & is_below
            nothing = tl.full([BLOCK], never, value.dtype)
            tl.store(logit_at, nothing, mask=outside)


@triton.jit
def _greatest_logit(
    logits,  # float [vocab]
    vocab,  # int
    BLOCK: tl.constexpr,  # values that are read at once
):
    """Return the largest logit, float32."""
    lane = tl.arange(0, BLOCK)
    never = -float("inf")
    greatest = tl.full([BLOCK], never, tl.float32)
    for begin in range(0, vocab, BLOCK):
        token = begin + lane
        is_token = token < vocab
        logit_at = logits + token
        value = tl.load(logit_at, mask=is_token, other=never)
        value = value.to(tl.float32)
        greatest = tl.maximum(greatest, value)
    return tl.max(greatest, axis=0)


@triton.jit
def _threshold(
    logits,  # float [vocab]
    vocab,  # int
    least,  # float32: no threshold is below it
    greatest,  # float32: the largest logit
    heat,  # float32: the temperature
    goal,  # float32: how much is to be above the threshold
    MASS: tl.constexpr,  # see `_above`
    BLOCK: tl.constexpr,  # values that are read at once
):
    """Return about the largest logit above which there is as much as the `goal`, see
    `_above`.
    """
    high = greatest
    for _ in range(HALVINGS):
        middle = (least + high) * 0.5
        amount = _above(
            logits=logits,
            vocab=vocab,
            threshold=middle,
            greatest=greatest,
            heat=heat,
            MASS=MASS,
            BLOCK=BLOCK,
        )
        reached = amount >= goal
        least = tl.where(reached, middle, least)
        high = tl.where(reached, high, middle)
    return least


@triton.jit
def _above(
    logits,  # float [vocab]
    vocab,  # int
    threshold,  # float32
    greatest,  # float32: the largest logit
    heat,  # float32: the temperature
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,  # values that are read at once
):
    """Return how many logits are above a threshold, or with MASS their probability
    beside that of the largest.
    """
    lane = tl.arange(0, BLOCK)
    never = -float("inf")
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, vocab, BLOCK):
        token = begin + lane
        is_token = token < vocab
        logit_at = logits + token
        value = tl.load(logit_at, mask=is_token, other=never)
        value = value.to(tl.float32)
        amount = 1.0
        if MASS:
            scaled = (value - greatest) / heat
            amount = tl.exp(scaled)
        is_above = value >= threshold
        total += tl.where(is_above, amount, 0.0)
    return tl.sum(total, axis=0)
