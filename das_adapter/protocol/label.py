"""The label of a request: what a host tells the engine about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from das_adapter.core.identity import prompt_identity

_KEYS = {"problem": "das_problem", "seed": "das_seed", "record": "das_record", "start": "das_start"}


@dataclass(frozen=True, slots=True)
class Label:
    """A request's label. It travels in `SamplingParams.extra_args` as flat integers, so that the OpenAI server's
    `vllm_xargs` can carry it."""

    problem: int | None = None
    """64-bit identity of the problem; None: its prompt's."""
    seed: int | None = None
    """Seed of the keyed noise; None: `SamplingParams.seed`, and where there is none, any."""
    record: bool = True
    """Whether the text may serve as history and counts as training; False for a validation's."""
    start: int | None = None
    """Where the text begins that is in no history yet, in tokens of the prompt: what a resumed request has written
    already and a tool's answer lie behind it. None: at the prompt's end."""

    @classmethod
    def of(cls, extra_args: Mapping[str, Any] | None) -> Label:
        """Read a request's `extra_args`; what they don't say has its default."""
        found = {name: int(extra_args[key]) for name, key in _KEYS.items() if key in extra_args} if extra_args else {}
        return cls(found.get("problem"), found.get("seed"), bool(found.get("record", True)), found.get("start"))

    def extra_args(self) -> dict[str, int]:
        """Return the entries of `extra_args` that `of` reads back."""
        return {key: int(value) for name, key in _KEYS.items() if (value := getattr(self, name)) is not None}

    def problem_of(self, prompt_ids: npt.ArrayLike) -> int:
        """Return the problem that a request with this prompt is about."""
        return prompt_identity(prompt_ids) if self.problem is None else self.problem

    def start_in(self, prompt_tokens: int) -> int:
        """Return `start` for a prompt of so many tokens."""
        return prompt_tokens if self.start is None else min(self.start, prompt_tokens)
