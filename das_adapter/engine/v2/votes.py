"""Triton kernels that draft from the places that `search` has found, accept drafts, and
learn which are accepted.

Every place votes for the token that follows there, with its text's weight times the
power `VOTE_POWER` of its strength + 1. A place is as strong as twice the tokens that
agree with what the request has written, and gains 2 with every token drafted from it.
The token with the most votes is drafted, and only the places that voted for it vote on
the next one.
The chance that it is accepted is estimated by its kind: its share of the votes, the
greatest strength behind it, the number of places, and whether all of them are in the
request's own text. It is learned from what requests wrote. Where it is less than
`OTHERS_CHANCE`, the places in texts that all problems share vote, too, on their own:
the likelier token is drafted.

`csrc/suffix_draft.hpp` has the same rules for the host. Here a draft ends with the
request's own text, where the host searches again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from das_adapter.core import tuning
from das_adapter.core.native import native
from das_adapter.engine.v2.search import (
    CANDIDATES,
    PLACES,
    any_of,
    as_column,
    as_row,
    count,
    unpack_traits,
)

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
SOURCES = tl.constexpr(3)
"""Sources of draft tokens: the problem's texts, the request's own text alone, texts
that all problems share.
"""
OTHERS_CHANCE = tl.constexpr(tuning.CPP_OTHERS_CHANCE)
"""Chance of a token from which on texts of other problems are not asked."""
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


@triton.jit
def _offer_of(
    offers,  # int32 [slots, 4 + 2 * STEPS]
    slot,  # int64 [k] or int64
    STEPS: tl.constexpr,
):
    """Return where what was offered to the request of a slot stands: its numbers, its
    tokens and their kinds.
    """
    size = 4 + 2 * STEPS
    offer = offers + slot * size
    offered_tokens = offer + 2
    offered_kinds = offered_tokens + STEPS + 1
    return offer, offered_tokens, offered_kinds


@triton.jit
def _load_pair(
    first_at,  # [k]: addresses
    there,  # bool [k]
):
    """Load two numbers that stand one behind the other; 0 where there are none."""
    second_at = first_at + 1
    first = tl.load(first_at, mask=there, other=0)
    second = tl.load(second_at, mask=there, other=0)
    return first, second


@triton.jit
def _store_pair(
    first_at,  # [k]: addresses
    first,  # [k]
    second,  # [k]
    there,  # bool [k]
):
    """Store two numbers one behind the other."""
    second_at = first_at + 1
    tl.store(first_at, first, mask=there)
    tl.store(second_at, second, mask=there)


@triton.jit(do_not_specialize=["requests"])
def learn(
    offers,  # int32 [slots, 4 + 2 * STEPS]: what was offered; its number is cleared
    text_at,  # int64 [texts]: offset of each text in the arena
    text_len,  # int32 [texts]: tokens of each text
    arena,  # int32 [words]: all texts
    slots,  # int64 [requests]; -1: of no request
    outcomes,  # int32 [SOURCES * KINDS, 2]: added to, tokens tried and accepted
    requests,  # int
    STEPS: tl.constexpr,
    PADDED: tl.constexpr,  # power of 2, above STEPS
    ROWS: tl.constexpr,  # requests of a program
):
    """Compare what was offered to each request with what it has written since, and
    count by kind.
    """
    # [ROWS]: of each request
    first_row = tl.program_id(0) * ROWS
    row = first_row + tl.arange(0, ROWS)
    is_row = row < requests
    slot_at = slots + row
    slot = tl.load(slot_at, mask=is_row, other=-1)
    known = slot >= 0
    own_at = text_at + slot
    own_len = text_len + slot
    at = tl.load(own_at, mask=known, other=0)
    length = tl.load(own_len, mask=known, other=0)
    offer, offered_tokens, offered_kinds = _offer_of(offers, slot, STEPS)
    number, before = _load_pair(offer, known)

    # [ROWS, PADDED]: of each token that was offered
    column = as_row(tl.arange(0, PADDED))
    is_offered = column < as_column(number)
    is_offered = as_column(known) & is_offered
    place = as_column(before) + column
    is_written = place < as_column(length)
    is_column = column <= STEPS
    compared = is_offered & is_written & is_column
    offered_token = as_column(offered_tokens) + column
    offered_kind = as_column(offered_kinds) + column
    token = tl.load(offered_token, mask=compared, other=-1)
    kind = tl.load(offered_kind, mask=compared, other=0)
    text = arena + as_column(at)
    written_at = text + place
    written = tl.load(written_at, mask=compared, other=-2)
    differs = written != token
    wrong = compared & differs
    wrong_column = tl.where(wrong, column, PADDED)
    first_wrong = tl.min(wrong_column, axis=1)
    first_wrong = as_column(first_wrong)
    is_reached = column <= first_wrong
    is_right = column < first_wrong
    tried = compared & is_reached
    accepted = compared & is_right
    one = tl.full([ROWS, PADDED], 1, tl.int32)
    num_tried = outcomes + 2 * kind
    num_accepted = num_tried + 1
    tl.atomic_add(num_tried, one, mask=tried, sem="relaxed")
    tl.atomic_add(num_accepted, one, mask=accepted, sem="relaxed")
    tl.debug_barrier()  # other threads have read them
    nothing = tl.zeros([ROWS], tl.int32)
    has_written = length > before
    is_done = known & has_written
    tl.store(offer, nothing, mask=is_done)


@triton.jit
def _add_to_kinds(
    cells,  # int32 [KINDS, 2]: of one source, see `estimate`; added to
    new_tried,  # int32 [LANES]
    new_accepted,  # int32 [LANES]
    LANES: tl.constexpr,
):
    """Add to the counts of each kind, halve those that are large, and return the tokens
    tried and accepted, int32 [LANES].
    """
    lane = tl.arange(0, LANES)
    is_kind = lane < KINDS
    cell = cells + 2 * lane
    tried, accepted = _load_pair(cell, is_kind)
    tried = tried + new_tried
    accepted = accepted + new_accepted
    half_tried = tried // 2
    half_accepted = accepted // 2
    is_full = tried >= MEMORY
    tried = tl.where(is_full, half_tried, tried)
    accepted = tl.where(is_full, half_accepted, accepted)
    _store_pair(cell, tried, accepted, is_kind)
    return tried, accepted


@triton.jit
def _add_to_source(
    source,  # float64 [3]: tried, accepted and expected tokens; added to
    new_tried,  # int32 [LANES]: of each kind
    new_accepted,  # int32 [LANES]
    prior,  # float64 [LANES]: chance of each kind before anything is learned
):
    """Add to the counts of a source, and to what the priors of its kinds made one
    expect; halve them where they are large, and return them, float64.
    """
    accepted_at = source + 1
    expected_at = source + 2
    new_expected = new_tried * prior
    num_tried = tl.load(source) + tl.sum(new_tried, axis=0)
    num_accepted = tl.load(accepted_at) + tl.sum(new_accepted, axis=0)
    num_expected = tl.load(expected_at) + tl.sum(new_expected, axis=0)
    is_full = num_tried >= MEMORY
    kept_share = tl.where(is_full, 0.5, 1.0)
    num_tried = num_tried * kept_share
    num_accepted = num_accepted * kept_share
    num_expected = num_expected * kept_share
    tl.store(source, num_tried)
    tl.store(accepted_at, num_accepted)
    tl.store(expected_at, num_expected)
    return num_tried, num_accepted, num_expected


@triton.jit
def _odds_scale(
    num_tried,  # float64: tokens of a source
    num_accepted,  # float64: of these
    num_expected,  # float64: how many of these its kinds' priors made one expect
):
    """Return by what the odds of a source are larger than its kinds' priors made one
    expect, float64.
    """
    num_rejected = num_tried - num_accepted
    num_unexpected = num_tried - num_expected
    for_accepted = num_accepted + DOUBT
    for_rejected = num_rejected + DOUBT
    for_expected = num_expected + DOUBT
    for_unexpected = num_unexpected + DOUBT
    odds = for_accepted / for_rejected
    inverse_prior_odds = for_unexpected / for_expected
    return odds * inverse_prior_odds


@triton.jit
def _estimate_source(
    outcomes,  # int32 [KINDS, 2]: of one source, see `estimate`
    cells,  # int32 [KINDS, 2]
    source,  # float64 [3]
    start,  # float64 [KINDS]
    chance,  # float64 [KINDS]
    LANES: tl.constexpr,
):
    """Estimate the chances of the kinds of one source."""
    lane = tl.arange(0, LANES)
    is_kind = lane < KINDS
    nothing = tl.zeros([LANES], tl.int32)
    outcome = outcomes + 2 * lane
    new_tried, new_accepted = _load_pair(outcome, is_kind)
    _store_pair(outcome, nothing, nothing, is_kind)
    tried, accepted = _add_to_kinds(
        cells=cells,
        new_tried=new_tried,
        new_accepted=new_accepted,
        LANES=LANES,
    )
    prior_at = start + lane
    prior = tl.load(prior_at, mask=is_kind, other=0.0)
    num_tried, num_accepted, num_expected = _add_to_source(
        source=source,
        new_tried=new_tried,
        new_accepted=new_accepted,
        prior=prior,
    )

    # each kind's prior, with its odds scaled as those of the source are
    scale = _odds_scale(num_tried, num_accepted, num_expected)
    odds = prior * scale
    scaled_prior = odds / (1 - prior + odds)
    prior_accepted = PRIOR * scaled_prior
    all_accepted = accepted + prior_accepted
    all_tried = tried + PRIOR
    kind_chance = all_accepted / all_tried
    chance_at = chance + lane
    tl.store(chance_at, kind_chance, mask=is_kind)


@triton.jit
def estimate(
    outcomes,  # int32 [SOURCES * KINDS, 2]: new tokens tried and accepted; set to 0
    cells,  # int32 [SOURCES * KINDS, 2]: the same in all, brought forward
    sources,  # float64 [SOURCES, 3]: tried, accepted, expected tokens, brought forward
    start,  # float64 [KINDS]: chances before anything is learned
    chance,  # float64 [SOURCES * KINDS]: written
    LANES: tl.constexpr,  # power of 2, KINDS at least
):
    """Take the outcomes into the counts of each kind, and compute each kind's chance to
    be accepted, one source after the other.

    One program; the same estimate as `Acceptance` in `csrc/suffix_draft.hpp`.
    """
    for source in tl.static_range(SOURCES):
        first_kind = source * KINDS
        _estimate_source(
            outcomes=outcomes + 2 * first_kind,
            cells=cells + 2 * first_kind,
            source=sources + 3 * source,
            start=start,
            chance=chance + first_kind,
            LANES=LANES,
        )


@triton.jit
def _kind(
    share,  # float64: of the votes
    strength,  # int32: the greatest behind the token
    number,  # int32: of the places that voted for it
    alone,  # bool: whether all of these are in the request's own text
):
    """Return the kind of a draft token, as `Acceptance::kind` in
    `csrc/suffix_draft.hpp`.
    """
    share_level = 0 * number
    strength_level = 0 * number
    for i in tl.static_range(LEVELS - 1):
        has_share = share >= SHARES[i]
        has_strength = strength >= STRENGTHS[i]
        share_level += has_share.to(tl.int32)
        strength_level += has_strength.to(tl.int32)
    count_level = 0 * number
    for i in tl.static_range(COUNTS - 1):
        has_number = number >= COUNT_STEPS[i]
        count_level += has_number.to(tl.int32)
    kind = alone.to(tl.int32)
    kind = kind * LEVELS + share_level
    kind = kind * LEVELS + strength_level
    return kind * COUNTS + count_level


@triton.jit
def _places(
    found,  # int64 [3, LANES]: of a request, see `search`
    LANES: tl.constexpr,
):
    """Load a request's places: where the text goes on and how many tokens are left,
    strength, weight, whether it is the request's own text, and whether the place votes
    (see `search`).
    """
    lane = tl.arange(0, LANES)
    place_at = found + lane
    place_traits = place_at + LANES
    place_left = place_traits + LANES
    at = tl.load(place_at)
    traits = tl.load(place_traits)
    left = tl.load(place_left)
    traits = traits.to(tl.int32)
    strength, weight, own, differs, there_is = unpack_traits(traits)
    last_agrees = differs == 0
    agrees = there_is & last_agrees
    agreeing_strength = tl.where(agrees, strength, 0)
    strongest = tl.max(agreeing_strength, axis=0)
    rival = tl.where(differs, strongest, 0)
    is_needed = rival < SURE
    votes = there_is & is_needed
    return at, left, strength, weight, own, votes


@triton.jit
def _power(strength):
    """Return the power `VOTE_POWER` of strength + 1, int64."""
    base = strength + 1
    base = base.to(tl.int64)
    power = base
    for _ in tl.static_range(VOTE_POWER - 1):
        power = power * base
    return power


@triton.jit
def _elected(
    token,  # int32 [n]: that each place votes for
    alive,  # bool [n]: whether it votes
    strength,  # int32 [n]
    weight,  # int64 [n]
    own,  # bool [n]: whether it is in the request's own text
):
    """Return the token with the most votes (of equals the lowest), and its kind as a
    draft token.
    """
    votes = _power(strength) * weight
    votes = tl.where(alive, votes, 0)
    voted = tl.where(alive, token, NO_TOKEN)
    candidate = tl.min(voted, axis=0)
    winner = candidate
    most_votes = tl.full([], 0, tl.int64)
    while candidate < NO_TOKEN:
        is_for_candidate = token == candidate
        votes_for_candidate = tl.where(is_for_candidate, votes, 0)
        total = tl.sum(votes_for_candidate, axis=0)
        is_more = total > most_votes
        winner = tl.where(is_more, candidate, winner)
        most_votes = tl.maximum(most_votes, total)
        is_above = token > candidate
        later = alive & is_above
        voted = tl.where(later, token, NO_TOKEN)
        candidate = tl.min(voted, axis=0)
    is_winner = token == winner
    voters = alive & is_winner
    every_vote = tl.sum(votes, axis=0)
    num_votes = every_vote.to(tl.float64)
    share = most_votes.to(tl.float64) / num_votes
    voter_strength = tl.where(voters, strength, 0)
    longest = tl.max(voter_strength, axis=0)
    is_other = own == 0
    num_others = count(voters & is_other)
    alone = num_others == 0
    kind = _kind(
        share=share,
        strength=longest,
        number=count(voters),
        alone=alone,
    )
    return winner, kind


@triton.jit
def _next_tokens(
    arena,  # int32 [words]: all texts
    at,  # int64 [n]: where the text goes on at each place
    left,  # int64 [n]: tokens that are left of it
    valid,  # bool [n]: whether the place agrees with the draft
    step,  # int32: tokens of the draft
):
    """Return the token behind the draft at each place, int32 [n], and whether the place
    votes for it.
    """
    has_next = step < left
    readable = valid & has_next
    token_at = arena + at + step
    token = tl.load(token_at, mask=readable, other=-1)
    is_token = token >= 0
    return token, valid & is_token


@triton.jit
def _grown(
    strength,  # int32 [n]: of places
    step,  # int32: tokens drafted from there
):
    """Return the strength of places from which tokens were drafted."""
    grown = strength + 2 * step
    return tl.minimum(grown, STRONGEST)


@triton.jit
def vote(
    arena,  # int32 [words]: all texts
    slots,  # int64 [requests]; -1: of no request
    num_sampled,  # int32 [requests]: tokens that each got; 0: it gets no draft
    text_len,  # int32 [texts]: tokens of each text
    found,  # int64 [requests, 3, CANDIDATES]: places, see `search`
    found_others,  # int64 [requests, 3, PLACES]: places in texts of all problems
    chance,  # float64 [SOURCES * KINDS]: of each kind of draft token
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
        own_found = found + request * 3 * CANDIDATES
        at, left, strength, weight, own, valid = _places(own_found, CANDIDATES)
        others = found_others + request * 3 * PLACES
        o_at, o_left, o_strength, o_weight, o_own, o_valid = _places(others, PLACES)
        offer, offered_tokens, offered_kinds = _offer_of(offers, slot, STEPS)
        one = 0 * n + 1
        survival = one.to(tl.float64)
        num_offered = 0 * n
        step = 0 * n
        num_new = tl.load(num_sampled + request)
        going = num_new > 0
        while going:
            token, alive = _next_tokens(arena, at, left, valid, step)
            o_token, o_alive = _next_tokens(arena, o_at, o_left, o_valid, step)
            winner = 0 * n
            kind = 0 * n
            token_chance = 0 * survival
            if any_of(alive):
                winner, kind = _elected(
                    token=token,
                    alive=alive,
                    strength=_grown(strength, step),
                    weight=weight,
                    own=own,
                )
                token_chance = tl.load(chance + kind)
            is_doubtful = token_chance < OTHERS_CHANCE
            if is_doubtful & any_of(o_alive):
                o_winner, o_kind = _elected(
                    token=o_token,
                    alive=o_alive,
                    strength=_grown(o_strength, step),
                    weight=o_weight,
                    own=o_own,
                )
                o_kind = o_kind + 2 * KINDS
                o_chance = tl.load(chance + o_kind)
                is_likelier = o_chance > token_chance
                winner = tl.where(is_likelier, o_winner, winner)
                kind = tl.where(is_likelier, o_kind, kind)
                token_chance = tl.where(is_likelier, o_chance, token_chance)
            going = token_chance > 0
            if going:
                is_voter = token == winner
                valid = alive & is_voter
                o_is_voter = o_token == winner
                o_valid = o_alive & o_is_voter
                last_token = vocabulary - 1
                winner = tl.minimum(winner, last_token)
                tl.store(offered_tokens + step, winner)
                tl.store(offered_kinds + step, kind)
                num_offered = step + 1
                survival = survival * token_chance
                has_room = step < STEPS
                survives = survival >= min_chance
                going = has_room & survives
                if going:
                    draft_token = winner.to(tl.int64)
                    draft_chance = token_chance.to(tl.float32)
                    tl.store(own_drafts + step, draft_token)
                    tl.store(own_confidence + step, draft_chance)
                    step = step + 1
        is_column = column < STEPS
        is_unwritten = column >= step
        beyond = is_column & is_unwritten
        no_chance = tl.zeros([PADDED], tl.float32)
        no_token = tl.zeros([PADDED], tl.int64)
        chance_at = own_confidence + column
        draft_at = own_drafts + column
        tl.store(chance_at, no_chance, mask=beyond)
        tl.store(draft_at, no_token, mask=beyond)
        tl.store(real + request, step)
        tl.store(offer, num_offered)
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
    # [ROWS]: of each request
    first_request = tl.program_id(0) * ROWS
    request = first_request + tl.arange(0, ROWS)
    known = request < requests
    row_at = rows + request
    begin, end = _load_pair(row_at, known)

    # [ROWS, PADDED]: of each row of logits
    column = as_row(tl.arange(0, PADDED))
    row = as_column(begin) + column
    next_row = row + 1
    row_end = as_column(end)
    is_row = row < row_end
    has_next = next_row < row_end
    drawn_at = drawn + row
    following_at = fed + next_row
    token = tl.load(drawn_at, mask=is_row, other=0)
    following = tl.load(following_at, mask=has_next, other=-1)
    is_wrong = token != following
    wrong_column = tl.where(is_wrong, column, PADDED)
    num_accepted = tl.min(wrong_column, axis=1)
    own_sampled = sampled + as_column(request) * WIDTH
    sampled_at = own_sampled + column
    is_column = column < WIDTH
    is_written = as_column(known) & is_column
    tl.store(sampled_at, token, mask=is_written)
    counted_at = num_sampled + request
    tl.store(counted_at, num_accepted + 1, mask=known)
