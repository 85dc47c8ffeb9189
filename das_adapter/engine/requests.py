"""The requests of an engine that are drafted for."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class LiveRequest:
    """A request that is drafted for."""

    req_id: str
    slot: int
    """Its slot in the controller."""
    problem: int
    start: int
    """Length at which its response began."""
    end: int
    """Length at which it stops."""
    record: bool
    """Whether its text may serve as history."""
    begin: float = field(default_factory=time.time)
