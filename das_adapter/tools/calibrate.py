"""`das-adapter calibrate`: what a decode step of a model costs on this machine, by batch, context and draft length."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from das_adapter.core.latency import Hardware, Roofline, StepModel, fit
from das_adapter.errors import DasError
from das_adapter.tools.hardware import hardware

_ACCEPTED = (0.2, 0.5, 0.8)
"""Shares of a draft's tokens that count as accepted when on/off decisions are compared."""


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


def measure(
    model: str, batches: Sequence[int], contexts: Sequence[int], drafts: Sequence[int], rounds: int, **engine: Any
) -> list[Sample]:
    """Run a real engine over the grid; draft lengths alternate from step to step, so that drift affects all equally.

    Args:
        model: path or name; its weights are not read (`load_format: dummy`) unless `engine` says otherwise.
        batches, contexts, drafts: requests, prompt tokens, draft tokens per request.
        rounds: steps of each kind.
        engine: further arguments of `vllm.LLM`.
    """
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_V2_MODEL_RUNNER="0")
    from vllm import LLM, SamplingParams

    from das_adapter.config import DasConfig
    from das_adapter.engine.drafters.sweep import SweepDrafter
    from das_adapter.protocol.engine_args import engine_args

    args = engine_args(DasConfig())
    args["speculative_config"] |= {
        "model": "das_adapter.engine.drafters.sweep.SweepDrafter",
        "num_speculative_tokens": max(1, *drafts),
    }
    steps = rounds * len(drafts) + 4
    longest = max(contexts) + steps + max(drafts) + 2
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": max(batches), "seed": 0,
                "enable_prefix_caching": False, "max_model_len": longest}  # fmt: skip
    llm = LLM(model, **{**settings, **args, **engine})
    plain = tuple(d for d in (0, *drafts) if d == 0)[:1]
    SweepDrafter.turns = (*plain, *(d for d in drafts if d))
    found: list[Sample] = []
    for number, (requests, context) in enumerate(product(batches, contexts)):
        SweepDrafter.samples = []
        params = SamplingParams(temperature=1.0, max_tokens=steps, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": [(7 * i + j) % 50 + 1 for j in range(context)]} for i in range(requests)]
        llm.generate(prompts, params, use_tqdm=False)
        for place, draft in enumerate(sorted({0, *drafts})):
            seconds = [s for b, _, d, s in SweepDrafter.samples if b == requests and d == draft][1:]
            if len(seconds) >= 3:
                held_out = (number + place) % 3 == 2
                found.append(Sample(requests, context, draft, float(np.median(seconds)), len(seconds), held_out))
    return found


def analyse(samples: Sequence[Sample], config: dict[str, Any]) -> dict[str, Any]:
    """Fit the line and the roofline to the samples, and judge both on those held out.

    Args:
        samples: of `measure`; some must be held out, some not.
        config: the model's Hugging Face config.

    Raises:
        DasError: too few samples.
    """
    shown, hidden = [s for s in samples if not s.held_out], [s for s in samples if s.held_out]
    if len(shown) < 6 or not hidden:
        raise DasError(f"calibrate: found {len(shown)} kinds of step to fit and {len(hidden)} to judge by, "
                       "needed: 6 and 1; measure more batches, contexts or draft lengths")  # fmt: skip
    line = fit_line(shown)
    roof = fit_roofline(Roofline.of(config, Hardware(1e11, 1e12)), shown)
    models: dict[str, Callable[[int, int, int], float]] = {
        "line": lambda b, s, d: line.step(b * (1 + d), b, d > 0),
        "roofline": lambda b, s, d: roof.verify(b, s, d),
    }
    return {
        "line": line.to_dict(),
        "roofline": {**asdict(roof), "hardware": asdict(roof.hardware)},
        "validation": {name: _judge(model, samples, hidden) for name, model in models.items()},
    }


def fit_line(samples: Sequence[Sample]) -> StepModel:
    """Fit a step model to the samples; see `core.latency.fit`."""
    b = np.array([s.requests for s in samples], dtype=float)
    d = np.array([s.drafts for s in samples])
    return fit(b * (1 + d), b, d > 0, np.array([s.seconds for s in samples]))


def fit_roofline(start: Roofline, samples: Sequence[Sample]) -> Roofline:
    """Fit bandwidth, FLOP/s, bytes per KV token and host times, by relative error (coordinate descent)."""
    b, s, d, t = (np.array([getattr(x, n) for x in samples], dtype=float) for n in
                  ("requests", "context", "drafts", "seconds"))  # fmt: skip

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
        if not s.drafts or (s.requests, s.context) not in plain:
            continue
        predicted = model(s.requests, s.context, 0) / model(s.requests, s.context, s.drafts)
        measured = plain[s.requests, s.context] / s.seconds
        for share in _ACCEPTED:
            length = 1 + share * s.drafts
            right.append((length * predicted >= 1.05) == (length * measured >= 1.05))
    return {"mape": float(np.mean(errors)), "held_out": len(errors),
            "right_decisions": float(np.mean(right)) if right else None, "decisions": len(right)}  # fmt: skip


def write(out: Path, model: str, samples: Sequence[Sample], result: dict[str, Any], command: str) -> None:
    """Write the calibration with its provenance (`toggle.calibration` reads it), and a plot beside it."""
    provenance = {
        "command": command, "model": model, "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "versions": {name: version(name) for name in ("das-adapter", "vllm", "torch", "numpy")},
        "hardware": hardware(),
    }  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    content = {"provenance": provenance, **result, "samples": [asdict(s) for s in samples]}
    out.write_text(json.dumps(content, indent=2) + "\n")
    _plot(out.with_suffix(".png"), samples, StepModel(**result["line"]))


def _plot(path: Path, samples: Sequence[Sample], line: StepModel) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(5, 5), layout="constrained")
    for held_out, marker in ((False, "o"), (True, "x")):
        chosen = [s for s in samples if s.held_out == held_out]
        measured = [s.seconds * 1e3 for s in chosen]
        predicted = [line.step(s.requests * (1 + s.drafts), s.requests, s.drafts > 0) * 1e3 for s in chosen]
        axis.loglog(measured, predicted, marker, label="held out" if held_out else "fitted", markersize=4)
    ends = [min(s.seconds for s in samples) * 900, max(s.seconds for s in samples) * 1100]
    axis.loglog(ends, ends, color="grey", linewidth=1)
    axis.set(xlabel="measured step time, ms", ylabel="predicted, ms")
    axis.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
