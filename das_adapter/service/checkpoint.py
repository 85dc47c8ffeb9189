"""A history on disk: in a checkpoint, to resume from, or by itself, for another run to start from."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from das_adapter.core.index import IndexFileError, SuffixIndex
from das_adapter.core.length import RESPONSE, Responses
from das_adapter.errors import DasError

NAME = "das_history"
"""Directory of the history inside a checkpoint."""
INDEX, _FACTS, _LENGTHS = "index", "history.json", "lengths.npy"


@dataclass(frozen=True)
class Facts:
    """Facts that must be the same where a history is used again."""

    scope: str
    vocabulary: int
    tokenizer: str
    """Fingerprint of the tokenizer's tokens and their ids."""

    @classmethod
    def of(cls, scope: str, tokenizer: Any) -> Facts:
        """Return the facts of a run with this `history.scope` and tokenizer (Hugging Face's)."""
        tokens = sorted(tokenizer.get_vocab().items())
        digest = hashlib.blake2b(json.dumps(tokens).encode(), digest_size=8).hexdigest()
        return cls(scope, len(tokens), digest)


def write(directory: Path, facts: Facts, lengths: Responses, save_index: Callable[[Path], object]) -> None:
    """Write a history to a directory, all of it or nothing: it gets its name when everything is on the disk.

    Args:
        directory: a history that was there before is replaced.
        facts, lengths: of the run.
        save_index: writes the index to a path.

    Raises:
        OSError: it can't be written; what was there before is left as it was.
    """
    partial = partial_of(directory)
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of a writer that was killed
        partial.mkdir(parents=True)
        with (partial / _LENGTHS).open("wb") as file:
            np.save(file, lengths.view(np.uint64).reshape(-1, 3))
            os.fsync(file.fileno())
        with (partial / _FACTS).open("w") as file:
            file.write(json.dumps(asdict(facts), indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        save_index(partial / INDEX)
        _sync_directory(partial)
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)
        _sync_directory(directory.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def partial_of(directory: Path) -> Path:
    """Return where a history is written before it is complete."""
    return directory.with_name(f"{directory.name}.partial")


def check(directory: Path, facts: Facts, key: str) -> None:
    """Refuse a history that can't be used in a run, after reading all of it.

    Args:
        directory: what `write` wrote.
        facts: the run's.
        key: the key of the config that chose the directory.

    Raises:
        DasError: no history lies there, it is damaged, or it has another scope, vocabulary or tokenizer.
    """
    try:
        found = Facts(**json.loads((directory / _FACTS).read_text()))
        SuffixIndex.check(directory / INDEX)
    except (OSError, TypeError, ValueError, IndexFileError) as error:
        raise DasError(f"{key}: found no history in {str(directory)!r} ({error}); allowed: a directory "
                       f"{NAME!r} of a checkpoint") from None  # fmt: skip
    for name, mine in asdict(facts).items():
        if (theirs := getattr(found, name)) != mine:
            raise DasError(f"{key}: the history in {str(directory)!r} was written with {name} {theirs!r}, "
                           f"this run has {mine!r}; both must be equal")  # fmt: skip


def lengths(directory: Path, version: int) -> Responses:
    """Read the lengths of a saved history; their weight versions are moved back so that none is newer than `version`.

    Raises:
        DasError: they are missing or damaged.
    """
    try:
        found: Responses = (
            np.load(directory / _LENGTHS, allow_pickle=False).astype(np.uint64).view(RESPONSE).reshape(-1)
        )
    except (OSError, EOFError, ValueError) as error:
        raise DasError(f"history: found damaged lengths in {str(directory)!r} ({error})") from None
    found["version"] += version - found["version"].max(initial=version)
    return found


def _sync_directory(directory: Path) -> None:
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
