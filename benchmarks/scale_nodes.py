"""What a weight sync costs and what goes over the network where a run has many nodes:
real Ray, real sessions and histories, generated text; the engines are replaced by the
index that each of their ranks maps.

    python benchmarks/scale_nodes.py --out FILE.json

Nodes are raylets on this machine (`ray.cluster_utils.Cluster`): bytes and calls are
those of a cluster, seconds are those of processes that share its cores.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import numpy as np
import ray
from provenance import provenance, save
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

GROUP = 8
DAS = {"drafter": "history", "history": {"max_bytes": "1GiB"}}


class Engines:
    """The sessions of a node's engines, each with the index of one rank."""

    def __init__(self, count: int):
        from das_adapter.config import parse
        from das_adapter.core.index import SuffixIndex
        from das_adapter.service.session import Session

        self._indexes = [SuffixIndex() for _ in range(count)]
        self._directories = [""] * count
        self._sessions = [Session(parse(DAS), self._rpc(i)) for i in range(count)]  # type: ignore[arg-type]
        self._pool = ThreadPoolExecutor(count)

    def _rpc(self, of: int) -> Any:
        def rpc(command: str, payload: dict[str, Any], timeout: float) -> list[Any]:
            if command == "stats":
                return [[{"tokens": 1}]]
            index = self._indexes[of]
            if command == "visit":
                for file in payload["files"]:
                    index.map_guest_history(file)
            elif payload.get("history"):
                directory, generation = payload["history"]
                if directory != self._directories[of]:
                    index.map(directory)
                    self._directories[of] = directory
                index.refresh(generation)
                index.clear_live()
            return [[{"generation": index.generation}]]

        return rpc

    def rollout(
        self, step: int, problems: list[int], tokens: int, seconds: float
    ) -> int:
        """Let the engines write a group for each problem, evenly over a time; return
        the bytes of text.
        """
        from das_adapter.protocol.label import Label

        begin = time.monotonic()
        written = 0
        for i, problem in enumerate(problems):
            session = self._sessions[i % len(self._sessions)]
            session.begun([problem])
            rng = np.random.default_rng(problem)
            base = rng.integers(0, 100_000, tokens, dtype=np.int32)
            rng = np.random.default_rng((problem, step))
            for _ in range(GROUP):
                text = np.where(
                    rng.random(tokens) < 0.1,
                    rng.integers(0, 100_000, tokens, dtype=np.int32),
                    base,
                )
                session.finished(Label(problem, seed=1), text, 0.0, 1.0, step)
                written += text.nbytes
            time.sleep(max(0.0, begin + seconds * i / len(problems) - time.monotonic()))
        return written

    def sync(self, version: int) -> list[float]:
        """The weight sync of all engines at once; return what each takes, seconds."""

        def one(session: Any) -> float:
            begin = time.perf_counter()
            session.sync(version, report=True)
            return time.perf_counter() - begin

        return list(self._pool.map(one, self._sessions))


def count_traffic(history: Any) -> None:
    """Count what a history sends to other nodes, in its process."""
    from das_adapter.service import node

    traffic = history.traffic = Counter()

    def counted(owner: Any, name: str, what: str, size: Any) -> None:
        stock = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = stock(*args, **kwargs)
            traffic[f"{what} calls"] += 1
            traffic[f"{what} bytes"] += size(result, *args)
            return result

        setattr(owner, name, call)

    counted(node, "pack", "texts", lambda content, _: len(content))
    counted(
        history.writer.store,
        "give",
        "segments",
        lambda _, path, __: path.stat().st_size,
    )

    class Ledger:
        """The ledger, with its calls counted."""

        def __init__(self, actor: Any):
            self._actor = actor

        def __getattr__(self, name: str) -> Any:
            traffic["ledger calls"] += 1
            return getattr(self._actor, name)

    stock = node.ledger.running
    node.ledger.running = lambda: Ledger(stock())


def traffic_of(history: Any) -> Counter[str]:
    """Return what was counted since the last time."""
    found: Counter[str] = Counter(history.traffic)
    history.traffic.clear()
    return found


def size(history: Any) -> tuple[int, int]:
    """Return a history's tokens and bytes, in its process."""
    return history.writer.store.tokens, history.writer.store.nbytes


class Run:
    """A run on some nodes of a cluster."""

    def __init__(self, nodes: int, engines: int):
        head = {
            "num_cpus": 1,
            "include_dashboard": False,
            "object_store_memory": 200_000_000,
        }
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.engines_each = engines
        ray.init(self.cluster.address, log_to_driver=False)
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        from das_adapter.service.ledger import ledger

        self.ledger = ledger()
        self.nodes = [
            self.cluster.head_node,
            *(self.add_node() for _ in range(nodes - 1)),
        ]
        self.engines = [self.start(node) for node in self.nodes]
        self.version = 0
        self.sync()

    def add_node(self) -> Any:
        return self.cluster.add_node(num_cpus=1, object_store_memory=200_000_000)

    def start(self, node: Any) -> Any:
        pinned = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        actor = ray.remote(Engines).options(
            num_cpus=0, scheduling_strategy=pinned, max_concurrency=2
        )
        return actor.remote(self.engines_each)

    def sync(self) -> list[list[float]]:
        """A weight sync; return its seconds by node and engine."""
        self.version += 1
        return ray.get([engines.sync.remote(self.version) for engines in self.engines])

    def histories(self) -> list[Any]:
        from das_adapter.service.ledger import actor, history_of

        return [actor(history_of(node.node_id)) for node in self.nodes]

    def place(self, problems: list[int], at_home: float) -> list[list[int]]:
        """Distribute problems over the nodes, a share of them where they are at
        home.
        """
        from das_adapter.core.homes import homes
        from das_adapter.service.ledger import histories

        names = histories()
        rng = np.random.default_rng(self.version)
        order = [
            next(i for i, node in enumerate(self.nodes) if name.endswith(node.node_id))
            for name in names
        ]
        places: list[list[int]] = [[] for _ in self.nodes]
        for problem, home in zip(
            problems, homes(problems, names).tolist(), strict=True
        ):
            away = rng.random() >= at_home
            places[rng.integers(len(self.nodes)) if away else order[home]].append(
                problem
            )
        return places

    def step(
        self, problems: list[int], tokens: int, seconds: float, at_home: float
    ) -> list[int]:
        """A rollout; return the bytes of text that each node's engines wrote."""
        placed = zip(self.engines, self.place(problems, at_home), strict=True)
        return ray.get(
            [
                e.rollout.remote(self.version, chosen, tokens, seconds)
                for e, chosen in placed
            ]
        )

    def close(self) -> None:
        ray.shutdown()
        self.cluster.shutdown()


def spread(seconds: list[float]) -> dict[str, float]:
    """Return percentiles of some times, in milliseconds."""
    return {
        name: 1e3 * float(np.percentile(seconds, at))
        for name, at in (("p50", 50), ("p99", 99), ("max", 100))
    }


def one_node(problems: int, tokens: int, steps: int, seconds: float) -> dict[str, Any]:
    """Measure the weight syncs of a node with eight engines; as many without anything
    new, for comparison.
    """
    run = Run(1, 8)
    try:
        with_text = []
        without = []
        for step in range(steps):
            run.step(
                [step * problems + i for i in range(problems)], tokens, seconds, 1.0
            )
            time.sleep(2.0)  # the training that follows
            with_text += run.sync()[0]
            without += run.sync()[0]
        kept = ray.get(run.histories()[0].__ray_call__.remote(size))
    finally:
        run.close()
    assert kept[0] == steps * problems * GROUP * tokens
    return {
        "engines": 8,
        "rollouts": problems * GROUP,
        "tokens": tokens,
        "rollout_s": seconds,
        "steps": steps,
        "sync_ms": spread(with_text),
        "sync_without_text_ms": spread(without),
    }


def eight_nodes(
    problems: int, tokens: int, seconds: float, at_home: float
) -> dict[str, Any]:
    """Measure what each of eight nodes sends, and how much they hold together."""
    run = Run(8, 8)
    try:
        found: dict[str, Any] = {
            "nodes": 8,
            "engines_each": 8,
            "at_home": at_home,
            "problems": problems,
            "rollouts": problems * GROUP,
            "tokens": tokens,
        }
        for history in run.histories():
            ray.get(history.__ray_call__.remote(count_traffic))
        for visit in ("first_visit", "second_visit"):
            shares = run.step(list(range(problems)), tokens, seconds, at_home)
            run.sync()
            time.sleep(5.0)
            run.sync()
            sent = [
                ray.get(history.__ray_call__.remote(traffic_of))
                for history in run.histories()
            ]
            calls = [
                sum(n for what, n in one.items() if what.endswith("calls"))
                for one in sent
            ]
            size = [
                sum(n for what, n in one.items() if what.endswith("bytes"))
                for one in sent
            ]
            found[visit] = {
                "calls_per_node_two_syncs": {
                    "mean": float(np.mean(calls)),
                    "max": max(calls),
                },
                "bytes_per_node_over_own_share": {
                    "mean": sum(size) / sum(shares),
                    "max": max(size) / np.mean(shares),
                },
                "sent": {
                    what: sum(one[what] for one in sent)
                    for what in sorted(set().union(*sent))
                },
            }
        written, held = zip(
            *ray.get([h.__ray_call__.remote(size) for h in run.histories()]),
            strict=True,
        )
        assert sum(written) == 2 * problems * GROUP * tokens
        found["held_over_fullest_node"] = sum(held) / max(held)
        found["history_bytes"] = sum(held)
    finally:
        run.close()
    return found


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option(
    "--problems", default=1024, help="Problems of a step, with eight rollouts each."
)
@click.option("--tokens", default=2000, help="Tokens of a rollout.")
@click.option(
    "--steps",
    default=4,
    help="Steps of the run on one node; each has eight engines' weight syncs.",
)
@click.option("--seconds", default=20.0, help="Length of a rollout.")
@click.option(
    "--at-home",
    default=0.9,
    help="Share of the problems that routing leaves on the node of their history.",
)
def main(
    out: Path, problems: int, tokens: int, steps: int, seconds: float, at_home: float
) -> None:
    """Measure, and write what was found."""
    threading.stack_size(1 << 20)
    found = {
        "one_node": one_node(problems, tokens, steps, seconds),
        "eight_nodes": eight_nodes(problems, tokens, seconds, at_home),
    }
    save(out, found | {"provenance": provenance()})
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
