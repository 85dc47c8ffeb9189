"""Each fault of `benchmarks/soak.py` once, in a run on two nodes with real engines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).resolve().parents[2] / "benchmarks" / "soak.py"


@pytest.mark.long
def test_whatever_happens_its_tokens_are_the_undisturbed_runs_and_nothing_is_left(
    tmp_path: Path,
) -> None:
    pytest.importorskip("vllm")
    if subprocess.run(
        ["unshare", "--mount", "true"], capture_output=True, check=False
    ).returncode:
        pytest.skip("this user may not make namespaces")
    out = tmp_path / "chaos.json"
    subprocess.run(
        [sys.executable, SOAK, "--steps", "45", "--every", "3", "--out", out],
        check=True,
    )
    (row,) = json.loads(out.read_text()).values()
    assert len(set(row["faults"])) == 15
    assert row["steps_whose_tokens_differ"] == []
    assert row["left"] == []
    assert row["accepted_in_a_step_p50"] > 100  # the history is there again after each
