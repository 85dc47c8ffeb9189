"""`routing` in veRL: which replica a request goes to."""

from __future__ import annotations

import importlib
from typing import Any

from das_adapter.config import DasConfig
from das_adapter.core.routing import Replicas
from das_adapter.errors import UnsupportedHost
from das_adapter.protocol.label import Label
from das_adapter.service import ledger
from das_adapter.sources import Sources

_HOMES, _NAME = "verl.workers.rollout.router.*", "GlobalRequestLoadBalancer"
"""Where veRL has its balancer: the module, or a part of it where it is a package
(verl#6940).
"""


def stock_balancer() -> Any:
    """Return the class of veRL's balancer. UnsupportedHost: veRL has none where it is
    known to be.
    """
    home = Sources("verl").home(_HOMES, _NAME)
    if home is None:
        raise UnsupportedHost(f"found no {_NAME} in {_HOMES}")
    return getattr(importlib.import_module(home), _NAME)


_Stock: Any = stock_balancer()


class DasLoadBalancer(_Stock):
    """veRL's balancer that keeps groups together (`longest_first`), or takes the
    replica with the fewest requests without veRL's random tie-break (`least_loaded`).

    Lengths come from the run's ledger, which is asked when no request is in flight and
    every 1024 requests; where it does not answer, what it said before stands until
    then.
    """

    das = DasConfig()
    group = 1
    """Samples of a prompt in a training step."""
    slots = 1024
    """Requests that a replica runs at once."""

    def __init__(self, servers: dict[str, Any], *args: Any, **kwargs: Any):
        super().__init__(servers, *args, **kwargs)
        self._longest_first = self.das.routing == "longest_first"
        siblings, group = (
            (self.das.shares_history, self.group) if self._longest_first else (False, 1)
        )
        self._replicas = Replicas(servers, siblings, group, self.slots)
        self._problems: dict[str, list[int]] = {}
        """Of the requests in flight: an agent loop may have several under one id."""
        self._acquired = 0
        self._validating = False

    def require_acquire_fields(self) -> list[str]:
        """Name the fields that veRL sends to `acquire_server`."""
        return ["sampling_params"]

    def require_release_fields(self) -> list[str]:
        """Name the fields that veRL sends to `release_server`."""
        return ["request_id"]

    def acquire_server(
        self, request_id: str, sampling_params: dict[str, Any] | None = None
    ) -> tuple[str, Any]:
        """Choose a replica for a request; later turns of a trajectory stay on the same
        one.
        """
        if not self._inflight_requests:
            return super().acquire_server(request_id)  # says so
        if self._longest_first and (
            self._acquired % 1024 == 0 or not any(self._inflight_requests.values())
        ):
            self._replicas.expected = (
                ledger.expected(timeout=5) or self._replicas.expected
            )
        self._acquired += 1
        label = Label.of((sampling_params or {}).get("extra_args"))
        self._validating = not label.record
        problem = -self._acquired if label.problem is None else label.problem
        server = self._request_id_to_server.get(request_id)
        if server in self._inflight_requests:
            self._replicas.add_request(server, problem)
        else:
            in_group = (
                self._longest_first and label.record and label.problem is not None
            )
            server = self._replicas.pick(problem, group=None if in_group else 1)
        self._problems.setdefault(request_id, []).append(problem)
        self._request_id_to_server[request_id] = server
        self._inflight_requests[server] += 1
        return server, self._servers[server]

    def release_server(self, server_id: str, request_id: str | None = None) -> None:
        """Take off a request, or a turn of it, that ended."""
        super().release_server(server_id, request_id)
        if problems := self._problems.pop(request_id or "", None):
            self._replicas.remove_request(server_id, problems.pop())
            if problems:
                self._problems[request_id or ""] = problems

    def lend(self, most: int) -> list[tuple[str, Any]]:
        """Lend at most so many slots for what is written ahead: a replica and its
        handle each (see `Replicas.lend`); a validation lends none.
        """
        return (
            []
            if self._validating
            else [
                (server, self._servers[server]) for server in self._replicas.lend(most)
            ]
        )

    def give_back(self, server_id: str) -> None:
        """Take back a slot that was lent."""
        self._replicas.give_back(server_id)

    def add_servers(self, servers: dict[str, Any]) -> None:
        """Add replicas that joined."""
        super().add_servers(servers)
        for server in servers:
            self._replicas.add(server)

    def remove_servers(self, server_ids: list[str]) -> None:
        """Remove replicas that left."""
        super().remove_servers(server_ids)
        for server in server_ids:
            self._replicas.remove(server)


def balancer(das: DasConfig, rollout: Any) -> type[DasLoadBalancer]:
    """Return the balancer's class for a run: veRL itself makes the instance, in an
    actor, from the class alone.
    """
    settled = {"das": das, "group": rollout.n, "slots": rollout.max_num_seqs}
    return type(DasLoadBalancer.__name__, (DasLoadBalancer,), settled)
