"""`copy`: seconds to quantise the policy, and its copy after sleep at both levels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from das_adapter.bench.engines import (
    IN_PROCESS,
    Bar,
    Found,
    Plan,
    apart,
    engine,
    step_seconds,
)

SLEEPS = 3
"""How often the engine sleeps with each format, at levels 1 and 2 in turn, and is
quantised anew.
"""


def measure(plan: Plan, *_: Any) -> Iterator[Found]:
    """Measure each format that there is on this device."""
    found: Found = {"formats": {}}
    for weights in apart(plan, formats, plan):
        found["formats"][weights] = apart(plan, _measure, plan, weights, env=IN_PROCESS)
        yield found


BARS = (
    Bar(
        "seconds to quantise the policy, at worst",
        1.0,
        lambda f: max(x["requantise_s"] for x in f["formats"].values()),
    ),
    Bar(
        "formats whose copy failed, or drafted nothing, before or after sleep",
        0,
        lambda f: sum(
            bool(x["error"]) or not x["draft_tokens"] for x in f["formats"].values()
        ),
    ),
)


def formats(plan: Plan) -> tuple[str, ...]:
    """Return the formats that there are on this device; of those of a CPU one."""
    import torch

    if plan.tiny:
        return ("int8",)
    return (
        ("int4", "fp8") if torch.cuda.get_device_capability() >= (8, 9) else ("int4",)
    )


def _measure(plan: Plan, weights: str) -> Found:
    import torch

    sleeps: dict[str, Any] = (
        {"enable_sleep_mode": True} if torch.cuda.is_available() else {}
    )
    das: dict[str, Any] = {
        "drafter": "self",
        "self": {"weights": weights},
        "budget": "unlimited",
    }
    context = min(512, *plan.contexts)
    longest = context + 4 * plan.steps + 16
    llm = engine(
        plan,
        das | {"speculate": "always"},
        2 * longest,
        max_model_len=longest,
        **sleeps,
    )
    seconds = []
    told = []
    for turn in range(SLEEPS + 1):
        step_seconds(llm, min(plan.batches), context, plan.steps, plan.vocabulary)
        # what failed is over at a weight sync
        told.append(llm.collective_rpc("das_rpc", args=("stats", {}))[0])
        if turn == SLEEPS:
            break
        if sleeps:
            llm.sleep(1 + turn % 2)
            llm.wake_up()
        llm.collective_rpc("das_rpc", args=("refresh", {"version": turn + 1}))
        seconds.append(
            llm.collective_rpc("das_rpc", args=("stats", {}))[0]["requantise_s"]
        )
    return {
        "requantise_s": max(seconds),
        "drafter_bytes": told[-1]["drafter_bytes"],
        "draft_tokens": min(stats["draft_tokens"] for stats in told),
        "error": next((stats["error"] for stats in told if stats["error"]), None),
    }
