"""The arena of a device gives every text a place of its own, and takes it back."""

from __future__ import annotations

import numpy as np
import pytest
from own_history import OwnHistory

torch = pytest.importorskip("torch")

from das_adapter.engine.v2.arena import Arena  # noqa: E402


def arena(words: int = 1000) -> Arena:
    return Arena(
        torch.zeros(words, dtype=torch.int32),
        slots=4,
        closed=8,
        members=3,
        beside=False,
    )


def members(found: Arena, slot: int) -> list[int]:
    return found.tables.members[slot * 3 :][: found.tables.member_count[slot]].tolist()


def test_siblings_see_each_other_and_what_has_ended_until_the_weight_sync() -> None:
    found = arena()
    for slot, problem in ((0, 7), (1, 7), (2, 9)):
        found.open(slot, problem, at=100 * slot, begin=5)
    assert members(found, 0) == [1, 0]
    assert members(found, 2) == [2]
    kept = found.close(0, room=20)
    assert kept is not None and kept.text >= 4
    assert found.tables.text_at[kept.text] == kept.at
    assert members(found, 1) == [1, kept.text]
    found.open(0, 9, at=0, begin=3)
    assert members(found, 0) == [0, 2]
    assert found.close(2) is None
    assert members(found, 0) == [0]
    found.forget()
    assert members(found, 1) == [1]
    assert found.used == 0
    again = found.close(1, room=20)
    assert again is not None and (again.text, again.at) == (kept.text, kept.at)


def sealed(found: Arena, problem: int, tokens: int, places: int) -> int:
    """Give a problem its sealed text; return its offset."""
    at = found.used
    found.put(problem, torch.zeros(tokens + places, dtype=torch.int32), tokens)
    return at


def test_what_was_written_ahead_is_a_text_of_a_request_that_ended() -> None:
    found = arena()
    for slot in (0, 1):
        found.open(slot, 7, at=100 * slot, begin=5)
    ahead = [found.add(7, tokens=20) for _ in range(2)]
    assert ahead[1] is not None
    assert members(found, 0) == [1, 0, ahead[1].text]
    assert [kept and (kept.at, kept.room) for kept in ahead] == [(0, 20), (20, 20)]
    assert found.add(7, tokens=1000) is None
    assert found.short == 1
    found.forget()
    assert members(found, 0) == [1, 0]


def test_the_newest_texts_are_searched_where_there_are_too_many() -> None:
    found = arena()
    kept = []
    for _ in range(3):
        found.open(0, 7, 0, 0)
        kept.append(found.close(0, room=5))
    found.open(1, 7, 0, 0)
    assert members(found, 1) == [1, *(k.text for k in reversed(kept[1:]) if k)]


def test_a_request_searches_its_own_text_however_many_began_after_it() -> None:
    found = arena()
    for slot in range(4):
        found.open(slot, 7, 0, 0)
    assert [members(found, slot) for slot in range(4)] == [
        [3, 2, 0],
        [3, 2, 1],
        [3, 2, 1],
        [3, 2, 1],
    ]
    found.close(3)
    assert [members(found, slot) for slot in range(3)] == [[2, 1, 0]] * 3


def test_every_text_has_a_place_of_its_own_until_the_arena_is_full() -> None:
    found = arena()
    found.open(0, 7, 0, 0)
    found.open(1, 8, 0, 0)
    assert found.missing() == [7, 8]
    assert sealed(found, 7, 300, 290) == 0
    assert found.missing() == [8]
    kept = found.close(0, room=400)
    assert kept is not None and kept.at == 590
    assert found.room == 10
    assert found.close(1, room=11) is None
    assert found.short == 1
    found.open(2, 7, 0, 0)
    assert found.missing() == []  # it is there still
    assert found.tables.sealed_count[2] == 290
    found.forget()
    assert (found.missing(), found.room) == ([7], 1000)


def test_what_was_not_found_is_looked_for_again() -> None:
    found = arena()
    found.open(0, 7, 0, 0)
    found.open(1, 8, 0, 0)
    sealed(found, 7, 100, 90)
    sealed(found, 8, 0, 0)
    found.forget_missing()
    assert found.missing() == [8]
    assert found.tables.sealed_count.tolist() == [90, 0, 0, 0]


def test_a_text_costs_eight_bytes_a_token_and_four_more() -> None:
    index = OwnHistory()
    rng = np.random.default_rng(0)
    for _ in range(8):
        index.add(1, rng.integers(0, 5000, 500), 0)
    index.seal()
    tokens, places = index.flat(1, 2**20)
    assert 4 * (len(tokens) + len(places)) == 8 * 8 * 500 + 4 * (8 + 1)


def test_a_flat_history_is_in_the_order_of_its_contexts() -> None:
    index = OwnHistory()
    rng = np.random.default_rng(0)
    texts = {version: rng.integers(0, 3, 40).astype(np.int32) for version in range(3)}
    for version, text in texts.items():
        index.add(1, text, version)
        index.seal()
    tokens, places = index.flat(1, 2**20)
    assert tokens[0] == tokens[-1] == -1 and len(places) == 120
    positions = places & 0xFFFFFF
    ages = places >> 24
    contexts = [
        tuple(tokens[max(0, p - 63) : p + 1][::-1].tolist()) for p in positions.tolist()
    ]
    ended = [c[: c.index(-1) + 1] if -1 in c else c for c in contexts]
    assert ended == sorted(ended)
    starts = np.flatnonzero(tokens == -1)[:-1]
    which = np.searchsorted(starts, positions, side="right") - 1
    for i, start in enumerate(starts.tolist()):
        text = tokens[start + 1 : start + 41]
        version = next(v for v, t in texts.items() if np.array_equal(t, text))
        assert set(ages[which == i].tolist()) == {2 - version}


def test_of_what_no_segment_holds_the_newest_visits_are_searched() -> None:
    index = OwnHistory()
    for version, size in enumerate((8_000_000, 8_500_000, 500_000)):
        index.add(1, np.arange(size) % 2**23, version)
        index.seal()
    assert index.tokens == 17_000_000
    assert np.bincount(index.flat(1, 2**26)[1] >> 24).tolist() == [500_000, 8_500_000]
    for size in (8_500_000, 8_000_000, 500_000):  # a visit that no segment holds
        index.add(1, np.arange(size) % 2**23, 3)
    index.seal(window=1)
    assert np.bincount(index.flat(1, 2**26)[1] >> 24).tolist() == [16_500_000]


@pytest.mark.parametrize("most", [400, 64, 8])
def test_a_history_that_is_too_large_is_thinned_out(most: int) -> None:
    index = OwnHistory()
    rng = np.random.default_rng(0)
    for _ in range(6):
        index.add(1, rng.integers(0, 50, 200), 0)
    index.seal()
    tokens, places = index.flat(1, most)
    assert len(tokens) + len(places) <= most
    assert bool(len(tokens)) == (most > 10)
    assert len(index.flat(2, most)[0]) == 0
