"""A drafting path that can't run on a vLLM is found when the engine starts, one that
fails in a later step costs drafts until the next weight sync; neither costs a token.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import mutants
import pytest
import v2_cpu
from jobs import engines
from requested import (
    ALWAYS,
    HOST,
    OFF,
    PLAIN,
    nightly,
    requests,
    shortened,
    stock,
    synced,
    tokens,
    two_rounds,
)

HISTORY = {"drafter": "history", **ALWAYS, "history": {"device_bytes": "2MiB"}}
ROUNDS = synced(two_rounds(requests(shortened(PLAIN, 60))))
ON_V2 = (
    "the scheduler's room for drafts",
    "the begin of a step",
    "the plan that comes with a step",
    "the tokens of a step",
    "the layout of a step",
    "the verification",
    "the chances of drafts",
    "a look-up",
    "the drafts of all ranks",
    "what is learned of a step",
    "the texts of a step",
)


def assert_drafts_come_back(
    result: list[dict[str, Any]], reference: list[dict[str, Any]]
) -> None:
    """Drafting has failed in the first of two rounds, has been named, and goes on in
    the second; tokens are those of the reference.
    """
    first, second = result
    assert tokens(result) == tokens(reference)
    assert "broken on purpose" in first["stats"]["error"]
    assert (
        first["log"].count(
            "the history drafter failed; no drafts until the next weight sync"
        )
        == 1
    )
    assert first["stats"]["draft_tokens"] > 0
    assert first["stats"]["state"] == "failed"
    assert second["stats"]["error"] is None
    assert second["stats"]["accepted_tokens"] > 50


@pytest.mark.parametrize("place", ON_V2)
def test_a_failure_in_a_later_step_costs_drafts_and_no_token_on_v2(
    v2_engine: Any, place: str
) -> None:
    reference = v2_engine(das=None, rounds=stock(ROUNDS))
    result = v2_engine(das=HISTORY, rounds=ROUNDS, sabotage=f"failing once in {place}")
    assert_drafts_come_back(result, reference)


ON_V1 = ("the keys of the noise", "the verification", "the drafter", "the counts")


@pytest.mark.parametrize("place", ON_V1)
def test_a_failure_in_a_later_step_costs_drafts_and_no_token_on_v1(
    engine: Any, place: str
) -> None:
    reference = engine(das=OFF, rounds=ROUNDS)
    result = engine(das=HISTORY, rounds=ROUNDS, sabotage=f"failing once in {place}")
    assert_drafts_come_back(result, reference)


@pytest.mark.parametrize(
    ("runner", "drafter"),
    [("V1", "history"), ("V2", "history"), *nightly(("V2", "history+self"))],
)
def test_nothing_is_learned_from_the_rehearsal(
    v2_engine: Any, engine_of: Any, runner: str, drafter: str
) -> None:
    """Where step times are given, the same drafts are verified as if there had been
    none.
    """
    run = v2_engine if runner == "V2" else engine_of({})
    das = {
        "drafter": drafter,
        "history": {"device_bytes": "2MiB"},
    }
    tried, not_tried = (
        run(das=das, rounds=ROUNDS, sabotage=sabotage)
        for sabotage in ("slow policy", "slow policy, no rehearsal")
    )
    names = (
        "steps",
        "tokens",
        "draft_tokens",
        "accepted_tokens",
        "history_requests",
        "state",
    )
    for a, b in zip(tried, not_tried, strict=True):
        assert [a["stats"][name] for name in names] == [
            b["stats"][name] for name in names
        ]
    assert sum(found["stats"]["draft_tokens"] for found in tried) > 100


def assert_stock(result: list[dict[str, Any]], reference: list[dict[str, Any]]) -> None:
    """The engine has written stock's tokens without a draft, and has said once why."""
    assert tokens(result) == tokens(reference)
    for found in result:
        assert found["stats"]["error"]
        assert found["stats"]["draft_tokens"] == 0
    (line,) = (
        line
        for line in result[0]["log"].splitlines()
        if "the engine goes on as stock" in line
    )
    assert "vLLM 0." in line
    assert result[0]["stats"]["error"] in line


@pytest.mark.parametrize(
    "change",
    [
        *(few := list(mutants.ON_V2)[::2]),
        *nightly(*(name for name in mutants.ON_V2 if name not in few)),
    ],
)
def test_what_has_changed_in_vllm_is_found_at_the_start_on_v2(
    v2_engine: Any, newest_env: dict[str, str], change: str, tmp_path: Path
) -> None:
    reference = v2_engine(das=None, rounds=stock(ROUNDS))
    newest = Path(newest_env["PYTHONPATH"])
    mutant = mutants.mutated(newest / "vllm", tmp_path, mutants.ON_V2[change])
    env = {
        **newest_env,
        "PYTHONPATH": os.pathsep.join(map(str, (mutant, newest))),
        **v2_cpu.ENV,
        **HOST,
    }
    with engines(env, tmp_path) as engine:
        assert_stock(engine(das=HISTORY, rounds=ROUNDS), reference)


@pytest.mark.parametrize(
    "change",
    [
        *(few := list(mutants.ON_V1)[:1]),
        *nightly(*(name for name in mutants.ON_V1 if name not in few)),
    ],
)
def test_what_has_changed_in_vllm_is_found_at_the_start_on_v1(
    change: str, tmp_path: Path
) -> None:
    package = importlib.util.find_spec("vllm").submodule_search_locations[0]
    mutant = mutants.mutated(Path(package), tmp_path, mutants.ON_V1[change])
    with engines({"PYTHONPATH": str(mutant)}, tmp_path) as engine:
        assert_stock(engine(das=HISTORY, rounds=ROUNDS), engine(das=OFF, rounds=ROUNDS))
