"""`benchmarks/drafters.py` measures engines of the installed vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]


def test_its_arms_take_turns_and_have_the_same_tokens(tmp_path: Path) -> None:
    out = tmp_path / "drafters.json"
    subprocess.run(
        [
            sys.executable,
            str(ROOT / "benchmarks/drafters.py"),
            str(ROOT / "examples/tiny_math/policy"),
            *("--arms", "off", "history"),
            *("--cells", "256/2"),  # fewer requests at once than there are
            *("--least", "8", "--epochs", "2", "--repeats", "1", "--forced"),
            *("--tokens", "96", "--out", str(out)),
        ],
        check=True,
    )
    arms = json.loads(out.read_text())["results"]
    off, history = (arms[arm]["cells"] for arm in ("off", "history"))
    assert list(off) == list(history) == ["256/2/1", "256/2/2"]
    for cell, figures in off.items():
        assert figures["tokens"] > 0
        assert history[cell]["tokens_hash"] == figures["tokens_hash"]
        assert history[cell]["error"] is None
    assert history["256/2/2"]["tokens_per_forward"] > 1.0
