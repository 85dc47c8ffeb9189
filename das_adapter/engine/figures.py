"""The figures of an engine without a host: to vLLM's log and its Prometheus endpoint."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from das_adapter.protocol.metrics import figures

logger = logging.getLogger("vllm.das_adapter")


def publish(engine: Any, answers: Sequence[Sequence[dict[str, Any]]]) -> None:
    """Log the figures since the last time, and set the Prometheus gauges, of vLLM's `AsyncLLM` or `LLMEngine`;
    `answers`: to `stats`, of each data-parallel engine's ranks."""
    from prometheus_client import Gauge

    parts = [max(ranks, key=lambda rank: rank.get("tokens", -1)) for ranks in answers]
    found = figures(parts, vars(engine).setdefault("_das_told", set()))
    if not sum(part["request_forwards"] for part in parts):
        return
    known: dict[str, Any] = vars(engine).setdefault("_das_gauges", {})
    for key, value in found.items():
        name = "vllm:das_" + key.removeprefix("das/").replace("/", "_")
        if name not in known:
            what = f"{key} of das-adapter, since it was last logged"
            gauge = Gauge(name, what, ["model_name"], multiprocess_mode="mostrecent")
            known[name] = gauge.labels(engine.vllm_config.model_config.served_model_name or "")
        known[name].set(value)
    names = ("tokens_per_forward", "acceptance_length", "draft_coverage", "history_tokens", "health")
    logger.info(
        "das: %.2f tokens per forward, acceptance length %.2f, coverage %.0f%%, history %.0f tokens, health %.0f",
        *(found.get(f"das/{name}", 0.0) * (100 if name == "draft_coverage" else 1) for name in names),
    )
