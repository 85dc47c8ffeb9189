"""Models that draft on vLLM's V2 model runner, its neural drafters and the policy copy:
whatever they draft, the tokens are stock vLLM's.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from jobs import Request, Round
from requested import (
    ALWAYS,
    HOST,
    LORA,
    PLAIN,
    TWO_RANKS,
    V2_RUNNER,
    drafted_on_v2,
    lora,
    lossless_v2,
    nightly,
    requests,
    shortened,
    stock,
    synced,
    tokens,
    two_rounds,
)
from test_distribution import NOTED, assert_exact
from test_neural import assert_same_distribution, policy, trained_drafter
from test_neural import block as neural_block
from test_v2_losslessness import CHANGED

METHODS = ["draft_model", "eagle3"]
BOTH = [f"history+{method}" for method in METHODS]
PARALLEL = ["dflash", "dspark"]
"""Methods of vLLM that draft all tokens in one pass: on the V2 runner alone."""
COPY = ["self", "history+self"]
NEURAL = [*METHODS, "mtp", *PARALLEL]
EVERY = ["history", *COPY, *NEURAL, *(f"history+{method}" for method in NEURAL)]
"""Every drafter that there is on the V2 runner."""


def block(method: str, drafters: Path, **more: Any) -> dict[str, Any]:
    if method in ("history", *COPY):
        return {
            "drafter": method,
            **({"self": {"weights": "int8"}} if method in COPY else {}),
            **more,
        }
    return neural_block(method, drafters, **more)


def accepted(found: dict[str, Any]) -> float:
    """Return the share of a round's draft tokens that was accepted."""
    return float(found["stats"]["accepted_tokens"] / found["stats"]["draft_tokens"])


@pytest.mark.parametrize(
    "method",
    [
        "draft_model",
        BOTH[1],
        "history+dflash",
        *nightly("eagle3", "mtp", BOTH[0], *PARALLEL, "history+dspark"),
    ],
)
def test_tokens_do_not_depend_on_a_controlled_drafter(
    v2_engine: Any, drafters: Path, method: str
) -> None:
    """Drafts of any length, in any step, on the device, while the host schedules ahead.
    Behind steps with draft tokens a drafter replays no CUDA graph of one length: the
    policy's attention was planned for another.
    """
    # the policy for `mtp` writes the same text
    reference = v2_engine(das=None, rounds=stock(CHANGED))
    job = {
        "engine": policy(method, drafters),
        "rounds": CHANGED,
        "sabotage": "any draft length",
    }
    result = v2_engine(das=block(method, drafters), **job)
    drafted_on_v2(result, reference)
    for found in result:
        assert not found["stats"]["alarm"]
        assert found["stats"]["accepted_tokens"] > (0 if method in PARALLEL else 20)
        assert found["stats"]["tokens"] == sum(map(len, found["tokens"]))
    compared = result[-1]["compared"]
    assert compared["unequal"] > 20 < compared["behind drafts"]  # steps
    assert compared["of one length"] == 0
    # passes
    assert (
        method.removeprefix("history+") in PARALLEL
        or compared["as wanted"] == compared["calls"]
    )
    assert compared["unlike"] > 20
    assert (compared["behind"] > 0) == method.startswith("history")
    assert compared["learned"] > 1  # kinds of tokens


@pytest.mark.long
@pytest.mark.parametrize("method", [*METHODS, *PARALLEL])
def test_what_a_drafter_has_missed_it_reads_later(
    v2_engine: Any, drafters: Path, method: str
) -> None:
    """As many of its tokens are accepted as when it reads along with the policy."""
    das = block(method, drafters)
    result = v2_engine(das=das, rounds=CHANGED, sabotage="any draft length")
    along = v2_engine(
        das=das, rounds=CHANGED, sabotage="any draft length, reading along"
    )
    for late, now in zip(result, along, strict=True):
        assert (
            now["stats"]["drafter_passes"] > 1.2 * late["stats"]["drafter_passes"] > 10
        )
        for name in ("draft_tokens", "accepted_tokens"):
            assert now["stats"][name] == late["stats"][name]


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_tokens_do_not_depend_on_a_drafter_that_drafts_in_every_step(
    v2_engine: Any, engine: Any, drafters: Path, method: str
) -> None:
    """And the V1 runner, whose noise is the same, takes as many steps."""
    reference = v2_engine(das=None, rounds=stock(CHANGED))
    result = v2_engine(das=block(method, drafters, **ALWAYS), rounds=CHANGED)
    assert tokens(result) == tokens(reference)
    on_v1 = engine(das=block(method, drafters, **ALWAYS), rounds=CHANGED[:2], env=HOST)
    assert tokens(on_v1) == tokens(reference[:2])
    for a, b in zip(result, on_v1, strict=False):
        assert a["stats"]["steps"] == pytest.approx(b["stats"]["steps"], rel=0.05)


MANY = [
    Round(
        [
            r.labelled(das_seed=10_000 * version + i, das_problem=i // 6)
            for i, r in enumerate(
                requests([{"temperature": 1.0, "max_tokens": 40}], 48)
            )
        ],
        perturb=0.05 * version,
        refresh=version,
        brief=True,
    )
    for version in range(1, 6)
]
"""240 requests in groups of six, 48 before each weight sync, which changes the policy's
weights.
"""
FEW_BLOCKS = {"block_size": 32, "num_gpu_blocks_override": 24}
"""The cache holds too few of these requests, so that some are preempted and go on
later.
"""


@pytest.fixture(scope="module")
def written(v2_engine: Any) -> list[dict[str, Any]]:
    """What stock vLLM answers to many requests."""
    return v2_engine(das=None, engine=FEW_BLOCKS, rounds=stock(MANY))


@pytest.mark.long
@pytest.mark.parametrize("method", EVERY)
def test_many_requests_with_siblings_preemptions_and_weight_syncs(
    v2_engine: Any, drafters: Path, written: list[dict[str, Any]], method: str
) -> None:
    small = {"history": {"device_bytes": "2MiB"}} if "history" in method else {}
    few = {**FEW_BLOCKS, **policy(method, drafters)}
    result = v2_engine(
        das=block(method, drafters, **small),
        engine=few,
        rounds=MANY,
        sabotage="any draft length",
    )
    drafted_on_v2(result, written)
    for arm in (result, written):
        assert all(
            before < after
            for before, after in pairwise([0, *(r["preemptions"] for r in arm)])
        )
    assert result[-1]["compared"]["unequal"] > 100  # steps
    assert min(r["stats"]["accepted_tokens"] for r in result) > (
        10 if method in PARALLEL else 100
    )


@pytest.mark.long
@pytest.mark.parametrize("method", [*METHODS, "mtp"])
def test_many_requests_of_a_drafter_that_drafts_in_every_step(
    v2_engine: Any, drafters: Path, written: list[dict[str, Any]], method: str
) -> None:
    few = {**FEW_BLOCKS, **policy(method, drafters)}
    result = v2_engine(das=block(method, drafters, **ALWAYS), engine=few, rounds=MANY)
    drafted_on_v2(result, written)
    assert result[-1]["preemptions"] > 0
    assert min(r["stats"]["accepted_tokens"] for r in result) > 300


@pytest.mark.long
def test_each_weight_sync_changes_what_many_requests_get(
    v2_engine: Any, written: list[dict[str, Any]]
) -> None:
    """Beside what is written where each comes one round late."""
    late = [replace(part, perturb=before.perturb) for before, part in pairwise(MANY)]
    result = v2_engine(das=None, engine=FEW_BLOCKS, rounds=stock(late))
    assert all(a != b for a, b in zip(tokens(result), tokens(written[1:]), strict=True))


@pytest.mark.long
@pytest.mark.parametrize("method", ["history", *METHODS, BOTH[1], *COPY, *PARALLEL])
def test_requests_that_end_at_max_model_len_or_are_preempted_disturb_nobody(
    v2_engine: Any, drafters: Path, method: str
) -> None:
    """The cache holds too few requests, whose prompts are read in chunks; the second
    time their prompts are in it.
    """
    asked = requests(PLAIN, 9, max_tokens=200, ignore_eos=True)
    rounds = synced([Round(asked), Round(asked)])
    small = {
        "max_model_len": 128,
        "block_size": 32,
        "num_gpu_blocks_override": 20,
        "enable_prefix_caching": True,
    }
    small["max_num_batched_tokens"] = 64
    result = lossless_v2(
        v2_engine,
        block(method, drafters),
        rounds,
        engine=small,
        sabotage="any draft length",
    )
    assert all(
        len(r.prompt) + len(t) == 128
        for r, t in zip(asked, result[0]["tokens"], strict=True)
    )
    assert result[-1]["preemptions"] > 0
    assert [r["stats"]["error"] for r in result] == [None, None]
    assert result[1]["stats"]["accepted_tokens"] > (3 if method in PARALLEL else 20)
    assert method != "self" or all(accepted(r) > 0.8 for r in result)


@pytest.mark.long
@pytest.mark.parametrize("method", [*METHODS, "self"])
def test_each_request_has_the_better_draft_of_the_history_and_a_model(
    v2_engine: Any, drafters: Path, method: str
) -> None:
    """Where drafts are cheap, a round takes at most the steps that the better one of
    both sources alone takes.
    """
    small = {"history": {"device_bytes": "2MiB"}}
    model = v2_engine(
        das=block(method, drafters), rounds=CHANGED, sabotage="slow policy"
    )
    history = v2_engine(
        das=block("history", drafters, **small), rounds=CHANGED, sabotage="slow policy"
    )
    both = v2_engine(
        das=block(f"history+{method}", drafters, **small),
        rounds=CHANGED,
        sabotage="slow policy",
    )
    reference = v2_engine(das=None, rounds=stock(CHANGED))
    assert tokens(both) == tokens(model) == tokens(history) == tokens(reference)
    forwards = [
        [r["stats"]["request_forwards"] for r in arm] for arm in (model, history, both)
    ]
    assert sum(forwards[2]) < 1.02 * min(sum(forwards[0]), sum(forwards[1]))
    assert sum(r["stats"]["drafter_passes"] for r in both) > 50
    if method == "self":
        assert all(
            r["stats"]["drafter_passes"] > 20 and r["stats"]["self_acceptance"] > 0.8
            for r in model
        )


@pytest.mark.long
def test_the_controller_chooses_the_lengths(v2_engine: Any, drafters: Path) -> None:
    reference = v2_engine(das=None, rounds=stock(CHANGED))
    useful = v2_engine(
        das=block("eagle3", drafters), rounds=CHANGED, sabotage="slow policy"
    )
    useless = v2_engine(
        das=block("draft_model", drafters, draft={"weights": "trainer"}),
        rounds=CHANGED,
        sabotage="drafter without weights",
    )
    for result in (useful, useless):
        assert tokens(result) == tokens(reference)
    for good, bad in zip(useful, useless, strict=True):
        assert good["stats"]["draft_tokens"] > good["stats"]["request_forwards"]
        assert bad["stats"]["draft_tokens"] < 0.5 * bad["stats"]["request_forwards"]
        assert bad["stats"]["drafter_passes"] < 0.5 * bad["stats"]["steps"]


@pytest.mark.long
@pytest.mark.parametrize("method", ["history", *METHODS, "mtp"])
def test_a_lora_policy_draws_stock_vllms_tokens(
    v2_engine: Any, drafters: Path, method: str, tmp_path: Path
) -> None:
    where = lora(tmp_path / "adapter")
    rounds = [
        replace(part, adapter=where)
        for part in synced(two_rounds(requests(shortened(PLAIN, 40), 6)))
    ]
    both = {**LORA, **policy(method, drafters)}
    result = lossless_v2(
        v2_engine,
        block(method, drafters),
        rounds,
        engine=both,
        sabotage="any draft length",
    )
    assert sum(r["stats"]["accepted_tokens"] for r in result) > 10
    assert not any(r["stats"]["error"] for r in result)


LIMITED = [
    {"temperature": 1.5},
    {"temperature": 1.5, "top_k": 6},
    {"temperature": 1.5, "top_p": 0.8},
]


@pytest.mark.parametrize("method", ["self", *nightly(*METHODS, "mtp", *PARALLEL)])
def test_vllms_own_sampling_verifies_by_a_models_probabilities(
    v2_engine: Any, drafters: Path, method: str
) -> None:
    """Drafts of any length are accepted as often as the sum of min(p, q) says, and what
    is written follows p.
    """
    das = block(method, drafters, speculate="always", verify={"noise": "stock"})
    # more of its tokens are rejected
    das |= {"self": {"weights": "int4"}} if method == "self" else {}
    rounds = [Round(requests(shortened(LIMITED, 30)), copies=4, brief=True)]
    result = v2_engine(
        das=das, engine=policy(method, drafters), rounds=rounds, sabotage=NOTED
    )[0]
    assert result["runner"] == V2_RUNNER
    assert result["noted"]["model"] > 200
    assert_exact(result["noted"], "model")
    assert (
        method != "self"
        or result["noted"]["model, accepted"]
        > 1.02 * result["noted"]["model, most likely"]
    )
    assert not result["stats"]["error"]


@pytest.mark.long
def test_vllms_own_sampling_knows_which_drafts_a_failed_model_has_not_drawn(
    v2_engine: Any, drafters: Path
) -> None:
    das = block("draft_model", drafters, verify={"noise": "stock"}, **ALWAYS)
    rounds = [Round(requests(shortened(LIMITED, 6)), copies=8, brief=True)]
    how = {
        "engine": {"max_num_seqs": 96},
        "sabotage": "failing drafter, noted verification",
    }
    noted = v2_engine(das=das, rounds=rounds, **how)[0]["noted"]
    assert noted["model"] > 60
    for event in ("model, accepted", "model, rare"):
        assert abs(noted[event] - noted[f"{event}, expected"]) < 3


@pytest.mark.long
@pytest.mark.parametrize("method", [*METHODS, "mtp", "self"])
def test_vllms_own_sampling_keeps_the_distribution(
    v2_engine: Any, drafters: Path, method: str
) -> None:
    """As `test_neural.py` on V1; no request has a seed."""
    prompt = requests(PLAIN, 3)[0].prompt
    asked = [
        Request(
            prompt,
            {"max_tokens": 5, "temperature": 1.5, "ignore_eos": True, "logprobs": None},
        )
    ]
    rounds = [Round(asked, copies=800, brief=True)]
    crowd = {"max_num_seqs": 64, **policy(method, drafters)}
    off = v2_engine(das=None, engine=crowd, rounds=rounds)[0]
    das = block(method, drafters, verify={"noise": "stock"})
    drafted = v2_engine(
        das=das, engine=crowd, rounds=rounds, sabotage="any draft length"
    )[0]
    assert drafted["runner"] == off["runner"] == V2_RUNNER
    assert drafted["stats"]["accepted_tokens"] > 150
    assert_same_distribution(off["tokens"], drafted["tokens"])


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_the_trainers_weights_reach_the_drafter(
    v2_engine: Any, drafters: Path, method: str
) -> None:
    trained, second = trained_drafter(drafters, method, None)
    das = block(method, drafters, draft={"weights": "trainer"}, **ALWAYS)
    result = v2_engine(
        das=das, rounds=[trained, second], env=HOST, sabotage="drafter without weights"
    )
    rate = list(map(accepted, result))
    assert rate[1] > max(0.08, 5 * rate[0])
    assert result[1]["stats"]["alarm"] is None


@pytest.mark.long
@pytest.mark.parametrize("method", PARALLEL)
def test_a_drafter_that_the_trainer_sent_drafts_as_its_checkpoint_would(
    v2_engine: Any, drafters: Path, method: str
) -> None:
    """What is made of its weights lies where it lay before, because CUDA graphs read it
    there.
    """
    rounds = trained_drafter(drafters, method, None)
    das = block(method, drafters, draft={"weights": "trainer"}, **ALWAYS)
    found, sent = (
        v2_engine(das=das, rounds=rounds, env=HOST, sabotage=sabotage)
        for sabotage in ("weights at one place", "drafter without weights at one place")
    )
    assert (
        tokens(found)
        == tokens(sent)
        == tokens(v2_engine(das=None, rounds=stock(rounds)))
    )
    accepted = [[r["stats"]["accepted_tokens"] for r in arm] for arm in (found, sent)]
    assert accepted[0][0] > 2 * accepted[1][0]
    assert accepted[0][1] == accepted[1][1] > 20
    assert [r["stats"]["error"] for r in (*found, *sent)] == [None] * 4


@pytest.mark.parametrize("method", [*nightly(BOTH[0], "history+dflash"), BOTH[1]])
@pytest.mark.parametrize("level", [*nightly(1), 2])
def test_sleep_takes_the_memory_pools_and_leaves_the_history(
    v2_engine: Any, drafters: Path, method: str, level: int
) -> None:
    """The drafter's weights are read again; what was learned and brought to the device
    lies in no pool.
    """
    awake, asleep = (
        v2_engine(
            das=block(method, drafters),
            rounds=[replace(CHANGED[0], sleep=slept), *CHANGED[1:]],
            sabotage="any draft length",
        )
        for slept in (None, level)
    )
    assert tokens(asleep) == tokens(awake)
    for found, expected in zip(asleep, awake, strict=True):
        assert found["pooled"] == []
        assert found["stats"]["error"] is None
        assert found["stats"]["history_tokens"] == expected["stats"]["history_tokens"]
        assert (
            found["stats"]["accepted_tokens"]
            == expected["stats"]["accepted_tokens"]
            > 20
        )


@pytest.mark.long
@pytest.mark.parametrize("method", ["history", "eagle3", *COPY])
def test_a_failing_drafter_is_switched_off_and_named(
    v2_engine: Any, drafters: Path, method: str
) -> None:
    result = lossless_v2(
        v2_engine,
        block(method, drafters, **ALWAYS),
        CHANGED,
        sabotage="failing drafter",
    )
    failing = result[method == "history" :]  # which fails once there is one
    assert all("broken on purpose" in r["stats"]["error"] for r in failing)
    failed = f"the {method} drafter failed; no drafts until the next weight sync"
    assert result[0]["log"].count(failed) == len(failing)


@pytest.mark.long
def test_no_rank_waits_for_one_whose_history_failed(
    v2_engine: Any, drafters: Path
) -> None:
    rounds = synced(two_rounds(requests(shortened(PLAIN, 20), 6)))
    reference = v2_engine(das=None, rounds=stock(rounds))
    result = v2_engine(
        das=block(BOTH[1], drafters),
        rounds=rounds,
        engine=TWO_RANKS,
        sabotage="failing search",
    )
    assert tokens(result) == tokens(reference)
    assert (
        "broken on purpose" in result[1]["ranks"][0]["error"]
        and result[1]["ranks"][1]["error"] is None
    )


@pytest.mark.parametrize(
    ("method", "alone"),
    [
        (BOTH[1], False),
        *nightly(
            *product([m for m in EVERY if m != BOTH[1]], [False]),
            *product(COPY, [True]),
        ),
    ],
    ids=str,
)
def test_two_ranks_run_the_drafter_together(
    v2_engine: Any, drafters: Path, method: str, alone: bool
) -> None:
    """The first one drafts from the history; the other reads the same tokens, or the
    policy's logits would be wrong. Both give each request the same number of draft
    tokens. `alone`: no host looks after the engine.
    """
    rounds = [replace(part, requests=part.requests[:24]) for part in MANY[:2]]
    reference = v2_engine(das=None, engine=FEW_BLOCKS, rounds=stock(rounds))
    both = {**FEW_BLOCKS, **TWO_RANKS, **policy(method, drafters)}
    how = {"engine": both, "sabotage": "any draft length", "standalone": alone}
    result = v2_engine(
        das=block(method, drafters), rounds=stock(rounds) if alone else rounds, **how
    )
    one, other = result[-1]["compared_by_rank"]
    assert one["plans"] == other["plans"]
    assert one["unequal"] == other["unequal"] > 20  # steps
    assert tokens(result) == tokens(reference)
    assert [[rank["error"] for rank in r["ranks"]] for r in result] == [
        [None, None]
    ] * 2
    assert min(r["stats"]["accepted_tokens"] for r in result) > (
        5 if method in PARALLEL else 50
    )
    assert result[0]["preemptions"] > 0
    assert all(r["asynchronous"] for r in result)
    assert "history_tokens" not in result[1]["ranks"][1]
    # more of the drafts lie beyond short texts' ends
    assert method != "self" or all(accepted(r) > 0.7 for r in result)
