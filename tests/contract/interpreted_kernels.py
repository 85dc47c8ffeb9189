"""The kernels of the V2 runner's drafter in Triton's interpreter; `test_v2_kernels.py` runs it in a process of its
own."""

from __future__ import annotations

import functools

import device_reference
import numpy as np
import pytest
import torch

from das_adapter.core.index import SuffixIndex
from das_adapter.engine.v2.device_index import DeviceIndex

SLOTS, LENGTH, STEPS = 4, 160, 5


class World:
    """Two problems with sealed text, and requests that write, end and begin."""

    def __init__(self, seed: int, vocabulary: int, periodic: bool) -> None:
        self.rng = np.random.default_rng(seed)
        self.vocabulary = vocabulary
        self._poems = [self.rng.integers(0, vocabulary, 60) for _ in range(2)]
        if periodic:
            self._poems[0] = np.tile(self._poems[0][:5], 12)
        self.sealed = SuffixIndex()
        for version in range(2):
            for problem in range(2):
                for _ in range(2):
                    self.sealed.add(problem, self._variation(problem), version)
            self.sealed.seal()
        self.prompts = [self.rng.integers(0, vocabulary, self.rng.integers(1, 12)).astype(np.int32)
                        for _ in range(SLOTS)]  # fmt: skip
        self.full = [self._variation(slot % 2) for slot in range(SLOTS)]
        self.written = [0] * SLOTS
        self.total = torch.tensor([len(p) for p in self.prompts], dtype=torch.int32)

    def index(self) -> DeviceIndex:
        """A device index that knows the requests."""
        texts = torch.zeros(SLOTS, LENGTH, dtype=torch.int32)
        index = DeviceIndex(texts, STEPS, 2**14, 0.02, self.vocabulary)
        index.weigh(self.sealed.fading)
        index.open([(slot, slot % 2, len(p)) for slot, p in enumerate(self.prompts)])
        for slot, prompt in enumerate(self.prompts):
            texts[slot, : len(prompt)] = torch.from_numpy(prompt)
        index.bring(self.sealed)
        return index

    def write(self, indices: list[DeviceIndex]) -> list[int]:
        """Let every request write some tokens; return how many."""
        counts = self.rng.integers(0, 4, SLOTS).tolist()
        if not any(self.written):
            counts[0] = 0  # its prompt is still being read
        for slot, count in enumerate(counts):
            begin = len(self.prompts[slot]) + self.written[slot]
            new = torch.from_numpy(self.full[slot][self.written[slot] :][:count])
            for index in indices:
                index.texts[slot, begin : begin + len(new)] = new
            self.written[slot] += len(new)
            self.total[slot] += len(new)
        return counts

    def _variation(self, problem: int) -> np.ndarray:
        text = self._poems[problem].copy()
        other = self.rng.random(len(text)) < 0.15
        text[other] = self.rng.integers(0, self.vocabulary, other.sum())
        return text.astype(np.int32)


@pytest.mark.parametrize(("seed", "vocabulary", "periodic"), [(0, 8, False), (1, 6, True)])
def test_kernels_draft_count_and_learn_as_the_reference_does(seed: int, vocabulary: int, periodic: bool) -> None:
    world = World(seed, vocabulary, periodic)
    kernels, plain = indices = [world.index(), world.index()]
    plain._launch = functools.partial(device_reference.launch, plain)  # type: ignore[method-assign]
    for step in range(5):
        counts = world.write(indices)
        if step == 3:  # a request ends, its text stays, and another takes its slot
            for index in indices:
                index.close([(0, world.written[0] + 2)], world.total)
                index.open([(0, 1, len(world.prompts[0]))])
        order = torch.from_numpy(world.rng.permutation(SLOTS))
        sampled = torch.tensor(counts, dtype=torch.int32)[order]
        drafted = kernels.draft(order, sampled, world.total)
        assert torch.equal(drafted, plain.draft(order, sampled, world.total))
        for name in ("real", "confidence", "_offered", "_then", "_cells", "_sources", "_chance"):
            assert torch.equal(getattr(kernels, name), getattr(plain, name)), name
    assert int(kernels._cells[:, 0].sum()) > 10
