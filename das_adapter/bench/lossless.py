"""`lossless`: the policy's shape writes to long prompts, with the drafts of several
drafters and without.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from das_adapter.bench import replay
from das_adapter.bench.copy import formats
from das_adapter.bench.engines import (
    BLOCK,
    IN_PROCESS,
    INVARIANT,
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
    is_recurrent,
    on_v1,
    process,
    prompts,
    sampling,
    state_bytes,
    stats_of,
    threads,
)
from das_adapter.core.index.store import HistoryStore

REQUESTS = 8
"""Requests with prompts that fill more than one tile of the attention kernels."""
WRITTEN = 192
"""Tokens that each request writes."""
MISTAKES = 0.1
"""Share of the history's tokens that are exchanged."""
ALWAYS = {"speculate": "always", "budget": "unlimited"}
Block = dict[str, Any]
DEFAULT_KERNELS = {"VLLM_BATCH_INVARIANT": "0"}
DEFAULT_KERNELS_ARM = ", usual kernels"
"""End of the names of arms with vLLM's usual kernels."""
OTHER_BYTES = 4 << 30
"""Bytes that an engine takes beside its weights and its KV cache."""
MODEL_COUNTS = ("self_counts", "neural_counts")
"""Counters of the drafts of models: drafted tokens, and those that were accepted by
position.
"""
Texts = list[list[int]]


def measure(plan: Plan, *_: Any) -> Iterator[Found]:
    """Write without drafts, and with those of each drafter.

    The history has these very texts with mistakes, since random weights repeat nothing;
    beside a model, those of half of the requests. Kernels are batch-invariant; on a CPU
    they are anyway. On a GPU it is measured with the usual ones too, whose sums depend
    on how many tokens are in a step: how often that shows is told, not judged.
    """
    drafters: Found = {}
    found: Found = {
        "context": max(plan.contexts),
        "responses": REQUESTS,
        "drafters": drafters,
    }
    blocks: dict[str, Block] = {"history": {"drafter": "history"}}
    if not is_recurrent(SHAPES[plan.shape]):
        for weights in apart(plan, formats, plan):
            blocks[f"self, {weights}"] = {
                "drafter": "self",
                "self": {"weights": weights},
            }
        for name in ("draft_model", "history+draft_model"):
            blocks[name] = {"drafter": name}
    at_once = apart(plan, _engines_at_once, plan)
    with tempfile.TemporaryDirectory(prefix="das-bench-") as directory:
        folder = Path(directory)
        apart(plan, _checkpoints, plan, folder)
        with threads(at_once) as pool:
            arms = _submit(pool, plan, folder, blocks)
            for name, arm in arms.items():
                try:
                    figures = arm.result()
                except RuntimeError as error:  # others may work
                    figures = {"error": str(error)}
                drafters[name] = figures
                yield found


def _submit(
    pool: ThreadPoolExecutor,
    plan: Plan,
    folder: Path,
    blocks: dict[str, Block],
) -> dict[str, Future[Found]]:
    """Let threads measure the arms; return their figures to come, by name."""
    kernels = INVARIANT
    if plan.tiny:
        kernels = DEFAULT_KERNELS
    off = pool.submit(_arm, plan, folder, kernels)
    arms: dict[str, Future[Found]] = {}
    for name, block in blocks.items():
        arms[name] = pool.submit(_arm, plan, folder, kernels, block, off)
    if plan.tiny:
        return arms
    kernels = DEFAULT_KERNELS
    off = pool.submit(_arm, plan, folder, kernels)
    name = f"history{DEFAULT_KERNELS_ARM}"
    block = blocks["history"]
    arms[name] = pool.submit(_arm, plan, folder, kernels, block, off)
    return arms


def _invariant_arms(found: Found) -> list[Found]:
    """Return the figures of the arms with batch-invariant kernels.

    Raises:
        ValueError: nothing of a drafter was accepted, or of the history or the model
            where both draft, so that nothing is shown.
    """
    arms = []
    for name, arm in found["drafters"].items():
        if DEFAULT_KERNELS_ARM in name:
            continue
        of_model = arm["of_the_model"]
        of_history = arm["accepted_tokens"] - of_model
        shown = of_model + of_history
        if "+" in name:
            shown = of_model and of_history
        if not shown:
            raise ValueError("nothing was accepted")
        arms.append(arm)
    return arms


def _num_different(found: Found) -> int:
    """Return how many responses differ with batch-invariant kernels."""
    counts = [arm["different"] for arm in _invariant_arms(found)]
    return sum(counts)


def _num_failed(found: Found) -> int:
    """Return how many drafters failed."""
    failed = [bool(arm["error"]) for arm in found["drafters"].values()]
    return sum(failed)


BARS = (
    Bar(
        "responses to long prompts that differ with batch-invariant kernels",
        0,
        _num_different,
    ),
    Bar(
        "drafters that failed",
        0,
        _num_failed,
    ),
)


def _engines_at_once(plan: Plan) -> int:
    """Return how many engines the device has memory for, at least one."""
    import torch

    if not torch.cuda.is_available():
        return 1
    shape = SHAPES[plan.shape]
    hidden = shape["hidden_size"]
    attention = 2 * hidden
    feed_forward = 3 * shape["intermediate_size"]
    layer_weights = hidden * (attention + feed_forward)
    # with the drafter's layers, and both tables of the vocabulary
    num_layers = 1.5 * shape["num_hidden_layers"]
    table_weights = 2 * shape["vocab_size"] * hidden
    num_weights = num_layers * layer_weights + table_weights
    weights_bytes = 2 * num_weights
    kv_bytes = 1.5 * _cache(plan) * cache_bytes(shape)
    kv_bytes += state_bytes(shape, max(*plan.batches, plan.replayed))
    each_bytes = weights_bytes + OTHER_BYTES + kv_bytes
    device = torch.cuda.get_device_properties(0)
    room_bytes = 0.95 * device.total_memory
    fitting = int(room_bytes / each_bytes)
    return max(1, fitting)


def _cache(plan: Plan) -> int:
    """Return the tokens of an engine's KV cache."""
    tokens = max(plan.contexts) + _num_written(plan)
    spare = 4 * BLOCK
    return REQUESTS * (tokens + spare)


def _num_written(plan: Plan) -> int:
    """Return the tokens that each request writes."""
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
        if off is None or das is None:
            run(_start, plan, None, folder)
            written, _ = run(_write, plan, None)
            return {"texts": written}
        run(_start, plan, ALWAYS | das, folder)
        texts: Texts = off.result()["texts"]
        known = texts
        if "+" in das["drafter"]:
            # the model drafts for the others
            known = texts[: REQUESTS // 2]
        past = []
        for i, text in enumerate(known):
            ids = np.array(text, dtype=np.int32)
            past.append((i, ids))
        history = replay.corrupted(past, MISTAKES, plan.vocabulary)
        drafted, stats = run(_write, plan, history)
    differences = []
    for text, with_drafts in zip(texts, drafted, strict=True):
        if text == with_drafts:
            continue
        position = _first_difference(text, with_drafts)
        differences.append(position)
    of_model = 0
    for name in MODEL_COUNTS:
        counts = stats.get(name, [])
        accepted = counts[1:]
        of_model += sum(accepted)
    return {
        "different": len(differences),
        "first_differences": differences,
        "accepted_tokens": stats["accepted_tokens"],
        "draft_tokens": stats["draft_tokens"],
        "model_runner": stats["model_runner"],
        "error": stats["error"],
        "of_the_model": of_model,
    }


def _first_difference(a: list[int], b: list[int]) -> int:
    """Return the position of the first token that differs in two texts of one
    length.
    """
    pairs = zip(a, b, strict=True)
    for i, (one, other) in enumerate(pairs):
        if one != other:
            return i
    raise ValueError("the texts are equal")


def _checkpoints(plan: Plan, directory: Path) -> None:
    """Write a policy whose random weights are as large as trained ones, and its
    drafter. With vLLM's own random weights logits differ by 1e-5: whatever is read, and
    whatever the kernels add up, the noise alone chooses the tokens.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = SHAPES[plan.shape]
    config = AutoConfig.for_model(**shape)
    dtype = getattr(torch, shape["torch_dtype"])
    device = "cpu"
    if torch.cuda.is_available():
        device = "cuda"
    with torch.device(device):
        torch.manual_seed(0)
        policy = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = policy.model
    # of 150,000 tokens some dozen are likely
    torch.nn.init.constant_(model.norm.weight, 3.0)
    policy.save_pretrained(directory / "policy")
    if is_recurrent(shape):
        return
    layers = max(1, config.num_hidden_layers // 4)
    model.layers = model.layers[:layers]
    policy.config.num_hidden_layers = layers
    policy.config.layer_types = policy.config.layer_types[:layers]
    policy.save_pretrained(directory / "drafter")


def _start(plan: Plan, das: Block | None, directory: Path) -> None:
    """Start an engine.

    Args:
        das: the block; None: no drafts, which is stock vLLM on V2, whose own noise is
            keyed.
    """
    if das is None and on_v1():
        das = KEYED
    if das and "draft_model" in das["drafter"]:
        drafter = str(directory / "drafter")
        das = das | {"draft": {"model": drafter}}
    longest = max(plan.contexts) + _num_written(plan) + 32
    policy = str(directory / "policy")
    engine(
        plan,
        das,
        cache=_cache(plan),
        policy=policy,
        max_model_len=longest,
    )


def _write(plan: Plan, past: replay.Rollouts | None) -> tuple[Texts, Found]:
    """Return the responses to the prompts, and the engine's counters where it has
    history.
    """
    llm = STARTED[-1]
    if past:
        with tempfile.TemporaryDirectory() as directory:
            _refresh(llm, Path(directory), past)
    context = max(plan.contexts)
    asked = prompts(REQUESTS, context, plan.vocabulary)
    lengths = [_num_written(plan)] * REQUESTS
    seeds = range(1, REQUESTS + 1)
    params = sampling(
        lengths=lengths,
        problems=range(REQUESTS),
        seeds=seeds,
        seed=seeds,
    )
    _, texts = generate(llm, asked, params)
    stats: Found = {}
    if past:
        stats = stats_of(llm)
    return texts, stats


def _refresh(llm: Any, directory: Path, past: replay.Rollouts) -> None:
    """Give an engine these texts as history."""
    with HistoryStore(directory) as store:
        message = replay.kept(store, past)
        llm.collective_rpc("das_rpc", args=("refresh", message))
