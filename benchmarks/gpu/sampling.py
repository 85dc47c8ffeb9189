"""`kernel`: the fused sampling kernel against its definition, and its time against vLLM's sampler. Needs neither vLLM
nor the compiled core."""

from __future__ import annotations

import time
from itertools import product
from typing import Any

import numpy as np
import torch
from engines import SHAPES, Bar, Found, Plan, every, has_vllm, in_time

NEAR = 3e-5
"""Scores that are this close may change places with the last bits of a device's logarithm and division."""
COMPARED = 96
"""Rows that are compared with the definition, at most, spread over all."""


def kernel(plan: Plan) -> dict[str, Any]:
    """Compare tokens, log-probabilities and ranks, and time both samplers, by number of rows."""
    from das_adapter.engine.v1.keyed_sample import keyed_sample

    vocabulary, device = SHAPES[plan.shape]["vocab_size"], "cuda" if torch.cuda.is_available() else "cpu"
    kind = torch.bfloat16 if device == "cuda" else torch.float32
    stock, metadata = _stock(device) if has_vllm() else (None, None)
    rows: dict[str, Any] = {}
    found: Found = {"chi_square_p": chi_square_p(device), "compared": _compared(vocabulary, device), "rows": rows}
    for count in in_time(plan, plan.rows, found):
        logits, keys = _logits(count, vocabulary, device).to(kind), _keys(count, device)
        temperature = torch.ones(count, device=device)
        rows[str(count)] = {
            "wrong": _wrong(logits, temperature, keys, keyed_sample(logits, temperature, keys, "raw"), "raw"),
            "fused_us": microseconds(lambda x=logits, k=keys, t=temperature: keyed_sample(x, t, k, "raw")),
            "torch_us": microseconds(lambda x=logits, t=temperature: _drawn_in_torch(x, t)),
        }
        if stock is not None:
            rows[str(count)]["stock_us"] = microseconds(lambda x=logits, n=count: stock(x, metadata(n)))
        del logits
    return found


def _logits(count: int, vocabulary: int, device: str) -> torch.Tensor:
    """Make float32 logits, of some of which a part is excluded."""
    generator = torch.Generator(device).manual_seed(count)
    logits = torch.randn(count, vocabulary, generator=generator, device=device) * 3
    logits[::3, 7:50] = -torch.inf
    return logits


def _keys(count: int, device: str) -> Any:
    from das_adapter.engine.v1.keyed_sample import Keys

    seeds = torch.arange(count, device=device) * 2**33 + 5
    return Keys(seeds, seeds % 4099)


def _compared(vocabulary: int, device: str) -> Found:
    """Compare draws at three temperatures in every form that there is: what is wrong, by dtype and kind of scores."""
    from das_adapter.engine.v1.keyed_sample import Scores, keyed_sample

    found: Found = {}
    dtypes = {"float32": torch.float32} | ({"bfloat16": torch.bfloat16} if device == "cuda" else {})
    kinds: tuple[Scores | None, ...] = (None, "raw", "processed")
    logits, keys = _logits(COMPARED, vocabulary, device), _keys(COMPARED, device)
    logits[4], logits[7, 12:], logits[8, :-1] = -torch.inf, -torch.inf, -torch.inf
    temperature = torch.tensor([1.0, 0.7, 0.0], device=device).repeat(COMPARED // 3)
    for (name, dtype), scores in product(dtypes.items(), kinds):
        x = logits.to(dtype)
        found[f"{name} {scores}"] = _wrong(x, temperature, keys, keyed_sample(x, temperature, keys, scores), scores)
    return found


def _judged(found: Found) -> list[Found]:
    return [*found["compared"].values(), *(row["wrong"] for row in found["rows"].values())]


BARS = (
    Bar("draws that differ from the definition, near-ties apart", 0, lambda f: sum(r["draws"] for r in _judged(f))),
    Bar("ranks that differ from the definition", 0, lambda f: sum(r["ranks"] for r in _judged(f))),
    Bar("largest error of a log-probability", 1e-3, lambda f: every(_judged(f), lambda r: r["logprob_error"])),
    Bar(
        "keyed sampling, of the time of stock vLLM's sampler",
        1.0,
        lambda f: every(f["rows"].values(), lambda r: r["fused_us"] / r["stock_us"]),
    ),
    Bar(
        "keyed sampling, of the time of the same steps in PyTorch",
        1.0,
        lambda f: every(f["rows"].values(), lambda r: r["fused_us"] / r["torch_us"]),
    ),
    Bar("1e-4 over the p-value of the draws", 1, lambda f: 1e-4 / max(f["chi_square_p"], 1e-12)),
)


def chi_square_p(device: str, draws: int = 120_000) -> float:
    """Return how probable draws are that are as far from the softmax as those of the kernel (chi-square)."""
    from das_adapter.engine.v1.keyed_sample import Keys, keyed_sample

    logits = torch.randn(16, generator=torch.Generator().manual_seed(3)) * 1.5
    positions = torch.arange(draws, device=device)
    tokens = keyed_sample(logits.to(device).repeat(draws, 1), None, Keys(torch.zeros_like(positions), positions)).tokens
    expected = draws * logits.double().softmax(0)
    statistic = ((torch.bincount(tokens.cpu(), minlength=16) - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor(15 / 2, dtype=torch.float64), statistic / 2))


def _wrong(logits: torch.Tensor, temperature: torch.Tensor, keys: Any, drawn: Any, scores: str | None) -> Found:
    """Compare some rows (the definition is NumPy's) with the definition."""
    from das_adapter.core.noise import gumbel

    some = torch.linspace(0, len(logits) - 1, min(len(logits), COMPARED), device=logits.device).long()
    x, heat = logits[some].float().cpu().numpy(), temperature[some].cpu().numpy()[:, None]
    noise = gumbel(*(key[some].cpu().numpy() for key in keys), np.arange(x.shape[1]))
    divided = x / np.where(heat > 0, heat, np.float32(1))
    points = np.where(heat > 0, divided + noise, x)
    tokens, best, at = drawn.tokens[some].cpu().numpy(), points.argmax(axis=1), np.arange(len(x))
    with np.errstate(invalid="ignore"):  # where all tokens are excluded
        near = (points[at, best] - points[at, tokens] <= NEAR) & (heat[:, 0] > 0)
    wrong = (tokens != best) & ~near
    found = {
        "draws": int(wrong.sum()),
        "near_ties": int((tokens != best).sum() - wrong.sum()),
        "compared": len(x),
        "ranks": 0,
        "logprob_error": 0.0,
    }
    if scores is None:
        return found
    there, chosen = x.max(axis=1) > -np.inf, x[at, tokens][:, None]
    rank, slack = drawn.ranks[some].cpu().numpy(), 0.0 if logits.is_cuda else NEAR  # a CPU counts log-probabilities
    low, high = ((x >= chosen + d).sum(axis=1) for d in (slack, -slack))
    found["ranks"] = int((((rank < low) | (rank > high)) & there).sum())
    exact = torch.from_numpy(x if scores == "raw" else divided).double().log_softmax(-1)[at, tokens]
    found["logprob_error"] = float((drawn.logprobs[some].cpu().double() - exact).abs()[torch.from_numpy(there)].max())
    return found


def _stock(device: str) -> tuple[Any, Any]:
    """Return vLLM's V1 sampler, and its metadata for a number of rows that ask for one log-probability each."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler

    def metadata(rows: int) -> Any:
        none = torch.zeros(0, device=device)
        return SamplingMetadata(
            temperature=torch.ones(rows, device=device),
            all_greedy=False,
            all_random=True,
            top_p=None,
            top_k=None,
            generators={},
            max_num_logprobs=0,
            no_penalties=True,
            prompt_token_ids=None,
            frequency_penalties=none,
            presence_penalties=none,
            repetition_penalties=none,
            output_token_ids=[],
            allowed_token_ids_mask=None,
            bad_words_token_ids={},
            logitsprocs=LogitsProcessors(),
        )

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
