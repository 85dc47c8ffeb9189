"""What vLLM's scheduler and front end do with several tokens of one step, on both
runners: grammars behind reasoning that ends inside a draft, stop strings, several
samples of a request, priorities and preemption.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
from jobs import POLICY, Request, Round
from requested import HISTORY, OFF, SMALL, requests, stock, synced, tokens, two_rounds

from das_adapter.engine.reasoning import told_of_step

ANSWER = r" ?[0-9]{2}( [0-9]{2}){1,4}"
BEHIND_REASONING = {"structured_outputs": {"regex": ANSWER}}
PARAMS = [
    BEHIND_REASONING,
    {"temperature": 1.0, "stop": ["7"]},
    {**BEHIND_REASONING, "temperature": 0.0},
    {"temperature": 1.0, "n": 2},
    {"temperature": 1.0},
]
PARSER = {
    "reasoning_parser": "hash",
    "reasoning_parser_plugin": str(Path(__file__).with_name("hash_reasoning.py")),
    "backend": "xgrammar",
}
CROWDED = {
    **SMALL,
    "scheduling_policy": "priority",
    "structured_outputs_config": PARSER,
}


def rounds() -> list[Round]:
    """Requests that do not fit all at once, of several priorities."""
    asked = requests(PARAMS, 18, max_tokens=90)
    return synced(two_rounds([replace(r, priority=i % 4) for i, r in enumerate(asked)]))


def check(result: list[dict[str, Any]], reference: list[dict[str, Any]]) -> None:
    """Check that clients get what they get without drafts, and that grammars hold."""
    assert tokens(result) == tokens(reference)
    assert [r["samples"] for r in result] == [r["samples"] for r in reference]
    assert all(r["preemptions"] > 0 for r in result)
    assert not any(r["stats"]["error"] for r in result)
    assert result[1]["stats"]["accepted_tokens"] > 50
    assert grammars(rounds()[1].requests, result[1]["tokens"]) > 3


def grammars(asked: list[Request], texts: list[list[int]]) -> int:
    """Check that answers behind reasoning keep the grammar, or are cut off by the most
    tokens; return how many were whole.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    whole = 0
    for request, ids in zip(asked, texts, strict=True):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        _, mark, answer = text.partition("####")
        if not mark or "structured_outputs" not in request.params:
            continue
        is_cut = len(ids) == request.params["max_tokens"]
        whole += not is_cut
        assert is_cut or re.fullmatch(ANSWER, answer)
    return whole


@pytest.mark.one_build
def test_on_v1_clients_get_what_they_get_without_drafts(engine: Any) -> None:
    from vllm.v1.structured_output import StructuredOutputManager

    if not told_of_step(StructuredOutputManager):
        pytest.skip("grammars behind reasoning are refused with this vLLM")
    asked = rounds()
    reference = engine(das=OFF, rounds=asked, engine=CROWDED)
    check(engine(das=HISTORY, rounds=asked, engine=CROWDED), reference)


def test_on_v2_clients_get_what_they_get_from_stock_vllm(v2_engine: Any) -> None:
    asked = rounds()
    reference = v2_engine(das=None, rounds=stock(asked), engine=CROWDED)
    check(v2_engine(das=HISTORY, rounds=asked, engine=CROWDED), reference)
