"""`routing:` in veRL: which replica a request goes to, and which requests start first."""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from typing import Any

import ray
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from das_adapter.core.routing import Spread
from das_adapter.protocol.label import Label
from das_adapter.service import ledger
from das_adapter.verl import settings

logger = logging.getLogger("das_adapter")


class SiblingLoadBalancer(GlobalRequestLoadBalancer):
    """`least_loaded`: veRL's balancer without its random tie-break: a tie goes to the replica that has the problem's
    other samples, whose live text the drafter uses; else to the first replica."""

    def __init__(self, servers: dict[str, Any], *args: Any, **kwargs: Any):
        super().__init__(servers, *args, **kwargs)
        self._siblings: dict[int, str] = {}

    def require_acquire_fields(self) -> list[str]:
        """Name the fields that veRL sends to `acquire_server`."""
        return ["sampling_params"]

    def acquire_server(self, request_id: str, sampling_params: dict[str, Any] | None = None) -> tuple[str, Any]:
        """Choose a replica for a request; later turns of a trajectory stay on theirs."""
        if self._request_id_to_server.get(request_id) in self._inflight_requests or not self._inflight_requests:
            return super().acquire_server(request_id)
        problem = Label.of((sampling_params or {}).get("extra_args")).problem
        server = self._choose(request_id, problem)
        if problem is not None:
            self._siblings[problem] = server
        self._request_id_to_server[request_id] = server
        self._inflight_requests[server] += 1
        return server, self._servers[server]

    def _choose(self, request_id: str, problem: int | None) -> str:
        fewest = min(self._inflight_requests.values())
        free = [server for server, count in self._inflight_requests.items() if count == fewest]
        home = self._siblings.get(problem) if problem is not None else None
        return home if home is not None and home in free else free[0]

    def clear_sticky_cache(self) -> dict[str, Any]:
        """Forget which replica has which requests, between phases of training."""
        self._siblings.clear()
        return super().clear_sticky_cache()


class LongestFirstBalancer(SiblingLoadBalancer):
    """`longest_first`: requests that are predicted to be long are spread over the replicas before tokens are balanced.

    The lengths come from the run's ledger, which is asked when no request is in flight and every 1024 requests. Until
    it knows lengths, a request goes to the replica with the fewest, as with `least_loaded`.
    """

    def __init__(self, servers: dict[str, Any], *args: Any, **kwargs: Any):
        super().__init__(servers, *args, **kwargs)
        self._spread = Spread(servers)
        self._noted: dict[str, tuple[float, bool]] = {}
        self._lengths: dict[int, float] = {}
        self._long = float("inf")
        self._acquired = 0

    def require_release_fields(self) -> list[str]:
        """Name the fields that veRL sends to `release_server`: the request whose predicted tokens are taken off."""
        return ["request_id"]

    def _choose(self, request_id: str, problem: int | None) -> str:
        if self._acquired % 1024 == 0 or not any(self._inflight_requests.values()):
            self._predict()
        self._acquired += 1
        if not self._lengths:
            return super()._choose(request_id, problem)
        length = self._lengths.get(problem or 0, self._mean)
        noted = self._noted[request_id] = (length, length > self._long)
        return self._spread.pick(*noted)

    def _predict(self) -> None:
        try:
            self._lengths, self._long = ray.get(ray.get_actor(ledger.NAME).predictions.remote(), timeout=5)
        except (ValueError, ray.exceptions.RayError) as error:
            logger.warning("das: no predicted lengths, requests are balanced by their number: %r", error)
            self._lengths = {}
        self._mean = sum(self._lengths.values()) / max(1, len(self._lengths))

    def release_server(self, server_id: str, request_id: str | None = None) -> None:
        """Take off a request, or a turn of it, that ended."""
        super().release_server(server_id, request_id)
        if noted := self._noted.pop(request_id or "", None):
            self._spread.done(server_id, *noted)

    def add_servers(self, servers: dict[str, Any]) -> None:
        """Add replicas that joined."""
        super().add_servers(servers)
        for server in servers:
            self._spread.add(server)

    def remove_servers(self, server_ids: list[str]) -> None:
        """Remove replicas that left."""
        super().remove_servers(server_ids)
        for server in server_ids:
            self._spread.remove(server)


_BALANCERS = {"least_loaded": SiblingLoadBalancer, "longest_first": LongestFirstBalancer}


def around_init_load_balancer(
    stock: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Awaitable[None]:
    """Wrap `LLMServerManager._init_global_load_balancer` to choose the balancer of `routing.policy`."""
    das = settings.of_rollout(instance.rollout_config)
    if das is not None and das.routing.policy in _BALANCERS and instance._load_balancer_cls is None:
        instance._load_balancer_cls = _BALANCERS[das.routing.policy]
    result: Awaitable[None] = stock(*args, **kwargs)
    return result
