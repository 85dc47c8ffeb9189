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
    by_problem = sorted(responses, key=attrgetter("problem"))
    steps = steps_of(by_problem)
    visits = Counter[int]()
    columns = list[dict[str, Ints]]()
    ordered = list[RecordedResponse]()
    group = 0
    for step in steps:
        problems = [response.problem for response in step]
        prompts = [len(response.prompt) for response in step]
        lengths = [len(response.tokens) for response in step]
        samples = Counter(problems)
        group = max(group, *samples.values())
        first = len(ordered)
        ordered += step
        added = _columns(
            visits,
            np.array(problems),
            text=np.arange(first, len(ordered)),
            num_prompt_tokens=prompts,
            num_output_tokens=lengths,
            max_tokens=cap,
        )
        columns.append(added)
    texts = Texts(ordered)
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
        end = first + rollout.problems
        problems = order[first:end]
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
    whole_epochs = -(-visited // dataset)
    num_epochs = max(whole_epochs, 1)
    epochs = [rng.permutation(dataset) for _ in range(num_epochs)]
    order = np.concatenate(epochs)
    return order.astype(np.int64)


def _columns(
    visits: Counter[int],
    problems: Ints,
    **others: Any,
) -> dict[str, Ints]:
    """Return the columns of a step's requests, by their problems, which are visited
    once more.
    """
    numbers = problems.tolist()
    count = len(numbers)
    visit = [visits[problem] for problem in numbers]
    visits.update(set(numbers))
    columns = {"problem": problems, "visit": visit, **others}
    found = {}
    for name, column in columns.items():
        values = np.asarray(column, np.int64)
        found[name] = np.broadcast_to(values, count)
    return found


def draw_lengths(
    rollout: RolloutBlock,
    problems: Ints,
    rng: np.random.Generator,
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
    noises = [_problem_noise(rollout.seed, p) for p in problems.tolist()]
    of_problem = np.array(noises)[:, None]
    shape = (len(problems), rollout.samples)
    of_sample = rng.standard_normal(shape)
    between = math.sqrt(lengths.within)
    inside = math.sqrt(1 - lengths.within)
    noise: Floats = between * of_problem + inside * of_sample
    log_lengths = location + lengths.sigma * noise
    uncapped = np.exp(log_lengths)
    capped = np.clip(uncapped, 1, cap)
    return capped.astype(np.int64)


def _problem_noise(seed: int, problem: int) -> float:
    """Return what the lengths of a problem's samples have in common, standard normal,
    the same in each of its visits.
    """
    rng = np.random.default_rng((seed, problem))
    noise = rng.standard_normal()
    return float(noise)


def _location(mean: float, sigma: float, cap: int) -> float:
    """Return the mean of the logarithm with which lengths that end at the cap have this
    mean.
    """
    low = 0.0
    high = math.log(cap) + 6 * sigma
    for _ in range(60):
        middle = 0.5 * (low + high)
        reached = _capped_mean(middle, sigma, cap)
        if reached < mean:
            low = middle
        else:
            high = middle
    return low


def _capped_mean(location: float, sigma: float, cap: int) -> float:
    """Return the mean of a log-normal distribution that ends at a cap."""
    normal = NormalDist()
    z = (math.log(cap) - location) / sigma
    log_mean = location + sigma**2 / 2
    mean = math.exp(log_mean)
    below_cap = normal.cdf(z - sigma)
    at_cap = 1.0 - normal.cdf(z)
    return mean * below_cap + cap * at_cap
