"""`routing` in veRL: the choice of the replica that a request goes to."""

from __future__ import annotations

import importlib
from typing import Any

from das_adapter.config import DasConfig
from das_adapter.core import tuning
from das_adapter.core.routing import Replicas
from das_adapter.errors import UnsupportedHost
from das_adapter.protocol.label import Label
from das_adapter.service import ledger
from das_adapter.sources import Sources

_BALANCER_MODULES = "verl.workers.rollout.router.*"
"""Where veRL has its balancer: the module, or a part of it where it is a package
(verl#6940).
"""
_BALANCER = "GlobalRequestLoadBalancer"
"""Name of the class of veRL's balancer."""


def stock_balancer() -> Any:
    """Return the class of veRL's balancer.

    Raises:
        UnsupportedHost: veRL has none where it is known to be.
    """
    module = Sources("verl").home(_BALANCER_MODULES, _BALANCER)
    if module is None:
        raise UnsupportedHost(f"found no {_BALANCER} in {_BALANCER_MODULES}")
    return getattr(importlib.import_module(module), _BALANCER)


_Stock: Any = stock_balancer()


class DasLoadBalancer(_Stock):
    """veRL's balancer that keeps groups together (`longest_first`), or takes the
    replica with the fewest requests without veRL's random tie-break (`least_loaded`).

    Lengths come from the run's ledger, which is asked when no request is in flight and
    every `tuning.REQUESTS_PER_LENGTHS` requests. Where it does not answer, its last
    answer stands until then.
    """

    das = DasConfig()
    """The block of the run; `balancer` sets it and the two below."""
    group = 1
    """Samples of a prompt in a training step."""
    slots = 1024
    """Requests that a replica runs at once."""

    def __init__(self, servers: dict[str, Any], *args: Any, **kwargs: Any):
        super().__init__(servers, *args, **kwargs)
        self._longest_first = self.das.routing == "longest_first"
        siblings = False
        group = 1
        if self._longest_first:
            siblings = self.das.shares_history
            group = self.group
        self._replicas = Replicas(
            servers,
            siblings=siblings,
            group=group,
            slots=self.slots,
        )
        self._problems: dict[str, list[int]] = {}
        """Problems of the requests in flight, by the id of the request: an agent loop
        may have several requests under one id.
        """
        self._num_acquired = 0
        """Requests since the start."""
        self._validating = False
        """Whether the last request was a validation's."""

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

        Returns:
            The replica's name, and its handle.
        """
        if not self._inflight_requests:
            # veRL's own says that there are no replicas
            return super().acquire_server(request_id)
        if self._longest_first:
            self._update_lengths()
        self._num_acquired += 1
        params = sampling_params or {}
        label = Label.of(params.get("extra_args"))
        self._validating = not label.record
        problem = label.problem
        if problem is None:
            # a problem of its own
            problem = -self._num_acquired
        server = self._request_id_to_server.get(request_id)
        if server in self._inflight_requests:
            self._replicas.add_request(server, problem)
        elif self._longest_first and label.record and label.problem is not None:
            server = self._replicas.pick(problem)
        else:
            server = self._replicas.pick(problem, group=1)
        self._problems.setdefault(request_id, []).append(problem)
        self._request_id_to_server[request_id] = server
        self._inflight_requests[server] += 1
        return server, self._servers[server]

    def _update_lengths(self) -> None:
        """Ask the ledger for expected lengths where they are due."""
        is_idle = not any(self._inflight_requests.values())
        if is_idle or self._num_acquired % tuning.REQUESTS_PER_LENGTHS == 0:
            expected = ledger.expected_lengths(timeout_s=5)
            if expected is not None:
                self._replicas.expected = expected

    def release_server(self, server_id: str, request_id: str | None = None) -> None:
        """Take off a request, or a turn of it, that ended."""
        super().release_server(server_id, request_id)
        key = request_id or ""
        problems = self._problems.get(key)
        if not problems:
            return
        self._replicas.remove_request(server_id, problems.pop())
        if not problems:
            del self._problems[key]

    def lend(self, num_slots: int) -> list[tuple[str, Any]]:
        """Lend at most so many slots for what is written ahead (see `Replicas.lend`); a
        validation lends none.

        Returns:
            The name and the handle of each slot's replica.
        """
        if self._validating:
            return []
        lent = []
        for server in self._replicas.lend(num_slots):
            lent.append((server, self._servers[server]))
        return lent

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
    settings = {
        "das": das,
        "group": rollout.n,
        "slots": rollout.max_num_seqs,
    }
    return type(DasLoadBalancer.__name__, (DasLoadBalancer,), settings)
