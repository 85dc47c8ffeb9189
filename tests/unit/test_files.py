"""What others may have left is read whole or not at all, and nothing waits for it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from das_adapter.files import open_without_waiting, parse_or_skip, read_file


def odd(kind: str, path: Path) -> None:
    """Leave something that is no file of ours."""
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a directory":
        path.mkdir()
    elif kind == "a link to a pipe":
        os.mkfifo(path.with_suffix(".pipe"))
        path.symlink_to(path.with_suffix(".pipe"))
    else:
        path.write_bytes(bytes(100))


KINDS = ["a pipe", "a directory", "a link to a pipe"]


@pytest.mark.parametrize("kind", [*KINDS, "a file that is too large"])
def test_what_is_no_such_file_is_skipped_in_one_line(
    tmp_path: Path, kind: str, caplog: Any
) -> None:
    path = tmp_path / "left"
    odd(kind, path)
    for _ in range(3):
        assert parse_or_skip(path, len, "left out:", max_bytes=99) is None
    assert len(caplog.records) == 1 and str(path) in caplog.text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_CREAT])
def test_nothing_but_a_file_is_opened(tmp_path: Path, kind: str, flags: int) -> None:
    path = tmp_path / "left"
    odd(kind, path)
    with pytest.raises(OSError):
        open_without_waiting(path, flags)


def nested(content: bytes) -> Any:
    raise RecursionError("too deep")


@pytest.mark.parametrize("parse", [int, nested])
def test_a_damaged_file_costs_itself_whatever_reading_it_raises(
    tmp_path: Path, parse: Any, caplog: Any
) -> None:
    path = tmp_path / "left"
    path.write_bytes(b"x")
    assert parse_or_skip(path, parse, "left out:") is None
    assert len(caplog.records) == 1
    assert parse_or_skip(tmp_path / "gone", int, "left out:") is None
    assert len(caplog.records) == 1
    assert read_file(path) == b"x"


def test_a_file_of_just_the_allowed_size_is_read_and_a_larger_one_refused(
    tmp_path: Path,
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"four")
    assert read_file(path, max_bytes=4) == b"four"
    with pytest.raises(OSError, match="found 4 bytes, allowed: 3"):
        read_file(path, max_bytes=3)
