"""Triton kernels that find where a request's text occurs in the history on the device.

Texts are addressed in tokens from the begin of the arena, which holds sealed text and
the texts of closed requests; vLLM's own array of all requests' tokens is reached by the
same offsets. A response is preceded by `START`, which is stored in sealed text only.
What is called a context is a request's text, read backwards from its last token.

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
EXACT = tl.constexpr(4)
"""Least rank of a place whose last token agrees with the context's."""
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


@triton.jit
def count(mask):
    """Return how many entries of a mask [n] hold, int32."""
    return tl.sum(mask.to(tl.int32), axis=0)


@triton.jit
def any_of(mask):
    """Return whether an entry of a mask [n] holds."""
    return tl.max(mask.to(tl.int32), axis=0) > 0


@triton.jit
def _position_of(sealed_place):
    """Return the position of a packed place of sealed text."""
    return sealed_place & 0xFFFFFF


@triton.jit
def _age_of(sealed_place):
    """Return the age of the text of a packed place of sealed text, in visits."""
    return (sealed_place >> 24) & 0xFF


@triton.jit
def _pack_traits(strength, weight, own, differs):
    """Pack what the vote needs to know of a place that there is; `own` and `differs`
    are 0 or 1.
    """
    there_is = 1 << 26
    return strength | (weight << 8) | (own << 24) | (differs << 25) | there_is


@triton.jit
def unpack_traits(traits):
    """Return of a place: strength int32, weight int64, and whether it is in the
    request's own text, its last token differs, and there is such a place.
    """
    strength = traits & 0xFF
    weight = ((traits >> 8) & 0xFFFF).to(tl.int64)
    own = ((traits >> 24) & 1) > 0
    differs = ((traits >> 25) & 1) > 0
    there_is = ((traits >> 26) & 1) > 0
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
    return (ranked.to(tl.int64) << 16) | text


@triton.jit
def _ranked_of(key):
    """Return the upper 32 bits of a key: its rank and its place."""
    return (key >> 16).to(tl.int32)


@triton.jit
def _text_of(key):
    """Return the number of the text in a key."""
    return (key & 0xFFFF).to(tl.int32)


@triton.jit
def _no_keys():
    """Return `PLACES` keys, all different, that are below those of all places."""
    return -1 - tl.arange(0, PLACES).to(tl.int64)


@triton.jit
def _least(keys):
    """Return the least of keys, whose upper and lower bits the hardware compares by 32
    at a time.
    """
    ranked = _ranked_of(keys)
    text = _text_of(keys)
    least_ranked = tl.min(ranked, axis=0)
    above_all = 0xFFFF
    text = tl.where(ranked == least_ranked, text, above_all)
    return _pack_key(least_ranked, tl.min(text, axis=0))


@triton.jit
def _context(arena, own, n, index, lowest):
    """Load tokens of a request's text of `n` tokens at `own` by index: from `lowest`
    on; START at -1 if that is the begin.
    """
    inside = (index >= lowest) & (index < n)
    token = tl.load(arena + own + index, mask=inside, other=NOTHING)
    is_start = (index == -1) & (lowest == 0)
    return tl.where(is_start, START, token)


@triton.jit
def _beyond(arena, at, own, n, differing, length, lowest, going):
    """Count the tokens that agree beyond the one at `differing`, which ends a match of
    `length`; BEYOND at most. `going`: places that are looked at.
    """
    beyond = tl.zeros_like(length)
    for i in tl.static_range(BEYOND):
        expected = _context(arena, own, n, n - 2 - length - i, lowest)
        index = differing - 1 - i
        readable = going & (index >= 0)
        token = tl.load(arena + at + index, mask=readable, other=NOTHING)
        token = tl.where(index == -1, START, token)
        going = going & (token == expected) & (token != NOTHING)
        beyond += going.to(tl.int32)
        going = going & (token != START)
    return beyond


@triton.jit
def _compare(arena, texts, position, own, n, LANES: tl.constexpr):
    """Compare places of sealed text with the end of a context of n tokens and START;
    `position`: of each, -1: it is not compared.

    Returns the tokens that agree (START included, DEPTH at most), and whether the place
    sorts before the context.
    """
    limit = tl.minimum(DEPTH, n + 1)
    column = tl.arange(0, CHUNK)
    length = tl.zeros([LANES], tl.int32)
    before = tl.zeros([LANES], tl.int1)
    going = position >= 0
    done = 0
    while (done < limit) & any_of(going):
        back = done + column
        expected = _context(arena, own, n, n - 1 - back, 0)
        place = position[:, None] - back[None, :]
        readable = going[:, None] & (place >= 0)
        token = tl.load(arena + texts + place, mask=readable, other=NOTHING)
        inside = back < limit
        differs = (token != expected[None, :]) & inside[None, :]
        first = tl.min(tl.where(differs, column[None, :], CHUNK), axis=1)
        is_first = differs & (column[None, :] == first[:, None])
        is_smaller = is_first & (token < expected[None, :])
        smaller = tl.max(is_smaller.to(tl.int32), axis=1) > 0
        agreed = tl.minimum(first, limit - done)
        length += tl.where(going, agreed, 0)
        before = tl.where(going & (first < CHUNK), smaller, before)
        going = going & (first == CHUNK)
        done += CHUNK
    return length, before


@triton.jit
def _sorted_place(arena, texts, places, number, own, n):
    """Return how many of the sorted places come before a context of n tokens."""
    low = 0 * number
    high = number
    while low < high:
        step = tl.cdiv(high - low, 32)
        probe = low + step * (tl.arange(0, 32) + 1) - 1
        valid = probe < high
        place = tl.load(arena + places + probe, mask=valid, other=-1)
        position = tl.where(valid, _position_of(place), -1)
        _, before = _compare(arena, texts, position, own, n, 32)
        less = count(before & valid)
        probes = count(valid)
        high = tl.where(less < probes, low + (less + 1) * step - 1, high)
        low = low + less * step
    return low


@triton.jit
def search_sealed(
    arena,  # int32 [words]: all texts
    slots,  # int64 [requests]; -1: of no request
    text_at,  # int64 [texts]: offset of each text in the arena
    text_len,  # int32 [texts]: tokens of each text
    sealed_texts,  # int64 [slots]: offset of the problem's sealed tokens
    sealed_places,  # int64 [slots]: offset of the places of these
    sealed_count,  # int64 [slots]: number of the places
    fading,  # int32 [256]: weight of sealed text by its age
    found,  # int64 [requests, 3, CANDIDATES]: written
):
    """Find the places of sealed text that match a request's text longest, for its whole
    text (program_id(1) = 0) and for its text without the last token (1).

    Places are ordered, so that the longest matches are neighbours of the place where
    the context would be; of equal lengths those behind it come first, and the nearest.
    """
    request = tl.program_id(0)
    shift = tl.program_id(1)
    slot = tl.load(slots + request)
    lane = tl.arange(0, 2 * PLACES)
    out_at = found + request * 3 * CANDIDATES + shift * PLACES
    out_traits = out_at + CANDIDATES
    out_left = out_at + 2 * CANDIDATES
    nothing = tl.zeros([2 * PLACES], tl.int64)
    tl.store(out_traits + lane, nothing, mask=lane < PLACES)
    if slot >= 0:
        number = tl.load(sealed_count + slot).to(tl.int32)
        n = tl.load(text_len + slot)
        own = tl.load(text_at + slot)
        written = tl.load(arena + own + n - 1)
        n = n - shift
        if (number > 0) & (n >= 0):
            texts = tl.load(sealed_texts + slot)
            places = tl.load(sealed_places + slot)
            low = _sorted_place(arena, texts, places, number, own, n)

            # the neighbours of the context, PLACES on either side
            distance = lane % PLACES
            is_behind = lane < PLACES
            index = tl.where(is_behind, low + distance, low - 1 - distance)
            there = (index >= 0) & (index < number)
            place = tl.load(arena + places + index, mask=there, other=0)
            position = tl.where(there, _position_of(place), -1)
            length, _ = _compare(arena, texts, position, own, n, 2 * PLACES)

            # the longest ones first
            nearness = tl.where(is_behind, 32, 0) + PLACES - distance
            matches = there & (length > 0)
            order = tl.where(matches, length * 64 + nearness, 0)
            is_better = order[None, :] > order[:, None]
            rank = tl.sum(is_better.to(tl.int32), axis=1)

            differing = position - length
            readable = there & (differing >= 0)
            token = tl.load(arena + texts + differing, mask=readable, other=-1)
            going = there & (length < DEPTH) & (length <= n) & (token >= 0)
            beyond = _beyond(arena, texts, own, n, differing, length, 0, going)
            strength = 2 * length + beyond
            if shift == 1:
                following = tl.load(arena + texts + position + 1, mask=there, other=-1)
                strength = tl.minimum(length, BEYOND) - 1
                there = there & (following != written)
            weight = tl.load(fading + _age_of(place))
            traits = _pack_traits(strength, weight, 0, shift).to(tl.int64)
            goes_on = texts + position + 1 + shift
            left = tl.full([2 * PLACES], ENDLESS, tl.int64)
            kept = there & (order > 0) & (rank < PLACES)
            tl.store(out_at + rank, goes_on, mask=kept)
            tl.store(out_traits + rank, traits, mask=kept)
            tl.store(out_left + rank, left, mask=kept)


@triton.jit
def _rank(arena, context, at, place, exact):
    """Rank a place of a text by the tokens that agree with a context: 3 more than these
    where the last one does (`exact`), else those before it, BEYOND at most; 0 where
    nothing does. `context`: the tokens before the last.
    """
    back = tl.arange(0, DEPTH)
    index = place - 1 - back
    token = tl.load(arena + at + index, mask=index >= 0, other=START)
    alike = tl.min(tl.where(token == context, DEPTH - 1, back), axis=0)
    return tl.where(exact, EXACT + alike, tl.minimum(alike, BEYOND))


@triton.jit
def _with_tile(
    best,
    least,
    arena,
    context,
    third_last,
    second_last,
    written,
    at,
    last,
    m,
    BLOCK: tl.constexpr,
):
    """Take the places of a tile, those up to `last`, into the best keys so far, of
    which `least` is the least.

    Few places rank: where the last token of the context (`written`) agrees, or the one
    before it. Of these the ones that may rank highest are compared first, one by one,
    until no other can be among the best. `bound`: no less than the ranked place, by
    what three tokens say.
    """
    place = last - tl.arange(0, BLOCK)
    tokens = arena + at + last - tl.arange(0, BLOCK)
    token = tl.load(tokens, mask=place >= 0, other=NOTHING)
    token_before = tl.load(tokens - 1, mask=place > 0, other=START)
    # 0 where they agree
    differs = token ^ written
    differs_before = token_before ^ second_last
    either = tl.minimum(differs.to(tl.uint32), differs_before.to(tl.uint32))
    if tl.min(either, axis=0) == 0:
        token_earlier = tl.load(tokens - 2, mask=place > 1, other=START)
        longer = tl.where(token_earlier == third_last, BEYOND, 1)
        rank_bound = tl.where(differs_before == 0, longer, 0)
        exact_bound = EXACT + rank_bound * ((DEPTH - 1) // BEYOND)
        rank_bound = tl.where(differs == 0, exact_bound, rank_bound)
        bound = _pack_ranked(rank_bound, place)
        top = tl.max(bound, axis=0)
        while top >= tl.maximum(_ranked_of(least), _pack_ranked(1, 0)):
            top_bound, top_place = _unpack_ranked(top)
            rank = _rank(arena, context, at, top_place, top_bound > BEYOND)
            key = _pack_key(_pack_ranked(rank, top_place), m)
            if key > least:
                best = tl.where(best == least, key, best)
                least = _least(best)
            bound = tl.where(bound == top, -1, bound)
            top = tl.max(bound, axis=0)
    return best, least


@triton.jit
def _live_traits(arena, at, own, n, place, rank, lowest, is_prompt, is_own):
    """Return the traits of places that are so ranked; `is_own`: in the request's own
    text.
    """
    differs = rank < EXACT
    length = tl.where(differs, DEPTH, rank - (EXACT - 1))
    differing = place - length
    going = (length < DEPTH) & (differing >= 0)
    beyond = _beyond(arena, at, own, n, differing, length, lowest, going)
    strength = tl.where(differs, rank - 1, 2 * length + beyond)
    weight = tl.where(is_own, OWN, SIBLING)
    weight = tl.where(is_prompt, PROMPT, weight)
    return _pack_traits(strength, weight, is_own.to(tl.int32), differs.to(tl.int32))


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
        prompt = tl.load(begin + slot).to(tl.int32)
        written = tl.load(arena + own + n - 1)
        member = tl.arange(0, MEMBERS)
        own_members = members + slot * MEMBERS
        there = member < tl.load(member_count + slot)
        text = tl.load(own_members + member, mask=there, other=0)
        length = tl.load(text_len + text, mask=there, other=0)
        # of each text, the tile behind its last one
        ends = tl.cumsum(tl.cdiv(length, BLOCK), axis=0)
        prompt_tiles = tl.cdiv(prompt, BLOCK)
        for is_prompt in range(2):
            tiles = tl.where(is_prompt > 0, prompt_tiles, tl.max(ends, axis=0))
            each = tl.cdiv(tiles, splits)
            turn = tl.where(is_prompt > 0, splits - 1 - split, split)
            tile = turn * each
            stop = tl.minimum(tile + each, tiles)
            lowest = tl.where(is_prompt > 0, -prompt, 0)
            context = _context(arena, own, n, n - 2 - tl.arange(0, DEPTH), lowest)
            second_last = _context(arena, own, n, n - 2, lowest)
            third_last = _context(arena, own, n, n - 3, lowest)
            best = _no_keys()
            least = _least(best)
            while tile < stop:
                over = (ends <= tile) & (is_prompt == 0)
                m = count(over)
                at, size = _text(
                    text_at, text_len, own_members, m, own, prompt, is_prompt
                )
                first = tl.max(tl.where(over, ends, 0), axis=0)
                last = size - 2 - (tile - first) * BLOCK
                end = tl.minimum(stop, first + tl.cdiv(size, BLOCK))
                while tile < end:
                    best, least = _with_tile(
                        best,
                        least,
                        arena,
                        context,
                        third_last,
                        second_last,
                        written,
                        at,
                        last,
                        m,
                        BLOCK,
                    )
                    last -= BLOCK
                    tile += 1
            row = (request * 2 + is_prompt) * splits + split
            tl.store(seen + row * PLACES + tl.arange(0, PLACES), best)


@triton.jit
def _text(text_at, text_len, members, m, own, prompt, is_prompt):
    """Load where texts begin, and their tokens, by number `m` among a problem's texts;
    else of the prompt.
    """
    text = tl.load(members + m)
    at = tl.where(is_prompt > 0, own - prompt, tl.load(text_at + text))
    size = tl.where(is_prompt > 0, prompt, tl.load(text_len + text))
    return at, size


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
        own = tl.load(text_at + slot)
        n = tl.load(text_len + slot)
        prompt = tl.load(begin + slot).to(tl.int32)
        own_members = members + slot * MEMBERS
        number = splits * PLACES
        own_keys = seen + (request * 2 + is_prompt) * number
        best = _no_keys()
        least = _least(best)
        for first in range(0, number, BLOCK):
            one = first + tl.arange(0, BLOCK)
            key = tl.load(own_keys + one, mask=one < number, other=-1)
            top = ~_least(~key)  # the greatest
            while top > tl.maximum(least, -1):
                best = tl.where(best == least, top, best)
                least = _least(best)
                key = tl.where(key == top, -1, key)
                top = ~_least(~key)
        there = best >= 0
        rank, place = _unpack_ranked(_ranked_of(best))
        m = tl.where(there, _text_of(best), 0)
        at, size = _text(text_at, text_len, own_members, m, own, prompt, is_prompt)
        lowest = tl.where(is_prompt > 0, -prompt, 0)
        is_own = (is_prompt > 0) | (tl.load(own_members + m) == slot)
        traits = _live_traits(
            arena, at, own, n, place, rank, lowest, is_prompt > 0, is_own
        )
        traits = tl.where(there, traits, 0).to(tl.int64)
        left = (size - 1 - place).to(tl.int64)
        lane = (2 + is_prompt) * PLACES + tl.arange(0, PLACES)
        out = found + request * 3 * CANDIDATES + lane
        tl.store(out, at + place + 1)
        tl.store(out + CANDIDATES, traits)
        tl.store(out + 2 * CANDIDATES, left)
