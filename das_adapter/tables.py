"""Read the rows of a user's file, in whichever format it is, and say what was found
where it has none.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from das_adapter.errors import DasError
from das_adapter.files import read_file

JSON = "JSON"
JSON_LINES = "JSON lines"
CSV = "a CSV table"
PARQUET = "a parquet file"
_DECOMPRESS: dict[bytes, Callable[[bytes], bytes]] = {
    b"\x1f\x8b": gzip.decompress,
    b"BZh": bz2.decompress,
    b"\xfd7zXZ\x00": lzma.decompress,
}
"""By the bytes that a compressed file begins with."""
_NOT_READ = {
    b"\x28\xb5\x2f\xfd": "a file that zstd has compressed: decompress it (`zstd -d`)",
    b"PK\x03\x04": "a zip archive (or a spreadsheet, a torch file): unpack it",
    b"\x93NUMPY": "a NumPy array",
    b"SQLite format 3": "an SQLite data base",
    b"version https://git-lfs": "the place holder of a Git LFS file: `git lfs pull`",
    b"\xff\xfe": "text in UTF-16: save it as UTF-8",
    b"\xfe\xff": "text in UTF-16: save it as UTF-8",
}
"""What files are that begin with these bytes."""
_COMPRESSED = (".gz", ".bz2", ".xz")
Row = Mapping[str, Any]


class Table(NamedTuple):
    """The rows of a file."""

    format: str
    rows: Sequence[Row]
    """A JSON file that is one mapping is one row."""
    numbers: Sequence[int]
    """Line, or number, of each row in the file, from 1 on."""


def read(path: Path, wanted: str) -> Table:
    """Read a file that holds JSON, JSON lines, a CSV table or parquet, perhaps
    compressed by gzip, bzip2 or xz: its content decides, not its name.

    Args:
        wanted: which files are wanted; it ends the message of an error.

    Raises:
        DasError: there are no rows in it; the message says what was found.
    """
    try:
        return _read(path)
    except _NoRows as error:
        raise DasError(f"{path}: found {error}; expected {wanted}") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise DasError(f"{path}: {reason}; expected {wanted}") from None


def named(directory: Path, suffixes: Sequence[str]) -> list[Path]:
    """Return the files of a directory, in order, whose names end so, perhaps with the
    name of a compression behind it.
    """
    return [path for path in sorted(directory.iterdir()) if _is_named(path, suffixes)]


def below(directory: Path, suffixes: Sequence[str]) -> list[Path]:
    """Return the directories below a directory that have files whose names end so."""
    found = set()
    for path in directory.rglob("*"):
        if _is_named(path, suffixes):
            found.add(path.parent)
    return sorted(found)


def _is_named(path: Path, suffixes: Sequence[str]) -> bool:
    inner = path.with_suffix("") if path.suffix in _COMPRESSED else path
    return inner.suffix in suffixes and path.is_file()


def no_yaml(error: Exception) -> str:
    """Say why a text can't be read as YAML."""
    if isinstance(error, UnicodeDecodeError):
        return "it is no text in UTF-8"
    if isinstance(error, OSError):
        return str(error.strerror)
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return "it is no YAML"
    return f"it is no YAML: line {mark.line + 1}, {getattr(error, 'problem', '')}"


class _NoRows(Exception):
    """Says what a file is that has no rows."""


def _read(path: Path) -> Table:
    if path.is_dir():
        raise _NoRows("a directory")
    content = read_file(path)
    for begin, decompress in _DECOMPRESS.items():
        if content.startswith(begin):
            try:
                content = decompress(content)
            except (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error) as error:
                raise _NoRows(f"a damaged compressed file ({error})") from None
    for begin, what in _NOT_READ.items():
        if content.startswith(begin):
            raise _NoRows(what)
    if content.startswith(b"PAR1"):
        rows = _parquet(content)
        return Table(PARQUET, rows, range(1, len(rows) + 1))
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise _NoRows("binary data, or text that is not UTF-8") from None
    if "\0" in text:
        raise _NoRows("binary data")
    if not text.strip():
        raise _NoRows("an empty file")
    return _of_text(text)


def _parquet(content: bytes) -> list[Row]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise _NoRows(
            "a parquet file, which pyarrow reads (`pip install pyarrow`)"
        ) from None
    try:
        rows: list[Row] = parquet.read_table(pyarrow.BufferReader(content)).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise _NoRows(f"a damaged parquet file ({error})") from None
    return rows


def _of_text(text: str) -> Table:
    """Return the rows of a text in one of the formats that are text."""
    first, _, rest = text.lstrip().partition("\n")
    if not first.startswith(("{", "[")):
        return _csv(text)
    try:
        content = json.loads(text)
    except ValueError as error:
        # the first line of JSON lines is whole, unless it is cut and the only one
        if not _is_json(first):
            raise _no_json(first, rest, error) from None
        return _json_lines(text)
    if isinstance(content, Mapping):
        before = text[: len(text) - len(text.lstrip())]
        return Table(JSON, [content], [1 + before.count("\n")])
    return _mappings(JSON, list(enumerate(content, 1)))


def _no_json(first: str, rest: str, error: ValueError) -> _NoRows:
    """Return what a text is that begins as JSON does, and is none."""
    if first.startswith("{'"):
        return _NoRows("lines that Python has printed, such as a console log")
    if not rest:
        return _NoRows(f"JSON that is cut, or none ({error})")
    return _NoRows(f"text that begins as JSON does and is none ({error})")


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _json_lines(text: str) -> Table:
    """Return the rows of lines of JSON; the last may be cut, where a run was killed or
    the disk was full.
    """
    lines = text.removesuffix("\n").split("\n")
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append((number, json.loads(line)))
        except ValueError as error:
            if number < len(lines):
                raise _NoRows(f"no JSON in line {number} ({error})") from None
    return _mappings(JSON_LINES, rows)


def _mappings(name: str, rows: Sequence[tuple[int, Any]]) -> Table:
    """Return a table of values that must be mappings."""
    for number, row in rows:
        if not isinstance(row, Mapping):
            raise _NoRows(f"{name} whose row {number} is {row!r:.40}, no mapping")
    if not rows:
        raise _NoRows(f"{name} without a row")
    return Table(name, [row for _, row in rows], [number for number, _ in rows])


def _csv(text: str) -> Table:
    csv.field_size_limit(sys.maxsize)  # a response may be longer than its default
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        rows = list(reader)
    except csv.Error:
        rows = []
    columns = reader.fieldnames or ()
    if len(columns) < 2 or any(None in row for row in rows):
        raise _NoRows("text that is neither JSON nor a table")
    if not rows:
        raise _NoRows("a CSV table without a row")
    return Table(CSV, rows, range(2, len(rows) + 2))
