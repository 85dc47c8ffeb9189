"""Would it pay? A user's own recorded rollouts on given hardware, without drafts and with das-adapter's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from das_adapter.sim.config import parse
from das_adapter.sim.fleet import BLOCK
from das_adapter.sim.pipeline import Run
from das_adapter.sim.rollouts import Rollout
from das_adapter.sim.simulate import Progress, Simulation, summary

WORTH = 0.03
"""Share of the rollout's time that must be saved before drafts are recommended."""


def would_it_pay(
    rollouts: Sequence[Rollout],
    gpu: str,
    model: str,
    gpus: int,
    per_engine: int = 1,
    precision: str = "bf16",
    other_s: float = 0.0,
    engine: dict[str, Any] | None = None,
    das: dict[str, Any] | None = None,
    agreement: float | None = None,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """Simulate a dump on given hardware: several steps, with every problem that the run visits.

    Args:
        gpu, model, gpus, per_engine, precision, engine, agreement: as in `SimConfig`; without an agreement nothing is
            simulated with run-ahead.
        other_s: seconds of a step beside its rollout.
        das: keys of the `das:` block beside `drafter: history`.

    Returns:
        `epochs` (see `epochs`), `of_off` (by arm, `history` and `ahead`: rollout time over all steps, of off), `das`
        (the block, or `drafter: none` where drafts save too little), `idle` (as in `StepResult`, without drafts),
        `engines` and the `kv_tokens` of each, as plain containers.

    Raises:
        DasError: a value that does not fit, with its key.
    """
    block = {"drafter": "history"} | (das or {})
    blocks = {"off": {"drafter": "none"}, "history": block}
    if agreement is not None:
        blocks["ahead"] = block | {"history": block.get("history", {}) | {"run_ahead": "auto"}}
    content = {
        "model": model,
        "precision": precision,
        "hardware": {"gpu": gpu, "gpus": gpus, "per_engine": per_engine},
        "engine": engine or {},
        "rollout": {"cap": max(2, max(len(r.tokens) for r in rollouts))},
        "acceptance": {"history": "index", "agreement": agreement or 0.0},
        "pipeline": {"train_s": other_s},
        "arms": {name: {"das": block} for name, block in blocks.items()},
    }
    simulation = Simulation(parse(content, "replay"), rollouts)
    runs = simulation.run_all(progress)
    ratios = {name: arm["rollout_of_first"] for name, arm in summary(runs).items()}
    best = "off"
    for name in blocks:
        best = name if ratios[name] <= ratios[best] - WORTH else best
    off = runs["off"].steps
    return {
        "epochs": epochs(runs),
        "of_off": {name: ratio for name, ratio in ratios.items() if name != "off"},
        "das": blocks[best],
        "idle": float(np.average([step.idle for step in off], weights=[step.rollout_s for step in off])),
        "engines": simulation.engines,
        "kv_tokens": simulation.kv_blocks * BLOCK,
    }


def epochs(runs: Mapping[str, Run]) -> list[dict[str, float]]:
    """Compare runs by epoch, which are steps whose problems had been visited equally often before; by arm, seconds are
    means of a step."""
    found = []
    for visit in sorted({round(step.visit) for step in runs["off"].steps}):
        row: dict[str, float] = {"number": visit + 1}
        for arm, run in runs.items():
            steps = [step for step in run.steps if round(step.visit) == visit]
            row["steps"] = len(steps)
            row[f"{arm}_s"] = float(np.mean([step.rollout_s for step in steps]))
            row[f"{arm}_step_s"] = float(np.mean([step.step_s for step in steps]))
            row[f"{arm}_tokens_per_forward"] = sum(s.tokens for s in steps) / sum(s.forwards for s in steps)
        found.append(row)
    return found
