"""SkyRL's inference server and its clients: the same tokens with speculation off and
on, and a history that follows its weight updates.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")
import stub_trainer

pytestmark = pytest.mark.hosts

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "skyrl" / "rollouts.py"
NEWEST = Path(os.environ.get("DAS_TEST_NEWEST", Path(sys.prefix) / "newest"))
"""SkyRL 0.4 asks for vLLM 0.30, of which it needs modules that this environment's does
not have.
"""


@pytest.mark.skipif(
    not importlib.util.find_spec("skyrl"),
    reason="SkyRL is not installed: make hosts puts it there",
)
@pytest.mark.skipif(
    not (NEWEST / "vllm").exists(),
    reason=f"the newest vLLM CPU build is not in {NEWEST}",
)
def test_rollouts_have_the_same_tokens_and_the_history_follows_the_weights(
    tmp_path: Path,
) -> None:
    path = os.pathsep.join([str(NEWEST), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(EXAMPLE), "--steps", "3", "--out", str(tmp_path)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path})
    off, on = json.loads((tmp_path / "result.json").read_text()).values()
    assert [step["tokens"] for step in off] == [step["tokens"] for step in on]
    assert off[0]["tokens"] != off[1]["tokens"]
    history, accepted = (
        [step["figures"][name] for step in on]
        for name in ("das_history_tokens", stub_trainer.ACCEPTED)
    )
    assert 0 == history[0] < history[1] < history[2]
    assert accepted[1] < accepted[2]
    assert (
        on[-1]["figures"]["das_history_hits"] == on[-1]["figures"]["das_health"] == 1.0
    )
