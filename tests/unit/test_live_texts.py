"""What the host of the V2 runner knows of its requests: the native core's part is what
a few lines of Python say.
"""

from __future__ import annotations

import numpy as np
import pytest

from das_adapter.core import tuning
from das_adapter.core.steps import Chances, Ints
from das_adapter.engine.requests import LiveRequest
from das_adapter.engine.v2.live import LiveTexts

MOST = 5
STOP = 3
VOCABULARY = 12
MODEL = 4


class Plain:
    """One request."""

    def __init__(self, request: LiveRequest) -> None:
        self.request = request
        self.length = request.length
        self.ended = False
        self.text: list[int] = []
        self.offer: np.ndarray | None = None
        """Survival chances of the last offer, float32; None: nothing was heard of
        it.
        """
        self.by_model = 0
        self.empty = 0

    def take(self, tokens: list[int]) -> int | None:
        """Return how many of the tokens are the text's; None: it does not go on."""
        if not tokens or self.ended:
            return None
        own = tokens[: max(1, self.request.end - self.length)]
        if stops := [at for at, token in enumerate(own) if token in self.request.stops]:
            own = own[: stops[0] + 1]
        self.length += len(own)
        self.text += own
        self.ended = bool(stops) or self.length >= self.request.end
        return len(own)

    def carried(self, given: int, model: int) -> tuple[int, int]:
        """Return how many draft tokens it carried that were no fillers, and how many of
        these the model's were.
        """
        modelled = self.by_model if model == 0 else max(0, model)
        real = min(given, modelled or (0 if self.offer is None else len(self.offer)))
        return real, real if modelled else 0


def joined(rng: np.random.Generator, number: int, slot: int) -> LiveRequest:
    stops = [frozenset[int](), frozenset([STOP]), frozenset([STOP, STOP + 1])][
        int(rng.integers(3))
    ]
    end = 8 + int(rng.integers(1, 40))
    record = bool(rng.integers(2))
    text = [] if rng.integers(2) else None
    return LiveRequest(
        str(number), number, 8, end, record, slot=slot, length=8, text=text, stops=stops
    )


class Outlook:
    """What is going to be offered."""

    def __init__(self) -> None:
        self.usual = np.zeros(MOST)
        self.batches = 0
        self.product = 0.0
        self.square = 0.0

    def hear(self, before: list[Chances | None], offers: list[Chances]) -> None:
        """Take what the requests of a batch were offered before, None: nothing is known
        of it, and now.
        """
        if not offers:
            return
        expected = self.usual.sum()
        self.batches = self.batches + 1
        self.usual = self.usual + (
            np.mean([padded(row) for row in offers], axis=0) - self.usual
        ) / min(self.batches, tuning.CPP_FORECAST_BATCHES)
        pairs = [
            (a.sum() - expected, b.sum() - expected)
            for a, b in zip(before, offers, strict=True)
            if a is not None
        ]
        if pairs:
            self.product += (
                float(np.mean([a * b for a, b in pairs])) - self.product
            ) / tuning.CPP_FORECAST_BATCHES
            self.square += (
                float(np.mean([a * a for a, _ in pairs])) - self.square
            ) / tuning.CPP_FORECAST_BATCHES

    def offer(self, heard: Chances | None, empty: int) -> np.ndarray:
        """Return the chances of what a request is going to be offered, given what was
        heard last, and that there was nothing so many times.
        """
        lasts = (
            min(1.0, max(0.0, self.product / self.square)) ** 2 if self.square else 1.0
        )
        own = 0.0 if heard is None else lasts
        return (
            own * padded(heard)
            + (1.0 - own) * 0.5 ** (empty / tuning.CPP_UNOFFERED_BATCHES) * self.usual
        )


def padded(row: Chances | None) -> np.ndarray:
    return np.append(
        [] if row is None else row, np.zeros(MOST - (0 if row is None else len(row)))
    )


def expected(
    live: dict[str, Plain],
    found: list[str],
    limits: Ints,
    floor: float,
    outlook: Outlook,
) -> list[list]:
    """Return the chances of each request's draft."""
    rows = [outlook.offer(live[req_id].offer, live[req_id].empty) for req_id in found]
    return [
        [c for c in row[:limit] if c >= floor and c > 0]
        for row, limit in zip(rows, limits, strict=True)
    ]


@pytest.mark.parametrize("model", [-1, 0, MODEL])
def test_the_native_core_follows_texts_and_drafts_as_plain_python_does(
    model: int,
) -> None:
    rng = np.random.default_rng(model + 1)
    requests = dict[str, LiveRequest]()
    live = dict[str, Plain]()
    texts = LiveTexts(MOST, requests)
    free = list(range(70))
    outlook = Outlook()
    ends = 0
    unknown = 0
    for number in range(300):
        ended = [
            req_id
            for req_id, request in live.items()
            if request.ended and rng.random() < 0.5
        ]
        texts.close(ended)
        for req_id in ended:
            free.append(requests.pop(req_id).slot)
            del live[req_id]
        while free and len(live) < 9 and rng.random() < 0.5:
            request = joined(rng, 1000 * number + len(live), free.pop(0))
            requests[request.req_id] = request
            live[request.req_id] = Plain(request)
            texts.open(request)
        batch = rng.permutation([*live, "gone"]).tolist()
        sampled = [
            rng.integers(0, VOCABULARY, rng.integers(0, MOST + 2)).tolist()
            for _ in batch
        ]
        given = rng.integers(0, MOST + 1, len(batch)) if number % 3 else None
        places, decoded, sums = texts.process_tokens(batch, sampled, given, model)
        rows = []
        trained = []
        for place, (req_id, tokens) in enumerate(zip(batch, sampled, strict=True)):
            request = live.get(req_id)
            got = None if request is None else request.take(tokens)
            if request is not None and got is not None:
                carried, modelled = request.carried(
                    0 if given is None else int(given[place]), model
                )
                room = request.request.end - 1 - request.length
                rows.append(
                    (
                        place,
                        request.request.slot,
                        got,
                        carried,
                        modelled,
                        room,
                        request.length,
                    )
                )
                trained += [rows[-1][2:4]] if request.request.record else []
                ends += request.ended
        columns = np.array(rows, dtype=np.int64).reshape(-1, 7).T
        brought = (
            decoded.carried
            if decoded.carried is not None
            else np.zeros(len(rows), dtype=np.int64)
        )
        assert (decoded.carried is None) == (columns[3].sum() == 0) and (
            decoded.by_model is None
        ) == (model < 0)
        by_model = columns[4] if decoded.by_model is None else decoded.by_model
        told = [
            places,
            decoded.slots,
            decoded.got,
            brought,
            by_model,
            decoded.room,
            decoded.context,
        ]
        assert [column.tolist() for column in told] == columns.tolist()
        drafts = 0 if given is None else int(given[columns[0]].sum())
        accepted = [min(got - 1, carried) for got, carried in trained]
        counts = (
            len(trained),
            sum(got for got, _ in trained),
            sum(c > 0 for _, c in trained),
        )
        whole = (
            len(rows),
            len(rows) + drafts,
            int(columns[6].sum()),
            int(columns[3].sum()),
        )
        assert sums == (*whole, *counts, sum(c for _, c in trained), sum(accepted))
        for request in live.values():
            assert request.request.text in (None, request.text)
        limits = rng.integers(0, MOST + 1, len(rows))
        floor = float(rng.choice([0.0, 0.2, 0.5]))
        chances, offsets = texts.forecast_drafts(decoded.slots, limits, floor)
        found = [batch[place] for place in places]
        unknown += sum(
            live[req_id].offer is None for req_id in found if outlook.batches
        )
        of_each = expected(live, found, limits, floor, outlook)
        assert offsets.tolist() == np.cumsum([0, *map(len, of_each)]).tolist()
        np.testing.assert_allclose(
            chances, [chance for row in of_each for chance in row], rtol=1e-5
        )
        if rng.random() < 0.7:
            heard(rng, texts, live, batch, outlook)
    assert ends > 20 and unknown > 20


def offers(rng: np.random.Generator, requests: int) -> tuple[Ints, Chances, Ints]:
    lengths = rng.integers(0, MOST + 1, requests).astype(np.int32)
    return (
        lengths,
        rng.random((requests, MOST), dtype=np.float32) ** 0.2,
        rng.integers(0, 3, requests),
    )


def heard(
    rng: np.random.Generator,
    texts: LiveTexts,
    live: dict[str, Plain],
    batch: list[str],
    outlook: Outlook,
) -> None:
    """Have what is offered to a batch heard."""
    lengths, chances, by_model = offers(rng, len(batch))
    texts.record_offers(batch, lengths, chances, by_model)
    survival = np.cumprod(chances, axis=1)
    there = [row for row, req_id in enumerate(batch) if req_id in live]
    before = [live[batch[row]].offer for row in there]
    for row in there:
        request = live[batch[row]]
        request.offer = survival[row, : lengths[row]]
        request.by_model = int(by_model[row])
        request.empty = 0 if lengths[row] else request.empty + 1
    outlook.hear(before, [survival[row, : lengths[row]] for row in there])


@pytest.mark.parametrize(("pause", "least", "most"), [(2, 0.3, 0.9), (None, 0.0, 0.02)])
def test_a_request_that_was_offered_nothing_may_be_offered_something_again(
    pause: int | None, least: float, most: float
) -> None:
    """`pause`: steps after which the offers to the second request begin or end, None:
    it is never offered any.
    """
    requests = {
        str(slot): LiveRequest(str(slot), slot, 8, 4000, True, slot=slot, length=8)
        for slot in range(2)
    }
    texts = LiveTexts(MOST, requests)
    slots = np.arange(2)
    for request in requests.values():
        texts.open(request)
    for step in range(400):
        there = pause is not None and step // pause % 2 == 0
        texts.record_offers(
            [*requests],
            np.array([MOST, MOST * there], np.int32),
            np.full((2, MOST), 0.9, np.float32),
            0 * slots,
        )
    assert not there
    chances, offsets = texts.forecast_drafts(slots, np.full(2, MOST), 0.0)
    first, second = np.split(chances, offsets[1:-1])
    for _ in range(600):
        texts.record_offers(
            ["1"], np.zeros(1, np.int32), np.zeros((1, MOST), np.float32), slots[:1]
        )
    assert texts.forecast_drafts(slots[1:], np.full(1, MOST), 0.005)[1].tolist() == [
        0,
        0,
    ]
    last, _ = texts.forecast_drafts(slots, np.full(2, MOST), 0.0, last=True)
    np.testing.assert_allclose(last, 0.9 ** np.arange(1, MOST + 1), rtol=1e-5)
    assert first[0] == pytest.approx(0.9, abs=0.1 if pause is None else 0.5)
    assert least <= (second[0] if len(second) else 0.0) <= most
