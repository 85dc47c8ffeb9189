"""Which batches of trajectories a history has published, in a few words for each sender."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

Batch = tuple[str, int]
"""(source, number): a source numbers its batches from 1."""


class Batches:
    """A set of batches, kept small because a source's numbers leave few gaps."""

    def __init__(self, upto: Mapping[str, int] | None = None, beyond: Iterable[Batch] = ()):
        """
        Args:
            upto: by source: all batches up to this number.
            beyond: further ones.
        """
        self._upto = dict(upto or {})
        self._beyond: set[Batch] = set()
        self.update(beyond)

    def __contains__(self, batch: Batch) -> bool:
        return batch[1] <= self._upto.get(batch[0], 0) or batch in self._beyond

    def update(self, batches: Iterable[Batch]) -> None:
        """Add some batches."""
        for source, number in batches:
            if (source, number) not in self:
                self._beyond.add((source, number))
            while (follows := (source, self._upto.get(source, 0) + 1)) in self._beyond:
                self._beyond.remove(follows)
                self._upto[source] = follows[1]

    def joined(self, batches: Iterable[Batch]) -> Batches:
        """Return a set of these batches and others."""
        both = Batches(self._upto, self._beyond)
        both.update(batches)
        return both

    @classmethod
    def read(cls, path: Path) -> Batches:
        """Return what was written to a file; empty where there is none."""
        try:
            upto, beyond = json.loads(path.read_text())
        except FileNotFoundError:
            return cls()
        return cls(upto, ((source, number) for source, number in beyond))

    def write(self, path: Path) -> None:
        """Write a file, all of it or nothing; OSError: it can't be written."""
        new = path.with_name(f"{path.name}.tmp")
        with open(new, "w", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o600)) as file:
            json.dump([self._upto, sorted(self._beyond)], file)
        new.rename(path)
