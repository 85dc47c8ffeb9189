"""`vllm serve` with `DAS_CONFIG`, driven over HTTP by a trainer that knows nothing of
das-adapter.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import requests

pytest.importorskip("vllm")
import stub_trainer

pytestmark = pytest.mark.hosts

# Without the controller, whose decisions depend on how long steps take.
HISTORY = {"drafter": "history", "budget": "unlimited", "speculate": "always"}


def test_a_trainer_gets_the_same_tokens_and_the_history_follows_its_updates(
    tmp_path: Path,
) -> None:
    command = [
        sys.executable,
        stub_trainer.__file__,
        "--steps",
        "2",
        "--out",
        str(tmp_path),
    ]
    subprocess.run(command, check=True)
    off, on = json.loads((tmp_path / "result.json").read_text()).values()
    tokens = [rollout["tokens"] for rollout in off["rollouts"]]
    assert [rollout["tokens"] for rollout in on["rollouts"]] == tokens
    assert tokens[0] != tokens[1]
    first, second = on["metrics"]
    written = sum(len(text) for group in tokens[0] for text in group)
    assert first["das_history_tokens"] == 0
    assert second["das_history_tokens"] >= written
    assert second["das_history_hits"] == 1.0
    assert second["das_health"] == 1.0
    assert second[stub_trainer.ACCEPTED] > first[stub_trainer.ACCEPTED]


def test_a_bad_request_is_answered_with_its_key_and_no_route_is_ours(
    tmp_path: Path,
) -> None:
    bad = {
        "das_start": -5,
        "das_problem": "x",
        "das_seed": 1e300,
        "das_record": [2],
        "das_recrod": 0,
    }
    with stub_trainer.policy_served(HISTORY, tmp_path / "log") as server:
        for key, value in [*bad.items(), ("das_problem", 5), ("das_start", 0)]:
            body = {"prompt": [2, 25, 3], "max_tokens": 4, "vllm_xargs": {key: value}}
            answer = requests.post(
                f"{server.address}/v1/completions", json=body, timeout=60
            )
            assert answer.status_code == 400
            assert answer.json()["error"]["message"].startswith(f"{key}: ")
        assert stub_trainer.sample(
            server.address, [2, 25, 3], vllm_xargs={"das_record": 0, "das_seed": 7}
        )
        assert (
            requests.post(
                f"{server.address}/v1/das/refresh", json={}, timeout=60
            ).status_code
            == 404
        )
        paths = requests.get(f"{server.address}/openapi.json", timeout=60).json()[
            "paths"
        ]
        assert "/collective_rpc" in paths
        assert not [path for path in paths if "das" in path]
