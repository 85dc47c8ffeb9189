"""`das-adapter compare`: compare two runs of the same training: tokens, rewards,
rollout time, acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from das_adapter.errors import DasError
from das_adapter.reports.run_logs import RunLog

SHARED = {
    "tokens": ("das/token_hash",),
    "reward": ("critic/score/mean", "critic/rewards/mean", "reward"),
    "rollout_s": (
        "das/rollout_s",
        "timing_s/gen",
        "timing/train/generation",
        "timing/train/exposed_generation",
        "profiling/Time taken: GRPOTrainer.vLLM.generate",
    ),
}
"""Names of a figure in das-adapter, veRL, NeMo-RL and TRL; the first that both runs
have logged is compared.
"""
KEYS = {key for keys in SHARED.values() for key in keys}
"""All names of these figures."""
ACCEPTED = ("das/acceptance_length", "vllm/spec_acceptance_length")
"""Names of the tokens that a drafted request gets from a forward pass; the first that a
run has logged counts.
"""
OF_STOCK = "das/of_stock"
"""Name of what a run that drafts claims of its rollout time, relative to stock's."""
CLAIM_ERROR = 0.1
"""How far that may be from the measured ratio of a step."""
ROWS = 30
"""Maximum rows of the table, where `every` is not given."""
MISSING = (
    "both runs must log das/token_hash: a run without drafts does so with `drafter:"
    " none` and `verify: {noise: keyed}`; of engines without a host (TRL, SkyRL, vLLM)"
    " compare the directories that das.log_dir names"
)
INVARIANT = (
    "On a GPU tokens that nearly tie fall otherwise with the number of tokens in a"
    " forward pass: for equal tokens set VLLM_BATCH_INVARIANT=1 for both runs (slower)."
)
COLUMNS = (
    "steps",
    "tokens",
    "reward\nA",
    "\nB",
    "rollout s\nA",
    "\nB",
    "speed-\nup",
    "acceptance\nlength A",
    "\nB",
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
        them; `rows` of these; and `claims`, for each step, where one run alone has
        logged `das/of_stock` in some.

    Raises:
        DasError: they have no step in common.
    """
    runs = (a, b)
    of_training = [_training_steps(run) for run in runs]
    steps = sorted(of_training[0] & of_training[1])
    if not steps:
        raise _nothing_in_common(runs, of_training)
    logged = [[run.steps[step] for step in steps] for run in runs]
    names = _names(logged)
    found = {figure: _values(logged, names[figure]) for figure in names}
    if not (a.exact and b.exact):
        for figure, values in found.items():
            found[figure] = values.astype(np.float32).astype(np.float64)
    every = every or -(-len(steps) // ROWS)
    rows = []
    for first in range(0, len(steps), every):
        of_row = slice(first, first + every)
        row = {"first": steps[of_row][0], "last": steps[of_row][-1]}
        rows.append(row | _row(found, of_row))
    return {
        "steps": len(steps),
        "only_one": len(of_training[0] ^ of_training[1]),
        "names": names,
        **_row(found, slice(None)),
        "rows": rows,
        "claims": _claims_of(logged, found["rollout_s"]),
    }


def claims(
    of_stock: Sequence[float | None],
    seconds: Sequence[float],
    off_seconds: Sequence[float],
) -> list[float | None]:
    """Return for each step what a run said of its rollout time relative to stock's, as
    a share of the measured ratio; None: one of them is not known.

    Args:
        of_stock: `das/of_stock` of the run.
        seconds: its rollout times.
        off_seconds: those of a run without drafts.
    """
    found: list[float | None] = []
    for claimed, own_s, off_s in zip(of_stock, seconds, off_seconds, strict=True):
        if claimed is not None and own_s > 0 and off_s > 0:
            found.append(claimed * off_s / own_s)
        else:
            found.append(None)
    return found


def num_near(known: Sequence[float], error: float = CLAIM_ERROR) -> int:
    """Return how many claims are within that error of the measured ratio."""
    near = [share for share in known if abs(share - 1) <= error]
    return len(near)


def right_claims(found: Sequence[float | None]) -> str:
    """Say in how many steps `claims` were near the measured ratio."""
    known = [share for share in found if share is not None]
    return (
        f"{OF_STOCK} was within {CLAIM_ERROR:.0%} of the measured ratio in"
        f" {num_near(known)} of {len(known)} steps"
    )


def _claims_of(
    logged: Sequence[list[dict[str, float]]], seconds: Values
) -> list[float | None]:
    """Return the claims of the run that has logged `das/of_stock`, beside the one that
    has not; empty: none has, or both.
    """
    drafting = [i for i, run in enumerate(logged) if _name([OF_STOCK], run)]
    if len(drafting) != 1:
        return []
    (run,) = drafting
    of_stock = [step.get(OF_STOCK) for step in logged[run]]
    return claims(of_stock, seconds[run].tolist(), seconds[1 - run].tolist())


def _training_steps(run: RunLog) -> set[int]:
    """Return the steps in which a run has logged a figure of training."""
    return {step for step, logged in run.steps.items() if not KEYS.isdisjoint(logged)}


def _nothing_in_common(
    runs: Sequence[RunLog], of_training: Sequence[set[int]]
) -> DasError:
    """Return the error about runs without a common training step."""
    if not all(of_training):
        return DasError(f"compare: a run has logged none of {', '.join(sorted(KEYS))}")
    spans = [f"{min(run.steps)} to {max(run.steps)}" for run in runs]
    return DasError(
        "compare: the runs have no training step in common: found steps"
        f" {' and '.join(spans)}"
    )


def _names(logged: Sequence[list[dict[str, float]]]) -> dict[str, list[str]]:
    """Return under which name each run has logged each figure; empty: under none.

    Args:
        logged: figures of the common steps, of each run.
    """
    names = {}
    for figure, keys in SHARED.items():
        names[figure] = [_name(keys, *logged)] * 2
    names["accepted"] = [_name(ACCEPTED, run) for run in logged]
    return names


def _values(logged: Sequence[list[dict[str, float]]], names: Sequence[str]) -> Values:
    """Return a figure of each run and step, float64 [2, steps]; NaN: not logged."""
    values = []
    for run, name in zip(logged, names, strict=True):
        values.append([step.get(name, np.nan) for step in run])
    return np.array(values)


def _name(keys: Sequence[str], *runs: list[dict[str, float]]) -> str:
    """Return the first name that all of these runs have logged in a step; empty: there
    is none.
    """
    for key in keys:
        if all(any(key in step for step in run) for run in runs):
            return key
    return ""


def _row(found: dict[str, Values], part: slice) -> dict[str, Any]:
    """Compare some steps: `tokens` and `rewards`, in how many they are equal, of how
    many where both are logged; `reward` and `accepted`, means of each run; `rollout_s`,
    the sums, and `speed_up`: how many times faster the second run rolled out. None: not
    logged.
    """
    values = {name: of_runs[:, part] for name, of_runs in found.items()}
    tokens = _in_both(values["tokens"])
    rewards = _in_both(values["reward"])
    seconds_a, seconds_b = _in_both(values["rollout_s"]).sum(axis=1).tolist()
    row: dict[str, Any] = {
        "tokens": _num_equal(tokens),
        "rewards": _num_equal(rewards),
        "reward": [_mean(run) for run in values["reward"]],
        "accepted": [_mean(run) for run in values["accepted"]],
        "rollout_s": [None, None],
        "speed_up": None,
    }
    if seconds_b > 0:
        row["rollout_s"] = [seconds_a, seconds_b]
        row["speed_up"] = seconds_a / seconds_b
    return row


def _in_both(values: Values) -> Values:
    """Return the values of the steps in which both runs have logged one."""
    logged = np.isfinite(values).all(axis=0)
    return values[:, logged]


def _num_equal(values: Values) -> tuple[int, int]:
    """Return in how many steps two runs have equal values, and of how many."""
    a, b = values
    return int(np.equal(a, b).sum()), len(a)


def _mean(values: Values) -> float | None:
    """Return the mean of the values of the steps that have one; None: none has."""
    logged = values[np.isfinite(values)]
    if len(logged):
        return float(logged.mean())
    return None


def sentences(found: dict[str, Any]) -> list[str]:
    """Say what came out, one sentence for each figure."""
    same_tokens, num_tokens = found["tokens"]
    same_rewards, num_rewards = found["rewards"]
    speed_up = found["speed_up"]
    said = [f"Tokens: not compared; {MISSING}."]
    if num_tokens:
        said = [f"Tokens: the same in {same_tokens} of {num_tokens} steps."]
    if same_tokens < num_tokens:
        said.append(INVARIANT)
    if num_rewards:
        said.append(f"Rewards: the same in {same_rewards} of {num_rewards} steps.")
    if speed_up:
        name = found["names"]["rollout_s"][0]
        said.append(
            f"Rollout time ({name}): B is {speed_up:.2f}x as fast as A,"
            f" {_time_change(speed_up)} time."
        )
    if any(share is not None for share in found["claims"]):
        said.append(f"{right_claims(found['claims'])}.")
    lengths = found["accepted"]
    if any(lengths):
        a, b = ("not logged" if mean is None else f"{mean:.2f}" for mean in lengths)
        said.append(
            f"Acceptance length, tokens that a drafted request gets of a forward pass:"
            f" A {a}, B {b}."
        )
    if found["only_one"]:
        said.append(
            f"{found['only_one']} steps are in one run alone, and are not compared."
        )
    return said


def _time_change(speed_up: float) -> str:
    """Say how much less or more time that is."""
    if speed_up >= 1:
        return f"{1 - 1 / speed_up:.0%} less"
    return f"{1 / speed_up - 1:.0%} more"


def table(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the rows of the table, text in the order of `COLUMNS`."""
    rows = []
    for row in found["rows"]:
        span = f"{row['first']}-{row['last']}"
        if row["first"] == row["last"]:
            span = str(row["first"])
        values = (*row["reward"], *row["rollout_s"], row["speed_up"], *row["accepted"])
        figures = ["" if value is None else _short(value) for value in values]
        rows.append((span, _verdict(*row["tokens"]), *figures))
    return rows


def _short(value: float) -> str:
    """Return a figure with at most three digits behind the point, fewer if it is
    large.
    """
    digits = 3 - min(3, len(f"{abs(value):.0f}") - 1)
    return f"{value:.{digits}f}"


def _verdict(same: int, logged: int) -> str:
    """Say whether the tokens of some steps are the same; empty: not logged."""
    if not logged:
        return ""
    if same == logged:
        return "same"
    if same:
        return f"{same} of {logged}"
    return "differ"
