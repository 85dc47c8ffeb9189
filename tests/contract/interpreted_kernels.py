"""The kernels of the V2 runner's drafter in Triton's interpreter, and what needs a vLLM that has this runner;
`test_v2_kernels.py` runs it in a process of its own."""

from __future__ import annotations

import functools

import device_reference
import numpy as np
import pytest
import torch
import v2_cpu  # noqa: F401  # before vLLM: it has Triton take the CPU for a device
import vllm.v1.worker.cpu.model_runner  # noqa: F401  # it replaces parts of torch

from das_adapter.core.index import SuffixIndex
from das_adapter.engine.v2 import device_index, search
from das_adapter.engine.v2.device_index import DeviceIndex

SLOTS, LENGTH, STEPS = 4, 240, 5


class World:
    """Two problems with sealed text, and requests that write, end and begin."""

    def __init__(self, seed: int, vocabulary: int, periodic: bool, written: int = 0) -> None:
        """
        Args:
            seed: of all that is random.
            vocabulary: tokens of it.
            periodic: whether the first problem's text repeats itself.
            written: tokens that each request has written when it begins; 0: short texts, with more mistakes.
        """
        self.rng = np.random.default_rng(seed)
        self.vocabulary = vocabulary
        self._begin, self._mistakes = written, 0.01 if written else 0.15
        self._poems = [self.rng.integers(0, vocabulary, 60 + written) for _ in range(2)]
        if periodic:
            self._poems[0] = np.resize(self._poems[0][:5], 60 + written)
        self.sealed = SuffixIndex()
        for version in range(2):
            for problem in range(2):
                for _ in range(2):
                    self.sealed.add(problem, self._variation(problem), version)
            self.sealed.seal()
        longest = 40 if written else 12
        self.prompts = [
            self.rng.integers(0, vocabulary, self.rng.integers(1, longest)).astype(np.int32) for _ in range(SLOTS)
        ]
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
            counts = [count + self._begin for count in counts]
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
        other = self.rng.random(len(text)) < self._mistakes
        text[other] = self.rng.integers(0, self.vocabulary, other.sum())
        return text.astype(np.int32)


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("seed", "vocabulary", "periodic", "written", "gpu"),
    [
        (0, 8, False, 0, False),
        (2, 5, True, 90, True),
        pytest.param(1, 6, True, 0, False, marks=LONG),
        pytest.param(4, 6, True, 0, True, marks=LONG),
        pytest.param(3, 6, False, 140, True, marks=LONG),
    ],
)
def test_kernels_draft_count_and_learn_as_the_reference_does(
    monkeypatch: pytest.MonkeyPatch, seed: int, vocabulary: int, periodic: bool, written: int, gpu: bool
) -> None:
    """Of longer texts a program scans several tiles, and more than DEPTH tokens are equal. `gpu`: several programs
    scan live text, as on a GPU, in tiles so small that a text has several."""
    if gpu:
        monkeypatch.setitem(device_index.SCAN, "cpu", (2, int(search.PLACES.value)))
    world, ends = World(seed, vocabulary, periodic, written), int(written > 0)
    kernels, plain = indices = [world.index(), world.index()]
    plain._launch = functools.partial(device_reference.launch, plain)  # type: ignore[method-assign]
    for step in range(4):
        counts = world.write(indices)
        if step == 2:  # a request ends, its text stays, and another takes its slot
            for index in indices:
                index.close([(ends, world.written[ends] + 2)], world.total)
                index.open([(ends, 1, len(world.prompts[ends]))])
        order = torch.from_numpy(world.rng.permutation(SLOTS))
        sampled = torch.tensor(counts, dtype=torch.int32)[order]
        drafted = kernels.draft(order, sampled, world.total)
        assert torch.equal(drafted, plain.draft(order, sampled, world.total))
        for name in ("real", "confidence", "cells", "sources", "chance"):
            assert torch.equal(getattr(kernels, name), getattr(plain, name)), name
        assert torch.equal(kernels.offers[:, :2], plain.offers[:, :2])
    assert int(kernels.cells[:, 0].sum()) > 10
    if written:
        strongest = int((kernels.found[:, 1] & 0xFF).max())
        assert strongest == 2 * int(search.DEPTH.value)
