"""vLLM's own neural drafters (EAGLE-3, MTP, a draft model) draw their tokens with the policy's noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from das_adapter.engine.v1.draft_sample import draw
from das_adapter.engine.v1.keyed_sample import Keys
from das_adapter.patching import patch


class KeyedDrafts:
    """Draws a neural drafter's tokens with the noise that the policy's sampler will use."""

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

    def sample(hidden: torch.Tensor, sampling: Any) -> tuple[torch.Tensor, None]:
        return noise.draw(hidden, sampling), None

    return sample
