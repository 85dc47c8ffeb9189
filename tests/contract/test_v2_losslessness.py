"""On vLLM's V2 model runner with asynchronous scheduling: whatever is drafted, the
tokens are stock vLLM's.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import Request, Round
from requested import (
    ALWAYS,
    EVERY_ON_V2,
    OFF,
    PLAIN,
    lossless_v2,
    nightly,
    prompts,
    renamed,
    requests,
    shortened,
    stock,
    synced,
    tokens,
    two_rounds,
)

from das_adapter.protocol.decision_log import LoggedRollout, read
from das_adapter.protocol.label import Labeller

SMALL = {"history": {"device_bytes": "2MiB"}}
HISTORY = {"drafter": "history", **ALWAYS, **SMALL}
ARMS: dict[str, dict[str, Any]] = {
    "history": {"das": HISTORY},
    "crowded": {
        "das": HISTORY,
        "engine": {"block_size": 32, "num_gpu_blocks_override": 18},
        "sabotage": "small chunks",
    },
    "controlled": {"das": SMALL},
    "drafted": {"das": SMALL, "sabotage": "slow policy"},
    "small steps": {
        "das": SMALL,
        "engine": {"max_num_batched_tokens": 40},
        "sabotage": "slow policy",
    },
    "garbage": {"das": HISTORY, "sabotage": "garbage drafts"},
    "failing": {"das": HISTORY, "sabotage": "failing drafter"},
    "preempted": {
        "das": SMALL,
        "engine": {"block_size": 32, "num_gpu_blocks_override": 18},
        "sabotage": "slow policy",
    },
    "off": {"das": OFF},
}
CI = ("history", "crowded", "drafted")
CONTROLLED = ("controlled", "drafted", "preempted")


def assert_logged(rollouts: list[LoggedRollout], result: list[dict[str, Any]]) -> None:
    """The decision log has every rollout, with all its requests, tokens and draft
    tokens.
    """
    assert sorted(rollout.version for rollout in rollouts) == [1, 2, 3, 4]
    for rollout, found in zip(
        sorted(rollouts, key=lambda r: r.version), result, strict=True
    ):
        assert rollout.steps
        assert sorted(r.tokens for r in rollout.requests) == sorted(
            map(len, found["tokens"])
        )
        (counts,) = rollout.counts
        for name in ("draft_tokens", "accepted_tokens", "tokens"):
            assert counts[name] == found["stats"][name]
        # fillers too; timed steps
        assert (
            sum(step.drafted for step in rollout.steps) >= 0.5 * counts["draft_tokens"]
        )


ROUNDS = synced(
    two_rounds(requests(shortened(PLAIN, 60))),
    two_rounds(requests(shortened(EVERY_ON_V2, 30))),
)
"""Twelve requests with nothing but a temperature, twice, and twelve with every
parameter, twice.
"""
CHANGED = [
    replace(part, perturb=0.3) if number == 2 else part
    for number, part in enumerate(ROUNDS)
]
"""The same; the last weight sync changes the weights."""


@pytest.mark.parametrize(
    "arm", [*CI, *nightly(*(arm for arm in ARMS if arm not in CI))]
)
def test_tokens_and_logprobs_are_stock_vllms(
    v2_engine: Any, arm: str, tmp_path: Path
) -> None:
    reference = v2_engine(das=None, rounds=stock(CHANGED))
    job = ARMS[arm]
    if arm in CONTROLLED:
        job = {**job, "das": {**job["das"], "log_dir": str(tmp_path)}}
    result = v2_engine(**job, rounds=CHANGED)
    for expected, found in zip(reference, result, strict=True):
        assert (
            found["runner"] == expected["runner"] == "vllm.v1.worker.cpu.model_runner"
        )
        assert found["asynchronous"] and expected["asynchronous"]
        assert (found["stats"]["model_runner"], found["hello"]["runner"]) == (2, "V2")
        assert found["tokens"] == expected["tokens"]
        assert found["misplaced"] == found["reused"] == 0 < found["audited"]
        for text, a, b in zip(
            found["tokens"], expected["logprobs"], found["logprobs"], strict=True
        ):
            assert len(b) == len(text) > 0
            np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)
    if arm in ("history", "crowded", "drafted", "small steps", "garbage"):
        assert sum(r["stats"]["draft_tokens"] for r in result) > 300
    if arm not in ("controlled", "garbage", "failing", "off"):
        assert sum(r["stats"]["accepted_tokens"] for r in result) > 20
    if arm in CONTROLLED:
        assert_logged(read(tmp_path), result)
    if arm == "drafted":
        assert result[-1]["compared"]["unequal"] > 20  # steps
        steps = sum(r["stats"]["steps"] for r in result)
        # the others are silent
        assert 0 < result[-1]["compared"]["proposed"] < 0.8 * steps
    if arm == "preempted":
        assert result[-1]["preemptions"] > 0
    if arm == "crowded":
        assert result[-1]["preemptions"] > 0 == reference[-1]["preemptions"]
        assert result[-1]["compared"]["chunks"] > 100


def test_the_last_weight_sync_changes_what_is_written(v2_engine: Any) -> None:
    reference = v2_engine(das=None, rounds=stock(CHANGED))
    assert (
        v2_engine(das=None, rounds=stock(CHANGED[3:]))[0]["tokens"]
        != reference[3]["tokens"]
    )


def test_history_of_the_last_round_is_drafted_and_accepted(v2_engine: Any) -> None:
    first, second = v2_engine(**ARMS["history"], rounds=CHANGED)[:2]
    pace = [
        r["stats"]["tokens"] / r["stats"]["request_forwards"] for r in (first, second)
    ]
    assert pace[1] > 1.3 * pace[0] > 1.3
    assert second["stats"]["history_tokens"] == sum(map(len, first["tokens"]))
    assert (second["stats"]["history_requests"], second["stats"]["history_hits"]) == (
        12,
        12,
    )
    assert second["stats"]["tokens"] == sum(map(len, second["tokens"]))


@pytest.mark.parametrize("others", ["auto", *nightly("off")])
def test_a_first_visit_drafts_what_other_problems_wrote(
    v2_engine: Any, others: str
) -> None:
    first = requests(shortened(PLAIN, 60))
    rounds = synced([Round(first), Round(renamed(first))])
    das = {**HISTORY, "history": {**SMALL["history"], "others": others}}
    one, two = v2_engine(das=das, rounds=rounds)
    assert two["tokens"] == one["tokens"]
    assert two["stats"]["history_hits"] == 0
    pace = [r["stats"]["tokens"] / r["stats"]["request_forwards"] for r in (one, two)]
    assert (pace[1] > 1.5 * pace[0]) == (others == "auto")


def test_the_kernels_themselves_write_the_tokens_of_what_stands_in_for_them(
    v2_engine: Any,
) -> None:
    reference = v2_engine(das=None, rounds=stock(CHANGED))[2:]
    das = {**HISTORY, "max_draft_tokens": 2}
    first, second = synced(two_rounds(requests(shortened(EVERY_ON_V2, 4), 9)))
    rounds = [replace(first, perturb=CHANGED[2].perturb), second]
    result = v2_engine(das=das, rounds=rounds, interpreted=True)
    for found, expected in zip(result, reference, strict=True):
        assert found["tokens"] == [tokens[:4] for tokens in expected["tokens"][:9]]
    assert result[1]["stats"]["draft_tokens"] > 5
    assert len(result[1]["compared"]) == 18
    assert min(result[1]["compared"].values()) > 1


@pytest.mark.long
def test_with_lengths_of_their_own_as_many_tokens_are_accepted(v2_engine: Any) -> None:
    """Beside one length for all, where tokens cost nothing."""
    own = v2_engine(**ARMS["drafted"], rounds=ROUNDS)
    one = v2_engine(
        **{**ARMS["drafted"], "sabotage": "slow policy of one length"}, rounds=ROUNDS
    )
    assert tokens(own) == tokens(one)
    drafted, accepted = (
        [sum(r["stats"][name] for r in arm) for arm in (own, one)]
        for name in ("draft_tokens", "accepted_tokens")
    )
    assert accepted[0] > 0.95 * accepted[1]
    assert drafted[0] < 1.1 * drafted[1]


@pytest.mark.long
def test_verification_by_ratio_would_write_other_tokens(v2_engine: Any) -> None:
    reference = v2_engine(das=None, rounds=stock(ROUNDS))
    rounds = [
        replace(part, refresh=version)
        for version, part in enumerate(stock(ROUNDS[:2]), 1)
    ]
    result = v2_engine(das={**HISTORY, "verify": {"noise": "stock"}}, rounds=rounds)
    assert result[1]["stats"]["accepted_tokens"] > 50
    assert result[1]["tokens"] != reference[1]["tokens"]


@pytest.mark.parametrize("sabotage", [None, *nightly("small chunks")])
def test_log_probabilities_of_chosen_tokens_are_stock_vllms(
    v2_engine: Any, sabotage: str | None
) -> None:
    """Others verify drafts meanwhile, but in no step that such a request is in."""
    chosen = {
        "temperature": 1.0,
        "logprobs": None,
        "logprob_token_ids": [25, 31, 42],
        "max_tokens": 20,
    }
    rounds = synced(two_rounds(requests([*shortened(PLAIN, 60), chosen])))
    reference = v2_engine(das=None, rounds=stock(rounds))
    result = v2_engine(das=HISTORY, rounds=rounds, sabotage=sabotage)
    for expected, found in zip(reference, result, strict=True):
        assert found["tokens"] == expected["tokens"]
        assert len(found["chosen"]) == 6
        for a, b in zip(
            chain(*expected["chosen"]), chain(*found["chosen"]), strict=True
        ):
            assert b == pytest.approx(a, abs=2e-5)
            assert b.keys() >= {"25", "31", "42"}
        assert found["stats"]["accepted_tokens"] > 10


STOPS = [
    {"stop": ["7"]},
    {"stop_token_ids": [30, 31], "ignore_eos": True},
    {"logprobs": 3, "temperature": 0.8, "top_p": 0.9},
]


@pytest.mark.long
def test_stops_chunked_prompts_cached_prefixes_aborts_new_weights_and_sleep_change_no_token(
    v2_engine: Any,
) -> None:
    first, second = two_rounds(requests(shortened(STOPS, 40)))
    rounds = synced(
        [replace(first, perturb=0.02), replace(second, aborted=4)],
        [replace(second, sleep=2), replace(first, sleep=1), first],
    )
    small = {
        "max_num_batched_tokens": 24,
        "block_size": 32,
        "enable_prefix_caching": True,
    }
    result = lossless_v2(v2_engine, HISTORY, rounds, engine=small)
    written = tokens(result)
    assert written[1] == written[2]  # by other weights than the first and the last
    assert written[0] == written[3] == written[4]
    assert min(r["stats"]["accepted_tokens"] for r in result[1:]) > 10
    assert result[-1]["stats"]["error"] is None


@pytest.mark.long
def test_an_engine_without_a_host_drafts_from_what_it_wrote_before_the_weights_changed(
    v2_engine: Any,
) -> None:
    ends = [
        {"temperature": 1.0},
        {"stop_token_ids": [30, 31]},
        {"temperature": 1.0, "ignore_eos": True},
    ]
    first, second = two_rounds(requests(shortened(ends, 40), 9))
    rounds = [Round(first.requests, perturb=0.02), Round(second.requests)]
    # its clients name the problems
    trusted = {
        **HISTORY,
        "history": {**SMALL["history"], "scope": "trusted"},
    }
    result = lossless_v2(v2_engine, trusted, rounds, standalone=True)
    assert result[1]["runner"] == "vllm.v1.worker.cpu.model_runner"
    assert result[1]["asynchronous"]
    assert result[0]["stats"]["history_tokens"] == 0
    assert result[1]["stats"]["history_tokens"] == sum(map(len, result[0]["tokens"]))
    assert result[1]["stats"]["accepted_tokens"] > 20


@pytest.mark.long
def test_nemo_rls_hooks_label_harvest_and_refresh(v2_engine: Any) -> None:
    """Through the run's history under Ray, with weights that change at the refit."""
    labeller = Labeller(0, source="1")

    def labelled() -> list[Request]:
        return [r.having(seed=labeller.label(r.prompt, False).seed) for r in asked]

    asked = [
        Request(p, {"temperature": 1.0, "max_tokens": 40})
        for p in prompts(4)
        for _ in range(3)
    ]
    rounds = [Round(asked, refit=0.1), Round(asked, refit=0.1), Round(asked)]
    plain = [
        Round(labelled(), perturb=0.1),
        Round(labelled(), perturb=0.1),
        Round(labelled()),
    ]
    reference = v2_engine(das=None, rounds=plain)
    result = v2_engine(das=HISTORY, rounds=rounds, nemo_rl=True)
    assert tokens(result) == tokens(reference)
    assert all(
        (r["runner"], r["stats"]["error"]) == ("vllm.v1.worker.cpu.model_runner", None)
        for r in result
    )
    written = [sum(map(len, r["tokens"])) for r in result]
    assert [r["stats"]["history_tokens"] for r in result] == [
        0,
        written[0],
        written[0] + written[1],
    ]
    assert [r["stats"]["history_hits"] for r in result] == [0, 12, 12]
    assert [r["stats"]["weight_version"] for r in result] == [0, 1, 2]
    assert min(r["stats"]["accepted_tokens"] for r in result[1:]) > 50


@pytest.mark.long
def test_grammars_hold_and_draw_stock_vllms_tokens(v2_engine: Any) -> None:
    grammars = [
        {"structured_outputs": {"regex": "[0-9]{1,3}( [0-9]{1,3}){2,9}"}},
        {"temperature": 1.0},
    ]
    rounds = synced(two_rounds(requests(shortened(grammars, 30), 6)))
    result = lossless_v2(v2_engine, HISTORY, rounds)
    assert result[1]["stats"]["accepted_tokens"] > 10


def test_samples_of_one_request_and_resumed_requests_draw_stock_vllms_tokens(
    v2_engine: Any,
) -> None:
    """Seeds count on from sample to sample. Of a resumed request what it has written
    before is text of its own, from which its sibling, with the same seed, is
    drafted.
    """
    prompt = prompts(1)[0]

    def asked(
        label: dict[str, int], prompt: list[int] = prompt, **params: Any
    ) -> Request:
        return Request(
            prompt,
            {"max_tokens": 30, "temperature": 1.0, "ignore_eos": True, **params},
            label,
        )

    together = [
        asked({"das_problem": 0, "das_seed": 70}, n=3),
        asked({"das_problem": 1}, seed=77, n=2),
        *[asked({"das_problem": 2})] * 6,
    ]
    alone = [asked({}, seed=seed) for seed in (70, 71, 72, 77, 78)]
    texts = v2_engine(das=None, rounds=[Round(alone)])[0]["tokens"]
    label = {"das_problem": 3, "das_seed": 70}
    resumed = asked(
        {**label, "das_start": len(prompt)}, [*prompt, *texts[0][:20]], max_tokens=1
    )
    rounds = [
        Round(together, refresh=1, unrecorded=True),
        Round([resumed], unrecorded=True),
        Round([asked(label)], refresh=2, unrecorded=True),
    ]
    many, again, sibling = v2_engine(das=HISTORY, rounds=rounds)
    assert many["samples"][:2] == [texts[:3], texts[3:]]
    # without a seed each has its own
    assert len(set(map(tuple, many["tokens"][2:]))) > 1
    assert again["tokens"] == [texts[0][20:21]]
    assert sibling["tokens"] == texts[:1]
    assert sibling["stats"]["accepted_tokens"] > 15


@pytest.mark.long
def test_the_v1_runner_is_taken_where_it_is_needed(v2_engine: Any) -> None:
    """And where it is not, the runner is vLLM's own choice; the tokens are the same."""
    rounds = [Round(requests([{"temperature": 1.0, "max_tokens": 8}], 3))]
    reference = v2_engine(das=None, rounds=stock(rounds))[0]
    v1 = "vllm.v1.worker.cpu_model_runner"
    looked_up = {"drafter": "ngram"}
    for job, chosen, runner in (
        ({"das": HISTORY}, "0", v1),
        ({"das": HISTORY}, None, reference["runner"]),
        ({"das": {"drafter": "self"}}, None, reference["runner"]),
        ({"das": {"drafter": "self"}}, "0", v1),
        ({"das": looked_up}, None, v1),
        ({"das": looked_up, "standalone": True}, None, v1),
    ):
        # whose clients may not say what hosts do
        asked = stock(rounds) if "standalone" in job else rounds
        result = v2_engine(
            **job, env={"VLLM_USE_V2_MODEL_RUNNER": chosen}, rounds=asked
        )[0]
        assert result["runner"] == runner
        assert result["asynchronous"] == (runner != v1)
        assert result["tokens"] == reference["tokens"]


def test_a_nodes_history_is_drafted_from_and_that_of_other_nodes_when_it_comes(
    v2_engine: Any, tmp_path: Path
) -> None:
    """As hosts bring it, without a weight sync between the first round, which finds
    nothing, and the second. The next ones draft from what the sync before them has
    sealed: the same tokens, which are on the device in no other form.
    """
    first, second = two_rounds(requests(shortened(PLAIN, 40)))

    def unrecorded(
        part: Round,
    ) -> list[Request]:  # whose text no later request finds live
        return [r.labelled(das_record=0) for r in part.requests]

    guests = Round(unrecorded(first), visit=str(tmp_path / "guests"))
    own = replace(second, refresh=1, shared=str(tmp_path / "own"))
    third = Round([r.labelled(das_seed=9000 + i) for i, r in enumerate(first.requests)])
    sealed = Round(unrecorded(third), refresh=2, shared=str(tmp_path / "own"))
    result = lossless_v2(v2_engine, HISTORY, [guests, own, second, sealed, third])
    counted = [r["stats"] for r in result if r["stats"]["request_forwards"]]
    pace = [stats["tokens"] / stats["request_forwards"] for stats in counted]
    assert min(pace[1:]) > 1.2 * pace[0] > 2.0  # the same tokens are written again
    assert [stats["history_hits"] for stats in counted] == [12] * 3


@pytest.mark.long
def test_many_weight_syncs_leave_nothing_behind(v2_engine: Any) -> None:
    asked = requests([{"temperature": 1.0, "max_tokens": 12}], 6)
    rounds = [Round(asked, refresh=version, brief=True) for version in range(1, 52)]
    result = v2_engine(
        das={**HISTORY, "history": {"device_bytes": "1MiB"}}, rounds=rounds
    )
    assert result[-1]["memory"] - result[8]["memory"] < 4 * 2**20
    assert result[-1]["stats"]["accepted_tokens"] > 20
    assert result[-1]["stats"]["history_hits"] == 6
