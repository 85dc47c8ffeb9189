"""A trainer whose next batch is looked at reads, saves and resumes as one whose is not."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("torchdata")
import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

from das_adapter.service.look_ahead import LookAhead

ROWS, BATCH = 14, 4  # three batches an epoch, and two rows that are left out


def loader(workers: int = 0) -> StatefulDataLoader:
    order = RandomSampler(range(ROWS), generator=torch.Generator().manual_seed(5))
    return StatefulDataLoader(list(range(ROWS)), BATCH, sampler=order, num_workers=workers, drop_last=True)


def train(batches: Any, steps: int, iterator: Any = None, looks: Any = lambda: False) -> list[tuple[Any, Any]]:
    """Take batches as veRL's trainer does; return each with the state that a checkpoint behind it has."""
    found = []
    for _ in range(steps):
        iterator = iter(batches) if iterator is None else iterator
        try:
            batch = next(iterator)
        except StopIteration:
            iterator = iter(batches)
            batch = next(iterator)
        seen = batches.peek() if looks() else None
        found.append((batch.tolist(), batches.state_dict()))
        if seen is not None:
            assert batches.peek() is seen
    return found


def test_batches_and_saved_states_are_those_of_the_loader_alone() -> None:
    alone = train(loader(), 11)
    chosen = random.Random(1)
    for looks in (lambda: True, lambda: chosen.random() < 0.5):
        assert str(train(LookAhead(loader()), 11, looks=looks)) == str(alone)


@pytest.mark.parametrize("steps", range(1, 8))
def test_a_run_resumed_from_a_state_behind_a_look_reads_the_same_batches(steps: int) -> None:
    alone = [batch for batch, _ in train(loader(), 11)]
    _, state = train(LookAhead(loader()), steps, looks=lambda: True)[-1]
    resumed = loader()
    resumed.load_state_dict(state)
    assert [batch for batch, _ in train(LookAhead(resumed), 11 - steps, looks=lambda: True)] == alone[steps:]


def test_the_batch_that_is_seen_is_the_next_one_and_none_at_the_end_of_an_epoch() -> None:
    batches = LookAhead(loader())
    seen = [(batch.tolist(), None if (after := batches.peek()) is None else after.tolist()) for batch in batches]
    assert [after for _, after in seen] == [*(batch for batch, _ in seen[1:]), None]


def test_the_random_numbers_of_the_process_are_not_touched() -> None:
    states = []
    for batches, looks in ((loader(), False), (LookAhead(loader()), True)):
        torch.manual_seed(3)
        train(batches, 7, looks=lambda looks=looks: looks)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_it_has_what_the_loader_has() -> None:
    batches = LookAhead(loader())
    assert len(batches) == 3
    assert batches.batch_size == BATCH
    with pytest.raises(AttributeError, match="nonsense"):
        _ = batches.nonsense


def test_a_batch_that_cannot_be_read_is_an_error_when_it_is_taken() -> None:
    class Broken(list[int]):
        def __getitem__(self, row: Any) -> Any:
            if row == 5:
                raise OSError("no such row")
            return super().__getitem__(row)

    batches = LookAhead(StatefulDataLoader(Broken(range(8)), BATCH))
    iterator = iter(batches)
    assert next(iterator).tolist() == [0, 1, 2, 3]
    assert batches.peek() is None
    with pytest.raises(OSError, match="no such row"):
        next(iterator)
