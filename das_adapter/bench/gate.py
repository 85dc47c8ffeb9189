"""`gate`: what an undrafted step costs beside stock's, start-up, and the KV cache that
is left.
"""

from __future__ import annotations

import contextlib
import math
import statistics
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
    stats_of,
    step_seconds,
    step_times,
)

Block = dict[str, Any] | None
MEMORY = 0.9
"""Share of the device's memory that all engines have together."""
MAX_CONTEXT = 2**18
"""Tokens of all requests' context, at most."""
MIN_ROUNDS = 5
"""Rounds of each kind of step, at least."""
SURE_ERROR = 0.004
"""Standard error of a step's relative cost after which no further round is needed."""
ROUNDS_S = 18.0
"""Seconds after which no further round begins."""
BUSY_S = 1.5
"""Seconds of decoding in which an engine is watched alone."""


def measure(plan: Plan, *_: Any) -> Iterator[Found]:
    """Measure, by arm, seconds of start-up, the KV cache that is left, and milliseconds
    of an undrafted step, and of stock's step, with their standard errors, by batch and
    context; and which share of the time the device is busy then: for the rest it waits
    for the host.

    Arms: stock's default, which seeds no request; `history`; on V1, every request
    seeded, without a drafter: V2's own noise is keyed. With random weights no text
    comes twice: `history` looks for drafts, and finds none.

    All engines are there at once, with a share of the memory each, and take turns: a
    machine's host has slow seconds, and they meet all arms alike.
    """
    blocks: dict[str, Block] = {"stock": None, "history": HISTORY}
    if apart(plan, on_v1):
        blocks["none, keyed"] = KEYED
    ours = [name for name in blocks if name != "stock"]
    arms: Found = {}
    of_stock: dict[str, Found] = {name: {} for name in ours}
    found: Found = {"arms": arms, "of_stock": of_stock}
    environment: dict[str, str] = {}
    if plan.tiny:
        environment = IN_PROCESS
    memory_share = MEMORY / len(blocks)
    run: dict[str, Callable[..., Any]] = {}
    with contextlib.ExitStack() as engines:
        for name in blocks:
            started = process(plan, environment)
            run[name] = engines.enter_context(started)
        for name, das in blocks.items():
            figures = run[name](_start, plan, das, memory_share)
            arms[name] = figures | {"step_ms": {}}
            yield found
        room = min(figures["kv_tokens"] for figures in arms.values())
        for batch, context in gate_points(plan, room):
            rounds = in_turn(run, plan, batch, context)
            if len(rounds) < 2:
                continue
            point = f"{batch} x {context}"
            for name, figures in arms.items():
                step_ms = [1e3 * seconds[name] for seconds in rounds]
                figures["step_ms"][point] = Measured.of(step_ms)
            for name in ours:
                of_stock[name][point] = _of_stock(rounds, name)
            yield found
            for name, arm in run.items():
                busy = arm(_busy_share, plan, batch, context)
                arms[name].setdefault("busy_share", {})[point] = busy
            yield found
        for name in ours:
            arms[name] |= run[name](_counters)
            yield found


MAX_COST = 1.02
"""Time of an undrafted step, of stock's, that is allowed."""
MAX_ERROR = 0.01
"""Standard error of that time up to which it can be judged."""


def _beyond_doubt(found: Found, arm: str) -> float | None:
    """Return the worst of the steps' costs, less twice its error; None: it is low only
    because the error is large.
    """
    bounds = []
    for ratio, error in found["of_stock"][arm].values():
        bounds.append(ratio - 2.0 * error)
    worst = max(bounds)
    if worst > MAX_COST:
        return worst
    if _largest_error(found, arm) <= MAX_ERROR:
        return worst
    return None


def _largest_error(found: Found, arm: str) -> float:
    """Return the largest standard error of a step's cost."""
    steps = found["of_stock"][arm].values()
    errors = [error for _, error in steps]
    return max(errors)


def _accepted_share(found: Found) -> float:
    """Return the draft tokens that steps accepted, of their tokens."""
    figures = found["arms"]["history"]
    accepted = figures["accepted_tokens"]
    return float(accepted / figures["tokens"])


def _beyond_stock(found: Found, figure: str) -> float:
    """Return by how much a figure of `history` is above stock's."""
    ours = found["arms"]["history"]
    stock = found["arms"]["stock"]
    return float(ours[figure] - stock[figure])


BARS = (
    Bar(
        "undrafted step of `history`, of stock's, at worst, less twice its error",
        MAX_COST,
        lambda found: _beyond_doubt(found, "history"),
    ),
    Bar(
        "undrafted step with keyed noise, of stock's, at worst, less twice its error",
        MAX_COST,
        lambda found: _beyond_doubt(found, "none, keyed"),
    ),
    Bar(
        "standard error of what `history` costs, at worst",
        MAX_ERROR,
        lambda found: _largest_error(found, "history"),
    ),
    Bar(
        "draft tokens that undrafted steps accepted, of their tokens",
        0.001,
        _accepted_share,
    ),
    Bar(
        "seconds that `history` starts longer than stock",
        30,
        lambda found: _beyond_stock(found, "start_s"),
    ),
    Bar(
        "memory that `history` takes from the KV cache, of the device's",
        0.03,
        lambda found: -_beyond_stock(found, "kv_share"),
    ),
)


def _of_stock(rounds: list[dict[str, float]], arm: str) -> Measured:
    """Return what a step costs, of stock's step in the same round."""
    ratios = [seconds[arm] / seconds["stock"] for seconds in rounds]
    return Measured.of(ratios)


def gate_points(plan: Plan, room: int = 2**62) -> list[tuple[int, int]]:
    """Return numbers of requests with the tokens of context of each: no more in all
    than are read in little time, and than fit into a KV cache of `room` tokens.
    """
    first, *longer = sorted(plan.contexts)
    batches = sorted(plan.batches)
    points = [(batch, first) for batch in plan.batches]
    for context in longer:
        points.append((batches[1], context))
    fitting = []
    for batch, context in points:
        written = _num_written(plan, batch)
        room_each = room // batch - BLOCK - written
        max_each = MAX_CONTEXT // batch
        context = min(context, max_each, room_each)
        if context > 0:
            fitting.append((batch, context))
    return fitting


def _num_written(plan: Plan, batch: int) -> int:
    """Return the tokens that each request of a figure writes."""
    if batch < 64:
        repeats = 4
    else:
        repeats = 1
    return FULL + repeats * plan.steps


def in_turn(
    run: dict[str, Callable[..., Any]],
    plan: Plan,
    batch: int,
    context: int,
) -> list[dict[str, float]]:
    """Return the seconds of a decode step by arm, of each round in which all arms have
    some. The arms take turns, and the order turns too.
    """
    steps = _num_written(plan, batch) - FULL
    work = (_seconds, plan, batch, context, steps)
    rounds: list[dict[str, float]] = []
    for arm in run.values():
        arm(*work)
    begin = time.monotonic()
    names = list(run)
    turn = 0
    while True:
        turn += 1
        seconds = {}
        for name in names:
            arm = run[name]
            seconds[name] = arm(*work)
        names.reverse()
        unknown = [math.isnan(value) for value in seconds.values()]
        if not any(unknown):
            rounds.append(seconds)
        if turn < MIN_ROUNDS:
            continue
        took_s = time.monotonic() - begin
        if took_s > ROUNDS_S or _sure(rounds, names):
            return rounds


def _sure(rounds: list[dict[str, float]], names: list[str]) -> bool:
    """Say whether the cost of each arm is known well enough."""
    if len(rounds) < 2:
        return False
    errors = [_of_stock(rounds, name).error for name in names]
    return max(errors) <= SURE_ERROR


def _start(plan: Plan, das: Block, memory_share: float) -> Found:
    begin = time.perf_counter()
    longest = max(plan.contexts) + 4 * plan.steps + 8
    llm = engine(
        plan,
        das,
        max_model_len=longest,
        enable_prefix_caching=True,
        gpu_memory_utilization=memory_share,
    )
    start_s = time.perf_counter() - begin
    cache = llm.llm_engine.vllm_config.cache_config
    # what CUDA graphs take is not there
    num_blocks = int(cache.num_gpu_blocks or 0)
    block_tokens = int(cache.block_size)
    tokens = num_blocks * block_tokens
    shape = SHAPES[plan.shape]
    return {
        "start_s": start_s,
        "kv_tokens": tokens,
        "kv_share": _memory_share(tokens, shape),
    }


def _seconds(plan: Plan, batch: int, context: int, steps: int) -> float:
    llm = STARTED[-1]
    times = step_times(
        llm,
        batch,
        context,
        steps,
        plan.vocabulary,
        logprobs=[0] * batch,
    )
    return step_seconds(times)


def _busy_share(plan: Plan, batch: int, context: int) -> float | None:
    """Return the share of the time in which the device computes, while an engine
    decodes alone; None: there is no device.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    steps = _num_written(plan, batch) - FULL
    end = time.monotonic() + BUSY_S
    shares = []
    while time.monotonic() < end:
        _seconds(plan, batch, context, steps)
        # of the last sixth of a second to second
        shares.append(torch.cuda.utilization() / 100)
    return statistics.median(shares)


def _memory_share(tokens: int, shape: dict[str, Any]) -> float | None:
    """Return the share of the device's memory that a KV cache in bfloat16 takes for so
    many tokens; None: there is no device.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    device = torch.cuda.get_device_properties(0)
    kv_bytes = cache_bytes(shape) * tokens
    return kv_bytes / device.total_memory


def _counters() -> Found:
    """Return counters of this process's engine; None: it has no drafter that counts."""
    stats = stats_of(STARTED[-1])
    names = (
        "accepted_tokens",
        "draft_tokens",
        "tokens",
        "model_runner",
        "state",
        "reason",
        "error",
    )
    return {name: stats.get(name) for name in names}
