"""OpenRLHF's vLLM actors and sample generator: the same tokens with speculation off and
on, and a history that follows its weight updates.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip(
    "openrlhf", reason="OpenRLHF is not installed: pip install --no-deps openrlhf"
)
pytestmark = pytest.mark.hosts

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "openrlhf" / "rollouts.py"


def test_rollouts_have_the_same_tokens_and_the_history_follows_the_weights(
    tmp_path: Path,
) -> None:
    subprocess.run(
        [sys.executable, str(EXAMPLE), "--steps", "3", "--out", str(tmp_path)],
        check=True,
    )
    off, on = json.loads((tmp_path / "result.json").read_text()).values()
    assert [step["tokens"] for step in off] == [step["tokens"] for step in on]
    assert [step["rewards"] for step in off] == [step["rewards"] for step in on]
    assert off[0]["tokens"] != off[1]["tokens"]
    history = [step["figures"]["history_tokens"] for step in on]
    assert 0 == history[0] < history[1] < history[2]
    assert on[-1]["figures"]["accepted_tokens"] > 0
