"""Requests start longest first, and are spread over the replicas."""

from __future__ import annotations

import numpy as np

from das_adapter.core.routing import Spread


def test_long_requests_are_spread_before_tokens_are_balanced() -> None:
    spread = Spread(["a", "b"])
    assert [spread.pick(1000, True), spread.pick(900, True)] == ["a", "b"]
    assert spread.pick(10, False) == "b"  # fewer tokens there
    assert spread.pick(1000, True) == "b"
    assert spread._tokens == {"a": 1000, "b": 1910}


def test_what_ended_no_longer_counts() -> None:
    spread = Spread(["a", "b"])
    spread.pick(1000, True)
    spread.pick(10, False)
    spread.done("a", 1000, True)
    assert spread.pick(500, True) == "a"
    spread.remove("a")
    spread.done("a", 500, True)
    assert spread.pick(500, True) == "b"
    spread.add("c")
    assert spread.pick(500, True) == "c"


def test_no_replica_gets_more_than_its_share_of_a_long_tail() -> None:
    lengths = np.random.default_rng(0).lognormal(6, 1.2, 64)
    spread = Spread("abcd")
    for i in np.argsort(-lengths, kind="stable"):
        spread.pick(lengths[i], bool(lengths[i] > np.quantile(lengths, 0.8)))
    loads = np.array(list(spread._tokens.values()))
    assert loads.max() < 1.15 * loads.mean()
