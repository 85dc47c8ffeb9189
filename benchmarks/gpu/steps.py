"""Parts 2 to 4: what an undrafted step costs beside stock's (`gate`), what drafted ones cost (`sweep`), and what a
step waits for (`trace`)."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engines import ON_CPU, SHAPES, V1, V2, Plan, apart, directory, engine, prompts, runner_of, step_seconds

IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
HISTORY: dict[str, Any] = {"drafter": "history"}
KEYED: dict[str, Any] = {"drafter": "none", "verify": {"noise": "keyed"}}
Arm = tuple[dict[str, Any] | None, dict[str, str], dict[str, Any]]
"""Block, environment, engine arguments."""


def gate_arms(plan: Plan) -> dict[str, Arm]:
    """Return the arms by name: stock's default, which seeds no request; every request seeded, without a drafter; and
    `history`. With random weights no text comes twice: `history` looks for drafts at every step and finds none."""
    ours = V2 if plan.runner == "V2" else V1
    arms: dict[str, Arm] = {"stock": (None, {} if not ON_CPU else ours, {}), "none, keyed": (KEYED, ours, {}),
                            "history": (HISTORY, ours, {})}  # fmt: skip
    if plan.runner == "V1" and not plan.tiny:
        arms["stock V1, synchronous"] = (None, V1, {"async_scheduling": False})
    return arms


def gate(plan: Plan) -> dict[str, Any]:
    """Milliseconds of an undrafted step, by arm, batch and context."""
    arms = {name: apart(plan, _gate_arm, plan, das, settings, env=env | (IN_PROCESS if plan.tiny else {}))
            for name, (das, env, settings) in gate_arms(plan).items()}  # fmt: skip
    worst = {name: max(times[at] / arms["stock"][at] for at in times) for name, times in arms.items()}
    return {"runner": plan.runner, "step_ms": arms, "of_stock_at_worst": worst}


def gate_bars(found: dict[str, Any]) -> list[tuple[str, float, float]]:
    worst, most = found["of_stock_at_worst"], 1.01 if found["runner"] == "V2" else 1.02
    return [(f"undrafted step of `{name}`, of stock's, at worst", worst[name], most)
            for name in ("none, keyed", "history")]  # fmt: skip


def _gate_arm(plan: Plan, das: dict[str, Any] | None, settings: dict[str, Any]) -> dict[str, float]:
    longest = max(plan.contexts) + plan.steps + 8
    llm = engine(plan, das, **({"max_model_len": longest, "enable_prefix_caching": True} | settings))
    vocabulary = SHAPES[plan.shape]["vocab_size"]
    return {f"{batch} x {context}": 1e3 * step_seconds(llm, batch, context, plan.steps, vocabulary)
            for context in plan.contexts for batch in plan.batches
            if context == min(plan.contexts) or batch == sorted(plan.batches)[1]}  # fmt: skip


def sweep(plan: Plan, out: Path) -> dict[str, Any]:
    """Fit the step-time model to steps with 0 to 15 draft tokens a request; the file serves `toggle.calibration`."""
    result = apart(plan, _sweep, plan, env=IN_PROCESS | V1)
    (out / "gpu_calibration.json").write_text(json.dumps(result, indent=2) + "\n")
    return result


def _sweep(plan: Plan) -> dict[str, Any]:
    from das_adapter.tools.calibrate import analyse, measure

    tiny = {"kv_cache_memory_bytes": 2**26, "enforce_eager": True} if plan.tiny else {}
    contexts = (min(plan.contexts) // 4, min(plan.contexts))
    measured = measure(str(directory(plan)), plan.batches, contexts, plan.drafts, 6, **tiny)
    return analyse(measured, SHAPES[plan.shape]) | {"samples": [asdict(s) for s in measured.samples]}


def sweep_bars(found: dict[str, Any]) -> list[tuple[str, float, float]]:
    best = min(kind["mape"] for kind in found["validation"].values())
    return [("error of the better step-time model on kinds of step that it did not see", best, 0.1)]


def trace(plan: Plan) -> dict[str, Any]:
    """Host synchronisations, idle share of the GPU, graph modes and the proposer's share, per step, ours and stock's:
    on the V1 runner, synchronous; and on V2, where the device drafts."""
    env, settings = (V2, {}) if plan.runner == "V2" else (V1, {"async_scheduling": False})
    return {
        "runner": plan.runner,
        "stock": apart(plan, _trace, plan, None, settings, env=IN_PROCESS | env),
        "history": apart(plan, _trace, plan, HISTORY, {}, env=IN_PROCESS | env),
    }


def trace_bars(found: dict[str, Any]) -> list[tuple[str, float, float]]:
    ours, stock = found["history"], found["stock"]
    missing = len(stock["graphs"].keys() - ours["graphs"].keys())
    added, most = ours["syncs_a_step"] - stock["syncs_a_step"], 0.05 if found["runner"] == "V2" else 1.0
    return [
        ("host synchronisations a step beyond stock's", added, most),
        ("share of a step that proposing takes", ours["propose_share"], 0.03),
        ("graphs that stock replays and ours does not", missing, 0),
    ]


def _trace(plan: Plan, das: dict[str, Any] | None, settings: dict[str, Any]) -> dict[str, Any]:
    import torch
    from torch.profiler import ProfilerActivity, profile
    from vllm import SamplingParams

    batch, context = max(plan.batches), min(plan.contexts)
    llm = engine(plan, das, **({"max_model_len": context + plan.steps + 8} | settings))
    runner, graphs = runner_of(llm), Counter[str]()
    dispatcher = getattr(runner, "cudagraph_dispatcher", None)  # V1's
    dispatch = dispatcher.dispatch if dispatcher else None

    def counted(*args: Any, **kwargs: Any) -> Any:
        found = dispatch(*args, **kwargs)
        graphs[f"{found[0].name} {found[1].num_tokens}"] += 1
        return found

    def rollout() -> None:
        params = SamplingParams(temperature=1.0, max_tokens=plan.steps, ignore_eos=True, detokenize=False)
        llm.generate(prompts(batch, context, SHAPES[plan.shape]["vocab_size"]), params, use_tqdm=False)

    rollout()
    if dispatcher:
        dispatcher.dispatch = counted
    if das is not None:
        llm.collective_rpc("das_rpc", args=("stats", {}))
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    with profile(activities=kinds) as profiled:
        rollout()
    events = profiled.events()
    begin, end = min(e.time_range.start for e in events), max(e.time_range.end for e in events)
    syncs = sum("Synchronize" in e.name for e in events)
    busy = sum(e.time_range.elapsed_us() for e in events if "CUDA" in str(e.device_type))
    propose = 0.0
    if das is not None:
        stats = llm.collective_rpc("das_rpc", args=("stats", {}))[0]
        propose = sum(stats["propose_seconds"]) / stats["busy_seconds"]
    return {"syncs_a_step": syncs / plan.steps, "gpu_busy": min(1.0, busy / (end - begin)), "graphs": dict(graphs),
            "propose_share": propose, "step_ms": (end - begin) / plan.steps / 1e3}  # fmt: skip
