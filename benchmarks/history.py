"""What the history is worth by its byte budget, its way to keep the budget, and its
window, on recorded rollouts.

python benchmarks/history.py --traces DIR --out FILE.json
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from own_history import OwnHistory
from provenance import provenance, save
from replay import replay
from visits import epochs

from das_adapter.config import HistoryConfig
from das_adapter.core.index.values import Tokens
from das_adapter.core.tuning import HISTORY_WINDOW
from das_adapter.errors import DasError
from das_adapter.sim import rollouts as dumps
from das_adapter.sim.rollouts import RecordedResponse

WINDOWS = (1, 2, 4, 8, 16)
BUDGETS = (100, 50, 25, 10, 0)
"""Percent of the bytes that the first epoch takes."""
UNLIMITED = HistoryConfig(max_bytes=2**40)
BYTES = 8
"""Bytes of a token in the index, about."""


class WholeRollouts(OwnHistory):
    """An index that keeps a byte budget by dropping whole rollouts."""

    def __init__(self) -> None:
        super().__init__()
        self._texts: dict[int, list[tuple[int, Tokens]]] = {}
        """Texts by problem, the problem seen last at the end."""

    def add(self, problem: int, tokens: Tokens, version: int) -> None:
        self._texts[problem] = [*self._texts.pop(problem, []), (version, tokens)]
        super().add(problem, tokens, version)

    def shrink(self, max_bytes: int) -> None:
        while self.nbytes > max_bytes:
            self._drop(self.nbytes - max_bytes)
            super().shrink(0)
            for problem, texts in self._texts.items():
                for version, tokens in texts:
                    super().add(problem, tokens, version)
            self.seal()

    def _drop(self, excess: int) -> None:
        """Drop about so many bytes of text, or all there is."""
        raise NotImplementedError


class WholeProblems(WholeRollouts):
    """Drops the problems not seen for longest, then the oldest versions."""

    def _drop(self, excess: int) -> None:
        newest = max(texts[-1][0] for texts in self._texts.values())
        while excess > 0 and self._texts:
            first = next(iter(self._texts))
            if self._texts[first][-1][0] < newest:
                excess -= BYTES * sum(
                    len(tokens) for _, tokens in self._texts.pop(first)
                )
                continue
            oldest = min(
                version for texts in self._texts.values() for version, _ in texts
            )
            for problem, texts in list(self._texts.items()):
                excess -= BYTES * sum(
                    len(tokens) for version, tokens in texts if version == oldest
                )
                self._texts[problem] = [t for t in texts if t[0] > oldest]
                if not self._texts[problem]:
                    del self._texts[problem]


class RandomRollouts(WholeRollouts):
    """Drops random rollouts, each time one of the problem with the most text."""

    def __init__(self) -> None:
        super().__init__()
        self._rng = np.random.default_rng(0)

    def _drop(self, excess: int) -> None:
        sizes = {
            problem: sum(len(tokens) for _, tokens in texts)
            for problem, texts in self._texts.items()
        }
        while excess > 0 and sizes:
            largest = max(sizes, key=lambda problem: sizes[problem])
            texts = self._texts[largest]
            _, dropped = texts.pop(int(self._rng.integers(len(texts))))
            excess -= BYTES * len(dropped)
            sizes[largest] -= len(dropped)
            if not texts:
                del self._texts[largest], sizes[largest]


RETENTIONS = {
    "whole problems": WholeProblems,
    "random rollouts": RandomRollouts,
    "thinned out": OwnHistory,
}


def measured(
    laid_out: Sequence[Sequence[RecordedResponse]],
    history: HistoryConfig,
    index: OwnHistory,
    window: int = HISTORY_WINDOW,
) -> dict[str, Any]:
    """Replay; return the figures of each visit, and of the requests whose problem had
    been seen before.
    """
    outcome = replay(
        list(itertools.chain(*laid_out)), history=history, index=index, window=window
    )
    again = [tally for visit, tally in outcome.by_visit.items() if visit > 1]
    return {
        "accepted_per_round": (
            sum(t.accepted for t in again) / sum(t.rounds for t in again)
        ),
        "hits": sum(t.hits for t in again) / sum(t.requests for t in again),
        "by_visit": [
            t.accepted / t.rounds for _, t in sorted(outcome.by_visit.items())
        ],
        "history_bytes": outcome.bytes,
    }


def budgets(laid_out: Sequence[Sequence[RecordedResponse]]) -> dict[str, Any]:
    """Measure byte budgets, in percent of what the first epoch's text takes, with each
    way to keep them.
    """
    index = OwnHistory()
    for r in laid_out[0]:
        index.add(r.problem, r.tokens, 0)
    index.seal()
    result: dict[str, Any] = {
        "epoch_bytes": index.nbytes,
        "unlimited": measured(laid_out, UNLIMITED, OwnHistory()),
    }
    for percent in BUDGETS:
        room = UNLIMITED.model_copy(update={"max_bytes": index.nbytes * percent // 100})
        result[str(percent)] = {
            name: measured(laid_out, room, kind()) for name, kind in RETENTIONS.items()
        }
    return result


def windows(laid_out: Sequence[Sequence[RecordedResponse]]) -> dict[str, Any]:
    """Measure windows of visits without a byte budget."""
    return {
        str(window): measured(laid_out, UNLIMITED, OwnHistory(), window)
        for window in WINDOWS
    }


@click.command()
@click.option(
    "--traces",
    type=click.Path(exists=True, path_type=Path),
    required=True,
    help="Directory of .npz files.",
)
@click.option(
    "--problems", default=96, show_default=True, help="Problems of each file at most."
)
@click.option(
    "--tokens",
    default=1_000_000,
    show_default=True,
    help="About the most tokens of each file.",
)
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(traces: Path, problems: int, tokens: int, out: Path) -> None:
    """Measure what the history is worth by its byte budget and its window."""
    figures: dict[str, Any] = {"provenance": provenance(), "budgets": {}, "windows": {}}
    for file in sorted(traces.glob("*.npz")):
        try:
            rollouts = dumps.read(file)
        except DasError as error:
            raise click.ClickException(str(error)) from None
        for name, measure, most in (("budgets", budgets, 4), ("windows", windows, 12)):
            laid_out = epochs(rollouts, problems, most)
            written = sum(len(r.tokens) for epoch in laid_out for r in epoch)
            fewer = min(problems, max(16, problems * tokens // written))
            laid_out = epochs(rollouts, fewer, most)
            found = measure(laid_out)
            figures[name][file.stem] = {
                "problems": len({r.problem for r in laid_out[0]}),
                **found,
            }
            click.echo(f"{file.stem}: {name} measured")
    save(out, figures)


if __name__ == "__main__":
    main()
