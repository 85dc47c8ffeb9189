"""The controller inside a real engine: whatever it decides, the tokens are the same, and its decisions are logged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from jobs import ON_CPU, POLICY
from requested import OFF, PLAIN, requests, tokens, two_rounds

from das_adapter.cli import main
from das_adapter.protocol.decision_log import read
from das_adapter.tools import run_series


@pytest.mark.one_build
def test_every_policy_and_toggle_writes_the_same_tokens(engine: Any, tmp_path_factory: Any) -> None:
    logs = tmp_path_factory.mktemp("logs")
    rounds = two_rounds(requests(PLAIN))
    reference = engine(das=OFF, rounds=rounds)
    for das in (
        {"budget": "optimal", "speculate": "always", "log_dir": str(logs)},
        {"budget": "das", "speculate": 4},
    ):
        result = engine(das=das, rounds=rounds)
        assert tokens(result) == tokens(reference)
        assert not any(r["stats"]["error"] for r in result)
    rollouts = read(logs)
    assert sum(step["requests"] for step in run_series.by_training_step(rollouts)) > 0
    steps = [step for rollout in rollouts for step in rollout.steps]
    assert len(steps) > 50
    assert any(step.predicted for step in steps)
    counted = sum(counts["draft_tokens"] for rollout in rollouts for counts in rollout.counts)
    assert counted == sum(rate.drafted for rate in run_series.by_source(rollouts)) > 0


@pytest.mark.one_build
def test_calibrate_measures_this_machine(vllm_env: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "calibration.json"
    sizes = "--rounds 4 --batches 1,4,16 --contexts 16,64 --drafts 0,3".split()
    how = ["--engine", '{"dtype": "float32", "enforce_eager": true}']
    command = [sys.executable, "-m", "das_adapter.cli", "calibrate", POLICY, "--out", out, *sizes, *how]
    in_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # another process would import vLLM again
    env = {**os.environ, **vllm_env, **ON_CPU, **in_process, "VLLM_CPU_KVCACHE_SPACE": "1"}
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert run.returncode == 0, run.stderr[-4000:]
    content = json.loads(out.read_text())
    assert {(s["requests"], s["context"], s["drafts"]) for s in content["samples"]} == {
        (b, c, d) for b in (1, 4, 16) for c in (16, 64) for d in (0, 3)
    }
    assert content["validation"]["held_out"] == 4
    assert content["line"]["base"] > 0


def test_a_model_that_is_not_there_is_named() -> None:
    pytest.importorskip("vllm")
    result = CliRunner().invoke(main, ["calibrate", "/nowhere/model"])
    assert result.exit_code == 1
    assert "did not start with the model '/nowhere/model'" in result.output
