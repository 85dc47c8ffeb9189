"""The controller inside a real engine: whatever it decides, the tokens are the same,
and its decisions are logged.
"""

from __future__ import annotations

from typing import Any

import pytest
from requested import OFF, requests, tokens, two_rounds

from das_adapter.protocol.decision_log import read
from das_adapter.reports import run_series


@pytest.mark.one_build
def test_every_policy_and_toggle_writes_the_same_tokens(
    engine: Any, tmp_path_factory: Any
) -> None:
    logs = tmp_path_factory.mktemp("logs")
    # three go on when the others have ended
    ends = [
        {"max_tokens": 160},
        *[{"max_tokens": 30}] * 3,
    ]
    rounds = two_rounds(
        requests([{**end, "temperature": 1.0, "ignore_eos": True} for end in ends])
    )
    reference = engine(das=OFF, rounds=rounds)
    for das in (
        {"budget": "optimal", "speculate": "always", "log_dir": str(logs)},
        {"budget": "das", "speculate": 4},
    ):
        result = engine(das=das, rounds=rounds)
        assert tokens(result) == tokens(reference)
        assert not any(r["stats"]["error"] for r in result)
        assert sum(r["stats"]["accepted_tokens"] for r in result) > 20
    rollouts = read(logs)
    assert sum(step["requests"] for step in run_series.by_training_step(rollouts)) > 0
    steps = [step for rollout in rollouts for step in rollout.steps]
    assert len(steps) > 50
    assert any(step.predicted for step in steps)
    counted = sum(
        counts["draft_tokens"] for rollout in rollouts for counts in rollout.counts
    )
    assert counted == sum(rate.drafted for rate in run_series.by_source(rollouts)) > 0
