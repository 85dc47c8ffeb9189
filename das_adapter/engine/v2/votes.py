"""Triton kernels that draft from the places that `search` has found, accept drafts, and
learn which are accepted.

Every place votes for the token that follows there, with its text's weight times the
power `VOTE_POWER` of its strength + 1. A place is as strong as twice the tokens that
agree with what the request has written, and gains 2 with every token drafted from it.
The token with the most votes is drafted, and only the places that voted for it vote on
the next one.
The chance that it is accepted is estimated by its kind: its share of the votes, the
greatest strength behind it, the number of places, and whether all of them are in the
request's own text. It is learned from what requests wrote.

`csrc/suffix_draft.hpp` has the same rules for the host. Here a draft ends with the
request's own text, where the host searches again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from das_adapter.core import tuning
from das_adapter.core.native import native
from das_adapter.engine.v2.search import CANDIDATES, any_of, count, unpack_traits

_RULES = native().drafting_rules()
SURE = tl.constexpr(_RULES["SURE"])
"""Strength from which on places that differ in the last token are not asked."""
VOTE_POWER = tl.constexpr(tuning.CPP_VOTE_POWER)
"""Power of strength + 1 that a place votes with."""
STRONGEST = tl.constexpr(_RULES["STRONGEST"])
"""Greatest strength that counts."""
SHARES = tl.constexpr(tuple(_RULES["SHARES"]))
"""Where the levels of a token's share of the votes begin, rising."""
STRENGTHS = tl.constexpr(tuple(_RULES["STRENGTHS"]))
"""Where the levels of the strength behind a token begin, rising."""
LEVELS = tl.constexpr(len(_RULES["SHARES"]) + 1)
"""Levels of either."""
COUNT_STEPS = tl.constexpr(tuning.CPP_COUNT_STEPS)
"""Where the levels of the number of places begin, rising."""
COUNTS = tl.constexpr(_RULES["COUNTS"])
"""Levels of the number of places."""
KINDS = tl.constexpr(len(_RULES["CHANCES"]))
"""Kinds of draft tokens of one source: by LEVELS of their share of the votes, as many
of strength, and COUNTS numbers of candidates.
"""
PRIOR = tl.constexpr(_RULES["PRIOR"])
"""Weight of a kind's prior, tokens."""
DOUBT = tl.constexpr(_RULES["DOUBT"])
"""Weight of a source's prior, tokens."""
MEMORY = tl.constexpr(_RULES["MEMORY"])
"""Weight of the past at most, tokens."""
NO_TOKEN = tl.constexpr(0x7FFFFFFF)
"""A number above every token."""


# What was offered to the request of a slot, int32 [4 + 2 * STEPS], here for STEPS = 2
# and a draft of one token, behind a text of 40, with the token that would come next:
#
#     0       1        2 to STEPS + 2     STEPS + 3 and on
#     tokens  length   tokens             their kinds
#     2       40       17  23  -          101  96  -
#
# `vote` writes it, and `learn` compares it with what the request has written since.


@triton.jit(do_not_specialize=["requests"])
def learn(
    offers,  # int32 [slots, 4 + 2 * STEPS]: what was offered; its number is cleared
    text_at,  # int64 [texts]: offset of each text in the arena
    text_len,  # int32 [texts]: tokens of each text
    arena,  # int32 [words]: all texts
    slots,  # int64 [requests]; -1: of no request
    outcomes,  # int32 [2 * KINDS, 2]: added to, tokens tried and accepted of each kind
    requests,  # int
    STEPS: tl.constexpr,
    PADDED: tl.constexpr,  # power of 2, above STEPS
    ROWS: tl.constexpr,  # requests of a program
):
    """Compare what was offered to each request with what it has written since, and
    count by kind.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)[None, :]
    slot = tl.load(slots + row, mask=row < requests, other=-1)
    known = slot >= 0
    offer = offers + slot * (4 + 2 * STEPS)
    at = tl.load(text_at + slot, mask=known, other=0)
    length = tl.load(text_len + slot, mask=known, other=0)
    number = tl.load(offer, mask=known, other=0)
    before = tl.load(offer + 1, mask=known, other=0)
    place = before[:, None] + column
    is_offered = known[:, None] & (column < number[:, None])
    is_written = place < length[:, None]
    asked = is_offered & is_written & (column <= STEPS)
    tokens = offer[:, None] + 2
    kinds = offer[:, None] + 3 + STEPS
    token = tl.load(tokens + column, mask=asked, other=-1)
    kind = tl.load(kinds + column, mask=asked, other=0)
    written = tl.load(arena + at[:, None] + place, mask=asked, other=-2)
    wrong = asked & (written != token)
    first_wrong = tl.min(tl.where(wrong, column, PADDED), axis=1)[:, None]
    tried = asked & (column <= first_wrong)
    accepted = asked & (column < first_wrong)
    one = tl.full([ROWS, PADDED], 1, tl.int32)
    of_kind = outcomes + 2 * kind
    tl.atomic_add(of_kind, one, mask=tried, sem="relaxed")
    tl.atomic_add(of_kind + 1, one, mask=accepted, sem="relaxed")
    tl.debug_barrier()  # other threads have read them
    nothing = tl.zeros([ROWS], tl.int32)
    tl.store(offer, nothing, mask=known & (length > before))


@triton.jit
def estimate(
    outcomes,  # int32 [2 * KINDS, 2]: new tokens tried and accepted; set to 0
    cells,  # int32 [2 * KINDS, 2]: the same in all, brought forward
    sources,  # float64 [2, 3]: tried, accepted and expected tokens, brought forward
    start,  # float64 [KINDS]: chances before anything is learned
    chance,  # float64 [2 * KINDS]: written
    LANES: tl.constexpr,  # power of 2, KINDS at least
):
    """Take the outcomes into the counts of each kind, and compute each kind's chance to
    be accepted: first of drafts with other texts, then of those from the request's own.

    One program; the same estimate as `Acceptance` in `csrc/suffix_draft.hpp`.
    """
    lane = tl.arange(0, LANES)
    nothing = tl.zeros([LANES], tl.int32)
    for source in tl.static_range(2):
        valid = lane < KINDS
        at = 2 * (source * KINDS + lane)
        new_tried = tl.load(outcomes + at, mask=valid, other=0)
        new_accepted = tl.load(outcomes + at + 1, mask=valid, other=0)
        tl.store(outcomes + at, nothing, mask=valid)
        tl.store(outcomes + at + 1, nothing, mask=valid)

        # the counts of each kind
        tried = tl.load(cells + at, mask=valid, other=0) + new_tried
        accepted = tl.load(cells + at + 1, mask=valid, other=0) + new_accepted
        is_full = tried >= MEMORY
        tried = tl.where(is_full, tried // 2, tried)
        accepted = tl.where(is_full, accepted // 2, accepted)
        tl.store(cells + at, tried, mask=valid)
        tl.store(cells + at + 1, accepted, mask=valid)

        # the counts of the source, and what their kinds' priors made one expect
        prior = tl.load(start + lane, mask=valid, other=0.0)
        own = sources + 3 * source
        sum_tried = tl.load(own) + tl.sum(new_tried, axis=0)
        sum_accepted = tl.load(own + 1) + tl.sum(new_accepted, axis=0)
        expected = tl.load(own + 2) + tl.sum(new_tried * prior, axis=0)
        kept_share = tl.where(sum_tried >= MEMORY, 0.5, 1.0)
        sum_tried = sum_tried * kept_share
        sum_accepted = sum_accepted * kept_share
        expected = expected * kept_share
        tl.store(own, sum_tried)
        tl.store(own + 1, sum_accepted)
        tl.store(own + 2, expected)

        # each kind's prior, with its odds scaled as those of the source are
        scale = (sum_accepted + DOUBT) / (sum_tried - sum_accepted + DOUBT)
        scale = scale * ((sum_tried - expected + DOUBT) / (expected + DOUBT))
        odds = prior * scale
        base = odds / (1 - prior + odds)
        found = (accepted + PRIOR * base) / (tried + PRIOR)
        tl.store(chance + source * KINDS + lane, found, mask=valid)


@triton.jit
def _kind(share, strength, number, alone):
    """Return the kind of a draft token, as `Acceptance::kind` in
    `csrc/suffix_draft.hpp`.
    """
    share_level = 0 * number
    strength_level = 0 * number
    for i in tl.static_range(LEVELS - 1):
        share_level += (share >= SHARES[i]).to(tl.int32)
        strength_level += (strength >= STRENGTHS[i]).to(tl.int32)
    count_level = 0 * number
    for i in tl.static_range(COUNTS - 1):
        count_level += (number >= COUNT_STEPS[i]).to(tl.int32)
    kind = alone.to(tl.int32)
    kind = kind * LEVELS + share_level
    kind = kind * LEVELS + strength_level
    return kind * COUNTS + count_level


@triton.jit
def _places(found):
    """Load a request's places: where the text goes on and how many tokens are left,
    strength, weight, whether it is the request's own text, and whether the place votes
    (see `search`).
    """
    lane = tl.arange(0, CANDIDATES)
    at = tl.load(found + lane)
    traits = tl.load(found + CANDIDATES + lane).to(tl.int32)
    left = tl.load(found + 2 * CANDIDATES + lane)
    strength, weight, own, differs, there_is = unpack_traits(traits)
    agrees = there_is & (differs == 0)
    strongest = tl.max(tl.where(agrees, strength, 0), axis=0)
    rival = tl.where(differs, strongest, 0)
    return at, left, strength, weight, own, there_is & (rival < SURE)


@triton.jit
def _elected(token, alive, strength, weight, own):
    """Return the token with the most votes (of equals the lowest), the places that
    voted for it, and its kind as a draft token.
    """
    base = (strength + 1).to(tl.int64)
    power = base
    for _ in tl.static_range(VOTE_POWER - 1):
        power = power * base
    votes = tl.where(alive, power * weight, 0)
    said = tl.min(tl.where(alive, token, NO_TOKEN), axis=0)
    winner = said
    most = tl.full([], 0, tl.int64)
    while said < NO_TOKEN:
        total = tl.sum(tl.where(token == said, votes, 0), axis=0)
        winner = tl.where(total > most, said, winner)
        most = tl.maximum(most, total)
        later = alive & (token > said)
        said = tl.min(tl.where(later, token, NO_TOKEN), axis=0)
    voters = alive & (token == winner)
    every_vote = tl.sum(votes, axis=0)
    share = most.to(tl.float64) / every_vote.to(tl.float64)
    longest = tl.max(tl.where(voters, strength, 0), axis=0)
    alone = count(voters & (own == 0)) == 0
    return winner, voters, _kind(share, longest, count(voters), alone)


@triton.jit
def vote(
    arena,  # int32 [words]: all texts
    slots,  # int64 [requests]; -1: of no request
    num_sampled,  # int32 [requests]: tokens that each got; 0: it gets no draft
    text_len,  # int32 [texts]: tokens of each text
    found,  # int64 [requests, 3, CANDIDATES]: places, see `search`
    chance,  # float64 [2 * KINDS]: of each kind of draft token
    offers,  # int32 [slots, 4 + 2 * STEPS]: written, see above
    drafts,  # int64 [requests, STEPS]: written; 0 beyond the draft
    confidence,  # float32 [requests, STEPS]: written, chance of each token; 0 beyond it
    real,  # int32 [requests]: written, the draft's length
    vocabulary,  # int: tokens of the policy
    min_chance,  # float: least chance of the last token to be reached and accepted
    STEPS: tl.constexpr,
    PADDED: tl.constexpr,  # power of 2, above STEPS
):
    """Draft token by token what most candidates vote for; see `SuffixIndex::draft` in
    `csrc/suffix_index.cpp`. The chance of a token is that to be accepted if those
    before it were.
    """
    request = tl.program_id(0)
    slot = tl.load(slots + request)
    column = tl.arange(0, PADDED)
    own_drafts = drafts + request * STEPS
    own_confidence = confidence + request * STEPS
    if slot >= 0:
        n = tl.load(text_len + slot)
        at, left, strength, weight, own, valid = _places(
            found + request * 3 * CANDIDATES
        )
        offer = offers + slot * (4 + 2 * STEPS)
        offered_tokens = offer + 2
        offered_kinds = offer + 3 + STEPS
        survival = (0 * n + 1).to(tl.float64)
        asked = 0 * n
        step = 0 * n
        going = tl.load(num_sampled + request) > 0
        while going:
            readable = valid & (step < left)
            token = tl.load(arena + at + step, mask=readable, other=-1)
            alive = valid & (token >= 0)
            going = any_of(alive)
            if going:
                grown = tl.minimum(strength + 2 * step, STRONGEST)
                winner, voters, kind = _elected(token, alive, grown, weight, own)
                winner = tl.minimum(winner, vocabulary - 1)
                tl.store(offered_tokens + step, winner)
                tl.store(offered_kinds + step, kind)
                asked = step + 1
                token_chance = tl.load(chance + kind)
                survival = survival * token_chance
                going = (step < STEPS) & (survival >= min_chance)
                if going:
                    tl.store(own_drafts + step, winner.to(tl.int64))
                    tl.store(own_confidence + step, token_chance.to(tl.float32))
                    valid = voters
                    step = step + 1
        beyond = (column < STEPS) & (column >= step)
        no_chance = tl.zeros([PADDED], tl.float32)
        no_token = tl.zeros([PADDED], tl.int64)
        tl.store(own_confidence + column, no_chance, mask=beyond)
        tl.store(own_drafts + column, no_token, mask=beyond)
        tl.store(real + request, step)
        tl.store(offer, asked)
        tl.store(offer + 1, n)


@triton.jit(
    do_not_specialize=["requests"], do_not_specialize_on_alignment=["fed", "rows"]
)
def accept(
    drawn,  # int64 [rows]: the token drawn at each row of logits
    fed,  # int [rows]: the token that was read at each row
    rows,  # int32 [requests + 1]: first row of each request
    sampled,  # int64 [requests, WIDTH]: written, the drawn tokens of each request
    num_sampled,  # int32 [requests]: written, how many of them count
    requests,  # int
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,  # power of 2, WIDTH at least
    ROWS: tl.constexpr,  # requests of a program
):
    """Take the drawn tokens of each request up to the first with which its draft does
    not go on.
    """
    request = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)[None, :]
    known = request < requests
    begin = tl.load(rows + request, mask=known, other=0)[:, None]
    end = tl.load(rows + request + 1, mask=known, other=0)[:, None]
    row = begin + column
    token = tl.load(drawn + row, mask=row < end, other=0)
    following = tl.load(fed + row + 1, mask=row + 1 < end, other=-1)
    accepted = tl.min(tl.where(token != following, column, PADDED), axis=1)
    out = sampled + request[:, None] * WIDTH + column
    tl.store(out, token, mask=known[:, None] & (column < WIDTH))
    tl.store(num_sampled + request, accepted + 1, mask=known)
