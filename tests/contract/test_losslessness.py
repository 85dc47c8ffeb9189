"""On a real engine in float32: whatever is drafted, the tokens and their
log-probabilities are the same.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import Request, Round
from requested import (
    EVERY_PARAMETER,
    HISTORY,
    LORA,
    MIXED,
    OFF,
    PLAIN,
    SELF,
    SMALL,
    STOP_STRINGS,
    drafter,
    lora,
    lossless,
    nightly,
    prompts,
    renamed,
    requests,
    tokens,
    two_rounds,
)

pytestmark = pytest.mark.one_build

ARMS = {
    "history": {"das": HISTORY},
    "controlled": {"das": {}, "sabotage": "dear drafter"},
    "garbage": {"das": HISTORY, "sabotage": "garbage drafts"},
    "failing": {"das": HISTORY, "sabotage": "failing drafter"},
    "in chunks": {"das": HISTORY, "sabotage": "small chunks"},
    "ngram": {"das": {**HISTORY, "drafter": "ngram"}},
    "self": {"das": SELF},
    "history+self": {"das": MIXED},
    "controlled self": {"das": {"drafter": "history+self"}, "sabotage": "slow policy"},
}


@pytest.mark.parametrize(
    ("arm", "params"),
    [
        *(
            pytest.param(
                arm, EVERY_PARAMETER + STOP_STRINGS, id=f"every-parameter-{arm}"
            )
            for arm in ARMS
        ),
        *(
            pytest.param(arm, PLAIN, id=f"plain-{arm}", marks=pytest.mark.long)
            for arm in ARMS
        ),
    ],
)
def test_tokens_and_logprobs_do_not_depend_on_the_drafter(
    engine: Any, arm: str, params: list[dict[str, Any]]
) -> None:
    rounds = two_rounds(requests(params))
    reference = engine(das=OFF, rounds=rounds)
    result = engine(**ARMS[arm], rounds=rounds)
    for expected, found in zip(reference, result, strict=True):
        assert found["tokens"] == expected["tokens"]
        for audited in (found, expected):
            assert audited["misplaced"] == audited["reused"] == 0 < audited["audited"]
        for text, a, b in zip(
            found["tokens"], expected["logprobs"], found["logprobs"], strict=True
        ):
            assert len(b) == len(text) > 0
            np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)
    if arm != "controlled":
        assert sum(r["stats"]["draft_tokens"] for r in result) > 50
    if arm not in ("controlled", "garbage", "failing"):
        assert sum(r["stats"]["accepted_tokens"] for r in result) > 20
    if arm == "in chunks":
        assert all(r["noted"]["chunks"] > 1 for r in result)


def test_without_a_drafter_no_token_depends_on_the_scheduling(engine: Any) -> None:
    """vLLM schedules asynchronously where nobody drafts on the host, and few requests
    at a time where room is short.
    """
    rounds = two_rounds(requests(EVERY_PARAMETER))
    crowded = {"async_scheduling": True, "max_num_seqs": 5}
    result = engine(das=OFF, engine=crowded, asynchronous=True, rounds=rounds)
    for expected, found in zip(engine(das=OFF, rounds=rounds), result, strict=True):
        assert found["asynchronous"] and not expected["asynchronous"]
        assert found["tokens"] == expected["tokens"]
        assert found["misplaced"] == found["reused"] == 0 < found["audited"]


def test_history_of_the_last_round_is_drafted_and_accepted(engine: Any) -> None:
    first, second = engine(das=HISTORY, rounds=two_rounds(requests(PLAIN)))
    pace = [
        r["stats"]["tokens"] / r["stats"]["request_forwards"] for r in (first, second)
    ]
    assert pace[1] > 1.3 * pace[0]
    assert first["stats"]["history_tokens"] == 0
    assert second["stats"]["history_tokens"] == sum(map(len, first["tokens"]))


@pytest.mark.parametrize("others", nightly("auto", "off"))
def test_a_first_visit_drafts_what_other_problems_wrote(
    engine: Any, others: str
) -> None:
    first = requests(PLAIN)
    das = {**HISTORY, "history": {"others": others}}
    one, two = engine(
        das=das, rounds=[Round(first, refresh=1), Round(renamed(first), refresh=2)]
    )
    assert two["tokens"] == one["tokens"]
    assert two["stats"]["history_hits"] == 0
    pace = [r["stats"]["tokens"] / r["stats"]["request_forwards"] for r in (one, two)]
    assert (pace[1] > 1.5 * pace[0]) == (others == "auto")


def test_most_drafts_of_the_policy_copy_are_accepted(engine: Any) -> None:
    for part in engine(**ARMS["self"], rounds=two_rounds(requests(PLAIN))):
        assert (
            part["stats"]["accepted_tokens"] > 0.6 * part["stats"]["draft_tokens"] > 100
        )


def test_a_rollout_that_lost_is_followed_by_one_without_drafts(engine: Any) -> None:
    first, second = engine(**ARMS["controlled"], rounds=two_rounds(requests(PLAIN)))
    assert first["stats"]["of_stock"] > 1.5
    assert first["stats"]["reason"] is None
    assert "drafting lost a whole rollout" in second["stats"]["reason"]
    asked, silent = (
        max(part["stats"]["propose_seconds"][:14]) for part in (first, second)
    )
    assert silent < 0.03 <= asked  # what a look for drafts takes
    assert (
        first["log"].count("drafting rests for a while: drafting lost a whole rollout")
        == 1
    )


def test_a_failing_drafter_is_named_and_tries_again_at_the_next_weight_sync(
    engine: Any,
) -> None:
    result = engine(**ARMS["failing"], rounds=two_rounds(requests(PLAIN)))
    assert all("broken on purpose" in r["stats"]["error"] for r in result)
    assert result[0]["stats"]["draft_tokens"] > 0
    assert (
        result[0]["log"].count(
            "the history drafter failed; no drafts until the next weight sync"
        )
        == 2
    )
    first, second = two_rounds(requests(PLAIN))
    mended = engine(
        das=HISTORY, sabotage="drafter that fails once", rounds=[first, second]
    )
    assert mended[0]["stats"]["error"]
    assert mended[1]["stats"]["error"] is None
    assert mended[1]["stats"]["accepted_tokens"] > 50
    assert tokens(mended) == tokens(result)
    searched = engine(
        das=HISTORY, sabotage="failing search", rounds=two_rounds(requests(PLAIN))
    )
    assert all(
        "search is broken" in r["stats"]["error"] and not r["stats"]["draft_tokens"]
        for r in searched
    )
    assert tokens(searched) == tokens(result)


def test_steps_without_drafts_replay_the_graphs_of_a_stock_engine(engine: Any) -> None:
    rounds = [Round([Request(prompts(1)[0], {"max_tokens": 2})], graphs=16)]
    (stock, _), (ours, drafted) = (
        (found["graphs"], found["drafted_graphs"])
        for found in (engine(das=das, rounds=rounds)[0] for das in (None, HISTORY))
    )
    assert ours == stock
    assert drafted == [f"PIECEWISE {8 * -(-5 * n // 8)}" for n in range(1, 13)] + [
        f"NONE {5 * n}" for n in range(13, 17)
    ]
    assert stock[:4] == ["FULL 1", "FULL 2", "FULL 4", "FULL 4"]
    assert all(graph.startswith("FULL") for graph in stock)


def test_samples_of_one_request_differ_and_have_seeds_that_count_on(
    engine: Any,
) -> None:
    asked = Request(
        prompts(1)[0],
        {"max_tokens": 40, "temperature": 1.0, "ignore_eos": True},
        {"das_seed": 70},
    )
    together = engine(das=HISTORY, rounds=[Round([asked.having(n=3)])])
    alone = engine(
        das=OFF, rounds=[Round([asked.labelled(das_seed=70 + i) for i in range(3)])]
    )
    assert together[0]["samples"][0] == alone[0]["tokens"]
    assert len(set(map(tuple, alone[0]["tokens"]))) == 3


def test_collapsed_acceptance_pauses_the_drafter_until_the_next_weight_sync(
    engine: Any,
) -> None:
    long = requests(PLAIN, max_tokens=150, ignore_eos=True)
    rounds = [Round(long, refresh=1), Round(long)]
    result = engine(das=HISTORY, sabotage="garbage drafts", rounds=rounds)
    assert result[0]["log"].count("acceptance collapsed") == 2  # once a round
    for r in result:
        assert "acceptance collapsed" in r["stats"]["alarm"]
        assert 400 <= r["stats"]["drafted_forwards"] < 520  # then it drafts no more


UNDRAFTED = {
    "chosen tokens": ({"logprob_token_ids": [25, 31], "logprobs": 2}, {}),
    "thinking budget": (
        {"thinking_token_budget": 400},
        {
            "reasoning_config": {
                "reasoning_start_str": "<|user|>",
                "reasoning_end_str": "<|reserved_0|>",
            }
        },
    ),
}
"""Parameters beside which a step verifies no drafts, and the engine arguments that they
need.
"""


@pytest.mark.parametrize(
    "asked", [next(iter(UNDRAFTED)), *nightly(*list(UNDRAFTED)[1:])]
)
def test_steps_that_verify_no_drafts_say_nothing_of_the_drafter(
    engine: Any, asked: str
) -> None:
    """One request has no drafts verified; before it joins and when it has ended the
    others' drafts are accepted.
    """
    params, arguments = UNDRAFTED[asked]
    *usual, eighth, last = requests(
        [{"temperature": 0.0}], 9, max_tokens=120, ignore_eos=True
    )
    there, joins = (
        request.having(**params, max_tokens=60) for request in (eighth, last)
    )
    rounds = [
        Round([*usual, eighth, last], refresh=1),
        Round([*usual, there, last]),
        Round(
            [*usual, eighth.having(max_tokens=10), joins]
        ),  # when the others have drafts
    ]
    result = lossless(engine, HISTORY, rounds, engine={"max_num_seqs": 8, **arguments})
    for part in result[1:]:
        stats = part["stats"]
        assert stats["alarm"] is None
        assert stats["accepted_tokens"] == stats["draft_tokens"] > 300


def test_a_text_of_another_vocabulary_harms_no_other(engine: Any) -> None:
    asked = requests(PLAIN)
    clean, foreign = (
        Round(asked, refresh=1, foreign_token=token) for token in (None, 5000)
    )
    reference, result = (
        engine(das=HISTORY, rounds=[first, Round(asked)]) for first in (clean, foreign)
    )
    assert tokens(result) == tokens(reference)
    assert result[1]["stats"]["error"] is None
    assert (
        result[1]["stats"]["accepted_tokens"]
        > 0.7 * reference[1]["stats"]["accepted_tokens"]
        > 50
    )


def test_a_bad_label_is_the_error_of_its_request_alone(engine: Any) -> None:
    first, second = two_rounds(requests(PLAIN))
    bad = [
        {"das_problem": -1},
        {"das_seed": "x"},
        {"das_start": -3},
        {"das_record": [1]},
    ]
    reference = engine(das=HISTORY, rounds=[first, second])
    result = engine(
        das=HISTORY, rounds=[replace(first, refused=bad), replace(second, refused=bad)]
    )
    assert [r["refused"] for r in result] == [
        [f"{key}: found {value!r}" for label in bad for key, value in label.items()]
    ] * 2
    assert tokens(result) == tokens(reference)
    assert result[1]["stats"]["error"] is None
    assert (
        result[1]["stats"]["accepted_tokens"]
        == reference[1]["stats"]["accepted_tokens"]
        > 0
    )
    stock = engine(das=None, rounds=[Round(first.requests, refused=bad)])
    # without a block these keys mean nothing
    assert stock[0]["refused"] == [None] * len(bad)


def test_an_engine_that_comes_late_or_finds_nothing_drafts_from_what_it_has(
    engine: Any, tmp_path: Path
) -> None:
    first, second = two_rounds(requests(PLAIN))
    late = replace(first, shared=str(tmp_path), lose="generation")
    removed = replace(second, refresh=2, shared=str(tmp_path), lose="directory")
    result = lossless(engine, HISTORY, [late, removed, second])
    assert [r["stats"]["error"] for r in result] == [None] * 3
    assert (
        result[2]["stats"]["history_tokens"] == result[1]["stats"]["history_tokens"] > 0
    )
    assert result[2]["stats"]["accepted_tokens"] > 0
    assert result[0]["log"].count("das: history: ") == 1


def test_the_engine_counts_who_begins_with_history(engine: Any, tmp_path: Path) -> None:
    first, second = two_rounds(requests(PLAIN))
    validation = [
        replace(r, label={"das_problem": 99, "das_record": 0}) for r in requests(PLAIN)
    ]
    fresh = [
        replace(r, label={"das_problem": 50 + i}) for i, r in enumerate(requests(PLAIN))
    ]
    counted = engine(
        das=HISTORY, rounds=[first, Round(second.requests + validation + fresh)]
    )
    assert [
        (r["stats"]["history_requests"], r["stats"]["history_hits"]) for r in counted
    ] == [(12, 0), (24, 12)]

    lost = engine(
        das=HISTORY,
        rounds=[replace(first, shared=str(tmp_path), lose="directory"), second],
    )
    assert [r["stats"]["history_hits"] for r in lost] == [0, 0]
    assert lost[1]["tokens"] == counted[1]["tokens"][:12]


def test_the_log_says_that_a_history_is_too_small(engine: Any) -> None:
    """More problems than the history has room for: those of the first round have gone
    when they come back.
    """
    first, second = two_rounds(requests(PLAIN))
    other = Request(
        prompts(1)[0], {"temperature": 1.0, "ignore_eos": True, "max_tokens": 40}
    )
    between = Round(
        [other.labelled(das_problem=100 + i) for i in range(300)], refresh=2
    )
    das = {**HISTORY, "history": {"max_bytes": "64KiB"}}
    crowd = {"max_num_seqs": 100}
    result = engine(das=das, rounds=[first, between, second], engine=crowd)
    # bytes of a token, at least
    assert 0 < result[-1]["stats"]["history_tokens"] < 2**16 / 7
    assert "das: history: above das.history.max_bytes=65536: " in result[0]["log"]
    assert result[-1]["stats"]["history_hits"] < 12


def test_a_later_turn_drafts_from_what_came_after_and_counts_what_it_wrote(
    engine: Any,
) -> None:
    first, _ = two_rounds(requests(PLAIN))
    texts = engine(das=HISTORY, rounds=two_rounds(requests(PLAIN)))[0]["tokens"]
    later = []
    for request, text in zip(first.requests, texts, strict=True):
        # an answer and a tool's, from here on not its own
        prompt = [
            *request.prompt,
            *text[: len(text) // 2],
        ]
        later.append(
            replace(request, prompt=prompt)
            .having(ignore_eos=True)
            .labelled(das_start=len(request.prompt))
        )
    result = lossless(engine, HISTORY, [first, Round(later)])[1]
    assert result["stats"]["tokens"] == sum(map(len, result["tokens"]))
    assert 0 < result["stats"]["accepted_tokens"] < result["stats"]["tokens"]


def test_validation_text_does_not_stay(engine: Any) -> None:
    validation = Round([r.labelled(das_record=0) for r in requests(PLAIN)])
    first, second = engine(das=HISTORY, rounds=[validation, validation])
    # Drafted from its own text alone, a repeated validation is no faster than the
    # first.
    assert (
        len(second["stats"]["propose_seconds"])
        == len(first["stats"]["propose_seconds"])
        > 0
    )
    # figures are of training rollouts
    assert first["stats"]["request_forwards"] == first["stats"]["steps"] == 0


@pytest.mark.parametrize("das", [MIXED, *nightly(HISTORY, SELF)], ids=drafter)
def test_requests_near_max_model_len_draft_to_the_end_and_disturb_nobody(
    engine: Any, das: dict[str, Any]
) -> None:
    long, short = prompts(2)
    params = {"max_tokens": 100, "ignore_eos": True, "temperature": 0.0}
    near = [Request((long * 10)[:100], params), Request(short, params)]
    rounds = [Round(near, refresh=1), Round(near)]
    small = {"max_model_len": 128}
    result = lossless(engine, das, rounds, engine=small)
    assert len(result[1]["tokens"][0]) == 28
    crowded = engine(
        das=das, engine=small, rounds=rounds, sabotage="no room near max_model_len"
    )
    # junk, K for every request
    assert crowded[1]["stats"]["draft_tokens"] > result[1]["stats"]["draft_tokens"]
    assert (
        result[1]["stats"]["accepted_tokens"] >= crowded[1]["stats"]["accepted_tokens"]
    )


@pytest.mark.parametrize("das", [MIXED, *nightly(HISTORY, SELF)], ids=drafter)
def test_preempted_requests_and_cached_prefixes_keep_their_tokens(
    engine: Any, das: dict[str, Any]
) -> None:
    asked = requests(PLAIN + EVERY_PARAMETER, 24)
    rounds = two_rounds(
        [replace(r, prompt=r.prompt[:-1] * 3 + r.prompt[-1:]) for r in asked]
    )
    reference = engine(das=OFF, rounds=rounds)
    result = engine(das=das, rounds=rounds, engine=SMALL)
    assert tokens(result) == tokens(reference)
    assert all(r["misplaced"] == r["reused"] == 0 < r["audited"] for r in result)
    assert all(r["preemptions"] > 0 and r["cached"] > 500 for r in result)
    assert not any(r["stats"]["error"] for r in result)
    assert all(r["stats"]["accepted_tokens"] > 50 for r in result)


def test_a_request_that_joins_with_one_token_has_no_draft(engine: Any) -> None:
    """vLLM fills steps up with draft tokens that nobody has drafted where a prompt is
    cached but for one token.
    """
    prompt = (prompts(1)[0] * 10)[:33]
    # too short for drafts
    asked = [
        Request(prompt, {"max_tokens": 1 + i % 2, "ignore_eos": True})
        for i in range(12)
    ]
    (result,) = engine(
        das=HISTORY, rounds=[Round(asked)], engine={"block_size": 32, "max_num_seqs": 4}
    )
    assert result["cached"] == 11 * 32
    assert result["stats"]["tokens"] == 18
    assert result["stats"]["draft_tokens"] == 0


def test_empty_and_odd_requests_pass(engine: Any) -> None:
    first = prompts(1)[0]
    odd = [
        Request(first, {"max_tokens": 1, "temperature": 1.0}),
        Request(
            first,
            {"max_tokens": 30, "temperature": 1.0, "stop_token_ids": list(range(96))},
        ),
        Request([2], {"max_tokens": 10, "temperature": 1.0, "seed": 3}),
    ]
    reference = engine(das=OFF, rounds=[Round(odd, refresh=1), Round(odd)])
    result = engine(das=HISTORY, rounds=[Round(odd, refresh=1), Round(odd)])
    assert [len(t) for t in result[1]["tokens"]] == [1, 1, 10]
    # a plain vLLM seed fixes the tokens too
    assert result[1]["tokens"][2] == reference[1]["tokens"][2]


def test_without_a_block_vllm_is_stock(engine: Any) -> None:
    rounds = [
        Round(
            [
                Request(p, {"max_tokens": 40, "seed": i})
                for i, p in enumerate(prompts(4))
            ]
        )
    ]
    # without the plug-in
    (bare,) = engine(das=None, rounds=rounds, env={"VLLM_PLUGINS": ""})
    assert bare["samplers"] == ["vllm.v1.sample.sampler", "builtins"]
    off = {"das": {"drafter": "none"}, "standalone": True}
    for (found,) in (engine(das=None, rounds=rounds), engine(**off, rounds=rounds)):
        for name in ("tokens", "samplers", "runner", "configs"):
            assert found[name] == bare[name]
        for a, b in zip(bare["logprobs"], found["logprobs"], strict=True):
            # a step's rows depend on when requests arrive
            np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)


def test_what_v1_does_not_apply_to_drafted_positions_is_refused(engine: Any) -> None:
    asked = [Request(prompts(1)[0], {"max_tokens": 9, "min_tokens": 5})]
    for das in (HISTORY, {**HISTORY, "verify": {"noise": "stock"}}):
        with pytest.raises(
            RuntimeError,
            match=(
                r"das: found min_tokens=5, allowed beside drafts on vLLM's V1 .*: 0, 1"
            ),
        ):
            engine(das=das, rounds=[Round(asked)])
    # as OpenRLHF asks
    joins = {
        "temperature": 1.5,
        "min_tokens": 1,
        "stop_token_ids": list(range(25, 80)),
    }
    drafted = two_rounds(requests([{"temperature": 1.5}, joins], 36))
    lossless(engine, HISTORY, drafted, engine={"max_num_seqs": 6})


@pytest.mark.long
def test_a_lora_policy_writes_the_tokens_of_off(engine: Any, tmp_path: Path) -> None:
    first, second = two_rounds(requests(PLAIN, 6))
    rounds = [
        replace(part, adapter=lora(tmp_path / str(i)))
        for i, part in enumerate((first, second))
    ]
    result = lossless(engine, HISTORY, rounds, engine=LORA)
    assert tokens(result) != tokens(engine(das=OFF, rounds=[first, second]))
    assert result[1]["stats"]["accepted_tokens"] > 50
