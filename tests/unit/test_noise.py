"""Keyed noise: the compiled samplers agree with its definition, and what they draw has the right distribution."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product

import numpy as np
import pytest
from scipy import stats

from das_adapter.core.identity import prompt_identity, request_seed
from das_adapter.core.noise import gumbel, row_keys

torch = pytest.importorskip("torch")
from das_adapter.engine.sampling.keyed_sample import keyed_sample, torch_sample  # noqa: E402

DRAWS = 120_000


def keys(count: int, seed: int = 0) -> np.ndarray:
    return row_keys(np.full(count, seed, dtype=np.uint64), np.arange(count))


def bits(keys: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(keys.view(np.int64))


@pytest.mark.parametrize("vocab", [1, 2, 96, 1000, 50_257])
def test_samplers_agree_with_the_definition(vocab: int) -> None:
    rows = 200 if vocab <= 1000 else 8
    logits = np.random.default_rng(vocab).normal(scale=4, size=(rows, vocab)).astype(np.float32)
    expected = (logits.astype(np.float64) + gumbel(keys(rows), np.arange(vocab))).argmax(axis=1)
    assert keyed_sample(torch.from_numpy(logits), bits(keys(rows))).tolist() == expected.tolist()
    assert torch_sample(torch.from_numpy(logits), bits(keys(rows))).tolist() == expected.tolist()


_INTERPRETED = """
import numpy as np, torch
from das_adapter.core.noise import gumbel, row_keys
from das_adapter.engine.sampling import keyed_sample as noise
keys = row_keys(np.arange(5, dtype=np.uint64) * 77, np.arange(5))
logits = np.random.default_rng(0).normal(scale=3, size=(5, 2500)).astype(np.float32)
expected = (logits.astype(np.float64) + gumbel(keys, np.arange(2500))).argmax(1)
drawn = noise._triton_sample(torch.from_numpy(logits), torch.from_numpy(keys.view(np.int64)))
assert drawn.tolist() == expected.tolist()
"""


def test_the_gpu_kernel_agrees_with_the_definition() -> None:
    """Under Triton's interpreter, which needs no GPU."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, "-c", _INTERPRETED], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("seed", [0, 12345])
def test_draws_follow_the_softmax(temperature: float, seed: int) -> None:
    logits = np.random.default_rng(3).normal(scale=1.5, size=16).astype(np.float32) / np.float32(temperature)
    drawn = keyed_sample(torch.from_numpy(np.tile(logits, (DRAWS, 1))), bits(keys(DRAWS, seed)))
    p = np.exp(logits.astype(np.float64) - logits.max())
    test = stats.chisquare(np.bincount(drawn.numpy(), minlength=16), DRAWS * p / p.sum())
    assert test.pvalue > 1e-4


def test_draws_at_neighbouring_positions_are_independent() -> None:
    flat = torch.zeros(DRAWS, 8)
    here = keyed_sample(flat, bits(keys(DRAWS))).numpy()
    pairs = np.bincount(here[:-1] * 8 + here[1:], minlength=64)
    assert stats.chisquare(pairs).pvalue > 1e-4


def test_excluded_tokens_are_never_drawn_and_one_token_always() -> None:
    logits = torch.full((1000, 50), -float("inf"))
    logits[:, 7] = -1000.0
    assert keyed_sample(logits, bits(keys(1000))).unique().tolist() == [7]


def test_keys_differ_by_seed_and_position() -> None:
    seeds, positions = np.divmod(np.arange(100_000), 1000)
    assert len(np.unique(row_keys(seeds.astype(np.uint64), positions))) == 100_000


def test_seeds_differ_by_everything_they_are_derived_from() -> None:
    values = {
        request_seed(run, problem, step, sample, row)
        for run, problem, step, sample, row in product(range(3), (1, 2**64 - 1), range(3), (-1, 0, 1), (0, 1))
    }
    assert len(values) == 3 * 2 * 3 * 3 * 2
    assert all(0 <= value < 2**63 for value in values)
    assert request_seed(0, 1, 2, 3) == request_seed(0, 1, 2, 3)


def test_a_prompt_has_one_identity_in_every_container() -> None:
    ids = [5, 6, 70_000]
    assert prompt_identity(ids) == prompt_identity(np.array(ids, dtype=np.int64)) == prompt_identity(tuple(ids))
    assert prompt_identity(ids) != prompt_identity(ids[:2])
