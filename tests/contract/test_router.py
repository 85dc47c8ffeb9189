"""Longest-first routing with veRL's balancer and a real ledger."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("verl")
import ray

from das_adapter.protocol.label import Label
from das_adapter.service.ledger import ledger
from das_adapter.verl.router import LongestFirstBalancer

LONG, SHORT = (1, 2, 3), tuple(range(10, 22))


@pytest.fixture
def service() -> Iterator[Any]:
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield ledger(window=4)
    ray.shutdown()


def acquire(balancer: LongestFirstBalancer, request: str, problem: int) -> str:
    return balancer.acquire_server(request, {"extra_args": Label(problem).extra_args()})[0]


def remember(service: Any) -> None:
    lengths = {True: 3000, False: 60}
    ray.get(service.add.remote([(p, lengths[p in LONG], 0) for p in (*LONG, *SHORT) for _ in range(4)]))


def test_predicted_long_requests_are_spread_whatever_order_they_come_in(service: Any) -> None:
    remember(service)
    balancer = LongestFirstBalancer({"a": None, "b": None})
    # By turns, all samples of the long problems would meet on one replica.
    arrivals = [p for pair in zip([*LONG, *LONG], SHORT, strict=False) for p in pair]
    homes = [acquire(balancer, f"r{i}", p) for i, p in enumerate(arrivals)]
    long = [home for home, p in zip(homes, arrivals, strict=True) if p in LONG]
    assert long.count("a") == long.count("b") == 3
    assert acquire(balancer, "r0", arrivals[0]) == homes[0]  # a later turn stays


def test_without_history_requests_are_spread_by_their_number(service: Any) -> None:
    balancer = LongestFirstBalancer({"a": None, "b": None})
    homes = [acquire(balancer, f"r{i}", 7) for i in range(6)]
    assert homes.count("a") == homes.count("b") == 3
    remember(service)
    for i, home in enumerate(homes):
        balancer.release_server(home, request_id=f"r{i}")
    acquire(balancer, "next batch", LONG[0])
    assert balancer._spread._tokens["a"] + balancer._spread._tokens["b"] > 1000


def test_replicas_may_come_and_go(service: Any) -> None:
    remember(service)
    balancer = LongestFirstBalancer({"a": None})
    assert acquire(balancer, "x", LONG[0]) == "a"
    balancer.add_servers({"b": None})
    assert acquire(balancer, "y", LONG[1]) == "b"
    balancer.remove_servers(["a"])
    assert acquire(balancer, "z", LONG[2]) == "b"
