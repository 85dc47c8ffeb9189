"""Drafters with one interface, to be measured on the same work: das-adapter's, a plain one, and ArcticInference's."""

from __future__ import annotations

import importlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from das_adapter.core.index import SuffixIndex
from das_adapter.core.index.values import Int32
from das_adapter.errors import DasError


class Engine(Protocol):
    """The interface that the benchmark needs of a drafter."""

    def learn(self, problem: int, prompt: Int32, texts: Sequence[tuple[int, Int32]]) -> None:
        """Add finished (version, response) pairs of one problem to the history."""

    def seal(self) -> None:
        """Draft from what was learned, from now on."""

    def open(self, problem: int, prompt: Int32) -> int: ...

    def extend(self, handles: list[int], texts: list[Int32]) -> None: ...

    def draft(self, handles: list[int], budget: int) -> list[Int32]: ...

    def step(self, handles: list[int], texts: list[Int32], budget: int) -> Callable[[], object]:
        """Prepare a decode step to be timed: insert and draft, with its arguments in the form the drafter needs."""

    def close(self, handles: list[int]) -> None: ...


class Ours:
    """das-adapter's `SuffixIndex`."""

    def __init__(self, min_chance: float = 0.0) -> None:
        self.index = SuffixIndex()
        self._min_chance = min_chance

    def learn(self, problem: int, prompt: Int32, texts: Sequence[tuple[int, Int32]]) -> None:
        for version, tokens in texts:
            self.index.add(problem, tokens, version)

    def seal(self) -> None:
        self.index.seal()

    def open(self, problem: int, prompt: Int32) -> int:
        return self.index.open(problem, prompt)

    def extend(self, handles: list[int], texts: list[Int32]) -> None:
        if texts:
            self.index.extend_many(handles, np.concatenate(texts), np.cumsum([0, *map(len, texts)]))

    def draft(self, handles: list[int], budget: int) -> list[Int32]:
        tokens, _, offsets = self.index.draft_flat(handles, np.full(len(handles), budget), self._min_chance)
        bounds = offsets.tolist()
        return [tokens[a:b] for a, b in itertools.pairwise(bounds)]

    def step(self, handles: list[int], texts: list[Int32], budget: int) -> Callable[[], object]:
        many, budgets = np.array(handles), np.full(len(handles), budget)
        flat, offsets = np.concatenate(texts), np.cumsum([0, *map(len, texts)])

        def run() -> object:
            self.index.extend_many(many, flat, offsets)
            return self.index.draft_flat(many, budgets, self._min_chance)

        return run

    def close(self, handles: list[int]) -> None:
        for handle in handles:
            self.index.close(handle, keep=False)


class _Counting:
    """A drafter that counts the contents of texts, and uses history at once."""

    def learn(self, problem: int, prompt: Int32, texts: Sequence[tuple[int, Int32]]) -> None:
        for _, tokens in texts:
            self._count(problem, [], tokens.tolist())

    def seal(self) -> None:
        pass

    def _count(self, problem: int, before: list[int], after: list[int]) -> None:
        raise NotImplementedError


class Plain(_Counting):
    """Longest suffix match up to 24 tokens in the problem's texts, the request's own and its prompt; the most frequent
    continuation (of equally frequent ones, the one that appeared last)."""

    DEPTH = 24

    def __init__(self) -> None:
        self._counts: dict[int, dict[bytes, dict[int, int]]] = defaultdict(dict)
        self._live: dict[int, tuple[int, list[int], list[int]]] = {}
        self._handles = itertools.count(1)

    def _count(self, problem: int, before: list[int], after: list[int]) -> None:
        counts = self._counts[problem]
        text = np.array([*before[-self.DEPTH :], *after], dtype=np.int32)
        data = text.tobytes()
        for i in range(len(text) - len(after), len(text)):
            token = int(text[i])
            for length in range(1, min(i, self.DEPTH) + 1):
                following = counts.setdefault(data[4 * (i - length) : 4 * i], {})
                following[token] = following.get(token, 0) + 1

    def open(self, problem: int, prompt: Int32) -> int:
        handle = next(self._handles)
        self._live[handle] = (problem, prompt.tolist(), [])
        if handle == 1 or problem not in self._counts:
            self._count(problem, [], prompt.tolist())
        return handle

    def extend(self, handles: list[int], texts: list[Int32]) -> None:
        for handle, tokens in zip(handles, texts, strict=True):
            problem, _, text = self._live[handle]
            self._count(problem, text, tokens.tolist())
            text.extend(tokens.tolist())

    def draft(self, handles: list[int], budget: int) -> list[Int32]:
        return [self._draft(*self._live[h], budget) for h in handles]

    def _draft(self, problem: int, prompt: list[int], text: list[int], budget: int) -> Int32:
        counts = self._counts[problem]
        context = (prompt + text if len(text) < self.DEPTH else text)[-self.DEPTH :]
        drafted: list[int] = []
        for _ in range(budget):
            data = np.array(context, dtype=np.int32).tobytes()
            keys = (data[i : len(data)] for i in range(0, len(data), 4))
            following = next((counts[k] for k in keys if k in counts), None)
            if following is None:
                break
            drafted.append(max(reversed(following), key=following.__getitem__))
            context = [*context, drafted[-1]][-self.DEPTH :]
        return np.array(drafted, dtype=np.int32)

    def step(self, handles: list[int], texts: list[Int32], budget: int) -> Callable[[], object]:
        return lambda: (self.extend(handles, texts), self.draft(handles, budget))  # type: ignore[func-returns-value]

    def close(self, handles: list[int]) -> None:
        for handle in handles:
            problem = self._live.pop(handle)[0]
            self._counts.pop(problem, None)


class Ceiling(_Counting):
    """The most that copying can bring: it knows how the request goes on, and copies from the place that agrees longest,
    of the places in the problem's texts, the request's own and its prompt that share its last token."""

    def __init__(self) -> None:
        self._grams: dict[int, set[bytes]] = defaultdict(set)
        self._live: dict[int, tuple[int, list[int], Int32]] = {}
        self._handles = itertools.count(1)
        self._budget = 8

    def _count(self, problem: int, before: list[int], after: list[int]) -> None:
        text = np.array([*before[-self._budget :], *after], dtype=np.int32)
        data, grams = text.tobytes(), self._grams[problem]
        for end in range(len(text) - len(after) + 1, len(text) + 1):
            grams.update(data[4 * begin : 4 * end] for begin in range(max(0, end - self._budget - 1), end - 1))

    def open(self, problem: int, prompt: Int32) -> int:
        handle = next(self._handles)
        self._live[handle] = (problem, prompt.tolist(), np.zeros(0, dtype=np.int32))
        self._count(problem, [], prompt.tolist())
        return handle

    def reveal(self, handle: int, text: Int32) -> None:
        """Tell how the request will go on, from its first token."""
        problem, written, _ = self._live[handle]
        self._live[handle] = (problem, written, np.array([*written, *text], dtype=np.int32))

    def extend(self, handles: list[int], texts: list[Int32]) -> None:
        for handle, tokens in zip(handles, texts, strict=True):
            problem, written, _ = self._live[handle]
            self._count(problem, written, tokens.tolist())
            written.extend(tokens.tolist())

    def draft(self, handles: list[int], budget: int) -> list[Int32]:
        assert budget == self._budget, f"counted for drafts of {self._budget} tokens"
        drafts = []
        for handle in handles:
            problem, written, text = self._live[handle]
            at, best = len(written), 0
            while at and best < min(budget, len(text) - at):
                if text[at - 1 : at + best + 1].tobytes() not in self._grams[problem]:
                    break
                best += 1
            drafts.append(text[at : at + best])
        return drafts

    def step(self, handles: list[int], texts: list[Int32], budget: int) -> Callable[[], object]:
        raise NotImplementedError("nothing to be timed")

    def close(self, handles: list[int]) -> None:
        for handle in handles:
            self._grams.pop(self._live.pop(handle)[0], None)


class Arctic:
    """ArcticInference's suffix cache as vLLM's `suffix` method drives it, with vLLM's defaults.

    Raises:
        DasError: `arctic-inference` is not installed.
    """

    def __init__(self) -> None:
        try:
            module: Any = importlib.import_module("arctic_inference.suffix_decoding")
        except ImportError as error:
            raise DasError(f"arctic: {error!r}; pip install --no-deps arctic-inference builds it from source") from None
        self._depth, self._factor, self._min_prob = 24, 1.0, 0.1
        self.cache = module.SuffixDecodingCache(max_tree_depth=self._depth, max_cached_requests=10_000)
        self._live: dict[int, list[int]] = {}
        self._problem: dict[int, int] = {}
        self._learned: dict[int, list[int]] = defaultdict(list)
        self._handles = itertools.count(1)

    def learn(self, problem: int, prompt: Int32, texts: Sequence[tuple[int, Int32]]) -> None:
        for _, tokens in texts:
            handle = self.open(problem, prompt)
            self.extend([handle], [tokens])
            self.cache.stop_request(handle)
            self._learned[problem].append(handle)

    def seal(self) -> None:
        pass

    def open(self, problem: int, prompt: Int32) -> int:
        handle = next(self._handles)
        self.cache.start_request(handle, prompt)
        self._live[handle], self._problem[handle] = prompt.tolist(), problem
        return handle

    def extend(self, handles: list[int], texts: list[Int32]) -> None:
        for handle, tokens in zip(handles, texts, strict=True):
            self.cache.add_active_response(handle, tokens.tolist())
            self._live[handle].extend(tokens.tolist())

    def draft(self, handles: list[int], budget: int) -> list[Int32]:
        drafts = []
        for handle in handles:
            pattern = np.array(self._live[handle][-self._depth :], dtype=np.int32)
            draft = self.cache.speculate(
                handle, pattern, max_spec_tokens=budget, max_spec_factor=self._factor, min_token_prob=self._min_prob
            )
            drafts.append(np.array(draft.token_ids, dtype=np.int32))
        return drafts

    def step(self, handles: list[int], texts: list[Int32], budget: int) -> Callable[[], object]:
        return lambda: (self.extend(handles, texts), self.draft(handles, budget))  # type: ignore[func-returns-value]

    def close(self, handles: list[int]) -> None:
        for handle in handles:  # the cache would keep them, and other groups of the problem would draft from them
            self.cache.stop_request(handle)
            for gone in (handle, *self._learned.pop(self._problem.pop(handle), ())):
                self.cache.evict_cached_response(gone)
                del self._live[gone]


ENGINES: dict[str, type[Ours] | type[Plain] | type[Arctic] | type[Ceiling]] = {
    "ours": Ours,
    "plain": Plain,
    "arctic": Arctic,
    "ceiling": Ceiling,
}
