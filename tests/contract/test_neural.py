"""vLLM's neural drafters under das-adapter: the same tokens, the same distribution, and
weights that follow.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import POLICY, Request, Round
from requested import (
    ALWAYS,
    EVERY_PARAMETER,
    HOST,
    LORA,
    OFF,
    PLAIN,
    SMALL,
    lora,
    lossless,
    nightly,
    requests,
    tokens,
    two_rounds,
)
from safetensors.torch import load_file, save_file
from scipy import stats
from test_distribution import NOTED, assert_exact, job, law, misfit  # noqa: F401
from test_ranks import ALONE, RANKS, ROUNDS, seeded

from das_adapter.protocol.decision_log import read
from das_adapter.protocol.metrics import faults

pytestmark = pytest.mark.one_build

METHODS = ["draft_model", "eagle3", "mtp"]


def block(method: str, drafters: Path, **more: Any) -> dict[str, Any]:
    model = (
        {}
        if "mtp" in method
        else {"model": str(drafters / method.removeprefix("history+"))}
    )
    return {"drafter": method, "draft": {**model, **more.pop("draft", {})}, **more}


def always(method: str, drafters: Path, **more: Any) -> dict[str, Any]:
    """A block that drafts even at a loss, as drafts of arbitrary lengths are."""
    return block(method, drafters, speculate="always", **more)


def policy(method: str, drafters: Path) -> dict[str, str]:
    """Name the policy to the engine: for `mtp` the one that has a layer for it, which
    writes the same text.
    """
    return {"model": str(drafters / "mtp")} if "mtp" in method else {}


@pytest.fixture(params=[None, "nemo_rl"])
def host(request: pytest.FixtureRequest, vllm_env: dict[str, str]) -> str | None:
    """Whose code loads the drafter's weights; None: das-adapter's alone."""
    if request.param is not None:
        pytest.importorskip(
            request.param,
            reason="NeMo-RL is not importable: put its checkout on PYTHONPATH",
        )
        if vllm_env:
            pytest.skip("NeMo-RL refuses the transformers of the newest vLLM")
    return request.param  # type: ignore[no-any-return]


def trained_drafter(
    drafters: Path, method: str, host: str | None
) -> list[dict[str, Any]]:
    """Two rounds with a weight sync between them, at which the host sends the drafter's
    weights.
    """
    first, second = two_rounds(requests(PLAIN))
    return [
        replace(
            first, draft_weights=str(drafters / method / "model.safetensors"), host=host
        ),
        second,
    ]


EVERYTHING = two_rounds(requests(PLAIN * 3 + EVERY_PARAMETER))


@pytest.mark.parametrize(
    ("method", "ahead"),
    [
        *product(METHODS, [True]),
        ("eagle3", False),
        *nightly(("draft_model", False), ("mtp", False)),
    ],
)
def test_tokens_do_not_depend_on_a_drafter_that_drafts_in_every_step(
    engine: Any, drafters: Path, method: str, ahead: bool
) -> None:
    """On a GPU vLLM schedules these asynchronously, ahead: then the host does not know
    a request's length.
    """
    ours = policy(method, drafters)
    reference = engine(das=OFF, engine=ours, rounds=EVERYTHING)
    how = {"async_scheduling": True, **ours} if ahead else ours
    result = engine(
        das=block(method, drafters, **ALWAYS),
        engine=how,
        rounds=EVERYTHING,
        asynchronous=ahead,
    )
    assert [r["asynchronous"] for r in result] == [ahead] * 2
    assert all(r["misplaced"] == r["reused"] == 0 < r["audited"] for r in result)
    assert tokens(result) == tokens(reference)
    assert sum(r["stats"]["accepted_tokens"] for r in result) > 100
    assert not any(r["stats"]["error"] or r["stats"]["alarm"] for r in result)


EVERY_LENGTH = {"sabotage": "any draft length"}


@pytest.mark.parametrize(
    "method",
    [*METHODS, "history+draft_model", *nightly("history+eagle3", "history+mtp")],
)
def test_tokens_do_not_depend_on_a_controlled_drafter(
    engine: Any, drafters: Path, method: str
) -> None:
    """Drafts of any length for any requests in any step: what the drafter has missed it
    reads later.
    """
    ours = policy(method, drafters)
    reference = engine(das=OFF, engine=ours, rounds=EVERYTHING)
    small = {"rounds": EVERYTHING, "engine": {**SMALL, **ours}}
    das = always(method, drafters)
    result = engine(das=das, **EVERY_LENGTH, **small)
    assert all(r["misplaced"] == r["reused"] == 0 < r["audited"] for r in result)
    assert tokens(result) == tokens(reference)
    assert not any(r["stats"]["error"] or r["stats"]["alarm"] for r in result)
    assert all(r["stats"]["accepted_tokens"] > 60 for r in result)
    assert all(r["preemptions"] > 0 for r in result)
    assert all(r["stats"]["drafter_passes"] > 20 for r in result)
    assert all(
        0 < r["stats"]["neural_counts"][1] <= r["stats"]["accepted_tokens"]
        for r in result
    )
    # as many are accepted when it reads with the policy, pass by pass
    if method in (
        "eagle3",
        "mtp",
    ):
        along = engine(das=das, sabotage="any draft length, reading along", **small)
        for late, now in zip(result, along, strict=True):
            assert (
                now["stats"]["drafter_passes"] > 1.5 * late["stats"]["drafter_passes"]
            )
            for name in ("draft_tokens", "accepted_tokens"):
                assert now["stats"][name] == late["stats"][name]


@pytest.mark.long
@pytest.mark.parametrize("method", ["eagle3", "history+draft_model"])
def test_two_ranks_run_the_drafter_together(
    engine: Any, vllm_env: dict[str, str], drafters: Path, method: str
) -> None:
    if vllm_env:
        pytest.skip("two ranks take long: on the other build only")
    reference = engine(das=OFF, rounds=ROUNDS, **ALONE)
    das = always(method, drafters)
    result = engine(das=das, rounds=ROUNDS, **EVERY_LENGTH, **RANKS)
    assert seeded(result) == seeded(reference)
    for found in result:
        assert [rank["error"] for rank in found["ranks"]] == [None, None]
        assert (
            found["ranks"][0]["drafter_passes"]
            == found["ranks"][1]["drafter_passes"]
            > 20
        )
        assert found["stats"]["accepted_tokens"] > 50


def test_a_useless_drafter_is_not_run(
    engine: Any, drafters: Path, tmp_path: Path
) -> None:
    """Not a pass in nearly all steps, once it is known: whatever the machine, such
    drafts are worth nothing.
    """
    asked = requests(PLAIN, max_tokens=200, ignore_eos=True)
    das = block(
        "draft_model", drafters, draft={"weights": "trainer"}, log_dir=str(tmp_path)
    )
    engine(
        das=das, rounds=[Round(asked, refresh=1)], sabotage="drafter without weights"
    )
    steps = [step for rollout in read(tmp_path) for step in rollout.steps]
    assert any(step.passes for step in steps[:40])
    assert len(steps) > 150
    assert sum(step.passes > 0 for step in steps[40:]) < 0.05 * len(steps)
    assert sum(step.drafted > 0 for step in steps[40:]) < 0.05 * len(steps)


@pytest.mark.parametrize("method", METHODS)
def test_a_useful_drafter_is_run(
    engine: Any, drafters: Path, tmp_path: Path, method: str
) -> None:
    asked = requests(PLAIN, 3, max_tokens=160, ignore_eos=True)
    das = block(method, drafters, log_dir=str(tmp_path))
    rounds = [Round(asked, refresh=1)]
    result = engine(
        das=das, engine=policy(method, drafters), rounds=rounds, sabotage="slow policy"
    )
    steps = [step for rollout in read(tmp_path) for step in rollout.steps][40:]
    assert sum(step.passes > 0 for step in steps) > 0.5 * len(steps)
    assert result[0]["stats"]["accepted_tokens"] > 20


@pytest.mark.parametrize("method", METHODS)
def test_requests_may_end_at_max_model_len(
    engine: Any, drafters: Path, method: str
) -> None:
    asked = requests(PLAIN, 6, max_tokens=200, ignore_eos=True)
    small = {"max_model_len": 128, **policy(method, drafters)}
    reference = engine(das=OFF, engine=small, rounds=[Round(asked)])
    result = engine(
        das=always(method, drafters),
        engine=small,
        rounds=[Round(asked)],
        **EVERY_LENGTH,
    )
    assert result[0]["tokens"] == reference[0]["tokens"]
    assert all(
        len(r.prompt) + len(t) == 128
        for r, t in zip(asked, result[0]["tokens"], strict=True)
    )


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_a_lora_policy_writes_the_tokens_of_off(
    engine: Any, drafters: Path, method: str, tmp_path: Path
) -> None:
    first, second = two_rounds(requests(PLAIN, 6))
    rounds = [
        replace(part, adapter=lora(tmp_path / str(i)))
        for i, part in enumerate((first, second))
    ]
    both = {**LORA, **policy(method, drafters)}
    result = lossless(
        engine, always(method, drafters), rounds, engine=both, **EVERY_LENGTH
    )
    assert sum(r["stats"]["accepted_tokens"] for r in result) > 10
    assert not any(r["stats"]["error"] for r in result)


@pytest.mark.long
def test_drafted_positions_follow_the_softmax(
    engine: Any,
    law: Any,  # noqa: F811
    drafters: Path,
) -> None:
    """With keyed noise, under which the drafter draws its own tokens with the policy's
    keys.
    """
    result = engine(**job(block("eagle3", drafters, **ALWAYS)))
    assert (
        20
        < result[0]["stats"]["accepted_tokens"]
        < 0.9 * result[0]["stats"]["draft_tokens"]
    )
    assert misfit(result, law) < 3.5


@pytest.mark.parametrize("method", ["draft_model", *nightly("eagle3", "mtp")])
def test_vllms_own_sampling_keeps_the_distribution(
    engine: Any, drafters: Path, method: str
) -> None:
    """The second to fourth token of one prompt, with vLLM's rejection sampling of the
    drafter's probabilities.
    """
    prompt = requests(PLAIN, 3)[0].prompt
    asked = [Request(prompt, {"max_tokens": 5, "temperature": 1.5, "ignore_eos": True})]
    rounds = [Round(asked, copies=1000, brief=True)]
    ours = policy(method, drafters)
    off = engine(das=None, engine=ours, rounds=rounds)[0]["tokens"]
    das = always(method, drafters, verify={"noise": "stock"})
    drafted = engine(das=das, engine=ours, rounds=rounds, sabotage=NOTED)[0]
    assert drafted["stats"]["accepted_tokens"] > 200
    assert drafted["samplers"][1] == "vllm.v1.sample.rejection_sampler"
    assert drafted["noted"]["model, beside others"] == drafted["noted"]["model"] > 500
    assert_exact(drafted["noted"], "model")
    assert_same_distribution(off, drafted["tokens"])


def assert_same_distribution(*both: list[list[int]]) -> None:
    """Compare the second to fourth token of two sets of texts."""
    for position in range(1, 4):
        counts = np.array(
            [np.bincount([t[position] for t in texts], minlength=96) for texts in both]
        )
        common = counts[:, counts.sum(axis=0) >= 10]
        table = np.column_stack([common, counts.sum(axis=1) - common.sum(axis=1)])
        assert stats.chi2_contingency(table[:, table.sum(axis=0) > 0]).pvalue > 1e-4


@pytest.mark.parametrize("method", METHODS)
def test_the_trainers_weights_reach_the_drafter(
    engine: Any, drafters: Path, method: str, host: str | None
) -> None:
    trained, second = trained_drafter(drafters, method, host)
    das = block(method, drafters, draft={"weights": "trainer"}, **ALWAYS)
    ours = policy(method, drafters)
    result = engine(
        das=das,
        engine=ours,
        rounds=[trained, second],
        env=HOST,
        sabotage="drafter without weights",
    )
    rate = [r["stats"]["accepted_tokens"] / r["stats"]["draft_tokens"] for r in result]
    assert rate[1] > max(0.08, 5 * rate[0])
    assert result[1]["stats"]["alarm"] is None


def test_a_layer_for_mtp_arrives_through_verls_own_receiver(
    engine: Any, drafters: Path
) -> None:
    """With the policy, in buckets that cut through the layer. A trainer of such layers
    needs Megatron, and a GPU.
    """
    pytest.importorskip("verl")
    trained, second = trained_drafter(drafters, "mtp", "verl")
    das = block("mtp", drafters, draft={"weights": "trainer"}, **ALWAYS)
    ours = policy("mtp", drafters)
    env = {**HOST, "VERL_PLATFORM": "cpu"}
    result = engine(
        das=das,
        engine=ours,
        rounds=[trained, second],
        env=env,
        sabotage="drafter without weights",
    )
    rate = [r["stats"]["accepted_tokens"] / r["stats"]["draft_tokens"] for r in result]
    assert rate[1] > max(0.08, 5 * rate[0])
    assert result[1]["stats"]["alarm"] is None


def test_weights_that_were_to_come_from_the_checkpoint_are_not_taken(
    engine: Any, drafters: Path, host: str | None
) -> None:
    trained, second = trained_drafter(drafters, "eagle3", host)
    result = engine(das=block("eagle3", drafters), rounds=[trained, second], env=HOST)
    assert "found 'checkpoint', but the trainer sends" in result[1]["stats"]["alarm"]
    assert "reading its checkpoint again" not in result[0]["log"]


@pytest.mark.parametrize("has", ["none", *nightly("the policy's")])
def test_a_trained_output_layer_is_not_written_into_the_policys(
    engine: Any, drafters: Path, has: str, tmp_path: Path
) -> None:
    """vLLM has a head share the policy's output layer where its checkpoint has none, or
    the same.
    """
    weights = load_file(drafters / "eagle3" / "model.safetensors")
    own = "lm_head.weight"
    start = {n: w for n, w in weights.items() if n != own}
    start |= (
        {}
        if has == "none"
        else {own: load_file(POLICY / "model.safetensors")[own].float()}
    )
    save_file(start, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes(
        (drafters / "eagle3" / "config.json").read_bytes()
    )
    first, second = two_rounds(requests(PLAIN))
    rounds = [
        replace(first, draft_weights=str(drafters / "eagle3" / "model.safetensors")),
        second,
    ]
    das = {
        "drafter": "eagle3",
        "draft": {"model": str(tmp_path), "weights": "trainer"},
        **ALWAYS,
    }
    result = engine(das=das, rounds=rounds, env=HOST)
    assert tokens(result) == tokens(
        engine(das=OFF, rounds=two_rounds(requests(PLAIN)), env=HOST)
    )
    assert result[1]["stats"]["accepted_tokens"] > 0


def test_a_sync_without_the_drafters_weights_is_named(
    engine: Any, drafters: Path
) -> None:
    das = block("draft_model", drafters, draft={"weights": "trainer"})
    result = engine(das=das, rounds=two_rounds(requests(PLAIN)), env=HOST)
    assert "brought no weight of the drafter" in result[1]["stats"]["alarm"]


@pytest.mark.parametrize("method", METHODS)
def test_weights_lost_in_sleep_are_read_again(
    engine: Any, drafters: Path, method: str
) -> None:
    first, second = two_rounds(requests(PLAIN))
    job = {
        "engine": policy(method, drafters),
        "rounds": [replace(first, sleep=2), second],
        "env": HOST,
    }
    result = engine(das=block(method, drafters, **ALWAYS), **job)
    rate = [r["stats"]["accepted_tokens"] / r["stats"]["draft_tokens"] for r in result]
    assert rate[1] > 0.8 * rate[0] > 0.1
    assert "reading its checkpoint again" in result[0]["log"]


def test_a_drafter_whose_files_are_exchanged_drafts_with_the_new_ones(
    engine: Any, drafters: Path, tmp_path: Path
) -> None:
    untrained = tmp_path / "eagle3"
    shutil.copytree(drafters / "eagle3", untrained)
    weights = load_file(untrained / "model.safetensors")
    for weight in weights.values():
        weight.normal_(std=0.5)
    save_file(weights, untrained / "model.safetensors")
    first, second = two_rounds(requests(PLAIN))
    rounds = [replace(first, draft_files=str(drafters / "eagle3")), second]
    das = block("eagle3", tmp_path, **ALWAYS)
    result = engine(das=das, rounds=rounds, env=HOST)
    rate = [r["stats"]["accepted_tokens"] / r["stats"]["draft_tokens"] for r in result]
    assert rate[1] > max(0.08, 5 * rate[0])
    assert "were read from the new files in" in result[0]["log"]
    off = engine(das=OFF, rounds=[first, second], env=HOST)
    assert [r["tokens"] for r in result] == [r["tokens"] for r in off]


def test_a_drafter_that_nobody_synced_lowers_health(
    engine: Any, drafters: Path
) -> None:
    long = requests(PLAIN, max_tokens=150, ignore_eos=True)
    das = block("draft_model", drafters, draft={"weights": "trainer"}, **ALWAYS)
    result = engine(
        das=das, rounds=[Round(long)], env=HOST, sabotage="drafter without weights"
    )
    assert "acceptance collapsed" in faults([result[0]["stats"]])["alarm"]
