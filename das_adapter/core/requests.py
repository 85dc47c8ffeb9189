"""The live requests of an engine, as the controller sees them."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from das_adapter.core import tuning
from das_adapter.core.length import LengthClass, LengthModel
from das_adapter.core.native import native
from das_adapter.core.steps import Bools, Floats, Ints

EMPTY_INTS: Ints = np.zeros(0, dtype=np.int64)
_NATIVE = ("written", "pace", "load", "drafted", "accepted", "steps", "worth_s")
"""Columns that the native core reads and brings forward, under the same names."""


def advance_lengths(
    slots: Ints,
    sampled: list[list[int]],
    now: Ints,
    last: Ints,
    ends: Ints,
) -> tuple[Ints, Ints] | None:
    """Bring the lengths of a batch's requests forward by a step: of each its slot, the
    tokens that it got and its length `now`, int64 [b]; by slot its length before,
    `last`, which becomes the new one, and where it `ends`.

    Return how many tokens each got, and the draft tokens that fit before its end; None,
    and nothing has changed, where a request got nothing or its length is not what it
    was and what it got.
    """
    return native().advance_lengths(slots, sampled, now, last, ends)


Column = TypeVar("Column", bound=npt.NDArray[Any])


def with_slots(column: Column, slots: int) -> Column:
    """Return a column [slots, ...] with at least so many slots, new ones 0; if it
    grows, to twice its size or more.
    """
    num_slots, *row_shape = column.shape
    missing = slots - num_slots
    if missing <= 0:
        return column
    new_slots = max(missing, num_slots)
    shape = (new_slots, *row_shape)
    empty = np.zeros(shape, dtype=column.dtype)
    longer = np.concatenate([column, empty])
    return cast(Column, longer)


_TYPES = {
    "length_class": np.int64,
    "first_class": np.int64,
    "record": np.bool_,
}
"""Types of the columns that are not float64."""


class RequestTable:
    """A slot for each live request; columns [slots]."""

    written: Floats
    """Tokens of the response."""
    pace: Floats
    """Tokens per step, lately."""
    load: Floats
    """Draft tokens per step, lately."""
    drafted: Floats
    """Draft tokens verified."""
    accepted: Floats
    steps: Floats
    """Decode steps taken part in."""
    budget: Floats
    """Draft tokens a step that DAS plans."""
    worth_s: Floats
    """Seconds that an accepted token saves."""
    length_class: Ints
    """`LengthClass`."""
    first_class: Ints
    """`LengthClass` of the request when it joined."""
    record: Bools
    """Whether its text may serve as history and counts as training."""
    cdf: Floats
    """Distribution of the response's length, [slots, GRID]."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._native: Any = None
        for name in self.__annotations__:
            dtype = _TYPES.get(name, np.float64)
            column: npt.NDArray[Any] = np.zeros(0, dtype)
            if name == "cdf":
                column = np.zeros((0, LengthModel.GRID), dtype)
            setattr(self, name, column)

    def open(self, written: int, cdf: Floats) -> int:
        """Give a request a slot."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        for name in self.__annotations__:
            column = getattr(self, name)
            column[slot] = 0
        self.written[slot] = written
        self.pace[slot] = 1.0
        self.length_class[slot] = LengthClass.MEDIUM
        self.cdf[slot] = cdf
        return slot

    def close(self, slot: int) -> None:
        """Free a request's slot."""
        self._free.append(slot)

    def advance(
        self,
        slots: Ints,
        got: Ints,
        carried: Ints | None,
        curve: Floats,
    ) -> None:
        """Add a decode step: tokens that each request got, draft tokens that each
        carried into it (None: nobody), which are added to the `curve`,
        `AcceptanceCurve.counts`.
        """
        if self._native is None:
            return
        if carried is None:
            carried = EMPTY_INTS
        self._native.advance(slots, got, carried, tuning.PACE_STEPS, curve)

    def max_draft_tokens(
        self,
        slots: Ints,
        room: Ints,
        longest: int,
        price: float,
    ) -> Ints:
        """Return the most draft tokens of each request: as many as there is `room` for,
        `longest` at most, and none where a token is not worth more than its price,
        seconds.
        """
        max_tokens = np.empty(len(slots), dtype=np.int64)
        self._native.limits(slots, room, longest, price, max_tokens)
        return max_tokens

    def record_baseline_steps(self, slots: Ints, tokens: Ints) -> None:
        """Add the tokens, one a step, of steps at whose end no drafter was asked,
        int64 [requests].
        """
        kept_of_step = 1.0 - 1.0 / tuning.PACE_STEPS
        kept = kept_of_step**tokens
        excess = self.pace[slots] - 1.0
        kept_excess = kept * excess
        self.written[slots] += tokens
        self.pace[slots] = 1.0 + kept_excess
        self.load[slots] *= kept

    def _grow(self) -> None:
        num_slots = len(self.written)
        new_slots = max(64, num_slots)
        end = num_slots + new_slots
        # the lowest is given first
        self._free += reversed(range(num_slots, end))
        native_columns = {}
        for name in self.__annotations__:
            column = getattr(self, name)
            column = with_slots(column, end)
            setattr(self, name, column)
            if name in _NATIVE:
                native_columns[name] = column
        self._native = native().RequestColumns(**native_columns)
