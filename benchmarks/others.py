"""What texts of other problems add to the drafts of recorded rollouts.

python benchmarks/others.py --traces DIR --out FILE.json
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from index import accepted
from index_drafters import Ours
from index_workload import Group, groups
from own_history import OwnHistory
from provenance import provenance, save

from das_adapter.core.tuning import OTHERS_TOKENS
from das_adapter.sim import rollouts as dumps
from das_adapter.sim.rollouts import RecordedResponse

BUDGETS = (16, 32, 64)
SETTINGS = {
    "first": "growing",
    "finished": "finished",
    "later": "earlier+growing",
}
"""First visits, the same beside finished samples, and visits after earlier ones of the
same prompt.
"""
GROUPS = 60
"""Groups of a fold that are written again, at most."""
OTHER_PROBLEMS = 2**40
"""Added to the problems whose texts are history and are not written again."""

Log = Callable[[str], None]


def learned(
    rollouts: Sequence[RecordedResponse], fold: int, others_tokens: int
) -> Ours:
    """Return a drafter that has seen all texts of the other fold's problems, as one
    version each 2^20 tokens.
    """
    drafter = Ours()
    drafter.index = OwnHistory(others_tokens)
    num_tokens = 0
    for rollout in rollouts:
        if rollout.problem % 2 == fold:
            continue
        problem = OTHER_PROBLEMS + rollout.problem
        drafter.index.add(problem, rollout.tokens, num_tokens // 2**20)
        num_tokens += len(rollout.tokens)
        if num_tokens > OTHERS_TOKENS:
            break
    drafter.seal()
    return drafter


def tokens_per_forward(
    rollouts: Sequence[RecordedResponse],
    chosen: Sequence[Sequence[Group]],
    setting: str,
    budget: int,
    others_tokens: int,
) -> float:
    """Write the groups of both folds again; return tokens for each forward pass."""
    tokens = 0.0
    rounds = 0.0
    for fold, found in enumerate(chosen):
        if not found:
            continue
        drafter = learned(rollouts, fold, others_tokens)
        figures = accepted(drafter, found, setting, budget)
        tokens += figures["tokens_per_forward"] * figures["rounds"]
        rounds += figures["rounds"]
    return tokens / rounds


def measure(rollouts: Sequence[RecordedResponse], log: Log) -> dict[str, Any]:
    """Compare drafts from the problem alone with those from others, too."""
    problem_of = {r.tokens.tobytes(): r.problem for r in rollouts}
    found = groups(rollouts)
    result: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        folds = []
        for fold in range(2):
            own = [g for g in found if problem_of[g.target.tobytes()] % 2 == fold]
            if setting.startswith("earlier"):
                own = [g for g in own if g.earlier]
            folds.append(own[:: max(1, len(own) // GROUPS)])
        if not any(folds):
            continue
        result[name] = {}
        for budget in BUDGETS:
            alone, both = (
                tokens_per_forward(rollouts, folds, setting, budget, most)
                for most in (0, OTHERS_TOKENS)
            )
            result[name][budget] = {
                "own": alone,
                "others": both,
                "of_own": both / alone,
            }
            log(f"{name} {budget}: {alone:.3f} {both:.3f} {both / alone:.3f}")
    return result


@click.command()
@click.option(
    "--traces",
    type=click.Path(exists=True, path_type=Path),
    required=True,
    help="Directory of .npz.",
)
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(traces: Path, out: Path) -> None:
    """Measure tokens per forward pass with texts of other problems and without them."""
    work = {}
    for file in sorted(traces.glob("*.npz")):
        click.echo(file.stem)
        work[file.stem] = measure(dumps.read(file), click.echo)
    least = min(
        figures["of_own"]
        for settings in work.values()
        for budgets in settings.values()
        for figures in budgets.values()
    )
    save(out, {"provenance": provenance(), "least": least, "work": work})
    if least < 0.995:
        raise click.ClickException(f"texts of other problems lose: {least:.3f}")


if __name__ == "__main__":
    main()
