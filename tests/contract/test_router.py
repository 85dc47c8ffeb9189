"""Routing with veRL's balancer and a real ledger."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("verl")
import ray
from verl.workers.rollout.router import get_router_handle

from das_adapter.config import DasConfig, parse
from das_adapter.core.length import RESPONSE
from das_adapter.cpu.verl_platform import run_name
from das_adapter.protocol.label import Label
from das_adapter.service.ledger import ledger, running_ledger
from das_adapter.verl.router import DasLoadBalancer, balancer

SERVERS: dict[str, Any] = {"a": None, "b": None}


@pytest.fixture(scope="module")
def runs() -> Iterator[list[str]]:
    """The names of two runs, of which the second goes on."""
    names = []
    for _ in range(2):
        ray.shutdown()
        ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
        names.append(run_name())
    yield names
    ray.shutdown()


@pytest.fixture
def service(runs: list[str]) -> Iterator[Any]:
    """A ledger that knows no lengths yet."""
    yield ledger()
    ray.kill(ledger())
    with pytest.raises(ValueError):  # Ray has forgotten its name
        while running_ledger():
            time.sleep(0.1)


def made(group: int = 4, routing: str = "longest_first") -> type[DasLoadBalancer]:
    das = parse({"routing": routing})
    assert isinstance(das, DasConfig)
    return balancer(das, SimpleNamespace(n=group, max_num_seqs=64))


def acquire(
    router: DasLoadBalancer, request: str, problem: int, record: bool = True
) -> str:
    return router.acquire_server(
        request, {"extra_args": Label(problem, record=record).extra_args()}
    )[0]


def arrive(
    router: DasLoadBalancer, groups: list[list[int]], name: str = ""
) -> dict[int, list[str]]:
    """Acquire replicas for the samples of groups, which come in turns; return them by
    problem.
    """
    homes: dict[int, list[str]] = {}
    for sample in range(max(map(len, groups))):
        for group in groups:
            homes.setdefault(group[sample], []).append(
                acquire(router, f"{name}{group[sample]}/{sample}", group[sample])
            )
    return homes


def end(router: DasLoadBalancer, homes: dict[int, list[str]], name: str = "") -> None:
    for problem, places in homes.items():
        for sample, home in enumerate(places):
            router.release_server(home, request_id=f"{name}{problem}/{sample}")


def remember(service: Any, lengths: dict[int, int]) -> None:
    """Let responses arrive, and a weight sync follow."""
    service.add.remote(
        np.array([(p, n, 0) for p, n in lengths.items() for _ in range(4)], RESPONSE)
    )
    ray.get(service.sync.remote(1, 0))


def test_two_runs_on_a_machine_without_gpus_have_names_of_their_own(
    runs: list[str],
) -> None:
    """Each has a Ray cluster of its own, in which it is the first job; veRL would name
    its sockets by the job.
    """
    assert len(set(runs)) == 2
    assert all(name.startswith("01000000-") for name in runs)


def test_a_groups_samples_meet_on_one_replica_although_they_come_mixed(
    service: Any,
) -> None:
    router = made()(SERVERS)
    for step in range(2):  # without lengths, and with them
        homes = arrive(router, [[p] * 4 for p in range(8)], f"{step}/")
        assert all(len(set(places)) == 1 for places in homes.values())
        assert sorted(places[0] for places in homes.values()) == [*"aaaabbbb"]
        end(router, homes, f"{step}/")
        remember(service, {p: 100 * (p + 1) for p in range(8)})
    assert router.get_total_inflight() == 0


def test_predicted_long_groups_are_divided_between_the_replicas(service: Any) -> None:
    remember(service, {1: 3000, 2: 3000, **dict.fromkeys(range(10, 18), 60)})
    router = made()(SERVERS)
    homes = arrive(
        router,
        [
            [1] * 4,
            *([p] * 4 for p in range(10, 14)),
            [2] * 4,
            *([p] * 4 for p in range(14, 18)),
        ],
    )
    long = homes[1] + homes[2]
    assert long.count("a") == long.count("b") == 4
    assert acquire(router, "1/0", 1) == homes[1][0]  # a later turn stays


def test_validation_samples_and_strangers_are_placed_one_by_one(service: Any) -> None:
    router = made()(SERVERS)
    assert [acquire(router, f"v{i}", i, record=False) for i in range(4)] == [
        "a",
        "b",
        "a",
        "b",
    ]
    assert [router.acquire_server(f"s{i}")[0] for i in range(4)] == ["a", "b", "a", "b"]


def test_a_router_keeps_what_a_ledger_said_that_is_gone_and_asks_again(
    service: Any,
) -> None:
    def first_two(name: str, groups: list[int]) -> int:
        """Replicas that the first two long groups are on."""
        homes = arrive(router, [[p] * 4 for p in groups], name)
        end(router, homes, name)
        return len({homes[groups[0]][0], homes[groups[2]][0]})

    remember(service, {1: 3000, 2: 3000, 3: 60, 4: 60})
    router = made()(SERVERS)
    assert first_two("asked/", [1, 3, 2, 4]) == 2
    ray.kill(service)
    assert first_two("gone/", [1, 3, 2, 4]) == 2
    remember(ledger(), {1: 60, 2: 60, 3: 3000, 4: 3000})
    assert first_two("back/", [3, 1, 4, 2]) == 2


def test_requests_that_an_agent_loop_has_under_one_id_are_all_taken_off(
    service: Any,
) -> None:
    router = made(routing="least_loaded")(SERVERS)
    assert [acquire(router, "loop", 1) for _ in range(3)] == ["a"] * 3
    for _ in range(3):
        router.release_server("a", request_id="loop")
    assert acquire(router, "next", 2) == "a"


def test_least_loaded_takes_the_replica_with_the_fewest_requests(service: Any) -> None:
    remember(service, {1: 3000, 2: 10})
    router = made(routing="least_loaded")(SERVERS)
    assert [acquire(router, f"r{i}", p) for i, p in enumerate([1, 1, 2, 2])] == [
        "a",
        "b",
        "a",
        "b",
    ]
    router.release_server("b", request_id="r1")
    assert acquire(router, "next", 1) == "b"


def test_replicas_may_come_and_go(service: Any) -> None:
    remember(service, {1: 3000, 2: 3000, 3: 3000})
    router = made(group=1)({"a": None})
    assert acquire(router, "x", 1) == "a"
    router.add_servers({"b": None})
    assert acquire(router, "y", 2) == "b"
    router.remove_servers(["a"])
    router.release_server("a", request_id="x")
    assert acquire(router, "z", 3) == "b"
    # a later turn of a trajectory whose replica is gone
    assert acquire(router, "x", 1) == "b"
    with pytest.raises(RuntimeError, match="No available servers"):
        made()({}).acquire_server("x")


def test_verl_makes_the_balancer_in_an_actor(service: Any) -> None:
    router = get_router_handle(servers=SERVERS, load_balancer_cls=made(group=2))
    assert ray.get(router.require_acquire_fields.remote()) == ["sampling_params"]
    params = [{"extra_args": Label(p).extra_args()} for p in (1, 2, 1, 2)]
    homes = [
        ray.get(router.acquire_server.remote(f"r{i}", sampling_params=p))[0]
        for i, p in enumerate(params)
    ]
    assert homes == ["a", "b", "a", "b"]


def test_replicas_are_lent_that_have_nothing_left_while_others_go_on() -> None:
    router = made(routing="least_loaded")({"a": 1, "b": 2, "c": 3})
    assert router.lend(4) == []  # no rollout goes on
    homes = [acquire(router, str(request), request) for request in range(5)]
    assert homes == [*"abcab"]
    assert router.lend(4) == []
    router.release_server("c", request_id="2")
    assert router.lend(2) == [("c", 3)] * 2
    router.release_server("b", request_id="1")
    router.release_server("b", request_id="4")
    assert router.lend(2) == [("b", 2)] * 2  # where fewest are lent
    assert len(router.lend(1000)) == 2 * 64 - 4
    router.give_back("c")
    assert router.lend(1000) == [("c", 3)]
    router.release_server("a", request_id="0")
    assert router.lend(1) == []
    router.give_back("b")
    router.release_server("a", request_id="3")
    assert router.lend(1) == []  # the rollout is over
    acquire(router, "next", 9)
    assert router.lend(1) == []  # the others have not had their requests yet


@pytest.mark.parametrize("record", [True, False], ids=["training", "validation"])
def test_a_validation_has_the_replicas_to_itself(record: bool) -> None:
    router = made(routing="least_loaded")({"a": 1, "b": 2})
    homes = [
        acquire(router, str(request), request, record=record) for request in range(2)
    ]
    router.release_server(homes[0], request_id="0")
    assert router.lend(1) == ([("a", 1)] if record else [])
