"""The noise is that of vLLM's V2 sampler: bit for bit, and token for token between its
runner and ours.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import v2_cpu
from jobs import Engine, Request, Round
from requested import OFF, prompts

_SCRIPT = """
import v2_cpu  # it has Triton take the CPU for a device
import numpy as np, torch, triton, triton.language as tl
from vllm.v1.worker.gpu.sample import gumbel as theirs
from reference_noise import gumbel, hashed
from das_adapter.engine.v1.keyed_sample import Keys, keyed_sample, triton_sample

@triton.jit
def noise(seeds, positions, hashes, out, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    token = tl.arange(0, BLOCK)
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    u = theirs.murmur3_uniform32(seed, position, token)
    tl.store(hashes + row * vocab + token, theirs.murmur3_hash32(seed, position, token).to(tl.int64), token < vocab)
    tl.store(out + row * vocab + token, -tl.log(-theirs._log1p_neg_stable(u)), token < vocab)

rng = np.random.default_rng(1)
seeds = rng.choice([-(2**63), -(2**31), -1, 0, 1, 2**32, 2**40 + 5, 2**63 - 1], 40)
positions = rng.integers(0, 2**31, 40)
hashes, out = torch.zeros(40, 1500, dtype=torch.int64), torch.zeros(40, 1500)
keys = Keys(torch.from_numpy(seeds), torch.from_numpy(positions))
noise[(40,)](*keys, hashes, out, 1500, BLOCK=2048)
assert (hashes.numpy() == hashed(seeds, positions, np.arange(1500))).all()
assert (out.numpy() == gumbel(seeds, positions, np.arange(1500), log=np.log)).all()

for vocab in (96, 3000):
    logits = torch.from_numpy(rng.normal(scale=3, size=(40, vocab)).astype(np.float32))
    logits[:8, 5:50], logits[9] = -float("inf"), 0.0
    tokens = theirs.gumbel_sample(logits, torch.arange(40), torch.ones(40), keys.seeds, keys.positions,
                                  apply_temperature=True, is_drafting=False)
    assert tokens.tolist() == triton_sample(logits, keys).tolist() == keyed_sample(logits, keys).tolist()
"""


def test_the_definition_and_both_kernels_are_vllms(newest_env: dict[str, str]) -> None:
    pytest.importorskip("triton")
    contract = Path(__file__).parent
    path = os.pathsep.join(
        (newest_env["PYTHONPATH"], str(contract), str(contract.parent / "unit"))
    )
    environment = {
        **os.environ,
        **newest_env,
        **v2_cpu.ENV,
        "PYTHONPATH": path,
        "VLLM_PLUGINS": "",
    }
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.one_build
def test_stock_v2_writes_the_same_tokens(engine: Engine, v2_engine: Engine) -> None:
    """The newest vLLM's second runner without das-adapter and with its own kernels, and
    our samplers in a first one.
    """
    params = [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 0.0},
        {"temperature": 1.3},
    ]
    asked = [
        Request(prompt, {"max_tokens": 24, "seed": 2**40 * i + 11, **params[i]})
        for i, prompt in enumerate(prompts(4))
    ]
    (stock,) = v2_engine(das=None, rounds=[Round(asked)], interpreted=True)
    assert stock["runner"] == "vllm.v1.worker.cpu.model_runner"  # the second, on a CPU
    assert engine(das=OFF, rounds=[Round(asked)])[0]["tokens"] == stock["tokens"]
