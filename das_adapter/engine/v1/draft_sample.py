"""Draw draft tokens as the policy's sampler draws: with the same noise, with which the tokens agree most often, or with
noise of their own, beside the probabilities that rejection sampling needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.sample.sampler import _SAMPLING_EPS, Sampler

from das_adapter.engine.v1.keyed_sample import Keys, keyed_sample
from das_adapter.patching import patch


def draw(
    logits: torch.Tensor, keys: Keys | None, sampling: Any, rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Draw one token a row with the temperature, top-k and top-p of the policy's sampler.

    Args:
        logits: [rows, vocab] of the drafter.
        keys: of the policy's noise; None: the policy draws with vLLM's own noise, which is not known beforehand.
        sampling: vLLM's SamplingMetadata of the batch.
        rows: int64 [rows], the rows of the batch; None: all of them.

    Returns:
        The tokens, int64 [rows], and the probabilities with which they were drawn, float32 [rows, vocab]; None for
        these where the logits and the keys decide.
    """
    if sampling.all_greedy:
        return logits.argmax(dim=-1), None
    temperature, top_k, top_p = (
        x if x is None or rows is None else x[rows] for x in (sampling.temperature, sampling.top_k, sampling.top_p)
    )
    scaled = Sampler.apply_temperature(logits.to(torch.float32, copy=True), temperature, sampling.all_random)
    scaled, probabilities = truncate(scaled, top_k, top_p), None
    if keys is None:
        probabilities = scaled.softmax(dim=-1)
        drawn = topk_topp_sampler.random_sample(probabilities.clone(), {})
    else:
        drawn = keyed_sample(scaled, keys)
    if not sampling.all_random:
        drawn = torch.where(temperature < _SAMPLING_EPS, logits.argmax(dim=-1), drawn)
    return drawn, probabilities


def truncate(logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None) -> torch.Tensor:
    """Exclude (-inf) what lies outside top-k and top-p, in place, with one algorithm for every number of rows.

    Up to 0.29 vLLM sorts below eight rows and takes a Triton kernel from there on. The two may round a row's
    cumulative probabilities differently, and then what a row keeps would depend on how many rows draft. Arguments are
    float32 [rows, vocab], int32 [rows] and float32 [rows]; None: no limit."""
    if (top_k is not None or top_p is not None) and logits.is_cuda and topk_topp_sampler.HAS_TRITON:
        return topk_topp_sampler.apply_top_k_top_p_triton(logits, top_k, top_p)
    return topk_topp_sampler.apply_top_k_top_p(logits, top_k, top_p)


class KeyedDrafts:
    """Draws the tokens of vLLM's own drafters (EAGLE-3, MTP, a draft model) with the noise of the policy's sampler."""

    def __init__(self, runner: Any, seeds: Callable[[], torch.Tensor]):
        self._runner, self._seeds = runner, seeds
        self.rows: torch.Tensor | None = None
        """Rows of the batch that are drafted for, int64; None: all of it."""
        self._positions = torch.zeros(0, dtype=torch.int64)

    def first_pass(self, last_tokens: torch.Tensor) -> None:
        """Take the rows of the drafter's inputs at which requests end, int64 [requests]."""
        drafter = self._runner.drafter
        ahead = 1 if drafter.pass_hidden_states_to_model else 0  # EAGLE's inputs are one token ahead of their positions
        self._positions = drafter.positions[last_tokens] + ahead

    def draw(self, hidden: torch.Tensor, sampling: Any) -> torch.Tensor:
        """Draw a token for each request, int64 [requests], from the drafter's hidden states [requests, size];
        `sampling`: vLLM's SamplingMetadata of these requests."""
        logits, seeds = self._runner.drafter.model.compute_logits(hidden), self._seeds()
        keys = Keys(seeds if self.rows is None else seeds[self.rows], self._positions)
        self._positions = self._positions + 1
        return draw(logits, keys, sampling)[0]


@patch("vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.set_inputs_first_pass", since="0.24")
def follow_positions(stock: Any, noise: KeyedDrafts) -> Any:
    """Without it `draw_with_keyed_noise` does not know for which positions it draws. Remove this patch when vLLM's V1
    drafters draw with noise keyed by position."""

    def set_inputs_first_pass(*args: Any, **kwargs: Any) -> Any:
        result = stock(*args, **kwargs)
        noise.first_pass(result[1])
        return result

    return set_inputs_first_pass


@patch("vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer._sample_draft_tokens", since="0.24")
def draw_with_keyed_noise(stock: Any, noise: KeyedDrafts) -> Any:
    """Without it drafters draft the most likely token, which at temperature 1 is often not the one that is drawn.
    Remove this patch when vLLM's V1 drafters draw with noise keyed by position."""
    return lambda hidden, sampling: (noise.draw(hidden, sampling), None)
