"""Keyed noise: the compiled samplers agree with its definition, and what they draw has
the right distribution.
"""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_noise import gumbel, hashed, uniform
from scipy import stats

from das_adapter.core.identity import prompt_identity, request_seed

torch = pytest.importorskip("torch")
from das_adapter.engine.v1.keyed_sample import Keys, keyed_sample  # noqa: E402

DRAWS = 120_000
HASHES = [[2167721464, 1065631903], [3370070123, 1192055257], [3797045379, 831593000]]
ENDS = np.array([-(2**63), -(2**31) - 5, -1, 0, 1, 2**32 - 1, 2**32, 2**63 - 1])


def rows(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Seeds and positions of so many rows of one request."""
    return np.full(count, seed, dtype=np.int64), np.arange(count)


def keys(seeds: np.ndarray, positions: np.ndarray) -> Keys:
    return Keys(torch.from_numpy(seeds), torch.from_numpy(positions))


def expected(
    logits: np.ndarray, seeds: np.ndarray, positions: np.ndarray
) -> np.ndarray:
    """Draw by the definition, in float32; `argmax` takes the lowest of equals."""
    return (logits + gumbel(seeds, positions, np.arange(logits.shape[1]))).argmax(
        axis=1
    )


@pytest.mark.parametrize("vocab", [1, 2, 96, 1000, 50_257])
def test_the_cpu_kernel_draws_by_the_definition(vocab: int) -> None:
    count = 200 if vocab <= 1000 else 8
    rng = np.random.default_rng(vocab)
    seeds = rng.choice(ENDS, count)
    positions = rng.integers(0, 2**20, count)
    logits = rng.normal(scale=4, size=(count, vocab)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.3] = -np.inf
    drawn = keyed_sample(torch.from_numpy(logits), keys(seeds, positions))
    assert drawn.tolist() == expected(logits, seeds, positions).tolist()


@given(
    st.lists(
        st.sampled_from([-np.inf, -1e4, 0.0, 0.5, 16.0, 1e6, 3e38]),
        min_size=1,
        max_size=300,
    ),
    st.integers(),
)
def test_ties_and_extremes_go_by_the_definition(logits: list[float], seed: int) -> None:
    """At 1e6 and above the noise falls below the last bit: most scores are equal."""
    row = np.array([logits], dtype=np.float32)
    seeds = np.array([(seed + 2**63) % 2**64 - 2**63])
    positions = np.array([7])
    drawn = keyed_sample(torch.from_numpy(row), keys(seeds, positions))
    assert drawn.tolist() == expected(row, seeds, positions).tolist()


def test_the_noise_never_changes() -> None:
    """Values of vLLM 0.32's `murmur3_hash32` (`tests/contract/test_vllm_noise.py`
    compares all of it, where that is installed).
    """
    seeds = np.array([0, -1, 2**40 + 5])
    positions = np.array([0, 9, 2**31])
    assert hashed(seeds, positions, np.array([0, 151_935])).tolist() == HASHES
    assert uniform(np.array([0, 2**32 - 1], dtype=np.uint32)).tolist() == [2**-33, 1.0]
    assert np.isfinite(gumbel(seeds, positions, np.arange(10**5))).all()


_INTERPRETED = """
import numpy as np, torch
from reference_noise import gumbel
from das_adapter.engine.v1.keyed_sample import Keys, triton_sample
rng = np.random.default_rng(0)
seeds = rng.choice([-(2**63), -1, 0, 1, 2**40 + 5, 2**63 - 1], 12)
positions = rng.integers(0, 2**20, 12)
keys = Keys(torch.from_numpy(seeds), torch.from_numpy(positions))
for vocab in (9000, 4096, 3):
    logits = torch.from_numpy(rng.normal(scale=3, size=(12, vocab)).astype(np.float32))
    logits[:4, 1 : max(2, vocab // 2)] = -float("inf")
    logits[5] = 0.0
    tokens = (logits.numpy() + gumbel(seeds, positions, np.arange(vocab), log=np.log)).argmax(1)
    assert triton_sample(logits, keys).tolist() == tokens.tolist(), vocab
x = torch.from_numpy(rng.normal(size=(12, 5000)).astype(np.float32))
wide = torch.zeros(12, 2, 6000)
for places in (wide[:, 1, 500:5500], wide[:, 0].t()[:5000].t(), torch.zeros(5000, 12).t()):  # slices, columns
    places.copy_(x)
    assert torch.equal(triton_sample(places, keys), triton_sample(x, keys))
for nothing in (-float("inf"), float("nan")):
    drawn = triton_sample(torch.full((12, 5000), nothing), keys)
    assert int(drawn.min()) >= 0 and int(drawn.max()) < 5000
assert torch.equal(triton_sample(x[3:4], keys.at(slice(3, 4))), triton_sample(x, keys)[3:4])
"""


def interpreted(script: str, **environment: str) -> None:
    """Run a script under Triton's interpreter, which needs no GPU."""
    pytest.importorskip("triton")
    path = os.pathsep.join(
        (str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
    )
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": path,
        **environment,
    }
    run = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


def test_the_gpu_kernel_agrees_with_the_definition() -> None:
    interpreted(_INTERPRETED)


@pytest.mark.parametrize("seed", [0, 12345])
def test_draws_follow_the_softmax(seed: int) -> None:
    logits = np.random.default_rng(3).normal(scale=1.5, size=16).astype(np.float32)
    drawn = keyed_sample(
        torch.from_numpy(np.tile(logits, (DRAWS, 1))), keys(*rows(DRAWS, seed))
    )
    p = np.exp(logits.astype(np.float64) - logits.max())
    test = stats.chisquare(
        np.bincount(drawn.numpy(), minlength=16), DRAWS * p / p.sum()
    )
    assert test.pvalue > 1e-4


def test_draws_at_neighbouring_positions_are_independent() -> None:
    here = keyed_sample(torch.zeros(DRAWS, 8), keys(*rows(DRAWS))).numpy()
    pairs = np.bincount(here[:-1] * 8 + here[1:], minlength=64)
    assert stats.chisquare(pairs).pvalue > 1e-4


def test_excluded_tokens_are_never_drawn_and_one_token_always() -> None:
    logits = torch.full((1000, 50), -float("inf"))
    logits[:, 7] = -1000.0
    assert keyed_sample(logits, keys(*rows(1000))).unique().tolist() == [7]


def test_seeds_differ_by_everything_they_are_derived_from() -> None:
    values = {
        request_seed(run, problem, step, sample, row)
        for run, problem, step, sample, row in product(
            range(3), (1, 2**64 - 1), range(3), (-1, 0, 1), (0, 1)
        )
    }
    assert len(values) == 3 * 2 * 3 * 3 * 2
    assert all(0 <= value < 2**63 for value in values)
    assert request_seed(0, 1, 2, 3) == request_seed(0, 1, 2, 3)


def test_a_prompt_has_one_identity_in_every_container() -> None:
    ids = [5, 6, 70_000]
    assert (
        prompt_identity(ids)
        == prompt_identity(np.array(ids, dtype=np.int64))
        == prompt_identity(tuple(ids))
    )
    assert prompt_identity(ids) != prompt_identity(ids[:2])
