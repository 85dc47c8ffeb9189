"""The requests of a simulation, in columns."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
_BEGIN = {"slot": -1, "least": np.inf}
"""Values of new requests, where they are neither given nor 0."""


class Requests:
    """A row for each request, in the order in which they were made; tokens, counts or
    seconds, shape (n,).
    """

    problem: Ints
    visit: Ints
    """How often the problem was visited before."""
    text: Ints
    """Row of its recorded response; -1: it has none."""
    prompt: Ints
    length: Ints
    """Tokens that it is going to write."""
    most: Ints
    """Tokens that it may write."""
    version: Ints
    """Weight version at which it was sent."""
    engine: Ints
    written: Ints
    told: Ints
    """Those of these that its engine's policy of drafts knows of."""
    forwards: Ints
    """Steps that it took part in."""
    drafted: Ints
    accepted: Ints
    preempted: Ints
    """How often it lost its place."""
    unread: Ints
    """Tokens that its engine has to read before it continues."""
    draft: Ints
    """Tokens of its present draft."""
    hits: Ints
    """Those of them that the policy will confirm."""
    copied: Ints
    """Draft tokens in place of those, from the policy copy or a neural drafter."""
    copy_hits: Ints
    """Those of them that the policy will confirm."""
    ended: Floats
    slot: Ints
    """Its place in its engine's controller; -1: none."""
    least: Floats
    """Logarithm of the chance under which its drafts end until the controller is asked
    again; inf: no draft.
    """
    limit: Ints
    """Maximum tokens of these drafts."""
    handle: Ints
    """Its handle in its engine's index; 0: none."""
    indexed: Ints
    """Tokens of it that the index has."""
    ahead: Ints
    """Tokens that were written ahead of it; -1: it is itself written ahead, for one of
    a step to come.
    """
    same: Ints
    """Its first tokens that are the same under the weights before, with the same
    noise.
    """

    def __init__(self) -> None:
        for name, kind in Requests.__annotations__.items():
            setattr(
                self, name, np.zeros(0, np.float64 if kind == "Floats" else np.int64)
            )

    def add(self, **columns: Ints) -> Ints:
        """Add requests whose `problem`, `visit`, `text`, `prompt`, `length` and `most`
        are given; return their rows.
        """
        first = len(self)
        count = len(columns["problem"])
        for name in Requests.__annotations__:
            old = getattr(self, name)
            new = np.asarray(
                columns.get(name, np.full(count, _BEGIN.get(name, 0))), old.dtype
            )
            setattr(self, name, np.append(old, new))
        return np.arange(first, first + count)

    def room(self, rows: Ints) -> Ints:
        """Return how many draft tokens each request can use: its last token needs no
        draft.
        """
        return np.maximum(
            np.minimum(self.length[rows], self.most[rows]) - 1 - self.written[rows], 0
        )

    def __len__(self) -> int:
        return len(self.problem)
