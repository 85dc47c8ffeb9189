"""A history on disk: in a checkpoint, to resume from, or by itself, for another run to start from."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

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


def write(directory: Path, facts: Facts, lengths: Responses) -> None:
    """Write the files that stand beside the index: facts and lengths."""
    np.save(directory / _LENGTHS, lengths.view(np.uint64).reshape(-1, 3))
    (directory / _FACTS).write_text(json.dumps(asdict(facts), indent=1) + "\n")


def check(directory: Path, facts: Facts, key: str) -> None:
    """Refuse a history that can't be used in a run.

    Args:
        directory: what `write` wrote to, and `INDEX` beside it.
        facts: the run's.
        key: the key of the config that chose the directory.

    Raises:
        DasError: no history lies there, or it has another scope, vocabulary or tokenizer.
    """
    try:
        found = Facts(**json.loads((directory / _FACTS).read_text()))
        (directory / INDEX).stat()
    except (OSError, TypeError, ValueError) as error:
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
        found: Responses = np.load(directory / _LENGTHS).view(RESPONSE).reshape(-1)
    except (OSError, ValueError) as error:
        raise DasError(f"history: found damaged lengths in {str(directory)!r} ({error})") from None
    found["version"] += version - found["version"].max(initial=version)
    return found
