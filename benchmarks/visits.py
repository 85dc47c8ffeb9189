"""Recorded rollouts, laid out as the training steps of a run that visits its problems
several times.
"""

from __future__ import annotations

import itertools
import math
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
    visits = _visits_of_problems(rollouts)
    num_epochs = min(most, max(map(len, visits.values())))
    with_all_epochs = sorted(
        problem for problem, texts in visits.items() if len(texts) >= num_epochs
    )
    random = np.random.default_rng(seed)
    chosen = random.permutation(with_all_epochs)[:problems].tolist()
    steps_an_epoch = math.ceil(len(chosen) / a_step)

    laid_out = []
    for epoch in range(num_epochs):
        first_step = epoch * steps_an_epoch
        in_epoch = []
        for place, problem in enumerate(chosen):
            step = first_step + place // a_step
            for response in visits[problem][epoch]:
                in_epoch.append(replace(response, step=step, run=0))
        laid_out.append(in_epoch)
    return laid_out


def _visits_of_problems(
    rollouts: Sequence[RecordedResponse],
) -> dict[int, list[list[RecordedResponse]]]:
    """Return the responses of each visit of each problem, visits in their order."""
    written: dict[int, dict[tuple[int, int], list[RecordedResponse]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for response in rollouts:
        policy = (response.step, response.run)
        written[response.problem][policy].append(response)
    several_policies = len({response.step for response in rollouts}) > 1

    visits = {}
    for problem, by_policy in written.items():
        texts = [by_policy[policy] for policy in sorted(by_policy)]
        if not several_policies:
            texts = _dealt_out(list(itertools.chain.from_iterable(texts)))
        visits[problem] = texts
    return visits


def _dealt_out(responses: list[RecordedResponse]) -> list[list[RecordedResponse]]:
    """Share one policy's responses to a problem out over visits; a rest is left out."""
    size = 8 if len(responses) >= 16 else 1
    num_visits = len(responses) // size
    return [responses[visit * size : (visit + 1) * size] for visit in range(num_visits)]
