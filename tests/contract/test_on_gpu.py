"""The kernels as a GPU runs them, against their plain definitions (`make gputests`)."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import device_reference
import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from reference_noise import gumbel

from das_adapter.bench.engines import Plan
from das_adapter.bench.kernels import World
from das_adapter.engine.v1.keyed_sample import Keys, keyed_sample
from das_adapter.engine.v2.device_index import DeviceIndex

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEAR = 3e-5
"""Scores that are this close may change places with the last bits of a device's logarithm."""


@pytest.mark.parametrize("count", [1, 64, 2048])
def test_tokens_are_drawn_by_the_definition(count: int) -> None:
    rng, vocabulary = np.random.default_rng(count), 151_936 if DEVICE == "cuda" else 1500
    seeds, positions = rng.integers(-(2**63), 2**63, count), rng.integers(0, 2**31, count)
    logits = torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(count)) * 3
    logits[::3, 7:50], logits[7::64, 12:] = -torch.inf, -torch.inf
    keys = Keys(*(torch.from_numpy(of_rows).to(DEVICE) for of_rows in (seeds, positions)))
    drawn = keyed_sample(logits.to(DEVICE), keys).cpu().numpy()
    some = np.unique(np.linspace(0, count - 1, 96).astype(int))
    scores = logits.numpy()[some] + gumbel(seeds[some], positions[some], np.arange(vocabulary))
    behind = scores.max(axis=1) - scores[np.arange(len(some)), drawn[some]]
    assert (behind <= NEAR).all()


@pytest.mark.skipif(DEVICE == "cpu", reason="interpreted_kernels.py compares them there")
@pytest.mark.parametrize("world", [(256, 4096, 8), (16, 32768, 1)], ids=["many texts", "long texts"])
def test_drafts_are_the_references(world: tuple[int, int, int]) -> None:
    drawn = World(Plan("7b"), *world, DEVICE).draft().cpu()
    plain = World(Plan("7b"), *world, "cpu")
    with mock.patch.object(DeviceIndex, "_launch", device_reference.launch):
        assert torch.equal(drawn, plain.draft())
