"""A weight sync on a real engine in float32: what the host writes into the policy
reaches everything that drafts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from jobs import Round
from requested import (
    HISTORY,
    HOST,
    MIXED,
    OFF,
    PLAIN,
    SELF,
    drafter,
    nightly,
    requests,
    tokens,
    two_rounds,
)

pytestmark = pytest.mark.one_build


@pytest.mark.parametrize("das", [SELF, MIXED], ids=drafter)
def test_the_drafter_follows_the_policy(engine: Any, das: dict[str, Any]) -> None:
    first, second = two_rounds(requests(PLAIN))
    rounds = [replace(first, perturb=0.05), replace(second, fresh_copy=True)]
    reference = engine(das=OFF, rounds=rounds, env=HOST)
    result = engine(das=das, rounds=rounds, env=HOST)
    unchanged = engine(das=OFF, rounds=[first, second], env=HOST)
    assert reference[1]["tokens"] != unchanged[1]["tokens"]  # the policy changed
    assert tokens(result) == tokens(reference)  # and no old KV or draft is left
    assert result[1]["fresh_copy"]  # bit for bit
    assert result[1]["stats"]["requantise_s"] > 0
    if das is MIXED:
        assert result[1]["stats"]["history_tokens"] == sum(
            map(len, result[0]["tokens"])
        )


def test_a_text_that_ends_with_the_last_step_before_a_sync_is_not_live_after_it(
    engine: Any,
) -> None:
    (asked,) = requests([{"temperature": 1.0, "ignore_eos": True}], 3)[:1]
    part = Round([asked], refresh=100, unrecorded=True)
    first, second = engine(das=HISTORY, rounds=[part, part])
    assert second["tokens"] == first["tokens"]
    assert 0 < second["stats"]["accepted_tokens"] == first["stats"]["accepted_tokens"]


def test_a_copy_that_is_not_quantised_anew_drafts_for_the_old_policy(
    engine: Any,
) -> None:
    first, second = two_rounds(requests(PLAIN))
    rounds = [replace(first, perturb=1.0), second]
    rate = [
        r[1]["stats"]["accepted_tokens"] / r[1]["stats"]["draft_tokens"]
        for r in (
            engine(das=SELF, rounds=rounds, env=HOST),
            engine(das=SELF, rounds=rounds, env=HOST, sabotage="stale copy"),
        )
    ]
    assert rate[0] > rate[1] + 0.1


def test_fifty_syncs_hold_the_memory(engine: Any) -> None:
    asked = requests(PLAIN, 3, max_tokens=30)
    part = [Round(asked, refresh=i + 1, perturb=0.001, brief=True) for i in range(60)]
    result = engine(das=MIXED, rounds=part, env=HOST)
    memory = [r["memory"] for r in result]
    assert max(memory[-10:]) - max(memory[10:20]) < 4 * 2**20
    assert {r["stats"]["drafter_bytes"] for r in result} == {
        result[0]["stats"]["drafter_bytes"]
    }
    assert not any(r["stats"]["error"] for r in result)


@pytest.mark.parametrize(
    ("das", "level"),
    [
        (HISTORY, 2),
        (MIXED, 1),
        *nightly((HISTORY, 1), (SELF, 1), (SELF, 2), (MIXED, 2)),
    ],
    ids=drafter,
)
def test_sleep_and_wake_leave_the_tokens(
    engine: Any, das: dict[str, Any], level: int
) -> None:
    first, second = two_rounds(requests(PLAIN))
    plain = engine(das=das, rounds=[first, second], env=HOST)
    slept = engine(das=das, rounds=[replace(first, sleep=level), second], env=HOST)
    assert tokens(slept) == tokens(plain)
    assert (
        slept[1]["stats"]["accepted_tokens"] == plain[1]["stats"]["accepted_tokens"] > 0
    )
    # the copy sleeps too
    assert any("quantised" in module for module in slept[0]["pooled"]) == (
        das is not HISTORY
    )


def test_slots_for_drafts_are_reserved(engine: Any) -> None:
    """Requests that end their blocks (128 tokens) while drafting, beside others: nobody
    writes into a neighbour's.
    """
    asked = requests(PLAIN, 6, max_tokens=300, ignore_eos=True)
    reference, result = (engine(das=das, rounds=[Round(asked)]) for das in (OFF, SELF))
    assert result[0]["tokens"] == reference[0]["tokens"]
    assert result[0]["lookahead"] == 5
    assert reference[0]["lookahead"] == 0
