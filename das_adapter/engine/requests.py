"""The requests of an engine that are drafted for."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from das_adapter.engine.labels import media
from das_adapter.protocol.label import Label

LABEL = "_das_label"
"""Attribute of vLLM's requests: their `Label`, once it was read."""


def label_of(request: Any) -> Label:
    """Return the label of a request of vLLM's, as the front end has completed it (`labels.RequestLabels`)."""
    label: Label | None = getattr(request, LABEL, None)
    if label is None:
        params = request.sampling_params
        label = Label.of(params.extra_args if params else None)
        setattr(request, LABEL, label)
    return label


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
    began: float = field(default_factory=time.time)
    length: int = 0
    """Tokens when it joined the batch. This and what follows: on the V2 runner alone."""
    text: list[int] | None = None
    """What it has written, where the host needs that."""
    stops: frozenset[int] = frozenset()
    """Tokens that end it."""

    @classmethod
    def of(cls, req_id: str, request: Any, longest: int) -> LiveRequest:
        """Make the record of a request of vLLM's (its prompt, parameters and `mm_features` are read); `longest`:
        tokens of a text at most."""
        prompt, params, label = request.prompt_token_ids or (), request.sampling_params, label_of(request)
        limit = (params.max_tokens if params else None) or longest
        problem, end = label.problem_of(prompt, media(request)), min(longest, len(prompt) + limit)
        ahead = np.frombuffer(label.ahead or b"", dtype=np.int32)
        return cls(req_id, problem, label.start_in(len(prompt)), end, label.record, ahead)
