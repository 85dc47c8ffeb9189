"""The files of a drafter's checkpoint, in a directory where somebody may put new ones
while the run goes on.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from das_adapter.files import open_without_waiting, read_file

_PAUSE_S = 0.5
"""Time between two looks at new files, which must not change meanwhile."""
_LENGTH_BYTES = 8
"""Bytes of a safetensors file that say how long its header is."""
_MAX_HEADER_BYTES = 100_000_000
"""Maximum bytes of that header, as safetensors has it."""
_INDEX = "model.safetensors.index.json"

Identity = tuple[tuple[str, int, int], ...]
"""Name, size and modification time (nanoseconds) of each file, by name."""
Shapes = dict[str, tuple[int, ...]]
"""The shape of each tensor, by name."""


class DrafterFiles:
    """The safetensors files of a directory, and which of them were read last."""

    def __init__(self, model: str | None):
        """Take what lies there for what was read. A `model` that is no directory never
        changes; nor does None.
        """
        self._folder = Path(model) if model else None
        self._read = self._look()
        self._shapes: Shapes = {}
        """Of the files that were read first; empty: there were none, or one was
        damaged.
        """
        try:
            self._shapes = self._read_shapes()
        except (OSError, ValueError, TypeError, LookupError):
            pass

    @property
    def have_changed(self) -> bool:
        """Whether there are other files than those that were read last; False where
        there are none.
        """
        found = self._look()
        return bool(found) and found != self._read

    def check(self) -> Identity:
        """Return which files are there, to be read now.

        Raises:
            ValueError: they are not finished, or still being written, or do not have
                the tensors of the drafter.
            OSError: they can't be read.
        """
        found = self._look()
        if found != self._read:
            time.sleep(_PAUSE_S)
        shapes = self._read_shapes()
        self._check_same(found)
        if self._shapes and shapes != self._shapes:
            names = shapes.items() ^ self._shapes.items()
            name = min(name for name, _ in names)
            raise ValueError(
                f"found {name} with shape {shapes.get(name)}, allowed: that of the"
                f" drafter with which the engine began, {self._shapes.get(name)}"
            )
        return found

    def note_read(self, identity: Identity) -> None:
        """Note that these files were read; ValueError: others are there by now, and
        parts of either may have been read.
        """
        self._check_same(identity)
        self._read = identity

    def _check_same(self, identity: Identity) -> None:
        if self._look() != identity:
            raise ValueError("its files are being written")

    def _look(self) -> Identity:
        if self._folder is None:
            return ()
        found = []
        try:
            for path in sorted(self._folder.glob("*.safetensors")):
                status = path.stat()
                found.append((path.name, status.st_size, status.st_mtime_ns))
        except OSError:  # one was removed just now
            return ()
        return tuple(found)

    def _read_shapes(self) -> Shapes:
        """Return the shapes of all tensors. Raises as `check`."""
        shapes: Shapes = {}
        if self._folder is None:
            return shapes
        for path in sorted(self._folder.glob("*.safetensors")):
            shapes.update(_shapes_in(path))
        index = self._folder / _INDEX
        if shapes and index.exists():
            weights = json.loads(read_file(index))["weight_map"]
            missing = weights.keys() - shapes.keys()
            if missing:
                raise ValueError(f"{min(missing)} is in {_INDEX} and in no file")
        return shapes


def _shapes_in(path: Path) -> Shapes:
    """Return the shapes of the tensors in a finished safetensors file; ValueError: it
    is not finished, or none.
    """
    descriptor = open_without_waiting(path, 0)
    with open(descriptor, "rb") as file:
        num_header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header_bytes = file.read(min(num_header_bytes, _MAX_HEADER_BYTES))
    try:
        header: dict[str, Any] = dict(json.loads(header_bytes))
        header.pop("__metadata__", None)
        shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
        ends = [entry["data_offsets"][1] for entry in header.values()]
        expected_bytes = _LENGTH_BYTES + num_header_bytes + max(ends, default=math.inf)
    except (ValueError, TypeError, LookupError, AttributeError):
        raise ValueError(f"{path.name} has no finished header") from None
    num_bytes = path.stat().st_size
    if num_bytes != expected_bytes:
        raise ValueError(
            f"{path.name} has {num_bytes} bytes, its header says {expected_bytes}"
        )
    return shapes
