"""`das-adapter calibrate`: what a decode step of a model costs on this machine, by batch, context and draft length."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from das_adapter.config import DasConfig
from das_adapter.core.hardware import Hardware
from das_adapter.core.latency import StepModel, fit
from das_adapter.core.roofline import Roofline
from das_adapter.errors import DasError
from das_adapter.tools.machine import hardware

logger = logging.getLogger("das_adapter")

_ACCEPTED = (0.2, 0.5, 0.8)
"""Shares of a draft's tokens that count as accepted when on/off decisions are compared."""

_TOO_FEW = (
    "calibrate: too few steps of %d requests with %d tokens of context and %d draft tokens: is the KV cache small?"
)


@dataclass(frozen=True)
class Sample:
    """Median time of the steps of one kind."""

    requests: int
    context: int
    drafts: int
    seconds: float
    steps: int
    held_out: bool
    """Whether the fit does not see it."""
    ragged: bool = False
    """Whether every second request had twice as many draft tokens, and the others none; the fit never sees these."""


@dataclass(frozen=True)
class Measured:
    """Step times of an engine."""

    samples: list[Sample]
    passes: list[Sample] = field(default_factory=list)
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
    ragged: Sequence[int] = (),
    **engine: Any,
) -> Measured:
    """Run a real engine over the grid; draft lengths alternate from step to step, so that drift affects all equally.

    Args:
        model: path or name; its weights are not read (`load_format: dummy`) unless `engine` says otherwise.
        batches, contexts, drafts: requests, tokens of each request's text on average over the steps, draft tokens per
            request.
        rounds: steps of each kind.
        das: block of a drafter with a model, whose passes are measured as well; None: there is none.
        ragged: draft tokens per request on average, where every second one drafts, in batches of two and more.
        engine: further arguments of `vllm.LLM`.
    """
    das = das or DasConfig()
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_V2_MODEL_RUNNER="0")
    from vllm import LLM, SamplingParams

    from das_adapter.engine.timing import captured_tokens
    from das_adapter.engine.v1 import worker
    from das_adapter.engine.v1.sweep import SweepDrafter
    from das_adapter.protocol.engine_args import v1_args

    args = v1_args(das)
    most = max(das.model_tokens, *drafts, *(2 * mean for mean in ragged))
    args["speculative_config"]["num_speculative_tokens"] = most
    if das.neural:
        vars(worker).update(ControlledDrafter=SweepDrafter)  # vLLM makes none for its own methods
    else:
        args["speculative_config"]["model"] = "das_adapter.engine.v1.sweep.SweepDrafter"
    SweepDrafter.passes = (das.model_tokens,) if das.copies_policy or das.neural else ()
    steps = rounds * (len({0, *drafts}) + len(ragged) + sum(1 + most for most in SweepDrafter.passes)) + 4
    longest = max(contexts) + steps + most + 2
    settings = {**_settings(longest, max(batches)), "enable_prefix_caching": False}
    llm = LLM(model, **{**settings, **args, **engine})
    SweepDrafter.turns, SweepDrafter.ragged = (0, *(d for d in drafts if d)), tuple(ragged)
    kinds = [(draft, False) for draft in sorted({0, *drafts})] + [(mean, True) for mean in ragged]
    measured = Measured([], [], captured_tokens(llm.llm_engine.vllm_config))
    for number, (requests, context) in enumerate(product(batches, contexts)):
        SweepDrafter.samples, SweepDrafter.passed = [], []
        params = SamplingParams(temperature=1.0, max_tokens=steps, ignore_eos=True, detokenize=False)
        llm.generate(_prompts(requests, context, steps), params, use_tqdm=False)
        for place, (draft, uneven) in enumerate(kinds):
            times = [s for b, _, d, s, of in SweepDrafter.samples if (b, d, of) == (requests, draft, uneven)][1:]
            if seen := _median(times):
                held_out = uneven or (number + place) % 3 == 2
                measured.samples.append(Sample(requests, context, draft, *seen, held_out, uneven))
            elif requests > 1 or not uneven:
                logger.warning(_TOO_FEW, requests, context, draft)
        if seen := _median([s for b, _, s in SweepDrafter.passed if b == requests][1:]):
            measured.passes.append(Sample(requests, context, 0, *seen, held_out=number % 3 == 2))
    return measured


def _median(times: Sequence[float]) -> tuple[float, int] | None:
    """Return the median time and how many there are; None: too few."""
    return (float(np.median(times)), len(times)) if len(times) >= 3 else None


def measure_stock(
    model: str, batches: Sequence[int], contexts: Sequence[int], steps: int, **engine: Any
) -> list[Sample]:
    """Measure the decode steps of a vLLM engine without das-adapter, with its own choice of model runner and
    scheduling, in a process of its own; arguments as for `measure`, and `steps` to measure of each kind.

    Raises:
        DasError: the engine failed; its messages are above.
    """
    import vllm  # noqa: F401  # the process need not import it again

    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        try:
            return pool.submit(_stock_samples, model, batches, contexts, steps, engine).result()
        except Exception as error:
            raise DasError("calibrate: stock vLLM's engine did not run: see its messages") from error


def _stock_samples(
    model: str, batches: Sequence[int], contexts: Sequence[int], steps: int, engine: dict[str, Any]
) -> list[Sample]:
    from vllm import LLM, SamplingParams

    llm = LLM(model, **{**_settings(max(contexts) + steps + 8, max(batches)), **engine})

    def seconds(requests: int, context: int, tokens: int) -> float:
        params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        prompts = _prompts(requests, context, steps)
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - begin

    samples = []
    for requests, context in product(batches, contexts):
        seconds(requests, context, 2)  # the prompts' keys and values are cached from here on
        short, long = (min(seconds(requests, context, n) for _ in range(2)) for n in (2, 2 + steps))
        samples.append(Sample(requests, context, 0, max(1e-9, long - short) / steps, steps, False))
    llm.llm_engine.engine_core.shutdown()
    return samples


def _settings(longest: int, requests: int) -> dict[str, Any]:
    """Return the arguments of both engines; on a CPU vLLM would take nearly all memory that there is."""
    from vllm.platforms import current_platform

    room = {"gpu_memory_utilization": 0.4} if current_platform.is_cpu() else {}
    sizes = {"max_num_seqs": requests, "max_model_len": longest}
    return {"load_format": "dummy", "skip_tokenizer_init": True, "seed": 0, **sizes, **room}


def _prompts(requests: int, context: int, steps: int) -> list[dict[str, list[int]]]:
    """Return prompts of requests whose texts have `context` tokens, on average over so many steps."""
    tokens = max(1, context - steps // 2)
    return [{"prompt_token_ids": [(7 * i + j) % 50 + 1 for j in range(tokens)]} for i in range(requests)]


def analyse(measured: Measured, config: dict[str, Any], stock: Sequence[Sample] = ()) -> dict[str, Any]:
    """Fit the line, the roofline and what the drafting model's passes take, and judge each on what was held out.

    Args:
        measured: of `measure`; some samples must be held out, some not.
        config: the model's Hugging Face config.
        stock: of `measure_stock`, where there are any.

    Raises:
        DasError: too few samples.
    """
    samples = [s for s in measured.samples if not s.ragged]
    shown, hidden = _split(samples)
    if len(shown) < 6 or not hidden:
        raise DasError(
            f"calibrate: found {len(shown)} kinds of step to fit and {len(hidden)} to judge by, "
            "needed: 6 and 1; measure more batches, contexts or draft lengths"
        )
    line = fit_line(shown, measured.sizes)
    roof = fit_roofline(Roofline.of(config, Hardware(1e11, 1e12)), shown)
    models: dict[str, Callable[[int, int, int], float]] = {
        "line": lambda b, s, d: line.step(b * (1 + d), b, d > 0, b * s),
        "roofline": lambda b, s, d: roof.verify(b, s, d),
    }
    beside = {"line": fit_line(stock).to_dict(), "samples": [asdict(s) for s in stock]} if stock else None
    result: dict[str, Any] = {
        "line": line.to_dict(),
        "stock": beside,
        "roofline": {**asdict(roof), "hardware": asdict(roof.hardware)},
        "validation": {name: _judge(model, samples, hidden) for name, model in models.items()},
    }
    if ragged := [s for s in measured.samples if s.ragged]:
        result["validation"]["ragged"] = _judge(models["line"], [], ragged)
    shown, hidden = _split(measured.passes)
    if len(shown) > 1 and hidden:
        model = fit_line(shown)
        result["passes"] = model.to_dict()
        result["validation"]["passes"] = _judge(lambda b, s, _: model.step(b, b, False, b * s), [], hidden)
    return result


def _split(samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """Return what is fitted, and what is held out."""
    return [s for s in samples if not s.held_out], [s for s in samples if s.held_out]


def fit_line(samples: Sequence[Sample], sizes: tuple[int, ...] = ()) -> StepModel:
    """Fit a step model to the samples; see `core.latency.fit`."""
    b, s, d, t = _columns(samples)
    return fit(b * (1 + d), b, d > 0, t, b * s, sizes=sizes)


def _columns(samples: Sequence[Sample]) -> np.ndarray:
    """Return requests, context, drafts and seconds, float64 [4, samples]."""
    return np.array([(x.requests, x.context, x.drafts, x.seconds) for x in samples], dtype=float).T


def fit_roofline(start: Roofline, samples: Sequence[Sample]) -> Roofline:
    """Fit bandwidth, FLOP/s, bytes per KV token and host times, by relative error (coordinate descent)."""
    b, s, d, t = _columns(samples)

    def built(log: np.ndarray) -> Roofline:
        bandwidth, flops, kv, plain, verify = np.exp(log)
        return replace(start, hardware=Hardware(bandwidth, flops), kv_bytes=kv, plain_us=plain, verify_us=verify)

    def loss(log: np.ndarray) -> float:
        roof = built(log)
        predicted = np.array([roof.verify(*x) for x in zip(b, s, d, strict=True)])
        return float(np.mean(np.abs(np.log(predicted / t))))

    fastest = samples[int(np.argmin(t))].seconds
    log = np.log([start.weight_bytes / fastest, start.dense_flops * 64 / fastest, start.kv_bytes, 50.0, 50.0])
    best, size = loss(log), 1.0
    while size > 0.01:
        improved = False
        for i, sign in product(range(len(log)), (1.0, -1.0)):
            moved = log.copy()
            moved[i] += sign * size
            if (found := loss(moved)) < best:
                log, best, improved = moved, found, True
        size *= 1.0 if improved else 0.5
    return built(log)


def _judge(model: Callable[[int, int, int], float], samples: Sequence[Sample], hidden: Sequence[Sample]) -> Any:
    """Return the mean relative error on the samples held out, and the share of right on/off decisions there."""
    errors = [abs(model(s.requests, s.context, s.drafts) / s.seconds - 1) for s in hidden]
    plain = {(s.requests, s.context): s.seconds for s in samples if not s.drafts}
    right = []
    for s in hidden:
        if s.drafts and (before := plain.get((s.requests, s.context))):
            predicted = model(s.requests, s.context, 0) / model(s.requests, s.context, s.drafts)
            gains = [1 + share * s.drafts for share in _ACCEPTED]
            right += [(gain * predicted >= 1.05) == (gain * before / s.seconds >= 1.05) for gain in gains]
    return {
        "mape": float(np.mean(errors)),
        "held_out": len(errors),
        "right_decisions": float(np.mean(right)) if right else None,
        "decisions": len(right),
    }


def write(out: Path, model: str, measured: Measured, result: dict[str, Any], command: str) -> None:
    """Write the calibration with its provenance (`calibration` reads it)."""
    content = {
        "provenance": {
            "command": command,
            "model": model,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
            "versions": {name: version(name) for name in ("das-adapter", "vllm", "torch", "numpy")},
            "hardware": hardware(),
        },
        **result,
        "samples": [asdict(s) for s in measured.samples],
        "pass_samples": [asdict(s) for s in measured.passes],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(content, indent=2) + "\n")
