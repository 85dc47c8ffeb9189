"""The device index of vLLM's V2 runner: against its plain reference, against the host's index, and for a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import device_reference
import numpy as np
import pytest

pytest.importorskip("triton")
import torch

from das_adapter.core.index import SuffixIndex
from das_adapter.engine.v2.device_index import DeviceIndex

HERE = Path(__file__).parent
VOCABULARY, SLOTS, STEPS, POEM = 12, 6, 6, 90


def test_kernels_equal_their_reference_in_the_interpreter(newest_env: dict[str, str]) -> None:
    import v2_cpu

    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "interpreted_kernels.py")],
        env={**os.environ, **newest_env, **v2_cpu.ENV}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-4000:]
    assert "2 passed" in run.stdout


def test_the_device_drafts_as_the_hosts_index_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """On texts that come back with mistakes; the rules differ at the end of a text and in which live places count."""
    monkeypatch.setattr(DeviceIndex, "_launch", device_reference.launch)
    rng = np.random.default_rng(0)
    poems = [rng.integers(0, VOCABULARY, POEM) for _ in range(2)]

    def variation(problem: int) -> np.ndarray:
        text = poems[problem].copy()
        wrong = rng.random(POEM) < 0.1
        text[wrong] = rng.integers(0, VOCABULARY, wrong.sum())
        return text.astype(np.int32)

    host = SuffixIndex()
    for version in range(3):
        for problem in (0, 0, 1, 1):
            host.add(problem, variation(problem), version)
        host.seal()
    texts, total = torch.zeros(SLOTS, 128, dtype=torch.int32), torch.zeros(SLOTS, dtype=torch.int32)
    device = DeviceIndex(texts, STEPS, 2**14, 0.02, VOCABULARY)
    device.weigh(host.fading)
    prompts = [rng.integers(0, VOCABULARY, 10).astype(np.int32) for _ in range(2)]
    device.open([(slot, slot % 2, 10) for slot in range(SLOTS)])
    device.bring(host)
    handles = [host.open(slot % 2, prompts[slot % 2]) for slot in range(SLOTS)]
    for slot in range(SLOTS):
        texts[slot, :10] = torch.from_numpy(prompts[slot % 2])
    answers = [variation(slot % 2) for slot in range(SLOTS)]
    same, accepted, rounds, apart = 0, np.zeros(2, dtype=np.int64), 0, []
    for end in range(1, POEM - STEPS, 2):
        for slot in range(SLOTS):
            texts[slot, 10 : 10 + end] = torch.from_numpy(answers[slot][:end])
            host.extend(handles[slot], answers[slot][max(0, end - 2) : end])
        total[:] = 10 + end
        drafts = device.draft(torch.arange(SLOTS), torch.ones(SLOTS, dtype=torch.int32), total)
        theirs, chances = host.draft(handles, [STEPS] * SLOTS, 0.02)
        for slot in range(SLOTS):
            count = int(device.real[slot])
            mine = drafts[slot, :count].numpy()
            rest = answers[slot][end:]
            for which, draft in enumerate((mine, theirs[slot])):
                accepted[which] += np.cumprod(draft == rest[: len(draft)]).sum()
            if np.array_equal(mine, theirs[slot]):
                same += 1
                expected = np.cumprod(device.confidence[slot, :count].numpy())
                apart += np.abs(expected - chances[slot]).tolist()
            rounds += 1
    assert same > 0.95 * rounds
    assert np.mean(apart) < 0.01
    assert accepted[0] > 0.97 * accepted[1] > 300


POINTERS = {
    "*i32": "offers kinds offered then text_len arena outcomes cells fading found_info found_left seen_info seen_left "
            "num_sampled real",
    "*i64": "text_at slots row_of_slot sealed_texts sealed_places sealed_count found_at begin members member_count "
            "drafts targets rooms closed seen_at seen_key",
    "*fp32": "confidence", "*fp64": "sources start chance", "i32": "requests vocabulary", "fp32": "min_chance",
}  # fmt: skip
CONSTANTS = {"WIDTH": 17, "PADDED": 32, "ROWS": 32, "LANES": 256, "CANDIDATES": 64, "MEMBERS": 64, "SPLITS": 8,
             "BLOCK": 1024, "STEPS": 16, "COLUMNS": 32}  # fmt: skip
COMPILE = f"""
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from das_adapter.engine.v2 import kernels
types = {{name: kind for kind, names in {POINTERS!r}.items() for name in names.split()}}
for name in ("learn", "estimate", "search_sealed", "scan_live", "merge_live", "vote", "keep_texts"):
    kernel = getattr(kernels, name)
    constants = {{(i,): {CONSTANTS!r}[a] for i, a in enumerate(kernel.arg_names) if a.isupper()}}
    signature = {{a: "constexpr" if a.isupper() else types[a] for a in kernel.arg_names}}
    compiled = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32))
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared < 48 * 1024
"""


def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """Without one: Triton brings its own assembler."""
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
