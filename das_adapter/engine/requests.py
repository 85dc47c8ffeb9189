"""The requests of an engine that are drafted for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from das_adapter.engine.labels import media
from das_adapter.protocol.label import Label


@dataclass(slots=True)
class LiveRequest:
    """A request that is drafted for: what the engine knows of it."""

    req_id: str
    problem: int
    start: int
    """Length at which its response began."""
    end: int
    """Length at which it stops."""
    record: bool
    """Whether its text may serve as history."""
    ahead: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    """What was written ahead of its response, int32 token ids."""
    slot: int = -1
    """Its slot in the controller."""
    began: float = field(default_factory=time.time)
    length: int = 0
    """Its length, tokens. This and what follows: on the V2 runner alone."""
    text: list[int] | None = None
    """What it has written, where the host needs that."""
    stops: frozenset[int] = frozenset()
    """Tokens that end it."""
    ended: bool = False
    """Whether it has written its last token; vLLM says so a step later."""
    chances: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    """Chance of each token of its last draft to be reached and accepted, float32."""
    by_model: bool = False
    """Whether its last draft is a model's, where others have theirs from the history."""

    @classmethod
    def of(cls, req_id: str, request: Any, label: Label, longest: int) -> LiveRequest:
        """Make the record of a request of vLLM's (its prompt, parameters and `mm_features` are read); `longest`:
        tokens of a text at most."""
        prompt, params = request.prompt_token_ids or (), request.sampling_params
        limit = (params.max_tokens if params else None) or longest
        problem, end = label.problem_of(prompt, media(request)), min(longest, len(prompt) + limit)
        ahead = np.frombuffer(label.ahead or b"", dtype=np.int32)
        return cls(req_id, problem, label.start_in(len(prompt)), end, label.record, ahead)

    def take(self, tokens: Sequence[int]) -> int:
        """Take the tokens that it got in a step, and return how many of them are its text: those behind its end are
        not."""
        count = max(1, min(len(tokens), self.end - self.length))
        count = next((i + 1 for i, token in enumerate(tokens[:count]) if token in self.stops), count)
        self.ended = tokens[count - 1] in self.stops or self.length + count >= self.end
        self.length += count
        if self.text is not None:
            self.text += tokens[:count]
        return count
