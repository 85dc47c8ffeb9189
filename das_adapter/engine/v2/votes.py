"""Triton kernels that draft from the places that `search` has found, accept drafts, and
learn which are accepted.

Every place votes for the token that follows there, with its text's weight times the 6th
power of its strength + 1. A place is as strong as twice the tokens that agree with what
the request has written, and gains 2 with every token drafted from it. The token with
the most votes is drafted, and only the places that voted for it vote on the next one.
The chance that it is accepted is estimated by its kind: its share of the votes, the
greatest strength behind it, the number of places, and whether all of them are in the
request's own text. It is learned from what requests wrote.

`csrc/suffix_draft.hpp` has the same rules for the host. Here a draft ends with the
request's own text, where the host searches again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from das_adapter.core.native import native
from das_adapter.engine.v2.search import CANDIDATES

_RULES = native().drafting_rules()
SURE = tl.constexpr(_RULES["SURE"])
"""Strength from which on places that differ in the last token are not asked."""
STRONGEST = tl.constexpr(_RULES["STRONGEST"])
SHARES = tl.constexpr(tuple(_RULES["SHARES"]))
STRENGTHS = tl.constexpr(tuple(_RULES["STRENGTHS"]))
LEVELS = tl.constexpr(len(_RULES["SHARES"]) + 1)
COUNTS = tl.constexpr(_RULES["COUNTS"])
KINDS = tl.constexpr(len(_RULES["CHANCES"]))
"""Kinds of draft tokens of one source: by LEVELS of their share of the votes, as many
of strength, and COUNTS numbers of candidates.
"""
PRIOR = tl.constexpr(_RULES["PRIOR"])
DOUBT = tl.constexpr(_RULES["DOUBT"])
MEMORY = tl.constexpr(_RULES["MEMORY"])
"""Weight of a kind's prior and of a source's, and of the past at most, tokens."""
EMPTY_INTS = tl.constexpr(0x7FFFFFFF)
"""Above every token."""


@triton.jit(do_not_specialize=["requests"])
def learn(
    offers,
    text_at,
    text_len,
    arena,
    slots,
    outcomes,
    requests,
    STEPS: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Compare what was offered to each request with what it has written since, and
    count by kind.

    `offers`: int32 [slots, 4 + 2 * STEPS], what `vote` offered: the number of tokens,
    the length of the text before them, `STEPS + 1` tokens, and their kinds. `outcomes`:
    int32 [2 * KINDS, 2], tried and accepted; zero before.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)
    slot = tl.load(slots + row, mask=row < requests, other=-1)
    known = slot >= 0
    offer = offers + slot * (4 + 2 * STEPS)
    at = tl.load(text_at + slot, mask=known, other=0)
    length = tl.load(text_len + slot, mask=known, other=0)
    count = tl.load(offer, mask=known, other=0)
    before = tl.load(offer + 1, mask=known, other=0)
    place = before[:, None] + column[None, :]
    asked = (
        known[:, None]
        & (column[None, :] < count[:, None])
        & (place < length[:, None])
        & (column[None, :] <= STEPS)
    )
    token = tl.load(offer[:, None] + 2 + column[None, :], mask=asked, other=-1)
    kind = tl.load(offer[:, None] + 3 + STEPS + column[None, :], mask=asked, other=0)
    written = tl.load(arena + at[:, None] + place, mask=asked, other=-2)
    wrong = asked & (written != token)
    first = tl.min(tl.where(wrong, column[None, :], PADDED), axis=1)
    tried = asked & (column[None, :] <= first[:, None])
    accepted = asked & (column[None, :] < first[:, None])
    one = tl.full([ROWS, PADDED], 1, tl.int32)
    tl.atomic_add(outcomes + 2 * kind, one, mask=tried, sem="relaxed")
    tl.atomic_add(outcomes + 2 * kind + 1, one, mask=accepted, sem="relaxed")
    tl.debug_barrier()  # other threads have read them
    tl.store(offer, tl.zeros([ROWS], tl.int32), mask=known & (length > before))


@triton.jit
def estimate(outcomes, cells, sources, start, chance, LANES: tl.constexpr):
    """Take the outcomes into the counts of each kind, and compute each kind's chance to
    be accepted.

    `cells`: int32 [2 * KINDS, 2]; `sources`: float64 [2, 3], tried, accepted and
    expected; `start`: float64 [KINDS], the chances before anything is learned;
    `chance`: float64 [2 * KINDS]. One program; the same estimate as `Acceptance` in
    `csrc/suffix_draft.hpp`.
    """
    lane = tl.arange(0, LANES)
    for source in tl.static_range(2):
        valid = lane < KINDS
        at = 2 * (source * KINDS + lane)
        new_tried = tl.load(outcomes + at, mask=valid, other=0)
        new_accepted = tl.load(outcomes + at + 1, mask=valid, other=0)
        tl.store(outcomes + at, tl.zeros([LANES], tl.int32), mask=valid)
        tl.store(outcomes + at + 1, tl.zeros([LANES], tl.int32), mask=valid)
        tried = tl.load(cells + at, mask=valid, other=0) + new_tried
        accepted = tl.load(cells + at + 1, mask=valid, other=0) + new_accepted
        full = tried >= MEMORY
        tried = tl.where(full, tried // 2, tried)
        accepted = tl.where(full, accepted // 2, accepted)
        tl.store(cells + at, tried, mask=valid)
        tl.store(cells + at + 1, accepted, mask=valid)
        prior = tl.load(start + lane, mask=valid, other=0.0)
        own = sources + 3 * source
        sum_tried = tl.load(own) + tl.sum(new_tried, axis=0)
        sum_accepted = tl.load(own + 1) + tl.sum(new_accepted, axis=0)
        expected = tl.load(own + 2) + tl.sum(new_tried * prior, axis=0)
        half = tl.where(sum_tried >= MEMORY, 0.5, 1.0)
        sum_tried = sum_tried * half
        sum_accepted = sum_accepted * half
        expected = expected * half
        tl.store(own, sum_tried)
        tl.store(own + 1, sum_accepted)
        tl.store(own + 2, expected)
        better = (sum_accepted + DOUBT) / (sum_tried - sum_accepted + DOUBT)
        better = better * ((sum_tried - expected + DOUBT) / (expected + DOUBT))
        odds = prior * better
        base = odds / (1 - prior + odds)
        tl.store(
            chance + source * KINDS + lane,
            (accepted + PRIOR * base) / (tried + PRIOR),
            mask=valid,
        )


@triton.jit
def _kind(share, strength, number, alone):
    """Return the kind of a draft token, as `Acceptance::kind` in
    `csrc/suffix_draft.hpp`.
    """
    s = 0 * number
    m = 0 * number
    for i in tl.static_range(LEVELS - 1):
        s += (share >= SHARES[i]).to(tl.int32)
        m += (strength >= STRENGTHS[i]).to(tl.int32)
    several = (number > 1).to(tl.int32) + (number > 3).to(tl.int32)
    return ((alone.to(tl.int32) * LEVELS + s) * LEVELS + m) * COUNTS + several


@triton.jit
def _places(found):
    """Load a request's places: where the text goes on and how many tokens are left,
    strength, weight, whether it is the request's own text, and whether the place votes
    (see `search`).
    """
    lane = tl.arange(0, CANDIDATES)
    at = tl.load(found + lane)
    left = tl.load(found + 2 * CANDIDATES + lane)
    traits = tl.load(found + CANDIDATES + lane).to(tl.int32)
    strength = traits & 0xFF
    weight = ((traits >> 8) & 0xFFFF).to(tl.int64)
    own = ((traits >> 24) & 1) > 0
    differs = ((traits >> 25) & 1) > 0
    valid = ((traits >> 26) & 1) > 0
    strongest = tl.max(tl.where(valid & (differs == 0), strength, 0), axis=0)
    return (
        at,
        left,
        strength,
        weight,
        own,
        valid & (tl.where(differs, strongest, 0) < SURE),
    )


@triton.jit
def _elected(token, alive, strong, weight, own):
    """Return the token with the most votes (of equals the lowest), the places that
    voted for it, and its kind as a draft token.
    """
    power = (strong + 1).to(tl.int64)
    power = power * power * power
    votes = tl.where(alive, power * power * weight, 0)
    said = tl.min(tl.where(alive, token, EMPTY_INTS), axis=0)
    winner = said
    most = tl.full([], 0, tl.int64)
    while said < EMPTY_INTS:
        total = tl.sum(tl.where(token == said, votes, 0), axis=0)
        winner = tl.where(total > most, said, winner)
        most = tl.maximum(most, total)
        said = tl.min(tl.where(alive & (token > said), token, EMPTY_INTS), axis=0)
    voters = alive & (token == winner)
    share = most.to(tl.float64) / tl.sum(votes, axis=0).to(tl.float64)
    longest = tl.max(tl.where(voters, strong, 0), axis=0)
    alone = tl.sum((voters & (own == 0)).to(tl.int32), axis=0) == 0
    return (
        winner,
        voters,
        _kind(share, longest, tl.sum(voters.to(tl.int32), axis=0), alone),
    )


@triton.jit
def vote(
    arena,
    slots,
    num_sampled,
    text_len,
    found,
    chance,
    offers,
    drafts,
    confidence,
    real,
    vocabulary,
    min_chance,
    STEPS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Draft token by token what most candidates vote for; see `SuffixIndex::draft` in
    `csrc/suffix_index.cpp`.

    `found`: int64 [requests, 3, CANDIDATES], see `search`; `offers`: see `learn`;
    `drafts`: int64 [requests, STEPS], 0 beyond the draft; `confidence`: float32, the
    chance of each token given those before it, 0 beyond the draft; `real`: int32
    [requests], the draft's length.
    """
    request = tl.program_id(0)
    slot = tl.load(slots + request)
    column = tl.arange(0, PADDED)
    if slot >= 0:
        n = tl.load(text_len + slot)
        at, left, strength, weight, own, valid = _places(
            found + request * 3 * CANDIDATES
        )
        offer = offers + slot * (4 + 2 * STEPS)
        survival = (0 * n + 1).to(tl.float64)
        asked = 0 * n
        step = 0 * n
        going = tl.load(num_sampled + request) > 0
        while going:
            token = tl.load(arena + at + step, mask=valid & (step < left), other=-1)
            alive = valid & (token >= 0)
            going = tl.max(alive.to(tl.int32), axis=0) > 0
            if going:
                strong = tl.minimum(strength + 2 * step, STRONGEST)
                winner, voters, kind = _elected(token, alive, strong, weight, own)
                winner = tl.minimum(winner, vocabulary - 1)
                tl.store(offer + 2 + step, winner)
                tl.store(offer + 3 + STEPS + step, kind)
                asked = step + 1
                token_chance = tl.load(chance + kind)
                survival = survival * token_chance
                going = (step < STEPS) & (survival >= min_chance)
                if going:
                    tl.store(drafts + request * STEPS + step, winner.to(tl.int64))
                    tl.store(
                        confidence + request * STEPS + step, token_chance.to(tl.float32)
                    )
                    valid = voters
                    step = step + 1
        cell = request * STEPS + column
        beyond = (column < STEPS) & (column >= step)
        tl.store(confidence + cell, tl.zeros([PADDED], tl.float32), mask=beyond)
        tl.store(drafts + cell, tl.zeros([PADDED], tl.int64), mask=beyond)
        tl.store(real + request, step)
        tl.store(offer, asked)
        tl.store(offer + 1, n)


@triton.jit(
    do_not_specialize=["requests"], do_not_specialize_on_alignment=["fed", "rows"]
)
def accept(
    drawn,
    fed,
    rows,
    sampled,
    num_sampled,
    requests,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Take the drawn tokens of each request up to the first with which its draft does
    not go on.

    `drawn`: int64 [rows]; `fed`: int [rows], the token that was read at each row;
    `rows`: int32 [requests + 1], first row of each request; `sampled`: int64 [requests,
    WIDTH]; `num_sampled`: int32 [requests], how many of them count.
    """
    request = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)[None, :]
    known = request < requests
    row = tl.load(rows + request, mask=known, other=0)[:, None] + column
    end = tl.load(rows + request + 1, mask=known, other=0)[:, None]
    token = tl.load(drawn + row, mask=row < end, other=0)
    following = tl.load(fed + row + 1, mask=row + 1 < end, other=-1)
    accepted = tl.min(tl.where(token != following, column, PADDED), axis=1)
    tl.store(
        sampled + request[:, None] * WIDTH + column,
        token,
        mask=known[:, None] & (column < WIDTH),
    )
    tl.store(num_sampled + request, accepted + 1, mask=known)
