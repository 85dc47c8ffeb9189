"""Which requests each step of a simulated run has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from das_adapter.sim.lengths import Lengths
from das_adapter.sim.rollouts import Rollout, steps_of
from das_adapter.sim.texts import Texts

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Step:
    """The requests of a step: columns of `Requests`, int64 [n]."""

    problem: Ints
    visit: Ints
    text: Ints
    prompt: Ints
    length: Ints
    most: Ints


class Workload(Protocol):
    """The steps of a run."""

    steps: int
    group: int
    """Samples of a problem in a step, at most."""
    texts: Texts
    """Recorded responses; none where lengths are drawn."""

    def step(self, number: int) -> Step:
        """Return the requests of a step, from 0; steps are asked for in their order."""
        ...


class Dumped:
    """Recorded rollouts: the responses of one step and run are a step."""

    def __init__(self, rollouts: Sequence[Rollout], cap: int | None = None, copies: int = 1) -> None:
        """
        Args:
            rollouts: of any steps.
            cap: most tokens that the run allows; None: as many as the longest has.
            copies: how often each problem is there, under numbers of its own.
        """
        steps = steps_of(sorted(rollouts, key=lambda r: r.problem))
        ordered = [r for step in steps for r in step]
        self.texts = Texts(ordered)
        self._cap = cap or max(len(r.tokens) for r in ordered)
        self._rows = np.split(np.arange(len(ordered)), np.cumsum([len(step) for step in steps])[:-1])
        self.steps = len(steps)
        self.group = max(max(Counter(r.problem for r in step).values()) for step in steps)
        self._copies, self._problems = copies, max(r.problem for r in ordered) + 1
        self._visits: Counter[int] = Counter()

    def step(self, number: int) -> Step:
        """See `Workload`."""
        text = np.tile(self._rows[number], self._copies)
        copy = np.repeat(np.arange(self._copies), len(self._rows[number]))
        own = np.array([self.texts.rollouts[i].problem for i in text], dtype=np.int64)
        visit = np.array([self._visits[p] for p in own.tolist()], dtype=np.int64)
        self._visits.update(set(own.tolist()))
        prompt = np.array([len(self.texts.rollouts[i].prompt) for i in text], dtype=np.int64)
        length = self.texts.lengths(text)
        return Step(own + copy * self._problems, visit, text, prompt, length, np.full(len(text), self._cap))


class Drawn:
    """Lengths that are drawn; an epoch visits each problem of a data set once, in another order each time."""

    def __init__(
        self,
        lengths: Lengths,
        dataset: int,
        problems: int,
        samples: int,
        prompt: int,
        cap: int,
        steps: int,
        seed: int = 0,
    ) -> None:
        """
        Args:
            lengths: draws them.
            dataset: problems in all.
            problems: in a step.
            samples: of each problem in a step.
            prompt: tokens of a prompt.
            cap: most tokens of a response.
            steps: of the run.
            seed: of the order and the lengths.
        """
        self.texts, self.steps, self.group = Texts([]), steps, samples
        self._lengths, self._problems, self._prompt, self._cap = lengths, problems, prompt, cap
        self._rng, self._seed = np.random.default_rng(seed), seed
        epochs = -(-steps * problems // dataset)
        self._order = np.concatenate([self._rng.permutation(dataset) for _ in range(max(epochs, 1))])
        self._visits: Counter[int] = Counter()

    def step(self, number: int) -> Step:
        """See `Workload`."""
        chosen = self._order[number * self._problems : (number + 1) * self._problems].astype(np.int64)
        rng = np.random.default_rng((self._seed, number))
        length = np.minimum(self._lengths.draw(chosen, self.group, rng), self._cap).ravel()
        problem = np.repeat(chosen, self.group)
        visit = np.array([self._visits[p] for p in problem.tolist()], dtype=np.int64)
        self._visits.update(chosen.tolist())
        n = len(problem)
        return Step(problem, visit, np.full(n, -1), np.full(n, self._prompt), length, np.full(n, self._cap))
