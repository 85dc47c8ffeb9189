"""What a neural drafter on vLLM's V2 runner has missed of its requests' texts comes
before what the step has read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")
import torch

from das_adapter.engine.v2.reading import Inputs, MissedText

TEXTS = torch.arange(64, dtype=torch.int32).expand(4, 64)
"""Every token is its position, and so is what the policy makes of it."""


@dataclass
class Batch:
    """Of vLLM's `InputBatch`, what is read: each request's tokens of a step, from a
    position on.
    """

    req_ids: list[str]
    begins: list[int]
    counts: list[int]
    is_prefilling_np: np.ndarray = field(
        default_factory=lambda: np.zeros(2, dtype=bool)
    )
    num_tokens_after_padding: int = 0
    num_scheduled_tokens: Any = None
    decode_graph_eligible: bool = True
    num_tokens: int = 0
    query_start_loc_np: Any = None
    query_start_loc: Any = None
    input_ids: Any = None
    positions: Any = None
    num_draft_tokens: int = 0
    num_draft_tokens_per_req: Any = None
    num_reqs: int = 2
    idx_mapping: Any = field(default_factory=lambda: torch.arange(2))


def inputs(begins: list[int], counts: list[int], prefills: bool = False) -> Inputs:
    """Return a step of some requests; `prefills`: the last reads its prompt."""
    made = Batch(
        [*"abc"[: len(begins)]],
        begins,
        counts,
        np.zeros(len(begins), dtype=bool),
        num_tokens=sum(counts),
    )
    made.is_prefilling_np[-1] = prefills
    made.num_reqs = len(begins)
    made.idx_mapping = torch.arange(len(begins))
    made.num_scheduled_tokens = np.array(counts, dtype=np.int32)
    made.query_start_loc_np = np.cumsum([0, *counts], dtype=np.int32)
    made.query_start_loc = torch.from_numpy(made.query_start_loc_np)
    made.positions = torch.cat(
        [torch.arange(b, b + n) for b, n in zip(begins, counts, strict=True)]
    )
    made.input_ids = made.positions.int()
    return Inputs(made, {}, {}, made.positions[:, None].float(), None)


def read_up(step: Inputs, room: int = 64) -> Any:
    """Return the batch that is read in a step, after three in which the drafter did not
    run.
    """
    speculator = type("DFlashSpeculator", (SimpleNamespace,), {})(
        max_num_tokens=room, num_extra_query_per_req=0
    )
    missed = MissedText(speculator, TEXTS)
    for at in (20, 21, 22):
        missed.miss(inputs([at, at + 20], [1, 1]))
    found = missed.read_up(step)
    for same in (found.batch.input_ids, found.hidden[:, 0]):
        assert same.tolist() == found.batch.positions.tolist()
    assert missed.read_up(step) is step
    return found.batch


def read(step: Inputs, room: int = 64) -> list[int]:
    """Return the positions that are read in such a step."""
    return list(read_up(step, room).positions.tolist())


def test_what_was_missed_comes_first() -> None:
    assert read(inputs([23, 43], [2, 1])) == [20, 21, 22, 23, 24, 40, 41, 42, 43]


def test_a_request_that_was_preempted_since_is_read_anew() -> None:
    assert read(inputs([23, 0], [1, 4], prefills=True)) == [20, 21, 22, 23, 0, 1, 2, 3]


@pytest.mark.parametrize(("room", "first"), [(11, [20, 21, 22]), (10, [])])
def test_no_more_is_read_than_the_drafter_has_room_for(
    room: int, first: list[int]
) -> None:
    """vLLM's scheduler fills a step up to `max_num_tokens` with prompts, and the
    drafter's buffers hold no more.
    """
    assert read(inputs([23, 43], [7, 1]), room) == [*first, *range(23, 30), 43]


@pytest.mark.parametrize("prompt", [2, 30])
@pytest.mark.parametrize("admitted", [(16, 0), (0, 16), (5, 11)])
def test_no_request_is_longer_than_the_longest_one_that_attention_is_told_of(
    admitted: tuple[int, int], prompt: int
) -> None:
    """The host knows how many drafts are in the step, of the sixteen that each request
    could have, but not whose.
    """
    step = inputs(
        [23, 43, 0], [1 + admitted[0], 1 + admitted[1], prompt], prefills=True
    )
    batch: Any = step.batch
    batch.num_scheduled_tokens = np.array([17, 17, prompt], dtype=np.int32)
    batch.num_draft_tokens = 16
    batch.num_draft_tokens_per_req = np.array([16, 16, 0], dtype=np.int32)
    batch.query_start_loc_np = np.cumsum([0, 9, 9, prompt], dtype=np.int32)
    found = read_up(step)
    told = np.diff(found.query_start_loc_np)
    real = found.query_start_loc.diff().numpy()
    assert (told.sum(), told[2]) == (real.sum(), prompt) and told.max() >= real.max()
