"""The GPU kit's parts work, on a CPU with a tiny shape: what they measure there means nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import v2_cpu

from das_adapter.protocol.engine_args import RUNNER_VARIABLE

RUN = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu" / "run.py"
CPU = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1",
       "MKL_CBWR": "AUTO,STRICT"}  # fmt: skip
EXACT = {
    "kernel": ["draws that differ from the definition, near-ties apart"],
    "index": ["requests whose drafts differ from the reference's", "bytes per sealed token"],
    "replay": ["forced tokens that were not written"],
    "lossless": ["responses that differ with batch-invariant kernels", "tokens drawn with the key of another position"],
    "copy": ["errors of the policy copy after sleep"],
    "robust": ["errors of the crowded engine"],
}
"""Bars that hold on any device."""


def kit(
    out: Path, *arguments: str, env: dict[str, str] | None = None, hidden: tuple[str, ...] = ()
) -> tuple[dict[str, Any], str]:
    """Run parts, where these packages can't be imported; return what each has written, and what was said."""
    start = f"import runpy, sys; sys.modules.update(dict.fromkeys({hidden})); sys.argv[0] = {str(RUN)!r}; "
    command = [sys.executable, "-c", start + "runpy.run_path(sys.argv[0], run_name='__main__')",
               *arguments, "--shape", "tiny", "--out", out]  # fmt: skip
    run = subprocess.run(command, env={**os.environ, **CPU, **(env or {})}, capture_output=True, text=True, check=False)
    written = {p.name.split("_")[1]: json.loads(p.read_text()) for p in out.glob("gpu_*_tiny.json")}
    return written, run.stdout + run.stderr


@pytest.mark.engine
def test_every_part_runs_and_writes_its_figures_and_verdicts(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    written, said = kit(tmp_path)
    parts = {"kernel", "index", "propose", "gate", "replay", "trace", "sweep", "lossless", "copy", "robust", "ranks"}
    assert set(written) == parts, said
    for part, content in written.items():
        assert content["provenance"]["hardware"]["cpu"]
        verdicts = {v["bar"]: v for v in content["bars"]}
        assert verdicts
        assert all(verdicts[bar]["kept"] for bar in EXACT.get(part, ())), verdicts
        assert all(f"{part}: {bar}" in said for bar in verdicts)
    arms = written["replay"]["arms"]
    assert arms["corrupted 0.0"]["tokens_per_forward"] > 1.1  # recorded text is drafted and accepted
    assert arms["corrupted 1.0"]["accepted_tokens"] < 0.1 * arms["corrupted 0.0"]["accepted_tokens"]


@pytest.mark.long
@pytest.mark.engine
def test_the_engines_parts_run_on_the_v2_runner(tmp_path: Path, newest_env: dict[str, str]) -> None:
    env = {**newest_env, **{name: value for name, value in v2_cpu.ENV.items() if name != RUNNER_VARIABLE}}
    written, said = kit(tmp_path, "gate", "replay", "trace", env=env)
    assert set(written) == {"gate", "replay", "trace"}, said
    assert written["gate"]["runner"] == written["trace"]["runner"] == "V2"
    assert set(written["gate"]["step_ms"]) == {"stock", "none, keyed", "history"}
    arms = written["replay"]["arms"]
    assert not any(arm.get("unforced") or arm.get("error") for arm in arms.values())
    assert arms["corrupted 0.0"]["tokens_per_forward"] > 1.05


@pytest.mark.parametrize(("part", "hidden"), [("kernel", ("vllm", "pydantic")), ("propose", ("vllm",))])
def test_some_parts_need_no_vllm(tmp_path: Path, part: str, hidden: tuple[str, ...]) -> None:
    written, said = kit(tmp_path, part, "gate", hidden=hidden)
    assert written[part]["bars"], said
    assert written["gate"]["why"] == "vLLM is not installed"
