"""`gate`: what an undrafted step costs beside stock's, start-up, and the KV cache that is left."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from das_adapter.bench.engines import (
    FOLDER,
    HISTORY,
    IN_PROCESS,
    KEYED,
    SHAPES,
    Bar,
    Found,
    Measured,
    Plan,
    apart,
    engine,
    step_seconds,
)
from das_adapter.bench.profile import profiler_args, step_profile

MOST_CONTEXT = 2**18
"""Tokens of all requests' context."""
PROFILE_S = 30.0
"""Seconds that must be left for a profile."""


def measure(plan: Plan, *_: Any) -> Iterator[Found]:
    """Milliseconds of an undrafted step with their standard errors, by arm, batch and context; seconds of start-up, and
    the KV cache that is left; and what one kind of step consists of. Arms: stock's default, which seeds no request;
    `history`; on V1, every request seeded, without a drafter: V2's own noise is keyed. With random weights no text
    comes twice: `history` looks for drafts, and finds none."""
    found: Found = {"arms": {}}
    arms = {"stock": None, "history": HISTORY, "none, keyed": KEYED}
    for name, das in arms.items():
        if das is KEYED and found["arms"]["history"]["model_runner"] == 2:
            continue
        found["arms"][name] = apart(plan, _gate_arm, plan, das, env=IN_PROCESS if plan.tiny else {})
        yield found


def _of_stock(found: Found, arm: str) -> list[Measured]:
    """Return what each of the steps costs that both arms have measured, of stock's."""
    times, stock = (found["arms"][name]["step_ms"] for name in (arm, "stock"))
    return [Measured(*times[at]).over(Measured(*stock[at])) for at in times.keys() & stock.keys()]


def _beyond_doubt(found: Found, arm: str) -> float:
    """Return the worst of the steps' costs, less twice its error."""
    return max(ratio.value - 2.0 * ratio.error for ratio in _of_stock(found, arm))


BARS = (
    Bar(
        "undrafted step of `history`, of stock's, at worst, less twice its error",
        1.02,
        lambda f: _beyond_doubt(f, "history"),
    ),
    Bar(
        "undrafted step with keyed noise, of stock's, at worst, less twice its error",
        1.02,
        lambda f: _beyond_doubt(f, "none, keyed"),
    ),
    Bar(
        "standard error of what `history` costs, at worst",
        0.01,
        lambda f: max(ratio.error for ratio in _of_stock(f, "history")),
    ),
    Bar(
        "draft tokens that undrafted steps accepted, of their tokens",
        0.001,
        lambda f: f["arms"]["history"]["accepted_tokens"] / f["arms"]["history"]["tokens"],
    ),
    Bar(
        "seconds that `history` starts longer than stock",
        30,
        lambda f: f["arms"]["history"]["start_s"] - f["arms"]["stock"]["start_s"],
    ),
    Bar(
        "KV cache of stock, of that which `history` leaves",
        1.03,
        lambda f: f["arms"]["stock"]["kv_tokens"] / (f["arms"]["history"]["kv_tokens"] or float("nan")),
    ),
)


def gate_points(plan: Plan) -> list[tuple[int, int]]:
    """Return requests and tokens of context of each: so many in all that reading the prompts does not take the time."""
    first, *longer = sorted(plan.contexts)
    points = [(batch, min(first, MOST_CONTEXT // batch)) for batch in plan.batches]
    return points + [(sorted(plan.batches)[1], context) for context in longer]


def _gate_arm(plan: Plan, das: dict[str, Any] | None) -> Found:
    steps, begin = 4 * plan.steps, time.perf_counter()  # many: beginning takes now more, now less time
    longest = max(plan.contexts) + steps + 8
    traces = Path(tempfile.mkdtemp(dir=os.environ.get(FOLDER)))
    llm = engine(plan, das, max_model_len=longest, enable_prefix_caching=True, **profiler_args(traces))
    cache, taken = llm.llm_engine.vllm_config.cache_config, time.perf_counter() - begin
    room = int(cache.num_gpu_blocks or 0) * int(cache.block_size)  # what CUDA graphs take is not there
    found = Found(start_s=taken, kv_tokens=room, step_ms={})
    vocabulary = SHAPES[plan.shape]["vocab_size"]
    for batch, context in gate_points(plan):
        step = step_seconds(llm, batch, context, steps, vocabulary, logprobs=[0] * batch)
        found["step_ms"][f"{batch} x {context}"] = [1e3 * step.value, 1e3 * step.error]
    if das is not None:
        stats = llm.collective_rpc("das_rpc", args=("stats", {}))[0]
        about = ("accepted_tokens", "draft_tokens", "tokens", "model_runner", "state", "reason", "error")
        found |= {name: stats.get(name) for name in about}  # of those of a drafter, where there is one
    batch, context = gate_points(plan)[1]
    if plan.until - time.monotonic() > PROFILE_S:
        found["profile"] = step_profile(llm, traces, batch, context, plan.steps, vocabulary, logprobs=[0] * batch)
    return found
