"""The requests of each step of a simulated run: recorded ones, or ones whose lengths are drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from das_adapter.sim.lengths import Lengths
from das_adapter.sim.rollouts import Rollout, steps_of
from das_adapter.sim.texts import Texts

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Workload:
    """The steps of a run."""

    steps: list[dict[str, Ints]]
    """Arguments of `Requests.add`, int64 [n] each."""
    group: int
    """Maximum number of samples of a problem in a step."""
    texts: Texts
    """Recorded responses; none where lengths are drawn."""


def recorded(rollouts: Sequence[Rollout], cap: int, copies: int = 1) -> Workload:
    """Return recorded rollouts: the responses of one step and run are a step.

    Args:
        rollouts: of any steps.
        cap: maximum tokens that the run allows.
        copies: how often each problem is there, under numbers of its own.
    """
    steps = steps_of(sorted(rollouts, key=lambda r: r.problem))
    texts = Texts([r for step in steps for r in step])
    group = max(max(Counter(r.problem for r in step).values()) for step in steps)
    problems, visits = max(r.problem for r in rollouts) + 1, Counter[int]()
    columns, first = list[dict[str, Ints]](), 0
    for step in steps:
        text = np.tile(np.arange(first, first + len(step)), copies)
        own = np.array([r.problem for r in step] * copies)
        columns.append(
            {
                "problem": own + np.repeat(np.arange(copies), len(step)) * problems,
                "visit": np.array([visits[p] for p in own.tolist()]),
                "text": text,
                "prompt": np.array([len(r.prompt) for r in step] * copies),
                "length": texts.lengths(text),
                "most": np.full(len(text), cap),
            }
        )
        visits.update(set(own.tolist()))
        first += len(step)
    return Workload(columns, group, texts)


def drawn(
    lengths: Lengths, dataset: int, problems: int, samples: int, prompt: int, cap: int, steps: int, seed: int = 0
) -> Workload:
    """Return requests of drawn lengths; an epoch visits each problem of a data set once, in another order each time.

    Args:
        lengths: draws them.
        dataset: problems in all.
        problems: in a step.
        samples: of each problem in a step.
        prompt: tokens of a prompt.
        cap: maximum tokens of a response.
        steps: of the run.
        seed: of the order and the lengths.
    """
    rng, visits, columns = np.random.default_rng(seed), Counter[int](), list[dict[str, Ints]]()
    order = np.concatenate([rng.permutation(dataset) for _ in range(max(-(-steps * problems // dataset), 1))])
    for number in range(steps):
        chosen = order[number * problems : (number + 1) * problems].astype(np.int64)
        length = lengths.draw(chosen, samples, np.random.default_rng((seed, number))).ravel()
        problem, same = np.repeat(chosen, samples), np.ones(len(length), np.int64)
        columns.append(
            {
                "problem": problem,
                "visit": np.array([visits[p] for p in problem.tolist()]),
                "text": -same,
                "prompt": prompt * same,
                "length": np.minimum(length, cap),
                "most": cap * same,
            }
        )
        visits.update(chosen.tolist())
    return Workload(columns, samples, Texts([]))
