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
    assert {"das-adapter", "vllm", "verl", "model runner of history"} <= {
        finding["name"] for finding in report["findings"]
    }
    changes = {change["patch"]: change for change in report["changes"]}
    assert changes["verify_by_equality"]["target"].endswith(":rejection_sample")
    assert {"send_the_plan", "run_speculator", "label_requests"} <= changes.keys()


def test_cpu_env_prints_variables() -> None:
    result = CliRunner().invoke(main, ["cpu-env"])
    assert result.exit_code == 0
    assert all(line.count("=") for line in result.output.splitlines())


def test_cpu_setup_leaves_a_prepared_environment_as_it_is() -> None:
    pytest.importorskip("vllm")
    result = CliRunner().invoke(main, ["cpu-setup"])
    assert result.exit_code == 0
    assert "removed" not in result.output


@pytest.mark.parametrize(
    ("requests", "sizes"),
    [
        (256, ""),
        pytest.param(8, "16,32,64", marks=pytest.mark.long),
        pytest.param(200, "1,2,4,8,16,32,64,128,256", marks=pytest.mark.long),
    ],
)
def test_steps_without_drafts_replay_graphs_of_their_own(
    newest_env: dict[str, str], requests: int, sizes: str
) -> None:
    """Stock's, where vLLM chooses their sizes; of all kinds there are at most twice as
    many then.
    """
    command = [
        sys.executable,
        ROOT / "benchmarks" / "graphs.py",
        "--requests",
        str(requests),
        "--sizes",
        sizes,
    ]
    done = subprocess.run(
        command,
        env={**os.environ, **newest_env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout[done.stdout.index("{") :])
    assert found["plain"] == requests
    assert found["drafted_fit"]
    if not sizes:
        counts = found["graphs"]
        assert found["plain_as_stock"] == requests
        assert (
            counts["own_lengths"]["full"]
            <= 2 * counts["stock"]["full"]
            < counts["one_length"]["full"]
        )
