"""`das-adapter calibrate`: what a decode step of a model costs on this machine, by batch, context and draft length."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from das_adapter.bench.engines import generate, prompts, step_seconds
from das_adapter.config import DasConfig
from das_adapter.core.latency import fit
from das_adapter.errors import DasError
from das_adapter.tools.provenance import provenance, save


@dataclass(frozen=True)
class Sample:
    """Median time of the steps of one kind."""

    requests: int
    context: int
    drafts: int
    seconds: float
    steps: int


VOCABULARY = 50
"""Tokens that prompts have; a policy has more."""
Progress = Callable[[str], None]
"""Hears which of the grid's sizes is measured next."""


def measure(
    model: str,
    batches: Sequence[int],
    contexts: Sequence[int],
    drafts: Sequence[int],
    rounds: int,
    progress: Progress = lambda _: None,
    **engine: Any,
) -> tuple[list[Sample], tuple[int, ...]]:
    """Run a real engine over the grid; draft lengths alternate from step to step, so that drift affects all equally.
    Return its step times, and the tokens for which it captured CUDA graphs.

    Args:
        model: path or name; its weights are not read (`load_format: dummy`) unless `engine` says otherwise.
        batches, contexts, drafts: requests, tokens of each request's text on average over the steps, draft tokens per
            request.
        rounds: steps of each kind.
        engine: further arguments of `vllm.LLM`.
    """
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_V2_MODEL_RUNNER="0")
    from vllm import LLM

    from das_adapter.engine.timing import captured_tokens
    from das_adapter.engine.v1.sweep import SweepDrafter
    from das_adapter.protocol.engine_args import engine_args

    most, drafter = max(1, *drafts), f"{SweepDrafter.__module__}.SweepDrafter"
    speculative = {"method": "custom_class", "model": drafter, "num_speculative_tokens": most}
    args = {**engine_args(DasConfig()), "speculative_config": speculative}
    lengths = sorted({0, *drafts})
    steps = rounds * len(lengths) + 4
    settings = {**_settings(max(contexts) + steps + most + 2, max(batches)), "enable_prefix_caching": False}
    llm = LLM(model, **{**settings, **args, **engine})
    SweepDrafter.turns = tuple(lengths)
    samples = []
    for requests, context in product(batches, contexts):
        progress(f"{requests} requests of {context} tokens, with drafts")
        SweepDrafter.samples = []
        asked = prompts(requests, max(1, context - steps // 2), VOCABULARY)
        generate(llm, asked, [steps] * requests, range(requests), range(requests))
        for draft in lengths:
            seconds = [s for b, _, d, s in SweepDrafter.samples if (b, d) == (requests, draft)][1:]
            if len(seconds) >= 3:  # where the KV cache is small, the requests don't run together
                samples.append(Sample(requests, context, draft, float(np.median(seconds)), len(seconds)))
    return samples, captured_tokens(llm.llm_engine.vllm_config)


def measure_stock(
    model: str,
    batches: Sequence[int],
    contexts: Sequence[int],
    steps: int,
    progress: Progress = lambda _: None,
    **engine: Any,
) -> list[Sample]:
    """Measure the decode steps of a vLLM engine without das-adapter, with its own choice of model runner and
    scheduling; arguments as for `measure`, before which it must run, and `steps` to measure of each kind.

    Raises:
        DasError: the engine did not start.
    """
    from vllm import LLM

    try:
        llm = LLM(model, **{**_settings(max(contexts) + steps + 8, max(batches)), **engine})
    except (OSError, RuntimeError, ValueError) as error:
        raise DasError(f"calibrate: vLLM's engine did not start with the model {model!r}: {error}") from error
    samples = []
    for requests, context in product(batches, contexts):
        progress(f"{requests} requests of {context} tokens, stock vLLM")
        seconds = step_seconds(llm, requests, max(1, context - steps // 2), steps, VOCABULARY, rounds=2).value
        samples.append(Sample(requests, context, 0, seconds, steps))
    llm.llm_engine.engine_core.shutdown()
    return samples


def _settings(longest: int, requests: int) -> dict[str, Any]:
    """Return the arguments of both engines; on a CPU vLLM would take nearly all memory that there is."""
    from vllm.platforms import current_platform

    room = {"gpu_memory_utilization": 0.4} if current_platform.is_cpu() else {}
    sizes = {"max_num_seqs": requests, "max_model_len": longest}
    return {"load_format": "dummy", "skip_tokenizer_init": True, "seed": 0, **sizes, **room}


def analyse(samples: Sequence[Sample], sizes: tuple[int, ...], stock: Sequence[Sample]) -> dict[str, Any]:
    """Fit the model of steps to two of three samples, and judge it on the third.

    Args:
        samples, sizes: of `measure`.
        stock: of `measure_stock`.

    Raises:
        DasError: too few samples.
    """
    if len(samples) < 9:
        raise DasError(
            f"calibrate: found {len(samples)} kinds of step, needed: 9; measure more batches, contexts or draft lengths"
        )
    mixed = [samples[i] for i in np.random.default_rng(0).permutation(len(samples))]
    held_out, shown = mixed[: len(samples) // 3], mixed[len(samples) // 3 :]
    line = fit(*_columns(shown), sizes=sizes)
    n, b, drafted, seconds, context = _columns(held_out)
    error = float(np.abs(line.seconds(n, b, drafted, context) / seconds - 1).mean())
    return {
        "line": asdict(line),
        "stock": {"line": asdict(fit(*_columns(stock))), "samples": [asdict(s) for s in stock]},
        "validation": {"mape": error, "held_out": len(held_out)},
    }


def _columns(samples: Sequence[Sample]) -> tuple[Any, Any, Any, Any, Any]:
    """Return what `core.latency.fit` takes: tokens, requests, whether there are drafts, seconds, tokens of context."""
    b, s, d, seconds = np.array([(x.requests, x.context, x.drafts, x.seconds) for x in samples]).T
    return b * (1 + d), b, d > 0, seconds, b * s


def write(out: Path, model: str, samples: Sequence[Sample], result: dict[str, Any], command: str) -> None:
    """Write the calibration with its provenance (`calibration` reads it)."""
    content = {
        "provenance": provenance() | {"command": command, "model": model, "time": time.strftime("%Y-%m-%dT%H:%M:%S")},
        **result,
        "samples": [asdict(s) for s in samples],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    save(out, content)
