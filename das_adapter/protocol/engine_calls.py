"""Calls of the workers of vLLM's asynchronous engine."""

from __future__ import annotations

import asyncio
from typing import Any


async def call_workers(engine: Any, method: str, args: tuple[Any, ...] = ()) -> list[list[Any]]:
    """Call a method of every worker of vLLM's `AsyncLLM`; return the answers of each data-parallel engine's ranks. Its
    own `collective_rpc` calls all of them too, and returns the answers of the first engine's alone."""
    core: Any = getattr(engine, "engine_core", None)
    if len(engines := getattr(core, "core_engines", ())) < 2:
        return [await engine.collective_rpc(method, args=args)]
    calls = (core._call_utility_async("collective_rpc", method, None, args, None, engine=one) for one in engines)
    return list(await asyncio.gather(*calls))
