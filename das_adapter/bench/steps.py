"""What an undrafted step costs beside stock's (`gate`), and what a step waits for (`trace`)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from das_adapter.bench import replay
from das_adapter.bench.engines import (
    IN_PROCESS,
    SHAPES,
    Bar,
    Found,
    Measured,
    Plan,
    apart,
    engine,
    kv_tokens,
    prompts,
    runner_of,
    step_seconds,
)

HISTORY: dict[str, Any] = {"drafter": "history"}
KEYED: dict[str, Any] = {"drafter": "none", "verify": {"noise": "keyed"}}


def gate(plan: Plan) -> Iterator[Found]:
    """Milliseconds of an undrafted step with their standard errors, by arm, batch and context; seconds of start-up, and
    the KV cache that is left. Arms: stock's default, which seeds no request; `history`; every request seeded, without a
    drafter. With random weights no text comes twice: `history` looks for drafts at every step and finds none."""
    found: Found = {"runner": plan.runner, "arms": {}}
    arms: dict[str, tuple[dict[str, Any] | None, dict[str, str]]] = {
        "stock": (None, {}),
        "history": (HISTORY, plan.ours),
        "none, keyed": (KEYED, plan.ours),
    }
    for name, (das, env) in arms.items():
        found["arms"][name] = apart(plan, _gate_arm, plan, das, env=env | (IN_PROCESS if plan.tiny else {}))
        yield found


def _of_stock(found: Found, arm: str) -> list[Measured]:
    """Return what each of the steps costs that both arms have measured, of stock's."""
    times, stock = (found["arms"][name]["step_ms"] for name in (arm, "stock"))
    return [Measured(*times[at]).over(Measured(*stock[at])) for at in times.keys() & stock.keys()]


def _beyond_doubt(found: Found, arm: str) -> float:
    """Return the worst of the steps' costs, less twice its error."""
    return max(ratio.value - 2.0 * ratio.error for ratio in _of_stock(found, arm))


def _most(found: Found) -> float:
    return 1.01 if found["runner"] == "V2" else 1.02


GATE_BARS = (
    Bar(
        "undrafted step of `history`, of stock's, at worst, less twice its error",
        _most,
        lambda f: _beyond_doubt(f, "history"),
    ),
    Bar(
        "undrafted step with keyed noise, of stock's, at worst, less twice its error",
        _most,
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
    longest, begin = max(plan.contexts) + plan.steps + 8, time.perf_counter()
    llm = engine(plan, das, max_model_len=longest, enable_prefix_caching=True)
    found = Found(start_s=time.perf_counter() - begin, kv_tokens=kv_tokens(llm), step_ms={})
    vocabulary = SHAPES[plan.shape]["vocab_size"]
    for batch, context in gate_points(plan):
        step = step_seconds(llm, batch, context, plan.steps, vocabulary)
        found["step_ms"][f"{batch} x {context}"] = [1e3 * step.value, 1e3 * step.error]
    if das is not None:
        stats = llm.collective_rpc("das_rpc", args=("stats", {}))[0]
        found |= {name: stats[name] for name in ("accepted_tokens", "draft_tokens", "tokens")}
    return found


MOST_CONTEXT = 2**18


def trace(plan: Plan) -> Iterator[Found]:
    """Host synchronisations, idle share of the GPU, graphs replayed and the proposer's share, per step, ours and
    stock's: on the V1 runner, synchronous; and on V2, where the device drafts."""
    settings = {} if plan.runner == "V2" else {"async_scheduling": False}
    found: Found = {"runner": plan.runner}
    for name, das, given in (("history", HISTORY, {}), ("stock", None, settings)):
        found[name] = apart(plan, _trace, plan, das, given, env=IN_PROCESS | plan.ours)
        yield found


def _missing_graphs(found: Found) -> float | None:
    ours, stock = found["history"]["graphs"], found["stock"]["graphs"]
    return len(stock.keys() - ours.keys()) if stock.keys() - {"none"} else None


TRACE_BARS = (
    Bar(
        "host synchronisations of a step beyond stock's",
        0.05,
        lambda f: f["history"]["syncs_a_step"] - f["stock"]["syncs_a_step"],
    ),
    Bar(
        "host synchronisations of a step with drafts beyond stock's",
        0.05,
        lambda f: f["history"]["drafted"]["syncs_a_step"] - f["stock"]["syncs_a_step"],
    ),
    Bar("share of a step that proposing takes", 0.03, lambda f: f["history"]["propose_share"]),
    Bar("graphs that stock replays and ours does not", 0, _missing_graphs),
)
PROPOSING = ("learn", "estimate", "search_sealed", "scan_live", "merge_live", "vote")
"""Kernels that draft on the device."""


def _trace(plan: Plan, das: dict[str, Any] | None, settings: dict[str, Any]) -> Found:
    import torch
    from torch.profiler import ProfilerActivity, profile
    from vllm import SamplingParams

    batch, context, steps = max(plan.batches), min(512, *plan.contexts), min(plan.steps, 48)
    cached = {"max_model_len": max(context, 64) + 2 * steps + 32, "enable_prefix_caching": True}
    llm = engine(plan, das, **(cached | settings))
    runner, graphs = runner_of(llm), Counter[str]()
    owner = getattr(runner, "cudagraph_dispatcher", None) or getattr(runner, "cudagraph_manager", None)  # of V1; of V2
    captured = getattr(owner, "graphs", None) or getattr(owner, "cudagraph_keys", {})
    dispatch: Any = getattr(owner, "dispatch", None)
    on_gpu = torch.cuda.is_available()

    def counted(*args: Any, **kwargs: Any) -> Any:
        found = dispatch(*args, **kwargs)
        mode, size = found if isinstance(found, tuple) else (found.cg_mode, found)
        graphs["none" if mode.name == "NONE" else f"{mode.name} {size.num_tokens}"] += 1
        return found

    def rollout() -> None:
        params = SamplingParams(temperature=1.0, max_tokens=steps, ignore_eos=True, detokenize=False)
        llm.generate(prompts(batch, context, SHAPES[plan.shape]["vocab_size"]), params, use_tqdm=False)

    rollout()
    rollout()
    if owner:
        owner.dispatch = counted
    if das is not None:
        llm.collective_rpc("das_rpc", args=("stats", {}))
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
    with profile(activities=kinds) as profiled:
        rollout()
    events = profiled.events()
    begin, end = min(e.time_range.start for e in events), max(e.time_range.end for e in events)
    on_device = [e for e in events if "CUDA" in str(e.device_type)]
    found: Found = {
        "step_ms": (end - begin) / steps / 1e3,
        "graphs": dict(graphs),
        "graphs_captured": sum(len(of_mode) if isinstance(of_mode, set) else 1 for of_mode in captured.values()),
        "syncs_a_step": None,
        "gpu_busy": None,
        "propose_share": None,
    }
    if on_gpu:  # a CPU waits for nothing
        found["syncs_a_step"] = _waits(profiled) / steps
        found["gpu_busy"] = min(1.0, sum(e.time_range.elapsed_us() for e in on_device) / (end - begin))
    if das is not None:
        stats = llm.collective_rpc("das_rpc", args=("stats", {}))[0]
        device_us = [e.time_range.elapsed_us() for e in on_device if e.name in PROPOSING]
        if stats["propose_seconds"]:
            found["propose_share"] = sum(stats["propose_seconds"]) / stats["busy_seconds"]
        elif device_us:
            found["propose_share"] = sum(device_us) / (end - begin)
        graphs.clear()
        found["drafted"] = _drafted(plan, llm, batch, steps, kinds) | {"graphs": dict(graphs)}
    return found


def _waits(profiled: Any) -> int:
    return sum("Synchronize" in e.name for e in profiled.events())


def _drafted(plan: Plan, llm: Any, batch: int, steps: int, kinds: list[Any]) -> Found:
    """Host synchronisations of a step with drafts, which are accepted as a history has foretold."""
    import torch
    from torch.profiler import profile

    rng, vocabulary = np.random.default_rng(0), SHAPES[plan.shape]["vocab_size"]
    rollouts = [(i, rng.integers(1, vocabulary, 2 * steps).astype(np.int32)) for i in range(batch)]
    past = replay.corrupted(rollouts, 0.2, vocabulary)
    replay.force(rollouts)
    for turn in range(2):  # the first warms up
        shift = (turn + 1) * 10**7
        trajectories = replay.sent(past, shift, 2 * turn)
        llm.collective_rpc("das_rpc", args=("refresh", {"version": 2 * turn + 1, "trajectories": trajectories}))
        llm.collective_rpc("das_rpc", args=("stats", {}))
        with profile(activities=kinds) as profiled:
            replay.rollout(llm, [(i, text[:steps]) for i, text in rollouts], problems=shift)
        stats = llm.collective_rpc("das_rpc", args=("stats", {}))[0]
    syncs = _waits(profiled) / max(1, stats["steps"]) if torch.cuda.is_available() else None
    return {"syncs_a_step": syncs, "tokens_per_forward": stats["tokens"] / max(1, stats["request_forwards"])}
