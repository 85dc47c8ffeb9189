"""The list of published batches is exact, and small."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from das_adapter.service.batches import Batches

NUMBERS = st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 12)))


@given(first=NUMBERS, second=NUMBERS)
def test_it_is_the_set_of_what_was_added(
    first: list[tuple[str, int]], second: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "batches"
    path.unlink(missing_ok=True)
    batches = Batches.read(path)
    batches.update(first)
    batches.write(path)
    batches = Batches.read(path)
    batches.update(second)
    everything = {(source, number) for source in "abc" for number in range(14)}
    assert {batch for batch in everything if batch in batches and batch[1]} == {*first, *second}


def test_a_sender_that_goes_on_for_ever_takes_no_room(tmp_path: Path) -> None:
    batches = Batches()
    batches.update(("a", number) for number in range(1, 10_001) if number != 9_000)
    batches.write(tmp_path / "batches")
    assert (tmp_path / "batches").stat().st_size > 1000
    batches.update([("a", 9_000), ("a", 5)])
    batches.write(tmp_path / "batches")
    assert (tmp_path / "batches").stat().st_size < 20
    assert (tmp_path / "batches").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["batches"]
