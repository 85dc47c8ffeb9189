"""The prompts of a node's problems, beside the texts of its history: drafters are
trained on both. Nothing that drafts reads them.
"""

from __future__ import annotations

import logging
import os
import threading
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from das_adapter.files import read_file
from das_adapter.protocol.spool import write_private
from das_adapter.trouble import reason

logger = logging.getLogger("das_adapter")

Prompt = tuple[int, bytes]
"""A problem, and the int32 token ids of its first turn's prompt."""

_HEADER = np.dtype(
    [
        ("problem", "<u8"),
        ("bytes", "<u4"),
        ("checksum", "<u4"),
    ]
)
"""What stands in a file before the token ids of each prompt:

    problem bytes checksum | ids | problem bytes checksum | ids | ...
"""


class Prompts:
    """A file with the prompt of each problem, the shortest that was seen: those of
    later turns begin with it. Where the file would grow beyond its limit, the older
    half goes. Any thread may call.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Take over the file that an earlier writer left, or begin one; `max_bytes`: of
        the file.
        """
        self._path = path
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._sizes: dict[int, int] = {}
        """Bytes of each problem's prompt, the one added last behind the others."""
        self._file_bytes = 0
        self._take_over()

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self._file_bytes

    def add(self, prompts: Iterable[Prompt]) -> None:
        """Keep prompts that are new, or shorter than what their problems have; OSError:
        they can't be written.
        """
        with self._lock:
            if not self._is_intact():
                self._take_over()
            records = []
            sizes: dict[int, int] = {}
            for problem, ids in prompts:
                if not ids:  # most responses come without one
                    continue
                known = sizes.get(problem, self._sizes.get(problem))
                is_new = known is None or len(ids) < known
                record_bytes = _HEADER.itemsize + len(ids)
                if is_new and record_bytes <= self._max_bytes // 2:
                    record = _record(problem, ids)
                    records.append(record)
                    sizes[problem] = len(ids)
            if not records:
                return
            content = b"".join(records)
            if self._file_bytes + len(content) > self._max_bytes:
                self._drop_older_half()
            self._append(content)
            for problem in sizes:
                self._sizes.pop(problem, None)
            self._sizes.update(sizes)

    def save(self, path: Path) -> None:
        """Write the prompts to another file, for `read_prompts`; none where there is no
        prompt.
        """
        with self._lock:
            content = _pack(read_prompts(self._path))
        if content:
            path.parent.mkdir(exist_ok=True)
            write_private(path, content)

    def _is_intact(self) -> bool:
        """Return whether nobody else removed or changed the file."""
        try:
            return self._path.lstat().st_size == self._file_bytes
        except FileNotFoundError:
            return self._file_bytes == 0

    def _take_over(self) -> None:
        """Keep what the file has, without what is damaged."""
        self._write(read_prompts(self._path))

    def _drop_older_half(self) -> None:
        prompts = read_prompts(self._path)
        left_bytes = self._max_bytes // 2
        newest: dict[int, bytes] = {}
        for problem, ids in reversed(prompts.items()):
            left_bytes -= len(ids) + _HEADER.itemsize
            if left_bytes < 0:
                break
            newest[problem] = ids
        self._write(dict(reversed(newest.items())))

    def _write(self, prompts: dict[int, bytes]) -> None:
        """Replace the file by these prompts."""
        content = _pack(prompts)
        if content or self._path.exists():
            # the next store of the directory removes it if this process is killed
            new = self._path.with_suffix(".tmp")
            write_private(new, content)
            new.rename(self._path)
        self._file_bytes = len(content)
        self._sizes = {problem: len(ids) for problem, ids in prompts.items()}

    def _append(self, content: bytes) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        descriptor = os.open(self._path, flags, 0o600)
        with open(descriptor, "ab") as file:
            file.write(content)
        self._file_bytes += len(content)


def read_prompts(path: Path) -> dict[int, bytes]:
    """Return the prompt of each problem in a file that `Prompts` wrote, int32 token
    ids; none where there is no file. What is damaged, with all behind it, is left out,
    and a line in the log says so.
    """
    prompts: dict[int, bytes] = {}
    try:
        content = read_file(path)
        begin = 0
        while begin < len(content):
            header = np.frombuffer(content, _HEADER, 1, begin)[0]
            problem, num_bytes, checksum = header.item()
            ids_begin = begin + _HEADER.itemsize
            begin = ids_begin + num_bytes
            ids = content[ids_begin:begin]
            if begin > len(content) or _checksum(problem, ids) != checksum:
                raise ValueError(f"the prompt at byte {ids_begin} is damaged")
            known = prompts.pop(problem, ids)
            prompts[problem] = min(known, ids, key=len)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        logger.error("das: prompts: left out of %s: %s", path, reason(error))
    return prompts


def _pack(prompts: dict[int, bytes]) -> bytes:
    return b"".join(_record(problem, ids) for problem, ids in prompts.items())


def _record(problem: int, ids: bytes) -> bytes:
    header = np.array((problem, len(ids), _checksum(problem, ids)), _HEADER)
    return header.tobytes() + ids


def _checksum(problem: int, ids: bytes) -> int:
    number = np.uint64(problem)
    return zlib.crc32(ids, zlib.crc32(number.tobytes()))
