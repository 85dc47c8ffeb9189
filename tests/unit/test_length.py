"""Length prediction: quantile classes, the posterior as a request grows, shrinkage to
the population.
"""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from das_adapter.core import tuning
from das_adapter.core.length import (
    RESPONSE,
    LengthClass,
    LengthLog,
    LengthModel,
    chance_ended_by,
    classes,
    expected_remaining,
)


def rows(*responses: tuple[int, int, int]) -> np.ndarray:
    return np.array(list(responses), RESPONSE)


def of(lengths: dict[int, list[int]], version: int = 0) -> np.ndarray:
    return rows(
        *(
            (problem, length, version)
            for problem, seen in lengths.items()
            for length in seen
        )
    )


def trained(lengths: dict[int, list[int]]) -> LengthModel:
    model = LengthModel(longest=4096)
    model.observe(of(lengths))
    model.refit()
    return model


MIXED = {
    **{p: [100, 110, 90, 105] for p in range(8)},
    **{p: [1500, 1400, 1600, 1550] for p in (20, 21)},
}


def test_bounds_are_quantiles_of_the_recent_lengths() -> None:
    lengths = np.arange(1, 101)
    model = trained({0: lengths.tolist()})
    assert model.bounds == (np.quantile(lengths, 0.5), np.quantile(lengths, 0.8))
    # version 0 is none of the recent ones any more
    for version in range(1, tuning.POPULATION_VERSIONS + 1):
        model.observe(rows((7, 1000, version)))
    model.refit()
    assert model.bounds == (1000.0, 1000.0)


def test_history_makes_the_class_and_growth_corrects_it() -> None:
    model = trained(MIXED)
    cdf = np.stack([model.cdf(0), model.cdf(20), model.cdf(0), model.cdf(999)])
    written = np.array([10.0, 10.0, 600.0, 2000.0])
    found = classes(cdf, model.edges, written, model.bounds)
    # A short problem's request that has outgrown every short response is no longer
    # short.
    assert found[0] in (LengthClass.SHORT, LengthClass.MEDIUM)
    assert found[1:].tolist() == [LengthClass.LONG] * 3


def test_without_history_everything_is_medium() -> None:
    model = LengthModel(longest=1000)
    cdf = np.stack([model.cdf(1)] * 2)
    assert (
        classes(cdf, model.edges, np.array([0.0, 500.0]), model.bounds).tolist()
        == [LengthClass.MEDIUM] * 2
    )


def test_remaining_is_a_conditional_mean() -> None:
    model = trained({1: [400] * 40})
    rng = np.random.default_rng(0)
    draws = np.minimum(400 * rng.lognormal(0.0, tuning.LENGTH_SPREAD, 400000), 4096)
    for written in (0.0, 300.0, 500.0):
        expected = draws[draws > written].mean() - written
        found = expected_remaining(
            model.cdf(1)[None], model.edges, np.array([written])
        )[0]
        assert found == pytest.approx(expected, rel=0.2)


def test_remaining_falls_at_first_and_the_limit_is_the_limit() -> None:
    model = trained({1: [400] * 40})
    cdf = model.cdf(1)[None]
    early, later = (
        expected_remaining(cdf, model.edges, np.array([w]))[0] for w in (10.0, 300.0)
    )
    assert later < early
    assert (
        chance_ended_by(cdf, model.edges, np.array([4000.0]), np.array([[4096.0]]))[
            0, 0
        ]
        == 1.0
    )


def test_a_problems_own_lengths_outweigh_the_population_as_they_grow_in_number() -> (
    None
):
    population = {p: [100] * 4 for p in range(20)}
    expected = []
    for n in (1, 4, 16):
        log = LengthLog()
        log.add(of({**population, 99: [1000] * n}))
        expected.append(log.predictions()[99])
    assert expected == sorted(expected)
    assert expected[0] < 600
    assert expected[-1] > 850


def test_distribution_functions_rise_from_nothing_to_one() -> None:
    model = trained(MIXED)
    for problem in (0, 20, 999):
        cdf = model.cdf(problem)
        assert np.all(np.diff(cdf) >= -1e-12)
        assert cdf[-1] == 1.0
        assert cdf[0] < 0.01


def test_a_prediction_lies_between_a_problem_s_mean_and_that_of_all() -> None:
    log = LengthLog()
    lengths = {1: [5, 700, 700, 90], 2: [4096], 3: [1] * 9}
    assert log.predictions() == {}
    for responses in np.array_split(of(lengths), 5):  # as they arrive
        log.add(responses)
    everyone = float(np.mean([n for own in lengths.values() for n in own]))
    for problem, own in lengths.items():
        low, high = sorted((float(np.mean(own)), everyone))
        assert low < log.predictions()[problem] < high


def test_lengths_are_remembered_for_a_problem_s_own_visits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("das_adapter.core.tuning.LENGTHS_WINDOW", 2)
    log = LengthLog()
    for version, tokens in ((3, 100), (50, 1000), (7, 1000)):
        log.add(rows((1, tokens, version), (2, 100, 3)))
    lengths = log.predictions()
    assert lengths[1] > 500 > lengths[2] > 50
    model = LengthModel(4096)
    model.observe(log.since(0))
    model.observe(rows((1, 100, 4)))  # it arrives late, and two later visits are known
    assert model.lengths_of(1).tolist() == [1000, 1000]
    assert model.lengths_of(2).tolist() == [100, 100, 100]


def test_what_is_remembered_of_a_problem_takes_little_more_than_its_lengths() -> None:
    model = LengthModel()
    problems = 500
    tracemalloc.start()
    for version in range(8):
        model.observe(of({problem: [300] * 4 for problem in range(problems)}, version))
    assert tracemalloc.get_traced_memory()[0] / problems < 2000
    tracemalloc.stop()


def test_a_server_whose_weights_stay_remembers_its_last_lengths() -> None:
    model = LengthModel()
    for tokens in (100, 300):
        model.observe(np.full(2**18, np.array((1, tokens, 0), RESPONSE)))
    model.refit()
    assert np.array_equal(model.lengths_of(1), np.full(2**18, 300.0))
    assert model.bounds == (300.0, 300.0)


def test_the_problems_not_seen_for_longest_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LengthModel, "PROBLEMS", 2)
    log = LengthLog()
    for problem, version in ((1, 0), (2, 0), (1, 1), (1, 1), (3, 1)):
        log.add(rows((problem, 100, version)))
    assert log.predictions().keys() == {1, 3}
    log.add(rows(*((problem, 100, 2) for problem in (4, 5))))  # in the place of the two
    assert log.predictions().keys() == {4, 5}


def test_one_response_of_a_problem_does_not_decide_how_long_the_next_is() -> None:
    model = trained({**MIXED, 30: [1500]})
    own = model.cdf(30)
    population = model.cdf(10**6)
    at = int(np.searchsorted(model.edges, 300))
    prior = tuning.LENGTH_PRIOR_RESPONSES
    assert population[at] > 0.5
    assert own[at] == pytest.approx(population[at] * prior / (1 + prior), abs=0.01)
