"""Drafters with one interface, to be measured on the same work: das-adapter's and
ArcticInference's.
"""

from __future__ import annotations

import importlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from own_history import OwnHistory

from das_adapter.core.index.values import Int32
from das_adapter.errors import DasError


class Ours:
    """das-adapter's `SuffixIndex`. Its methods are the interface that the benchmarks
    need of a drafter.
    """

    def __init__(self, min_chance: float = 0.0) -> None:
        self.index = OwnHistory()
        self._min_chance = min_chance

    def learn(
        self, problem: int, prompt: Int32, texts: Sequence[tuple[int, Int32]]
    ) -> None:
        """Add finished (version, response) pairs of one problem to the history."""
        for version, tokens in texts:
            self.index.add(problem, tokens, version)

    def seal(self) -> None:
        """Draft from what was learned, from now on."""
        self.index.seal()

    def open(self, problem: int, prompt: Int32) -> int:
        return self.index.open(problem, prompt)

    def extend(self, handles: list[int], texts: list[Int32]) -> None:
        for handle, text in zip(handles, texts, strict=True):
            self.index.extend(handle, text)

    def draft(self, handles: list[int], budget: int) -> list[Int32]:
        return self.index.draft(handles, [budget] * len(handles), self._min_chance)[0]

    def step(
        self, handles: list[int], texts: list[Int32], budget: int
    ) -> Callable[[], object]:
        """Prepare a decode step to be timed: insert and draft, with its arguments in
        the form the drafter needs.
        """
        many = np.array(handles)
        budgets = np.full(len(handles), budget)
        flat = np.concatenate(texts)[None]
        ends = np.cumsum([*map(len, texts)])
        stretches = many * 0, np.append(0, ends[:-1]), ends
        return lambda: self.index.draft_rows(
            many, flat, *stretches, budgets, self._min_chance
        ).result()

    def close(self, handles: list[int]) -> None:
        for handle in handles:
            self.index.close(handle, keep=False)


class Arctic:
    """ArcticInference's suffix cache as vLLM's `suffix` method drives it, with vLLM's
    defaults.

    Raises:
        DasError: `arctic-inference` is not installed.
    """

    def __init__(self) -> None:
        try:
            module: Any = importlib.import_module("arctic_inference.suffix_decoding")
        except ImportError as error:
            raise DasError(
                f"arctic: {error!r}; pip install --no-deps arctic-inference builds it"
                " from source"
            ) from None
        self._depth = 24
        self._factor = 1.0
        self._min_prob = 0.1
        self.cache = module.SuffixDecodingCache(
            max_tree_depth=self._depth, max_cached_requests=10_000
        )
        self._live: dict[int, list[int]] = {}
        self._problem: dict[int, int] = {}
        self._learned: dict[int, list[int]] = defaultdict(list)
        self._handles = itertools.count(1)

    def learn(
        self, problem: int, prompt: Int32, texts: Sequence[tuple[int, Int32]]
    ) -> None:
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
        self._live[handle] = prompt.tolist()
        self._problem[handle] = problem
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
                handle,
                pattern,
                max_spec_tokens=budget,
                max_spec_factor=self._factor,
                min_token_prob=self._min_prob,
            )
            drafts.append(np.array(draft.token_ids, dtype=np.int32))
        return drafts

    def step(
        self, handles: list[int], texts: list[Int32], budget: int
    ) -> Callable[[], object]:
        return lambda: (self.extend(handles, texts), self.draft(handles, budget))  # type: ignore[func-returns-value]

    def close(self, handles: list[int]) -> None:
        # the cache would keep them, and other groups of the problem would draft from
        # them
        for handle in handles:
            self.cache.stop_request(handle)
            for gone in (handle, *self._learned.pop(self._problem.pop(handle), ())):
                self.cache.evict_cached_response(gone)
                del self._live[gone]


ENGINES: dict[str, type[Ours] | type[Arctic]] = {"ours": Ours, "arctic": Arctic}
