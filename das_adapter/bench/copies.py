"""`copy`: passes of the quantised policy copy, as CUDA graphs, beside the policy's steps; seconds to quantise it; sleep
and wake at both levels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from das_adapter.bench.engines import (
    FP8_CAPABILITY,
    IN_PROCESS,
    SHAPES,
    V1,
    Bar,
    Found,
    Plan,
    apart,
    engine,
    every,
    gpus,
    prompts,
    runner_of,
    step_seconds,
)

SLEEPS = 3
"""How often the engine sleeps with each format, at levels 1 and 2 in turn, and is quantised anew."""


def copy(plan: Plan) -> Iterator[Found]:
    """Measure each format that there is on this device."""
    found: Found = {"formats": {}}
    on_gpu = ("int4", "fp8") if min(gpus(), default=0.0) >= FP8_CAPABILITY else ("int4",)
    for weights in ("int8",) if plan.tiny else on_gpu:
        found["formats"][weights] = apart(plan, _measure, plan, weights, env=IN_PROCESS | V1)
        yield found


def _rows(found: Found) -> list[Found]:
    return [row for of_format in found["formats"].values() for row in of_format["rows"].values()]


BARS = (
    Bar("batches whose passes replay no graph", 0, lambda f: every(_rows(f), lambda r: r["graphs"] == 0)),
    Bar(
        "a pass of the copy, of the policy's step, at worst",
        0.5,
        lambda f: every(_rows(f), lambda r: r["pass_ms"] / r["step_ms"]),
    ),
    Bar(
        "seconds to quantise the policy, at worst",
        1.0,
        lambda f: every(f["formats"].values(), lambda x: x["requantise_s"]),
    ),
    Bar("errors of the policy copy after sleep", 0, lambda f: every(f["formats"].values(), lambda x: bool(x["error"]))),
)


def _measure(plan: Plan, weights: str) -> Found:
    import torch

    sleeps = {"enable_sleep_mode": True} if torch.cuda.is_available() else {}
    das = {
        "drafter": "self",
        "self": {"weights": weights},
        "max_draft_tokens": 4,
        "budget": "unlimited",
        "speculate": "always",
    }
    context, vocabulary = min(512, *plan.contexts), SHAPES[plan.shape]["vocab_size"]
    llm = engine(plan, das, max_model_len=context + 4 * plan.steps + 16, enable_prefix_caching=True, **sleeps)
    source = runner_of(llm).drafter.model_source
    sizes, rows = source.decode.sizes, dict[str, Any]()
    for batch in sorted({min(plan.batches), *plan.batches[2:3], max(plan.batches)}):
        pass_s = _pass_seconds(llm, source, batch, context, plan.steps, vocabulary)
        rows[str(batch)] = {"graphs": sum(size >= batch for size in sizes), "pass_ms": 1e3 * pass_s}
    drafter = runner_of(llm).drafter
    drafter.engine.controller.account.stop("measuring the policy")
    for measured, row in rows.items():
        row["step_ms"] = 1e3 * step_seconds(llm, int(measured), context, plan.steps, vocabulary).value
    drafter.engine.controller.account.sync()
    seconds = []
    for turn in range(SLEEPS):
        step_seconds(llm, min(plan.batches), context, 1, vocabulary, rounds=1)
        if sleeps:
            llm.sleep(1 + turn % 2)
            llm.wake_up()
        llm.collective_rpc("das_rpc", args=("refresh", {"version": turn + 1}))
        stats = llm.collective_rpc("das_rpc", args=("stats", {}))[0]
        seconds.append(stats["requantise_s"])
    return {
        "rows": rows,
        "requantise_s": max(seconds),
        "error": stats["error"],
        "drafter_bytes": stats["drafter_bytes"],
    }


def _pass_seconds(llm: Any, source: Any, batch: int, context: int, steps: int, vocabulary: int) -> float:
    from vllm import SamplingParams

    from das_adapter.core.latency import StepTimes

    source.drafts.passes = StepTimes(kinds=1)
    params = SamplingParams(temperature=1.0, max_tokens=steps, ignore_eos=True, detokenize=False, seed=1)
    llm.generate(prompts(batch, context, vocabulary), params, use_tqdm=False)
    model = source.drafts.passes.fit()
    assert model is not None
    return float(model.step(batch, batch, False))
