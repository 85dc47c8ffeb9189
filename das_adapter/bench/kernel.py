"""`kernel`: the sampling kernel's time against vLLM's sampler. Needs neither vLLM nor the compiled core."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.benchmark import Timer

from das_adapter.bench.engines import SHAPES, Bar, Found, Plan, apart


def measure(plan: Plan, *_: Any) -> Iterator[Found]:
    """Run the part."""
    yield apart(plan, kernel, plan)


def kernel(plan: Plan) -> Found:
    """Time both samplers' draws, by number of rows."""
    from das_adapter.engine.v1.keyed_sample import Keys, keyed_sample

    vocabulary, device = SHAPES[plan.shape]["vocab_size"], "cuda" if torch.cuda.is_available() else "cpu"
    rows: dict[str, Any] = {}
    for count in plan.rows:
        seeds, logits = torch.arange(count, device=device), torch.randn(count, vocabulary, device=device)
        keys = Keys(seeds * 2**33, seeds)
        rows[str(count)] = {"keyed_us": microseconds(lambda x=logits, k=keys: keyed_sample(x, k))}
        with contextlib.suppress(ImportError):  # without vLLM there is nothing to compare with
            from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

            stock = TopKTopPSampler()
            rows[str(count)]["stock_us"] = microseconds(lambda x=logits, s=stock: s(x, {}, None, None))
        del logits
    return {"rows": rows}


BARS = (
    Bar(
        "keyed sampling, of the time of stock vLLM's draw",
        1.0,
        lambda f: max(r["keyed_us"] / r["stock_us"] for r in f["rows"].values()),
    ),
)


def microseconds(call: Any) -> float:
    """Return the time of a call among many in a row: the host is ahead of the device, as it is in an engine."""
    return 1e6 * float(Timer("call()", globals={"call": call}).blocked_autorange().median)
