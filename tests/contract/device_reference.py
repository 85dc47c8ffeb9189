"""The kernels of `das_adapter.engine.v2` in plain NumPy: the same drafts, chances and
counts, bit for bit.

`launch` takes the place of `DeviceIndex._launch`, whose tensors lie in this machine's
memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

START = -1
NOTHING = -3
DEPTH = 64
PLACES = 16
BEYOND = 3
SURE = 8
STRONGEST = 199
OWN = 512
SIBLING = 256
PROMPT = 64
KINDS = 192
PRIOR = 40
DOUBT = 8
MEMORY = 8192
SOURCES = 3
OTHERS_CHANCE = 0.75
SHARES = (0.3, 0.5, 0.7, 0.85, 0.95, 0.99, 1.0)
STRENGTHS = (3, 5, 8, 12, 18, 32, 64)


class Candidate:
    """A place: what follows there, and how much it counts."""

    def __init__(
        self,
        following: np.ndarray,
        strength: int,
        weight: int,
        own: bool,
        differs: bool,
    ):
        self.following = following
        self.strength = strength
        self.weight = weight
        self.own = own
        self.differs = differs


def launch(index: Any, requests: int) -> None:
    """Draft for the first `requests` entries of `index._slots`."""
    tables = index.arena.tables
    lengths = index._text_len.numpy()
    slots = [s for s in index._slots[:requests].tolist() if s >= 0]
    texts = index.texts.numpy()
    arena = index.words.numpy()
    for slot in slots:
        _learn(index, slot, texts[slot, tables.begin[slot] :][: lengths[slot]])
    _estimate(index)
    for row, slot in enumerate(slots):
        begin = int(tables.begin[slot])
        own = texts[slot, begin : begin + lengths[slot]]
        candidates = []
        others = []
        if int(index._num_sampled[row]):  # else its prompt is being read
            candidates = _sealed(index, slot, arena, own)
            others = _others(index, arena, own)
            candidates += _live(index, slot, texts, arena, lengths, own)
            candidates += _prompt(texts[slot, :begin], own)
        index.drafts[row] = 0
        _vote(index, row, slot, own, candidates, others)


def _learn(index: Any, slot: int, own: np.ndarray) -> None:
    offer = index.offers[slot].numpy()
    outcomes = index.outcomes.numpy()
    offered = int(offer[0])
    then = int(offer[1])
    for i, token in enumerate(own[then : then + offered].tolist()):
        kind = int(offer[3 + index._steps + i])
        accepted = token == int(offer[2 + i])
        outcomes[kind] += (1, accepted)
        if not accepted:
            break
    if len(own) > then:
        offer[0] = 0


def _estimate(index: Any) -> None:
    outcomes = index.outcomes.numpy()
    cells = index.cells.numpy()
    sources = index.sources.numpy()
    chance = index.chance.numpy()
    start = index.start.numpy()
    for source in range(SOURCES):
        kinds = slice(source * KINDS, (source + 1) * KINDS)
        new = outcomes[kinds].copy()
        cells[kinds] += new
        full = cells[kinds, 0] >= MEMORY
        cells[kinds][full] //= 2
        sources[source] += (
            new[:, 0].sum(),
            new[:, 1].sum(),
            np.sum(np.append(new[:, 0] * start, np.zeros(256 - KINDS))),
        )
        if sources[source, 0] >= MEMORY:
            sources[source] *= 0.5
        tried, accepted, expected = sources[source]
        better = (
            (accepted + DOUBT)
            / (tried - accepted + DOUBT)
            * ((tried - expected + DOUBT) / (expected + DOUBT))
        )
        odds = start * better
        chance[kinds] = (cells[kinds, 1] + PRIOR * (odds / (1 - start + odds))) / (
            cells[kinds, 0] + PRIOR
        )
    outcomes[:] = 0


def _compare(
    tokens: np.ndarray, positions: np.ndarray, context: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return how many tokens agree, backwards from these positions and from the
    context's end, and whether the place sorts before the context.
    """
    limit = min(DEPTH, len(context))
    expected = context[::-1][:limit]
    at = positions[:, None] - np.arange(limit)
    found = np.where(at >= 0, tokens[np.maximum(at, 0)], NOTHING)
    differs = found != expected
    first = np.where(differs.any(1), differs.argmax(1), limit)
    rows = np.flatnonzero(first < limit)
    before = np.zeros(len(positions), dtype=bool)
    before[rows] = found[rows, first[rows]] < expected[first[rows]]
    return first, before


def _beyond(text: np.ndarray, place: int, length: int, context: np.ndarray) -> int:
    """Count the tokens that agree beyond the differing one. `text` and `context` with
    what precedes them.
    """
    count = 0
    if length >= DEPTH or place - length < 0 or text[place - length] < 0:
        return 0
    for i in range(1, BEYOND + 1):
        a = place - length - i
        b = len(context) - 1 - length - i
        if a < 0 or b < 0 or text[a] != context[b]:
            break
        count += 1
        if text[a] == START:
            break
    return count


def _sealed(
    index: Any, slot: int, arena: np.ndarray, own: np.ndarray
) -> list[Candidate]:
    tables = index.arena.tables
    at = int(tables.sealed_texts[slot])
    begin = int(tables.sealed_places[slot])
    count = int(tables.sealed_count[slot])
    return _nearest(index, arena, own, (at, begin, count), (0, 1))


def _others(index: Any, arena: np.ndarray, own: np.ndarray) -> list[Candidate]:
    found = _nearest(index, arena, own, index.arena.tables.others[:3].tolist(), (0,))
    for candidate in found:
        candidate.weight = 1
    return found


def _nearest(
    index: Any,
    arena: np.ndarray,
    own: np.ndarray,
    sealed: Sequence[int],
    shifts: Sequence[int],
) -> list[Candidate]:
    at, begin, count = sealed
    if not count:
        return []
    found = []
    places = arena[begin : begin + count].view(np.uint32)
    tokens = arena[at:begin]
    whole = np.concatenate([[START], own])
    for shift in shifts:
        context = whole[: len(whole) - shift]
        low = 0
        high = count
        while low < high:
            middle = (low + high) // 2
            before = _compare(
                tokens, np.array([places[middle] & 0xFFFFFF], dtype=np.int64), context
            )[1][0]
            low, high = (middle + 1, high) if before else (low, middle)
        near = [(i, 1, i - low) for i in range(low, min(count, low + PLACES))]
        near += [
            (i, 0, low - 1 - i) for i in range(low - 1, max(-1, low - 1 - PLACES), -1)
        ]
        positions = np.array([places[i] & 0xFFFFFF for i, _, _ in near], dtype=np.int64)
        lengths = _compare(tokens, positions, context)[0].tolist()
        ordered = sorted(
            zip(lengths, near, strict=True), key=lambda x: (-x[0], -x[1][1], x[1][2])
        )
        for length, (i, _, _) in ordered[:PLACES]:
            if not length:
                break
            position = int(places[i] & 0xFFFFFF)
            weight = int(index._fading[int(places[i]) >> 24])
            if not shift:
                strength = 2 * length + _beyond(tokens, position, length, context)
            elif tokens[position + 1] == own[-1]:
                continue
            else:
                strength = min(length, BEYOND) - 1
            found.append(
                Candidate(
                    tokens[position + 1 + shift :], strength, weight, False, bool(shift)
                )
            )
    return found


def _scan(
    text: np.ndarray, context: np.ndarray, number: int, first: int
) -> list[tuple[int, int, int]]:
    """Return (rank, place, number of the text) of all places of a text with something
    behind them that match, in tokens of the text; `first`: 1 if it begins with START,
    which has no place number.
    """
    places = np.arange(len(text) - 1)
    exact = text[places] == context[-1]
    alike = np.zeros(len(places), dtype=np.int64)
    going = places[places >= first]
    for i in range(1, min(DEPTH, len(context))):
        expected = context[-1 - i]
        going = going[going >= i]
        going = going[text[going - i] == expected]
        alike[going] += 1
        if expected == START or not len(going):
            break
    rank = np.where(exact, 4 + alike, np.minimum(alike, BEYOND))
    return [(int(rank[p]), int(p) - first, number) for p in np.flatnonzero(rank > 0)]


def _live(
    index: Any,
    slot: int,
    texts: np.ndarray,
    arena: np.ndarray,
    lengths: np.ndarray,
    own: np.ndarray,
) -> list[Candidate]:
    tables = index.arena.tables
    numbers = tables.members[slot * tables.width :][
        : tables.member_count[slot]
    ].tolist()
    context = np.concatenate([[START], own])
    all_texts = []
    found = []
    for m, number in enumerate(numbers):
        if number < len(texts):
            begin = int(tables.begin[number])
            text = texts[number, begin : begin + lengths[number]]
        else:
            text = arena[int(tables.text_at[number]) :][: lengths[number]]
        all_texts.append(np.concatenate([[START], text]))
        found += _scan(all_texts[-1], context, m, 1)
    kept = sorted(found, key=lambda x: (-x[0], -x[1], -x[2]))[:PLACES]
    return [
        _candidate(
            all_texts[m],
            context,
            rank,
            place + 1,
            OWN if numbers[m] == slot else SIBLING,
            numbers[m] == slot,
        )
        for rank, place, m in kept
    ]


def _prompt(prompt: np.ndarray, own: np.ndarray) -> list[Candidate]:
    if len(prompt) < 2:
        return []
    context = np.concatenate([prompt, own])
    kept = sorted(_scan(prompt, context, 0, 0), key=lambda x: (-x[0], -x[1]))[:PLACES]
    return [
        _candidate(prompt, context, rank, place, PROMPT, True)
        for rank, place, _ in kept
    ]


def _candidate(
    text: np.ndarray, context: np.ndarray, rank: int, place: int, weight: int, own: bool
) -> Candidate:
    if rank < 4:
        return Candidate(text[place + 1 :], rank - 1, weight, own, True)
    length = rank - 3
    strength = 2 * length + _beyond(text, place, length, context)
    return Candidate(text[place + 1 :], strength, weight, own, False)


def _vote(
    index: Any,
    row: int,
    slot: int,
    own: np.ndarray,
    candidates: list[Candidate],
    others: list[Candidate],
) -> None:
    steps = index._steps
    count = 0
    asked = 0
    survival = 1.0
    offer = index.offers[slot].numpy()
    strongest = max((c.strength for c in candidates if not c.differs), default=0)
    candidates = [c for c in candidates if not c.differs or strongest < SURE]
    index.confidence[row] = 0.0
    for step in range(steps + 1):
        chance, winner, kind = _elected(index, candidates, step, None)
        if chance < OTHERS_CHANCE:
            other = _elected(index, others, step, 2)
            if other[0] > chance:
                chance, winner, kind = other
        if not chance:
            break
        candidates = _voters(candidates, step, winner)
        others = _voters(others, step, winner)
        winner = min(winner, index._vocabulary - 1)
        offer[2 + step] = winner
        offer[3 + steps + step] = kind
        asked = step + 1
        survival *= chance
        if step == steps or survival < np.float32(index._min_chance):
            break
        index.drafts[row, step] = winner
        index.confidence[row, step] = chance
        count = step + 1
    index.real[row] = count
    offer[0] = asked
    offer[1] = len(own)


def _elected(
    index: Any, candidates: list[Candidate], step: int, source: int | None
) -> tuple[float, int, int]:
    """Return the chance, the token and the kind; `source` None: by the voters."""
    votes: dict[int, int] = {}
    for c in candidates:
        if step < len(c.following) and c.following[step] >= 0:
            token = int(c.following[step])
            strength = min(c.strength + 2 * step, STRONGEST)
            votes[token] = votes.get(token, 0) + (strength + 1) ** 6 * c.weight
    if not votes:
        return 0.0, 0, 0
    winner = min(votes, key=lambda token: (-votes[token], token))
    voters = _voters(candidates, step, winner)
    share = votes[winner] / sum(votes.values())
    longest = max(min(c.strength + 2 * step, STRONGEST) for c in voters)
    if source is None:
        source = int(all(c.own for c in voters))
    s = sum(share >= x for x in SHARES)
    m = sum(longest >= x for x in STRENGTHS)
    c3 = (len(voters) > 1) + (len(voters) > 3)
    kind = ((source * 8 + s) * 8 + m) * 3 + c3
    return float(index.chance[kind]), winner, kind


def _voters(candidates: list[Candidate], step: int, token: int) -> list[Candidate]:
    return [
        c for c in candidates if step < len(c.following) and c.following[step] == token
    ]
