"""Where the time of a decode step goes, by vLLM's own use of PyTorch's profiler."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from das_adapter.bench.engines import SEEDS, Found, generate, prompts, sampling

ON_DEVICE, CALLS = ("kernel", "gpu_memcpy", "gpu_memset"), ("cuda_runtime", "cuda_driver")
"""Categories of a trace's events: what a device did, and what the host asked it for."""
MOST = 8
"""Kernels and calls that are listed, by their time."""


def profiler_args(directory: Path) -> dict[str, Any]:
    """Return the engine arguments of an engine that can be profiled."""
    written = {"torch_profiler_dir": str(directory), "torch_profiler_use_gzip": True}
    return {"profiler_config": {"profiler": "torch", "torch_profiler_with_stack": False, **written}}


def step_profile(
    llm: Any, directory: Path, batch: int, context: int, steps: int, vocabulary: int, **stock: Any
) -> Found:
    """Profile decode steps, of an engine with `profiler_args`; see `described`. `stock`: as for `sampling`."""
    asked = prompts(batch, context, vocabulary)
    for _ in range(2):  # the second profile begins with everything warm
        for earlier in directory.iterdir():
            earlier.unlink()
        llm.start_profile()
        generate(llm, asked, sampling([steps] * batch, range(batch), SEEDS, **stock))
        llm.stop_profile()
    return described(directory.glob("*.json.gz"), steps)


def described(traces: Iterable[Path], steps: int) -> Found:
    """Describe the traces of so many steps: `device_ms` and `waited_ms`, milliseconds of a step that the device worked,
    and that the host waited for it; `asked`, calls that a step makes; and what takes longest, microseconds of a step,
    of `kernels` and of `calls`."""
    kernels, calls, asked = Counter[str](), Counter[str](), 0
    for path in traces:
        with gzip.open(path, "rt") as file:
            events = json.load(file)["traceEvents"]
        for event in events:
            if event.get("cat") in ON_DEVICE:
                kernels[event["name"][:80]] += event["dur"]
            elif event.get("cat") in CALLS:
                calls[event["name"]] += event["dur"]
                asked += 1

    def each(times: Counter[str]) -> Found:
        return {name: round(us / steps, 1) for name, us in times.most_common(MOST)}

    waited = sum(us for name, us in calls.items() if "Synchronize" in name)
    times = {"device_ms": sum(kernels.values()) / 1e3 / steps, "waited_ms": waited / 1e3 / steps}
    return times | {"asked": round(asked / steps, 1), "kernels": each(kernels), "calls": each(calls)}
