"""On a real engine: a request drafts what was written ahead of it, whatever that is,
and writes what it would.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from jobs import Round
from requested import EVERY_PARAMETER, HISTORY, OFF, PLAIN, requests, stock, tokens


def packed(text: list[int]) -> bytes:
    return np.array(text, dtype=np.int32).tobytes()


@pytest.mark.one_build
def test_requests_repeat_what_was_written_ahead_with_their_noise(engine: Any) -> None:
    asked = requests(EVERY_PARAMETER)
    (written,) = tokens(engine(das=OFF, rounds=[Round(asked)]))
    middles = [len(text) // 2 for text in written]
    versions = {
        "whole": written,
        "half": [text[:middle] for text, middle in zip(written, middles, strict=True)],
        "other from the middle on": [
            [*t[:m], *(token ^ 1 for token in t[m:])]
            for t, m in zip(written, middles, strict=True)
        ],
        "nothing of it": [[token ^ 1 for token in text] for text in written],
        "more than it": [[*text, *text] for text in written],
    }
    forwards = {}
    for name, ahead in {"": None, **versions}.items():
        sent = (
            asked
            if ahead is None
            else [
                r.labelled(das_ahead=packed(t))
                for r, t in zip(asked, ahead, strict=True)
            ]
        )
        (result,) = engine(das=HISTORY, rounds=[Round(sent)])
        assert result["tokens"] == written, name
        assert result["misplaced"] == result["reused"] == 0
        forwards[name] = result["stats"]["request_forwards"]
    assert forwards["whole"] < 0.5 * forwards[""]
    assert forwards["half"] < 0.9 * forwards[""]
    assert forwards["other from the middle on"] < 0.95 * forwards[""]
    assert forwards["more than it"] == forwards["whole"]


@pytest.mark.long
def test_requests_on_v2_draft_what_was_written_ahead(v2_engine: Any) -> None:
    asked = requests(PLAIN)
    (written,) = tokens(v2_engine(das=None, rounds=stock([Round(asked)])))
    ahead = [
        request.labelled(das_ahead=packed(text))
        for request, text in zip(asked, written, strict=True)
    ]
    block = {**HISTORY, "history": {"device_bytes": "2MiB"}}
    without, found = (
        v2_engine(das=block, rounds=[Round(sent)])[0] for sent in (asked, ahead)
    )
    assert found["tokens"] == without["tokens"] == written
    assert found["hello"]["runner"] == "V2"
    assert (
        found["stats"]["request_forwards"] < 0.6 * without["stats"]["request_forwards"]
    )
