"""The routing of a simulation's requests and the order in which they start: the
package's own, or the host's.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from das_adapter.config import DasConfig
from das_adapter.core.length import ExpectedLengths, LengthLog, Responses
from das_adapter.core.routing import Replicas, StartOrder, start_order
from das_adapter.sim.requests import Ints, Requests, int_zeros

STREAMS = 8
"""Workers of the host that send requests at the same time, each the samples of one
problem after the other.
"""


def arrivals(problems: Iterable[int], rng: np.random.Generator) -> list[int]:
    """Return the order in which a step's requests arrive: problems are shuffled and
    shared out over streams.
    """
    groups: dict[int, list[int]] = {}
    for request, problem in enumerate(problems):
        group = groups.setdefault(problem, [])
        group.append(request)
    shuffled = list(groups.values())
    rng.shuffle(shuffled)
    streams = []
    for first in range(STREAMS):
        of_stream = list[int]()
        for group in shuffled[first::STREAMS]:
            of_stream += group
        # the last comes first, so that `pop` returns it
        of_stream.reverse()
        streams.append(of_stream)
    order = list[int]()
    while True:
        streams = [stream for stream in streams if stream]
        if not streams:
            return order
        chosen = rng.integers(len(streams))
        stream = streams[chosen]
        order.append(stream.pop())


class Router:
    """Chooses engines as veRL's balancer with das-adapter does: one request at a time,
    as they arrive.
    """

    def __init__(
        self,
        das: DasConfig,
        engines: int,
        group: int,
        slots: int,
        seed: int = 0,
    ) -> None:
        drafts = das.drafter != "none"
        self._own_routing = drafts and das.routing == "longest_first"
        self._replicas = Replicas(
            range(engines),
            das.shares_history,
            group,
            slots,
        )
        self._orders = list[StartOrder]()
        """Order of each engine's requests; empty: they start as they arrive."""
        if self._own_routing:
            for _ in range(engines):
                order = start_order(das, group)
                if order is not None:
                    self._orders.append(order)
        self._log = LengthLog()
        self._loads = int_zeros(engines)
        self.rng = np.random.default_rng(seed)
        """Generator of the order in which requests arrive."""

    def send(self, requests: Requests, rows: Ints) -> tuple[Ints, Ints]:
        """Return the engine and the priority of each request, int64 [n]; `rows` in the
        order of their arrival.
        """
        count = len(rows)
        engines = int_zeros(count)
        priorities = int_zeros(count)
        problems = requests.problem[rows].tolist()
        for i, problem in enumerate(problems):
            if self._own_routing:
                engine = self._replicas.pick(problem)
            else:
                engine = int(self._loads.argmin())
            self._loads[engine] += 1
            engines[i] = engine
            if self._orders:
                order = self._orders[engine]
                priorities[i] = order.priority(problem)
        return engines, priorities

    def done(self, requests: Requests, rows: Ints) -> None:
        """Remove requests that ended from the loads of their engines."""
        engines = requests.engine[rows].tolist()
        problems = requests.problem[rows].tolist()
        for engine, problem in zip(engines, problems, strict=True):
            self._loads[engine] -= 1
            if self._own_routing:
                self._replicas.remove_request(engine, problem)

    def sync(self, version: int, responses: Responses) -> None:
        """Learn the lengths of finished responses, at a weight sync."""
        self._log.add(responses)
        predictions = self._log.predictions()
        expected = ExpectedLengths(predictions)
        self._replicas.expected = expected
        for order in self._orders:
            order.refresh(expected, version)
