"""How decode steps are timed, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from das_adapter.engine.timing import StepTimer, an_eighth_apart

SLOTS = np.arange(2)
GOT = np.ones(2, dtype=np.int64)


def scheduled(
    tokens: dict[str, int], drafts: int = 0, new: tuple[str, ...] = ()
) -> Any:
    """Return a step as vLLM's scheduler tells of it: the tokens of its requests, of
    which the first has some drafts.
    """
    first = next(iter(tokens), "")
    return SimpleNamespace(
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        scheduled_new_reqs=list(new),
        scheduled_spec_decode_tokens={first: [0] * drafts} if drafts else {},
    )


def timed(first: Any, second: Any) -> float | None:
    """Return the seconds of a step that began at 1 s, where the next began at 3 s."""
    timer = StepTimer()
    timer.begin_step(first, 1.0)
    timer.record_sampled(SLOTS, GOT)
    step = timer.begin_step(second, 3.0)
    return None if step is None else step.seconds


DECODES = scheduled({"a": 1, "b": 1})


def test_a_step_that_reads_a_prompt_is_not_timed() -> None:
    assert timed(DECODES, DECODES) == 2.0
    assert timed(scheduled({"a": 4, "b": 1}, drafts=3), DECODES) == 2.0
    assert timed(scheduled({"a": 5, "b": 1}, drafts=3), DECODES) is None
    assert timed(scheduled({"a": 1, "b": 1}, new=("b",)), DECODES) is None


def test_a_pause_without_requests_is_no_part_of_a_step() -> None:
    assert timed(DECODES, scheduled({"c": 4}, new=("c",))) is None
    assert timed(DECODES, scheduled({"b": 1, "c": 4}, new=("c",))) == 2.0


def test_of_many_sizes_those_are_kept_that_are_an_eighth_apart() -> None:
    kept = an_eighth_apart(range(1, 37))
    assert kept[:9] == [36, 32, 28, 24, 21, 18, 16, 14, 12]
    assert kept[9:] == [10, 8, 7, 6, 5, 4, 3, 2, 1]
    assert an_eighth_apart([]) == []
