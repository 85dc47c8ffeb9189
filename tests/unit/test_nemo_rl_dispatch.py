"""The parts of the NeMo-RL adapter that need no NeMo-RL: identity and dispatch."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from das_adapter.core.identity import FirstTurns, prompt_identity
from das_adapter.core.routing import least_loaded, longest_first
from das_adapter.nemo_rl.identity import Labeller


def ids(*tokens: int) -> np.ndarray:
    return np.asarray(tokens, dtype=np.int32)


def test_later_turns_belong_to_the_problem_of_the_first() -> None:
    turns = FirstTurns()
    first = turns.problem(ids(1, 2, 3))
    assert first == prompt_identity(ids(1, 2, 3))
    assert turns.problem(ids(1, 2, 3, 9, 9, 4)) == first
    assert turns.problem(ids(1, 2, 3, 7, 4, 9, 9, 5)) == first
    assert turns.problem(ids(1, 2, 4, 9)) == prompt_identity(ids(1, 2, 4, 9))
    assert turns.problem(ids(1, 2)) == prompt_identity(ids(1, 2))


def test_forgotten_prompts_begin_no_conversation() -> None:
    turns = FirstTurns(remembered=2)
    for first in (1, 2, 3):
        turns.problem(ids(first, first))
    assert turns.problem(ids(3, 3, 8)) == prompt_identity(ids(3, 3))
    assert turns.problem(ids(1, 1, 8)) == prompt_identity(ids(1, 1, 8))


def test_samples_differ_and_runs_agree() -> None:
    a, b, elsewhere = Labeller(5), Labeller(5), Labeller(5, source=1)
    prompts = [ids(1), ids(1), ids(2), ids(1)]
    labels = [a.label(p, validate=False) for p in prompts]
    assert labels == [b.label(p, validate=False) for p in prompts]
    assert len({label.seed for label in labels}) == 4
    assert len({label.problem for label in labels}) == 2
    assert elsewhere.label(ids(1), validate=False).seed not in {label.seed for label in labels}


def test_a_validation_shifts_no_training_sample() -> None:
    plain, validated = Labeller(0), Labeller(0)
    assert not validated.label(ids(1), validate=True).record
    label = validated.label(ids(1), validate=False)
    assert label == plain.label(ids(1), validate=False)
    assert label.record


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=40),
    st.dictionaries(st.integers(0, 9), st.floats(1, 1e4)),
    st.integers(1, 5),
)
def test_a_plan_has_every_row_once_and_the_longest_first(
    problems: list[int], lengths: dict[int, float], workers: int
) -> None:
    plan = longest_first(problems, lengths, workers)
    assert sorted(row for rows in plan for row in rows) == list(range(len(problems)))
    assert len(plan) == workers
    mean = sum(lengths.values()) / len(lengths) if lengths else 1.0
    for rows in plan:
        expected = [lengths.get(problems[row], mean) for row in rows]
        assert expected == sorted(expected, reverse=True)
    if len(problems) >= workers and len(set(problems)) == 1:
        assert max(map(len, plan)) - min(map(len, plan)) <= 1
    if len(set(problems)) >= 2 * workers:
        homes: dict[int, set[int]] = {}
        for worker, rows in enumerate(plan):
            for row in rows:
                homes.setdefault(problems[row], set()).add(worker)
        assert all(len(workers_) == 1 for workers_ in homes.values())


def test_the_load_is_within_one_problem_of_even() -> None:
    lengths = {0: 900.0, 1: 400.0, 2: 300.0, 3: 200.0}
    problems = [p for p in range(4) for _ in range(2)]
    load = sorted(sum(lengths[problems[row]] for row in rows) for rows in longest_first(problems, lengths, 2))
    assert load == [1800.0, 1800.0]


def test_a_request_goes_home_only_if_that_costs_nothing() -> None:
    assert least_loaded([3, 1, 1], home=2) == 2
    assert least_loaded([3, 1, 1], home=0) == 1
    assert least_loaded([0, 0], home=None) == 0
