"""The requests of each step of a simulated run: recorded ones, or ones whose lengths
are drawn.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from das_adapter.errors import DasError
from das_adapter.sim.config import RolloutBlock
from das_adapter.sim.requests import Ints
from das_adapter.sim.rollouts import Rollout, steps_of
from das_adapter.sim.texts import Texts


@dataclass(frozen=True)
class Workload:
    """The steps of a run."""

    steps: list[dict[str, Ints]]
    """Arguments of `Requests.add`, int64 [n] each."""
    group: int
    """Maximum number of samples of a problem in a step."""
    texts: Texts
    """Recorded responses; none where lengths are drawn."""


def recorded(rollouts: Sequence[Rollout], cap: int) -> Workload:
    """Return recorded rollouts: the responses of one step and run are a step."""
    steps = steps_of(sorted(rollouts, key=lambda r: r.problem))
    texts = Texts([r for step in steps for r in step])
    group = max(max(Counter(r.problem for r in step).values()) for step in steps)
    visits = Counter[int]()
    columns = list[dict[str, Ints]]()
    first = 0
    for step in steps:
        prompts, lengths = (
            [len(getattr(r, part)) for r in step] for part in ("prompt", "tokens")
        )
        problem = np.array([r.problem for r in step])
        text = np.arange(first, first + len(step))
        columns.append(
            _columns(
                visits, problem, text=text, prompt=prompts, length=lengths, most=cap
            )
        )
        first += len(step)
    return Workload(columns, group, texts)


def drawn(rollout: RolloutBlock) -> Workload:
    """Return requests of drawn lengths; an epoch visits each problem of a data set
    once, another order each time.
    """
    rng = np.random.default_rng(rollout.seed)
    visits = Counter[int]()
    columns = list[dict[str, Ints]]()
    dataset = max(rollout.dataset, rollout.problems)
    epochs = max(-(-rollout.steps * rollout.problems // dataset), 1)
    order = np.concatenate([rng.permutation(dataset) for _ in range(epochs)])
    for number in range(rollout.steps):
        chosen = order[
            number * rollout.problems : (number + 1) * rollout.problems
        ].astype(np.int64)
        length = draw_lengths(
            rollout, chosen, np.random.default_rng((rollout.seed, number))
        ).ravel()
        same = {"text": -1, "prompt": rollout.prompt, "most": rollout.cap}
        columns.append(
            _columns(visits, np.repeat(chosen, rollout.samples), length=length, **same)
        )
    return Workload(columns, rollout.samples, Texts([]))


def _columns(visits: Counter[int], problem: Ints, **others: Any) -> dict[str, Ints]:
    """Return the columns of a step's requests, by their problems, which are visited
    once more.
    """
    visit = [visits[p] for p in problem.tolist()]
    visits.update(set(problem.tolist()))
    columns = {"problem": problem, "visit": visit, **others}
    return {
        name: np.broadcast_to(np.asarray(column, np.int64), len(problem))
        for name, column in columns.items()
    }


def draw_lengths(
    rollout: RolloutBlock, problems: Ints, rng: np.random.Generator
) -> Ints:
    """Draw lengths of at least 1, int64 [problems, samples], for problems with these
    numbers.

    Raises:
        DasError: the mean is not under the cap.
    """
    lengths = rollout.lengths
    cap = rollout.cap
    if not 1 <= lengths.mean < cap:
        raise DasError(
            f"rollout.lengths.mean: found {lengths.mean}, allowed: 1 to under"
            f" rollout.cap, which is {cap}"
        )
    # of the logarithm's mean
    low = 0.0
    high = math.log(cap) + 6 * lengths.sigma
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (
            (middle, high)
            if _capped_mean(middle, lengths.sigma, cap) < lengths.mean
            else (low, middle)
        )
    own = np.array(
        [
            np.random.default_rng((rollout.seed, int(p))).standard_normal()
            for p in problems
        ]
    )
    noise = rng.standard_normal((len(problems), rollout.samples))
    z = math.sqrt(lengths.within) * own[:, None] + math.sqrt(1 - lengths.within) * noise
    return np.clip(np.exp(low + lengths.sigma * z), 1, cap).astype(np.int64)


def _capped_mean(location: float, sigma: float, cap: int) -> float:
    """Return the mean of a log-normal distribution that ends at a cap."""
    normal = NormalDist().cdf
    z = (math.log(cap) - location) / sigma
    return math.exp(location + sigma**2 / 2) * normal(z - sigma) + cap * (
        1.0 - normal(z)
    )
