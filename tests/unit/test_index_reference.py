"""The native index drafts what the plain Python reference drafts, whatever is called in whatever order."""

from __future__ import annotations

import tempfile

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

PROBLEMS = st.sampled_from([0, 0, 2**64 - 1])
NEWER = st.sampled_from([0, 0, 1, 1, 7, -1])
"""Steps of the weight version: what arrives late was written by an older one."""
WINDOWS = st.none() | st.integers(1, 4)
SEEDS = st.integers(0, 2**32 - 1)


def text(seed: int, size: int = 40) -> list[int]:
    """Token ids over a small alphabet with repeated passages and loops."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, rng.integers(2, 5), rng.integers(0, size)).tolist()
    if seed % 3 == 0:
        ids = ids[: seed % 7] * 6
    elif seed % 3 == 1:
        ids += [9, *ids[len(ids) // 3 :]]
    return ids


def texts(size: int = 40) -> st.SearchStrategy[list[int]]:
    return SEEDS.map(lambda seed: text(seed, size))


class SameDrafts(RuleBasedStateMachine):
    @initialize(depth=st.sampled_from([8, 9, 64]), half_life=st.sampled_from([0.5, 2.0, 8.0]), seed=SEEDS)
    def start(self, depth: int, half_life: float, seed: int) -> None:
        self.both = SuffixIndex(depth, half_life), ReferenceIndex(depth, half_life)
        self.handles: list[int] = []
        self.version = 0
        for i in range(3):
            self.add(0, text(seed + i), 0)
            self.add(0, text(seed + i + 7), 1)
            self.seal()
        self.open(0, text(seed + 11), text(seed + 12))
        self.open(0, text(seed + 11), text(seed + 13))

    def each(self, call) -> object:
        native, reference = (call(index) for index in self.both)
        assert native == reference
        return native

    @rule(problem=PROBLEMS, ids=texts(), newer=NEWER)
    def add(self, problem: int, ids: list[int], newer: int) -> None:
        self.version += newer
        self.each(lambda index: index.add(problem, ids, self.version))

    @rule(window=WINDOWS)
    def seal(self, window: int | None = None) -> None:
        self.each(lambda index: index.seal(window))

    @rule(max_bytes=st.integers(0, 2000))
    def shrink(self, max_bytes: int) -> None:
        self.each(lambda index: index.shrink(max_bytes))

    @rule()
    def save_and_load(self) -> None:
        self.seal()
        with tempfile.TemporaryDirectory() as folder:
            self.both[0].save(f"{folder}/history.idx")
            loaded = SuffixIndex.load(f"{folder}/history.idx")
        reference = ReferenceIndex(loaded.max_depth)
        reference.refresh(self.both[1])
        found = [
            [a.tolist() for a in index.draft([index.open(0, [], prefix=[1, 2, 3, 1])], [9], 0.0)[0]]
            for index in (loaded, reference)
        ]
        assert found[0] == found[1]

    @rule(problem=PROBLEMS, prompt=texts(), prefix=texts())
    def open(self, problem: int, prompt: list[int], prefix: list[int]) -> None:
        self.handles.append(self.each(lambda index: index.open(problem, prompt, prefix)))

    @precondition(lambda self: self.handles)
    @rule(data=st.data(), ids=texts())
    def extend(self, data: st.DataObject, ids: list[int]) -> None:
        handle = data.draw(st.sampled_from(self.handles))
        self.each(lambda index: index.extend(handle, ids))

    @precondition(lambda self: self.handles)
    @rule(ids=st.lists(texts(5), min_size=1, max_size=5))
    def extend_many(self, ids: list[list[int]]) -> None:
        ids = ids[: len(self.handles)]
        offsets = np.cumsum([0] + [len(i) for i in ids])
        flat = np.array([token for i in ids for token in i], dtype=np.int32)
        self.each(lambda index: index.extend_many(self.handles[: len(ids)], flat, offsets))

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
        min_chance = (0.0, 0.02, 0.15)[self.calls % 3]

        def drafted(index: SuffixIndex | ReferenceIndex) -> list[list[list[float]]]:
            return [[a.tolist() for a in arrays] for arrays in index.draft(self.handles, budgets, min_chance)]

        self.each(drafted)
        self.each(lambda index: [index.age(handle) for handle in self.handles])
        self.each(lambda index: (index.nbytes, index.tokens, index.problems))


def test_native_and_reference_agree_on_any_sequence_of_calls() -> None:
    run_state_machine_as_test(SameDrafts, settings=settings(max_examples=60, stateful_step_count=15, deadline=None))


class SameMappedDrafts(RuleBasedStateMachine):
    """A store and two engines that map it, each refreshing when it likes, against references that copy."""

    @initialize(depth=st.sampled_from([8, 64]), seed=SEEDS)
    def start(self, depth: int, seed: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.store = HistoryStore(self.folder.name, depth), ReferenceIndex(depth)
        self.readers = [(SuffixIndex.attach(self.folder.name), ReferenceIndex(depth)) for _ in range(2)]
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
    def seal(self, window: int | None = None) -> None:
        for store in self.store:
            store.seal(window)

    @rule()
    def settle(self) -> None:
        self.store[0].settle()

    @rule(max_bytes=st.integers(0, 3000))
    def shrink(self, max_bytes: int) -> None:
        self.store[0].settle()
        assert self.store[0].shrink(max_bytes) == self.store[1].shrink(max_bytes)

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
        for (native, reference), handles in zip(self.readers, self.handles, strict=True):
            budgets = [(self.version + i) % 9 for i in handles]
            drafts = [
                [[a.tolist() for a in arrays] for arrays in index.draft(handles, budgets, 0.02)]
                for index in (native, reference)
            ]
            assert drafts[0] == drafts[1]


def test_mapped_segments_draft_what_the_reference_drafts() -> None:
    run_state_machine_as_test(
        SameMappedDrafts, settings=settings(max_examples=40, stateful_step_count=15, deadline=None)
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(texts(30), max_size=8), texts(30), st.integers(1, 4))
def test_sealing_in_steps_gives_the_drafts_of_sealing_at_once(
    trajectories: list[list[int]], response: list[int], steps: int
) -> None:
    at_once, in_steps = SuffixIndex(), SuffixIndex()
    for i, ids in enumerate(trajectories):
        at_once.add(1, ids, 0)
        in_steps.add(1, ids, 0)
        if i % steps == 0:
            in_steps.seal()
    drafts = []
    for index in (at_once, in_steps):
        index.seal()
        handle = index.open(1, [], prefix=response)
        drafts.append([a.tolist() for (a,) in index.draft([handle], [20], 0.0)])
    assert drafts[0] == drafts[1]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(texts(30), st.integers(0, 5)), max_size=8), texts(30), st.integers(1, 6))
def test_beyond_the_window_nothing_of_the_older_visits_shows(
    trajectories: list[tuple[list[int], int]], response: list[int], window: int
) -> None:
    trajectories = [([*ids, 7], version) for ids, version in trajectories] + [([8, 9], 5)]
    kept = sorted({version for _, version in trajectories})[-window:]
    dropped, never = SuffixIndex(), SuffixIndex()
    for ids, version in trajectories:
        dropped.add(1, ids, version)
        if version in kept:
            never.add(1, ids, version)
    dropped.seal(window)
    never.seal()
    assert (dropped.tokens, dropped.nbytes) == (never.tokens, never.nbytes)
    drafts = [
        [a.tolist() for (a,) in index.draft([index.open(1, [], prefix=response)], [20], 0.0)]
        for index in (dropped, never)
    ]
    assert drafts[0] == drafts[1]


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.lists(st.floats(0.1, 0.9), min_size=2, max_size=4))
def test_history_that_is_thinned_out_again_and_again_agrees_with_the_reference(seed: int, shares: list[float]) -> None:
    rng = np.random.default_rng(seed)
    passages = [rng.integers(0, 30, rng.integers(3, 40)).tolist() for _ in range(12)]
    both = SuffixIndex(16, 2.0), ReferenceIndex(16, 2.0)

    def rollout() -> list[int]:
        return [token for i in rng.integers(0, 12, rng.integers(1, 16)) for token in passages[i]]

    for version, share in enumerate(shares):
        for problem in range(3):
            for ids in [rollout() for _ in range(4 * (problem + 1))]:
                for index in both:
                    index.add(problem, ids, version)
        for index in both:
            index.seal(window=2)
        shrunk = [index.shrink(int(share * index.nbytes)) for index in both]
        assert shrunk[0] == shrunk[1]
        assert both[0].nbytes == both[1].nbytes
        for problem in range(3):
            text, cut = rollout(), int(rng.integers(0, 60))
            drafts = [
                [a.tolist() for (a,) in index.draft([index.open(problem, [], prefix=text[:cut])], [30], 0.0)]
                for index in both
            ]
            assert drafts[0] == drafts[1]


@pytest.mark.parametrize("tokens", [150, 5000])
def test_long_random_texts_with_loops_agree_with_the_reference(tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    text = np.concatenate([np.tile(rng.integers(0, 50, rng.integers(1, 40)), rng.integers(1, 5)) for _ in range(200)])
    text = text[:tokens].astype(np.int32)
    native, reference = SuffixIndex(), ReferenceIndex()
    for index in (native, reference):
        index.add(3, text[: tokens // 2], 0)
        index.seal()
        index.add(3, text[tokens // 4 :], 1)
        index.seal()
    for cut in (10, tokens // 3, tokens - 7):
        drafts = [
            [a.tolist() for (a,) in index.draft([index.open(3, text[:5], prefix=text[5:cut])], [12], 0.0)]
            for index in (native, reference)
        ]
        assert drafts[0] == drafts[1]
        assert len(drafts[0][0]) > 0
