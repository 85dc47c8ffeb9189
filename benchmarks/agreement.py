"""How much of a response is what was written ahead of it, by learning rate and entropy:
GRPO on the tiny policy.

    python benchmarks/agreement.py --out FILE.json

Every problem comes once. Before each update the next step's responses are written
ahead, with the keyed noise that they will have and with other noise, which is all that
can be done where noise is not keyed. After it they are written, and then drafted by
das-adapter's index: tokens per forward pass, with drafts of at most 16, from a
request's own text and its growing siblings alone, and with what was written ahead. A
higher temperature is a policy with more entropy.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from provenance import provenance, save
from replay import replay
from transformers import AutoModelForCausalLM, AutoTokenizer

from das_adapter.core.native import native
from das_adapter.sim.rollouts import RecordedResponse

TASK = Path(__file__).resolve().parents[1] / "examples" / "tiny_math"
sys.path.insert(0, str(TASK))
from prepare_data import make_rows  # noqa: E402
from task import compute_score  # noqa: E402

SAMPLES = 4
BUDGET = 16


@torch.inference_mode()
def write(
    policy: Any,
    prompts: list[list[int]],
    seeds: np.ndarray,
    temperature: float,
    most: int,
) -> tuple[list[np.ndarray], float]:
    """Write a response to each prompt, with keyed noise; return int32 token ids, and
    the entropy of a token in nats.
    """
    width = max(map(len, prompts))
    (pad, end) = (
        policy.config.pad_token_id,
        policy.config.eos_token_id,
    )
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor(
        [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    )
    places = (mask.cumsum(dim=1) - 1).clamp(min=0)
    texts = list[np.ndarray]()
    nats = 0.0
    tokens = 0
    cache = None
    running = np.ones(len(prompts), dtype=bool)
    while running.any() and len(texts) < most:
        found = policy(
            ids,
            attention_mask=mask,
            position_ids=places,
            past_key_values=cache,
            use_cache=True,
        )
        cache = found.past_key_values
        logits = (found.logits[:, -1] / temperature).contiguous()
        logp = logits.log_softmax(dim=1)
        nats += float(-(logp.exp() * logp).sum(dim=1)[torch.from_numpy(running)].sum())
        tokens += int(running.sum())
        texts.append(np.zeros(len(prompts), dtype=np.int64))
        native().keyed_sample(logits.numpy(), seeds, places[:, -1].numpy(), texts[-1])
        running &= texts[-1] != end
        ids = torch.from_numpy(texts[-1])[:, None]
        places = places[:, -1:] + 1
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
    ended = [
        [*np.flatnonzero(row == end), most - 1][0] + 1 for row in np.array(texts).T
    ]
    return [
        row[:n].astype(np.int32)
        for row, n in zip(np.array(texts).T, ended, strict=True)
    ], nats / tokens


def update(
    policy: Any,
    optimizer: Any,
    prompts: list[list[int]],
    texts: list[np.ndarray],
    rewards: np.ndarray,
    heat: float,
) -> None:
    """Take a GRPO step: advantages within groups, one update, the mean over tokens;
    `heat`: the temperature.
    """
    groups = rewards.reshape(-1, SAMPLES)
    worth = (
        (groups - groups.mean(axis=1, keepdims=True))
        / (groups.std(axis=1, keepdims=True) + 1e-6)
    ).ravel()
    rows = [
        [*prompt, *text.tolist()] for prompt, text in zip(prompts, texts, strict=True)
    ]
    ids = torch.tensor(
        [
            row + [policy.config.pad_token_id] * (max(map(len, rows)) - len(row))
            for row in rows
        ]
    )
    spans = [
        (len(prompt) - 1, len(row) - 1)
        for prompt, row in zip(prompts, rows, strict=True)
    ]
    place = torch.arange(ids.shape[1] - 1)
    own = torch.stack([(place >= begin) & (place < end) for begin, end in spans])
    logp = (
        (policy(ids).logits[:, :-1] / heat)
        .log_softmax(dim=-1)
        .gather(-1, ids[:, 1:, None])[..., 0]
    )
    optimizer.zero_grad()
    (
        -(torch.tensor(worth, dtype=torch.float32)[:, None] * logp * own).sum()
        / own.sum()
    ).backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()


def repeated(text: np.ndarray, ahead: np.ndarray) -> int:
    """Return how many tokens of a response were written ahead of it before the first
    other one.
    """
    both = min(len(text), len(ahead))
    return int([*np.flatnonzero(text[:both] != ahead[:both]), both][0])


def measure(
    rate: float, heat: float, steps: int, problems: int, most: int
) -> dict[str, float]:
    """Train with a learning rate at a temperature; return what was repeated, and tokens
    per forward pass.
    """
    policy = AutoModelForCausalLM.from_pretrained(TASK / "policy", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(TASK / "policy")
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=rate, betas=(0.9, 0.999), weight_decay=0.01
    )
    rows = make_rows("train", steps * problems, 0)
    early: list[list[np.ndarray]] = []
    kinds: dict[str, list[RecordedResponse]] = {
        "siblings": [],
        "other_noise": [],
        "own_noise": [],
    }
    same = list[tuple[int, int, int]]()
    nats = list[float]()

    def batch(step: int) -> tuple[list[Any], list[list[int]], np.ndarray]:
        chosen = [
            row
            for row in rows[step * problems : (step + 1) * problems]
            for _ in range(SAMPLES)
        ]
        prompts = [
            tokenizer.encode(f"<|user|>{row['prompt'][0]['content']}<|assistant|>")
            for row in chosen
        ]
        return (
            chosen,
            prompts,
            np.arange(len(chosen), dtype=np.int64) + 2**20 * (step + 1),
        )

    for step in range(steps):
        chosen, prompts, seeds = batch(step)
        texts, entropy = write(policy, prompts, seeds, heat, most)
        if step:  # nothing was written ahead of the first
            nats.append(entropy)
            for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
                one = RecordedResponse(
                    step * problems + row // SAMPLES,
                    step,
                    0,
                    np.array(prompt, np.int32),
                    text,
                )
                for kind, ahead in zip(
                    kinds,
                    (np.zeros(0, np.int32), early[1][row], early[0][row]),
                    strict=True,
                ):
                    kinds[kind].append(replace(one, ahead=ahead))
                same.append(
                    (repeated(text, early[0][row]), len(early[0][row]), len(text))
                )
        if step + 1 < steps:
            _, coming, later = batch(step + 1)
            both, _ = write(
                policy, 2 * coming, np.concatenate([later, later + 2**40]), heat, most
            )
            early = [both[: len(coming)], both[len(coming) :]]
            answers = [
                tokenizer.decode(text.tolist(), skip_special_tokens=True)
                for text in texts
            ]
            scores = [
                compute_score(
                    "tiny_math",
                    answer,
                    row["reward_model"]["ground_truth"],
                    row["extra_info"],
                )["score"]
                for answer, row in zip(answers, chosen, strict=True)
            ]
            update(policy, optimizer, prompts, texts, np.array(scores), heat)
    repeats, ahead, lengths = np.array(same).T
    whole = (repeats == lengths) & (repeats == ahead)
    drafted = {kind: replay(found, BUDGET).total for kind, found in kinds.items()}
    return {
        "entropy": float(np.mean(nats)),
        "tokens": float(lengths.mean()),
        "agreement": float(repeats.sum() / (repeats.sum() + np.sum(~whole))),
        "repeated": float(repeats.sum() / ahead.sum()),
        "whole": float(whole.mean()),
        **{kind: total.tokens / total.rounds for kind, total in drafted.items()},
    }


@click.command()
@click.option("--rates", default="2e-5,2e-4", show_default=True, help="Learning rates.")
@click.option("--temperatures", default="1.0,1.5", show_default=True)
@click.option(
    "--steps",
    default=3,
    show_default=True,
    help="Steps of a training; nothing is ahead of the first.",
)
@click.option(
    "--problems",
    default=8,
    show_default=True,
    help="Problems of a step, four samples each.",
)
@click.option(
    "--most", default=256, show_default=True, help="Maximum tokens of a response."
)
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(
    rates: str, temperatures: str, steps: int, problems: int, most: int, out: Path
) -> None:
    """Train by each learning rate and temperature."""
    torch.set_num_threads(1)
    rows = []
    for heat, rate in itertools.product(
        map(float, temperatures.split(",")), map(float, rates.split(","))
    ):
        rows.append(
            {
                "temperature": heat,
                "rate": rate,
                **measure(rate, heat, steps, problems, most),
            }
        )
        click.echo(" ".join(f"{name}={value:.4g}" for name, value in rows[-1].items()))
    settings = {
        "steps": steps,
        "problems": problems,
        "samples": SAMPLES,
        "most": most,
        "budget": BUDGET,
    }
    save(out, {"provenance": provenance(), **settings, "rows": rows})


if __name__ == "__main__":
    main()
