"""Pictures of simulated runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from das_adapter.sim.pipeline import Run


def draw(runs: Mapping[str, Run], path: str | Path, step: int = -1) -> None:
    """Plot running requests over time in one step, and the rollout's time by step, for each arm.

    Args:
        runs: by arm; the first is the one that others are compared with.
        path: of the picture; its suffix says which kind.
        step: whose requests are shown; -1: the last.

    Raises:
        ImportError: matplotlib is not installed (extra `plot`).
    """
    from matplotlib.figure import Figure

    several = len(next(iter(runs.values())).steps) > 1
    figure = Figure(figsize=(10 if several else 5.5, 3.6), layout="constrained")
    axes = figure.subplots(1, 2 if several else 1, squeeze=False)[0]
    for name, one in runs.items():
        number = step % len(one.steps)
        seconds, running = one.running(number)
        axes[0].plot(seconds, running, label=f"{name}: {one.steps[number].rollout_s:.0f} s")
        if several:
            axes[1].plot([s.rollout_s for s in one.steps], marker="o", markersize=3, label=name)
    axes[0].set(xlabel="seconds", ylabel="running requests", title=f"step {number + 1}", ylim=(0, None))
    axes[0].legend()
    if several:
        axes[1].set(xlabel="step", ylabel="rollout, s", title="by step", ylim=(0, None))
        axes[1].legend()
    figure.savefig(path, dpi=110)
