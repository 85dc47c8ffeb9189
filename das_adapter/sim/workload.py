"""The requests of each step of a simulated run: recorded ones, or ones whose lengths
are drawn.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import NormalDist
from typing import Any

import numpy as np

from das_adapter.errors import DasError
from das_adapter.sim.config import RolloutBlock
from das_adapter.sim.requests import Floats, Ints
from das_adapter.sim.rollouts import RecordedResponse, steps_of
from das_adapter.sim.texts import Texts


@dataclass(frozen=True)
class Workload:
    """The requests of each step of a run."""

    steps: list[dict[str, Ints]]
    """Arguments of `Requests.add`, int64 [n] each."""
    group: int
    """Maximum number of samples of a problem in a step."""
    texts: Texts
    """Recorded responses; none where lengths are drawn."""


def recorded(responses: Sequence[RecordedResponse], cap: int) -> Workload:
    """Return recorded responses as a workload: those of one step and run are a step."""
    steps = steps_of(sorted(responses, key=attrgetter("problem")))
    texts = Texts([response for step in steps for response in step])
    visits = Counter[int]()
    columns = list[dict[str, Ints]]()
    group = 0
    first = 0
    for step in steps:
        problems = [response.problem for response in step]
        samples = Counter(problems)
        group = max(group, *samples.values())
        added = _columns(
            visits,
            np.array(problems),
            text=np.arange(first, first + len(step)),
            num_prompt_tokens=[len(response.prompt) for response in step],
            num_output_tokens=[len(response.tokens) for response in step],
            max_tokens=cap,
        )
        columns.append(added)
        first += len(step)
    return Workload(columns, group, texts)


def drawn(rollout: RolloutBlock) -> Workload:
    """Return requests of drawn lengths; an epoch visits each problem of a data set
    once, another order each time.
    """
    order = _problem_order(rollout)
    visits = Counter[int]()
    columns = list[dict[str, Ints]]()
    for number in range(rollout.steps):
        first = number * rollout.problems
        problems = order[first : first + rollout.problems]
        rng = np.random.default_rng((rollout.seed, number))
        lengths = draw_lengths(rollout, problems, rng)
        added = _columns(
            visits,
            np.repeat(problems, rollout.samples),
            text=-1,
            num_prompt_tokens=rollout.prompt,
            num_output_tokens=lengths.ravel(),
            max_tokens=rollout.cap,
        )
        columns.append(added)
    return Workload(columns, rollout.samples, Texts([]))


def _problem_order(rollout: RolloutBlock) -> Ints:
    """Return the problems of all steps, one after the other, int64."""
    rng = np.random.default_rng(rollout.seed)
    dataset = max(rollout.dataset, rollout.problems)
    visited = rollout.steps * rollout.problems
    num_epochs = max(-(-visited // dataset), 1)
    epochs = [rng.permutation(dataset) for _ in range(num_epochs)]
    return np.concatenate(epochs).astype(np.int64)


def _columns(visits: Counter[int], problems: Ints, **others: Any) -> dict[str, Ints]:
    """Return the columns of a step's requests, by their problems, which are visited
    once more.
    """
    numbers = problems.tolist()
    visit = [visits[problem] for problem in numbers]
    visits.update(set(numbers))
    found = {}
    for name, column in {"problem": problems, "visit": visit, **others}.items():
        values = np.asarray(column, np.int64)
        found[name] = np.broadcast_to(values, len(numbers))
    return found


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
    location = _location(lengths.mean, lengths.sigma, cap)
    of_problem = np.array([_problem_noise(rollout.seed, p) for p in problems.tolist()])
    of_sample = rng.standard_normal((len(problems), rollout.samples))
    between = math.sqrt(lengths.within)
    inside = math.sqrt(1 - lengths.within)
    noise: Floats = between * of_problem[:, None] + inside * of_sample
    drawn_lengths = np.exp(location + lengths.sigma * noise)
    return np.clip(drawn_lengths, 1, cap).astype(np.int64)


def _problem_noise(seed: int, problem: int) -> float:
    """Return what the lengths of a problem's samples have in common, standard normal,
    the same in each of its visits.
    """
    rng = np.random.default_rng((seed, problem))
    return float(rng.standard_normal())


def _location(mean: float, sigma: float, cap: int) -> float:
    """Return the mean of the logarithm with which lengths that end at the cap have this
    mean.
    """
    low = 0.0
    high = math.log(cap) + 6 * sigma
    for _ in range(60):
        middle = 0.5 * (low + high)
        if _capped_mean(middle, sigma, cap) < mean:
            low = middle
        else:
            high = middle
    return low


def _capped_mean(location: float, sigma: float, cap: int) -> float:
    """Return the mean of a log-normal distribution that ends at a cap."""
    normal = NormalDist()
    z = (math.log(cap) - location) / sigma
    mean = math.exp(location + sigma**2 / 2)
    below_cap = normal.cdf(z - sigma)
    at_cap = 1.0 - normal.cdf(z)
    return mean * below_cap + cap * at_cap
