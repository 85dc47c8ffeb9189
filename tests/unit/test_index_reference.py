"""The native index drafts what the plain Python reference drafts, whatever is called in
whatever order.
"""

from __future__ import annotations

import itertools
import tempfile
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from own_history import OwnHistory
from reference_index import ReferenceIndex

from das_adapter.core.index import SuffixIndex
from das_adapter.core.index.store import HistoryStore
from das_adapter.core.index.values import ALL

PROBLEMS = st.sampled_from([0, 0, 2**64 - 2])
NEWER = st.sampled_from([0, 0, 1, 1, 7, -1])
"""Steps of the weight version: what arrives late was written by an older one."""
WINDOWS = st.just(ALL) | st.integers(1, 4)
READERS = st.integers(0, 1)
SEEDS = st.integers(0, 2**32 - 1)


def text(seed: int, size: int = 40) -> list[int]:
    """Token ids over a small alphabet with repeated passages and loops."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, rng.integers(2, 5), rng.integers(0, size)).tolist()
    if seed % 3 == 0:
        ids = ids[: seed % 7] * 14  # longer than what is compared
    elif seed % 3 == 1:
        ids += [9, *ids[len(ids) // 3 :]]
    return ids


def texts(size: int = 40) -> st.SearchStrategy[list[int]]:
    return SEEDS.map(lambda seed: text(seed, size))


def same_drafts(
    native: SuffixIndex,
    reference: ReferenceIndex,
    handles: list[int],
    budgets: list[int],
    min_chance: float,
) -> list[list[int]]:
    """Draft with both indexes, which must agree on tokens and chances; return the
    tokens.
    """
    tokens, chances = native.draft(handles, budgets, min_chance)
    found = [draft.tolist() for draft in tokens], [draft.tolist() for draft in chances]
    assert found == reference.draft(handles, budgets, min_chance)
    return found[0]


OTHERS_TOKENS = 300


class SameDrafts(RuleBasedStateMachine):
    """A store and two engines that map it, the first at every seal, the other when it
    likes, against references that copy.
    """

    @initialize(seed=SEEDS)
    def start(self, seed: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.store = self.native_store(), ReferenceIndex(OTHERS_TOKENS)
        self.readers = [
            (SuffixIndex.attach(self.folder.name), ReferenceIndex()) for _ in range(2)
        ]
        self.handles: list[list[int]] = [[], []]
        self.version = self.calls = 0
        for i in range(3):
            self.add(0, text(seed + i), 0)
            self.add(0, text(seed + i + 7), 1)
            self.seal()
        self.refresh(1)
        for reader, i in itertools.product((0, 1), (12, 13)):
            self.open(reader, 0, text(seed + 11), text(seed + i))

    def native_store(self) -> HistoryStore:
        return HistoryStore(self.folder.name, others_tokens=OTHERS_TOKENS)

    def teardown(self) -> None:
        self.store[0].close()
        self.folder.cleanup()

    def each(self, reader: int, call: Any) -> Any:
        native, reference = (call(index) for index in self.readers[reader])
        assert native == reference
        return native

    @rule(problem=PROBLEMS, ids=texts(), newer=NEWER)
    def add(self, problem: int, ids: list[int], newer: int) -> None:
        self.version += newer
        for store in self.store:
            store.add(problem, ids, self.version)

    @rule(window=WINDOWS)
    def seal(self, window: int = ALL) -> None:
        for store in self.store:
            store.window = window
            store.seal()
        self.refresh(0)

    @rule()
    def work(self) -> None:
        self.store[0].work()

    @rule()
    def restart(self) -> None:
        self.seal()
        self.store[0].close()
        self.store = self.native_store(), self.store[1]
        self.store[1].forget_shares()

    @rule(reader=READERS)
    def refresh(self, reader: int) -> None:
        native, reference = self.readers[reader]
        native.refresh()
        reference.refresh(self.store[1])
        self.each(reader, lambda index: (index.tokens, index.problems))

    @rule(reader=READERS, problem=PROBLEMS, prompt=texts(), prefix=texts())
    def open(
        self, reader: int, problem: int, prompt: list[int], prefix: list[int]
    ) -> None:
        self.handles[reader].append(
            self.each(reader, lambda index: index.open(problem, prompt, prefix))
        )

    @rule(reader=READERS, problem=PROBLEMS, ahead=texts(), share=st.floats(0, 1))
    def open_written_ahead(
        self, reader: int, problem: int, ahead: list[int], share: float
    ) -> None:
        prefix = ahead[: int(share * len(ahead))]
        self.handles[reader].append(
            self.each(reader, lambda index: index.open(problem, [], prefix, ahead))
        )

    @precondition(lambda self: all(self.handles))
    @rule(reader=READERS, data=st.data(), budget=st.integers(1, 12))
    def extend_with_the_draft(
        self, reader: int, data: st.DataObject, budget: int
    ) -> None:
        handle = data.draw(st.sampled_from(self.handles[reader]))
        (draft,) = same_drafts(*self.readers[reader], [handle], [budget], 0.0)
        self.each(reader, lambda index: index.extend(handle, draft))

    @precondition(lambda self: all(self.handles))
    @rule(reader=READERS, data=st.data(), ids=texts())
    def extend(self, reader: int, data: st.DataObject, ids: list[int]) -> None:
        handle = data.draw(st.sampled_from(self.handles[reader]))
        self.each(reader, lambda index: index.extend(handle, ids))

    @precondition(lambda self: all(self.handles))
    @rule(reader=READERS, data=st.data(), keep=st.booleans())
    def close(self, reader: int, data: st.DataObject, keep: bool) -> None:
        handle = data.draw(st.sampled_from(self.handles[reader]))
        self.handles[reader].remove(handle)
        self.each(reader, lambda index: index.close(handle, keep))

    @rule(reader=READERS)
    def clear_live(self, reader: int) -> None:
        self.each(reader, lambda index: index.clear_live())

    @invariant()
    def draft(self) -> None:
        self.calls += 1
        for both, handles in zip(self.readers, self.handles, strict=True):
            budgets = [(self.calls + i) % 12 for i in range(len(handles))]
            same_drafts(*both, handles, budgets, (0.0, 0.02, 0.15)[self.calls % 3])


def test_native_and_reference_agree_on_any_sequence_of_calls() -> None:
    run_state_machine_as_test(
        SameDrafts,
        settings=settings(max_examples=80, stateful_step_count=15, deadline=None),
    )


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.lists(st.floats(0.1, 0.9), min_size=2, max_size=4))
def test_thinned_out_again_and_again_a_history_keeps_to_its_bytes_and_its_own_words(
    seed: int, shares: list[float]
) -> None:
    rng = np.random.default_rng(seed)
    passages = [rng.integers(0, 30, rng.integers(3, 40)) for _ in range(12)]
    index = OwnHistory()

    def rollout(problem: int) -> list[int]:
        chosen = [passages[i] for i in rng.integers(0, 12, rng.integers(1, 16))]
        return (np.concatenate(chosen) + 30 * problem).tolist()

    for version, share in enumerate(shares):
        for problem in range(3):
            for _ in range(4 * (problem + 1)):
                index.add(problem, rollout(problem), version)
        index.seal(window=2)
        before = index.tokens
        room = int(share * index.nbytes)
        shrunk = index.store.shrink(room)
        index.refresh()
        assert index.nbytes <= room
        assert shrunk.tokens == before - index.tokens > 0
        for problem in range(3):
            handle = index.open(problem, [], rollout(problem)[: rng.integers(1, 60)])
            (draft,), _ = index.draft([handle], [30], 0.0)
            assert set(draft // 30) <= {problem}


@pytest.mark.parametrize("tokens", [150, 5000])
def test_long_random_texts_with_loops_agree_with_the_reference(tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    text = np.concatenate(
        [
            np.tile(rng.integers(0, 50, rng.integers(1, 40)), rng.integers(1, 5))
            for _ in range(200)
        ]
    )
    text = text[:tokens].tolist()
    both = OwnHistory(), ReferenceIndex()
    for index in both:
        index.add(3, text[: tokens // 2], 0)
        index.seal()
        index.add(3, text[tokens // 4 :], 1)
        index.seal()
    for cut in (10, tokens // 3, tokens - 7):
        native, reference = (index.open(3, text[:5], text[5:cut]) for index in both)
        assert native == reference
        (draft,) = same_drafts(*both, [native], [12], 0.0)
        assert draft


def test_of_long_responses_the_ends_alone_are_found() -> None:
    """Three siblings repeat passages, each more seldom than places are visited; one by
    one they become too long, and one of them is forgotten.
    """
    rng = np.random.default_rng(0)
    both = (SuffixIndex(), ReferenceIndex())
    passages = rng.integers(0, 5000, (400, 30))
    drafted = 0
    handles, _ = ([index.open(1, [], []) for _ in range(3)] for index in both)
    for step in range(11):
        new = (
            passages[rng.integers(0, 400, 400)]
            .flatten()[: rng.integers(11_000, 12_000)]
            .tolist()
        )
        for index in both:
            index.extend(handles[step % len(handles)], new)
        if step == 9:
            gone = handles.pop(0)
            for index in both:
                index.close(gone, keep=False)
        if step > 5:
            drafted += sum(
                map(len, same_drafts(*both, handles, [6] * len(handles), 0.0))
            )
    assert drafted > 60
