"""Responses end with the token that completes a stop string, also where a step has
brought more of them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.outputs import LogprobsLists

from das_adapter.engine.scheduler import one_by_one


def request(stop: list[str]) -> Any:
    """vLLM's request, as far as it is looked at."""
    return SimpleNamespace(sampling_params=SimpleNamespace(stop=stop))


def output(tokens: list[int], **fields: Any) -> EngineCoreOutput:
    """What a request got in a step, with a row of log-probabilities for each token."""
    rows = np.arange(2 * len(tokens)).reshape(-1, 2)
    lists = LogprobsLists(rows, rows / 10, np.array(tokens))
    return EngineCoreOutput("a", tokens, new_logprobs=lists, **fields)


def test_tokens_are_told_one_by_one_with_what_belongs_to_each() -> None:
    told = output(
        [5, 6, 7],
        finish_reason=FinishReason.LENGTH,
        events=["begun"],
        routed_experts=np.arange(5)[:, None],
    )
    parts = one_by_one(told, {"a": request(["</answer>"])})
    assert [part.new_token_ids for part in parts] == [[5], [6], [7]]
    assert [part.new_logprobs.logprob_token_ids.tolist() for part in parts] == [
        [[0, 1]],
        [[2, 3]],
        [[4, 5]],
    ]
    assert [part.new_logprobs.sampled_token_ranks.tolist() for part in parts] == [
        [5],
        [6],
        [7],
    ]
    assert [part.routed_experts[:, 0].tolist() for part in parts] == [
        [0, 1, 2],
        [3],
        [4],
    ]
    assert [part.events for part in parts] == [["begun"], None, None]
    assert [part.finish_reason for part in parts] == [None, None, FinishReason.LENGTH]
    assert one_by_one(told, {}) != [told]  # it has ended, and may have had stop strings


@pytest.mark.parametrize(("tokens", "stop"), [([5, 6], []), ([5], ["7"]), ([], ["7"])])
def test_what_needs_no_splitting_stays_as_it_is(
    tokens: list[int], stop: list[str]
) -> None:
    told = output(tokens)
    assert one_by_one(told, {"a": request(stop)}) == [told]
