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
"""Scores that are this close may change places with the last bits of a device's
logarithm.
"""


@pytest.mark.parametrize("count", [1, 64, 2048])
def test_tokens_are_drawn_by_the_definition(count: int) -> None:
    rng = np.random.default_rng(count)
    vocabulary = 151_936 if DEVICE == "cuda" else 1500
    seeds = rng.integers(-(2**63), 2**63, count)
    positions = rng.integers(0, 2**31, count)
    logits = (
        torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(count))
        * 3
    )
    logits[::3, 7:50] = -torch.inf
    logits[7::64, 12:] = -torch.inf
    keys = Keys(
        *(torch.from_numpy(of_rows).to(DEVICE) for of_rows in (seeds, positions))
    )
    drawn = keyed_sample(logits.to(DEVICE), keys).cpu().numpy()
    some = np.unique(np.linspace(0, count - 1, 96).astype(int))
    scores = logits.numpy()[some] + gumbel(
        seeds[some], positions[some], np.arange(vocabulary)
    )
    behind = scores.max(axis=1) - scores[np.arange(len(some)), drawn[some]]
    assert (behind <= NEAR).all()


@pytest.mark.skipif(
    DEVICE == "cpu", reason="interpreted_kernels.py compares them there"
)
@pytest.mark.parametrize(
    "world", [(256, 4096, 8), (16, 32768, 1)], ids=["many texts", "long texts"]
)
def test_drafts_are_the_references(world: tuple[int, int, int]) -> None:
    drawn = World(Plan("7b"), *world, DEVICE).draft().cpu()
    plain = World(Plan("7b"), *world, "cpu")
    with mock.patch.object(DeviceIndex, "_launch", device_reference.launch):
        assert torch.equal(drawn, plain.draft())


@pytest.mark.skipif(
    DEVICE == "cpu", reason="interpreted_kernels.py compares them there"
)
def test_how_sure_a_model_is_is_told_by_the_definition() -> None:
    from das_adapter.core.confidence import EVEN, KINDS
    from das_adapter.engine.v2.confidence import DraftConfidence

    rows = 64
    vocabulary = 151_936
    generator = torch.Generator().manual_seed(1)
    logits = (
        torch.randn(rows, vocabulary, generator=generator).to(DEVICE, torch.bfloat16)
        * 6
    )
    drawn = logits.float().topk(3).indices[:, 2].contiguous()
    heat = torch.linspace(0.0, 1.5, rows, device=DEVICE)
    slots = torch.arange(rows, device=DEVICE).flip(0)
    slots[5] = -1
    sure = DraftConfidence(torch.zeros(rows, 4, device=DEVICE))
    sure.learn(np.linspace(0, 1, KINDS, dtype=np.float32))
    sure.judge(logits, drawn, slots, heat, torch.tensor(2, device=DEVICE))
    heats = torch.where(heat > 0, heat, 1.0)[slots].double()
    beside = (
        ((logits.double() - logits.double().gather(1, drawn[:, None])) / heats[:, None])
        .clamp(max=40)
        .exp()
    )
    odds = -(beside.sum(1) - 1).clamp(min=1e-9).log2()
    kinds = (odds.floor() + EVEN).clamp(0, KINDS - 1)
    near = (odds - odds.round()).abs() < 1e-3
    asked = slots >= 0
    assert ((sure.kinds[:, 2] == kinds) | near)[asked].all()
    assert torch.allclose(
        sure.chances[asked, 2], sure.kinds[asked, 2] / (KINDS - 1), atol=1e-6
    )
    assert not sure.kinds[5].any() and not sure.kinds[:, [0, 1, 3]].any()


@pytest.mark.skipif(
    DEVICE == "cpu", reason="interpreted_kernels.py compares them there"
)
@pytest.mark.parametrize(
    ("requests", "steps"), [(1, 1), (3, 7), (256, 16), (1000, 16), (700, 128)]
)
def test_draft_tokens_are_admitted_by_the_definition(requests: int, steps: int) -> None:
    """Chances are powers of 2, whose products are exact in any order."""
    import v2_stand_ins

    from das_adapter.engine.v2 import ranking

    rng = np.random.default_rng(requests)
    slots = rng.permutation(requests + 9)[:requests]
    shares = np.zeros((3, requests), dtype=np.int32)
    shares[:2] = rng.integers(0, steps + 1, requests), rng.integers(1, 9, requests)
    shares[2] = rng.choice([0.25, 0.5, 1.0], requests).astype(np.float32).view(np.int32)
    chances = rng.choice([0.5, 1.0], (requests + 9, steps))
    possible = int(shares[0].sum())
    found = []
    for device in (DEVICE, "cpu"):
        written = [
            torch.zeros(requests + 9 + i, dtype=torch.int32, device=device)
            for i in (0, 1, 1)
        ]
        plain = v2_stand_ins.Launch(v2_stand_ins.admit, None)
        with mock.patch.object(
            ranking, "admit", plain if device == "cpu" else ranking.admit
        ):
            of = ranking.Ranking(requests + 9, steps, torch.device(device))
            of.bind(torch.from_numpy(chances).float().to(device), *written, bonus=1)
            for budget in (-1, 0, possible // 3, max(0, possible - 1)):
                of.admit(shares, torch.from_numpy(slots).to(device), budget)
                found.append(torch.cat(written).tolist())
    assert found[:4] == found[4:]


@pytest.mark.skipif(DEVICE == "cpu", reason="test_quantised.py compares them there")
@pytest.mark.parametrize(("weights", "near"), [("int4", 0.01), ("fp8", 0.06)])
@pytest.mark.parametrize("shape", [(1536, 8960), (17920, 1536)])
def test_a_quantised_layer_multiplies_by_the_rounded_weight(
    weights: str, near: float, shape: tuple[int, int]
) -> None:
    pytest.importorskip("vllm")
    from das_adapter.engine.quantised_gpu import GROUP, Fp8, Int4, rounded

    torch.manual_seed(0)
    weight, x = (
        torch.randn(n, shape[1], device=DEVICE, dtype=torch.bfloat16)
        for n in (shape[0], 37)
    )
    layer = Int4(weight) if weights == "int4" else Fp8(weight)
    layer.quantise(torch.zeros_like(weight))
    layer.quantise(weight)
    if isinstance(layer, Int4):
        codes, scales, zeros = rounded(weight)
        exact = (codes.view(shape[0], -1, GROUP) - zeros[..., None]) * scales.float()[
            ..., None
        ]
        exact = exact.view(shape)
    else:
        exact = layer.kept[0].float() * layer.kept[1]
    expected = x.float() @ exact.t()
    error = (layer.linear(x).float() - expected).norm() / expected.norm()
    assert error < near
    assert (exact - weight.float()).norm() / weight.float().norm() < 0.12
