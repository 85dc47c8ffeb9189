"""Run twelve requests on vLLM's asynchronous engine with two data-parallel ranks; print
what they wrote, and what their workers counted.

    python data_parallel.py POLICY [BLOCK]
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from jobs import ON_CPU


async def main(policy: str, block: dict[str, Any] | None = None) -> None:
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
        **engine_args(None if block is None else parse(block)),
    }
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(policy, **settings))

    async def write(number: int) -> list[int]:
        extra = None if block is None else {"das_problem": number // 4}
        # so that one rank idles while the other one ends
        greedy = number % 3 == 0
        length = 20 + 5 * number
        params = SamplingParams(
            max_tokens=length,
            seed=number,
            temperature=1.0 - greedy,
            ignore_eos=True,
            extra_args=extra,
        )
        outputs: list[Any] = [
            o
            async for o in llm.generate(
                {"prompt_token_ids": [5, number // 4]}, params, str(number)
            )
        ]
        return list(outputs[-1].outputs[0].token_ids)

    found: dict[str, Any] = {"texts": await asyncio.gather(*map(write, range(12)))}
    found["v2"] = bool(getattr(llm.vllm_config, "use_v2_model_runner", False))
    found["asynchronous"] = llm.vllm_config.scheduler_config.async_scheduling
    if block is not None:
        found["first"] = len(await llm.collective_rpc("das_rpc", args=("hello", {})))
        names = ("tokens", "draft_tokens", "accepted_tokens", "error")
        counts = await call_workers(llm, "stats", {})
        found["counts"] = [
            [{name: rank[name] for name in names} for rank in ranks] for ranks in counts
        ]
    print("RESULT", json.dumps(found))
    llm.shutdown()


if __name__ == "__main__":
    os.environ.update(ON_CPU)
    asyncio.run(main(sys.argv[1], *map(json.loads, sys.argv[2:])))
