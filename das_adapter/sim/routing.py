"""Where the requests of a simulation go, and who starts first: the package's own
routing, or the host's.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from das_adapter.config import DasConfig
from das_adapter.core.length import ExpectedLengths, LengthLog, Responses
from das_adapter.core.routing import Replicas, start_order
from das_adapter.sim.requests import Ints, Requests

STREAMS = 8
"""Workers of the host that send requests at the same time, each the samples of one
problem after the other.
"""


def arrivals(problems: Iterable[int], rng: np.random.Generator) -> list[int]:
    """Return the order in which a step's requests arrive: problems are shuffled and
    shared out over streams.
    """
    groups: dict[int, list[int]] = {}
    for i, problem in enumerate(problems):
        groups.setdefault(problem, []).append(i)
    shuffled = list(groups.values())
    rng.shuffle(shuffled)
    streams = [
        [i for group in shuffled[s::STREAMS] for i in group][::-1]
        for s in range(STREAMS)
    ]
    found = []
    while streams := [stream for stream in streams if stream]:
        found.append(streams[rng.integers(len(streams))].pop())
    return found


class Router:
    """Chooses engines as veRL's balancer with das-adapter does: one request at a time,
    as they arrive.
    """

    def __init__(
        self, das: DasConfig, engines: int, group: int, slots: int, seed: int = 0
    ) -> None:
        self._ours = das.drafter != "none" and das.routing == "longest_first"
        self._replicas = Replicas(range(engines), das.shares_history, group, slots)
        self._orders = [
            start_order(das, group) if self._ours else None for _ in range(engines)
        ]
        self._log = LengthLog()
        self._loads = np.zeros(engines, dtype=np.int64)
        self.rng = np.random.default_rng(seed)
        """Of the order in which requests arrive."""

    def send(self, requests: Requests, rows: Ints) -> tuple[Ints, Ints]:
        """Return the engine and the priority of each request, int64 [n]; `rows` in the
        order of their arrival.
        """
        engines = np.zeros(len(rows), np.int64)
        priorities = np.zeros(len(rows), np.int64)
        for i, problem in enumerate(requests.problem[rows].tolist()):
            if self._ours:
                engine = self._replicas.pick(problem)
            else:
                engine = int(self._loads.argmin())
            self._loads[engine] += 1
            engines[i] = engine
            if (order := self._orders[engine]) is not None:
                priorities[i] = order.priority(problem)
        return engines, priorities

    def done(self, requests: Requests, rows: Ints) -> None:
        """Take requests that ended."""
        for engine, problem in zip(
            requests.engine[rows].tolist(), requests.problem[rows].tolist(), strict=True
        ):
            self._loads[engine] -= 1
            if self._ours:
                self._replicas.remove_request(engine, problem)

    def sync(self, version: int, responses: Responses) -> None:
        """Learn the lengths of finished responses, at a weight sync."""
        self._log.add(responses)
        self._replicas.expected = ExpectedLengths(self._log.predictions())
        for order in filter(None, self._orders):
            order.refresh(self._replicas.expected, version)
