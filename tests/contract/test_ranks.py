"""Two tensor-parallel ranks, in two processes over gloo: they draft alike, and none
waits for one that failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import v2_cpu
from jobs import POLICY, Request
from requested import (
    ALWAYS,
    HISTORY,
    MIXED,
    OFF,
    PLAIN,
    SELF,
    TWO_RANKS,
    drafter,
    nightly,
    prompts,
    requests,
    two_rounds,
)

HERE = Path(__file__).parent
COPY = {"self": {"weights": os.environ.get("DAS_TEST_COPY", "int8")}}
"""A format that there is on the device, and for half of the policy's layers."""
RANKS = {"engine": TWO_RANKS, "env": {"TORCH_COMPILE_DISABLE": "1"}}
ALONE: dict[str, Any] = RANKS if "DAS_TEST_DTYPE" in os.environ else {}
"""How the reference runs: half precision adds up otherwise over two ranks than on
one.
"""
UNSEEDED = [
    Request(prompt, {"temperature": 1.0, "max_tokens": 60}) for prompt in prompts(3)
]
"""Whose tokens are others in every run, but the same on all ranks."""
ROUNDS = [
    replace(r, requests=[*r.requests, *UNSEEDED])
    for r in two_rounds(requests(PLAIN, 6))
]


def seeded(result: list[dict[str, Any]]) -> list[Any]:
    """Return the tokens of the requests that have seeds."""
    return [r["tokens"][: -len(UNSEEDED)] for r in result]


@pytest.mark.parametrize(
    "das", [HISTORY, *nightly({**SELF, **COPY}), {**MIXED, **COPY}], ids=drafter
)
def test_two_ranks_write_the_tokens_of_one(
    engine: Any, vllm_env: dict[str, str], das: dict[str, Any]
) -> None:
    if vllm_env and das["drafter"] != "history+self":
        pytest.skip(
            "two ranks take long: on this build with both sources of drafts only"
        )
    reference = engine(das=OFF, rounds=ROUNDS, **ALONE)
    result = engine(das=das, rounds=ROUNDS, **RANKS)
    assert seeded(result) == seeded(reference)
    for found in result:
        assert [rank["error"] for rank in found["ranks"]] == [None, None]
        counted = ("draft_tokens", "accepted_tokens", "tokens", "request_forwards")
        assert [found["ranks"][0][name] for name in counted] == [
            found["ranks"][1][name] for name in counted
        ]
    assert sum(r["stats"]["accepted_tokens"] for r in result) > 50
    if "history" in das["drafter"]:  # one rank holds it
        assert result[1]["stats"]["history_tokens"] > 0
        assert "history_tokens" not in result[1]["ranks"][1]


def test_nobody_waits_for_a_rank_that_failed(
    engine: Any, vllm_env: dict[str, str]
) -> None:
    if vllm_env:
        pytest.skip("two ranks take long: on the other build only")
    reference = engine(das=OFF, rounds=ROUNDS, **ALONE)
    result = engine(
        das={**MIXED, **COPY}, rounds=ROUNDS, sabotage="a rank fails", **RANKS
    )
    assert seeded(result) == seeded(reference)
    first, second = ([bool(rank["error"]) for rank in r["ranks"]] for r in result)
    assert first == [True, False]
    assert second == [False, True]
    # the first rank goes on with the history
    assert result[1]["stats"]["accepted_tokens"] > 0


def test_a_rank_that_fails_while_the_others_wait_ends_the_engine(
    engine: Any, vllm_env: dict[str, str]
) -> None:
    if vllm_env:
        pytest.skip("two ranks take long: on the other build only")
    with pytest.raises(RuntimeError, match="engine FAILED") as ended:
        engine(
            das={**MIXED, **COPY},
            rounds=ROUNDS,
            sabotage="a rank fails in the passes",
            **RANKS,
        )
    assert "the pass is broken on purpose" in str(ended.value)
    # as vLLM's driver would say after minutes
    assert "timed out" not in str(ended.value)


def data_parallel(
    env: dict[str, str], policy: str, *block: dict[str, Any]
) -> dict[str, Any]:
    """Return what two data-parallel ranks found, see data_parallel.py."""
    script = [
        sys.executable,
        str(HERE / "data_parallel.py"),
        policy,
        *map(json.dumps, block),
    ]
    done = subprocess.run(
        script,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, **env},
    )
    line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT ")), None)
    assert line is not None, done.stderr[-6000:]
    return dict(json.loads(line.removeprefix("RESULT ")))


@pytest.mark.long
def test_figures_are_those_of_all_data_parallel_engines() -> None:
    """vLLM's own call returns what the first engine's ranks answer."""
    found = data_parallel({}, str(POLICY), {"drafter": "history"})
    assert found["first"] == 1
    (one,), (other,) = found["counts"]
    assert min(one["tokens"], other["tokens"]) > 0
    assert one["tokens"] + other["tokens"] == sum(map(len, found["texts"])) == 570


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "block"),
    [
        ("dense", ALWAYS),
        ("experts", ALWAYS),
        ("experts", {"history": {"device_bytes": "2MiB"}}),
    ],
    ids=("dense", "experts", "experts-controlled"),
)
def test_data_parallel_ranks_write_stock_vllms_tokens_on_v2(
    newest_env: dict[str, str], policies: Any, kind: str, block: dict[str, Any]
) -> None:
    """Ranks that hold parts of the experts step together, and each has draft lengths of
    its own.
    """
    env = v2_cpu.everywhere(newest_env)
    policy = str(POLICY) if kind == "dense" else policies(kind)
    reference = data_parallel(env, policy)
    found = data_parallel(env, policy, {"drafter": "history", **block})
    assert found["texts"] == reference["texts"]
    assert all(result["v2"] and result["asynchronous"] for result in (reference, found))
    (one,), (other,) = found["counts"]
    assert one["error"] is None and other["error"] is None
    if block == ALWAYS:
        assert min(rank["accepted_tokens"] for rank in (one, other)) > 20
        assert one["draft_tokens"] != other["draft_tokens"]
