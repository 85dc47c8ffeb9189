"""Would it pay? A user's own recorded rollouts on given hardware, without drafts and with das-adapter's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from das_adapter.sim.config import parse
from das_adapter.sim.fleet import BLOCK
from das_adapter.sim.pipeline import Run
from das_adapter.sim.rollouts import Rollout
from das_adapter.sim.simulate import Progress, Simulation

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
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """Simulate a dump on given hardware: several steps, with every problem that the run visits.

    Args:
        gpu, model, gpus, per_engine, precision, engine: as in `SimConfig`.
        other_s: seconds of a step beside its rollout.
        das: keys of the `das:` block beside `drafter: history`.

    Returns:
        `epochs` (see `epochs`), `of_off` (rollout time over all steps, of off), `das` (the block, or `drafter: none`
        where drafts save too little), `engines` and the `kv_tokens` of each, as plain containers.

    Raises:
        DasError: a value that does not fit, with its key.
    """
    block = {"drafter": "history"} | (das or {})
    content = {
        "model": model,
        "precision": precision,
        "hardware": {"gpu": gpu, "gpus": gpus, "per_engine": per_engine},
        "engine": engine or {},
        "rollout": {"cap": max(2, max(len(r.tokens) for r in rollouts))},
        "acceptance": {"history": "index"},
        "pipeline": {"train_s": other_s},
        "arms": {"off": {"das": {"drafter": "none"}}, "history": {"das": block}},
    }
    simulation = Simulation(parse(content, "replay"), rollouts)
    off, on = simulation.run_all(progress).values()
    of_off = sum(s.rollout_s for s in on.steps) / sum(s.rollout_s for s in off.steps)
    return {
        "epochs": epochs(off, on),
        "of_off": of_off,
        "das": block if of_off <= 1 - WORTH else {"drafter": "none"},
        "engines": simulation.engines,
        "kv_tokens": simulation.kv_blocks * BLOCK,
    }


def epochs(off: Run, on: Run) -> list[dict[str, float]]:
    """Compare two runs by epoch, which are steps whose problems had been visited equally often before; seconds are
    means of a step."""
    steps: defaultdict[int, list[int]] = defaultdict(list)
    for number, step in enumerate(off.steps):
        steps[round(step.visit)].append(number)
    found = []
    for visit, numbers in sorted(steps.items()):
        row: dict[str, float] = {"number": visit + 1, "steps": len(numbers)}
        for arm, run in (("off", off), ("on", on)):
            row[f"{arm}_s"] = float(np.mean([run.steps[i].rollout_s for i in numbers]))
            row[f"{arm}_step_s"] = float(np.mean([run.steps[i].step_s for i in numbers]))
        forwards = sum(on.steps[i].forwards for i in numbers)
        found.append(row | {"tokens_per_forward": sum(on.steps[i].tokens for i in numbers) / forwards})
    return found
