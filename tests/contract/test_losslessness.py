"""On a real engine in float32: whatever is drafted, the tokens and their log-probabilities are the same."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from das_adapter.protocol.metrics import faults

OFF = {"drafter": "none", "verify": {"noise": "keyed"}}
# Without the controller, whose decisions depend on how long steps take.
HISTORY = {"drafter": "history", "budget": "unlimited", "speculate": "always"}

SELF = {"drafter": "self", "budget": "unlimited", "speculate": "always"}
MIXED = {"drafter": "history+self", "budget": "unlimited", "speculate": "always"}
SMALL = {"max_num_batched_tokens": 512, "max_num_seqs": 8, "block_size": 32, "num_gpu_blocks_override": 20}
"""Engine arguments with which prompts are read in chunks, and requests wait or are preempted."""


def prompts(count: int) -> list[list[int]]:
    """Prompts of the tiny policy's task: <user> 17 a+5 b*3 ... <assistant>."""
    rng = random.Random(1)
    digits, labels = list(range(25, 35)), list(range(44, 96))
    out = []
    for _ in range(count):
        text = [2, rng.choice(digits), rng.choice(digits)]
        for i in range(rng.randrange(2, 9)):
            text += [42, labels[i + 1], rng.choice([35, 36, 37]), rng.choice(digits[2:])]
        out.append([*text, 3])
    return out


def requests(params: list[dict[str, Any]], count: int = 12) -> list[dict[str, Any]]:
    """Groups of three samples a prompt, with seeds and problems as the hosts send them."""
    return [
        {
            "prompt": prompt,
            "params": {
                "max_tokens": 80,
                **params[i % len(params)],
                "extra_args": {"das_problem": i // 3, "das_seed": 1000 + i},
            },
        }
        for i, prompt in enumerate(p for p in prompts(count // 3) for _ in range(3))
    ]


PLAIN = [{"temperature": 1.0}]
EVERY_PARAMETER = [
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    {"temperature": 1.0, "logit_bias": {25: 2.0, 26: -3.0}},
    {"temperature": 1.0, "min_tokens": 60, "top_k": 30, "top_p": 0.95},
    {"temperature": 1.2, "allowed_token_ids": list(range(1, 60))},
    {"temperature": 1.0, "bad_words": ["22", "####"]},
]
ARMS = {
    "history": {"das": HISTORY},
    "controlled": {"das": {}, "sabotage": "dear drafter"},
    "garbage": {"das": HISTORY, "sabotage": "garbage drafts"},
    "failing": {"das": HISTORY, "sabotage": "failing drafter"},
    "in chunks": {"das": HISTORY, "sabotage": "small chunks"},
    "ngram": {"das": {**HISTORY, "drafter": "ngram"}},
    "self": {"das": SELF, "sabotage": "replayed passes"},
    "history+self": {"das": MIXED},
    "controlled self": {"das": {"drafter": "history+self"}},
}


def two_rounds(requested: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same problems twice, with a weight sync in between, so that the history is warm in the second round."""
    again = [
        {**r, "params": {**r["params"], "extra_args": {**r["params"]["extra_args"], "das_seed": 5000 + i}}}
        for i, r in enumerate(requested)
    ]
    return [{"requests": requested, "refresh": 1}, {"requests": again}]


def adapter(directory: Path) -> str:
    """Write a LoRA adapter of the tiny policy with arbitrary weights."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir()
    generator, weights = torch.Generator().manual_seed(0), {}
    for layer, (name, rows) in itertools.product(range(4), (("q_proj", 256), ("v_proj", 128))):
        stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        weights[f"{stem}.lora_A.weight"] = torch.randn(8, 256, generator=generator) * 0.1
        weights[f"{stem}.lora_B.weight"] = torch.randn(rows, 8, generator=generator) * 0.1
    save_file(weights, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "base_model_name_or_path": "policy",
        "task_type": "CAUSAL_LM",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return str(directory)


@pytest.mark.one_build
@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("params", [PLAIN, EVERY_PARAMETER], ids=["plain", "every-parameter"])
def test_tokens_and_logprobs_do_not_depend_on_the_drafter(engine: Any, arm: str, params: list[dict[str, Any]]) -> None:
    rounds = two_rounds(requests(params))
    reference = engine(das=OFF, rounds=rounds)
    result = engine(**ARMS[arm], rounds=rounds)
    for expected, found in zip(reference, result, strict=True):
        assert found["tokens"] == expected["tokens"]
        for audited in (found, expected):
            assert audited["misplaced"] == audited["reused"] == 0 < audited["audited"]
        for tokens, a, b in zip(found["tokens"], expected["logprobs"], found["logprobs"], strict=True):
            assert len(b) == len(tokens) > 0
            np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)
    if not arm.startswith("controlled"):
        assert sum(r["stats"]["draft_tokens"] for r in result) > 50
    if arm == "in chunks":  # where the logits are copied to be processed
        assert all(r["noted"].get("chunks", 1) > 1 for r in result) == (params is EVERY_PARAMETER)


def test_without_a_drafter_no_token_depends_on_the_scheduling(engine: Any) -> None:
    """vLLM schedules asynchronously where nobody drafts on the host."""
    rounds = two_rounds(requests(EVERY_PARAMETER))
    result = engine(das=OFF, engine={"async_scheduling": True}, asynchronous=True, rounds=rounds)
    for expected, found in zip(engine(das=OFF, rounds=rounds), result, strict=True):
        assert found["asynchronous"] and not expected["asynchronous"]
        assert found["tokens"] == expected["tokens"]
        assert found["misplaced"] == found["reused"] == 0 < found["audited"]


def test_history_of_the_last_round_is_drafted_and_accepted(engine: Any) -> None:
    first, second = engine(das=HISTORY, rounds=two_rounds(requests(PLAIN)))
    pace = [r["stats"]["tokens"] / r["stats"]["request_forwards"] for r in (first, second)]
    assert pace[1] > 1.3 * pace[0]
    assert first["stats"]["history_tokens"] == 0
    assert second["stats"]["history_tokens"] == sum(map(len, first["tokens"]))


def test_passes_of_the_policy_copy_that_fill_up_a_graph_draft_as_well(engine: Any) -> None:
    for part in engine(**ARMS["self"], rounds=two_rounds(requests(PLAIN))):
        assert part["stats"]["drafter_graphs"] == 3
        assert part["stats"]["accepted_tokens"] > 0.6 * part["stats"]["draft_tokens"] > 100


def test_a_rollout_that_lost_is_followed_by_one_without_drafts(engine: Any) -> None:
    first, second = engine(**ARMS["controlled"], rounds=two_rounds(requests(PLAIN)))
    assert first["stats"]["of_stock"] > 1.5
    assert first["stats"]["reason"] is None
    assert "drafting lost a whole rollout" in second["stats"]["reason"]
    asked, silent = (np.median(part["stats"]["propose_seconds"][:14]) for part in (first, second))
    assert silent < 0.03 <= asked  # what a look for drafts takes
    assert first["log"].count("rollouts begin without drafts until a trial gains time") == 1


def test_a_failing_drafter_is_named_and_tries_again_at_the_next_weight_sync(engine: Any) -> None:
    result = engine(**ARMS["failing"], rounds=two_rounds(requests(PLAIN)))
    assert all("broken on purpose" in r["stats"]["error"] for r in result)
    assert result[0]["stats"]["draft_tokens"] > 0
    assert result[0]["log"].count("the history drafter failed; no drafts until the next weight sync") == 2
    first, second = two_rounds(requests(PLAIN))
    mended = engine(das=HISTORY, sabotage="drafter that fails once", rounds=[first, second])
    assert mended[0]["stats"]["error"]
    assert mended[1]["stats"]["error"] is None
    assert mended[1]["stats"]["accepted_tokens"] > 50
    assert [r["tokens"] for r in mended] == [r["tokens"] for r in result]
    searched = engine(das=HISTORY, sabotage="failing search", rounds=two_rounds(requests(PLAIN)))
    assert all("search is broken" in r["stats"]["error"] and not r["stats"]["draft_tokens"] for r in searched)
    assert [r["tokens"] for r in searched] == [r["tokens"] for r in result]


def test_steps_without_drafts_replay_the_graphs_of_a_stock_engine(engine: Any) -> None:
    rounds = [{"requests": [{"prompt": prompts(1)[0], "params": {"max_tokens": 2}}], "graphs": 16}]
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


def test_samples_of_one_request_differ_and_have_seeds_that_count_on(engine: Any) -> None:
    prompt = prompts(1)[0]

    def asked(**more: Any) -> dict[str, Any]:
        return {"prompt": prompt, "params": {"max_tokens": 40, "temperature": 1.0, "ignore_eos": True, **more}}

    together = engine(das=HISTORY, rounds=[{"requests": [asked(n=3, extra_args={"das_seed": 70})]}])
    alone = engine(das=OFF, rounds=[{"requests": [asked(extra_args={"das_seed": 70 + i}) for i in range(3)]}])
    assert together[0]["samples"][0] == alone[0]["tokens"]
    assert len(set(map(tuple, alone[0]["tokens"]))) == 3


def test_collapsed_acceptance_pauses_the_drafter_until_the_next_weight_sync(engine: Any) -> None:
    long = [{**r, "params": {**r["params"], "max_tokens": 150, "ignore_eos": True}} for r in requests(PLAIN)]
    rounds = [{"requests": long, "refresh": 1}, {"requests": long}]
    result = engine(das=HISTORY, sabotage="garbage drafts", rounds=rounds)
    assert result[0]["log"].count("acceptance collapsed") == 2  # once a round
    for r in result:
        assert 2000 <= r["stats"]["draft_tokens"] < 2600  # then it drafts no more; unpaused it would be 10 000


@pytest.mark.one_build
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_a_text_of_another_vocabulary_harms_no_other(engine: Any, tmp_path: Path, shared: bool) -> None:
    asked = requests(PLAIN)
    first = {"requests": asked, "refresh": 1, **({"shared": str(tmp_path)} if shared else {})}
    clean, foreign = ([{**first, **more}, {"requests": asked}] for more in ({}, {"foreign_token": 5000}))
    if shared:
        foreign[0] = {**foreign[0], "shared": str(tmp_path / "foreign")}
    reference, result = engine(das=HISTORY, rounds=clean), engine(das=HISTORY, rounds=foreign)
    assert [r["tokens"] for r in result] == [r["tokens"] for r in reference]
    assert result[1]["stats"]["error"] is None
    assert result[1]["stats"]["accepted_tokens"] > 0.7 * reference[1]["stats"]["accepted_tokens"] > 50
    if not shared:
        assert result[0]["log"].count("8 trajectories are no text of the policy") == 1
        assert "found token 5000, the policy's vocabulary has 96" in result[0]["log"]


def test_a_bad_label_is_the_error_of_its_request_alone(engine: Any) -> None:
    first, second = two_rounds(requests(PLAIN))
    bad = [{"das_problem": -1}, {"das_seed": "x"}, {"das_start": -3}, {"das_record": [1]}]
    reference = engine(das=HISTORY, rounds=[first, second])
    result = engine(das=HISTORY, rounds=[{**first, "refused": bad}, {**second, "refused": bad}])
    assert [r["refused"] for r in result] == [
        [f"{key}: found {value!r}" for label in bad for key, value in label.items()]
    ] * 2
    assert [r["tokens"] for r in result] == [r["tokens"] for r in reference]
    assert result[1]["stats"]["error"] is None
    assert result[1]["stats"]["accepted_tokens"] == reference[1]["stats"]["accepted_tokens"] > 0
    stock = engine(das=None, rounds=[{"requests": first["requests"], "refused": bad}])
    assert stock[0]["refused"] == [None] * len(bad)  # without a block these keys mean nothing


def test_a_history_in_shared_memory_drafts_like_an_engines_own(engine: Any, tmp_path: Path) -> None:
    first, second = two_rounds(requests(PLAIN))
    own = engine(das=HISTORY, rounds=[first, second])
    shared = engine(das=HISTORY, rounds=[{**first, "shared": str(tmp_path)}, second])
    for a, b in zip(own, shared, strict=True):
        assert a["tokens"] == b["tokens"]
        for name in ("history_tokens", "draft_tokens", "accepted_tokens"):
            assert a["stats"][name] == b["stats"][name]
    assert shared[1]["stats"]["history_tokens"] > 0


def test_an_engine_that_comes_late_or_finds_nothing_drafts_from_what_it_has(engine: Any, tmp_path: Path) -> None:
    first, second = two_rounds(requests(PLAIN))
    late = {**first, "shared": str(tmp_path), "lose": "generation"}
    removed = {**second, "refresh": 2, "shared": str(tmp_path), "lose": "directory"}
    rounds = [late, removed, second]
    result = engine(das=HISTORY, rounds=rounds)
    reference = engine(das=OFF, rounds=rounds)
    assert [r["tokens"] for r in result] == [r["tokens"] for r in reference]
    assert [r["stats"]["error"] for r in result] == [None] * 3
    assert result[2]["stats"]["history_tokens"] == result[1]["stats"]["history_tokens"] > 0
    assert result[2]["stats"]["accepted_tokens"] > 0
    assert result[0]["log"].count("das: history: ") == 1


def test_the_engine_counts_who_begins_with_history_and_says_when_it_was_lost(engine: Any, tmp_path: Path) -> None:
    first, second = two_rounds(requests(PLAIN))
    validation = [
        {**r, "params": {**r["params"], "extra_args": {"das_problem": 99, "das_record": 0}}} for r in requests(PLAIN)
    ]
    fresh = [
        {**r, "params": {**r["params"], "extra_args": {"das_problem": 50 + i}}} for i, r in enumerate(requests(PLAIN))
    ]
    counted = engine(das=HISTORY, rounds=[first, {"requests": second["requests"] + validation + fresh}])
    assert [(r["stats"]["history_requests"], r["stats"]["history_hits"]) for r in counted] == [(12, 0), (24, 12)]
    assert [r["stats"]["history_lost"] for r in counted] == [0, 0]

    lost = engine(das=HISTORY, rounds=[{**first, "shared": str(tmp_path), "lose": "directory"}, second])
    assert [r["stats"]["history_hits"] for r in lost] == [0, 0]
    assert [r["stats"]["history_lost"] for r in lost] == [0, 12]  # nothing comes back in the first round
    reason = faults([lost[1]["stats"]])["history"]
    assert reason.startswith("12 of 12 requests found no history of their problem, which the run has met before. ")
    assert "lines that begin with 'das: history:'" in reason
    assert lost[1]["tokens"] == counted[1]["tokens"][:12]


def test_a_history_that_is_too_small_is_named(engine: Any) -> None:
    """More problems than the history has room for: those of the first round have gone when they come back."""
    first, second = two_rounds(requests(PLAIN))
    params = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 40}
    others = [
        {"prompt": prompts(1)[0], "params": {**params, "extra_args": {"das_problem": 100 + i}}} for i in range(300)
    ]
    between = [{"requests": others, "refresh": 2}]
    das = {**HISTORY, "history": {"max_bytes": "64KiB"}}
    result = engine(das=das, rounds=[first, *between, second])
    assert 2**15 < result[-1]["stats"]["history_bytes"] <= 2**16
    assert "das.history.max_bytes=65536 is full: raise it" in faults([result[-1]["stats"]])["history"]


def test_a_later_turn_drafts_from_what_came_after_and_counts_what_it_wrote(engine: Any) -> None:
    first, _ = two_rounds(requests(PLAIN))
    texts = engine(das=HISTORY, rounds=two_rounds(requests(PLAIN)))[0]["tokens"]
    later = []
    for request, text in zip(first["requests"], texts, strict=True):
        extra = {**request["params"]["extra_args"], "das_start": len(request["prompt"])}
        prompt = [*request["prompt"], *text[: len(text) // 2]]  # an answer and a tool's, from here on not its own
        later.append({"prompt": prompt, "params": {**request["params"], "extra_args": extra, "ignore_eos": True}})
    result = engine(das=HISTORY, rounds=[first, {"requests": later}])[1]
    assert result["stats"]["tokens"] == sum(map(len, result["tokens"]))
    assert 0 < result["stats"]["accepted_tokens"] < result["stats"]["tokens"]
    reference = engine(das=OFF, rounds=[first, {"requests": later}])[1]
    assert result["tokens"] == reference["tokens"]


def test_validation_text_does_not_stay(engine: Any) -> None:
    validation = requests(PLAIN)
    for r in validation:
        r["params"]["extra_args"]["das_record"] = 0
    once = engine(das=HISTORY, rounds=[{"requests": validation}])
    twice = engine(das=HISTORY, rounds=[{"requests": validation}, {"requests": validation}])
    # Drafted from its own text alone, a repeated validation is no faster than the first.
    assert len(twice[1]["stats"]["propose_seconds"]) == len(once[0]["stats"]["propose_seconds"]) > 0
    assert once[0]["stats"]["request_forwards"] == once[0]["stats"]["steps"] == 0  # figures are of training rollouts


@pytest.mark.one_build
@pytest.mark.parametrize("das", [HISTORY, SELF, MIXED], ids=["history", "self", "history+self"])
def test_requests_near_max_model_len_draft_to_the_end_and_disturb_nobody(engine: Any, das: dict[str, Any]) -> None:
    long, short = prompts(2)
    near = [
        {"prompt": (long * 10)[:100], "params": {"max_tokens": 100, "ignore_eos": True, "temperature": 0.0}},
        {"prompt": short, "params": {"max_tokens": 100, "ignore_eos": True, "temperature": 0.0}},
    ]
    rounds = [{"requests": near, "refresh": 1}, {"requests": near}]
    small = {"max_model_len": 128}
    reference = engine(das=OFF, engine=small, rounds=rounds)
    result = engine(das=das, engine=small, rounds=rounds)
    assert [r["tokens"] for r in result] == [r["tokens"] for r in reference]
    assert len(result[1]["tokens"][0]) == 28
    crowded = engine(das=das, engine=small, rounds=rounds, sabotage="no room near max_model_len")
    assert crowded[1]["stats"]["draft_tokens"] > result[1]["stats"]["draft_tokens"]  # junk, K for every request
    assert result[1]["stats"]["accepted_tokens"] >= crowded[1]["stats"]["accepted_tokens"]


@pytest.mark.one_build
@pytest.mark.parametrize("das", [HISTORY, SELF, MIXED], ids=["history", "self", "history+self"])
def test_preempted_requests_and_cached_prefixes_keep_their_tokens(engine: Any, das: dict[str, Any]) -> None:
    first, second = two_rounds(requests(PLAIN + EVERY_PARAMETER, 24))
    for r in (*first["requests"], *second["requests"]):
        r["prompt"] = r["prompt"][:-1] * 3 + r["prompt"][-1:]
    reference = engine(das=OFF, rounds=[first, second])
    result = engine(das=das, rounds=[first, second], engine=SMALL)
    assert [r["tokens"] for r in result] == [r["tokens"] for r in reference]
    assert all(r["misplaced"] == r["reused"] == 0 < r["audited"] for r in result)
    assert all(r["preemptions"] > 0 and r["cached"] > 500 for r in result)
    assert not any(r["stats"]["error"] for r in result)
    assert all(r["stats"]["accepted_tokens"] > 50 for r in result)


def test_empty_and_odd_requests_pass(engine: Any) -> None:
    first = prompts(1)[0]
    odd = [
        {"prompt": first, "params": {"max_tokens": 1, "temperature": 1.0}},
        {"prompt": first, "params": {"max_tokens": 30, "temperature": 1.0, "stop_token_ids": list(range(96))}},
        {"prompt": [2], "params": {"max_tokens": 10, "temperature": 1.0, "seed": 3}},
    ]
    reference = engine(das=OFF, rounds=[{"requests": odd, "refresh": 1}, {"requests": odd}])
    result = engine(das=HISTORY, rounds=[{"requests": odd, "refresh": 1}, {"requests": odd}])
    assert [len(t) for t in result[1]["tokens"]] == [1, 1, 10]
    assert result[1]["tokens"][2] == reference[1]["tokens"][2]  # a plain vLLM seed fixes the tokens too


def test_without_a_block_vllm_is_stock(engine: Any) -> None:
    rounds = [{"requests": [{"prompt": p, "params": {"max_tokens": 40, "seed": i}} for i, p in enumerate(prompts(4))]}]
    none = engine(das={"drafter": "none"}, rounds=rounds)
    assert none[0]["samplers"] == ["vllm.v1.sample.sampler", "builtins"]
    assert none[0]["tokens"] == engine(das=None, rounds=rounds)[0]["tokens"]


def test_a_wrong_key_stops_the_engine_with_its_name(engine: Any) -> None:
    with pytest.raises(RuntimeError, match=r"das\.historie: unknown key; did you mean 'history'\?"):
        engine(engine={"additional_config": {"das": {"historie": {}}}}, rounds=[])


@pytest.mark.long
def test_a_lora_policy_writes_the_tokens_of_off(engine: Any, tmp_path: Path) -> None:
    first, second = two_rounds(requests(PLAIN, 6))
    rounds = [{**part, "adapter": adapter(tmp_path / str(i))} for i, part in enumerate((first, second))]
    lora = {"enable_lora": True, "max_lora_rank": 8}
    reference, plain = engine(das=OFF, engine=lora, rounds=rounds), engine(das=OFF, rounds=[first, second])
    result = engine(das=HISTORY, engine=lora, rounds=rounds)
    assert [r["tokens"] for r in result] == [r["tokens"] for r in reference] != [r["tokens"] for r in plain]
    assert result[1]["stats"]["accepted_tokens"] > 50
