"""The texts and the last drafts of the live requests on the V2 runner, as arrays by the controller's slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from das_adapter.core.requests import with_room
from das_adapter.core.steps import Chances, Ints
from das_adapter.engine.requests import LiveRequest


class LiveTexts:
    """What the host knows of the requests: how far they are, and what was offered to them last."""

    def __init__(self, most: int, requests: Mapping[str, LiveRequest]) -> None:
        """`most`: tokens of a draft at most; `requests`: those that are live, `EngineController.live`."""
        self._requests = requests
        self.length, self.end = np.zeros((2, 1), dtype=np.int64)
        """Tokens of each text; length at which it stops."""
        self.ended, self.heard = np.zeros((2, 1), dtype=bool)
        """Whether it has written its last token, which vLLM says a step later; whether it is known what was offered."""
        self.offered, self.by_model = np.zeros((2, 1), dtype=np.int64)
        """Tokens of the last draft from the history; of the model's in its place, 0 if it is not."""
        self._chances: Chances = np.zeros((1, most), dtype=np.float32)
        """Of each of them to be reached and accepted."""
        self._newest: Ints = np.zeros(1, dtype=np.int64)
        """Requests of the last batch that was heard of."""
        self._known: tuple[Sequence[str], Ints] | None = None
        """Requests of the last batch, and their slots; None: some have come or gone since."""
        self._watched: dict[int, LiveRequest] = {}
        """By slot, requests that have stops, or whose text somebody needs."""
        self._told: dict[int, LiveRequest] = {}
        """Those of them whose text somebody needs."""
        self._stops: frozenset[int] = frozenset()

    def open(self, request: LiveRequest) -> None:
        """Take a request that joins the batch, or comes back to it."""
        slot, columns = request.slot, ("length", "end", "ended", "by_model", "heard", "offered", "_chances")
        if slot >= len(self.length):
            vars(self).update({name: with_room(getattr(self, name), slot + 1) for name in columns})
        self.length[slot], self.end[slot] = request.length, request.end
        self.offered[slot] = self.by_model[slot] = 0
        self.ended[slot] = self.heard[slot] = False
        if request.stops or request.text is not None:
            self._watched[slot] = request
            self._stops |= request.stops
        if request.text is not None:
            self._told[slot] = request
        self._known = None

    def close(self, req_ids: Sequence[str]) -> None:
        """Forget those of these requests that are live, before they are closed."""
        if not req_ids:
            return
        for req_id in req_ids:
            if request := self._requests.get(req_id):
                self._watched.pop(request.slot, None)
                self._told.pop(request.slot, None)
        if not self._watched:
            self._stops = frozenset()
        self._known = None

    def slots(self, req_ids: Sequence[str]) -> Ints:
        """Return the slots of requests, int64 [requests], -1 of those that are not live."""
        if self._known is None or self._known[0] != req_ids:
            found = [self._requests[req_id].slot if req_id in self._requests else -1 for req_id in req_ids]
            self._known = list(req_ids), np.array(found, dtype=np.int64)
        return self._known[1]

    def take(self, req_ids: Sequence[str], sampled: Sequence[list[int]]) -> tuple[Ints, Ints, Ints]:
        """Take the tokens that each request of a batch got in a step; return of those that go on their places in the
        batch, their slots, and how many of the tokens are their texts', int64 [requests] each: those behind an end are
        not."""
        slots, counts = self.slots(req_ids), np.fromiter(map(len, sampled), np.int64, len(sampled))
        places = np.flatnonzero((counts > 0) & (slots >= 0) & ~self.ended[slots])
        slots = slots[places]
        left = self.end[slots] - self.length[slots]
        got = np.maximum(1, np.minimum(counts[places], left))
        ended = got >= left
        if self._watched:
            stopping = not self._stops.isdisjoint(chain.from_iterable(sampled))
            watched = self._watched if stopping else self._told
            for i, slot in enumerate(slots.tolist() if watched else ()):
                request = watched.get(slot)
                if request is None:
                    continue
                tokens = sampled[places[i]][: int(got[i])]
                stop = next((at for at, token in enumerate(tokens, 1) if token in request.stops), None)
                if stop is not None:
                    got[i], ended[i] = stop, True
                if request.text is not None:
                    request.text += tokens[:stop]
        self.length[slots] += got
        self.ended[slots] = ended
        return places, slots, got

    def take_singles(self, req_ids: Sequence[str], outputs: Sequence[Sequence[list[int]]]) -> Ints | None:
        """Take some steps of a batch, in each of which every request got one token, its end not among them; return the
        requests' slots, int64 [requests]. None: they were no such steps, and are still to be taken."""
        slots, steps = self.slots(req_ids), len(outputs)
        left = np.where(self.ended[slots] | (slots < 0), 0, self.end[slots] - self.length[slots])
        if not len(slots) or left.min() <= steps or set(map(len, chain.from_iterable(outputs))) != {1}:
            return None
        if not self._stops.isdisjoint(chain.from_iterable(chain.from_iterable(outputs))):
            return None
        if self._told:
            for slot, text in zip(slots.tolist(), zip(*map(chain.from_iterable, outputs), strict=True), strict=True):
                request = self._told.get(slot)
                if request is not None and request.text is not None:
                    request.text += text
        self.length[slots] += steps
        return slots

    def hear(self, req_ids: Sequence[str], lengths: Ints, chances: Chances, by_model: np.ndarray) -> None:
        """Take what was offered to the requests of a batch: tokens, int64 [batch], the chance of each, given those
        before it, float32 [batch, n], and tokens of the model's drafts in their place, int64 [batch]."""
        slots = self.slots(req_ids)
        rows = np.flatnonzero(slots >= 0)
        slots = slots[rows]
        self.offered[slots], self.by_model[slots], self.heard[slots] = lengths[rows], by_model[rows], True
        self._chances[slots, : chances.shape[1]] = np.cumprod(chances[rows], axis=1)
        if len(slots):
            self._newest = slots

    def found(self, slots: Ints, limits: Ints, floor: float) -> tuple[Chances, Ints]:
        """Return what was offered last, see `core.steps.HistoryDrafts`."""
        chances, place = self._chances[slots], np.arange(self._chances.shape[1])
        there, new = np.minimum(self.offered[slots], limits)[:, None], ~self.heard[slots]
        if new.any():  # of which nothing is known yet: as of the others, on average
            chances[new], there[new, 0] = self._chances[self._newest].mean(axis=0), limits[new]
        kept = np.count_nonzero((place < there) & (chances >= floor), axis=1)
        offsets = np.concatenate([[0], np.cumsum(kept)])
        return chances[place < kept[:, None]], offsets
