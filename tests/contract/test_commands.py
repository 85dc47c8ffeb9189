"""The commands of the docs that need a whole environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from das_adapter.cli import main

ROOT = Path(__file__).resolve().parents[2]


def test_doctor_finds_nothing_broken() -> None:
    pytest.importorskip("vllm")
    command = [sys.executable, "-m", "das_adapter.cli", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    assert done.returncode == 0, report["findings"]
    assert {"das-adapter", "vllm", "verl"} <= {finding["name"] for finding in report["findings"]}
    changes = {change["patch"]: change for change in report["changes"]}
    assert changes["verify_by_equality"]["target"].endswith(":rejection_sample")
    assert {"choose_lengths", "run_speculator", "label_requests"} <= changes.keys()


def test_cpu_env_prints_variables() -> None:
    result = CliRunner().invoke(main, ["cpu-env"])
    assert result.exit_code == 0
    assert all(line.count("=") for line in result.output.splitlines())


def test_cpu_setup_leaves_a_prepared_environment_as_it_is() -> None:
    pytest.importorskip("vllm")
    result = CliRunner().invoke(main, ["cpu-setup"])
    assert result.exit_code == 0
    assert "removed" not in result.output


def test_own_numbers_of_draft_tokens_take_at_most_twice_the_graphs_of_vllm(newest_env: dict[str, str]) -> None:
    """And steps without drafts replay stock's."""
    command = [sys.executable, ROOT / "benchmarks" / "graphs.py"]
    done = subprocess.run(command, env={**os.environ, **newest_env}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout[done.stdout.index("{") :])
    assert found["plain_as_stock"] == found["requests"] == 256
    assert found["drafted_fit"]
    counts = found["graphs"]
    assert counts["own_lengths"]["full"] <= 2 * counts["stock"]["full"] < counts["one_length"]["full"]
