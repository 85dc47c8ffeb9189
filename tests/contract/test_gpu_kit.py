"""The GPU kit's parts work, on a CPU with a tiny shape: what they measure there means nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu" / "run.py"
CPU = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1",
       "MKL_CBWR": "AUTO,STRICT"}  # fmt: skip
EXACT = {
    "kernel": ["draws that differ from the definition, near-ties apart"],
    "index": ["requests whose drafts differ from the reference's", "bytes per sealed token"],
    "replay": ["forced tokens that were not written"],
    "lossless": ["responses that differ with batch-invariant kernels", "tokens drawn with the key of another position"],
    "robust": ["errors of the policy copy after sleep", "errors of the crowded engine"],
}
"""Bars that hold on any device."""


@pytest.mark.engine
def test_every_part_runs_and_writes_its_figures_and_verdicts(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    command = [sys.executable, RUN, "--shape", "tiny", "--out", tmp_path]
    run = subprocess.run(command, env={**os.environ, **CPU}, capture_output=True, text=True, check=False)
    written = {p.name.split("_")[1]: json.loads(p.read_text()) for p in tmp_path.glob("gpu_*_tiny.json")}
    assert set(written) == {"kernel", "gate", "sweep", "trace", "replay", "lossless", "robust", "ranks", "index"}, (
        run.stderr
    )
    for part, content in written.items():
        assert content["provenance"]["hardware"]["cpu"]
        verdicts = {v["bar"]: v for v in content["bars"]}
        assert verdicts
        assert all(verdicts[bar]["kept"] for bar in EXACT.get(part, ())), verdicts
        assert all(f"{part}: {bar}" in run.stdout for bar in verdicts)
    arms = written["replay"]["arms"]
    assert arms["corrupted 0.0"]["tokens_per_forward"] > 1.5  # recorded text is drafted and accepted
    assert arms["corrupted 1.0"]["accepted_tokens"] < 0.1 * arms["corrupted 0.0"]["accepted_tokens"]
