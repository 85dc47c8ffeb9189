"""Part 1, `kernel`: the fused sampling kernel against its definition, and its time against vLLM's sampler."""

from __future__ import annotations

import importlib.util
import time
from typing import Any

import numpy as np
import torch
from engines import SHAPES, Plan

NEAR = 1e-5
"""Scores that are this close may change places with the last bit of a device's logarithm."""


def kernel(plan: Plan) -> dict[str, Any]:
    """Compare tokens, log-probabilities and ranks, and time both samplers, by number of rows."""
    from das_adapter.engine.sampling.keyed_sample import Keys, keyed_sample

    vocabulary, device = SHAPES[plan.shape]["vocab_size"], "cuda" if torch.cuda.is_available() else "cpu"
    kind = torch.bfloat16 if device == "cuda" else torch.float32
    stock, metadata = _stock(device) if importlib.util.find_spec("vllm") else (None, None)
    rows: dict[str, Any] = {}
    for count in plan.rows:
        generator = torch.Generator(device).manual_seed(count)
        logits = (torch.randn(count, vocabulary, generator=generator, device=device) * 3).to(kind)
        logits[::3, 7:50] = -torch.inf
        seeds = torch.arange(count, device=device) * 2**33 + 5
        keys, temperature = Keys(seeds, seeds % 4099), torch.ones(count, device=device)
        drawn = keyed_sample(logits, temperature, keys, "raw")
        rows[str(count)] = _compared(logits, keys, drawn) | {
            "fused_us": microseconds(lambda x=logits, k=keys, t=temperature: keyed_sample(x, t, k, "raw")),
            "torch_us": microseconds(lambda x=logits, t=temperature: _drawn_in_torch(x, t)),
        }
        if stock is not None:
            rows[str(count)]["stock_us"] = microseconds(lambda x=logits, n=count: stock(x, metadata(n)))
        del logits
    return {"rows": rows}


def bars(found: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Name, value and upper limit of each bar."""
    rows = found["rows"].values()
    beside, name = ("stock_us", "stock's") if all("stock_us" in r for r in rows) else ("torch_us", "PyTorch's")
    return [
        ("draws that differ from the definition, near-ties apart", sum(r["wrong"] for r in rows), 0),
        ("largest error of a log-probability", max(r["logprob_error"] for r in rows), 1e-3),
        (f"keyed sampling, of {name} time", max(r["fused_us"] / r[beside] for r in rows), 1.0),
    ]


def _compared(logits: torch.Tensor, keys: Any, drawn: Any) -> dict[str, Any]:
    """Compare some rows (the definition is NumPy's) with the definition."""
    from das_adapter.core.noise import gumbel

    some = slice(0, min(len(logits), 24))
    x = logits[some].float().cpu().numpy()
    scores = x + gumbel(*(key[some].cpu().numpy() for key in keys), np.arange(x.shape[1]))
    tokens, best = drawn.tokens[some].cpu().numpy(), scores.argmax(axis=1)
    at = np.arange(len(x))
    wrong = (tokens != best) & (scores[at, best] - scores[at, tokens] > NEAR)
    exact = torch.from_numpy(x).double().log_softmax(-1)[at, tokens]
    return {"wrong": int(wrong.sum()), "near_ties": int((tokens != best).sum() - wrong.sum()), "compared": len(x),
            "logprob_error": float((drawn.logprobs[some].cpu().double() - exact).abs().max())}  # fmt: skip


def _stock(device: str) -> tuple[Any, Any]:
    """Return vLLM's V1 sampler, and its metadata for a number of rows that ask for one log-probability each."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler

    def metadata(rows: int) -> Any:
        none = torch.zeros(0, device=device)
        return SamplingMetadata(
            temperature=torch.ones(rows, device=device), all_greedy=False, all_random=True, top_p=None, top_k=None,
            generators={}, max_num_logprobs=0, no_penalties=True, prompt_token_ids=None, frequency_penalties=none,
            presence_penalties=none, repetition_penalties=none, output_token_ids=[], allowed_token_ids_mask=None,
            bad_words_token_ids={}, logitsprocs=LogitsProcessors(),
        )  # fmt: skip

    return Sampler(), metadata


def _drawn_in_torch(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Draw as vLLM's V1 sampler does without top-k and top-p."""
    probabilities = (logits.float() / temperature[:, None]).softmax(-1)
    return probabilities.div_(torch.empty_like(probabilities).exponential_()).argmax(-1)


def microseconds(call: Any, rounds: int = 10) -> float:
    """Return the median time of a call that ends when the device is done."""
    times = []
    for _ in range(rounds + 2):
        _wait()
        begin = time.perf_counter()
        call()
        _wait()
        times.append(time.perf_counter() - begin)
    return float(np.median(times[2:]) * 1e6)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
