"""vLLM's built-in logits processors on the V1 runner, applied to rows of logits instead of requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)

from das_adapter.errors import UnsupportedHost

RowsOf = Callable[[int], slice | None]
"""Returns the rows of a request; None: it has none here."""
_STATES = {MinPLogitsProcessor: "min_p_count", LogitBiasLogitsProcessor: "biases", MinTokensLogitsProcessor: "min_toks"}


def beside(values: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Copy numbers to the device of a tensor, without waiting for it."""
    return torch.as_tensor(values).to(tensor.device, non_blocking=True)


def acts(processor: Any) -> bool:
    """Return whether a logits processor changes the logits of any request of the batch."""
    return all(getattr(processor, state) for kind, state in _STATES.items() if isinstance(processor, kind))


def of_rows(
    processors: Any, rows_of: RowsOf, requests: npt.NDArray[np.int64], positions: torch.Tensor | None
) -> SimpleNamespace:
    """Return the processors of a batch for some of its rows, as `SamplingMetadata.logitsprocs`; `requests`: index of
    each row's request in the batch; `positions`: as in `Keys`; int64 [rows] each."""
    found = SimpleNamespace(argmax_invariant=[], non_argmax_invariant=[])
    for processor in filter(acts, (*processors.argmax_invariant, *processors.non_argmax_invariant)):
        if isinstance(processor, MinPLogitsProcessor):
            found.argmax_invariant.append(_applying(_min_p, processor.min_p_cpu[requests]))
        elif isinstance(processor, LogitBiasLogitsProcessor):
            found.non_argmax_invariant.append(_applying(_bias, processor.biases, rows_of))
        elif isinstance(processor, MinTokens):
            found.non_argmax_invariant.append(_applying(processor.ban, positions, rows_of))
        else:
            raise UnsupportedHost(
                f"das: found logits processor {type(processor)}, allowed with drafts: vLLM's built-in ones"
            )
    return found


def _applying(function: Callable[..., torch.Tensor], *args: Any) -> SimpleNamespace:
    return SimpleNamespace(apply=lambda logits: function(logits, *args))


def _min_p(logits: torch.Tensor, min_p: npt.NDArray[np.float32]) -> torch.Tensor:
    probs = logits.softmax(dim=-1)
    floor = probs.amax(dim=-1, keepdim=True) * beside(min_p, logits)[:, None]
    return logits.masked_fill_(probs < floor, -float("inf"))


def _bias(logits: torch.Tensor, biases: dict[int, dict[int, float]], rows_of: RowsOf) -> torch.Tensor:
    for request, of_tokens in biases.items():
        if (rows := rows_of(request)) is not None:
            logits[rows, beside(list(of_tokens), logits)] += beside(list(of_tokens.values()), logits)
    return logits


class MinTokens(MinTokensLogitsProcessor):
    """vLLM's `min_tokens`, by what each row's position says that a request has written. vLLM goes by a list that, under
    asynchronous scheduling, holds all draft tokens of the step before, which may yet be rejected: stops would be
    allowed by so many tokens too early."""

    positions: torch.Tensor | None = None
    """Of the requests' rows in the next call of `apply`, as in `Keys`."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool):
        super().__init__(vllm_config, device, is_pin_memory)
        unsure = 2 * (vllm_config.speculative_config.num_speculative_tokens + 1)
        stock: Callable[..., Any] = MinTokensLogitsProcessor.add_request

        def add_request(params: Any, prompt: list[int] | None, output: list[int]) -> Any:
            if params.min_tokens and prompt is None:
                raise UnsupportedHost(
                    "das: found min_tokens with prompt embeddings, allowed with drafts: a prompt of tokens"
                )
            return stock(params, prompt, _Written(output, len(prompt or ()), unsure))

        self.add_request: Callable[..., Any] = add_request

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Exclude what would end a request too early; one row a request, as `LogitsProcessor.apply`."""
        return self.ban(logits, self.positions, lambda request: slice(request, request + 1))

    def ban(self, logits: torch.Tensor, positions: torch.Tensor | None, rows_of: RowsOf) -> torch.Tensor:
        """Exclude what would end a request too early from logits [rows, vocab], in place; `positions` int64 [rows], as
        in `Keys`."""
        for request, (least, written, stops, *_) in self.min_toks.items():
            rows = rows_of(request)
            if rows is None or not stops:
                continue
            assert positions is not None and isinstance(written, _Written)
            short = positions[rows] < written.prompt + least - 1
            tokens, mine = beside(sorted(stops), logits), logits[rows]
            before = mine[:, tokens]
            mine[:, tokens] = before.masked_fill(short[:, None], -float("inf"))
            # A grammar may allow only to stop; then it overrides min_tokens, as in vLLM since 0.30.
            over = mine.isneginf().all(dim=1, keepdim=True)
            mine[:, tokens] = torch.where(over, before, mine[:, tokens])
        return logits


@dataclass(frozen=True)
class _Written(Sequence[int]):
    """What a request has written for sure, as far as vLLM looks at its length."""

    output: list[int]
    prompt: int
    """Tokens of the prompt."""
    unsure: int

    def __len__(self) -> int:
        return max(0, len(self.output) - self.unsure)

    def __getitem__(self, at: Any) -> Any:
        return self.output[at]
