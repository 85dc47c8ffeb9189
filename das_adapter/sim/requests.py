"""The requests of a simulation, in columns."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def _ints() -> Ints:
    return np.zeros(0, dtype=np.int64)


def _floats() -> Floats:
    return np.zeros(0)


@dataclass
class Requests:
    """A row for each request, in the order in which they were made; tokens, counts or seconds, shape (n,)."""

    problem: Ints = field(default_factory=_ints)
    visit: Ints = field(default_factory=_ints)
    """How often the problem was visited before."""
    text: Ints = field(default_factory=_ints)
    """Row of its recorded response; -1: it has none."""
    prompt: Ints = field(default_factory=_ints)
    length: Ints = field(default_factory=_ints)
    """Tokens that it is going to write."""
    most: Ints = field(default_factory=_ints)
    """Tokens that it may write."""
    version: Ints = field(default_factory=_ints)
    """Weight version at which it was sent."""
    engine: Ints = field(default_factory=_ints)
    written: Ints = field(default_factory=_ints)
    forwards: Ints = field(default_factory=_ints)
    """Steps that it took part in."""
    drafted: Ints = field(default_factory=_ints)
    accepted: Ints = field(default_factory=_ints)
    preempted: Ints = field(default_factory=_ints)
    """How often it lost its place."""
    unread: Ints = field(default_factory=_ints)
    """Tokens that its engine has to read before it continues."""
    draft: Ints = field(default_factory=_ints)
    """Tokens of its present draft."""
    hits: Ints = field(default_factory=_ints)
    """Those of them that the policy will confirm."""
    copied: Ints = field(default_factory=_ints)
    """Draft tokens in place of those, from the policy copy or a neural drafter."""
    copy_hits: Ints = field(default_factory=_ints)
    """Those of them that the policy will confirm."""
    sent: Floats = field(default_factory=_floats)
    begun: Floats = field(default_factory=_floats)
    """When it was admitted last."""
    ended: Floats = field(default_factory=_floats)

    def add(self, problem: Ints, visit: Ints, text: Ints, prompt: Ints, length: Ints, most: Ints) -> Ints:
        """Add requests; return their rows."""
        first, count = len(self.problem), len(problem)
        given = {"problem": problem, "visit": visit, "text": text, "prompt": prompt, "length": length, "most": most}
        for column in fields(self):
            old = getattr(self, column.name)
            new = np.asarray(given.get(column.name, np.zeros(count)), dtype=old.dtype)
            setattr(self, column.name, np.concatenate([old, new]))
        return np.arange(first, first + count)

    def room(self, rows: Ints) -> Ints:
        """Return how many draft tokens each request can use: its last token needs no draft."""
        return np.maximum(np.minimum(self.length[rows], self.most[rows]) - 1 - self.written[rows], 0)

    def __len__(self) -> int:
        return len(self.problem)
