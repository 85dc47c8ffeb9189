"""vLLM's own neural drafters (EAGLE-3, MTP, a draft model): their weights follow the policy, or stay what they were.

vLLM updates the policy alone at a weight sync, and sleep may throw the drafter's weights away; both show as acceptance
that collapses, while every token stays right.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from das_adapter.config import DasConfig
from das_adapter.core.noise import row_keys

logger = logging.getLogger("das_adapter")

PREFIX = "draft."
"""What a trainer that also trains the drafter puts before the names of its weights (NeMo-RL's convention)."""

Weights = Iterable[tuple[str, torch.Tensor]]


def draw_with_keyed_noise(runner: Any, seed: Callable[[str], int]) -> None:
    """vLLM's drafters draft the likeliest token, which at temperature 1 is often not the one that is drawn; where
    verification is keyed, let them draw with its noise (`seed`: of a request id). Called once they are loaded."""
    from das_adapter.engine.sampling.draft_sample import draw

    drafter = runner.drafter
    ahead = 2 if drafter.pass_hidden_states_to_model else 1  # EAGLE's inputs are one token ahead of their positions
    positions = torch.zeros(0, dtype=torch.int64)
    set_inputs = drafter.set_inputs_first_pass

    @functools.wraps(set_inputs)
    def first_pass(*args: Any, **kwargs: Any) -> Any:
        nonlocal positions
        result = set_inputs(*args, **kwargs)
        positions = drafter.positions[result[1]] + ahead
        return result

    def sample(hidden: torch.Tensor, sampling: Any) -> tuple[torch.Tensor, None]:
        nonlocal positions
        logits = drafter.model.compute_logits(hidden).float()
        seeds = np.fromiter(map(seed, runner.input_batch.req_ids), dtype=np.uint64, count=len(logits))
        keys = torch.from_numpy(row_keys(seeds, positions.cpu().numpy()).view(np.int64))
        positions = positions + 1
        return draw(logits, keys.to(logits.device), sampling), None

    drafter.set_inputs_first_pass, drafter._sample_draft_tokens = first_pass, sample


class DraftWeights:
    """The drafter's share of the host's weight stream, and a watch over what it does not send."""

    def __init__(self, runner: Any, config: DasConfig, seed: Callable[[str], int]):
        self._runner, self._config = runner, config
        self._arrived = 0
        self._mark: list[float] = []
        self._refused: str | None = None
        load_model = runner.load_model

        @functools.wraps(load_model)
        def loaded(*args: Any, **kwargs: Any) -> None:
            load_model(*args, **kwargs)
            self._install()
            if config.keyed and not config.draft.options.get("parallel_drafting"):
                draw_with_keyed_noise(runner, seed)

        runner.load_model = loaded

    @property
    def drafter(self) -> torch.nn.Module:
        """vLLM's drafter model."""
        return self._runner.drafter.model

    def refresh(self) -> str | None:
        """A weight sync is over: what is wrong with the drafter's weights, None if nothing is."""
        arrived, self._arrived = self._arrived, 0
        if self._config.draft.weights == "trainer":
            if not arrived:
                return (f"das.draft.weights='trainer', but this weight sync brought no weight of the drafter "
                        f"(names with {PREFIX!r} in front): it drafts for an older policy")  # fmt: skip
        elif self._fingerprint() != self._mark:  # slept at level 2, or somebody wrote into them
            logger.warning("das: the drafter's weights were lost; reading its checkpoint again")
            self._read_checkpoint()
        return self._refused

    def _install(self) -> None:
        if self._config.draft.weights == "checkpoint":
            if self._runner.load_config.load_format == "dummy":  # the trainer sends the policy's weights only
                self._read_checkpoint()
            self._mark = self._fingerprint()
        policy, stock = self._runner.model, self._runner.model.load_weights

        @functools.wraps(stock)
        def load_weights(weights: Weights, *args: Any, **kwargs: Any) -> Any:
            kept: list[tuple[str, torch.Tensor]] = []
            result = stock(self._split(weights, kept), *args, **kwargs)
            if kept:
                self._load(kept)
            return result

        policy.load_weights = load_weights
        if self._config.drafter == "mtp":  # hosts send the policy's stream to it as well
            self._count_loads()

    def _split(self, weights: Weights, kept: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The policy's weights; the drafter's go to `kept`. Buffers of a stream are reused: keep copies."""
        for name, weight in weights:
            if name.startswith(PREFIX):
                kept.append((name.removeprefix(PREFIX), weight.clone()))
            else:
                yield name, weight

    def _load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        if self._config.draft.weights == "checkpoint":  # raising here would leave the trainer waiting for ever
            self._refused = (f"das.draft.weights='checkpoint', but the trainer sends the drafter's weights as well "
                             f"({PREFIX}{weights[0][0]}, ...): set it to 'trainer'")  # fmt: skip
            return
        rows = self._runner.speculative_config.draft_model_config.get_vocab_size()
        trimmed = [(name, weight[:rows] if "embed_tokens" in name or "lm_head" in name else weight)
                   for name, weight in weights]  # fmt: skip
        self.drafter.load_weights(trimmed)  # trainers pad the vocabulary
        self._arrived += len(trimmed)

    def _count_loads(self) -> None:
        stock = self.drafter.load_weights

        @functools.wraps(stock)
        def load_weights(weights: Weights, *args: Any, **kwargs: Any) -> Any:
            loaded = stock(weights, *args, **kwargs)
            self._arrived += len(loaded or ())
            return loaded

        self.drafter.load_weights = load_weights  # type: ignore[method-assign]

    def _read_checkpoint(self) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.config.load import LoadConfig
        from vllm.model_executor.model_loader import get_model_loader

        loader = get_model_loader(LoadConfig(load_format="auto"))
        with set_current_vllm_config(self._runner.vllm_config):
            loader.load_weights(self.drafter, self._runner.speculative_config.draft_model_config)

    def _fingerprint(self) -> list[float]:
        """A few values of each weight that is the drafter's alone."""
        shared = {p.data_ptr() for p in self._runner.model.parameters()}
        own = (p for p in self.drafter.parameters() if p.numel() and p.data_ptr() not in shared)
        return [p.detach().flatten()[:16].float().abs().sum().item() for p in own]
