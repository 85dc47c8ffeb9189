"""What a weight sync costs where the history is large: predictions, publishing,
mapping. Sizes are generated.

python benchmarks/scale.py --out FILE.json
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
from provenance import provenance, save

from das_adapter.core.index import SuffixIndex
from das_adapter.core.index.store import HistoryStore
from das_adapter.core.length import RESPONSE, LengthLog, LengthModel

WINDOW = 16
GROUP = 8
LONGEST = 32768


def spread(seconds: list[float]) -> dict[str, float]:
    """Return the median and the highest of some times, in milliseconds."""
    return {"p50_ms": 1e3 * float(np.median(seconds)), "max_ms": 1e3 * max(seconds)}


def timed(function: Callable[[], Any]) -> float:
    """Return the seconds of processor time that a call takes in this thread: the
    machine may have other work.
    """
    start = time.thread_time()
    function()
    return time.thread_time() - start


def lengths(rng: np.random.Generator, version: int, problems: int) -> np.ndarray:
    """Make the responses of a step: a group for each of its problems, which no step
    before had.
    """
    rows = np.zeros(problems * GROUP, RESPONSE)
    rows["problem"] = np.repeat(
        np.arange(problems, dtype=np.uint64) + np.uint64(version * problems), GROUP
    )
    rows["tokens"] = rng.lognormal(7.5, 0.6, len(rows)).clip(1, LONGEST)
    rows["version"] = version
    return rows


def predict(steps: int, problems: int, repeats: int) -> dict[str, Any]:
    """Measure the predictions over `steps` x `problems` problems, and what the arrival
    of a step's lengths costs.
    """
    rng = np.random.default_rng(0)
    rows = [lengths(rng, version, problems) for version in range(steps)]
    log = LengthLog()
    added = [
        timed(lambda step=step: [log.add(some) for some in np.array_split(step, 32)])
        for step in rows
    ]  # type: ignore[misc]
    return {
        "responses": steps * problems * GROUP,
        "problems": steps * problems,
        "predictions": spread([timed(log.predictions) for _ in range(repeats)]),
        "arrival_of_a_step": spread(added),
    }


def texts(rng: np.random.Generator, tokens: int) -> list[np.ndarray]:
    """Make a group's texts: stretches of one text, with a tenth of its tokens
    exchanged.
    """
    base = rng.integers(0, 100_000, tokens, dtype=np.int32)
    changed = [rng.random(tokens) < 0.1 for _ in range(GROUP)]
    return [
        np.where(some, rng.integers(0, 100_000, tokens, dtype=np.int32), base)
        for some in changed
    ]


class Engine:
    """What one rank of an engine does at a weight sync, without the model."""

    def __init__(self, directory: Path) -> None:
        self.index = SuffixIndex.attach(directory)
        self.model = LengthModel(LONGEST)

    def refresh(self, generation: int, responses: np.ndarray) -> None:
        """Map a generation, and learn the lengths of new responses."""
        self.index.refresh(generation)
        self.index.clear_live()
        self.model.observe(responses)
        self.model.refit()


def sync(problems: int, tokens: int, known: int, syncs: int) -> dict[str, Any]:
    """Measure the weight sync of a node: what publishing takes, and what one rank of an
    engine takes after it.

    Args:
        problems: in a step, with `GROUP` rollouts each.
        tokens: of a rollout.
        known: problems that the history has before, with little text each.
        syncs: how many are measured.
    """
    rng = np.random.default_rng(0)
    published = []
    mapped = []
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as directory,
        HistoryStore(directory, WINDOW) as store,
    ):
        for problem in range(known):
            store.add(2**32 + problem, rng.integers(0, 100_000, 40, dtype=np.int32), 0)
        store.seal()
        engine = Engine(store.directory)
        for version in range(1, syncs + 1):
            rows = lengths(rng, version, problems)
            for problem in np.unique(rows["problem"]).tolist():
                for text in texts(rng, tokens):
                    store.add(problem, text, version)
                store.work()
            while store.work() or store.staged:
                pass
            published.append(timed(lambda: store.seal()))
            generation = store.generation
            mapped.append(timed(lambda: engine.refresh(generation, rows)))  # noqa: B023
        assert engine.index.problems >= known
    return {
        "rollouts": problems * GROUP,
        "tokens": tokens,
        "problems_before": known,
        "syncs": syncs,
        "publish": spread(published),
        "refresh": spread(mapped),
    }


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option(
    "--problems", default=1024, help="Problems of a step, with eight rollouts each."
)
@click.option("--tokens", default=2000, help="Tokens of a rollout.")
@click.option("--known", default=16384, help="Problems that the history has before.")
@click.option("--syncs", default=5, help="Weight syncs that are measured.")
def main(out: Path, problems: int, tokens: int, known: int, syncs: int) -> None:
    """Measure, and write what was found."""
    found = {
        "predictions": predict(16, problems, 5),
        "weight_sync": sync(problems, tokens, known, syncs),
    }
    save(out, found | {"provenance": provenance()})
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
