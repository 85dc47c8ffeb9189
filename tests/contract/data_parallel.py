"""Run six requests on vLLM's asynchronous engine with two data-parallel engines; print what its workers counted."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

from jobs import ON_CPU, POLICY


async def main() -> None:
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from das_adapter.config import parse
    from das_adapter.protocol.engine_args import engine_args
    from das_adapter.protocol.messages import call_workers

    settings = {
        "data_parallel_size": 2,
        "dtype": "float32",
        "max_model_len": 256,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 2**26,
    }
    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(str(POLICY), **settings, **engine_args(parse({"drafter": "history"})))
    )

    async def write(number: int) -> int:
        extra = {"das_problem": number}
        params = SamplingParams(max_tokens=20, seed=number, ignore_eos=True, extra_args=extra)
        outputs: list[Any] = [o async for o in llm.generate({"prompt_token_ids": [5, number]}, params, str(number))]
        return len(outputs[-1].outputs[0].token_ids)

    written = await asyncio.gather(*map(write, range(6)))
    first = await llm.collective_rpc("das_rpc", args=("hello", {}))
    counts = await call_workers(llm, "stats", {})
    tokens = [[rank["tokens"] for rank in ranks] for ranks in counts]
    print("RESULT", json.dumps({"written": sum(written), "first": len(first), "tokens": tokens}))
    llm.shutdown()


if __name__ == "__main__":
    os.environ.update(ON_CPU)
    asyncio.run(main())
