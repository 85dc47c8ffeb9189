"""TRL's GRPO on real vLLM engines, in server and in colocate mode: the same tokens with
speculation off and on.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip(
    "trl", reason="TRL is not installed: pip install trl, or put it on PYTHONPATH"
)
pytestmark = pytest.mark.hosts

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "trl" / "grpo_tiny_math.py"


@pytest.mark.parametrize(("mode", "hits"), [("server", 1.0), ("colocate", 2 / 3)])
def test_training_steps_have_the_same_tokens_and_the_history_follows_the_weights(
    mode: str, hits: float, tmp_path: Path
) -> None:
    """`hits`: requests with a history of their problem, in the server's last step, and
    in all three of the other.
    """
    options = ["--mode", mode, "--epochs", "3", "--out", str(tmp_path)]
    subprocess.run([sys.executable, str(EXAMPLE), *options], check=True)
    off, on = (
        json.loads((tmp_path / arm / "result.json").read_text())
        for arm in ("off", "history")
    )
    tokens = [[rollout["tokens"] for rollout in arm["rollouts"]] for arm in (off, on)]
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 3
    assert len(on["logged"]) >= 3
    for a, b in zip(off["logged"][:3], on["logged"][:3], strict=True):
        assert a["reward"] == b["reward"]
        # log-probabilities are equal but for rounding
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["tokens_equal"] is True
    assert len(summary["epochs_of_off"]) == 3
    figures = summary["arms"]["history"]
    assert figures["engine_steps"] < summary["arms"]["off"]["engine_steps"]
    assert figures["history_tokens"] >= sum(map(len, tokens[1][0]))
    assert figures["history_hits"] == pytest.approx(hits) and figures["health"] == 1.0
