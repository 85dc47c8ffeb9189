"""A run's history on disk: in the trainer's checkpoints, and for another run to start
from.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray

from das_adapter.config import HistoryConfig
from das_adapter.core.index import IndexFileError, SuffixIndex
from das_adapter.core.index.store import newest_in
from das_adapter.core.length import RESPONSE, Responses
from das_adapter.errors import DasError
from das_adapter.service.ledger import actor, histories, ledger, running

logger = logging.getLogger("das_adapter")

NAME = "das_history"
"""Directory of the history inside a checkpoint."""
INDEX = "index"
"""Directory in it, with a file for each node of the run that wrote it."""
_FACTS = "history.json"
_LENGTHS = "lengths.npy"
SAVE_S = 60.0
"""How long a checkpoint may wait for the history to be written; after that it has
none.
"""
_START_S = 600.0
"""How long the start of a run may wait for the ledger."""


Facts = dict[str, str]
"""What must be the same where a history is used again: `scope`, and `tokenizer`, a
fingerprint of its ids.
"""


def facts_of(scope: str, tokenizer: Any) -> Facts:
    """Return the facts of a run with this `history.scope` and tokenizer (Hugging
    Face's).
    """
    words = (
        (w.decode("latin-1") if isinstance(w, bytes) else w, id)
        for w, id in tokenizer.get_vocab().items()
    )
    return {"scope": scope, "tokenizer": _digest(json.dumps(sorted(words)).encode())}


def write(
    directory: Path, facts: Facts, lengths: Responses, save_parts: Callable[[Path], int]
) -> None:
    """Write a history to a directory, in the place of what was there, all of it or
    nothing: it gets its name when everything is written. `save_parts` writes the index
    to a directory, a file `0`, `1`, ... for each node, and returns how many.

    Raises:
        OSError: it can't be written; what was there before is left as it was.
    """
    partial = directory.with_name(f"{directory.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of a writer that was killed
        (partial / INDEX).mkdir(parents=True)
        count = save_parts(partial / INDEX)
        for part in range(count):
            (
                partial / INDEX / str(part)
            ).stat()  # another node may have another directory of this name
        np.save(partial / _LENGTHS, lengths.view(np.uint64).reshape(-1, 3))
        said = {
            **facts,
            "parts": count,
            "lengths": _digest((partial / _LENGTHS).read_bytes()),
        }
        (partial / _FACTS).write_text(json.dumps(said, indent=1) + "\n")
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def check(directory: Path, facts: Facts, key: str, version: int = 0) -> Responses:
    """Refuse a history that can't be used in a run, after reading all of it; `key` of
    the config chose the directory. Return its lengths; their weight versions are moved
    back so that none is newer than `version`.

    Raises:
        DasError: no history lies there, it is damaged, or it has another scope or
            tokenizer.
    """
    try:
        said = json.loads((directory / _FACTS).read_text())
        rows = (directory / _LENGTHS).read_bytes()
        there = {"parts": len(parts(directory)), "lengths": _digest(rows)}
        if there != {name: said.pop(name) for name in there}:
            raise ValueError(f"its files are not those that {_FACTS} tells of")
        for part in parts(directory):
            SuffixIndex.check(part)
        lengths: Responses = (
            np.load(io.BytesIO(rows), allow_pickle=False).view(RESPONSE).reshape(-1)
        )
    except (
        OSError,
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
        IndexFileError,
    ) as error:
        raise DasError(
            f"{key}: found no history in {str(directory)!r} ({error}); allowed: a"
            f" directory {NAME!r} of a checkpoint"
        ) from None
    for name, mine in facts.items():
        if (theirs := said.get(name)) != mine:
            raise DasError(
                f"{key}: the history in {str(directory)!r} was written with {name}"
                f" {theirs!r}, this run has {mine!r}; both must be equal"
            )
    lengths["version"] += version - lengths["version"].max(initial=version)
    return lengths


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def parts(directory: Path) -> list[Path]:
    """Return the files of a saved history's index; OSError: there is none."""
    return sorted((directory / INDEX).iterdir())


def begin(
    config: HistoryConfig, facts: Facts, block: str, resumed: Path | None, version: int
) -> None:
    """Choose what the run's history starts with, before the first weight sync: the
    history of the checkpoint from which the trainer resumes, else that of
    `history.load`, else nothing. A checkpoint whose history can't be used is resumed
    without, and a line in the log says so.

    Args:
        block: place of the `das:` block in the host's config.
        resumed: that checkpoint; None: the trainer starts anew.
        version: the run's weight version; what is loaded counts as no newer.

    Raises:
        DasError: what `history.load` names is no history, is damaged, or has another
            scope or tokenizer.
    """
    for key, place in (
        ("checkpoint", resumed and resumed / NAME),
        (
            f"{block}.history.load",
            config.load,
        ),
    ):
        if not place:
            continue
        directory = Path(place).absolute()
        try:
            found = check(directory, facts, key, version)
            break
        except DasError as error:
            if key != "checkpoint":
                raise
            logger.error(
                "das: the checkpoint %s has no history to resume from: %s",
                resumed,
                error,
            )
    else:
        return
    service = ledger()
    try:
        newest = max((newest_in(part) for part in parts(directory)), default=version)
        start = service.start_from.remote(str(directory), max(0, newest - version))
        ray.get([start, service.add.remote(found)], timeout=_START_S)
        logger.warning("das: the history starts with %s", directory)
    except ray.exceptions.RayError as error:
        logger.error("das: the history does not start with %s: %r", directory, error)


def save(folder: Path, facts: Facts) -> None:
    """Save the run's history in a checkpoint's folder, which every node sees, wholly or
    not at all; if that fails, or takes longer than `SAVE_S`, a line in the log says so
    and the run goes on.
    """
    begin = time.monotonic()

    def got(calls: Any) -> Any:
        return ray.get(calls, timeout=max(0.0, begin + SAVE_S - time.monotonic()))

    try:
        if not (found := [actor(name) for name in histories()]):
            raise DasError("no node's history is running")
        if left := sum(got([history.flush.remote() for history in found])):
            logger.error(
                "das: %d files of texts do not reach their homes; the checkpoint %s"
                " lacks them",
                left,
                folder,
            )
        known = got(running().since.remote(0))

        def save_parts(index: Path) -> int:
            return len(
                got(
                    [
                        history.save.remote(str(index / str(part)))
                        for part, history in enumerate(found)
                    ]
                )
            )

        write(folder / NAME, facts, known, save_parts)
    except Exception:
        logger.exception(
            "das: the history was not saved with the checkpoint %s", folder
        )
