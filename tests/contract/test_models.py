"""Policies of other kinds than the tiny one, with random weights: whatever drafts, they
write the tokens of off.
"""

from __future__ import annotations

from typing import Any

import pytest
from jobs import Request, Round
from requested import (
    ALWAYS,
    HISTORY,
    MIXED,
    OFF,
    PLAIN,
    SELF,
    SMALL,
    drafted_on_v2,
    nightly,
    prompts,
    requests,
    shortened,
    stock,
    tokens,
    two_rounds,
)

from das_adapter import compat

ARMS = {"history": HISTORY, "self": SELF, "history+self": MIXED}
ROUNDS = two_rounds(requests([*PLAIN, {"temperature": 0.0}]))


def model_drafts(policy: str) -> dict[str, Any]:
    """The block of a draft model that is the policy itself, and drafts in every
    step.
    """
    return {"drafter": "draft_model", "draft": {"model": policy}, **ALWAYS}


@pytest.mark.one_build
@pytest.mark.parametrize("drafter", [*ARMS, "draft_model"])
def test_a_policy_of_experts_writes_the_tokens_of_off_and_returns_its_routing(
    engine: Any, vllm_env: dict[str, str], policies: Any, drafter: str
) -> None:
    """The routing that trainers replay: one row for each token of the text but the
    last, of no rejected draft token, and of no pass of the drafter's own experts. On V1
    vLLM returns it before 0.31.
    """
    policy = {"model": policies("experts"), **SMALL}
    replay = {**policy, "enable_return_routed_experts": True}
    das = ARMS.get(drafter) or model_drafts(policy["model"])
    returned = not vllm_env and compat.numbers(compat.version("vllm") or "") < (0, 31)
    if not returned:
        with pytest.raises(
            RuntimeError,
            match=r"enable_return_routed_experts=True.*V2 model runner alone",
        ):
            engine(das=das, engine=replay, rounds=[])
    asked_for = replay if returned else policy
    reference = engine(das=OFF, engine=asked_for, rounds=ROUNDS)
    result = engine(das=das, engine=asked_for, rounds=ROUNDS)
    assert tokens(result) == tokens(reference)
    assert result[1]["preemptions"] > 0
    assert not any(r["stats"]["error"] for r in result)
    assert result[1]["stats"]["accepted_tokens"] > 50
    if drafter != "draft_model":
        assert (
            result[1]["stats"]["draft_tokens"]
            > result[1]["stats"]["accepted_tokens"] + 50
        )
    if not returned:
        return
    assert [r["routing"] for r in result] == [r["routing"] for r in reference]
    asked = [len(r.prompt) for r in ROUNDS[0].requests]
    rows = [
        prompt + len(text) - 1
        for prompt, text in zip(asked, result[0]["tokens"], strict=True)
    ]
    assert [len(routing) for routing in result[0]["routing"]] == rows
    assert len({str(row) for routing in result[0]["routing"] for row in routing}) > 50


@pytest.mark.parametrize("drafter", ["history", *nightly("self", "history+self")])
def test_a_policy_of_experts_on_v2_returns_stock_vllms_routing(
    v2_engine: Any, policies: Any, drafter: str
) -> None:
    few = {**SMALL, "num_gpu_blocks_override": 18}
    replay = {"model": policies("experts"), **few, "enable_return_routed_experts": True}
    device = {"history": {"device_bytes": "2MiB"}} if "history" in drafter else {}
    rounds = two_rounds(requests(shortened(PLAIN, 30), 9, ignore_eos=True))
    reference = v2_engine(das=None, engine=replay, rounds=stock(rounds))
    result = v2_engine(das={**ARMS[drafter], **device}, engine=replay, rounds=rounds)
    drafted_on_v2(result, reference)
    assert [r["routing"] for r in result] == [r["routing"] for r in reference]
    assert len({str(row) for routing in result[0]["routing"] for row in routing}) > 50
    assert result[1]["preemptions"] > 0
    assert (
        result[1]["stats"]["draft_tokens"] - 20
        > result[1]["stats"]["accepted_tokens"]
        > 20
    )


@pytest.mark.long
def test_problems_that_differ_only_in_their_images_have_histories_of_their_own(
    engine: Any, policies: Any
) -> None:
    """Without labels and seeds, in an engine that no host looks after."""
    (prompt,) = prompts(1)

    def asked(*images: int) -> list[Request]:
        params = {"max_tokens": 60, "temperature": 2.0, "n": 2}
        return [Request(prompt, params, image=seed) for seed in images]

    rounds = [Round(asked(1), refresh=1), Round(asked(2)), Round(asked(2, 1))]
    job = {
        "standalone": True,
        "rounds": rounds,
        "engine": {"model": policies("images")},
    }
    reference = engine(das=OFF, **job)
    result = engine(das=HISTORY, **job)
    assert [r["samples"] for r in result] == [r["samples"] for r in reference]
    assert result[1]["samples"] != result[0]["samples"]
    assert [
        (r["stats"]["history_hits"], r["stats"]["history_requests"]) for r in result[1:]
    ] == [(0, 2), (2, 4)]
    assert not any(r["stats"]["error"] for r in result)
