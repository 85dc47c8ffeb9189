"""The texts and the last drafts of the live requests on the V2 runner, as arrays by the
controller's slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from das_adapter.core.native import native
from das_adapter.core.requests import EMPTY_INTS, with_slots
from das_adapter.core.steps import Chances, Floats, Ints, Outcome
from das_adapter.engine.requests import LiveRequest

_COLUMNS = {
    "length": "length",
    "end": "end",
    "offered": "num_offered",
    "by_model": "num_model_offered",
    "empty": "batches_unoffered",
    "ended": "ended",
    "heard": "offer_known",
    "record": "record",
    "promised": "expected_accepted",
    "chances": "survival",
}
"""Columns by slot that the native core reads and changes, with its names for them."""


class Sums(NamedTuple):
    """Of the requests of a step that go on."""

    requests: int
    tokens: int
    """In its forward pass, where it reads no prompt."""
    context: int
    """Tokens of their texts."""
    carried: int
    """Draft tokens, without fillers."""
    forwards: int
    """Requests of training rollouts; so is all that follows."""
    written: int
    """Tokens."""
    drafted_forwards: int
    """Those with draft tokens."""
    drafted: int
    accepted: int


class LiveTexts:
    """What the host knows of the requests: how far they are, and what was offered to
    them last.
    """

    def __init__(self, most: int, requests: Mapping[str, LiveRequest]) -> None:
        """`most`: tokens of a draft at most; `requests`: those that are live,
        `EngineController.live`.
        """
        self._requests = requests
        self.length, self.end = np.zeros((2, 1), dtype=np.int64)
        """Tokens of each text; length at which it stops."""
        self.ended, self.heard, self.record = np.zeros((3, 1), dtype=bool)
        """Whether it has written its last token, which vLLM says a step later; whether
        it is known what was offered; whether it is of a training rollout.
        """
        self.offered, self.by_model, self.empty = np.zeros((3, 1), dtype=np.int64)
        """Tokens of the last draft from the history; of the model's in its place, 0 if
        it is not; batches that were heard of since there was one.
        """
        self.chances: Chances = np.zeros((1, most), dtype=np.float32)
        """Of each of them to be reached and accepted."""
        self.promised = np.zeros(1, dtype=np.float32)
        """Sum of these chances: tokens that the draft is expected to bring."""
        self.usual: Floats = np.zeros(most)
        """Chances of the requests' drafts on average, 0 where a draft is shorter."""
        self.lasting: Floats = np.zeros(3)
        """Batches that were heard of; and of what a request's draft promises beyond the
        usual, the mean product with the same of its next draft, and the mean square:
        how much lasts to the next step.
        """
        self.kinds = np.zeros((1, most), dtype=np.uint8)
        """Of the tokens that a model drafted last, see `core.confidence`."""
        self._native: Any = None
        self._make_room(1)
        self._known: tuple[Sequence[str], Ints] | None = None
        """Requests of the last batch, and their slots; None: some have come or gone
        since.
        """
        self._stops: dict[int, frozenset[int]] = {}
        """By slot, tokens that end a request."""
        self._texts: dict[int, list[int]] = {}
        """By slot, texts that somebody needs."""
        self._all_stops: Ints = EMPTY_INTS
        """Tokens that end some request, rising."""

    def open(self, request: LiveRequest) -> None:
        """Take a request that joins the batch, or comes back to it."""
        slot = request.slot
        if slot >= len(self.length):
            self._make_room(slot + 1)
        self.length[slot] = request.length
        self.end[slot] = request.end
        self.record[slot] = request.record
        self.offered[slot] = self.by_model[slot] = self.empty[slot] = 0
        self.ended[slot] = self.heard[slot] = False
        if request.stops and self._stops.get(slot) != request.stops:
            self._stops[slot] = request.stops
            self._all_stops = np.union1d(
                self._all_stops, np.array(list(request.stops), dtype=np.int64)
            )
        if request.text is not None:
            self._texts[slot] = request.text
        self._known = None

    def close(self, req_ids: Sequence[str]) -> None:
        """Forget those of these requests that are live, before they are closed."""
        if not req_ids:
            return
        for req_id in req_ids:
            if request := self._requests.get(req_id):
                self._stops.pop(request.slot, None)
                self._texts.pop(request.slot, None)
        if not self._stops:
            self._all_stops = EMPTY_INTS
        self._known = None

    def _make_room(self, slots: int) -> None:
        self.kinds = with_slots(self.kinds, slots)
        columns = {name: with_slots(getattr(self, name), slots) for name in _COLUMNS}
        vars(self).update(columns)
        self._native = native().LiveColumns(
            **{_COLUMNS[name]: column for name, column in columns.items()},
            mean_survival=self.usual,
            persistence=self.lasting,
        )

    def slots(self, req_ids: Sequence[str]) -> Ints:
        """Return the slots of requests, int64 [requests], -1 of those that are not
        live.
        """
        if self._known is None or self._known[0] != req_ids:
            found = [
                self._requests[req_id].slot if req_id in self._requests else -1
                for req_id in req_ids
            ]
            self._known = list(req_ids), np.array(found, dtype=np.int64)
        return self._known[1]

    def take(
        self,
        req_ids: Sequence[str],
        sampled: Sequence[list[int]],
        given: Ints | None = None,
        model: int = -1,
    ) -> tuple[Ints, Outcome, Sums]:
        """Take the tokens that each request of a batch got in a step; tokens behind a
        text's end are not its own.

        Args:
            given: draft tokens that were verified, fillers included, int64 [requests];
                None: nobody had any.
            model: tokens of each draft where a model makes all; 0: it makes some, as
                `hear` was told; -1: none does.

        Returns:
            The places in the batch of the requests that go on, what the step brought to
            them, and sums of that.
        """
        slots = self.slots(req_ids)
        rows = np.empty((7, len(req_ids)), dtype=np.int64)
        told = (
            slots,
            sampled,
            EMPTY_INTS if given is None else given,
            model,
            self._all_stops,
            self._stops,
            self._texts,
        )
        sums = Sums(*self._native.process_output(*told, rows))
        rows = rows if sums.requests == len(req_ids) else rows[:, : sums.requests]
        places, slots, got, carried, by_model, room, context = rows
        of_model = None if model < 0 else by_model
        outcome = Outcome(
            slots,
            got,
            carried if sums.carried else None,
            of_model,
            room,
            context=context,
        )
        return places, outcome, sums

    def take_singles(
        self, req_ids: Sequence[str], outputs: Sequence[Sequence[list[int]]]
    ) -> Ints | None:
        """Take some steps of a batch, in each of which every request got one token, its
        end not among them; return the requests' slots, int64 [requests]. None: they
        were no such steps, and are still to be taken.
        """
        slots = self.slots(req_ids)
        were_single = self._native.process_single_tokens(
            slots, outputs, self._all_stops, self._texts
        )
        return slots if were_single else None

    def hear(
        self,
        req_ids: Sequence[str],
        lengths: np.ndarray,
        chances: Chances,
        by_model: np.ndarray,
    ) -> None:
        """Take what was offered to the requests of a batch: tokens, int32 [batch], the
        chance of each, given those before it, float32 [batch, n], and tokens of the
        model's drafts in their place, int64 [batch].
        """
        self._native.record_offers(self.slots(req_ids), lengths, chances, by_model)

    def hear_kinds(self, req_ids: Sequence[str], kinds: npt.NDArray[np.uint8]) -> None:
        """Take the kinds of the tokens that a model drafted for the requests of a
        batch, uint8 [batch, n].
        """
        slots = self.slots(req_ids)
        live = slots >= 0
        self.kinds[slots[live], : kinds.shape[1]] = kinds[live]

    def found(
        self,
        slots: Ints,
        limits: Ints,
        floor: float,
        last: bool = False,
    ) -> tuple[Chances, Ints]:
        """Return what is going to be offered, see `core.steps.Candidates`: drafts
        that are chosen now are made two steps after those that were heard of last. What
        a draft promises beyond the usual lasts in part; of a request of which nothing
        is known yet, the usual is expected, and less the longer it was offered nothing.
        `last`: take what was heard of last for it.
        """
        chances = np.empty(len(slots) * self.chances.shape[1], np.float32)
        offsets = np.empty(len(slots) + 1, np.int64)
        return (
            chances[
                : self._native.forecast_drafts(
                    slots, limits, floor, last, chances, offsets
                )
            ],
            offsets,
        )
