"""Triton kernels that find where a request's text occurs in the history on the device.

Texts are addressed in tokens from the begin of the arena, which holds sealed text and
the texts of closed requests; vLLM's own array of all requests' tokens is reached by the
same offsets. A response is preceded by `START`, which is stored in sealed text only.
What is called a context is a request's text, read backwards from its last token. Sealed
texts that all problems share are searched in one more row, and vote apart.

A place that is found has three numbers, int64: where the text goes on from there, its
traits (`_pack_traits`), and how many tokens are left of it. Of each request's
`CANDIDATES` places the first `PLACES` match its text in sealed text, the next ones
match it there without the last token, then come those of live text, and those of its
prompt.

None of the kernels synchronises with the host; shapes depend on the batch size alone,
so that a step is captured as one CUDA graph. `csrc/suffix_index.cpp` does the same on
the host, but of live text the longest matches vote here, and there the latest of those
with four equal tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from das_adapter.core.native import native

_RULES = native().drafting_rules()
START = tl.constexpr(_RULES["START"])
"""Precedes the first token of a response."""
NOTHING = tl.constexpr(-3)
"""Precedes what is before a context's begin: equal to no token."""
DEPTH = tl.constexpr(_RULES["DEPTH"])
"""Tokens of left context that are compared."""
CHUNK = tl.constexpr(8)
"""Tokens that are compared at once."""
PLACES = tl.constexpr(_RULES["PLACES"])
"""Places that one search contributes."""
CANDIDATES = tl.constexpr(4 * _RULES["PLACES"])
"""Places that all four searches of a request contribute."""
BEYOND = tl.constexpr(_RULES["BEYOND"])
"""Tokens beyond a differing one that count."""
OWN = tl.constexpr(_RULES["OWN"])
"""Weight of the request's own text; sealed text has one by its age."""
SIBLING = tl.constexpr(_RULES["SIBLING"])
"""Weight of a sibling's live text."""
PROMPT = tl.constexpr(_RULES["PROMPT"])
"""Weight of the request's prompt."""
EXACT = tl.constexpr(_RULES["BEYOND"] + 1)
"""Least rank of a place whose last token agrees with the context's: above the ranks of
the others, which are BEYOND at most.
"""
PROBES = tl.constexpr(32)
"""Sorted places that are compared at once with a context."""
ENDLESS = tl.constexpr(1 << 30)
"""Tokens left of a sealed text: it ends with a negative one."""


# How places are packed into integers
#
# A place of sealed text, int32, as `core.index.SuffixIndex.flat` has it: its position
# in the lower 24 bits, the age of its text in visits in the upper 8.
#
# The traits of a place that votes, int32:
#
#     bit 26    25         24     8 to 23   0 to 7
#     there is  the last   own    weight    strength
#     a place   token      text
#               differs
#
# The key of a place in live text, int64. The largest keys are the best places: a rank
# (`_rank`) comes before a place, the latest one first, and that before a text.
#
#     bit 40 to 63   16 to 39   0 to 15
#     rank           place      number of the text among the problem's
#
# Two requests write "a b c d". One text of their problem, number 1, has "x b c d" with
# the "d" at place 7: three tokens agree, the rank is 6, the key 0x6_000007_0001. Text
# number 0 has "b c y" with the "y" at place 9: the last token differs, two agree before
# it, the rank is 2, the key 0x2_000009_0000, behind the first.

_OWN_FLAG = tl.constexpr(1 << 24)
_DIFFERS_FLAG = tl.constexpr(1 << 25)
_THERE_IS_FLAG = tl.constexpr(1 << 26)


@triton.jit
def count(mask):
    """Return how many entries of a mask [n] hold, int32."""
    numbers = mask.to(tl.int32)
    return tl.sum(numbers, axis=0)


@triton.jit
def any_of(mask):
    """Return whether an entry of a mask [n] holds."""
    numbers = mask.to(tl.int32)
    return tl.max(numbers, axis=0) > 0


@triton.jit
def as_column(values):
    """Return values [n] as a column, [n, 1]."""
    return values[:, None]


@triton.jit
def as_row(values):
    """Return values [n] as a row, [1, n]."""
    return values[None, :]


@triton.jit
def _position_of(sealed_place):
    """Return the position of a packed place of sealed text."""
    return sealed_place & 0xFFFFFF


@triton.jit
def _age_of(sealed_place):
    """Return the age of the text of a packed place of sealed text, in visits."""
    return (sealed_place >> 24) & 0xFF


@triton.jit
def _pack_traits(
    strength,  # int32 [n]: below 2^8
    weight,  # int32 [n]: below 2^16
    own,  # int32 [n] or int: 1: in the request's own text
    differs,  # int32 [n] or int: 1: the last token differs
):
    """Pack what the vote needs to know of places that there are, int32 [n]."""
    traits = strength | (weight << 8)
    traits = traits | (own * _OWN_FLAG)
    traits = traits | (differs * _DIFFERS_FLAG)
    return traits | _THERE_IS_FLAG


@triton.jit
def _has_flag(traits, flag):
    """Return whether a flag of packed traits is set."""
    return (traits & flag) > 0


@triton.jit
def unpack_traits(traits):
    """Return of a place: strength int32, weight int64, and whether it is in the
    request's own text, its last token differs, and there is such a place.
    """
    strength = traits & 0xFF
    weight = (traits >> 8) & 0xFFFF
    weight = weight.to(tl.int64)
    own = _has_flag(traits, _OWN_FLAG)
    differs = _has_flag(traits, _DIFFERS_FLAG)
    there_is = _has_flag(traits, _THERE_IS_FLAG)
    return strength, weight, own, differs, there_is


@triton.jit
def _pack_ranked(rank, place):
    """Return the upper 32 bits of a key. A place below 0 leaves less than its rank."""
    return (rank << 24) + place


@triton.jit
def _unpack_ranked(ranked):
    """Return the rank and the place of the upper 32 bits of a key."""
    rank = ranked >> 24
    place = ranked & 0xFFFFFF
    return rank, place


@triton.jit
def _pack_key(ranked, text):
    """Return a key, int64, of its upper 32 bits and the number of a text."""
    upper = ranked.to(tl.int64) << 16
    return upper | text


@triton.jit
def _ranked_of(key):
    """Return the upper 32 bits of a key: its rank and its place."""
    upper = key >> 16
    return upper.to(tl.int32)


@triton.jit
def _text_of(key):
    """Return the number of the text in a key."""
    text = key & 0xFFFF
    return text.to(tl.int32)


@triton.jit
def _no_keys():
    """Return `PLACES` keys, all different, that are below those of all places."""
    lane = tl.arange(0, PLACES)
    return -1 - lane.to(tl.int64)


@triton.jit
def _least(keys):
    """Return the least of keys, whose upper and lower bits the hardware compares by 32
    at a time.
    """
    ranked = _ranked_of(keys)
    text = _text_of(keys)
    least_ranked = tl.min(ranked, axis=0)
    above_all = 0xFFFF
    is_least_ranked = ranked == least_ranked
    text = tl.where(is_least_ranked, text, above_all)
    least_text = tl.min(text, axis=0)
    return _pack_key(least_ranked, least_text)


@triton.jit
def _greatest(keys):
    """Return the greatest of keys."""
    return ~_least(~keys)


@triton.jit
def _replace_least(
    best,  # int64 [PLACES]: keys
    least,  # int64: the least of them
    key,  # int64: a greater one
):
    """Replace the least of the best keys; return these and the least of them then."""
    is_least = best == least
    best = tl.where(is_least, key, best)
    return best, _least(best)


@triton.jit
def _context(
    arena,  # int32 [words]: all texts
    own,  # int64: offset of the request's text
    n,  # int32: tokens of it
    index,  # int32 [k] or int32: of the tokens to load
    lowest,  # int32: index of the first token that may be read
):
    """Load tokens of a request's text by index; START at -1 if the text begins there,
    NOTHING elsewhere outside.
    """
    is_readable = index >= lowest
    is_written = index < n
    is_inside = is_readable & is_written
    token_at = arena + own + index
    token = tl.load(token_at, mask=is_inside, other=NOTHING)
    begins_at_0 = lowest == 0
    is_start = (index == -1) & begins_at_0
    return tl.where(is_start, START, token)


@triton.jit
def _beyond(
    arena,  # int32 [words]: all texts
    at,  # int64 [k] or int64: offset of the text of each place
    own,  # int64: offset of the request's text
    n,  # int32: tokens of it
    differing,  # int32 [k]: index of the token that ends each match
    length,  # int32 [k]: tokens that match
    lowest,  # int32: index of the first token of the request that may be read
    going,  # bool [k]: places that are looked at
):
    """Count the tokens that agree beyond the one that differs, int32 [k]; BEYOND at
    most.
    """
    beyond = tl.zeros_like(length)
    context_index = n - 2 - length
    index = differing - 1
    for _ in tl.static_range(BEYOND):
        expected = _context(arena, own, n, context_index, lowest)
        is_inside = index >= 0
        is_readable = going & is_inside
        token_at = arena + at + index
        token = tl.load(token_at, mask=is_readable, other=NOTHING)
        is_begin = index == -1
        token = tl.where(is_begin, START, token)
        agrees = token == expected
        there_is = token != NOTHING
        going = going & agrees & there_is
        beyond += going.to(tl.int32)
        may_go_on = token != START
        going = going & may_go_on
        context_index -= 1
        index -= 1
    return beyond


@triton.jit
def _compare(
    arena,  # int32 [words]: all texts
    texts,  # int64: offset of the sealed tokens
    position,  # int32 [LANES]: of each place; -1: it is not compared
    own,  # int64: offset of the request's text
    n,  # int32: tokens of the context
    LANES: tl.constexpr,
):
    """Compare places of sealed text with the end of a context of n tokens and START.

    Returns the tokens that agree (START included, DEPTH at most), and whether the place
    sorts before the context.
    """
    limit = tl.minimum(DEPTH, n + 1)
    column = tl.arange(0, CHUNK)
    column_row = as_row(column)
    length = tl.zeros([LANES], tl.int32)
    before = tl.zeros([LANES], tl.int1)
    going = position >= 0
    done = 0
    while (done < limit) & any_of(going):
        # [CHUNK]: of the context
        back = done + column
        index = n - 1 - back
        expected = as_row(_context(arena, own, n, index, 0))
        counts = as_row(back < limit)

        # [LANES, CHUNK]: of the places
        place = as_column(position) - as_row(back)
        is_inside = place >= 0
        is_readable = as_column(going) & is_inside
        token_at = arena + texts + place
        token = tl.load(token_at, mask=is_readable, other=NOTHING)
        differs = token != expected
        differs = differs & counts

        # [LANES]: the first token that differs
        differing_column = tl.where(differs, column_row, CHUNK)
        first = tl.min(differing_column, axis=1)
        is_first = column_row == as_column(first)
        is_first = differs & is_first
        is_smaller = token < expected
        is_smaller = is_first & is_smaller
        num_smaller = tl.max(is_smaller.to(tl.int32), axis=1)
        smaller = num_smaller > 0
        agreed = tl.minimum(first, limit - done)
        length += tl.where(going, agreed, 0)
        ends = first < CHUNK
        ends = going & ends
        before = tl.where(ends, smaller, before)
        agrees = first == CHUNK
        going = going & agrees
        done += CHUNK
    return length, before


@triton.jit
def _sorted_place(
    arena,  # int32 [words]: all texts
    texts,  # int64: offset of the sealed tokens
    places,  # int64: offset of their places, which are sorted
    number,  # int32: of the places
    own,  # int64: offset of the request's text
    n,  # int32: tokens of the context
):
    """Return how many of the sorted places come before a context of n tokens."""
    lane = tl.arange(0, PROBES)
    low = 0 * number
    high = number
    while low < high:
        step = tl.cdiv(high - low, PROBES)
        # the last place of each of PROBES parts
        ends = step * (lane + 1)
        probe = low + ends - 1
        is_there = probe < high
        place_at = arena + places + probe
        place = tl.load(place_at, mask=is_there, other=-1)
        position = _position_of(place)
        position = tl.where(is_there, position, -1)
        _, before = _compare(
            arena=arena,
            texts=texts,
            position=position,
            own=own,
            n=n,
            LANES=PROBES,
        )
        num_less = count(before & is_there)
        num_probes = count(is_there)
        next_probe = low + (num_less + 1) * step - 1
        is_between = num_less < num_probes
        high = tl.where(is_between, next_probe, high)
        low = low + num_less * step
    return low


@triton.jit
def _sealed_strength(
    arena,  # int32 [words]: all texts
    texts,  # int64: offset of the sealed tokens
    own,  # int64: offset of the request's text
    n,  # int32: tokens of the context
    position,  # int32 [k]: of each place
    length,  # int32 [k]: tokens that agree there
    there,  # bool [k]: whether there is such a place
):
    """Return the strength of places of sealed text, whose last token agrees."""
    differing = position - length
    is_inside = differing >= 0
    is_readable = there & is_inside
    token_at = arena + texts + differing
    token = tl.load(token_at, mask=is_readable, other=-1)
    is_short = length < DEPTH
    is_context = length <= n
    is_token = token >= 0
    going = there & is_short & is_context & is_token
    beyond = _beyond(
        arena=arena,
        at=texts,
        own=own,
        n=n,
        differing=differing,
        length=length,
        lowest=0,
        going=going,
    )
    return 2 * length + beyond


@triton.jit
def search_sealed(
    arena,  # int32 [words]: all texts
    slots,  # int64 [requests]; -1: of no request
    text_at,  # int64 [texts]: offset of each text in the arena
    text_len,  # int32 [texts]: tokens of each text
    sealed_texts,  # int64 [slots]: offset of the problem's sealed tokens
    sealed_places,  # int64 [slots]: offset of the places of these
    sealed_count,  # int64 [slots]: number of the places
    others,  # int64 [4]: offsets of the tokens that all problems share, and of their
    # places, and the number of these
    fading,  # int32 [256]: weight of sealed text by its age
    found,  # int64 [requests, 3, CANDIDATES]: written
    found_others,  # int64 [requests, 3, PLACES]: written, in texts of all problems
):
    """Find the places of sealed text that match a request's text longest, for its whole
    text (program_id(1) = 0) and for its text without the last token (1), and those of
    the texts that all problems share (2).

    Places are ordered, so that the longest matches are neighbours of the place where
    the context would be; of equal lengths those behind it come first, and the nearest.
    """
    request = tl.program_id(0)
    which = tl.program_id(1)
    is_of_others = which == 2
    shift = tl.where(is_of_others, 0, which)
    slot = tl.load(slots + request)
    lane = tl.arange(0, 2 * PLACES)
    out_at = found + request * 3 * CANDIDATES + shift * PLACES
    width = CANDIDATES
    if is_of_others:
        out_at = found_others + request * 3 * PLACES
        width = PLACES
    out_traits = out_at + width
    out_left = out_traits + width
    nothing = tl.zeros([2 * PLACES], tl.int64)
    is_place = lane < PLACES
    tl.store(out_traits + lane, nothing, mask=is_place)
    if slot >= 0:
        texts = tl.load(sealed_texts + slot)
        places = tl.load(sealed_places + slot)
        number = tl.load(sealed_count + slot)
        if is_of_others:
            texts = tl.load(others)
            places = tl.load(others + 1)
            number = tl.load(others + 2)
        number = number.to(tl.int32)
        n = tl.load(text_len + slot)
        own = tl.load(text_at + slot)
        last_at = arena + own + n - 1
        written = tl.load(last_at)
        n = n - shift
        has_places = number > 0
        has_context = n >= 0
        if has_places & has_context:
            low = _sorted_place(
                arena=arena,
                texts=texts,
                places=places,
                number=number,
                own=own,
                n=n,
            )

            # the neighbours of the context, PLACES on either side
            distance = lane % PLACES
            is_behind = lane < PLACES
            index_behind = low + distance
            index_before = low - 1 - distance
            index = tl.where(is_behind, index_behind, index_before)
            is_inside = index >= 0
            is_listed = index < number
            there = is_inside & is_listed
            place_at = arena + places + index
            place = tl.load(place_at, mask=there, other=0)
            position = _position_of(place)
            position = tl.where(there, position, -1)
            length, _ = _compare(
                arena=arena,
                texts=texts,
                position=position,
                own=own,
                n=n,
                LANES=2 * PLACES,
            )

            # the longest ones first, those behind before the others, then the nearest
            side = tl.where(is_behind, 2 * PLACES, 0)
            nearness = side + PLACES - distance
            agrees = length > 0
            matches = there & agrees
            order = length * (4 * PLACES) + nearness
            order = tl.where(matches, order, 0)
            is_better = as_row(order) > as_column(order)
            num_better = is_better.to(tl.int32)
            rank = tl.sum(num_better, axis=1)

            strength = _sealed_strength(
                arena=arena,
                texts=texts,
                own=own,
                n=n,
                position=position,
                length=length,
                there=there,
            )
            if shift == 1:
                following_at = arena + texts + position + 1
                following = tl.load(following_at, mask=there, other=-1)
                strength = tl.minimum(length, BEYOND) - 1
                differs = following != written
                there = there & differs
            age = _age_of(place)
            weight = tl.load(fading + age)
            weight = tl.where(is_of_others, 1, weight)
            traits = _pack_traits(strength, weight, 0, shift)
            traits = traits.to(tl.int64)
            goes_on = texts + position + 1 + shift
            left = tl.full([2 * PLACES], ENDLESS, tl.int64)
            is_match = order > 0
            is_best = rank < PLACES
            kept = there & is_match & is_best
            tl.store(out_at + rank, goes_on, mask=kept)
            tl.store(out_traits + rank, traits, mask=kept)
            tl.store(out_left + rank, left, mask=kept)


@triton.jit
def _rank(
    arena,  # int32 [words]: all texts
    context,  # int32 [DEPTH]: tokens before the last one of the request
    at,  # int64: offset of the text
    place,  # int32: index in it
    exact,  # bool: whether the last token agrees
):
    """Rank a place of a text by the tokens that agree with a context: BEYOND more than
    these where the last one does, else those before it, BEYOND at most; 0 where nothing
    does.
    """
    back = tl.arange(0, DEPTH)
    index = place - 1 - back
    is_inside = index >= 0
    token_at = arena + at + index
    token = tl.load(token_at, mask=is_inside, other=START)
    agrees = token == context
    differing_back = tl.where(agrees, DEPTH - 1, back)
    num_alike = tl.min(differing_back, axis=0)
    inexact_rank = tl.minimum(num_alike, BEYOND)
    return tl.where(exact, EXACT + num_alike, inexact_rank)


@triton.jit
def _add_tile(
    best,  # int64 [PLACES]: the best keys so far
    least,  # int64: the least of them
    arena,  # int32 [words]: all texts
    context,  # int32 [DEPTH]: tokens before the last one of the request
    third_last,  # int32: token of the request
    second_last,  # int32: token of the request
    written,  # int32: last token of the request
    at,  # int64: offset of the text
    last,  # int32: last place of the tile
    member,  # int32: number of the text among the problem's
    BLOCK: tl.constexpr,  # tokens of a tile
):
    """Take the places of a tile into the best keys; return these and the least of them.

    Few places rank: where the last token of the context agrees, or the one before it.
    Of these the ones that may rank highest are compared first, one by one, until no
    other can be among the best. `bound`: no less than the ranked place, by what three
    tokens say.
    """
    back = tl.arange(0, BLOCK)
    place = last - back
    token_at = arena + at + place
    is_inside = place >= 0
    has_one_before = place > 0
    has_two_before = place > 1
    token = tl.load(token_at, mask=is_inside, other=NOTHING)
    token_before = tl.load(token_at - 1, mask=has_one_before, other=START)
    # 0 where they agree
    differs = token ^ written
    differs_before = token_before ^ second_last
    either = tl.minimum(
        differs.to(tl.uint32),
        differs_before.to(tl.uint32),
    )
    if tl.min(either, axis=0) == 0:
        token_earlier = tl.load(token_at - 2, mask=has_two_before, other=START)
        agrees_earlier = token_earlier == third_last
        longer = tl.where(agrees_earlier, BEYOND, 1)
        agrees_before = differs_before == 0
        rank_bound = tl.where(agrees_before, longer, 0)
        exact_bound = EXACT + rank_bound * ((DEPTH - 1) // BEYOND)
        agrees = differs == 0
        rank_bound = tl.where(agrees, exact_bound, rank_bound)
        bound = _pack_ranked(rank_bound, place)
        top = tl.max(bound, axis=0)
        while top >= tl.maximum(_ranked_of(least), _pack_ranked(1, 0)):
            top_bound, top_place = _unpack_ranked(top)
            is_exact = top_bound >= EXACT
            rank = _rank(arena, context, at, top_place, is_exact)
            ranked = _pack_ranked(rank, top_place)
            key = _pack_key(ranked, member)
            if key > least:
                best, least = _replace_least(best, least, key)
            is_top = bound == top
            bound = tl.where(is_top, -1, bound)
            top = tl.max(bound, axis=0)
    return best, least


@triton.jit
def _live_traits(
    arena,  # int32 [words]: all texts
    at,  # int64 [k]: offset of the text of each place
    own,  # int64: offset of the request's text
    n,  # int32: tokens of it
    place,  # int32 [k]: index of each place in its text
    rank,  # int32 [k]: of each place
    lowest,  # int32: index of the first token of the request that may be read
    is_prompt,  # bool: whether the places are in the prompt
    is_own,  # bool [k]: whether each is in the request's own text
):
    """Return the traits of places of live text, int32 [k]."""
    differs = rank < EXACT
    length = rank - (EXACT - 1)
    length = tl.where(differs, DEPTH, length)
    differing = place - length
    is_short = length < DEPTH
    is_inside = differing >= 0
    going = is_short & is_inside
    beyond = _beyond(
        arena=arena,
        at=at,
        own=own,
        n=n,
        differing=differing,
        length=length,
        lowest=lowest,
        going=going,
    )
    exact_strength = 2 * length + beyond
    strength = tl.where(differs, rank - 1, exact_strength)
    weight = tl.where(is_own, OWN, SIBLING)
    weight = tl.where(is_prompt, PROMPT, weight)
    return _pack_traits(
        strength=strength,
        weight=weight,
        own=is_own.to(tl.int32),
        differs=differs.to(tl.int32),
    )


@triton.jit
def _best_of_tiles(
    arena,  # int32 [words]: all texts
    text_at,  # int64 [texts]: offset of each text in the arena
    text_len,  # int32 [texts]: tokens of each text
    members,  # int64 [MEMBERS]: texts of the request's problem
    ends,  # int32 [MEMBERS]: of each text, the tile behind its last one
    own,  # int64: offset of the request's text
    n,  # int32: tokens of it
    prompt,  # int32: tokens of the prompt
    is_prompt,  # int32: 1: the tiles are the prompt's
    tile,  # int32: first tile
    stop,  # int32: tile behind the last one
    BLOCK: tl.constexpr,  # tokens of a tile
):
    """Return the keys of the best places in some tiles of live text, or of the prompt,
    int64 [PLACES].
    """
    in_prompt = is_prompt > 0
    in_live = is_prompt == 0
    last_at = arena + own + n - 1
    written = tl.load(last_at)
    lowest = tl.where(in_prompt, -prompt, 0)
    index = n - 2 - tl.arange(0, DEPTH)
    context = _context(arena, own, n, index, lowest)
    second_last = _context(arena, own, n, n - 2, lowest)
    third_last = _context(arena, own, n, n - 3, lowest)
    best = _no_keys()
    least = _least(best)
    while tile < stop:
        is_passed = ends <= tile
        over = is_passed & in_live
        member = count(over)
        at, size = _text(
            text_at=text_at,
            text_len=text_len,
            members=members,
            member=member,
            own=own,
            prompt=prompt,
            is_prompt=is_prompt,
        )
        passed_ends = tl.where(over, ends, 0)
        first = tl.max(passed_ends, axis=0)
        last = size - 2 - (tile - first) * BLOCK
        text_end = first + tl.cdiv(size, BLOCK)
        end = tl.minimum(stop, text_end)
        while tile < end:
            best, least = _add_tile(
                best=best,
                least=least,
                arena=arena,
                context=context,
                third_last=third_last,
                second_last=second_last,
                written=written,
                at=at,
                last=last,
                member=member,
                BLOCK=BLOCK,
            )
            last -= BLOCK
            tile += 1
    return best


@triton.jit
def scan_live(
    arena,  # int32 [words]: all texts
    slots,  # int64 [requests]; -1: of no request
    text_at,  # int64 [texts]: offset of each text in the arena
    text_len,  # int32 [texts]: tokens of each text
    begin,  # int64 [slots]: tokens before the response
    members,  # int64 [slots, MEMBERS]: texts of the request's problem
    member_count,  # int64 [slots]: how many there are
    seen,  # int64 [requests, 2, programs, PLACES]: written, keys of places
    MEMBERS: tl.constexpr,
    BLOCK: tl.constexpr,  # tokens of a tile
):
    """Find the places in the live text of a request's problem that match its own text
    longest, of equal lengths the latest, and those in its prompt. Each program of
    program_id(1) scans as many tiles, one after the other.

    A place whose last token differs matches by the tokens before that, behind all
    others. In `seen`, keys of live text come first, then those of the prompt; the best
    ones are the largest; below 0: none.
    """
    request = tl.program_id(0)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    slot = tl.load(slots + request)
    if slot >= 0:
        own = tl.load(text_at + slot)
        n = tl.load(text_len + slot)
        prompt = tl.load(begin + slot)
        prompt = prompt.to(tl.int32)
        member = tl.arange(0, MEMBERS)
        own_members = members + slot * MEMBERS
        num_members = tl.load(member_count + slot)
        there = member < num_members
        text = tl.load(own_members + member, mask=there, other=0)
        length = tl.load(text_len + text, mask=there, other=0)
        # of each text, the tile behind its last one
        text_tiles = tl.cdiv(length, BLOCK)
        ends = tl.cumsum(text_tiles, axis=0)
        live_tiles = tl.max(ends, axis=0)
        prompt_tiles = tl.cdiv(prompt, BLOCK)
        for is_prompt in range(2):
            in_prompt = is_prompt > 0
            tiles = tl.where(in_prompt, prompt_tiles, live_tiles)
            tiles_each = tl.cdiv(tiles, splits)
            turn = tl.where(in_prompt, splits - 1 - split, split)
            tile = turn * tiles_each
            stop = tl.minimum(tile + tiles_each, tiles)
            best = _best_of_tiles(
                arena=arena,
                text_at=text_at,
                text_len=text_len,
                members=own_members,
                ends=ends,
                own=own,
                n=n,
                prompt=prompt,
                is_prompt=is_prompt,
                tile=tile,
                stop=stop,
                BLOCK=BLOCK,
            )
            row = (request * 2 + is_prompt) * splits + split
            lane = tl.arange(0, PLACES)
            out = seen + row * PLACES + lane
            tl.store(out, best)


@triton.jit
def _text(
    text_at,  # int64 [texts]: offset of each text in the arena
    text_len,  # int32 [texts]: tokens of each text
    members,  # int64 [MEMBERS]: texts of the request's problem
    member,  # int32 [k] or int32: number among these
    own,  # int64: offset of the request's text
    prompt,  # int32: tokens of the prompt
    is_prompt,  # int32: 1: the text is the prompt
):
    """Return where texts of a problem begin, and their tokens; else of the prompt."""
    in_prompt = is_prompt > 0
    text = tl.load(members + member)
    text_begin = tl.load(text_at + text)
    text_size = tl.load(text_len + text)
    at = tl.where(in_prompt, own - prompt, text_begin)
    size = tl.where(in_prompt, prompt, text_size)
    return at, size


@triton.jit
def _best_keys(
    keys,  # int64 [number]: below 0: none
    number,  # int32
    BLOCK: tl.constexpr,  # keys that are read at once
):
    """Return the greatest keys, int64 [PLACES]; below 0: none."""
    best = _no_keys()
    least = _least(best)
    for first in range(0, number, BLOCK):
        lane = first + tl.arange(0, BLOCK)
        is_there = lane < number
        key = tl.load(keys + lane, mask=is_there, other=-1)
        top = _greatest(key)
        while top > tl.maximum(least, -1):
            best, least = _replace_least(best, least, top)
            is_top = key == top
            key = tl.where(is_top, -1, key)
            top = _greatest(key)
    return best


@triton.jit(do_not_specialize=["splits"])
def merge_live(
    arena,  # int32 [words]: all texts
    slots,  # int64 [requests]; -1: of no request
    text_at,  # int64 [texts]: offset of each text in the arena
    text_len,  # int32 [texts]: tokens of each text
    begin,  # int64 [slots]: tokens before the response
    members,  # int64 [slots, MEMBERS]: texts of the request's problem
    seen,  # int64 [requests, 2, splits, PLACES]: keys that `scan_live` has written
    found,  # int64 [requests, 3, CANDIDATES]: written
    splits,  # int: programs that have scanned for each request
    MEMBERS: tl.constexpr,
    BLOCK: tl.constexpr,  # keys that are read at once
):
    """Take the best places of all programs that scanned live text (program_id(1) = 0),
    or the prompt (1).
    """
    request = tl.program_id(0)
    is_prompt = tl.program_id(1)
    slot = tl.load(slots + request)
    if slot >= 0:
        in_prompt = is_prompt > 0
        own = tl.load(text_at + slot)
        n = tl.load(text_len + slot)
        prompt = tl.load(begin + slot)
        prompt = prompt.to(tl.int32)
        own_members = members + slot * MEMBERS
        number = splits * PLACES
        row = request * 2 + is_prompt
        best = _best_keys(seen + row * number, number, BLOCK)

        # [PLACES]: of each place
        there = best >= 0
        ranked = _ranked_of(best)
        rank, place = _unpack_ranked(ranked)
        member = _text_of(best)
        member = tl.where(there, member, 0)
        at, size = _text(
            text_at=text_at,
            text_len=text_len,
            members=own_members,
            member=member,
            own=own,
            prompt=prompt,
            is_prompt=is_prompt,
        )
        lowest = tl.where(in_prompt, -prompt, 0)
        text = tl.load(own_members + member)
        is_own_text = text == slot
        is_own = in_prompt | is_own_text
        traits = _live_traits(
            arena=arena,
            at=at,
            own=own,
            n=n,
            place=place,
            rank=rank,
            lowest=lowest,
            is_prompt=in_prompt,
            is_own=is_own,
        )
        traits = tl.where(there, traits, 0)
        left = size - 1 - place
        lane = (2 + is_prompt) * PLACES + tl.arange(0, PLACES)
        out_row = found + request * 3 * CANDIDATES
        out_at = out_row + lane
        out_traits = out_at + CANDIDATES
        out_left = out_traits + CANDIDATES
        tl.store(out_at, at + place + 1)
        tl.store(out_traits, traits.to(tl.int64))
        tl.store(out_left, left.to(tl.int64))
