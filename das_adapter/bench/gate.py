"""`gate`: what an undrafted step costs beside stock's, start-up, and the KV cache that
is left.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from das_adapter.bench.engines import (
    BLOCK,
    FULL,
    HISTORY,
    IN_PROCESS,
    KEYED,
    SHAPES,
    STARTED,
    Bar,
    Found,
    Measured,
    Plan,
    apart,
    cache_bytes,
    engine,
    on_v1,
    process,
    step_seconds,
)

MOST_CONTEXT = 2**18
"""Tokens of all requests' context."""
FEW, SURE, ENOUGH_S = 5, 0.004, 8.0
"""Rounds of each kind of step, at least; standard error of what it costs that is
enough; and seconds that are.
"""


def measure(plan: Plan, *_: Any) -> Iterator[Found]:
    """Measure, by arm, seconds of start-up, the KV cache that is left, and milliseconds
    of an undrafted step, and of stock's step, with their standard errors, by batch and
    context. Arms: stock's default, which seeds no request; `history`; on V1, every
    request seeded, without a drafter: V2's own noise is keyed. With random weights no
    text comes twice: `history` looks for drafts, and finds none.

    All engines are there at once, with a share of the memory each, and take turns: a
    machine's host has slow seconds, and they meet all arms alike.
    """
    arms = {"stock": None, "history": HISTORY} | (
        {"none, keyed": KEYED} if apart(plan, on_v1) else {}
    )
    found: Found = {
        "arms": {},
        "of_stock": {name: {} for name in arms if name != "stock"},
    }
    with contextlib.ExitStack() as engines:
        run = {
            name: engines.enter_context(process(plan, IN_PROCESS if plan.tiny else {}))
            for name in arms
        }
        for name, das in arms.items():
            found["arms"][name] = run[name](_start, plan, das, 0.9 / len(arms)) | {
                "step_ms": {}
            }
            yield found
        room = min(arm["kv_tokens"] for arm in found["arms"].values())
        for batch, context in gate_points(plan, room):
            rounds = in_turn(run, plan, batch, context)
            if len(rounds) < 2:
                continue
            at = f"{batch} x {context}"
            for name in arms:
                found["arms"][name]["step_ms"][at] = Measured.of(
                    [1e3 * seconds[name] for seconds in rounds]
                )
            for name in found["of_stock"]:
                found["of_stock"][name][at] = _of_stock(rounds, name)
            yield found
        for name in found["of_stock"]:
            found["arms"][name] |= run[name](_told)
            yield found


DEAR, UNSURE = 1.02, 0.01
"""What an undrafted step may cost, of stock's, and the standard error up to which that
can be said of it.
"""
BARS = (
    Bar(
        "undrafted step of `history`, of stock's, at worst, less twice its error",
        DEAR,
        lambda f: _beyond_doubt(f, "history"),
    ),
    Bar(
        "undrafted step with keyed noise, of stock's, at worst, less twice its error",
        DEAR,
        lambda f: _beyond_doubt(f, "none, keyed"),
    ),
    Bar(
        "standard error of what `history` costs, at worst",
        UNSURE,
        lambda f: max(error for _, error in f["of_stock"]["history"].values()),
    ),
    Bar(
        "draft tokens that undrafted steps accepted, of their tokens",
        0.001,
        lambda f: (
            f["arms"]["history"]["accepted_tokens"] / f["arms"]["history"]["tokens"]
        ),
    ),
    Bar(
        "seconds that `history` starts longer than stock",
        30,
        lambda f: f["arms"]["history"]["start_s"] - f["arms"]["stock"]["start_s"],
    ),
    Bar(
        "memory that `history` takes from the KV cache, of the device's",
        0.03,
        lambda f: f["arms"]["stock"]["kv_share"] - f["arms"]["history"]["kv_share"],
    ),
)


def _beyond_doubt(found: Found, arm: str) -> float | None:
    """Return the worst of the steps' costs, less twice its error; None: it is low only
    because the error is large.
    """
    steps = found["of_stock"][arm].values()
    worst = max(ratio - 2.0 * error for ratio, error in steps)
    return worst if worst > DEAR or max(error for _, error in steps) <= UNSURE else None


def _of_stock(rounds: list[dict[str, float]], arm: str) -> Measured:
    """Return what a step costs, of stock's step in the same round."""
    return Measured.of([seconds[arm] / seconds["stock"] for seconds in rounds])


def gate_points(plan: Plan, room: int = 2**62) -> list[tuple[int, int]]:
    """Return requests and tokens of context of each: no more in all than are read in
    little time, and than fit into a KV cache of `room` tokens.
    """
    first, *longer = sorted(plan.contexts)
    points = [(batch, first) for batch in plan.batches]
    points += [(sorted(plan.batches)[1], context) for context in longer]
    fitting = (
        (b, min(c, MOST_CONTEXT // b, room // b - BLOCK - _written(plan, b)))
        for b, c in points
    )
    return [(batch, context) for batch, context in fitting if context > 0]


def _written(plan: Plan, batch: int) -> int:
    """Return the tokens that each request of a figure writes."""
    return FULL + (4 if batch < 64 else 1) * plan.steps


def in_turn(
    run: dict[str, Callable[..., Any]], plan: Plan, batch: int, context: int
) -> list[dict[str, float]]:
    """Return the seconds of a decode step by arm, of each round in which all arms have
    some. The arms take turns, and the order turns too.
    """
    work = _seconds, plan, batch, context, _written(plan, batch) - FULL
    rounds: list[dict[str, float]] = []
    for arm in run.values():
        arm(*work)
    begin = time.monotonic()
    turn = 0
    while True:
        turn += 1
        seconds = {name: run[name](*work) for name in [*run][:: 2 * (turn % 2) - 1]}
        if not any(map(math.isnan, seconds.values())):
            rounds.append(seconds)
        sure = len(rounds) > 1 and all(
            _of_stock(rounds, name).error <= SURE for name in run
        )
        if turn >= FEW and (sure or time.monotonic() - begin > ENOUGH_S):
            return rounds


def _start(plan: Plan, das: dict[str, Any] | None, memory: float) -> Found:
    begin = time.perf_counter()
    longest = max(plan.contexts) + 4 * plan.steps + 8
    stock: dict[str, Any] = {
        "enable_prefix_caching": True,
        "gpu_memory_utilization": memory,
    }
    llm = engine(plan, das, max_model_len=longest, **stock)
    cache = llm.llm_engine.vllm_config.cache_config
    taken = time.perf_counter() - begin
    # what CUDA graphs take is not there
    tokens = int(cache.num_gpu_blocks or 0) * int(cache.block_size)
    return Found(
        start_s=taken, kv_tokens=tokens, kv_share=_share(tokens, SHAPES[plan.shape])
    )


def _seconds(plan: Plan, batch: int, context: int, steps: int) -> float:
    return step_seconds(
        STARTED[-1], batch, context, steps, plan.vocabulary, logprobs=[0] * batch
    )


def _share(tokens: int, shape: dict[str, Any]) -> float | None:
    """Return what a KV cache in bfloat16 for so many tokens takes of the device's
    memory.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    return (
        cache_bytes(shape) * tokens / torch.cuda.get_device_properties(0).total_memory
    )


def _told() -> Found:
    stats = STARTED[-1].collective_rpc("das_rpc", args=("stats", {}))[0]
    about = (
        "accepted_tokens",
        "draft_tokens",
        "tokens",
        "model_runner",
        "state",
        "reason",
        "error",
    )
    # of those of a drafter, where there is one
    return {name: stats.get(name) for name in about}
