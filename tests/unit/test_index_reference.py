"""The native index drafts what the plain Python reference drafts, whatever is called in whatever order."""

from __future__ import annotations

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
from reference_index import ReferenceIndex

from das_adapter.core.index import SuffixIndex
from das_adapter.core.index.store import HistoryStore
from das_adapter.core.index.values import ALL

PROBLEMS = st.sampled_from([0, 0, 2**64 - 1])
NEWER = st.sampled_from([0, 0, 1, 1, 7, -1])
"""Steps of the weight version: what arrives late was written by an older one."""
WINDOWS = st.just(ALL) | st.integers(1, 4)
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
    native: SuffixIndex, reference: ReferenceIndex, handles: list[int], budgets: list[int], min_chance: float
) -> list[list[int]]:
    """Draft with both indexes, which must agree on tokens and chances; return the tokens."""
    tokens, chances = native.draft(handles, budgets, min_chance)
    found = [draft.tolist() for draft in tokens], [draft.tolist() for draft in chances]
    assert found == reference.draft(handles, budgets, min_chance)
    return found[0]


class SameDrafts(RuleBasedStateMachine):
    @initialize(seed=SEEDS)
    def start(self, seed: int) -> None:
        self.both = SuffixIndex(), ReferenceIndex()
        self.handles: list[int] = []
        self.version = 0
        for i in range(3):
            self.add(0, text(seed + i), 0)
            self.add(0, text(seed + i + 7), 1)
            self.seal()
        self.open(0, text(seed + 11), text(seed + 12))
        self.open(0, text(seed + 11), text(seed + 13))

    def each(self, call: Any) -> Any:
        native, reference = (call(index) for index in self.both)
        assert native == reference
        return native

    @rule(problem=PROBLEMS, ids=texts(), newer=NEWER)
    def add(self, problem: int, ids: list[int], newer: int) -> None:
        self.version += newer
        self.each(lambda index: index.add(problem, ids, self.version))

    @rule(window=WINDOWS)
    def seal(self, window: int = ALL) -> None:
        self.each(lambda index: index.seal(window))

    @rule(problem=PROBLEMS, prompt=texts(), prefix=texts())
    def open(self, problem: int, prompt: list[int], prefix: list[int]) -> None:
        self.handles.append(self.each(lambda index: index.open(problem, prompt, prefix)))

    @rule(problem=PROBLEMS, ahead=texts(), share=st.floats(0, 1))
    def open_written_ahead(self, problem: int, ahead: list[int], share: float) -> None:
        prefix = ahead[: int(share * len(ahead))]
        self.handles.append(self.each(lambda index: index.open(problem, [], prefix, ahead)))

    @precondition(lambda self: self.handles)
    @rule(data=st.data(), budget=st.integers(1, 12))
    def extend_with_the_draft(self, data: st.DataObject, budget: int) -> None:
        handle = data.draw(st.sampled_from(self.handles))
        (draft,) = same_drafts(*self.both, [handle], [budget], 0.0)
        self.each(lambda index: index.extend(handle, draft))

    @precondition(lambda self: self.handles)
    @rule(data=st.data(), ids=texts())
    def extend(self, data: st.DataObject, ids: list[int]) -> None:
        handle = data.draw(st.sampled_from(self.handles))
        self.each(lambda index: index.extend(handle, ids))

    @precondition(lambda self: self.handles)
    @rule(ids=st.lists(texts(5), min_size=1, max_size=5))
    def extend_many(self, ids: list[list[int]]) -> None:
        ids = ids[: len(self.handles)]
        native, reference = self.both
        flat = np.array([token for i in ids for token in i], dtype=np.int32)
        native.extend_many(self.handles[: len(ids)], flat, np.cumsum([0] + [len(i) for i in ids]))
        for handle, new in zip(self.handles, ids, strict=False):
            reference.extend(handle, new)

    @precondition(lambda self: self.handles)
    @rule(data=st.data(), keep=st.booleans())
    def close(self, data: st.DataObject, keep: bool) -> None:
        handle = data.draw(st.sampled_from(self.handles))
        self.handles.remove(handle)
        self.each(lambda index: index.close(handle, keep))

    @rule()
    def clear_live(self) -> None:
        self.each(lambda index: index.clear_live())

    @invariant()
    def draft(self) -> None:
        self.calls = getattr(self, "calls", 0) + 1
        budgets = [(self.calls + i) % 12 for i in range(len(self.handles))]
        same_drafts(*self.both, self.handles, budgets, (0.0, 0.02, 0.15)[self.calls % 3])
        self.each(lambda index: (index.tokens, index.problems))


def test_native_and_reference_agree_on_any_sequence_of_calls() -> None:
    run_state_machine_as_test(SameDrafts, settings=settings(max_examples=60, stateful_step_count=15, deadline=None))


class SameMappedDrafts(RuleBasedStateMachine):
    """A store and two engines that map it, each refreshing when it likes, against references that copy."""

    @initialize(seed=SEEDS)
    def start(self, seed: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.store = HistoryStore(self.folder.name), ReferenceIndex()
        self.readers = [(SuffixIndex.attach(self.folder.name), ReferenceIndex()) for _ in range(2)]
        self.handles: list[list[int]] = [[], []]
        self.version = 0
        for i in range(3):
            self.add(0, text(seed + i), 1)
            self.seal()
        for reader in (0, 1):
            self.refresh(reader)
            self.open(reader, 0, text(seed + 12))

    def teardown(self) -> None:
        self.store[0].close()
        self.folder.cleanup()

    @rule(problem=PROBLEMS, ids=texts(), newer=NEWER)
    def add(self, problem: int, ids: list[int], newer: int) -> None:
        self.version += newer
        for store in self.store:
            store.add(problem, ids, self.version)

    @rule(window=WINDOWS)
    def seal(self, window: int = ALL) -> None:
        for store in self.store:
            store.seal(window)

    @rule()
    def work(self) -> None:
        self.store[0].work()

    @rule()
    def restart(self) -> None:
        self.seal()
        self.store[0].close()
        self.store = HistoryStore(self.folder.name), self.store[1]

    @rule(reader=st.integers(0, 1))
    def refresh(self, reader: int) -> None:
        native, reference = self.readers[reader]
        native.refresh()
        reference.refresh(self.store[1])
        assert (native.tokens, native.problems) == (reference.tokens, reference.problems)

    @rule(reader=st.integers(0, 1), problem=PROBLEMS, prefix=texts())
    def open(self, reader: int, problem: int, prefix: list[int]) -> None:
        native, reference = (index.open(problem, [], prefix) for index in self.readers[reader])
        assert native == reference
        self.handles[reader].append(native)

    @rule(reader=st.integers(0, 1), data=st.data(), ids=texts(8))
    def extend(self, reader: int, data: st.DataObject, ids: list[int]) -> None:
        handle = data.draw(st.sampled_from(self.handles[reader]))
        for index in self.readers[reader]:
            index.extend(handle, ids)

    @invariant()
    def draft(self) -> None:
        for both, handles in zip(self.readers, self.handles, strict=True):
            same_drafts(*both, handles, [(self.version + i) % 9 for i in handles], 0.02)


def test_mapped_segments_draft_what_the_reference_drafts() -> None:
    run_state_machine_as_test(
        SameMappedDrafts, settings=settings(max_examples=40, stateful_step_count=15, deadline=None)
    )


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.lists(st.floats(0.1, 0.9), min_size=2, max_size=4))
def test_thinned_out_again_and_again_a_history_keeps_to_its_bytes_and_its_own_words(
    seed: int, shares: list[float]
) -> None:
    rng = np.random.default_rng(seed)
    passages = [rng.integers(0, 30, rng.integers(3, 40)) for _ in range(12)]
    index = SuffixIndex()

    def rollout(problem: int) -> list[int]:
        chosen = [passages[i] for i in rng.integers(0, 12, rng.integers(1, 16))]
        return (np.concatenate(chosen) + 30 * problem).tolist()

    for version, share in enumerate(shares):
        for problem in range(3):
            for _ in range(4 * (problem + 1)):
                index.add(problem, rollout(problem), version)
        index.seal(window=2)
        before, room = index.tokens, int(share * index.nbytes)
        shrunk = index.shrink(room)
        assert index.nbytes <= room
        assert shrunk.tokens == before - index.tokens > 0
        for problem in range(3):
            handle = index.open(problem, [], rollout(problem)[: rng.integers(1, 60)])
            (draft,), _ = index.draft([handle], [30], 0.0)
            assert set(draft // 30) <= {problem}


@pytest.mark.parametrize("tokens", [150, 5000])
def test_long_random_texts_with_loops_agree_with_the_reference(tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    text = np.concatenate([np.tile(rng.integers(0, 50, rng.integers(1, 40)), rng.integers(1, 5)) for _ in range(200)])
    text = text[:tokens].tolist()
    both = SuffixIndex(), ReferenceIndex()
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
    """Three siblings repeat passages, each more seldom than places are visited; one by one they become too long, and
    one of them is forgotten."""
    rng, both = np.random.default_rng(0), (SuffixIndex(), ReferenceIndex())
    passages, drafted = rng.integers(0, 5000, (400, 30)), 0
    handles, _ = ([index.open(1, [], []) for _ in range(3)] for index in both)
    for step in range(11):
        new = passages[rng.integers(0, 400, 400)].flatten()[: rng.integers(11_000, 12_000)].tolist()
        for index in both:
            index.extend(handles[step % len(handles)], new)
        if step == 9:
            gone = handles.pop(0)
            for index in both:
                index.close(gone, keep=False)
        if step > 5:
            drafted += sum(map(len, same_drafts(*both, handles, [6] * len(handles), 0.0)))
    assert drafted > 60
