"""Triton kernels that find where a request's text occurs in the history on the device.

Texts are addressed in tokens from the begin of the arena, which holds sealed text and
the texts of closed requests; vLLM's own array of all requests' tokens is reached by the
same offsets. A response is preceded by `START`, which is stored in sealed text only.
What is called a context is a request's text, read backwards from its last token.

A place that is found has three numbers, int64: where the text goes on from there, its
traits (`_traits`), and how many tokens are left of it. Of each request's `CANDIDATES`
places the first `PLACES` match its text in sealed text, the next ones match it there
without the last token, then come those of live text, and those of its prompt.

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
BEYOND = tl.constexpr(_RULES["BEYOND"])
"""Tokens beyond a differing one that count."""
OWN = tl.constexpr(_RULES["OWN"])
SIBLING = tl.constexpr(_RULES["SIBLING"])
PROMPT = tl.constexpr(_RULES["PROMPT"])
"""Weights of texts; sealed text has one by its age."""


@triton.jit
def _context(arena, own, n, index, lowest):
    """Load tokens of a request's text by index: from `lowest` on; START at -1 if that
    is the begin.
    """
    token = tl.load(
        arena + own + index, mask=(index >= lowest) & (index < n), other=NOTHING
    )
    return tl.where((index == -1) & (lowest == 0), START, token)


@triton.jit
def _traits(strength, weight, mine, differs):
    """Pack what the vote needs to know of a place: its strength (8 bits), its text's
    weight (16), whether that is the request's own, whether the last token differs, and
    that there is a place.
    """
    return strength | (weight << 8) | (mine << 24) | (differs << 25) | (1 << 26)


@triton.jit
def _beyond(arena, at, own, n, differing, length, lowest, going):
    """Count the tokens that agree beyond the one at `differing`, which ends a match of
    `length`; BEYOND at most.
    """
    beyond = tl.zeros_like(length)
    for i in tl.static_range(BEYOND):
        expected = _context(arena, own, n, n - 2 - length - i, lowest)
        index = differing - 1 - i
        token = tl.load(arena + at + index, mask=going & (index >= 0), other=NOTHING)
        token = tl.where(index == -1, START, token)
        going = going & (token == expected) & (token != NOTHING)
        beyond += going.to(tl.int32)
        going = going & (token != START)
    return beyond


@triton.jit
def _compare(arena, texts, position, own, n, LANES: tl.constexpr):
    """Compare places of sealed text with the end of a context of n tokens and START.

    Returns the tokens that agree (START included, DEPTH at most), and whether the place
    sorts before the context.
    """
    limit = tl.minimum(DEPTH, n + 1)
    column = tl.arange(0, CHUNK)
    length = tl.zeros([LANES], tl.int32)
    before = tl.zeros([LANES], tl.int1)
    going = position >= 0
    done = 0
    while (done < limit) & (tl.max(going.to(tl.int32), axis=0) > 0):
        back = done + column
        expected = _context(arena, own, n, n - 1 - back, 0)
        place = position[:, None] - back[None, :]
        token = tl.load(
            arena + texts + place, mask=going[:, None] & (place >= 0), other=NOTHING
        )
        inside = back < limit
        differs = (token != expected[None, :]) & inside[None, :]
        first = tl.min(tl.where(differs, column[None, :], CHUNK), axis=1)
        here = differs & (column[None, :] == first[:, None])
        smaller = tl.max((here & (token < expected[None, :])).to(tl.int32), axis=1) > 0
        length += tl.where(going, tl.minimum(first, limit - done), 0)
        before = tl.where(going & (first < CHUNK), smaller, before)
        going = going & (first == CHUNK)
        done += CHUNK
    return length, before


@triton.jit
def _sorted_place(arena, texts, places, count, own, n):
    """Return how many of the sorted places come before a context of n tokens."""
    low = 0 * count
    high = count
    while low < high:
        step = (high - low + 31) // 32
        probe = low + step * (tl.arange(0, 32) + 1) - 1
        valid = probe < high
        place = tl.load(arena + places + probe, mask=valid, other=-1)
        _, before = _compare(
            arena, texts, tl.where(valid, place & 0xFFFFFF, -1), own, n, 32
        )
        less = tl.sum((before & valid).to(tl.int32), axis=0)
        more = less < tl.sum(valid.to(tl.int32), axis=0)
        high = tl.where(more, low + (less + 1) * step - 1, high)
        low = low + less * step
    return low


@triton.jit
def search_sealed(
    arena,
    slots,
    text_at,
    text_len,
    sealed_texts,
    sealed_places,
    sealed_count,
    fading,
    found,
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
    out = found + request * 3 * CANDIDATES + shift * PLACES
    tl.store(
        out + CANDIDATES + lane, tl.zeros([2 * PLACES], tl.int64), mask=lane < PLACES
    )
    if slot >= 0:
        count = tl.load(sealed_count + slot).to(tl.int32)
        n = tl.load(text_len + slot)
        own = tl.load(text_at + slot)
        written = tl.load(arena + own + n - 1)
        n = n - shift
        if (count > 0) & (n >= 0):
            texts = tl.load(sealed_texts + slot)
            places = tl.load(sealed_places + slot)
            low = _sorted_place(arena, texts, places, count, own, n)
            near = lane % PLACES
            behind = lane < PLACES
            index = tl.where(behind, low + near, low - 1 - near)
            there = (index >= 0) & (index < count)
            place = tl.load(arena + places + index, mask=there, other=0)
            position = tl.where(there, place & 0xFFFFFF, -1)
            length, _ = _compare(arena, texts, position, own, n, 2 * PLACES)
            order = tl.where(
                there & (length > 0),
                length * 64 + tl.where(behind, 32, 0) + PLACES - near,
                0,
            )
            rank = tl.sum((order[None, :] > order[:, None]).to(tl.int32), axis=1)
            differing = position - length
            token = tl.load(
                arena + texts + differing, mask=there & (differing >= 0), other=-1
            )
            going = there & (length < DEPTH) & (length <= n) & (token >= 0)
            strength = 2 * length + _beyond(
                arena, texts, own, n, differing, length, 0, going
            )
            if shift == 1:
                following = tl.load(arena + texts + position + 1, mask=there, other=-1)
                strength = tl.minimum(length, BEYOND) - 1
                there = there & (following != written)
            weight = tl.load(fading + ((place >> 24) & 0xFF))
            kept = there & (order > 0) & (rank < PLACES)
            tl.store(out + rank, texts + position + 1 + shift, mask=kept)
            tl.store(
                out + CANDIDATES + rank,
                _traits(strength, weight, 0, shift).to(tl.int64),
                mask=kept,
            )
            tl.store(
                out + 2 * CANDIDATES + rank,
                tl.full([2 * PLACES], 1 << 30, tl.int64),
                mask=kept,
            )


@triton.jit
def _rank(arena, context, at, place, exact):
    """Rank a place of a text by the tokens that agree with a context: 3 more than these
    where the last one does, else those before it, BEYOND at most; 0 where nothing does.
    `context`: the tokens before the last.
    """
    back = tl.arange(0, DEPTH)
    index = place - 1 - back
    token = tl.load(arena + at + index, mask=index >= 0, other=START)
    alike = tl.min(tl.where(token == context, DEPTH - 1, back), axis=0)
    return tl.where(exact, 4 + alike, tl.minimum(alike, BEYOND))


@triton.jit
def _with_tile(
    best,
    least,
    arena,
    context,
    earlier,
    before,
    written,
    at,
    last,
    m,
    BLOCK: tl.constexpr,
):
    """Take the places of a tile, those up to `last`, into the best keys so far, of
    which `least` is the least.

    Few places rank: where the last token agrees, or the one before it (`before`). Of
    these the ones that may rank highest are compared first, one by one, until no other
    can be among the best. `bound`: no less than the rank, by what three tokens say, and
    the place.
    """
    place = last - tl.arange(0, BLOCK)
    tokens = arena + at + last - tl.arange(0, BLOCK)
    differs = tl.load(tokens, mask=place >= 0, other=NOTHING) ^ written
    differed = tl.load(tokens - 1, mask=place > 0, other=START) ^ before
    if tl.min(tl.minimum(differs.to(tl.uint32), differed.to(tl.uint32)), axis=0) == 0:
        longer = tl.load(tokens - 2, mask=place > 1, other=START) == earlier
        run = tl.where(differed == 0, tl.where(longer, BEYOND << 24, 1 << 24), 0)
        bound = (
            tl.where(differs == 0, run * ((DEPTH - 1) // BEYOND) + (4 << 24), run)
            + place
        )
        top = tl.max(bound, axis=0)
        while top >= tl.maximum((least >> 16).to(tl.int32), 1 << 24):
            rank = _rank(arena, context, at, top & 0xFFFFFF, (top >> 24) > BEYOND)
            key = (((rank << 24) | (top & 0xFFFFFF)).to(tl.int64) << 16) | m
            if key > least:
                best = tl.where(best == least, key, best)
                least = _least(best)
            bound = tl.where(bound == top, -1, bound)
            top = tl.max(bound, axis=0)
    return best, least


@triton.jit
def _least(keys):
    """Return the least of keys, whose upper and lower bits the hardware compares by 32
    at a time.
    """
    upper = (keys >> 16).to(tl.int32)
    lower = (keys & 0xFFFF).to(tl.int32)
    least = tl.min(upper, axis=0)
    return (least.to(tl.int64) << 16) | tl.min(
        tl.where(upper == least, lower, 0xFFFF), axis=0
    )


@triton.jit
def _live_traits(arena, at, own, n, place, rank, lowest, is_prompt, mine):
    """Return the traits of places that are so ranked; `mine`: in the request's own
    text.
    """
    length = tl.where(rank < 4, DEPTH, rank - 3)
    differing = place - length
    going = (length < DEPTH) & (differing >= 0)
    beyond = _beyond(arena, at, own, n, differing, length, lowest, going)
    strength = tl.where(rank < 4, rank - 1, 2 * length + beyond)
    weight = tl.where(is_prompt, PROMPT, tl.where(mine, OWN, SIBLING))
    return _traits(strength, weight, mine.to(tl.int32), (rank < 4).to(tl.int32))


@triton.jit
def scan_live(
    arena,
    slots,
    text_at,
    text_len,
    begin,
    members,
    member_count,
    seen,
    MEMBERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find the places in the live text of a request's problem that match its own text
    longest, of equal lengths the latest, and those in its prompt. Each program of
    program_id(1) scans as many tiles, one after the other.

    A place whose last token differs matches by the tokens before that, behind all
    others. `seen`: int64 [requests, 2, programs, PLACES], keys of places in live text
    and in the prompt, the best ones are the largest; below 0: none.
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
        there = tl.arange(0, MEMBERS) < tl.load(member_count + slot)
        text = tl.load(
            members + slot * MEMBERS + tl.arange(0, MEMBERS), mask=there, other=0
        )
        ends = tl.cumsum(
            (tl.load(text_len + text, mask=there, other=0) + BLOCK - 1) // BLOCK, axis=0
        )
        for is_prompt in range(2):
            tiles = tl.where(
                is_prompt > 0, (prompt + BLOCK - 1) // BLOCK, tl.max(ends, axis=0)
            )
            each = (tiles + splits - 1) // splits
            tile = tl.where(is_prompt > 0, splits - 1 - split, split) * each
            stop = tl.minimum(tile + each, tiles)
            lowest = tl.where(is_prompt > 0, -prompt, 0)
            context = _context(arena, own, n, n - 2 - tl.arange(0, DEPTH), lowest)
            before = _context(arena, own, n, n - 2, lowest)
            earlier = _context(arena, own, n, n - 3, lowest)
            best = -1 - tl.arange(0, PLACES).to(tl.int64)
            least = _least(best)
            while tile < stop:
                over = (ends <= tile) & (is_prompt == 0)
                m = tl.sum(over.to(tl.int32), axis=0)
                at, size = _text(
                    text_at,
                    text_len,
                    members + slot * MEMBERS,
                    m,
                    own,
                    prompt,
                    is_prompt,
                )
                first = tl.max(tl.where(over, ends, 0), axis=0)
                last = size - 2 - (tile - first) * BLOCK
                end = tl.minimum(stop, first + (size + BLOCK - 1) // BLOCK)
                while tile < end:
                    best, least = _with_tile(
                        best,
                        least,
                        arena,
                        context,
                        earlier,
                        before,
                        written,
                        at,
                        last,
                        m,
                        BLOCK,
                    )
                    last -= BLOCK
                    tile += 1
            tl.store(
                seen
                + ((request * 2 + is_prompt) * splits + split) * PLACES
                + tl.arange(0, PLACES),
                best,
            )


@triton.jit
def _text(text_at, text_len, members, m, own, prompt, is_prompt):
    """Load where texts begin, and their tokens, by number among a problem's texts; else
    of the prompt.
    """
    text = tl.load(members + m)
    at = tl.where(is_prompt > 0, own - prompt, tl.load(text_at + text))
    return at, tl.where(is_prompt > 0, prompt, tl.load(text_len + text))


@triton.jit(do_not_specialize=["splits"])
def merge_live(
    arena,
    slots,
    text_at,
    text_len,
    begin,
    members,
    seen,
    found,
    splits,
    MEMBERS: tl.constexpr,
    BLOCK: tl.constexpr,
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
        best = -1 - tl.arange(0, PLACES).to(tl.int64)
        least = _least(best)
        for first in range(0, splits * PLACES, BLOCK):
            one = first + tl.arange(0, BLOCK)
            keys = seen + (request * 2 + is_prompt) * splits * PLACES + one
            key = tl.load(keys, mask=one < splits * PLACES, other=-1)
            top = ~_least(~key)
            while top > tl.maximum(least, -1):
                best = tl.where(best == least, top, best)
                least = _least(best)
                key = tl.where(key == top, -1, key)
                top = ~_least(~key)
        rank = (best >> 40).to(tl.int32)
        place = ((best >> 16) & 0xFFFFFF).to(tl.int32)
        m = tl.where(best >= 0, best & 0xFFFF, 0)
        at, size = _text(
            text_at, text_len, members + slot * MEMBERS, m, own, prompt, is_prompt
        )
        lowest = tl.where(is_prompt > 0, -prompt, 0)
        mine = (is_prompt > 0) | (tl.load(members + slot * MEMBERS + m) == slot)
        traits = _live_traits(
            arena, at, own, n, place, rank, lowest, is_prompt > 0, mine
        )
        out = (
            found
            + request * 3 * CANDIDATES
            + (2 + is_prompt) * PLACES
            + tl.arange(0, PLACES)
        )
        tl.store(out, at + place + 1)
        tl.store(out + CANDIDATES, tl.where(best >= 0, traits, 0).to(tl.int64))
        tl.store(out + 2 * CANDIDATES, (size - 1 - place).to(tl.int64))
