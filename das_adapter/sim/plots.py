"""Pictures of simulated runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from das_adapter.sim.pipeline import Run


def draw(runs: Mapping[str, Run], path: str | Path) -> None:
    """Plot running requests over time in the last step, and the rollout's time by step, for each arm; the suffix of
    `path` says which kind of picture is written.

    Raises:
        ImportError: matplotlib is not installed (extra `plot`).
    """
    from matplotlib.figure import Figure

    last = len(next(iter(runs.values())).steps) - 1
    figure = Figure(figsize=(10 if last else 5.5, 3.6), layout="constrained")
    axes = figure.subplots(1, 2 if last else 1, squeeze=False)[0]
    for name, one in runs.items():
        axes[0].plot(*one.running(last), label=f"{name}: {one.steps[last].rollout_s:.0f} s")
        if last:
            axes[1].plot([s.rollout_s for s in one.steps], marker="o", markersize=3, label=name)
    axes[0].set(xlabel="seconds", ylabel="running requests", title=f"step {last + 1}", ylim=(0, None))
    axes[0].legend()
    if last:
        axes[1].set(xlabel="step", ylabel="rollout, s", title="by step", ylim=(0, None))
        axes[1].legend()
    figure.savefig(path, dpi=110)
