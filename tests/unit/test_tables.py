"""The files that users have: in every format that is read, and what is said of others."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from das_adapter import tables
from das_adapter.cli import main
from das_adapter.errors import DasError

ROWS = [{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.25}]
LINES = "\n".join(map(json.dumps, ROWS))


def parquet(path: Path) -> None:
    tables = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    tables.write_table(pyarrow.Table.from_pylist(ROWS), path)


def table(path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ROWS[0])
        writer.writeheader()
        writer.writerows(ROWS)


def zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.jsonl", LINES)


GOOD: dict[str, tuple[Callable[[Path], object], str]] = {
    "lines": (lambda path: path.write_text(LINES), tables.JSON_LINES),
    "lines of Windows": (
        lambda path: path.write_bytes(b"\xef\xbb\xbf" + LINES.encode() + b"\r\n"),
        tables.JSON_LINES,
    ),
    "a list": (lambda path: path.write_text(json.dumps(ROWS, indent=1)), tables.JSON),
    "gzip": (
        lambda path: path.write_bytes(gzip.compress(LINES.encode())),
        tables.JSON_LINES,
    ),
    "bzip2": (
        lambda path: path.write_bytes(bz2.compress(LINES.encode())),
        tables.JSON_LINES,
    ),
    "xz": (
        lambda path: path.write_bytes(lzma.compress(LINES.encode())),
        tables.JSON_LINES,
    ),
    "parquet": (parquet, tables.PARQUET),
    "csv": (table, tables.CSV),
}
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b" \n", "found an empty file"),
    "binary": (bytes(range(128, 256)), "found binary data"),
    "zeros": (bytes(64), "found binary data"),
    "numpy": (b"\x93NUMPY\x01", "found a NumPy array"),
    "zstd": (b"\x28\xb5\x2f\xfd\x00", "that zstd has compressed"),
    "damaged gzip": (b"\x1f\x8b\x08\x00rest", "found a damaged compressed file"),
    "damaged parquet": (b"PAR1 and no more", "found a damaged parquet file"),
    "git": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "utf-16": ("{}".encode("utf-16"), "text in UTF-16"),
    "log": (b"Step 1: reward 0.5\nStep 2: reward 0.6\n", "neither JSON nor a table"),
    "printed": (b"{'loss': 0.1, 'reward': 2}\n", "lines that Python has printed"),
    "numbers": (b"[1, 2]", "row 1 is 1, no mapping"),
    "a number": (b"[3]\n[4]\n", "no mapping"),
    "text in lines": (b'{"step": 1}\n"text"\n', "row 2 is 'text', no mapping"),
    "damaged lines": (b'{"step": 1}\n{"st\n{"step": 2}\n', "no JSON in line 2"),
    "cut": (b'[{"step": 1}, {"st', "JSON that is cut"),
    "empty list": (b"[]", "found JSON without a row"),
    "header": (b"step,reward\n", "a CSV table without a row"),
}


@pytest.mark.parametrize("name", GOOD)
def test_the_content_of_a_file_decides_how_it_is_read_not_its_name(
    name: str, tmp_path: Path
) -> None:
    write, expected = GOOD[name]
    path = tmp_path / "file"
    write(path)
    found = tables.read(path, "rows")
    assert found.format == expected
    numbers = [{key: float(row[key]) for key in row} for row in found.rows]
    assert numbers == ROWS


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("command", ["compare", "estimate"])
def test_a_file_without_rows_is_named_with_what_was_found_and_what_is_wanted(
    name: str, command: str, tmp_path: Path
) -> None:
    content, words = BAD[name]
    path = tmp_path / "file.jsonl"
    path.write_bytes(content)
    arguments = [str(path), str(path)]
    if command == "estimate":
        arguments = [str(path), "--hardware", "H100", "--model", "Qwen/Qwen2.5-7B"]
    done = CliRunner().invoke(main, [command, *arguments])
    said = " ".join(done.output.split())
    assert done.exit_code in (1, 2) and isinstance(done.exception, SystemExit)
    assert words in said and "; expected " in said and str(path) in said, said
    for of_python in ("codec", "Errno", "object has no", "KeyError", "Traceback"):
        assert of_python not in said


def test_a_zip_archive_is_to_be_unpacked(tmp_path: Path) -> None:
    zipped(tmp_path / "a.zip")
    with pytest.raises(
        DasError, match=r"found a zip archive .*: unpack it; expected x"
    ):
        tables.read(tmp_path / "a.zip", "x")


def test_the_last_line_may_be_cut_where_a_run_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "killed.jsonl"
    path.write_text(LINES + '\n{"step": 3, "rew')
    assert [row["step"] for row in tables.read(path, "rows").rows] == [1, 2]
