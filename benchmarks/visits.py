"""Recorded rollouts, laid out as the training steps of a run that visits its problems
several times.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from das_adapter.sim.rollouts import RecordedResponse


def epochs(
    rollouts: Sequence[RecordedResponse],
    problems: int,
    most: int,
    a_step: int = 16,
    seed: int = 0,
) -> list[list[RecordedResponse]]:
    """Lay recorded rollouts out as epochs over the same problems, `a_step` of them in
    each training step.

    Where several policies wrote the file, each epoch is written by one of them, in
    their order. Else a problem's rollouts are dealt out, eight an epoch, or one where a
    problem has fewer than sixteen.

    Args:
        problems: at most; a random choice of those that have as many epochs as any.
        most: epochs, at most.
        a_step: problems of a training step.
        seed: of the choice of problems.
    """
    written: dict[int, dict[tuple[int, int], list[RecordedResponse]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for r in rollouts:
        written[r.problem][r.step, r.run].append(r)
    several = len({r.step for r in rollouts}) > 1
    visits = {}
    for p, policies in written.items():
        texts = [own for _, own in sorted(policies.items())]
        if not several:
            everything = list(itertools.chain.from_iterable(texts))
            size = 8 if len(everything) >= 16 else 1
            texts = [
                everything[i : i + size]
                for i in range(0, len(everything) - size + 1, size)
            ]
        visits[p] = texts[:most]
    count = max(map(len, visits.values()))
    with_all_epochs = sorted(p for p, texts in visits.items() if len(texts) == count)
    chosen = (
        np.random.default_rng(seed).permutation(with_all_epochs)[:problems].tolist()
    )
    steps = -(-len(chosen) // a_step)
    return [
        [
            replace(r, step=epoch * steps + i // a_step, run=0)
            for i, p in enumerate(chosen)
            for r in visits[p][epoch]
        ]
        for epoch in range(count)
    ]
