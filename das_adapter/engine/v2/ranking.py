"""Choose the draft tokens that a step verifies, on the device: those of the highest
survival.

The survival of a draft token is the chance that it and those before it are accepted,
times what a token of its request is worth. The least survival that is admitted is
searched for bit by bit: floats that are not negative are ordered as the integers of the
same bits, of which 30 are enough up to 1. The upper 16 of them count, a precision of
2^-9: which of nearly equal tokens are admitted does not matter. Nothing is sorted, and
each pass only counts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

_TILE = 4096
"""Draft tokens that are looked at at once, in registers."""
_CERTAIN = tl.constexpr(0x3F800000)
"""The bits of 1.0 as a float32: no survival is above it."""
_DROPPED_BITS = tl.constexpr(14)
"""Lower bits of a survival that do not count: 16 of its 30 are left, a key."""


class Ranking:
    """Admits the draft tokens of a batch, and lays out the tokens of its requests."""

    def __init__(self, slots: int, steps: int, device: torch.device) -> None:
        """`steps`: most tokens of a draft."""
        padded = triton.next_power_of_2(steps)
        rows = min(1024, max(1, _TILE // padded))
        self._keys = torch.empty(slots, padded, dtype=torch.int32, device=device)
        self._constants = {
            "most_requests": slots,
            "STEPS": steps,
            "PADDED": padded,
            "ROWS": rows,
        }

    def bind(
        self,
        chances: torch.Tensor,
        admitted: torch.Tensor,
        cu_num_logits: torch.Tensor,
        query_start_loc: torch.Tensor,
        bonus: int,
    ) -> None:
        """Take what the kernel reads and writes, see `admit`."""
        self._chances = chances
        self._written = admitted, cu_num_logits, query_start_loc
        self._constants["bonus"] = bonus

    def check(self) -> None:
        """Compile the kernel, and hold it against its definition.

        Raises:
            RuntimeError: it computes something else, as a defect of its compiler would
                have it.
        """
        rng = np.random.default_rng(0)
        slots, steps = self._chances.shape
        num_drafted = rng.integers(0, steps + 1, slots)
        num_others = np.ones(slots, dtype=np.int32)
        worth = np.ones(slots, dtype=np.float32)
        shares = np.ones((3, slots), dtype=np.int32)
        shares[0] = num_drafted
        shares[1] = num_others
        shares[2] = worth.view(np.int32)
        # products of them are exact
        chances = rng.choice([0.25, 0.5, 1.0], (slots, steps)).astype(np.float32)
        budget = int(num_drafted.sum()) // 2
        self._chances.copy_(torch.from_numpy(chances))
        every_slot = torch.arange(slots, device=self._chances.device)
        self.admit(shares, every_slot, budget)

        num_admitted = most_likely(keys_of(shares, chances), budget)
        num_logits = num_admitted + self._constants["bonus"]
        num_tokens = num_admitted + num_others
        expected = (
            num_admitted,
            np.append(0, np.cumsum(num_logits)),
            np.append(0, np.cumsum(num_tokens)),
        )
        for written, values in zip(self._written, expected, strict=True):
            if written[: len(values)].tolist() != values.tolist():
                raise RuntimeError(
                    "the kernel that admits draft tokens does not keep to its"
                    " definition"
                )
        self._chances.zero_()

    def admit(
        self, shares: npt.NDArray[np.int32], slots: torch.Tensor, budget: int
    ) -> None:
        """Admit draft tokens of the requests in these slots, int64 [requests]; does not
        wait for the device.

        Args:
            shares: int32 [3, requests]: the most draft tokens of each request, its
                other tokens, and what a token of its draft is worth, the bits of a
                float32 from 0 to 1.
            budget: draft tokens to admit, no more than `shares` allows; -1: all that it
                allows.
        """
        # A copy of the last shares may be under way: these have memory of their own.
        sent = torch.empty(
            shares.shape,
            dtype=torch.int32,
            device="cpu",
            pin_memory=self._keys.is_cuda,
        )
        sent.numpy()[:] = shares
        sent = sent.to(self._keys.device, non_blocking=True)
        admit[(1,)](
            sent,
            slots,
            self._keys,
            self._chances,
            *self._written,
            budget=budget,
            requests=len(slots),
            **self._constants,
            num_warps=8,
        )


def keys_of(
    shares: npt.NDArray[np.int32], chances: npt.NDArray[np.float32]
) -> npt.NDArray[np.int32]:
    """Return the upper bits of the survival of each draft token, int32 [requests,
    steps], for chances float32 [requests, steps]; -1: its request may not have it.
    """
    most, _, worth = shares
    offered = np.arange(chances.shape[1]) < most[:, None]
    reached = np.cumprod(np.where(offered, chances, np.float32(0)), axis=1)
    survival = reached * worth.view(np.float32)[:, None]
    certain = np.float32(1).view(np.int32)
    bits = np.clip(survival.view(np.int32), 0, certain)
    return np.where(offered, bits >> _DROPPED_BITS.value, np.int32(-1))


def most_likely(keys: npt.NDArray[np.int32], budget: int) -> npt.NDArray[np.int64]:
    """Return how many draft tokens of each request are admitted, int64 [requests]: what
    `admit` computes.
    """
    requests, steps = keys.shape
    best = np.argsort(-keys, axis=None, kind="stable")[:budget]
    return np.bincount(best // steps, minlength=requests)


@triton.jit
def _write_keys(
    keys,  # int32 [most_requests, PADDED]: written
    shares,  # int32 [3, requests]
    slots,  # int64 [requests]
    chances,  # float32 [most_requests, STEPS]
    requests,  # int
    STEPS: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write the upper bits of the survival of each draft token; -1: its request may not
    have it.
    """
    column = tl.arange(0, PADDED)[None, :]
    worths = shares + 2 * requests
    for first in range(0, requests, ROWS):
        request = first + tl.arange(0, ROWS)
        there = request < requests
        slot = tl.load(slots + request, mask=there, other=0)[:, None]
        most = tl.load(shares + request, mask=there, other=0)
        worth = tl.load(worths + request, mask=there, other=0)
        worth = worth.to(tl.float32, bitcast=True)
        offered = column < most[:, None]
        chance = tl.load(chances + slot * STEPS + column, mask=offered, other=0.0)
        survival = tl.cumprod(chance, axis=1) * worth[:, None]
        bits = survival.to(tl.int32, bitcast=True)
        # chances that nobody wrote may be anything
        bits = tl.minimum(tl.maximum(bits, 0), _CERTAIN)
        key = tl.where(offered, bits >> _DROPPED_BITS, -1)
        place = request[:, None] * PADDED + column
        tl.store(keys + place, key, mask=there[:, None])
    tl.debug_barrier()  # other threads read them


@triton.jit
def _least(keys, number, budget, BLOCK: tl.constexpr):
    """Return the largest key that `budget` of so many keys reach, and how many are
    above it.
    """
    least = 0
    above = 0
    for bit in range(16):  # of a key, from the highest on
        higher = least | (1 << (15 - bit))
        reach = tl.zeros([BLOCK], tl.int32)
        for first in range(0, number, BLOCK):
            place = first + tl.arange(0, BLOCK)
            key = tl.load(keys + place, mask=place < number, other=-1)
            reach += (key >= higher).to(tl.int32)
        count = tl.sum(reach, axis=0)
        least = tl.where(count >= budget, higher, least)
        # the last one is of the next key
        above = tl.where(count >= budget, above, count)
    return least, above


@triton.jit
def _num_admitted(keys, least, left, request, there, PADDED: tl.constexpr):
    """Return how many draft tokens of some requests are admitted: those above the least
    key, and of those that equal it the first ones, `left` in all; and how many of these
    are left then, or fewer than none.
    """
    place = request[:, None] * PADDED + tl.arange(0, PADDED)[None, :]
    key = tl.load(keys + place, mask=there[:, None], other=-1)
    num_equal = tl.sum((key == least).to(tl.int32), axis=1)
    num_before = tl.cumsum(num_equal, axis=0) - num_equal
    num_above = tl.sum((key > least).to(tl.int32), axis=1)
    num_left = tl.maximum(left - num_before, 0)
    num_admitted = num_above + tl.minimum(num_equal, num_left)
    return num_admitted, left - tl.sum(num_equal, axis=0)


@triton.jit(
    do_not_specialize=["budget", "requests", "most_requests", "bonus"],
    do_not_specialize_on_alignment=["slots"],
)
def admit(
    shares,  # int32 [3, requests]: see `Ranking.admit`
    slots,  # int64 [requests]
    keys,  # int32 [most_requests, PADDED]: for the kernel's own use
    chances,  # float32 [most_requests, STEPS]: of each slot's tokens, by place
    admitted,  # int32 [most_requests]: written, draft tokens that are verified
    cu_num_logits,  # int32 [most_requests + 1]: written, first row of logits of each
    query_start_loc,  # int32 [most_requests + 1]: written, first token of each
    budget,  # int: draft tokens to admit; -1: all that there are
    requests,  # int
    most_requests,  # int
    bonus,  # int: rows of logits of a request beside those of its draft tokens
    STEPS: tl.constexpr,
    PADDED: tl.constexpr,  # power of 2, STEPS at least
    ROWS: tl.constexpr,  # power of 2, requests that are looked at at once
):
    """Admit the draft tokens of a batch, and lay out its tokens; one program.

    As many tokens as `budget` are admitted whatever the chances are, and of each draft
    its first ones: what is written is their number. Of equal survival the first ones
    are admitted, by request and place. A chance is that of a token to be accepted if
    those before it were. Behind the first row or token of each request stands where the
    last ones end; beyond that `query_start_loc` is filled with it.
    """
    row = tl.arange(0, ROWS)
    least = 0
    above = 0
    if budget >= 0:
        _write_keys(keys, shares, slots, chances, requests, STEPS, PADDED, ROWS)
        least, above = _least(keys, requests * PADDED, budget, ROWS * PADDED)
    left = budget - above
    logits = 0
    tokens = 0
    tl.store(cu_num_logits, 0)
    tl.store(query_start_loc, 0)
    for first in range(0, requests, ROWS):
        request = first + row
        there = request < requests
        number = tl.load(shares + request, mask=there, other=0)
        if budget >= 0:
            number, left = _num_admitted(keys, least, left, request, there, PADDED)
        num_others = tl.load(shares + requests + request, mask=there, other=0)
        num_logits = number + tl.where(there, bonus, 0)
        num_tokens = number + num_others
        logits_end = logits + tl.cumsum(num_logits, axis=0)
        tokens_end = tokens + tl.cumsum(num_tokens, axis=0)
        tl.store(admitted + request, number, mask=there)
        tl.store(cu_num_logits + 1 + request, logits_end, mask=there)
        tl.store(query_start_loc + 1 + request, tokens_end, mask=there)
        logits += tl.sum(num_logits, axis=0)
        tokens += tl.sum(num_tokens, axis=0)
    for first in range(requests, most_requests, ROWS):
        place = first + row
        tl.store(query_start_loc + 1 + place, tokens, mask=place < most_requests)
