"""The tokens that the samplers draw, das-adapter's and vLLM's, follow the softmax, with
and without drafts.
"""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from jobs import POLICY, Request, Round
from requested import PLAIN, nightly, requests
from scipy import stats

PROMPT = random.Random(0).choices([25, 26, 27, 28], k=28)
"""Over so few tokens that almost any two of them are repeated, so that prompt look-up
drafts at every step.
"""
SAMPLES = 2000


@pytest.fixture(scope="module")
def law() -> Any:
    """p(second token | first token) after PROMPT, restricted to the four tokens the
    prompt is made of.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    firsts = sorted(set(PROMPT))
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, t] for t in firsts])).logits[:, -1]
    return {
        t: torch.softmax(row[firsts].double() / TEMPERATURE, dim=-1).numpy()
        for t, row in zip(firsts, logits, strict=True)
    }


TEMPERATURE = 2.0
ALONE = {"self": {"budget": "unlimited"}}
DRAFTED = {"budget": "unlimited", "speculate": "always"}


def misfit(result: list[dict[str, Any]], law: dict[int, np.ndarray]) -> float:
    """Chi-square of the second tokens against the law, over its degrees of freedom."""
    assert result[0]["stats"]["draft_tokens"] > SAMPLES / 8
    tokens = sorted(law)
    chi2 = 0.0
    freedom = 0
    for first, p in law.items():
        seconds = [t[1] for t in result[0]["tokens"] if t[0] == first]
        if len(seconds) < 200:
            continue
        counts = np.array([seconds.count(t) for t in tokens])
        assert counts.sum() == len(seconds)
        chi2 += stats.chisquare(counts, len(seconds) * p).statistic
        freedom += len(tokens) - 1
    return chi2 / freedom


def job(
    das: dict[str, Any], lengths: tuple[int, ...] = (3,), **more: Any
) -> dict[str, Any]:
    """`lengths`: of the responses, one after the other."""
    params = {
        "temperature": TEMPERATURE,
        "allowed_token_ids": sorted(set(PROMPT)),
        "logprobs": None,
    }
    asked = [Request(PROMPT, {**params, "max_tokens": length}) for length in lengths]
    part = Round(asked, copies=SAMPLES // len(lengths), brief=True)
    return {
        "das": das,
        "engine": {"max_num_seqs": 64, "enable_prefix_caching": True},
        "rounds": [part],
        **more,
    }


@pytest.mark.one_build
@pytest.mark.parametrize(
    ("drafter", "noise"),
    [
        ("history+self", "stock"),
        *nightly(
            ("history+self", "keyed"),
            *product(("history", "self", "ngram"), ("keyed", "stock")),
        ),
    ],
)
def test_drafted_positions_follow_the_softmax(
    engine: Any, law: Any, drafter: str, noise: str
) -> None:
    result = engine(
        **job(
            {
                **DRAFTED,
                **ALONE.get(drafter, {}),
                "drafter": drafter,
                "verify": {"noise": noise},
            }
        )
    )
    ours = result[0]["samplers"][1].startswith("das_adapter")
    assert ours == (noise == "keyed")
    assert misfit(result, law) < 3.5


NOTED = "any draft length, noted verification"


def assert_exact(noted: dict[str, float], whose: str) -> None:
    """A draft token is accepted with the chance min(1, p / q), and what is written
    follows p: within four standard deviations, and two events where they are few, of
    what vLLM's rejection sampler has of p and q.
    """
    for event in (f"{whose}, accepted", f"{whose}, rare"):
        assert noted[f"{event}, variance"] > 1
        assert (
            abs(noted[event] - noted[f"{event}, expected"])
            < 4 * noted[f"{event}, variance"] ** 0.5 + 2
        )


@pytest.mark.one_build
def test_vllms_own_sampling_has_a_models_probabilities_beside_certain_tokens_of_the_history(
    engine: Any,
) -> None:
    asked = requests(PLAIN, temperature=1.5, max_tokens=30)
    das = {
        "drafter": "history+self",
        "speculate": "always",
        "verify": {"noise": "stock"},
    }
    result = engine(
        das=das, rounds=[Round(asked, copies=20, brief=True)], sabotage=NOTED
    )[0]
    noted = result["noted"]
    assert noted["model, beside others"] == noted["model"] > 500
    assert noted["model, certain"] < 0.1 * noted["model"]
    assert noted["history, certain"] == noted["history, beside others"] > 100
    for whose in ("model", "history"):
        assert_exact(noted, whose)
    assert noted["model, accepted"] > 1.02 * noted["model, most likely"]
    assert not result["stats"]["error"]


@pytest.mark.long
def test_vllms_own_sampling_on_v2_follows_the_softmax(v2_engine: Any, law: Any) -> None:
    """No request has a seed, and drafts from the history are verified by the ratio of
    probabilities. Responses begin at any time, so that their second token is drafted:
    the draft length of a step is chosen two steps before.
    """
    das = {
        **DRAFTED,
        "drafter": "history",
        "verify": {"noise": "stock"},
        "history": {"device_bytes": "2MiB"},
    }
    result = v2_engine(**job(das, (3, 4)))
    assert result[0]["runner"] == "vllm.v1.worker.cpu.model_runner"
    assert misfit(result, law) < 3.5


@pytest.mark.long
@pytest.mark.one_build
def test_without_our_fix_vllms_cpu_sampler_is_wrong(engine: Any, law: Any) -> None:
    """When this fails, vLLM has mended its CPU kernel: `engine/cpu.py` can do with one
    fix less.
    """
    result = engine(
        **job(
            {"drafter": "ngram", "verify": {"noise": "stock"}, **DRAFTED},
            sabotage="no CPU fix",
        )
    )
    assert misfit(result, law) > 10
