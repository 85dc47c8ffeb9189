"""The policy copy on vLLM's V2 model runner, alone and beside the history: whatever it
drafts, the tokens are stock vLLM's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobs import Round
from requested import (
    ALWAYS,
    PLAIN,
    V2_RUNNER,
    drafted_on_v2,
    drafter,
    nightly,
    requests,
    shortened,
    stock,
    synced,
    tokens,
    two_rounds,
)
from test_v2_losslessness import CHANGED, ROUNDS

SELF = {"drafter": "self", "self": {"weights": "int8"}}
BOTH = {**SELF, "drafter": "history+self", "history": {"device_bytes": "2MiB"}}
FRESH = [replace(part, fresh_copy=True) for part in CHANGED]
"""The rounds behind whose last weight sync the weights are other ones."""


def rates(result: list[dict[str, Any]]) -> list[float]:
    """Return the share of the policy copy's draft tokens that was accepted, of each
    round in which it drafted more than thirty: how many those are depends on the time
    that steps take.
    """
    counts = [found["stats"]["self_counts"] for found in result]
    return [accepted / drafted for drafted, accepted in counts if drafted > 30]


@pytest.mark.parametrize("das", [SELF, *nightly(BOTH)], ids=drafter)
def test_tokens_are_stock_vllms_and_the_copy_follows_the_policy(
    v2_engine: Any, das: dict[str, Any]
) -> None:
    """Drafts of any length, in any step, on the device, while the host schedules
    ahead.
    """
    reference = v2_engine(das=None, rounds=stock(CHANGED))
    result = v2_engine(das=das, rounds=FRESH, sabotage="any draft length")
    drafted_on_v2(result, reference)
    drafted = [found["stats"]["self_counts"][0] for found in result]
    # the history may be faster than the copy, later
    assert drafted[0] > 50 and (das is BOTH or min(drafted) > 10)
    assert {found["lookahead"] for found in result} == {5}
    # before and after; what is drafted beyond a request's end is not accepted
    assert min(rates(result)) > 0.8
    assert result[3]["fresh_copy"]  # bit for bit
    assert result[3]["stats"]["requantise_s"] > 0
    assert result[3]["compared"]["unequal"] > 20  # steps


@pytest.mark.parametrize("alone", [False, True], ids=["with a host", "without a host"])
def test_nothing_is_learned_from_vllms_warm_up(v2_engine: Any, alone: bool) -> None:
    """Its steps are none of the run's, its passes are not counted, and its texts are no
    history.
    """
    rounds = stock(synced(two_rounds(requests(shortened(PLAIN, 12), 6))))
    das = {"drafter": "history", "history": {"device_bytes": "2MiB"}} if alone else SELF
    cold, warm = (
        v2_engine(
            das=das,
            rounds=rounds,
            standalone=alone,
            sabotage=f"any draft length{warmed_up}",
        )
        for warmed_up in ("", ", warmed up")
    )
    assert tokens(warm) == tokens(cold)
    assert [found["stats"]["error"] for found in warm + cold] == [None] * 4
    for found, expected in zip(warm, cold, strict=True):
        for name in ("drafter_passes", "draft_tokens", "accepted_tokens", "steps"):
            assert found["stats"].get(name) == expected["stats"].get(name)
    if alone:
        assert warm[-1]["compared"]["empty"] == 0
    else:
        assert warm[0]["stats"]["drafter_passes"] > 0


def test_the_copy_drafts_within_a_requests_top_k_and_top_p(v2_engine: Any) -> None:
    """Of the tokens that it would draft outside none would be accepted."""
    limited = [{"temperature": 2.0, "top_k": 2}, {"temperature": 2.0, "top_p": 0.4}]
    rounds = synced([Round(requests(shortened(limited, 40), 6))])
    result = v2_engine(das={**SELF, **ALWAYS}, rounds=rounds)
    assert tokens(result) == tokens(v2_engine(das=None, rounds=stock(rounds)))
    assert min(rates(result)) > 0.8


@pytest.mark.long
@pytest.mark.parametrize("das", [SELF, BOTH], ids=drafter)
def test_drafts_in_every_step_and_passes_that_fill_up_a_graph_draft_as_well(
    v2_engine: Any, das: dict[str, Any]
) -> None:
    reference = v2_engine(das=None, rounds=stock(CHANGED))
    plain, replayed = (
        v2_engine(das={**das, **ALWAYS}, rounds=CHANGED, sabotage=sabotage)
        for sabotage in (None, "replayed passes")
    )
    assert tokens(replayed) == tokens(plain) == tokens(reference)
    for found, expected in zip(replayed, plain, strict=True):
        assert found["stats"]["self_counts"] == expected["stats"]["self_counts"]
    assert replayed[-1]["compared"]["replayed"] > 100


@pytest.mark.long
def test_the_kernels_themselves_write_the_tokens_of_what_stands_in_for_them(
    v2_engine: Any,
) -> None:
    rounds = synced([Round(requests(shortened(PLAIN, 12), 3))])
    chunks = {"max_num_batched_tokens": 32, "block_size": 32}
    result = v2_engine(
        das={**SELF, **ALWAYS}, rounds=rounds, engine=chunks, interpreted=True
    )
    assert tokens(result) == tokens(
        v2_engine(das=None, rounds=stock(rounds), engine=chunks)
    )
    assert result[0]["stats"]["accepted_tokens"] > 10
    assert result[0]["compared"]["compute_slot_mappings"] > 10


@pytest.mark.long
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("das", [SELF, BOTH], ids=drafter)
def test_the_copy_sleeps_and_wakes_with_the_weights(
    v2_engine: Any, das: dict[str, Any], level: int
) -> None:
    awake, asleep = (
        v2_engine(
            das={**das, **ALWAYS}, rounds=[replace(ROUNDS[0], sleep=slept), *ROUNDS[1:]]
        )
        for slept in (None, level)
    )
    assert tokens(asleep) == tokens(awake)
    for found, expected in zip(asleep, awake, strict=True):
        assert [module for module in found["pooled"] if "quantised" not in module] == []
        assert found["stats"]["error"] is None
        assert found["stats"]["self_counts"] == expected["stats"]["self_counts"]
    assert any("quantised" in module for module in asleep[0]["pooled"])


@pytest.mark.long
def test_an_engine_without_a_host_quantises_the_weights_that_were_loaded(
    v2_engine: Any,
) -> None:
    first, second = two_rounds(requests(shortened(PLAIN, 60), 9))
    first, second = stock([replace(first, perturb=1.0), second])
    reference = v2_engine(das=None, rounds=[first, second])
    rounds = [first, replace(second, fresh_copy=True)]
    result = v2_engine(das={**SELF, **ALWAYS}, rounds=rounds, standalone=True)
    assert tokens(result) == tokens(reference)
    assert result[1]["runner"] == V2_RUNNER
    assert result[1]["fresh_copy"]
    assert min(rates(result)) > 0.8


def test_no_pass_is_made_for_drafts_that_no_request_can_use(
    v2_engine: Any, newest_env: dict[str, str]
) -> None:
    """From vLLM 0.33 on: all requests get their last token in the same step."""
    output = Path(newest_env["PYTHONPATH"]) / "vllm/v1/core/sched/output.py"
    rounds = synced([Round(requests(shortened(PLAIN, 6), 6, ignore_eos=True))])
    (found,) = v2_engine(
        das=SELF, rounds=rounds, sabotage="any draft length, reading along"
    )
    assert found["stats"]["drafter_passes"] == (
        5 if "skip_drafts" in output.read_text() else 6
    )
    assert found["stats"]["accepted_tokens"] > 0
