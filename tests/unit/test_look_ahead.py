"""A trainer whose next batches are looked at reads, saves and resumes as one whose are
not.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

pytest.importorskip("torchdata")
import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

from das_adapter.service.run_ahead import LookAhead

# three batches an epoch, and two rows that are left out
ROWS = 14
BATCH = 4


def loader(workers: int = 0) -> StatefulDataLoader:
    order = RandomSampler(range(ROWS), generator=torch.Generator().manual_seed(5))
    return StatefulDataLoader(
        list(range(ROWS)), BATCH, sampler=order, num_workers=workers, drop_last=True
    )


def train(
    batches: Any, steps: int, iterator: Any = None, looks: Any = lambda: 0
) -> list[tuple[Any, Any]]:
    """Take batches as veRL's trainer does; return each with the state that a checkpoint
    behind it has. `looks`: at how many batches.
    """
    found = []
    for _ in range(steps):
        iterator = iter(batches) if iterator is None else iterator
        try:
            batch = next(iterator)
        except StopIteration:
            iterator = iter(batches)
            batch = next(iterator)
        seen = batches.peek(count) if (count := looks()) else []
        found.append((batch.tolist(), batches.state_dict()))
        assert all(
            a is b
            for a, b in zip(seen, batches.peek(len(seen)) if seen else [], strict=True)
        )
    return found


def test_batches_and_saved_states_are_those_of_the_loader_alone() -> None:
    alone = train(loader(), 11)
    chosen = random.Random(1)
    for looks in (lambda: 1, lambda: 2, lambda: 9, lambda: chosen.randrange(4)):
        assert str(train(LookAhead(loader()), 11, looks=looks)) == str(alone)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("steps", range(1, 8))
def test_a_run_resumed_from_a_state_behind_a_look_reads_the_same_batches(
    steps: int, count: int
) -> None:
    alone = [batch for batch, _ in train(loader(), 11)]
    _, state = train(LookAhead(loader()), steps, looks=lambda: count)[-1]
    resumed = loader()
    resumed.load_state_dict(state)
    assert [
        batch for batch, _ in train(LookAhead(resumed), 11 - steps, looks=lambda: count)
    ] == alone[steps:]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_batches_that_are_seen_are_the_next_ones_up_to_the_end_of_an_epoch(
    count: int,
) -> None:
    batches = LookAhead(loader())
    taken, seen = zip(
        *(
            (batch.tolist(), [s.tolist() for s in batches.peek(count)])
            for batch in batches
        ),
        strict=True,
    )
    assert list(seen) == [[*taken[number : number + count]] for number in (1, 2, 3)]


def test_the_random_numbers_of_the_process_are_not_touched() -> None:
    states = []
    for batches, looks in ((loader(), 0), (LookAhead(loader()), 2)):
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
    assert batches.peek(2) == []
    with pytest.raises(OSError, match="no such row"):
        next(iterator)


def test_a_copy_looks_ahead_too() -> None:
    assert [batch.tolist() for batch in copy.copy(LookAhead(loader()))] == [
        b.tolist() for b in loader()
    ]
