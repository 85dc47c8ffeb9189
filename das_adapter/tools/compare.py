"""`das-adapter compare`: two runs of the same training side by side: tokens, rewards,
rollout time, acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from das_adapter.errors import DasError
from das_adapter.tools.run_logs import RunLog

SHARED = {
    "tokens": ("das/token_hash",),
    "reward": ("critic/score/mean", "critic/rewards/mean", "reward"),
    "rollout_s": (
        "das/rollout_s",
        "timing_s/gen",
        "timing/train/generation",
        "timing/train/exposed_generation",
    ),
}
"""What das-adapter, veRL and NeMo-RL call a figure; the first that both runs have
logged is compared.
"""
ACCEPTED = ("das/acceptance_length", "vllm/spec_acceptance_length")
"""Tokens that a drafted request gets from a forward pass; the first that a run has
logged.
"""
ROWS = 30
"""Most rows of the table, where `every` is not given."""
MISSING = (
    "both runs must log das/token_hash: a run without drafts does so with `drafter:"
    " none` and `verify: {noise: keyed}`"
)
COLUMNS = (
    "steps",
    "tokens",
    "reward A",
    "B",
    "rollout s, A",
    "B",
    "speed-up",
    "accepted A",
    "B",
)
Values = npt.NDArray[np.float64]


def compare(a: RunLog, b: RunLog, every: int | None = None) -> dict[str, Any]:
    """Compare two runs over the training steps that both have logged.

    Args:
        every: training steps of a row, 1 or more; None: as many as give no more than
            `ROWS` rows.

    Returns:
        `steps`, how many there are; `only_one`, steps of one run alone; `names`, under
        which name each figure was found; the figures of all steps as `_row` returns
        them; and `rows` of these.

    Raises:
        DasError: they have no step in common.
    """
    keys = {key for names in SHARED.values() for key in names}
    of_training = [
        {step for step, logged in run.steps.items() if not keys.isdisjoint(logged)}
        for run in (a, b)
    ]
    shared = sorted(set.intersection(*of_training))
    if not shared:
        spans = (f"{min(run.steps)} to {max(run.steps)}" for run in (a, b))
        if not all(of_training):
            raise DasError(
                f"compare: a run has logged none of {', '.join(sorted(keys))}"
            )
        raise DasError(
            "compare: the runs have no training step in common: found steps"
            f" {' and '.join(spans)}"
        )
    runs = [[run.steps[step] for step in shared] for run in (a, b)]
    names: dict[str, Any] = {
        figure: [_name(keys, *runs)] * 2 for figure, keys in SHARED.items()
    }
    names["accepted"] = [_name(ACCEPTED, run) for run in runs]
    found = {
        figure: np.array(
            [
                [s.get(key, np.nan) for s in run]
                for run, key in zip(runs, pair, strict=True)
            ]
        )
        for figure, pair in names.items()
    }
    if not (a.exact and b.exact):
        found = {
            figure: values.astype(np.float32).astype(np.float64)
            for figure, values in found.items()
        }
    every = every or -(-len(shared) // ROWS)
    parts = [slice(at, at + every) for at in range(0, len(shared), every)]
    return {
        "steps": len(shared),
        "only_one": len(set.symmetric_difference(*of_training)),
        "names": names,
        **_row(found, slice(None)),
        "rows": [
            {"first": shared[part][0], "last": shared[part][-1], **_row(found, part)}
            for part in parts
        ],
    }


def _name(keys: Sequence[str], *runs: list[dict[str, float]]) -> str:
    """Return the first name that all of these runs have logged in a step; empty: there
    is none.
    """
    return next(
        (key for key in keys if all(any(key in step for step in run) for run in runs)),
        "",
    )


def _row(found: dict[str, Values], part: slice) -> dict[str, Any]:
    """Compare some steps: `tokens` and `rewards`, in how many they are equal, of how
    many where both are logged; `reward` and `accepted`, means of each run; `rollout_s`,
    the sums, and `speed_up`: how many times faster the second run rolled out. None: not
    logged.
    """
    cut = {name: values[:, part] for name, values in found.items()}
    seconds = (
        cut["rollout_s"][:, np.isfinite(cut["rollout_s"]).all(axis=0)]
        .sum(axis=1)
        .tolist()
    )
    equal = {
        name: cut[name][:, np.isfinite(cut[name]).all(axis=0)]
        for name in ("tokens", "reward")
    }
    kept = {
        name: [values[np.isfinite(values)] for values in cut[name]]
        for name in ("reward", "accepted")
    }
    return {
        "tokens": (int(np.equal(*equal["tokens"]).sum()), equal["tokens"].shape[1]),
        "rewards": (int(np.equal(*equal["reward"]).sum()), equal["reward"].shape[1]),
        **{
            name: [float(v.mean()) if len(v) else None for v in values]
            for name, values in kept.items()
        },
        "rollout_s": seconds if seconds[1] > 0 else [None, None],
        "speed_up": seconds[0] / seconds[1] if seconds[1] > 0 else None,
    }


def sentences(found: dict[str, Any]) -> list[str]:
    """Say what came out, a figure each."""
    (same, logged) = found["tokens"]
    (rewards, rewarded) = found["rewards"]
    said = [
        (
            f"Tokens: the same in {same} of {logged} steps."
            if logged
            else f"Tokens: not compared; {MISSING}"
        )
    ]
    if rewarded:
        said.append(f"Rewards: the same in {rewards} of {rewarded} steps.")
    if faster := found["speed_up"]:
        less = (
            f"{1 - 1 / faster:.0%} less"
            if faster >= 1
            else f"{1 / faster - 1:.0%} more"
        )
        said.append(
            f"Rollout time ({found['names']['rollout_s'][0]}): B is {faster:.2f}x as"
            f" fast as A, {less} time."
        )
    if found["only_one"]:
        said.append(
            f"{found['only_one']} steps are in one run alone, and are not compared."
        )
    return said


def table(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the rows of the table, text in the order of `COLUMNS`."""
    rows = []
    for row in found["rows"]:
        same, logged = row["tokens"]
        tokens = (
            ""
            if not logged
            else (
                "same"
                if same == logged
                else f"{same} of {logged}"
                if same
                else "differ"
            )
        )
        values = (*row["reward"], *row["rollout_s"], row["speed_up"], *row["accepted"])
        figures = ["" if value is None else f"{value:.3f}" for value in values]
        span = (
            str(row["first"])
            if row["first"] == row["last"]
            else f"{row['first']}-{row['last']}"
        )
        rows.append((span, tokens, *figures))
    return rows
