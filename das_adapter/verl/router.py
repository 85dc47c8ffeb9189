"""`routing.policy: least_loaded`: fewest requests in flight first, siblings together where that is a tie."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from verl.workers.rollout.router import GlobalRequestLoadBalancer

from das_adapter.engine.args import PROBLEM_ARG
from das_adapter.verl import settings


class SiblingLoadBalancer(GlobalRequestLoadBalancer):
    """veRL's balancer with its random tie-break replaced: a tie goes to the replica that has the problem's other
    samples, whose growing text the drafter uses; then to the first."""

    def __init__(self, servers: dict[str, Any], *args: Any, **kwargs: Any):
        super().__init__(servers, *args, **kwargs)
        self._siblings: dict[int, str] = {}

    def require_acquire_fields(self) -> list[str]:
        """veRL sends only what is named here."""
        return ["sampling_params"]

    def acquire_server(self, request_id: str, sampling_params: dict[str, Any] | None = None) -> tuple[str, Any]:
        """Pick a replica for a request; later turns of a trajectory stay where they are."""
        if self._request_id_to_server.get(request_id) in self._inflight_requests or not self._inflight_requests:
            return super().acquire_server(request_id)
        problem = ((sampling_params or {}).get("extra_args") or {}).get(PROBLEM_ARG)
        fewest = min(self._inflight_requests.values())
        free = [server for server, count in self._inflight_requests.items() if count == fewest]
        home = self._siblings.get(problem)
        server = home if home in free else free[0]
        if problem is not None:
            self._siblings[problem] = server
        self._request_id_to_server[request_id] = server
        self._inflight_requests[server] += 1
        return server, self._servers[server]

    def clear_sticky_cache(self) -> dict[str, Any]:
        """Forget who is where, between phases of training."""
        self._siblings.clear()
        return super().clear_sticky_cache()


def around_init_load_balancer(
    stock: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Awaitable[None]:
    """Wraps `LLMServerManager._init_global_load_balancer`."""
    das = settings.of_rollout(instance.rollout_config)
    if das is not None and das.routing.policy == "least_loaded" and instance._load_balancer_cls is None:
        instance._load_balancer_cls = SiblingLoadBalancer
    result: Awaitable[None] = stock(*args, **kwargs)
    return result
