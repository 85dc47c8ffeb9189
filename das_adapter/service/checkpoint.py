"""A run's history on disk: in the trainer's checkpoints, and for another run to start from."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray

from das_adapter.config import HistoryConfig
from das_adapter.core.index import IndexFileError, SuffixIndex
from das_adapter.core.index.store import newest_in
from das_adapter.core.length import RESPONSE, Responses
from das_adapter.errors import DasError
from das_adapter.service.ledger import history_actors, ledger

logger = logging.getLogger("das_adapter")

NAME = "das_history"
"""Directory of the history inside a checkpoint."""
INDEX = "index"
"""Directory in it, with a file for each node of the run that wrote it."""
_FACTS, _LENGTHS = "history.json", "lengths.npy"
_PATIENCE_S = 600.0
"""How long a checkpoint may wait for the history to be written."""


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


def write(directory: Path, facts: Facts, lengths: Responses, save_parts: Callable[[Path], int]) -> None:
    """Write a history to a directory, all of it or nothing: it gets its name when everything is on the disk.

    Args:
        directory: a history that was there before is replaced.
        facts, lengths: of the run.
        save_parts: writes the index to a directory, a file `0`, `1`, ... for each node; returns how many.

    Raises:
        OSError: it can't be written; what was there before is left as it was.
    """
    partial = partial_of(directory)
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of a writer that was killed
        (partial / INDEX).mkdir(parents=True)
        count = save_parts(partial / INDEX)
        for part in range(count):
            (partial / INDEX / str(part)).stat()  # another node may have another directory of this name
        with (partial / _LENGTHS).open("wb") as file:
            np.save(file, lengths.view(np.uint64).reshape(-1, 3))
            os.fsync(file.fileno())
        with (partial / _FACTS).open("w") as file:
            file.write(json.dumps({**asdict(facts), "parts": count}, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        _sync_directory(partial / INDEX)
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
        said = json.loads((directory / _FACTS).read_text())
        parts = [directory / INDEX / str(part) for part in range(said.pop("parts"))]
        found = Facts(**said)
        for part in parts:
            SuffixIndex.check(part)
    except (OSError, AttributeError, KeyError, TypeError, ValueError, IndexFileError) as error:
        raise DasError(
            f"{key}: found no history in {str(directory)!r} ({error}); allowed: a directory {NAME!r} of a checkpoint"
        ) from None
    for name, mine in asdict(facts).items():
        if (theirs := getattr(found, name)) != mine:
            raise DasError(
                f"{key}: the history in {str(directory)!r} was written with {name} {theirs!r}, "
                f"this run has {mine!r}; both must be equal"
            )


def parts(directory: Path) -> list[Path]:
    """Return the files of a saved history's index.

    Raises:
        OSError: there is none.
    """
    return sorted((directory / INDEX).iterdir())


def lengths(directory: Path, version: int) -> Responses:
    """Read the lengths of a saved history; their weight versions are moved back so that none is newer than `version`.

    Raises:
        DasError: they are missing or damaged.
    """
    try:
        found: Responses = (
            np.load(directory / _LENGTHS, allow_pickle=False).astype(np.uint64).view(RESPONSE).reshape(-1)
        )
    except Exception as error:  # NumPy raises whatever its parser does
        raise DasError(f"history: found damaged lengths in {str(directory)!r} ({error})") from None
    found["version"] += version - found["version"].max(initial=version)
    return found


def _sync_directory(directory: Path) -> None:
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def begin(config: HistoryConfig, facts: Facts, block: str, resumed: Path | None, version: int) -> None:
    """Choose what the run's history starts with, before the first weight sync: the history of the checkpoint from which
    the trainer resumes, else that of `history.load`, else nothing. A checkpoint whose history can't be used is
    resumed without, and a line in the log says so.

    Args:
        config: the run's `history:` block.
        facts: the run's.
        block: place of the `das:` block in the host's config.
        resumed: that checkpoint; None: the trainer starts anew.
        version: the run's weight version; what is loaded counts as no newer.

    Raises:
        DasError: what `history.load` names is no history, is damaged, or has another scope, vocabulary or tokenizer.
    """
    chosen = None
    if resumed is not None:
        try:
            chosen = _readable(resumed / NAME, facts, "checkpoint", version)
        except DasError as error:
            logger.error("das: the checkpoint %s has no history to resume from: %s", resumed, error)
    if chosen is None and config.load is not None:
        chosen = _readable(Path(config.load), facts, f"{block}.history.load", version)
    if chosen is None:
        return
    directory, found = chosen
    service = ledger()
    try:
        newest = max((newest_in(part) for part in parts(directory)), default=version)
        start = service.start_from.remote(str(directory), max(0, newest - version))
        ray.get([start, service.add.remote(found)], timeout=_PATIENCE_S)
        logger.warning("das: the history starts with %s", directory)
    except ray.exceptions.RayError as error:
        logger.error("das: the history does not start with %s: %r", directory, error)


def _readable(directory: Path, facts: Facts, key: str, version: int) -> tuple[Path, Responses]:
    """Return a saved history's directory and lengths; see `check` and `lengths` for what is refused."""
    directory = directory.absolute()
    check(directory, facts, key)
    return directory, lengths(directory, version)


def save(folder: Path, facts: Facts, config: HistoryConfig) -> None:
    """Save the run's history with a checkpoint, wholly or not at all; if that fails, a line in the log says so and the
    run goes on.

    Args:
        folder: the checkpoint's directory; every node sees it.
        facts: the run's.
        config: the run's `history:` block.
    """
    target = folder / NAME
    try:
        if not (histories := list(history_actors().values())):
            raise DasError("no node's history is running")
        ray.get([history.flush.remote() for history in histories], timeout=_PATIENCE_S)
        known = ray.get(ledger().since.remote(0), timeout=_PATIENCE_S)

        def save_parts(index: Path) -> int:
            saved = [history.save.remote(str(index / str(part))) for part, history in enumerate(histories)]
            ray.get(saved, timeout=_PATIENCE_S)
            return len(saved)

        write(target, facts, known, save_parts)
    except Exception:
        logger.exception("das: the history was not saved with the checkpoint %s", folder)
        shutil.rmtree(partial_of(target), ignore_errors=True)  # of an actor that was killed
