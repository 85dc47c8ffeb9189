"""The part of the NeMo-RL adapter that needs no NeMo-RL: identity."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from das_adapter.core import identity
from das_adapter.core.identity import FirstTurns, media_hash, prompt_identity
from das_adapter.nemo_rl.settings import (
    logs_figures,
    media_of,
    run_ahead_obstacle,
    samples_of,
)
from das_adapter.protocol.label import Labeller


def ids(*tokens: int) -> np.ndarray:
    return np.asarray(tokens, dtype=np.int32)


def test_rows_of_a_batch_that_differ_only_in_their_images_have_labels_of_their_own() -> (
    None
):
    one = np.zeros((2, 2, 3), np.uint8)
    other = np.ones((2, 2, 3), np.uint8)
    rows = media_of(
        {"vllm_images": [[one], [other], [one.copy()], None], "input_ids": [[1]] * 4}, 4
    )
    labeller = Labeller(5)
    problems = [
        labeller.label(ids(1), validate=False, media=media).problem for media in rows
    ]
    assert problems[0] == problems[2]
    assert len(set(problems)) == 3
    assert problems[3] == prompt_identity([1])


def test_images_that_nemo_rl_copies_for_each_sample_are_hashed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also those of single samples, as an asynchronous engine gets them."""
    hashed: list[tuple[int, ...]] = []

    def values_hash(values: np.ndarray) -> str:
        hashed.append(values.shape)
        return stock(values)

    image = np.zeros((4, 4, 3), np.uint8)
    sound = np.zeros(8, np.float32)
    rows = [
        [image, (sound, {"rate": 8})],
        [image + 1, (sound, {"rate": 8})],
        [image + 1, (sound, {"rate": 9})],
        [sound],
    ]
    expected = [[media_hash(item) for item in row] for row in rows for _ in range(3)]
    copies = [deepcopy(row) for row in rows for _ in range(3)]
    stock = identity.values_hash
    monkeypatch.setattr(identity, "values_hash", values_hash)
    assert media_of({"vllm_images": copies}, 12) == expected
    assert [shape for shape in hashed if len(shape) == 3] == [(4, 4, 3)] * 2
    assert hashed.count((8,)) == 2
    for row in range(12):
        assert media_of({"vllm_images": [deepcopy(copies[row])]}, 1) == [expected[row]]
    assert [shape for shape in hashed if len(shape) == 3] == [(4, 4, 3)] * 4


def test_forgotten_prompts_begin_no_conversation() -> None:
    turns = FirstTurns(remembered=2)
    for first in (1, 2, 3):
        turns.problem(ids(first, first))
    assert turns.problem(ids(3, 3, 8)) == prompt_identity(ids(3, 3))
    assert turns.problem(ids(1, 1, 8)) == prompt_identity(ids(1, 1, 8))


def test_samples_differ_and_runs_agree() -> None:
    a = Labeller(5)
    b = Labeller(5)
    elsewhere = Labeller(5, source="1")
    prompts = [ids(1), ids(1), ids(2), ids(1)]
    labels = [a.label(p, validate=False) for p in prompts]
    assert labels == [b.label(p, validate=False) for p in prompts]
    assert len({label.seed for label in labels}) == 4
    assert len({label.problem for label in labels}) == 2
    assert elsewhere.label(ids(1), validate=False).seed not in {
        label.seed for label in labels
    }


@pytest.mark.parametrize("counted", [2, Labeller.COUNTED])
def test_later_turns_have_equal_seeds_in_whatever_order_they_come(
    counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tool answers one sample of a problem earlier than another, and the next time
    later.
    """
    monkeypatch.setattr(Labeller, "COUNTED", counted)
    turns = [ids(1, 4), ids(1, 5, 5), ids(1, 4)]

    def labels(order: list[int]) -> dict[int, list[tuple[int | None, int | None]]]:
        labeller = Labeller(5)
        found = dict[int, list[tuple[int | None, int | None]]]()
        for prompt in [
            ids(1),
            ids(1),
            ids(1),
            *(turns[turn] for turn in order),
            ids(1),
        ]:
            label = labeller.label(prompt, validate=False)
            found.setdefault(prompt_identity(prompt), []).append(
                (label.problem, label.seed)
            )
        return found

    first = labels([0, 1, 2])
    assert first == labels([1, 0, 2]) == labels([2, 1, 0])
    made = [label for of_prompt in first.values() for label in of_prompt]
    assert {problem for problem, _ in made} == {prompt_identity(ids(1))}
    assert len({seed for _, seed in made}) == len(made) == 7


def test_later_turns_shift_no_later_sample_of_their_problem() -> None:
    """What is written ahead of these has the seed that they will have."""
    single = Labeller(5)
    turns = Labeller(5)
    for prompt in (ids(1), ids(1, 4), ids(1, 4, 6)):
        turns.label(prompt, validate=False)
    single.label(ids(1), validate=False)
    assert turns.has_later_turns and not single.has_later_turns
    assert turns.label(ids(1), validate=False) == single.label(ids(1), validate=False)


def test_a_validation_shifts_no_training_sample() -> None:
    plain = Labeller(0)
    validated = Labeller(0)
    assert not validated.label(ids(1), validate=True).record
    label = validated.label(ids(1), validate=False)
    assert label == plain.label(ids(1), validate=False)
    assert label.record


@pytest.mark.parametrize("guesses", [True, False])
def test_later_turns_are_a_validations_if_their_first_turn_was_where_that_is_guessed(
    guesses: bool,
) -> None:
    """NeMo-Gym's requests do not say what they are for, and training goes on while an
    asynchronous run validates.
    """
    labeller = Labeller(5, guesses=guesses)

    def recorded(validating: bool, *prompts: np.ndarray) -> list[bool]:
        return [
            labeller.label(prompt, validate=validating).record for prompt in prompts
        ]

    for _ in range(2):
        assert recorded(False, ids(1), ids(1, 4)) == [True, True]
        assert recorded(True, ids(2), ids(2, 4), ids(1, 4, 5)) == [
            False,
            False,
            guesses,
        ]
        assert recorded(False, ids(2, 4, 6), ids(3)) == [not guesses, True]
    assert recorded(False, ids(2), ids(2, 4)) == [True, True]


def test_a_labellers_copy_foresees_its_labels_and_leaves_it_as_it_is() -> None:
    one = Labeller(5)
    other = Labeller(5)
    for labeller in (one, other):
        labeller.label(ids(1), validate=False)
    coming = [ids(2), ids(1), ids(2), ids(2, 7), ids(1, 3)]
    copied = one.copy()
    foreseen = [copied.label(prompt, validate=False) for prompt in coming]
    later = ids(2, 7, 8)  # the copy has seen what it begins with
    assert (
        copied.label(later, validate=False).problem
        != one.label(later, validate=False).problem
    )
    other.label(later, validate=False)
    labels = [one.label(prompt, validate=False) for prompt in coming]
    assert (
        labels == foreseen == [other.label(prompt, validate=False) for prompt in coming]
    )


GRPO = "nemo_rl.algorithms.grpo"


def run(**changed: Any) -> Any:
    grpo = {
        "async_grpo": SimpleNamespace(enabled=False),
        "use_dynamic_sampling": False,
        **changed,
    }
    engine = {"async_engine": changed.get("async_engine", True)}
    return SimpleNamespace(
        grpo=SimpleNamespace(**grpo),
        policy={"generation": {"vllm_cfg": engine}},
        data_plane=changed.get("data_plane"),
        env={"should_use_nemo_gym": changed.get("gym", False)},
        data={"use_multiple_dataloader": changed.get("several", False)},
    )


@pytest.mark.parametrize(
    ("algorithm", "config", "why"),
    [
        (GRPO, {}, None),
        (GRPO, {"data_plane": {"enabled": False}}, None),
        ("nemo_rl.algorithms.ppo", {}, "grpo alone"),
        (GRPO, {"async_grpo": SimpleNamespace(enabled=True)}, "take turns"),
        (GRPO, {"data_plane": {"enabled": True}}, "data_plane"),
        (GRPO, {"async_engine": False}, "vllm_cfg.async_engine=false"),
        (GRPO, {"gym": True}, "NeMo-Gym"),
        (GRPO, {"use_dynamic_sampling": True}, "depends on the rollouts"),
        (GRPO, {"several": True}, "custom_dataloader"),
    ],
)
def test_where_the_next_batch_is_not_known_it_says_so(
    algorithm: str, config: dict[str, Any], why: str | None
) -> None:
    said = run_ahead_obstacle(algorithm, run(**config))
    assert said is None if why is None else why in (said or "")


def test_trainers_that_ask_for_no_figures_are_known() -> None:
    def ppo(asynchronous: bool) -> Any:
        return SimpleNamespace(
            ppo=SimpleNamespace(async_ppo=SimpleNamespace(enabled=asynchronous))
        )

    assert logs_figures(GRPO, run())
    assert logs_figures("nemo_rl.algorithms.ppo", ppo(False))
    assert not logs_figures("nemo_rl.algorithms.ppo", ppo(True))
    assert not logs_figures("nemo_rl.algorithms.distillation", SimpleNamespace())
    assert not logs_figures("nemo_rl.algorithms.single_controller_utils.setup", run())


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "distillation"])
def test_every_algorithm_says_how_many_samples_a_prompt_has(algorithm: str) -> None:
    assert (
        samples_of(
            SimpleNamespace(
                **{algorithm: SimpleNamespace(num_generations_per_prompt=8)}
            )
        )
        == 8
    )
    assert samples_of(SimpleNamespace(**{algorithm: None})) == 1
