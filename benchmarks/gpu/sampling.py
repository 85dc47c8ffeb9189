"""`kernel`: the fused sampling kernel against its definition, and its time against vLLM's sampler. Needs neither vLLM
nor the compiled core."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from engines import SHAPES, Bar, Found, Plan, every, has_vllm, in_time

NEAR = 1e-5
"""Scores that are this close may change places with the last bit of a device's logarithm."""


def kernel(plan: Plan) -> dict[str, Any]:
    """Compare tokens, log-probabilities and ranks, and time both samplers, by number of rows."""
    from das_adapter.engine.sampling.keyed_sample import Keys, keyed_sample

    vocabulary, device = SHAPES[plan.shape]["vocab_size"], "cuda" if torch.cuda.is_available() else "cpu"
    kind = torch.bfloat16 if device == "cuda" else torch.float32
    stock, metadata = _stock(device) if has_vllm() else (None, None)
    rows: dict[str, Any] = {}
    found: Found = {"chi_square_p": chi_square_p(device), "rows": rows}
    for count in in_time(plan, plan.rows, found):
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
    return found


BARS = (
    Bar("draws that differ from the definition, near-ties apart", 0,
        lambda f: sum(r["wrong"] for r in f["rows"].values())),
    Bar("largest error of a log-probability", 1e-3, lambda f: every(f["rows"].values(), lambda r: r["logprob_error"])),
    Bar("keyed sampling, of the time of stock vLLM's sampler", 1.0,
        lambda f: every(f["rows"].values(), lambda r: r["fused_us"] / r["stock_us"])),
    Bar("keyed sampling, of the time of the same steps in PyTorch", 1.0,
        lambda f: every(f["rows"].values(), lambda r: r["fused_us"] / r["torch_us"])),
    Bar("1e-4 over the p-value of the draws", 1, lambda f: 1e-4 / max(f["chi_square_p"], 1e-12)),
)  # fmt: skip


def chi_square_p(device: str, draws: int = 120_000) -> float:
    """Return how probable draws are that are as far from the softmax as those of the kernel (chi-square)."""
    from das_adapter.engine.sampling.keyed_sample import Keys, keyed_sample

    logits = torch.randn(16, generator=torch.Generator().manual_seed(3)) * 1.5
    positions = torch.arange(draws, device=device)
    tokens = keyed_sample(logits.to(device).repeat(draws, 1), None, Keys(torch.zeros_like(positions), positions)).tokens
    expected = draws * logits.double().softmax(0)
    statistic = ((torch.bincount(tokens.cpu(), minlength=16) - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor(15 / 2, dtype=torch.float64), statistic / 2))


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
