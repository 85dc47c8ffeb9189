"""Sealed text comes to the device beside the steps, some in each."""

from __future__ import annotations

import time

import numpy as np
import pytest
from own_history import OwnHistory

pytest.importorskip("torch")
import torch

from das_adapter.core.index import SuffixIndex
from das_adapter.engine.v2 import arena
from das_adapter.engine.v2.arena import Arena

WORDS = 2**13
PROBLEMS = 6


def history() -> SuffixIndex:
    index = OwnHistory()
    rng = np.random.default_rng(0)
    for problem in range(PROBLEMS):
        for _ in range(1 + problem % 3):
            index.add(problem, rng.integers(0, 900, 200), 0)
    index.seal()
    return index


class Device:
    """An arena in the host's memory, with a request of each problem."""

    def __init__(self, beside: bool, words: int = WORDS) -> None:
        self.words = torch.zeros(words, dtype=torch.int32)
        self.arena = Arena(self.words, slots=8, closed=8, members=4, beside=beside)
        for problem in range(PROBLEMS):
            self.arena.open(problem, problem, 0, 0)

    def step(self, index: SuffixIndex) -> int:
        """Return how many words a step brought."""
        before = self.words.clone()
        self.arena.copy_sealed(index)
        return int((self.words != before).sum())

    def text(self, problem: int) -> tuple[list[int], int]:
        """What is searched of a problem: its words, and how many places."""
        tables = self.arena.tables
        slot = problem
        begin = tables.sealed_texts[slot]
        places = tables.sealed_places[slot]
        count = int(tables.sealed_count[slot])
        return self.words[begin : places + count].tolist(), count


def until_all_is_there(device: Device, index: SuffixIndex) -> list[int]:
    """Return the words of each step."""
    found = []
    for _ in range(10_000):
        found.append(device.step(index))
        if not device.arena.unsealed:
            return found
        time.sleep(0.001)  # a thread looks up
    raise AssertionError("it does not arrive")


def test_beside_the_steps_the_same_text_arrives_problem_by_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = history()
    at_once = Device(beside=False)
    beside = Device(beside=True)
    assert at_once.step(index) > 2000
    monkeypatch.setattr(arena, "MAX_COPIED_WORDS", 1)
    steps = until_all_is_there(beside, index)
    assert (
        0 < max(steps) <= len(at_once.text(2)[0])
        and np.count_nonzero(steps) == PROBLEMS
    )
    for problem in range(PROBLEMS):
        words, places = beside.text(problem)
        assert (words, places) == at_once.text(problem)
        tokens, there = index.flat(problem, WORDS)
        assert words == [*tokens.tolist(), *there.view(np.int32).tolist()]


def test_what_was_on_its_way_at_a_weight_sync_is_brought_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arena, "MAX_COPIED_WORDS", 1)
    index = history()
    device = Device(beside=True)
    while not device.step(index):
        time.sleep(0.001)
    device.arena.forget()
    until_all_is_there(device, index)
    assert device.arena.used == sum(
        len(device.text(problem)[0]) for problem in range(PROBLEMS)
    )


def test_text_that_comes_from_another_node_while_it_is_looked_for_is_found() -> None:
    device = Device(beside=True)
    device.step(SuffixIndex())  # where there is none yet
    device.arena.forget_missing()
    until_all_is_there(device, history())
    assert all(device.text(problem)[1] > 0 for problem in range(PROBLEMS))


@pytest.mark.parametrize("beside", [False, True])
def test_a_full_arena_says_so_until_the_weight_sync_and_searches_what_it_has(
    beside: bool,
) -> None:
    index = history()
    device = Device(beside, words=900)
    # of which there is no history: it lacks none
    device.arena.open(PROBLEMS, PROBLEMS, 0, 0)
    until_all_is_there(device, index)
    there = [device.text(problem)[1] > 0 for problem in range(PROBLEMS)]
    assert device.arena.short == there.count(False) > 0 and device.arena.used <= 900
    assert any(there)
    device.arena.forget()
    assert device.arena.short == 0


def test_a_text_that_can_not_be_read_fails_in_the_step() -> None:
    class Damaged:
        has_others = False

        def flat(self, problem: int, most: int) -> None:
            raise OSError("damaged")

    device = Device(beside=True)
    with pytest.raises(OSError, match="damaged"):
        until_all_is_there(device, Damaged())  # type: ignore[arg-type]
