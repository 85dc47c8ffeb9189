"""`lossless`: the policy's shape writes to long prompts, with drafts and without."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from das_adapter.bench import replay
from das_adapter.bench.engines import (
    IN_PROCESS,
    KEYED,
    Bar,
    Found,
    Plan,
    apart,
    engine,
    generate,
    prompts,
    sampling,
)
from das_adapter.core.index.store import HistoryStore

REQUESTS, WRITTEN = 8, 192
"""Requests with prompts that fill more than one tile of the attention kernels, and tokens that each writes."""


def measure(plan: Plan, *_: Any) -> Iterator[Found]:
    """Write without drafts; and with, from a history of these very texts with mistakes, for random weights repeat
    nothing. Kernels are batch-invariant; on a CPU they are anyway."""
    from das_adapter.config import DasConfig
    from das_adapter.protocol.engine_args import needs_v1

    environment = IN_PROCESS | {"VLLM_BATCH_INVARIANT": "0" if plan.tiny else "1"}
    off = KEYED if needs_v1(DasConfig()) else None  # V2's own noise is keyed
    texts, _ = apart(plan, _written, plan, off, None, env=environment)
    past = [(i, np.array(text, dtype=np.int32)) for i, text in enumerate(texts)]
    past = replay.corrupted(past, 0.1, plan.vocabulary)
    drafted, stats = apart(plan, _written, plan, replay.EAGER | {"speculate": "always"}, past, env=environment)
    different = sum(a != b for a, b in zip(texts, drafted, strict=True))
    about = {name: stats[name] for name in ("accepted_tokens", "draft_tokens", "error")}
    yield {"context": max(plan.contexts), "responses": len(texts), "different": different, **about}


BARS = (
    Bar(
        "responses to long prompts that differ with batch-invariant kernels",
        0,
        lambda f: f["different"] if f["accepted_tokens"] else None,
    ),
)


def _written(
    plan: Plan, das: dict[str, Any] | None, past: replay.Rollouts | None
) -> tuple[list[list[int]], dict[str, Any]]:
    context, written = max(plan.contexts), min(WRITTEN, 4 * plan.steps)
    llm = engine(plan, das, max_model_len=context + written + 32)
    if past:
        with tempfile.TemporaryDirectory() as directory, HistoryStore(directory) as store:
            llm.collective_rpc("das_rpc", args=("refresh", replay.kept(store, past)))
    asked, seeds = prompts(REQUESTS, context, plan.vocabulary), range(1, REQUESTS + 1)
    _, texts = generate(llm, asked, sampling([written] * REQUESTS, range(REQUESTS), seeds, seed=seeds))
    return texts, llm.collective_rpc("das_rpc", args=("stats", {}))[0] if das else {}
