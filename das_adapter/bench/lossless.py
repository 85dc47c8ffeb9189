"""`lossless`: the policy's shape writes to long prompts, with the drafts of several
drafters and without.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from das_adapter.bench import replay
from das_adapter.bench.copy import formats
from das_adapter.bench.engines import (
    BLOCK,
    IN_PROCESS,
    KEYED,
    SHAPES,
    STARTED,
    Bar,
    Found,
    Plan,
    apart,
    cache_bytes,
    engine,
    generate,
    on_v1,
    process,
    prompts,
    sampling,
    threads,
)
from das_adapter.core.index.store import HistoryStore

REQUESTS, WRITTEN = 8, 192
"""Requests with prompts that fill more than one tile of the attention kernels, and
tokens that each writes.
"""
ALWAYS = {"speculate": "always", "budget": "unlimited"}
Block = dict[str, Any]
INVARIANT, USUAL = ({"VLLM_BATCH_INVARIANT": wanted} for wanted in "10")
USUAL_ONES = ", usual kernels"
BESIDES = 4 << 30
"""Bytes that an engine takes beside its weights and its KV cache."""
Texts = list[list[int]]


def measure(plan: Plan, *_: Any) -> Iterator[Found]:
    """Write without drafts, and with those of each drafter. The history's are these
    very texts with mistakes, since random weights repeat nothing; beside a model, those
    of half of the requests. Kernels are batch-invariant; on a CPU they are anyway. On a
    GPU also with the usual ones, whose sums depend on how many tokens are in a step:
    how often that shows is told, not judged.
    """
    found: Found = {
        "context": max(plan.contexts),
        "responses": REQUESTS,
        "drafters": {},
    }
    with (
        tempfile.TemporaryDirectory(prefix="das-bench-") as directory,
        threads(apart(plan, _engines_at_once, plan)) as pool,
    ):
        blocks = {
            f"self, {weights}": {"drafter": "self", "self": {"weights": weights}}
            for weights in apart(plan, formats, plan)
        }
        blocks |= {
            name: {"drafter": name}
            for name in ("history", "draft_model", "history+draft_model")
        }
        folder = Path(directory)
        apart(plan, _checkpoints, plan, folder)
        arms: dict[str, Future[Found]] = {}
        kernels = USUAL if plan.tiny else INVARIANT
        off = pool.submit(_arm, plan, folder, kernels)
        for name, block in blocks.items():
            arms[name] = pool.submit(_arm, plan, folder, kernels, block, off)
        if not plan.tiny:
            off = pool.submit(_arm, plan, folder, USUAL)
            arms[f"history{USUAL_ONES}"] = pool.submit(
                _arm, plan, folder, USUAL, blocks["history"], off
            )
        for name, arm in arms.items():
            try:
                found["drafters"][name] = arm.result()
            except RuntimeError as error:  # others may work
                found["drafters"][name] = {"error": str(error)}
            yield found


def _accepted(found: Found) -> list[Found]:
    """Return what batch-invariant kernels wrote.

    Raises:
        ValueError: nothing of a drafter was accepted, or of the history or the model
            where both draft, so that nothing is shown.
    """
    arms = {
        name: arm for name, arm in found["drafters"].items() if USUAL_ONES not in name
    }
    for name, arm in arms.items():
        both = [arm["of_the_model"], arm["accepted_tokens"] - arm["of_the_model"]]
        if not (all(both) if "+" in name else sum(both)):
            raise ValueError("nothing was accepted")
    return [*arms.values()]


BARS = (
    Bar(
        "responses to long prompts that differ with batch-invariant kernels",
        0,
        lambda f: sum(arm["different"] for arm in _accepted(f)),
    ),
    Bar(
        "drafters that failed",
        0,
        lambda f: sum(bool(arm["error"]) for arm in f["drafters"].values()),
    ),
)


def _engines_at_once(plan: Plan) -> int:
    """Return how many engines the device has memory for, at least one."""
    import torch

    if not torch.cuda.is_available():
        return 1
    shape = SHAPES[plan.shape]
    layer = shape["hidden_size"] * (
        2 * shape["hidden_size"] + 3 * shape["intermediate_size"]
    )
    weights = 2 * (
        1.5 * shape["num_hidden_layers"] * layer
        + 2 * shape["vocab_size"] * shape["hidden_size"]
    )
    room = 0.95 * torch.cuda.get_device_properties(0).total_memory
    return max(
        1, int(room / (weights + BESIDES + 1.5 * _cache(plan) * cache_bytes(shape)))
    )


def _cache(plan: Plan) -> int:
    """Tokens of an engine's KV cache."""
    return REQUESTS * (max(plan.contexts) + _written(plan) + 4 * BLOCK)


def _written(plan: Plan) -> int:
    return min(WRITTEN, 4 * plan.steps)


def _arm(
    plan: Plan,
    folder: Path,
    kernels: dict[str, str],
    das: Block | None = None,
    off: Future[Found] | None = None,
) -> Found:
    """Return what an engine of its own has written; with a drafter, beside the texts of
    `off`, once they are there.
    """
    with process(plan, IN_PROCESS | kernels) as run:
        if not off:
            run(_start, plan, None, folder)
            return {"texts": run(_write, plan, None)[0]}
        run(_start, plan, ALWAYS | (das or {}), folder)
        texts: Texts = off.result()["texts"]
        # a model drafts for the others
        known = texts[: REQUESTS // 2] if das and "+" in das["drafter"] else texts
        past = [(i, np.array(text, dtype=np.int32)) for i, text in enumerate(known)]
        drafted, stats = run(_write, plan, replay.corrupted(past, 0.1, plan.vocabulary))
    different = [
        next(i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1])
        for a, b in zip(texts, drafted, strict=True)
        if a != b
    ]
    about = {
        name: stats[name]
        for name in ("accepted_tokens", "draft_tokens", "model_runner", "error")
    }
    about["of_the_model"] = sum(
        sum(stats.get(kind, [])[1:]) for kind in ("self_counts", "neural_counts")
    )
    return {"different": len(different), "first_differences": different, **about}


def _checkpoints(plan: Plan, directory: Path) -> None:
    """Write a policy whose random weights are as large as trained ones, and its
    drafter. With vLLM's own random weights logits differ by 1e-5: whatever is read, and
    whatever the kernels add up, the noise alone chooses the tokens.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = SHAPES[plan.shape]
    config = AutoConfig.for_model(**shape)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        torch.manual_seed(0)
        policy = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, shape["torch_dtype"])
        )
    # of 150,000 tokens some dozen are likely
    torch.nn.init.constant_(policy.model.norm.weight, 3.0)
    policy.save_pretrained(directory / "policy")
    layers = max(1, config.num_hidden_layers // 4)
    policy.model.layers = policy.model.layers[:layers]
    policy.config.num_hidden_layers = layers
    policy.config.layer_types = policy.config.layer_types[:layers]
    policy.save_pretrained(directory / "drafter")


def _start(plan: Plan, das: dict[str, Any] | None, directory: Path) -> None:
    """Start an engine; `das`: None for one without drafts, which is stock vLLM on V2,
    whose own noise is keyed.
    """
    if das is None and on_v1():
        das = KEYED
    longest = max(plan.contexts) + _written(plan) + 32
    if das and "draft_model" in das["drafter"]:
        das = das | {"draft": {"model": str(directory / "drafter")}}
    engine(plan, das, _cache(plan), str(directory / "policy"), max_model_len=longest)


def _write(plan: Plan, past: replay.Rollouts | None) -> tuple[Texts, Found]:
    llm = STARTED[-1]
    written = _written(plan)
    if past:
        with (
            tempfile.TemporaryDirectory() as directory,
            HistoryStore(directory) as store,
        ):
            llm.collective_rpc("das_rpc", args=("refresh", replay.kept(store, past)))
    asked = prompts(REQUESTS, max(plan.contexts), plan.vocabulary)
    seeds = range(1, REQUESTS + 1)
    _, texts = generate(
        llm, asked, sampling([written] * REQUESTS, range(REQUESTS), seeds, seed=seeds)
    )
    return texts, llm.collective_rpc("das_rpc", args=("stats", {}))[0] if past else {}
