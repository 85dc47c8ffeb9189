"""Triton kernels that draft from the history on the device: what `csrc/suffix_index.cpp` does on the host.

A step is six kernels: learn what became of the last drafts, estimate chances from it, search the sealed text, scan the
live text, merge what was seen there, and vote. None of them synchronises with the host; shapes depend on the batch size
alone, so that a step is captured as one CUDA graph.

Texts are addressed in tokens from the begin of the arena, which holds sealed text and the texts of closed requests;
vLLM's own array of all requests' tokens is reached by the same offsets. A response is preceded by `START`, which is
stored in sealed text only.

Where this differs from the host's index: of live text the longest matches vote (the host takes the latest of those with
four equal tokens), and a draft that reaches the end of the request's own text goes on with the draft itself (the host
searches again).
"""

from __future__ import annotations

import triton
import triton.language as tl

START = tl.constexpr(-1)
"""Precedes the first token of a response."""
NOTHING = tl.constexpr(-3)
"""Precedes what is before a context's begin: equal to no token."""
DEPTH = tl.constexpr(64)
"""Tokens of left context that are compared."""
CHUNK = tl.constexpr(8)
"""Tokens that are compared at once."""
PLACES = tl.constexpr(16)
"""Places that one search contributes."""
BEYOND = tl.constexpr(3)
"""Tokens beyond a differing one that count."""
SURE = tl.constexpr(8)
"""Strength from which on places that differ in the last token are not asked."""
STRONGEST = tl.constexpr(199)
OWN = tl.constexpr(512)
SIBLING = tl.constexpr(256)
PROMPT = tl.constexpr(64)
"""Weights of texts; sealed text has those of `SuffixIndex.fading`."""
SHARES = tl.constexpr(8)
STRENGTHS = tl.constexpr(8)
COUNTS = tl.constexpr(3)
KINDS = tl.constexpr(192)
"""Kinds of draft tokens of one source: by share of the votes, strength and number of candidates."""
PRIOR = tl.constexpr(40)
DOUBT = tl.constexpr(8)
MEMORY = tl.constexpr(8192)
"""Weight of a kind's prior and of a source's, and of the past at most, tokens."""


@triton.jit
def _context(arena, own, n, index, lowest):
    """Load tokens of a request's text by index: from `lowest` on; START at -1 if that is the begin."""
    token = tl.load(arena + own + index, mask=(index >= lowest) & (index < n), other=NOTHING)
    return tl.where((index == -1) & (lowest == 0), START, token)


@triton.jit(do_not_specialize=["requests"])
def learn(
    offers,
    kinds,
    offered,
    then,
    text_at,
    text_len,
    arena,
    slots,
    outcomes,
    requests,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Compare what was offered to each request with what it has written since, and count by kind.

    `outcomes`: int32 [2 * KINDS, 2], tried and accepted; zero before.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)
    slot = tl.load(slots + row, mask=row < requests, other=-1)
    known = slot >= 0
    at = tl.load(text_at + slot, mask=known, other=0)
    length = tl.load(text_len + slot, mask=known, other=0)
    before = tl.load(then + slot, mask=known, other=0)
    count = tl.load(offered + slot, mask=known, other=0)
    place = before[:, None] + column[None, :]
    asked = known[:, None] & (column[None, :] < count[:, None]) & (place < length[:, None]) & (column[None, :] < WIDTH)
    cell = slot[:, None] * WIDTH + column[None, :]
    offer = tl.load(offers + cell, mask=asked, other=-1)
    kind = tl.load(kinds + cell, mask=asked, other=0)
    written = tl.load(arena + at[:, None] + place, mask=asked, other=-2)
    wrong = asked & (written != offer)
    first = tl.min(tl.where(wrong, column[None, :], PADDED), axis=1)
    tried = asked & (column[None, :] <= first[:, None])
    accepted = asked & (column[None, :] < first[:, None])
    one = tl.full([ROWS, PADDED], 1, tl.int32)
    tl.atomic_add(outcomes + 2 * kind, one, mask=tried)
    tl.atomic_add(outcomes + 2 * kind + 1, one, mask=accepted)
    tl.store(offered + slot, tl.zeros([ROWS], tl.int32), mask=known & (length > before))


@triton.jit
def estimate(outcomes, cells, sources, start, chance, LANES: tl.constexpr):
    """Take the outcomes into the counts of each kind, and compute each kind's chance to be accepted.

    `cells`: int32 [2 * KINDS, 2]; `sources`: float64 [2, 3], tried, accepted and expected; `start`: float64 [KINDS],
    the chances before anything is learned; `chance`: float64 [2 * KINDS]. One program; the same estimate as
    `Acceptance` in `csrc/suffix_draft.hpp`.
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
        tried, accepted = tl.where(full, tried // 2, tried), tl.where(full, accepted // 2, accepted)
        tl.store(cells + at, tried, mask=valid)
        tl.store(cells + at + 1, accepted, mask=valid)
        prior = tl.load(start + lane, mask=valid, other=0.0)
        own = sources + 3 * source
        sum_tried = tl.load(own) + tl.sum(new_tried, axis=0)
        sum_accepted = tl.load(own + 1) + tl.sum(new_accepted, axis=0)
        expected = tl.load(own + 2) + tl.sum(new_tried * prior, axis=0)
        half = tl.where(sum_tried >= MEMORY, 0.5, 1.0)
        sum_tried, sum_accepted, expected = sum_tried * half, sum_accepted * half, expected * half
        tl.store(own, sum_tried)
        tl.store(own + 1, sum_accepted)
        tl.store(own + 2, expected)
        better = (sum_accepted + DOUBT) / (sum_tried - sum_accepted + DOUBT)
        better = better * ((sum_tried - expected + DOUBT) / (expected + DOUBT))
        odds = prior * better
        base = odds / (1 - prior + odds)
        tl.store(chance + source * KINDS + lane, (accepted + PRIOR * base) / (tried + PRIOR), mask=valid)


@triton.jit
def _compare(arena, texts, position, own, n, LANES: tl.constexpr):
    """Compare places of sealed text with the end of a context of n tokens and START.

    Returns the tokens that agree (START included, DEPTH at most), and whether the place sorts before the context.
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
        token = tl.load(arena + texts + place, mask=going[:, None] & (place >= 0), other=NOTHING)
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
def search_sealed(
    arena,
    slots,
    row_of_slot,
    text_at,
    text_len,
    sealed_texts,
    sealed_places,
    sealed_count,
    fading,
    found_at,
    found_info,
    found_left,
    CANDIDATES: tl.constexpr,
):
    """Find the places of sealed text that match a request's text longest, for its whole text (program_id(1) = 0) and
    for its text without the last token (1).

    Places are ordered, so that the longest matches are neighbours of the place where the context would be; of equal
    lengths those behind it come first, and the nearest.
    """
    request, shift = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + request)
    lane = tl.arange(0, 2 * PLACES)
    out = request * CANDIDATES + shift * PLACES
    tl.store(found_info + out + lane, tl.zeros([2 * PLACES], tl.int32), mask=lane < PLACES)
    if slot >= 0:
        row = tl.load(row_of_slot + slot)
        count = tl.load(sealed_count + row).to(tl.int32)
        n = tl.load(text_len + slot)
        own = tl.load(text_at + slot)
        written = tl.load(arena + own + n - 1)
        n = n - shift
        if (count > 0) & (n >= 0):
            texts = tl.load(sealed_texts + row)
            places = tl.load(sealed_places + row)
            low, high = 0 * count, count
            while low < high:
                step = (high - low + 31) // 32
                probe = low + step * (tl.arange(0, 32) + 1) - 1
                valid = probe < high
                place = tl.load(arena + places + probe, mask=valid, other=-1)
                position = tl.where(valid, place & 0xFFFFFF, -1)
                length, before = _compare(arena, texts, position, own, n, 32)
                less = tl.sum((before & valid).to(tl.int32), axis=0)
                more = less < tl.sum(valid.to(tl.int32), axis=0)
                high = tl.where(more, low + (less + 1) * step - 1, high)
                low = low + less * step
            near = lane % PLACES
            behind = lane < PLACES
            index = tl.where(behind, low + near, low - 1 - near)
            there = (index >= 0) & (index < count)
            place = tl.load(arena + places + index, mask=there, other=0)
            position = tl.where(there, place & 0xFFFFFF, -1)
            length, before = _compare(arena, texts, position, own, n, 2 * PLACES)
            order = tl.where(there & (length > 0), length * 64 + tl.where(behind, 32, 0) + PLACES - near, 0)
            rank = tl.sum((order[None, :] > order[:, None]).to(tl.int32), axis=1)
            beyond = tl.zeros([2 * PLACES], tl.int32)
            differing = position - length
            token = tl.load(arena + texts + differing, mask=there & (differing >= 0), other=-1)
            going = there & (length < DEPTH) & (length <= n) & (token >= 0)
            for i in tl.static_range(BEYOND):
                expected = _context(arena, own, n, n - 2 - length - i, 0)
                at = differing - 1 - i
                token = tl.load(arena + texts + at, mask=going & (at >= 0), other=NOTHING)
                going = going & (token == expected) & (token != NOTHING)
                beyond += going.to(tl.int32)
                going = going & (token != START)
            following = tl.load(arena + texts + position + 1, mask=there, other=-1)
            strength = 2 * length + beyond
            if shift == 1:
                strength = tl.minimum(length, BEYOND) - 1
                there = there & (following != written)
            age = (place >> 24) & 0xFF
            weight = tl.load(fading + age)
            kept = there & (order > 0) & (rank < PLACES)
            info = strength | (weight << 8) | (shift << 25) | (1 << 26)
            tl.store(found_at + out + rank, texts + position + 1 + shift, mask=kept)
            tl.store(found_info + out + rank, info, mask=kept)
            tl.store(found_left + out + rank, tl.full([2 * PLACES], 1 << 30, tl.int32), mask=kept)


@triton.jit
def _beyond(arena, at, own, n, place, length, lowest):
    """Count the tokens that agree beyond the one that ends a match in live text, BEYOND at most."""
    differing = place - length
    going = (length < DEPTH) & (differing >= 0)
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
def scan_live(
    arena,
    slots,
    row_of_slot,
    text_at,
    text_len,
    begin,
    members,
    member_count,
    seen_at,
    seen_info,
    seen_left,
    seen_key,
    MEMBERS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find the places in the live text of a request's problem that match its own text longest; of equal lengths the
    latest. The tiles of these texts are shared out over SPLITS programs; one more does the request's prompt.

    A place whose last token differs matches by the tokens before that, behind all others.
    """
    request, split = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, PLACES)
    out = (request * (SPLITS + 1) + split) * PLACES + lane
    tl.store(seen_info + out, tl.zeros([PLACES], tl.int32))
    tl.store(seen_key + out, tl.full([PLACES], -1, tl.int64))
    slot = tl.load(slots + request)
    if slot >= 0:
        row = tl.load(row_of_slot + slot)
        own = tl.load(text_at + slot)
        n = tl.load(text_len + slot)
        prompt = tl.load(begin + slot).to(tl.int32)
        is_prompt = split == SPLITS
        lowest = tl.where(is_prompt, -prompt, 0)
        texts = tl.where(is_prompt, 1, tl.load(member_count + row).to(tl.int32))
        written = tl.load(arena + own + n - 1)
        best = tl.full([PLACES], -1, tl.int64)
        for m in range(texts):
            text = tl.load(members + row * MEMBERS + m)
            at = tl.where(is_prompt, own - prompt, tl.load(text_at + text))
            size = tl.where(is_prompt, prompt, tl.load(text_len + text))
            step = tl.where(is_prompt, 1, SPLITS)
            tile = tl.where(is_prompt, 0, split)
            while tile * BLOCK < size:
                place = size - 2 - (tile * BLOCK + tl.arange(0, BLOCK))
                there = place >= tl.where(is_prompt, 0, -1)
                last = tl.load(arena + at + place, mask=there & (place >= 0), other=START)
                exact = there & (last == written)
                alike = tl.zeros([BLOCK], tl.int32)
                going = there & (place >= 0)
                i = 1
                while (i < DEPTH) & (tl.max(going.to(tl.int32), axis=0) > 0):
                    index = n - 1 - i
                    expected = tl.load(arena + own + index, mask=index >= lowest, other=NOTHING)
                    expected = tl.where((index == -1) & (lowest == 0), START, expected)
                    token = tl.load(arena + at + place - i, mask=going & (place >= i), other=START)
                    going = going & (token == expected)
                    alike += going.to(tl.int32)
                    going = going & (token != START)
                    i += 1
                rank = tl.where(exact, 4 + alike, tl.where(there, tl.minimum(alike, BEYOND), 0))
                key = (rank.to(tl.int64) << 40) | ((place + 1).to(tl.int64) << 16) | m
                key = tl.where(rank > 0, key, -1)
                least = tl.min(best, axis=0)
                top = tl.max(key, axis=0)
                while top > least:
                    best = tl.where(lane == tl.argmin(best, axis=0), top, best)
                    key = tl.where(key == top, -1, key)
                    least = tl.min(best, axis=0)
                    top = tl.max(key, axis=0)
                tile += step
        kept = best >= 0
        rank = (best >> 40).to(tl.int32)
        place = ((best >> 16) & 0xFFFFFF).to(tl.int32) - 1
        m = tl.where(is_prompt, -1, (best & 0xFFFF).to(tl.int32))
        text = tl.load(members + row * MEMBERS + m, mask=kept & (m >= 0), other=0)
        at = tl.where(is_prompt, own - prompt, tl.load(text_at + text, mask=kept, other=0))
        size = tl.where(is_prompt, prompt, tl.load(text_len + text, mask=kept, other=0))
        differs = (rank < 4).to(tl.int32)
        length = rank - 3
        beyond = _beyond(arena, at, own, n, place, tl.where(rank < 4, DEPTH, length), lowest)
        strength = tl.where(rank < 4, rank - 1, 2 * length + beyond)
        mine = (is_prompt | (text == slot)).to(tl.int32)
        weight = tl.where(is_prompt, PROMPT, tl.where(text == slot, OWN, SIBLING))
        left = size - 1 - place
        info = strength | (weight << 8) | (mine << 24) | (differs << 25) | (1 << 26)
        grows = (mine != 0) & (m >= 0)
        tl.store(seen_info + out, tl.where(kept, info | (grows.to(tl.int32) << 27), 0))
        tl.store(seen_at + out, at + place + 1)
        tl.store(seen_left + out, left)
        tl.store(seen_key + out, best)


@triton.jit
def merge_live(
    seen_at,
    seen_info,
    seen_left,
    seen_key,
    found_at,
    found_info,
    found_left,
    SPLITS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Take the best places of all programs that scanned live text, and those of the prompt."""
    request = tl.program_id(0)
    lane = tl.arange(0, SPLITS * PLACES)
    seen = request * (SPLITS + 1) * PLACES + lane
    key = tl.load(seen_key + seen)
    rank = tl.sum((key[None, :] > key[:, None]).to(tl.int32), axis=1)
    out = request * CANDIDATES + 2 * PLACES
    first = tl.arange(0, PLACES)
    prompt = request * (SPLITS + 1) * PLACES + SPLITS * PLACES + first
    tl.store(found_info + out + PLACES + first, tl.load(seen_info + prompt))
    tl.store(found_at + out + PLACES + first, tl.load(seen_at + prompt))
    tl.store(found_left + out + PLACES + first, tl.load(seen_left + prompt))
    place = tl.where(key >= 0, rank, PLACES)
    nobody = tl.sum((key >= 0).to(tl.int32), axis=0)
    tl.store(found_info + out + first, tl.zeros([PLACES], tl.int32), mask=first >= nobody)
    kept = place < PLACES
    tl.store(found_info + out + place, tl.load(seen_info + seen), mask=kept)
    tl.store(found_at + out + place, tl.load(seen_at + seen), mask=kept)
    tl.store(found_left + out + place, tl.load(seen_left + seen), mask=kept)


@triton.jit
def vote(
    arena,
    slots,
    num_sampled,
    text_at,
    text_len,
    found_at,
    found_info,
    found_left,
    chance,
    offers,
    kinds,
    offered,
    then,
    drafts,
    confidence,
    real,
    vocabulary,
    min_chance,
    STEPS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Draft token by token what most candidates vote for; see `SuffixIndex::draft` in `csrc/suffix_index.cpp`.

    `drafts`: int64 [requests, STEPS], beyond the draft the request's last token; `confidence`: float32, the chance of
    each token given those before it, 0 beyond the draft; `real`: int32 [requests], the draft's length.
    """
    request = tl.program_id(0)
    slot = tl.load(slots + request)
    lane = tl.arange(0, CANDIDATES)
    column = tl.arange(0, COLUMNS)
    if slot >= 0:
        n = tl.load(text_len + slot)
        own = tl.load(text_at + slot)
        last = tl.load(arena + own + n - 1)
        at = tl.load(found_at + request * CANDIDATES + lane)
        info = tl.load(found_info + request * CANDIDATES + lane)
        left = tl.load(found_left + request * CANDIDATES + lane)
        valid = ((info >> 26) & 1) > 0
        strength = info & 0xFF
        weight = ((info >> 8) & 0xFFFF).to(tl.int64)
        mine = ((info >> 24) & 1) > 0
        differs = ((info >> 25) & 1) > 0
        grows = ((info >> 27) & 1) > 0
        strongest = tl.max(tl.where(valid & (differs == 0), strength, 0), axis=0)
        valid = valid & (tl.where(differs, strongest, 0) < SURE)
        draft = tl.zeros([COLUMNS], tl.int32) + last
        survival = (0 * n + 1).to(tl.float64)
        count = 0 * n
        asked = 0 * n
        step = 0 * n
        going = tl.load(num_sampled + request) > 0
        while going:
            token = tl.load(arena + at + step, mask=valid & (step < left), other=-1)
            alive = valid & (token >= 0)
            if tl.max(alive.to(tl.int32), axis=0) == 0:
                beyond = step - left
                grown = tl.sum(tl.where(column[None, :] == beyond[:, None], draft[None, :], 0), axis=1)
                token = tl.where(grows & (beyond >= 0), grown, token)
                alive = valid & grows & (beyond >= 0)
            power = (tl.minimum(strength + 2 * step, STRONGEST) + 1).to(tl.int64)
            power = power * power * power
            votes = tl.where(alive, power * power * weight, 0)
            agree = (token[:, None] == token[None, :]) & alive[None, :]
            total = tl.sum(tl.where(agree, votes[None, :], 0), axis=1)
            total = tl.where(alive, total, -1)
            most = tl.max(total, axis=0)
            going = most >= 0
            if going:
                winner = tl.min(tl.where(total == most, token, 0x7FFFFFFF), axis=0)
                voters = alive & (token == winner)
                number = tl.sum(voters.to(tl.int32), axis=0)
                longest = tl.max(tl.where(voters, tl.minimum(strength + 2 * step, STRONGEST), 0), axis=0)
                alone = tl.sum((voters & (mine == 0)).to(tl.int32), axis=0) == 0
                share = most.to(tl.float64) / tl.sum(votes, axis=0).to(tl.float64)
                s = (share >= 0.3).to(tl.int32) + (share >= 0.5).to(tl.int32) + (share >= 0.7).to(tl.int32)
                s += (share >= 0.85).to(tl.int32) + (share >= 0.95).to(tl.int32) + (share >= 0.99).to(tl.int32)
                s += (share >= 1.0).to(tl.int32)
                m = (longest >= 3).to(tl.int32) + (longest >= 5).to(tl.int32) + (longest >= 8).to(tl.int32)
                m += (longest >= 12).to(tl.int32) + (longest >= 18).to(tl.int32) + (longest >= 32).to(tl.int32)
                m += (longest >= 64).to(tl.int32)
                c = (number > 1).to(tl.int32) + (number > 3).to(tl.int32)
                kind = ((alone.to(tl.int32) * SHARES + s) * STRENGTHS + m) * COUNTS + c
                token_chance = tl.load(chance + kind)
                winner = tl.minimum(winner, vocabulary - 1)
                tl.store(offers + slot * WIDTH + step, winner)
                tl.store(kinds + slot * WIDTH + step, kind)
                asked = step + 1
                survival = survival * token_chance
                going = (step < STEPS) & (survival >= min_chance)
                if going:
                    draft = tl.where(column == step, winner, draft)
                    tl.store(confidence + request * STEPS + step, token_chance.to(tl.float32))
                    count = step + 1
                    valid = voters
                    step = step + 1
        filled = (column < STEPS) & (column >= count)
        tl.store(confidence + request * STEPS + column, tl.zeros([COLUMNS], tl.float32), mask=filled)
        tl.store(
            drafts + request * STEPS + column, tl.where(column < count, draft, last).to(tl.int64), mask=column < STEPS
        )
        tl.store(real + request, count)
        tl.store(offered + slot, asked)
        tl.store(then + slot, n)


@triton.jit(do_not_specialize_on_alignment=["slots", "targets", "rooms", "closed"])
def keep_texts(arena, text_at, text_len, slots, targets, rooms, closed, BLOCK: tl.constexpr):
    """Copy the texts of requests that end into the arena: program (i, tile) of text i.

    `targets`: int64, offsets in the arena; `rooms`: int64, tokens that fit there; `closed`: int64, numbers of the texts
    from then on.
    """
    i, tile = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + i)
    size = tl.minimum(tl.load(text_len + slot), tl.load(rooms + i).to(tl.int32))
    place = tile * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(arena + tl.load(text_at + slot) + place, mask=place < size, other=0)
    tl.store(arena + tl.load(targets + i) + place, token, mask=place < size)
    if tile == 0:
        tl.store(text_len + tl.load(closed + i), size)
