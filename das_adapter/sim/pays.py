"""Would it pay? A user's own recorded rollouts on given hardware, without drafts and
with das-adapter's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from das_adapter.sim.config import parse
from das_adapter.sim.fleet import BLOCK
from das_adapter.sim.rollouts import Rollout
from das_adapter.sim.simulate import Progress, Simulation, summary

WORTH = 0.03
"""Share of the rollout's time that must be saved before drafts are recommended."""


def would_it_pay(
    rollouts: Sequence[Rollout],
    settings: Mapping[str, Any],
    agreement: float | None = None,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """Simulate a dump on given hardware: several steps, with every problem that the run
    visits.

    Args:
        settings: keys of a `SimConfig` that say what the dump runs on: `model`,
            `hardware`, `pipeline`, ...
        agreement: as in `AcceptanceBlock`; None: nothing is simulated with run-ahead.

    Returns:
        `arms` (see `summary`; `off`, `history` and `ahead`), `epochs` (the same of the
        steps whose problems had been visited equally often before, by epoch), `das`
        (the block, or `drafter: none` where drafts save too little), `idle` (as in
        `StepResult`, without drafts), `engines` and the `kv_tokens` of each, as plain
        containers.

    Raises:
        DasError: a value that does not fit, with its key.
    """
    blocks: dict[str, dict[str, Any]] = {
        "off": {"drafter": "none"},
        "history": {"drafter": "history"},
    }
    if agreement is not None:
        blocks["ahead"] = {"drafter": "history", "history": {"run_ahead": "auto"}}
    content = {
        **settings,
        "rollout": {"cap": max(2, max(len(r.tokens) for r in rollouts))},
        "acceptance": {"history": "index", "agreement": agreement or 0.0},
        "arms": {name: {"das": block} for name, block in blocks.items()},
    }
    simulation = Simulation(parse(content, "estimate"), rollouts)
    runs = simulation.run_all(progress)
    arms = summary(runs)
    off = runs["off"].steps
    best = "off"
    for name in blocks:
        best = (
            name
            if arms[name]["rollout_of_first"] <= arms[best]["rollout_of_first"] - WORTH
            else best
        )
    epochs = {}
    for visit in sorted({round(step.visit) for step in off}):
        parts = {
            name: [step for step in run.steps if round(step.visit) == visit]
            for name, run in runs.items()
        }
        epochs[str(visit + 1)] = summary(
            {name: replace(run, steps=parts[name]) for name, run in runs.items()}
        )
    return {
        "arms": arms,
        "epochs": epochs,
        "das": blocks[best],
        "idle": float(
            np.average(
                [step.idle for step in off], weights=[step.rollout_s for step in off]
            )
        ),
        "engines": simulation.engines,
        "kv_tokens": simulation.kv_blocks * BLOCK,
    }
