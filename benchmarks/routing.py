"""Routing on recorded rollouts: accepted tokens and makespan over 1 to 8 replicas, leaders, what siblings are worth.

    python benchmarks/routing.py --traces TRACES_DIR --out FILE.json [--sets NAME ...]

`before` is the routing of revision `BEFORE`, read from git: lengths alone decide, a group is spread over the replicas.
Sets that FILE.json has already and that are not named stay in it. Prints the tables of `results/routing.md`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import subprocess
import types
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from provenance import provenance, save

from das_adapter.core.length import Expected, LengthModel
from das_adapter.sim import rollouts
from das_adapter.sim.rollouts import Rollout
from das_adapter.tools import replicas

BEFORE = "6b5cfb2"
SETS = {
    # problems, samples of a group, steps; None: the steps of the recording
    "tot_gpt4_game24_cot_k100": (32, 8, 3),
    "code_humaneval_codegen16b_k100": (32, 8, 3),
    "rl_reasoning_gym_qwen25_3b_k3": (64, 3, None),
}
ARMS = ("before", "together", "leaders", "one index")
WAVES = 4


class Before:
    """The routing of revision `BEFORE` in veRL: the replica with the fewest requests, later `Spread`."""

    def __init__(self, count: int) -> None:
        text = subprocess.run(
            ["git", "show", f"{BEFORE}:das_adapter/core/routing.py"],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parent,
        ).stdout
        module = types.ModuleType("routing_before")
        exec(text, vars(module))
        self._count, self._spread = count, module.Spread

    def __call__(self, arrivals: Sequence[Rollout], expected: Expected) -> list[int]:
        known = [expected[problem] for problem in {r.problem for r in arrivals} if problem in expected]
        if not known:
            return [i % self._count for i in range(len(arrivals))]
        long = float(np.quantile(known, LengthModel.LONG))
        spread = self._spread(range(self._count))
        return [spread.pick(expected[r.problem], expected[r.problem] > long) for r in arrivals]


def read(path: Path, problems: int, group: int, steps: int | None, seed: int) -> list[Rollout]:
    """Choose problems, and deal their samples out in groups, one a step, where the recording has no steps."""
    found = rollouts.read(path)
    names = sorted({r.problem for r in found})
    chosen = set(np.random.default_rng(seed).permutation(names)[:problems].tolist())
    found = [r for r in found if r.problem in chosen]
    if steps is None:
        return found
    seen: Counter[int] = Counter()
    dealt = []
    for r in found:
        step = seen[r.problem] // group
        seen[r.problem] += 1
        if step < steps:
            dealt.append(dataclasses.replace(r, step=step, run=0))
    return dealt


def measure(path: Path, shape: tuple[int, int, int | None], counts: Sequence[int], orders: int) -> dict[str, Any]:
    """Replay one set: every arm over every number of replicas, all at once and in waves, in several orders."""
    problems, group, _ = shape
    found: dict[str, Any] = {"problems": problems, "group": group, "orders": orders, "arms": []}
    dumps = [read(path, *shape, seed) for seed in range(orders)]
    found["siblings"] = replicas.siblings(read(path, orders * problems, *shape[1:], seed=0), most=120)
    for count, waves, arm in itertools.product(counts, (1, WAVES), ARMS):
        slots = max(1, problems * group // (WAVES * count)) if waves > 1 else None
        rows = []
        for seed, dump in enumerate(dumps):
            place = replicas.Router(count, group, slots or math.inf, together=True)
            router: replicas.Place = Before(count) if arm == "before" else place
            leads, shared = arm == "leaders", arm == "one index"
            rows.append(replicas.replay(dump, count, router, leads, slots, shared=shared, seed=seed).to_dict())
        mean = {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}
        found["arms"].append(
            {"replicas": count, "waves": waves, "arm": arm, **mean, "makespans": [row["makespan"] for row in rows]}
        )
    return found


def tables(sets: dict[str, Any]) -> str:
    """The figures as Markdown."""
    lines = []
    for waves in (1, WAVES):
        title = "all requests at once" if waves == 1 else f"{waves} waves"
        lines += [
            f"\n| {title} | replicas | before: accepted, makespan | " + " | ".join(ARMS[1:]) + " |",
            "|---" * (len(ARMS) + 2) + "|",
        ]
        for name, found in sets.items():
            rows = [row for row in found["arms"] if row["waves"] == waves]
            for count in sorted({row["replicas"] for row in rows}):
                arms = {row["arm"]: row for row in rows if row["replicas"] == count}
                cells = [f"{arms['before']['accepted_per_round']:.3f}, {arms['before']['makespan']:.0f}"]
                for arm in ARMS[1:]:
                    ratios = np.array(arms[arm]["makespans"]) / np.array(arms["before"]["makespans"])
                    cells.append(
                        f"{arms[arm]['accepted_per_round']:.3f}, {ratios.mean():.2f} "
                        f"({ratios.min():.2f} to {ratios.max():.2f})"
                    )
                lines.append(f"| {name.partition('_k')[0]} | {count} | " + " | ".join(cells) + " |")
    states = list(dict.fromkeys(state for found in sets.values() for state in found["siblings"]))
    lines += ["\n| siblings | " + " | ".join(states) + " |", "|---" * (len(states) + 1) + "|"]
    for name, found in sets.items():
        cells = [f"{found['siblings'][s]:.2f}" if s in found["siblings"] else "" for s in states]
        lines.append(f"| {name.partition('_k')[0]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=list(SETS))
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--orders", type=int, default=4)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    result = json.loads(args.out.read_text()) if args.out.exists() else {"sets": {}}
    result |= provenance() | {"before": BEFORE}
    for name in args.sets:
        result["sets"][name] = measure(args.traces / f"{name}.npz", SETS[name], args.replicas, args.orders)
        save(args.out, result)
    print(tables(result["sets"]))


if __name__ == "__main__":
    main()
