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
    stats_of,
    step_times,
)

SLEEPS = 3
"""Number of times that the engine sleeps with each format, at levels 1 and 2 in turn,
and is quantised anew.
"""


def measure(plan: Plan, *_: Any) -> Iterator[Found]:
    """Measure each format that there is on this device."""
    found: Found = {"formats": {}}
    for weights in apart(plan, formats, plan):
        figures = apart(plan, _measure, plan, weights, env=IN_PROCESS)
        found["formats"][weights] = figures
        yield found


def _slowest(found: Found) -> float:
    """Return the most seconds that quantising took."""
    seconds = [figures["requantise_s"] for figures in found["formats"].values()]
    return float(max(seconds))


def _num_failed(found: Found) -> int:
    """Return the number of formats whose copy failed, or drafted nothing."""
    count = 0
    for figures in found["formats"].values():
        if figures["error"] or not figures["draft_tokens"]:
            count += 1
    return count


BARS = (
    Bar("seconds to quantise the policy, at worst", 1.0, _slowest),
    Bar(
        "formats whose copy failed, or drafted nothing, before or after sleep",
        0,
        _num_failed,
    ),
)


def formats(plan: Plan) -> tuple[str, ...]:
    """Return the formats that there are on this device; on a CPU one of its own."""
    import torch

    if plan.tiny:
        return ("int8",)
    if torch.cuda.get_device_capability() >= (8, 9):
        return ("int4", "fp8")
    return ("int4",)


def _measure(plan: Plan, weights: str) -> Found:
    import torch

    sleeps = torch.cuda.is_available()
    das: dict[str, Any] = {
        "drafter": "self",
        "self": {"weights": weights},
        "budget": "unlimited",
        "speculate": "always",
    }
    context = min(512, *plan.contexts)
    longest = context + 4 * plan.steps + 16
    settings: dict[str, Any] = {"max_model_len": longest}
    if sleeps:
        settings["enable_sleep_mode"] = True
    llm = engine(plan, das, 2 * longest, **settings)
    seconds = []
    stats = []
    for turn in range(SLEEPS + 1):
        step_times(llm, min(plan.batches), context, plan.steps, plan.vocabulary)
        # a weight sync clears errors
        stats.append(stats_of(llm))
        if turn == SLEEPS:
            break
        if sleeps:
            llm.sleep(1 + turn % 2)
            llm.wake_up()
        refresh = ("refresh", {"version": turn + 1})
        llm.collective_rpc("das_rpc", args=refresh)
        seconds.append(stats_of(llm)["requantise_s"])
    errors = [each["error"] for each in stats if each["error"]]
    return {
        "requantise_s": max(seconds),
        "drafter_bytes": stats[-1]["drafter_bytes"],
        "draft_tokens": min(each["draft_tokens"] for each in stats),
        "error": errors[0] if errors else None,
    }
