"""What the V2 runner's drafter accepts, beside the V1 runner's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "v2_acceptance.py"


@pytest.mark.long
def test_v2_accepts_what_v1_does(newest_env: dict[str, str], tmp_path: Path) -> None:
    """On engines, with and without the controller, and with equal tokens."""
    out = tmp_path / "acceptance.json"
    command = [
        sys.executable,
        BENCHMARK,
        "--newest",
        newest_env["PYTHONPATH"],
        "--out",
        out,
    ]
    subprocess.run(command, check=True, capture_output=True)
    for setting in json.loads(out.read_text())["settings"].values():
        assert setting["ratio"] >= 0.94
        assert setting["V1"][-1]["accepted_per_forward"] > 0.5
