"""A saved index comes back whole, or not at all."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from das_adapter.core.index import IndexFileError, SuffixIndex
from das_adapter.errors import DasError

HEADER = 80


def filled(seed: int = 0) -> SuffixIndex:
    rng = np.random.default_rng(seed)
    index = SuffixIndex(max_depth=32)
    for i in range(12):
        index.add(2**63 + i % 3, rng.integers(0, 5, rng.integers(1, 40)), i // 4)
    index.seal()
    return index


def drafts(index: SuffixIndex) -> list[list[int]]:
    handles = [index.open(2**63 + p, [], prefix=[a, b]) for p in range(3) for a in range(5) for b in range(5)]
    return [d.tolist() for d in index.draft(handles, [10] * len(handles), 0.0)[0]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("index") / "history.idx"
    filled().save(path)
    return path.read_bytes()


def test_a_loaded_index_drafts_as_the_saved_one_and_goes_on_like_it(tmp_path: Path) -> None:
    index = filled()
    index.save(tmp_path / "history.idx")
    loaded = SuffixIndex.load(tmp_path / "history.idx")
    assert (loaded.nbytes, loaded.tokens, loaded.problems) == (index.nbytes, index.tokens, index.problems)
    assert loaded.max_depth == 32
    assert drafts(loaded) == drafts(index)
    assert any(drafts(loaded))
    SuffixIndex.check(tmp_path / "history.idx")
    for one in (index, loaded):
        one.add(2**63, [1, 2, 3, 4, 1, 2], 3)
        one.seal(window=2)
    assert (loaded.nbytes, loaded.tokens) == (index.nbytes, index.tokens)
    assert drafts(loaded) == drafts(index)


def test_an_empty_index_and_a_relative_path_are_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    SuffixIndex().save("empty.idx")
    assert SuffixIndex.load("empty.idx").tokens == 0


def test_saving_replaces_the_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "history.idx"
    SuffixIndex().save(path)
    filled().save(path)
    assert SuffixIndex.load(path).tokens == filled().tokens
    assert [p.name for p in tmp_path.iterdir()] == ["history.idx"]


def test_a_failed_save_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "history.idx"
    path.mkdir()
    with pytest.raises(OSError, match=r"history\.idx"):
        filled().save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["history.idx"]


def test_a_missing_file_or_folder_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        SuffixIndex.load(tmp_path / "none.idx")
    with pytest.raises(OSError):
        SuffixIndex().save(tmp_path / "none" / "history.idx")


def test_a_file_cut_anywhere_is_refused(tmp_path: Path, saved: bytes) -> None:
    path = tmp_path / "cut.idx"
    for size in [*range(HEADER + 40), *range(HEADER + 40, len(saved), 97), len(saved) - 1]:
        path.write_bytes(saved[:size])
        for read in (SuffixIndex.load, SuffixIndex.check):
            with pytest.raises(IndexFileError, match=r"cut\.idx"):
                read(path)


@pytest.mark.parametrize("change", ["longer", "swapped"])
def test_other_damage_is_refused(tmp_path: Path, saved: bytes, change: str) -> None:
    path = tmp_path / "damaged.idx"
    middle = len(saved) // 2 // 8 * 8
    swapped = saved[:middle] + saved[middle + 8 : middle + 16] + saved[middle : middle + 8] + saved[middle + 16 :]
    path.write_bytes(saved + b"\0" if change == "longer" else swapped)
    with pytest.raises(IndexFileError):
        SuffixIndex.load(path)


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "foreign.idx"
    path.write_bytes(b"PK\x03\x04" + bytes(1000))
    with pytest.raises(IndexFileError, match="not a file of a suffix index"):
        SuffixIndex.load(path)


@pytest.mark.parametrize("other", [2, 4])
def test_another_format_is_named(tmp_path: Path, saved: bytes, other: int) -> None:
    path = tmp_path / "newer.idx"
    path.write_bytes(saved[:8] + struct.pack("=Q", other) + saved[16:])
    with pytest.raises(DasError, match=f"format version is {other}, this program reads 3"):
        SuffixIndex.load(path)
