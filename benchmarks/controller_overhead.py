"""Measure the processor time of all controller work in one decode step, by batch size.

    python benchmarks/controller_overhead.py [--steps 3000] [--out FILE.json]

A warm controller decides on drafts of 0 to 16 tokens with falling chances, as the index returns them. The figures
include everything that a drafter calls in a step: `plan` and `timed`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from das_adapter.config import DasConfig
from das_adapter.core.controller import Controller
from das_adapter.core.latency import StepModel
from das_adapter.core.length import RESPONSE
from das_adapter.core.steps import Decoded, TimedStep

TRUTH = StepModel(base=0.048, token=0.0, bend=0.0006, knee=8)


def measure(batch: int, steps: int) -> dict[str, float]:
    rng = np.random.default_rng(0)
    controller = Controller(DasConfig(), limit=16384)
    known = [(p, int(n), 0) for p in range(batch) for n in rng.lognormal(7, 0.8, 8)]
    controller.sync(np.array(known, RESPONSE))
    slots = np.array([controller.open(i, 0, 16384) for i in range(batch)])
    keep, seconds = np.zeros(batch, dtype=np.int64), []
    lengths = rng.integers(0, 17, (64, batch))
    chances = [np.concatenate([0.85 ** np.arange(1, n + 1) for n in row]).astype(np.float32) for row in lengths]
    drafted, room = 0, np.full(batch, 1000)
    for i in range(steps):
        got, carried = 1 + rng.binomial(keep, 0.6), keep
        total = batch + int(carried.sum())
        took = TRUTH.step(total, batch, total > batch) * rng.uniform(0.97, 1.03)
        asked = 0.0  # of that, what stands for the index

        def history(limits: np.ndarray, floor: float, i: int = i) -> tuple[np.ndarray, np.ndarray]:
            nonlocal asked
            start = time.thread_time()
            cut = np.minimum(lengths[i % 64], limits)
            at = np.repeat(np.concatenate([[0], np.cumsum(lengths[i % 64])])[:-1], cut)
            offsets = np.concatenate([[0], np.cumsum(cut)])
            stated = chances[i % 64][at + np.arange(offsets[-1]) - np.repeat(offsets[:-1], cut)]
            asked = time.thread_time() - start
            return stated, offsets

        decoded = Decoded(slots, got, carried if total > batch else None, None, room)
        begin = time.thread_time()
        keep = controller.plan(decoded, history).history
        controller.timed(TimedStep(slots, got, total, took))
        seconds.append(time.thread_time() - begin - asked)
        drafted += int(keep.any())
    micros = np.array(seconds[steps // 10 :]) * 1e6
    return {
        "mean_us": float(micros.mean()),
        "p50_us": float(np.median(micros)),
        "p99_us": float(np.percentile(micros, 99)),
        "drafted_share": drafted / steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    from provenance import provenance, save

    rows = {batch: measure(batch, args.steps) for batch in (1, 8, 64, 256)}
    for batch, row in rows.items():
        print(f"batch {batch:4}: " + ", ".join(f"{k} {v:.2f}" for k, v in row.items()))
    if args.out:
        save(args.out, {"provenance": provenance(), "controller_us_per_step": rows})


if __name__ == "__main__":
    main()
