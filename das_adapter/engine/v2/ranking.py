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
_MAX_ROWS = 1024
"""Requests that are looked at at once, at most."""
_CERTAIN = tl.constexpr(0x3F800000)
"""The bits of 1.0 as a float32: no survival is above it."""
_DROPPED_BITS = tl.constexpr(14)
"""Lower bits of a survival that do not count: 16 of its 30 are left, a key."""


class Ranking:
    """Admits the draft tokens of a batch, and lays out the tokens of its requests."""

    def __init__(self, slots: int, steps: int, device: torch.device) -> None:
        """`steps`: most tokens of a draft."""
        padded = triton.next_power_of_2(steps)
        rows = max(1, _TILE // padded)
        rows = min(rows, _MAX_ROWS)
        self._keys = torch.empty(
            (slots, padded),
            dtype=torch.int32,
            device=device,
        )
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
        exact_chances = [0.25, 0.5, 1.0]
        chances = rng.choice(exact_chances, (slots, steps))
        chances = chances.astype(np.float32)
        all_drafted = int(num_drafted.sum())
        budget = all_drafted // 2
        sent = torch.from_numpy(chances)
        self._chances.copy_(sent)
        every_slot = torch.arange(slots, device=self._chances.device)
        self.admit(shares, every_slot, budget)

        keys = keys_of(shares, chances)
        num_admitted = most_likely(keys, budget)
        num_logits = num_admitted + self._constants["bonus"]
        num_tokens = num_admitted + num_others
        logits_ends = np.cumsum(num_logits)
        token_ends = np.cumsum(num_tokens)
        expected = (
            num_admitted,
            np.append(0, logits_ends),
            np.append(0, token_ends),
        )
        for written, values in zip(self._written, expected, strict=True):
            size = len(values)
            found = written[:size].tolist()
            if found != values.tolist():
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
        admitted, cu_num_logits, query_start_loc = self._written
        admit[(1,)](
            shares=sent,
            slots=slots,
            keys=self._keys,
            chances=self._chances,
            admitted=admitted,
            cu_num_logits=cu_num_logits,
            query_start_loc=query_start_loc,
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
    most, _, worth_bits = shares
    _, steps = chances.shape
    never = np.float32(0)
    place = np.arange(steps)
    offered = place < most[:, None]
    offered_chances = np.where(offered, chances, never)
    reached = np.cumprod(offered_chances, axis=1)
    worth = worth_bits.view(np.float32)
    survival = reached * worth[:, None]
    certain = np.float32(1).view(np.int32)
    bits = np.clip(survival.view(np.int32), 0, certain)
    upper_bits = bits >> _DROPPED_BITS.value
    no_key = np.int32(-1)
    return np.where(offered, upper_bits, no_key)


def most_likely(keys: npt.NDArray[np.int32], budget: int) -> npt.NDArray[np.int64]:
    """Return how many draft tokens of each request are admitted, int64 [requests]: what
    `admit` computes.
    """
    requests, steps = keys.shape
    best_first = np.argsort(-keys, axis=None, kind="stable")
    admitted = best_first[:budget]
    request = admitted // steps
    return np.bincount(request, minlength=requests)


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
        # [ROWS]: of each request
        request = first + tl.arange(0, ROWS)
        there = request < requests
        slot_at = slots + request
        most_at = shares + request
        worth_at = worths + request
        slot = tl.load(slot_at, mask=there, other=0)
        most = tl.load(most_at, mask=there, other=0)
        worth = tl.load(worth_at, mask=there, other=0)
        worth = worth.to(tl.float32, bitcast=True)

        # [ROWS, PADDED]: of each draft token
        offered = column < most[:, None]
        first_chance = slot * STEPS
        own_chances = chances + first_chance[:, None]
        chance_at = own_chances + column
        chance = tl.load(chance_at, mask=offered, other=0.0)
        reached = tl.cumprod(chance, axis=1)
        survival = reached * worth[:, None]
        bits = survival.to(tl.int32, bitcast=True)
        # chances that nobody wrote may be anything
        bits = tl.maximum(bits, 0)
        bits = tl.minimum(bits, _CERTAIN)
        upper_bits = bits >> _DROPPED_BITS
        key = tl.where(offered, upper_bits, -1)
        first_key = request * PADDED
        key_place = first_key[:, None] + column
        key_at = keys + key_place
        tl.store(key_at, key, mask=there[:, None])
    tl.debug_barrier()  # other threads read them


@triton.jit
def _num_at_least(
    keys,  # int32 [number]
    number,  # int
    least,  # int
    BLOCK: tl.constexpr,  # keys that are read at once
):
    """Count the keys that are no less than one."""
    reach = tl.zeros([BLOCK], tl.int32)
    for first in range(0, number, BLOCK):
        place = first + tl.arange(0, BLOCK)
        is_there = place < number
        key_at = keys + place
        key = tl.load(key_at, mask=is_there, other=-1)
        reaches = key >= least
        reach += reaches.to(tl.int32)
    return tl.sum(reach, axis=0)


@triton.jit
def _least(
    keys,  # int32 [number]
    number,  # int
    budget,  # int: 0 to the number of the keys that are not negative
    BLOCK: tl.constexpr,  # keys that are read at once
):
    """Return the largest key that `budget` of the keys reach, and how many are above
    it.
    """
    least = 0
    above = 0
    for bit in range(16):  # of a key, from the highest on
        step = 1 << (15 - bit)
        higher = least | step
        num_reaching = _num_at_least(keys, number, higher, BLOCK)
        reached = num_reaching >= budget
        least = tl.where(reached, higher, least)
        # the last one is of the next key
        above = tl.where(reached, above, num_reaching)
    return least, above


@triton.jit
def _num_admitted(
    keys,  # int32 [most_requests, PADDED]
    least,  # int: the least key that is admitted
    left,  # int: tokens of that key that may still be admitted; below 0: none
    request,  # int32 [ROWS]
    there,  # bool [ROWS]: whether there is such a request
    PADDED: tl.constexpr,
):
    """Return how many draft tokens of some requests are admitted, int32 [ROWS]: those
    above the least key, and of those that equal it the first ones; and `left` behind
    them.
    """
    # [ROWS, PADDED]: of each draft token
    first_key = request[:, None] * PADDED
    place = first_key + tl.arange(0, PADDED)[None, :]
    key_at = keys + place
    key = tl.load(key_at, mask=there[:, None], other=-1)
    is_equal = key == least
    is_above = key > least

    # [ROWS]: of each request
    num_equal = tl.sum(is_equal.to(tl.int32), axis=1)
    num_above = tl.sum(is_above.to(tl.int32), axis=1)
    num_until = tl.cumsum(num_equal, axis=0)
    num_before = num_until - num_equal
    num_left = tl.maximum(left - num_before, 0)
    num_equal_admitted = tl.minimum(num_equal, num_left)
    num_admitted = num_above + num_equal_admitted
    every_equal = tl.sum(num_equal, axis=0)
    return num_admitted, left - every_equal


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
        _write_keys(
            keys=keys,
            shares=shares,
            slots=slots,
            chances=chances,
            requests=requests,
            STEPS=STEPS,
            PADDED=PADDED,
            ROWS=ROWS,
        )
        least, above = _least(
            keys=keys,
            number=requests * PADDED,
            budget=budget,
            BLOCK=ROWS * PADDED,
        )
    left = budget - above
    logits = 0
    tokens = 0
    tl.store(cu_num_logits, 0)
    tl.store(query_start_loc, 0)
    all_others = shares + requests
    logits_ends = cu_num_logits + 1
    tokens_ends = query_start_loc + 1
    for first in range(0, requests, ROWS):
        request = first + row
        there = request < requests
        most_at = shares + request
        number = tl.load(most_at, mask=there, other=0)
        if budget >= 0:
            number, left = _num_admitted(
                keys=keys,
                least=least,
                left=left,
                request=request,
                there=there,
                PADDED=PADDED,
            )
        others_at = all_others + request
        num_others = tl.load(others_at, mask=there, other=0)
        num_bonus = tl.where(there, bonus, 0)
        num_logits = number + num_bonus
        num_tokens = number + num_others
        logits_end = logits + tl.cumsum(num_logits, axis=0)
        tokens_end = tokens + tl.cumsum(num_tokens, axis=0)
        tl.store(admitted + request, number, mask=there)
        tl.store(logits_ends + request, logits_end, mask=there)
        tl.store(tokens_ends + request, tokens_end, mask=there)
        logits += tl.sum(num_logits, axis=0)
        tokens += tl.sum(num_tokens, axis=0)
    for first in range(requests, most_requests, ROWS):
        place = first + row
        is_place = place < most_requests
        tl.store(tokens_ends + place, tokens, mask=is_place)
