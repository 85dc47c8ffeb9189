"""`das-adapter calibrate`: what a decode step of a model costs on this machine, by batch, context and draft length."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

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
    held_out: bool = False
    """Whether the fit does not see it."""


Progress = Callable[[str], None]
"""Hears which of the grid's sizes is measured next."""


class Measured(NamedTuple):
    """Step times of an engine."""

    samples: list[Sample]
    passes: list[Sample]
    """Of the passes of the model that drafts, without drafts of their own."""
    sizes: tuple[int, ...] = ()
    """Tokens for which the engine captured CUDA graphs."""


def measure(
    model: str,
    batches: Sequence[int],
    contexts: Sequence[int],
    drafts: Sequence[int],
    rounds: int,
    das: DasConfig | None = None,
    progress: Progress = lambda _: None,
    **engine: Any,
) -> Measured:
    """Run a real engine over the grid; draft lengths alternate from step to step, so that drift affects all equally.

    Args:
        model: path or name; its weights are not read (`load_format: dummy`) unless `engine` says otherwise.
        batches, contexts, drafts: requests, tokens of each request's text on average over the steps, draft tokens per
            request.
        rounds: steps of each kind.
        das: block of a drafter with a model, whose passes are measured as well; None: there is none.
        engine: further arguments of `vllm.LLM`.
    """
    das = das or DasConfig()
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_V2_MODEL_RUNNER="0")
    from vllm import LLM

    from das_adapter.engine.timing import captured_tokens
    from das_adapter.engine.v1 import worker
    from das_adapter.engine.v1.sweep import SweepDrafter
    from das_adapter.protocol.engine_args import v1_args

    args = v1_args(das)
    most = max(das.model_tokens, *drafts)
    args["speculative_config"]["num_speculative_tokens"] = most
    if das.neural:
        vars(worker).update(Proposer=SweepDrafter)  # vLLM makes none for its own methods
    else:
        args["speculative_config"]["model"] = "das_adapter.engine.v1.sweep.SweepDrafter"
    SweepDrafter.passes = (das.model_tokens,) if das.copies_policy or das.neural else ()
    lengths = sorted({0, *drafts})
    steps = rounds * (len(lengths) + sum(1 + most for most in SweepDrafter.passes)) + 4
    settings = {**_settings(max(contexts) + steps + most + 2, max(batches)), "enable_prefix_caching": False}
    llm = LLM(model, **{**settings, **args, **engine})
    SweepDrafter.turns = tuple(lengths)
    measured = Measured([], [], captured_tokens(llm.llm_engine.vllm_config))
    for number, (requests, context) in enumerate(product(batches, contexts)):
        progress(f"{requests} requests of {context} tokens, with drafts")
        SweepDrafter.samples, SweepDrafter.passed = [], []
        _generate(llm, requests, context, steps, steps)
        timed = {draft: [s for b, _, d, s in SweepDrafter.samples if (b, d) == (requests, draft)] for draft in lengths}
        passed = [s for b, _, s in SweepDrafter.passed if b == requests]
        for place, (draft, seconds) in enumerate(timed.items()):
            _add(measured.samples, requests, context, draft, seconds[1:], held_out=(number + place) % 3 == 2)
        _add(measured.passes, requests, context, 0, passed[1:], held_out=number % 3 == 2)
    return measured


def _add(samples: list[Sample], requests: int, context: int, drafts: int, seconds: list[float], held_out: bool) -> None:
    """Add a sample, if there are enough steps: where the KV cache is small, the requests don't run together."""
    if len(seconds) >= 3:
        samples.append(Sample(requests, context, drafts, float(np.median(seconds)), len(seconds), held_out))


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
        _generate(llm, requests, context, steps, 2)  # the prompts' keys and values are cached from here on
        short, long = (min(_generate(llm, requests, context, steps, n) for _ in range(2)) for n in (2, 2 + steps))
        samples.append(Sample(requests, context, 0, max(1e-9, long - short) / steps, steps))
    llm.llm_engine.engine_core.shutdown()
    return samples


def _settings(longest: int, requests: int) -> dict[str, Any]:
    """Return the arguments of both engines; on a CPU vLLM would take nearly all memory that there is."""
    from vllm.platforms import current_platform

    room = {"gpu_memory_utilization": 0.4} if current_platform.is_cpu() else {}
    sizes = {"max_num_seqs": requests, "max_model_len": longest}
    return {"load_format": "dummy", "skip_tokenizer_init": True, "seed": 0, **sizes, **room}


def _generate(llm: Any, requests: int, context: int, steps: int, tokens: int) -> float:
    """Generate so many tokens for requests whose texts have `context` tokens, on average over so many steps; return the
    seconds it took."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    length = max(1, context - steps // 2)
    prompts = [{"prompt_token_ids": [(7 * i + j) % 50 + 1 for j in range(length)]} for i in range(requests)]
    begin = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - begin


def analyse(measured: Measured, stock: Sequence[Sample] = ()) -> dict[str, Any]:
    """Fit the models of steps and of the drafting model's passes, and judge them on what was held out.

    Args:
        measured: of `measure`.
        stock: of `measure_stock`, where there are any.

    Raises:
        DasError: too few samples.
    """
    held_out = sum(s.held_out for s in measured.samples)
    if len(measured.samples) < held_out + 6 or not held_out:
        raise DasError(
            f"calibrate: found {len(measured.samples) - held_out} kinds of step to fit and {held_out} to judge by, "
            "needed: 6 and 1; measure more batches, contexts or draft lengths"
        )
    line, judged = _fitted(measured.samples, measured.sizes)
    result: dict[str, Any] = {"line": line, "stock": None, "validation": {"line": judged}}
    if stock:
        result["stock"] = {"line": _fitted(stock)[0], "samples": [asdict(s) for s in stock]}
    if len({s.held_out for s in measured.passes}) == 2:
        result["passes"], result["validation"]["passes"] = _fitted(measured.passes)
    return result


def _fitted(samples: Sequence[Sample], sizes: tuple[int, ...] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fit a step model (see `core.latency.fit`), and return it with its mean relative error on what was held out."""
    b, s, d, t, hidden = np.array([(x.requests, x.context, x.drafts, x.seconds, x.held_out) for x in samples]).T
    n, shown = b * (1 + d), hidden == 0
    model = fit(n[shown], b[shown], d[shown] > 0, t[shown], (b * s)[shown], sizes=sizes)
    errors = np.abs(model.seconds(n, b, d > 0, b * s) / t - 1)[~shown]
    return model.to_dict(), {"mape": float(errors.mean()) if len(errors) else None, "held_out": len(errors)}


def write(out: Path, model: str, measured: Measured, result: dict[str, Any], command: str) -> None:
    """Write the calibration with its provenance (`calibration` reads it)."""
    content = {
        "provenance": provenance() | {"command": command, "model": model, "time": time.strftime("%Y-%m-%dT%H:%M:%S")},
        **result,
        "samples": [asdict(s) for s in measured.samples],
        "pass_samples": [asdict(s) for s in measured.passes],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    save(out, content)
