"""Measure what a node's history costs: resident bytes by the number of engines that map it.

Engines are processes that attach the directory and look every problem up once; the writer is the node's service, called
in this process. Proportional set sizes divide each page among the processes that map it, so that they can be added up.
The files lie in memory once, and the writer maps them from the start; all beyond them is added by the engines.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import numpy as np
import ray
from provenance import provenance, save, written

from das_adapter.config import HistoryConfig
from das_adapter.core.index import SuffixIndex
from das_adapter.protocol.messages import Trajectory
from das_adapter.protocol.spool import put_batch
from das_adapter.service.ledger import ledger
from das_adapter.service.node import NodeHistory

PROBLEMS_A_STEP, SAMPLES, TOKENS = 64, 8, 500


def step(version: int, rng: np.random.Generator) -> list[Trajectory]:
    """What one training step writes: samples of a problem repeat passages of each other."""
    written = []
    for i in range(PROBLEMS_A_STEP):
        passages = rng.integers(0, 32_000, (40, 20), dtype=np.int32)
        for _ in range(SAMPLES):
            text = passages[rng.integers(0, 40, TOKENS // 20)].tobytes()
            written.append(Trajectory(version * PROBLEMS_A_STEP + i, text, version))
    return written


def filled(tokens: int, root: str) -> tuple[NodeHistory, int]:
    """A history of so many tokens, and the version it has come to."""
    history = NodeHistory(HistoryConfig(), f"das-benchmark-{tokens}", root, grace_s=1.0)
    version = 0
    while version * PROBLEMS_A_STEP * SAMPLES * TOKENS < tokens:
        arrive(history, step(version, np.random.default_rng(version)))
        version += 1
        history.sync(version, 0, ())
    history.writer.store.settle()
    return history, version


def arrive(history: NodeHistory, batch: list[Trajectory]) -> None:
    """Let a batch arrive, as an engine leaves it."""
    put_batch(history.directory(), "bench", [t._replace(request=i) for i, t in enumerate(batch)])
    history.tick()


def pss() -> int:
    """Bytes of this process, shared pages by halves, thirds, ..."""
    rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Pss:"))


def engine(pipe: Connection) -> None:
    """Attach when told the directory, look every problem up, and answer with the bytes before and with it."""
    while (order := pipe.recv()) is not None:
        kind, directory, problems = order
        if kind == "attach":
            index = SuffixIndex.attach(directory)
            for problem in range(problems):
                index.close(index.open(problem, []), keep=False)
        pipe.send(pss())


def resident(history: NodeHistory, problems: int, engines: int) -> int:
    """Bytes that the history takes: its files, and what they add in so many engines and the writer."""
    context = multiprocessing.get_context("spawn")
    pipes = []
    for _ in range(engines):
        here, there = context.Pipe()
        context.Process(target=engine, args=(there,), daemon=True).start()
        pipes.append(here)

    def asked(kind: str) -> int:
        for pipe in pipes:
            pipe.send((kind, str(history.writer.store.directory), problems))
        for pipe in pipes:
            pipe.recv()
        for pipe in pipes:  # once more: shares depend on who else maps a page by now
            pipe.send(("measure", "", 0))
        return sum(pipe.recv() for pipe in pipes) + pss()

    before = asked("measure")
    added = asked("attach") - before
    for pipe in pipes:
        pipe.send(None)
    return added + sum(file.stat().st_blocks * 512 for file in history.writer.store.directory.iterdir())


@click.command()
@click.option("--tokens", default=10_000_000, show_default=True, help="in the history")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="JSON file for the result")
def main(tokens: int, out: Path | None) -> None:
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    keep = ledger()
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="das-benchmark-") as root:
        history, version = filled(tokens, root)
        figures = history.figures()
        taken = {engines: resident(history, version * PROBLEMS_A_STEP, engines) for engines in (1, 4)}
    result: dict[str, Any] = {"history": {name: figures[name] for name in ("tokens", "problems", "bytes")}}
    result["resident_bytes"] = {f"{n}_engines": size for n, size in taken.items()} | {"ratio": taken[4] / taken[1]}
    del keep
    ray.shutdown()
    result["provenance"] = provenance()
    click.echo(written(result))
    if out:
        save(out, result)


if __name__ == "__main__":
    main()
