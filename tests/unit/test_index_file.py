"""A saved index comes back whole, or not at all."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from das_adapter.core.index import IndexFileError, SuffixIndex
from das_adapter.core.index.store import HistoryStore
from das_adapter.errors import DasError

HEADER = 80


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("index")
    with filled(folder / "store") as store:
        store.save(folder / "history.idx")
    return (folder / "history.idx").read_bytes()


def filled(directory: Path) -> HistoryStore:
    rng = np.random.default_rng(0)
    store = HistoryStore(directory)
    for i in range(12):
        store.add(2**63 + i % 3, rng.integers(0, 5, rng.integers(1, 40)), i // 4)
    store.seal()
    return store


def drafts(store: HistoryStore) -> list[list[int]]:
    index = SuffixIndex.attach(store.directory)
    handles = [
        index.open(2**63 + p, [], prefix=[a, b])
        for p in range(3)
        for a in range(5)
        for b in range(5)
    ]
    return [d.tolist() for d in index.draft(handles, [10] * len(handles), 0.0)[0]]


def test_a_store_that_takes_a_saved_one_in_drafts_as_it_and_goes_on_like_it(
    tmp_path: Path,
) -> None:
    with filled(tmp_path / "one") as one, HistoryStore(tmp_path / "other") as other:
        one.save(tmp_path / "history.idx")
        SuffixIndex.check(tmp_path / "history.idx")
        other.absorb(tmp_path / "history.idx")
        other.seal()
        assert (other.nbytes, other.tokens, other.problems) == (
            one.nbytes,
            one.tokens,
            one.problems,
        )
        assert drafts(other) == drafts(one)
        assert any(drafts(other))
        for store in (one, other):
            store.add(2**63, [1, 2, 3, 4, 1, 2], 3)
            store.window = 2
            store.seal()
        assert (other.nbytes, other.tokens) == (one.nbytes, one.tokens)
        assert drafts(other) == drafts(one)


def test_an_empty_history_and_a_relative_path_are_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with HistoryStore("store") as store:
        store.save("empty.idx")
        store.absorb("empty.idx")
        assert store.tokens == 0


def test_saving_replaces_the_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "saved" / "history.idx"
    path.parent.mkdir()
    path.touch()
    with filled(tmp_path / "store") as store:
        store.save(path)
        SuffixIndex.check(path)
        assert [p.name for p in path.parent.iterdir()] == ["history.idx"]


def test_a_failed_save_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "saved" / "history.idx"
    path.mkdir(parents=True)
    with (
        filled(tmp_path / "store") as store,
        pytest.raises(OSError, match=r"history\.idx"),
    ):
        store.save(path)
    assert [p.name for p in path.parent.iterdir()] == ["history.idx"]


def test_a_missing_file_or_folder_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        SuffixIndex.check(tmp_path / "none.idx")
    with HistoryStore(tmp_path / "store") as store, pytest.raises(OSError):
        store.save(tmp_path / "none" / "history.idx")


def test_a_file_cut_anywhere_is_refused(tmp_path: Path, saved: bytes) -> None:
    path = tmp_path / "cut.idx"
    for size in [
        *range(HEADER + 40),
        *range(HEADER + 40, len(saved), 97),
        len(saved) - 1,
    ]:
        path.write_bytes(saved[:size])
        with pytest.raises(IndexFileError, match=r"cut\.idx"):
            SuffixIndex.check(path)


@pytest.mark.parametrize("change", ["longer", "swapped"])
def test_other_damage_is_refused(tmp_path: Path, saved: bytes, change: str) -> None:
    path = tmp_path / "damaged.idx"
    middle = len(saved) // 2 // 8 * 8
    swapped = (
        saved[:middle]
        + saved[middle + 8 : middle + 16]
        + saved[middle : middle + 8]
        + saved[middle + 16 :]
    )
    path.write_bytes(saved + b"\0" if change == "longer" else swapped)
    with pytest.raises(IndexFileError):
        SuffixIndex.check(path)


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "foreign.idx"
    path.write_bytes(b"PK\x03\x04" + bytes(1000))
    with pytest.raises(IndexFileError, match="not a file of a suffix index"):
        SuffixIndex.check(path)


@pytest.mark.parametrize("other", [2, 4])
def test_another_format_is_named(tmp_path: Path, saved: bytes, other: int) -> None:
    path = tmp_path / "newer.idx"
    path.write_bytes(saved[:8] + struct.pack("=Q", other) + saved[16:])
    with pytest.raises(
        DasError, match=f"format version is {other}, this program reads 3"
    ):
        SuffixIndex.check(path)
