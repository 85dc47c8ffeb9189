"""`kernel`: the sampling kernel against its definition, and its time against vLLM's sampler. Needs neither vLLM nor the
compiled core."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.benchmark import Timer

from das_adapter.bench.engines import CONTRACT, SHAPES, SOURCE, Bar, Found, Plan, apart, has_vllm

NEAR = 3e-5
"""Scores that are this close may change places with the last bits of a device's logarithm."""
COMPARED = 96
"""Rows that are compared with the definition, at most, spread over all."""


def measure(plan: Plan, *_: Any) -> Iterator[Found]:
    """Run the part."""
    yield apart(plan, kernel, plan)


def kernel(plan: Plan) -> Found:
    """Compare tokens with the definition, and time both samplers' draws, by number of rows."""
    from das_adapter.engine.v1.keyed_sample import Keys, keyed_sample

    vocabulary, device = SHAPES[plan.shape]["vocab_size"], "cuda" if torch.cuda.is_available() else "cpu"
    stock = _stock() if has_vllm() else None
    rows: dict[str, Any] = {}
    for count in plan.rows:
        seeds = torch.arange(count, device=device) * 2**33 + 5
        logits, keys = _logits(count, vocabulary, device), Keys(seeds, seeds % 4099)
        rows[str(count)] = {
            "wrong": _wrong(logits, keys, keyed_sample(logits, keys)),
            "keyed_us": microseconds(lambda x=logits, k=keys: keyed_sample(x, k)),
        }
        if stock is not None:
            rows[str(count)]["stock_us"] = microseconds(lambda x=logits: stock(x, {}, None, None))
        del logits
    return {"rows": rows}


def _logits(count: int, vocabulary: int, device: str) -> torch.Tensor:
    """Make float32 logits, of some of which a part, or all, is excluded."""
    generator = torch.Generator(device).manual_seed(count)
    logits = torch.randn(count, vocabulary, generator=generator, device=device) * 3
    logits[::3, 7:50] = -torch.inf
    logits[7::64, 12:], logits[8::64, :-1] = -torch.inf, -torch.inf
    return logits


BARS = (
    Bar(
        "draws that differ from the definition, near-ties apart",
        0,
        lambda f: sum(row["wrong"]["draws"] for row in f["rows"].values()),
    ),
    Bar(
        "keyed sampling, of the time of stock vLLM's draw",
        1.0,
        lambda f: max(r["keyed_us"] / r["stock_us"] for r in f["rows"].values()),
    ),
)


def _wrong(logits: torch.Tensor, keys: Any, drawn: torch.Tensor) -> Found:
    """Compare some rows (the definition is NumPy's) with the definition, which a wheel does not have."""
    if not CONTRACT.is_dir():
        return {}
    sys.path.append(str(SOURCE / "tests" / "unit"))
    from reference_noise import gumbel

    some = torch.linspace(0, len(logits) - 1, min(len(logits), COMPARED), device=logits.device).long()
    x = logits[some].cpu().numpy()
    points = x + gumbel(*(key[some].cpu().numpy() for key in keys), np.arange(x.shape[1]))
    tokens, best, at = drawn[some].cpu().numpy(), points.argmax(axis=1), np.arange(len(x))
    near = points[at, best] - points[at, tokens] <= NEAR
    wrong = (tokens != best) & ~near
    return {"draws": int(wrong.sum()), "near_ties": int((tokens != best).sum() - wrong.sum()), "compared": len(x)}


def _stock() -> Any:
    """Return how vLLM's V1 sampler draws from logits."""
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    return TopKTopPSampler()


def microseconds(call: Any) -> float:
    """Return the time of a call among many in a row: the host is ahead of the device, as it is in an engine."""
    return 1e6 * float(Timer("call()", globals={"call": call}).blocked_autorange().median)
