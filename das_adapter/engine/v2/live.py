"""The texts and the last drafts of the live requests on the V2 runner, as arrays by the
controller's slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from das_adapter.core import tuning
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
    "offer_known": "offer_known",
    "record": "record",
    "promised": "expected_accepted",
    "chances": "survival",
}
"""Columns by slot that the native core reads and changes, with its names for them."""


class Sums(NamedTuple):
    """Sums over the requests of a step that go on."""

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

    def __init__(
        self,
        max_draft_tokens: int,
        requests: Mapping[str, LiveRequest],
    ) -> None:
        """`max_draft_tokens`: tokens of a draft at most; `requests`: those that are
        live, `EngineController.live`.
        """
        self._requests = requests
        self.length = np.zeros(1, dtype=np.int64)
        """Tokens of each text."""
        self.end = np.zeros(1, dtype=np.int64)
        """Length at which each text stops."""
        self.ended = np.zeros(1, dtype=bool)
        """Whether a text has its last token, which vLLM says a step later."""
        self.offer_known = np.zeros(1, dtype=bool)
        """Whether it is known what was offered to a request."""
        self.record = np.zeros(1, dtype=bool)
        """Whether a request is of a training rollout."""
        self.offered = np.zeros(1, dtype=np.int64)
        """Tokens of a request's last draft from the history."""
        self.by_model = np.zeros(1, dtype=np.int64)
        """Tokens of the model's draft in its place; 0: it is the history's."""
        self.empty = np.zeros(1, dtype=np.int64)
        """Batches that were recorded since a request was offered something."""
        self.chances: Chances = np.zeros((1, max_draft_tokens), dtype=np.float32)
        """Chance of each token of the last draft to be reached and accepted."""
        self.promised = np.zeros(1, dtype=np.float32)
        """Sum of these chances: tokens that the draft is expected to bring."""
        self.mean_chances: Floats = np.zeros(max_draft_tokens)
        """Chances of the requests' drafts on average, 0 where a draft is shorter."""
        self.persistence: Floats = np.zeros(3)
        """How much of what a request's draft promises beyond the average is left in
        its next draft: the number of batches recorded, the mean product of the two
        drafts' excess tokens, and the mean square of the first one's.
        """
        self.kinds = np.zeros((1, max_draft_tokens), dtype=np.uint8)
        """Kinds of the tokens that a model drafted last, see `core.confidence`."""
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
        """Begin the columns of a request that joins the batch, or comes back to it."""
        slot = request.slot
        if slot >= len(self.length):
            self._make_room(slot + 1)
        self.length[slot] = request.length
        self.end[slot] = request.end
        self.record[slot] = request.record
        self.offered[slot] = 0
        self.by_model[slot] = 0
        self.empty[slot] = 0
        self.ended[slot] = False
        self.offer_known[slot] = False
        if request.stops and self._stops.get(slot) != request.stops:
            self._stops[slot] = request.stops
            own_stops = np.array(list(request.stops), dtype=np.int64)
            self._all_stops = np.union1d(self._all_stops, own_stops)
        if request.text is not None:
            self._texts[slot] = request.text
        self._known = None

    def close(self, req_ids: Sequence[str]) -> None:
        """Forget those of these requests that are live, before they are closed."""
        if not req_ids:
            return
        for req_id in req_ids:
            request = self._requests.get(req_id)
            if request is None:
                continue
            self._stops.pop(request.slot, None)
            self._texts.pop(request.slot, None)
        if not self._stops:
            self._all_stops = EMPTY_INTS
        self._known = None

    def _make_room(self, slots: int) -> None:
        self.kinds = with_slots(self.kinds, slots)
        columns = {}
        for name, native_name in _COLUMNS.items():
            column = with_slots(getattr(self, name), slots)
            setattr(self, name, column)
            columns[native_name] = column
        self._native = native().LiveColumns(
            **columns,
            mean_survival=self.mean_chances,
            persistence=self.persistence,
        )

    def forget_drafts(self) -> None:
        """Reduce the weight of past drafts, at a weight sync: the new policy may be
        offered others.
        """
        self.persistence[0] = min(self.persistence[0], tuning.FORECAST_KEPT_BATCHES)

    def slots(self, req_ids: Sequence[str]) -> Ints:
        """Return the slots of requests, int64 [requests], -1 of those that are not
        live.
        """
        if self._known is not None:
            known_ids, slots = self._known
            if known_ids == req_ids:
                return slots
        found = []
        for req_id in req_ids:
            request = self._requests.get(req_id)
            found.append(-1 if request is None else request.slot)
        slots = np.array(found, dtype=np.int64)
        self._known = list(req_ids), slots
        return slots

    def process_tokens(
        self,
        req_ids: Sequence[str],
        sampled: Sequence[list[int]],
        given: Ints | None = None,
        model: int = -1,
    ) -> tuple[Ints, Outcome, Sums]:
        """Process the tokens that each request of a batch got in a step; tokens behind
        a text's end are not its own.

        Args:
            given: draft tokens that were verified, fillers included, int64 [requests];
                None: nobody had any.
            model: tokens of each draft where a model makes all; 0: it makes some, as
                `record_offers` was told; -1: none does.

        Returns:
            The places in the batch of the requests that go on, what the step brought to
            them, and sums of that.
        """
        slots = self.slots(req_ids)
        rows = np.empty((7, len(req_ids)), dtype=np.int64)
        if given is None:
            given = EMPTY_INTS
        native_sums = self._native.process_output(
            slots,
            sampled,
            given,
            model,
            self._all_stops,
            self._stops,
            self._texts,
            rows,
        )
        sums = Sums(*native_sums)
        if sums.requests < len(req_ids):
            rows = rows[:, : sums.requests]
        (
            places,
            going_slots,
            got,
            carried,
            by_model,
            room,
            context,
        ) = rows
        outcome = Outcome(
            going_slots,
            got,
            carried if sums.carried else None,
            by_model if model >= 0 else None,
            room,
            context=context,
        )
        return places, outcome, sums

    def process_single_tokens(
        self,
        req_ids: Sequence[str],
        outputs: Sequence[Sequence[list[int]]],
    ) -> Ints | None:
        """Process some steps of a batch, in each of which every request got one token,
        its end not among them; return the requests' slots, int64 [requests]. None: they
        were no such steps, and are still to be processed.
        """
        slots = self.slots(req_ids)
        were_single = self._native.process_single_tokens(
            slots,
            outputs,
            self._all_stops,
            self._texts,
        )
        return slots if were_single else None

    def record_offers(
        self,
        req_ids: Sequence[str],
        lengths: np.ndarray,
        chances: Chances,
        by_model: np.ndarray,
    ) -> None:
        """Record what was offered to the requests of a batch: tokens, int32 [batch],
        the chance of each, given those before it, float32 [batch, n], and tokens of the
        model's drafts in their place, int64 [batch].
        """
        slots = self.slots(req_ids)
        self._native.record_offers(slots, lengths, chances, by_model)

    def record_kinds(
        self,
        req_ids: Sequence[str],
        kinds: npt.NDArray[np.uint8],
    ) -> None:
        """Record the kinds of the tokens that a model drafted for the requests of a
        batch, uint8 [batch, n].
        """
        slots = self.slots(req_ids)
        live = slots >= 0
        live_slots = slots[live]
        _, num_drafted = kinds.shape
        self.kinds[live_slots, :num_drafted] = kinds[live]

    def forecast_drafts(
        self,
        slots: Ints,
        limits: Ints,
        floor: float,
        last: bool = False,
    ) -> tuple[Chances, Ints]:
        """Return what is going to be offered, see `core.steps.Candidates`.

        Drafts that are chosen now are made two steps after those that were recorded
        last. What a draft promises beyond the average persists in part. Of a request of
        which nothing is known yet, the average is expected, and less the longer it was
        offered nothing. `last`: expect what was recorded last instead.
        """
        num_requests = len(slots)
        _, max_draft_tokens = self.chances.shape
        chances = np.empty(num_requests * max_draft_tokens, np.float32)
        offsets = np.empty(num_requests + 1, np.int64)
        num_chances = self._native.forecast_drafts(
            slots,
            limits,
            floor,
            last,
            chances,
            offsets,
        )
        return chances[:num_chances], offsets
