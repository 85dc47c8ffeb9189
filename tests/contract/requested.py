"""The blocks, requests and rounds that most jobs of the contract tests have."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobs import Engine, Request, Round

OFF = {"drafter": "none", "verify": {"noise": "keyed"}}
# Without the controller, whose decisions depend on how long steps take.
V2_RUNNER = "vllm.v1.worker.cpu.model_runner"
ALWAYS = {"budget": "unlimited", "speculate": "always"}
HISTORY = {"drafter": "history", **ALWAYS}
SELF = {"drafter": "self", **ALWAYS}
MIXED = {"drafter": "history+self", **ALWAYS}

SMALL = {
    "max_num_batched_tokens": 512,
    "max_num_seqs": 8,
    "block_size": 32,
    "num_gpu_blocks_override": 20,
}
"""Engine arguments with which prompts are read in chunks, and requests wait or are
preempted.
"""
LORA = {"enable_lora": True, "max_lora_rank": 8}
TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
HOST = {"DAS_CPU_WEIGHT_SYNC": "1"}
"""Weights are written into the live model, as veRL does on a CPU."""

PLAIN = [{"temperature": 1.0}]
EVERY_PARAMETER = [
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 20},
    {
        "temperature": 1.0,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
    },
    {
        "temperature": 1.2,
        "allowed_token_ids": list(range(1, 60)),
        "top_k": 30,
        "top_p": 0.95,
    },
    {"temperature": 1.0, "bad_words": ["22", "####"]},
]
STOP_STRINGS = [{"temperature": 1.0, "stop": ["7"]}]
"""With what a response ends before the engine hears of it: it counts tokens that nobody
gets.
"""
EVERY_ON_V2 = [
    *EVERY_PARAMETER,
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "logit_bias": {25: 2.0, 26: -3.0}},
    {"temperature": 1.0, "min_tokens": 60, "top_k": 30, "top_p": 0.95},
]
"""With what is refused beside drafts on V1."""


def nightly(*cases: Any) -> list[Any]:
    """Mark cases of a test, of which a tuple has several values, as those that `make
    long` runs.
    """
    values = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*value, marks=pytest.mark.long) for value in values]


def drafter(value: Any) -> str | None:
    """Name a block in a test's id."""
    return value["drafter"] if isinstance(value, dict) else None


def prompts(count: int) -> list[list[int]]:
    """Prompts of the tiny policy's task: <user> 17 a+5 b*3 ... <assistant>."""
    rng = random.Random(1)
    digits = list(range(25, 35))
    labels = list(range(44, 96))
    out = []
    for _ in range(count):
        text = [2, rng.choice(digits), rng.choice(digits)]
        for i in range(rng.randrange(2, 9)):
            text += [
                42,
                labels[i + 1],
                rng.choice([35, 36, 37]),
                rng.choice(digits[2:]),
            ]
        out.append([*text, 3])
    return out


def requests(
    params: list[dict[str, Any]], count: int = 12, **more: Any
) -> list[Request]:
    """Groups of three samples a prompt, with seeds and problems as the hosts send
    them.
    """
    return [
        Request(
            prompt,
            {"max_tokens": 80, **params[i % len(params)], **more},
            {"das_problem": i // 3, "das_seed": 1000 + i},
        )
        for i, prompt in enumerate(p for p in prompts(count // 3) for _ in range(3))
    ]


def two_rounds(requested: list[Request]) -> list[Round]:
    """The same problems twice, with a weight sync in between, so that the history is
    warm in the second round.
    """
    again = [request.labelled(das_seed=5000 + i) for i, request in enumerate(requested)]
    return [Round(requested, refresh=1), Round(again)]


def renamed(requested: list[Request]) -> list[Request]:
    """The same requests, of problems that are new."""
    return [r.labelled(das_problem=100 + r.label["das_problem"]) for r in requested]


def shortened(params: list[dict[str, Any]], tokens: int) -> list[dict[str, Any]]:
    """The same sampling parameters, up to so many tokens."""
    return [
        {
            **p,
            "max_tokens": tokens,
            **({"min_tokens": tokens} if "min_tokens" in p else {}),
        }
        for p in params
    ]


def synced(*parts: list[Round]) -> list[Round]:
    """One round after another, with a weight sync after each."""
    return [
        replace(part, refresh=version)
        for version, part in enumerate(itertools.chain(*parts), 1)
    ]


def stock(rounds: list[Round]) -> list[Round]:
    """The rounds for an engine without das-adapter: the label's seed is vLLM's own, and
    nothing is handed over.
    """
    return [
        Round(
            [
                replace(r.having(seed=r.label["das_seed"]), label={})
                for r in part.requests
            ],
            brief=part.brief,
            aborted=part.aborted,
            perturb=part.perturb,
            sleep=part.sleep,
            adapter=part.adapter,
        )
        for part in rounds
    ]


def tokens(result: list[dict[str, Any]]) -> list[list[list[int]]]:
    """Return the texts of each round."""
    return [found["tokens"] for found in result]


def lossless(
    engine: Engine, das: dict[str, Any], rounds: list[Round], /, **job: Any
) -> list[dict[str, Any]]:
    """Run rounds with a block, and return what the engine says; the tokens are those
    that are written without drafts.

    `sabotage` and `asynchronous` are of the engine with the block alone.
    """
    same = {
        name: value
        for name, value in job.items()
        if name not in ("sabotage", "asynchronous")
    }
    result = engine(das=das, rounds=rounds, **job)
    assert tokens(result) == tokens(engine(das=OFF, rounds=rounds, **same))
    return result


def drafted_on_v2(
    result: list[dict[str, Any]], reference: list[dict[str, Any]]
) -> None:
    """Check that rounds have the tokens of others, of an engine on V2 that schedules
    ahead and drafts without fault.
    """
    assert tokens(result) == tokens(reference)
    for found in result:
        assert found["runner"] == V2_RUNNER
        assert found["asynchronous"]
        assert found["misplaced"] == found["reused"] == 0 < found["audited"]
        assert not found["stats"]["error"]


def lossless_v2(
    engine: Engine, das: dict[str, Any], rounds: list[Round], /, **job: Any
) -> list[dict[str, Any]]:
    """Run rounds with a block on the V2 runner; the tokens are those of stock vLLM."""
    same = {name: value for name, value in job.items() if name in ("engine", "env")}
    result = engine(das=das, rounds=rounds, **job)
    assert tokens(result) == tokens(engine(das=None, rounds=stock(rounds), **same))
    return result


def lora(directory: Path) -> str:
    """Write a LoRA adapter of the tiny policy with arbitrary weights."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir()
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for layer, (name, rows) in itertools.product(
        range(4), (("q_proj", 256), ("v_proj", 128))
    ):
        stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        weights[f"{stem}.lora_A.weight"] = (
            torch.randn(8, 256, generator=generator) * 0.1
        )
        weights[f"{stem}.lora_B.weight"] = (
            torch.randn(rows, 8, generator=generator) * 0.1
        )
    save_file(weights, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    config |= {"base_model_name_or_path": "policy", "task_type": "CAUSAL_LM"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return str(directory)
