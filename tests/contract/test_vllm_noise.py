"""The noise is that of vLLM's V2 sampler: bit for bit, and token for token between its runner and ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from jobs import POLICY, Request, Round
from requested import OFF, prompts

_STAND_IN = """
import triton.backends

class Driver:
    is_active = staticmethod(lambda: True)

class Backend:
    driver, compiler = Driver, None

triton.backends.backends["cpu"] = Backend  # so that vLLM, which finds no GPU, imports its kernels all the same
"""
_SCRIPT = """
import numpy as np, torch, triton, triton.language as tl
from vllm.v1.worker.gpu.sample import gumbel as theirs
from das_adapter.core.noise import gumbel, hashed
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
    temperature = torch.from_numpy(rng.choice([0.0, 0.7, 1.0], 40).astype(np.float32))
    tokens = theirs.gumbel_sample(logits, torch.arange(40), temperature, keys.seeds, keys.positions,
                                  apply_temperature=True, is_drafting=False)
    assert tokens.tolist() == triton_sample(logits, temperature, keys, None).tokens.tolist()
    assert tokens.tolist() == keyed_sample(logits, temperature, keys).tokens.tolist()
"""


def run(script: str, environment: dict[str, str], *arguments: str) -> str:
    """Run a script under Triton's interpreter; return what it prints."""
    pytest.importorskip("triton")
    environment = {**os.environ, **environment, "TRITON_INTERPRET": "1", "VLLM_PLUGINS": ""}
    done = subprocess.run(
        [sys.executable, "-c", _STAND_IN + script, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_definition_and_both_kernels_are_vllms(newest_env: dict[str, str]) -> None:
    run(_SCRIPT, newest_env)


_ENGINE = """
import json, sys
import vllm.v1.sample.ops.topk_topp_sampler as truncation
from vllm import LLM, SamplingParams
truncation.HAS_TRITON = False  # the interpreter fails in that kernel
job = json.loads(sys.argv[1])
llm = LLM(job["policy"], dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=16, seed=0,
          kv_cache_memory_bytes=2**26)
runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
assert type(runner).__module__ == "vllm.v1.worker.cpu.model_runner", type(runner)  # the second, on a CPU
outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in job["prompts"]],
                       [SamplingParams(**params) for params in job["params"]], use_tqdm=False)
print("RESULT " + json.dumps([list(o.outputs[0].token_ids) for o in outputs]))
"""


@pytest.mark.one_build
def test_stock_v2_writes_the_same_tokens(engine: Any, newest_env: dict[str, str]) -> None:
    """The newest vLLM's second runner without das-adapter, and our samplers in a first runner."""
    params = [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.0}, {"temperature": 1.3}]
    params = [{"max_tokens": 24, "seed": 2**40 * i + 11, **p} for i, p in enumerate(params)]
    asked = {"policy": str(POLICY), "prompts": prompts(4), "params": params}
    printed = run(_ENGINE, {**newest_env, "VLLM_USE_V2_MODEL_RUNNER": "1"}, json.dumps(asked))
    line = next(x for x in printed.splitlines() if x.startswith("RESULT "))
    requests = [Request(prompt, p) for prompt, p in zip(prompts(4), params, strict=True)]
    assert engine(das=OFF, rounds=[Round(requests)])[0]["tokens"] == json.loads(line.removeprefix("RESULT "))
