"""Keyed-noise sampling of a batch of logits: in C++ on a CPU, in Triton on a GPU.

Both compute the noise that `das_adapter.core.noise` defines. On a GPU the logits are read from memory once; where ranks
are asked for, a second time, out of the cache.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from das_adapter.core.native import native
from das_adapter.errors import UnsupportedHost

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_BLOCK = 4096
GREEDY = 1e-5
"""Temperature under which the most likely token is taken (vLLM's _SAMPLING_EPS)."""

Scores = Literal["raw", "processed"]
"""Whose log-probabilities: of the logits as they are, or divided by the temperature."""


class Drawn(NamedTuple):
    """What was drawn for each row."""

    tokens: torch.Tensor
    """int64 [rows]; equal scores go to the lowest token."""
    logprobs: torch.Tensor | None = None
    """float32 [rows]: of the token, over the whole vocabulary."""
    ranks: torch.Tensor | None = None
    """int64 [rows]: tokens that are at least as likely, itself included."""


class Keys(NamedTuple):
    """What the noise of some rows is keyed by."""

    seeds: torch.Tensor
    """int64 [rows], of the requests."""
    positions: torch.Tensor
    """int64 [rows], of the input tokens: what is drawn stands one further."""

    def at(self, rows: torch.Tensor | slice) -> Keys:
        """Return the keys of some rows."""
        return Keys(self.seeds[rows], self.positions[rows])


def keyed_sample(
    logits: torch.Tensor, temperature: torch.Tensor | None, keys: Keys, scores: Scores | None = None
) -> Drawn:
    """Draw one token per row: `argmax_v(logits[v] / temperature + G(seed, position, v))`.

    Args:
        logits: float32 or bfloat16 or float16 [rows, vocab]; need not be normalised; -inf excludes a token.
        temperature: float32 [rows]; 0: the most likely token. None: 1 for all.
        keys: on the logits' device.
        scores: whose log-probabilities and ranks to return; None: neither.
    """
    if temperature is None:
        temperature = torch.ones(len(logits), dtype=torch.float32, device=logits.device)
    if logits.device.type == "cpu":
        return _on_cpu(logits, temperature, keys, scores)
    if triton is None:
        raise UnsupportedHost(f"das.verify.noise='keyed' needs Triton on {logits.device.type}, found none")
    return triton_sample(logits, temperature, keys, scores)


def divide(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Divide float32 logits [rows, vocab] by their temperatures in place, greedy rows apart: bit for bit as the draw
    does it, so that a request's tokens do not depend on what else the requests beside it ask for."""
    if logits.device.type == "cpu" or triton is None:
        return logits.div_(torch.where(temperature < GREEDY, 1.0, temperature)[:, None])
    return triton_divide(logits, temperature)


def _on_cpu(logits: torch.Tensor, temperature: torch.Tensor, keys: Keys, scores: Scores | None) -> Drawn:
    logits = logits.detach().float()
    tokens = torch.empty(len(logits), dtype=torch.int64)
    native().keyed_sample(*(x.contiguous().numpy() for x in (logits, temperature, *keys)), tokens.numpy())
    if scores is None:
        return Drawn(tokens)
    if scores == "processed":
        logits = logits / torch.where(temperature < GREEDY, 1.0, temperature)[:, None]
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, tokens[:, None])
    return Drawn(tokens, chosen.squeeze(1), (logprobs >= chosen).sum(dim=1))


if triton is not None:

    @triton.jit
    def _mix(h, word):  # type: ignore[no-untyped-def]
        word *= 0xCC9E2D51
        word = (word << 15) | (word >> 17)
        word *= 0x1B873593
        h ^= word
        h = (h << 13) | (h >> 19)
        return h * 5 + 0xE6546B64

    @triton.jit
    def _gumbel(seed, position, token):  # type: ignore[no-untyped-def]
        # As vLLM's V2 sampler, operation for operation: `murmur3_uniform32` and `_log1p_neg_stable`.
        h = (seed ^ seed).to(tl.uint32)
        h = _mix(h, (seed & 0xFFFFFFFF).to(tl.uint32))
        h = _mix(h, ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32))
        h = _mix(h, (position & 0xFFFFFFFF).to(tl.uint32))
        h = _mix(h, token.to(tl.uint32)) ^ 16
        h ^= h >> 16
        h *= 0x85EBCA6B
        h ^= h >> 13
        h *= 0xC2B2AE35
        h ^= h >> 16
        high, low = (h >> 16).to(tl.int32).to(tl.float32), (h & 0xFFFF).to(tl.int32).to(tl.float32)
        u = high * 1.52587890625e-05 + (low + 0.5) * 2.3283064365386963e-10
        series = 1.0 / 8.0
        series = 1.0 / 7.0 + u * series
        series = 1.0 / 6.0 + u * series
        series = 1.0 / 5.0 + u * series
        series = 1.0 / 4.0 + u * series
        series = 1.0 / 3.0 + u * series
        series = 1.0 / 2.0 + u * series
        series = 1.0 + u * series
        direct = tl.log(tl.maximum(1.0 - u, 5.960464477539063e-08))
        return -tl.log(-tl.where(u < 0.25, -u * series, direct))

    _ANY_PLACE = ["temperatures", "seeds", "positions"]
    """Parts of larger tensors at times: a kernel for each alignment would be compiled in the middle of a rollout."""

    @triton.jit(do_not_specialize_on_alignment=["temperatures"])
    def _divide(logits, stride, temperatures, vocab, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
        token = block * BLOCK + tl.arange(0, BLOCK)
        temperature = tl.load(temperatures + row)
        if temperature >= 1e-5 and temperature != 1.0:
            raw = tl.load(logits + row * stride + token, mask=token < vocab, other=0.0)
            tl.store(logits + row * stride + token, raw / temperature, mask=token < vocab)

    @triton.jit
    def _scaled(raw, temperature):  # type: ignore[no-untyped-def]
        if temperature >= 1e-5 and temperature != 1.0:
            raw = raw / temperature
        return raw

    @triton.jit(do_not_specialize_on_alignment=_ANY_PLACE)
    def _draw_blocks(  # type: ignore[no-untyped-def]
        logits, stride, temperatures, seeds, positions, found, vocab, blocks, SCORES: tl.constexpr, BLOCK: tl.constexpr
    ):
        """Each block's best score, its token, the largest logit, and the sum of the exponentials relative to it."""
        row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
        token = block * BLOCK + tl.arange(0, BLOCK)
        valid = token < vocab
        raw = tl.load(logits + row * stride + token, mask=valid, other=-float("inf")).to(tl.float32)
        temperature = tl.load(temperatures + row)
        scaled = _scaled(raw, temperature)
        score = scaled
        if temperature >= 1e-5:
            seed, position = tl.load(seeds + row), tl.load(positions + row)
            score = tl.where(valid, scaled + _gumbel(seed, position, token), -float("inf"))
        score = tl.where(score == score, score, -float("inf"))  # NaN would win at a place that is no token's
        value, at = tl.max(score, axis=0, return_indices=True)
        here = found + (row * blocks + block) * 4
        tl.store(here, value)
        tl.store(here + 1, (block * BLOCK + at).to(tl.float32))  # exact up to 2^24
        if SCORES != 0:
            x = scaled if SCORES == 2 else raw
            top = tl.max(x, axis=0)
            shifted = tl.where(x > -float("inf"), x - top, -float("inf"))  # a block may be excluded as a whole
            tl.store(here + 2, top)
            tl.store(here + 3, tl.sum(tl.exp(shifted), axis=0))

    @triton.jit(do_not_specialize_on_alignment=["temperatures"])
    def _best_of_blocks(  # type: ignore[no-untyped-def]
        logits,
        stride,
        temperatures,
        found,
        tokens,
        logprobs,
        chosen,
        blocks,
        SCORES: tl.constexpr,
        BLOCKS: tl.constexpr,
    ):
        """Each row's token, its logit and its log-probability."""
        row = tl.program_id(0).to(tl.int64)
        block = tl.arange(0, BLOCKS)
        here, there = found + (row * blocks + block) * 4, block < blocks
        _, at = tl.max(tl.load(here, mask=there, other=-float("inf")), axis=0, return_indices=True)
        token = tl.load(found + (row * blocks + at) * 4 + 1).to(tl.int64)
        tl.store(tokens + row, token)
        if SCORES != 0:
            top = tl.load(here + 2, mask=there, other=-float("inf"))
            part = tl.load(here + 3, mask=there, other=0.0)
            highest = tl.max(top, axis=0)
            total = tl.sum(tl.where(top > -float("inf"), part * tl.exp(top - highest), 0.0), axis=0)
            raw = tl.load(logits + row * stride + token).to(tl.float32)
            x = raw
            if SCORES == 2:
                x = _scaled(raw, tl.load(temperatures + row))
            tl.store(logprobs + row, x - highest - tl.log(total))
            tl.store(chosen + row, raw)

    @triton.jit
    def _count_likelier(logits, stride, chosen, ranks, vocab, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """Add up each row's rank: the temperature does not change an order."""
        row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
        token = block * BLOCK + tl.arange(0, BLOCK)
        raw = tl.load(logits + row * stride + token, mask=token < vocab, other=-float("inf")).to(tl.float32)
        likelier = (raw >= tl.load(chosen + row)) & (token < vocab)
        tl.atomic_add(ranks + row, tl.sum(likelier.to(tl.int64), axis=0))

    def triton_divide(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        """Divide as `divide`, with the kernel for a GPU."""
        rows, vocab = logits.shape
        if rows:
            _divide[(rows, triton.cdiv(vocab, _BLOCK))](
                logits, logits.stride(0), temperature.contiguous(), vocab, BLOCK=_BLOCK
            )
        return logits

    def triton_sample(logits: torch.Tensor, temperature: torch.Tensor, keys: Keys, scores: Scores | None) -> Drawn:
        """Draw as `keyed_sample`, with the kernels for a GPU."""
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        rows, vocab = logits.shape
        kind, blocks = {None: 0, "raw": 1, "processed": 2}[scores], triton.cdiv(vocab, _BLOCK)
        # Tensors of their own: parts of one would be aligned by the number of rows.
        found = logits.new_empty(rows, blocks, 4, dtype=torch.float32)
        tokens, ranks = (logits.new_zeros(rows, dtype=torch.int64) for _ in range(2))
        logprobs, chosen = (logits.new_empty(rows, dtype=torch.float32) for _ in range(2))
        if rows:
            read = logits, logits.stride(0), temperature.contiguous()
            keyed = (key.contiguous() for key in keys)
            _draw_blocks[(rows, blocks)](*read, *keyed, found, vocab, blocks, SCORES=kind, BLOCK=_BLOCK)
            written, padded = (tokens, logprobs, chosen), triton.next_power_of_2(blocks)
            _best_of_blocks[(rows,)](*read, found, *written, blocks, SCORES=kind, BLOCKS=padded)
        if scores is None:
            return Drawn(tokens)
        if rows:
            _count_likelier[(rows, blocks)](*read[:2], chosen, ranks, vocab, BLOCK=_BLOCK)
        return Drawn(tokens, logprobs, ranks)
