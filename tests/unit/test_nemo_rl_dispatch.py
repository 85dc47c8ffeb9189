"""The part of the NeMo-RL adapter that needs no NeMo-RL: identity."""

from __future__ import annotations

import numpy as np

from das_adapter.core.identity import FirstTurns, prompt_identity
from das_adapter.nemo_rl.settings import media_of
from das_adapter.protocol.label import Labeller


def ids(*tokens: int) -> np.ndarray:
    return np.asarray(tokens, dtype=np.int32)


def test_rows_of_a_batch_that_differ_only_in_their_images_have_labels_of_their_own() -> None:
    one, other = np.zeros((2, 2, 3), np.uint8), np.ones((2, 2, 3), np.uint8)
    rows = media_of({"vllm_images": [[one], [other], [one.copy()], None], "input_ids": [[1]] * 4}, 4)
    labeller = Labeller(5)
    problems = [labeller.label(ids(1), validate=False, media=media).problem for media in rows]
    assert problems[0] == problems[2]
    assert len(set(problems)) == 3
    assert problems[3] == prompt_identity([1])


def test_forgotten_prompts_begin_no_conversation() -> None:
    turns = FirstTurns(remembered=2)
    for first in (1, 2, 3):
        turns.problem(ids(first, first))
    assert turns.problem(ids(3, 3, 8)) == prompt_identity(ids(3, 3))
    assert turns.problem(ids(1, 1, 8)) == prompt_identity(ids(1, 1, 8))


def test_samples_differ_and_runs_agree() -> None:
    a, b, elsewhere = Labeller(5), Labeller(5), Labeller(5, source="1")
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
