"""The figures of engines without a host, as Prometheus sees them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from prometheus_client import REGISTRY
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from das_adapter.engine import front_end
from das_adapter.protocol.metrics import Counters


def engine(process: int = 0) -> Any:
    """vLLM's front end, as far as it is looked at; `process`: of its API servers."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(served_model_name="policy"),
        parallel_config=SimpleNamespace(_api_process_rank=process),
    )
    return SimpleNamespace(vllm_config=config, log_stats=True)


def stats(draft_tokens: int) -> dict[str, Any]:
    """Return what an engine's worker answers."""
    return Counters(
        request_forwards=10, draft_tokens=draft_tokens, drafted_forwards=3
    ).read_and_reset()


def shown() -> float | None:
    """Return what the endpoint shows."""
    return REGISTRY.get_sample_value("vllm:das_draft_tokens", {"model_name": "policy"})


def test_the_gauges_of_a_process_are_those_of_the_engine_that_was_asked_last() -> None:
    first = engine()
    second = engine()
    for told, drafted in ((first, 6), (second, 7), (first, 8)):
        front_end.publish(told, [[stats(drafted)]])
        assert shown() == drafted
    unregister_vllm_metrics()  # as another engine does
    assert shown() is None
    front_end.publish(first, [[stats(9)]])
    assert shown() == 9


@pytest.mark.parametrize(("process", "asked"), [(-1, 1), (0, 1), (1, 0)])
def test_one_of_an_engines_api_servers_asks_for_its_figures(
    process: int, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    async def call_workers(of: Any, command: str, payload: Any) -> Any:
        calls.append(command)
        return [[stats(5)]]

    async def stock(_: Any) -> None:
        return None

    monkeypatch.setattr(front_end, "alone", lambda _: True)
    monkeypatch.setattr(front_end, "call_workers", call_workers)
    asyncio.run(front_end.log_figures.replacement(stock)(engine(process)))
    assert calls == ["stats"] * asked
