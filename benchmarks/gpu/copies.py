"""Part 9, `copy`: passes of the quantised policy copy, as CUDA graphs and launched kernel by kernel, beside the
policy's steps; seconds to quantise it; sleep and wake at both levels."""

from __future__ import annotations

from typing import Any

from engines import SHAPES, Plan, apart, engine, prompts, runner_of, step_seconds

ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}


def copy(plan: Plan) -> dict[str, Any]:
    """Measure each format that there is on this device."""
    formats = ("int8",) if plan.tiny else ("int4", "fp8")
    return {"formats": {weights: apart(plan, _measure, plan, weights, env=ENVIRONMENT) for weights in formats}}


def bars(found: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Name, value and upper limit of each bar."""
    formats = found["formats"].values()
    rows = [row for of_format in formats for row in of_format["rows"].values()]
    return [
        ("batches whose passes replay no graph", sum(row["graphs"] == 0 for row in rows), 0),
        ("a pass of the copy, of the policy's step, at worst", max(r["pass_ms"] / r["step_ms"] for r in rows), 0.5),
        ("seconds to quantise the policy, at worst", max(f["requantise_s"] for f in formats), 1.5),
        ("errors of the policy copy after sleep", sum(bool(f["error"]) for f in formats), 0),
    ]


def _measure(plan: Plan, weights: str) -> dict[str, Any]:
    import torch

    sleeps = {"enable_sleep_mode": True} if torch.cuda.is_available() else {}
    das = {"drafter": "self", "self": {"weights": weights, "max_tokens": 4}, "budget": {"policy": "unlimited"},
           "toggle": {"mode": "off"}}  # fmt: skip
    context, vocabulary = min(plan.contexts), SHAPES[plan.shape]["vocab_size"]
    llm = engine(plan, das, max_model_len=context + 4 * plan.steps + 16, **sleeps)
    source = runner_of(llm).drafter.model_source
    sizes, rows = source.decode.sizes, {}
    for batch in plan.batches:
        row: dict[str, Any] = {"graphs": sum(size >= batch for size in sizes)}
        for name, some in (("pass_ms", sizes), ("launched_ms", [])):
            source.decode.sizes = some
            row[name] = 1e3 * _pass_seconds(llm, source, batch, context, plan.steps, vocabulary)
        source.decode.sizes = sizes
        rows[str(batch)] = row
    drafter = runner_of(llm).drafter
    drafter.controller.stopped = "measuring the policy"
    for batch, row in rows.items():
        row["step_ms"] = 1e3 * step_seconds(llm, int(batch), context, plan.steps, vocabulary)
    drafter.controller.stopped = None
    seconds = []
    for turn in range(4):
        step_seconds(llm, min(plan.batches), context, 1, vocabulary)
        if sleeps:
            llm.sleep(1 + turn % 2)
            llm.wake_up()
        seconds.append(llm.collective_rpc("das_rpc", args=("refresh", {"version": turn + 1}))[0].get("requantise_s"))
    stats = llm.collective_rpc("das_rpc", args=("stats", {}))[0]
    return {"rows": rows, "requantise_s": max(s or 1e9 for s in seconds), "error": stats["error"],
            "drafter_bytes": stats["drafter_bytes"], "full_bytes": stats["drafter_full_bytes"]}  # fmt: skip


def _pass_seconds(llm: Any, source: Any, batch: int, context: int, steps: int, vocabulary: int) -> float:
    from vllm import SamplingParams

    from das_adapter.core.latency import StepTimes

    source.drafts.passes = StepTimes(kinds=1)
    params = SamplingParams(temperature=1.0, max_tokens=steps, ignore_eos=True, detokenize=False, seed=1)
    llm.generate(prompts(batch, context, vocabulary), params, use_tqdm=False)
    model = source.drafts.passes.fit()
    assert model is not None
    return float(model.step(batch, batch, False))
