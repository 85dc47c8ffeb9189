"""A run's history on disk: in the trainer's checkpoints, and for another run to start
from.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray

from das_adapter.config import HistoryConfig
from das_adapter.core.index import SuffixIndex
from das_adapter.core.index.store import newest_in, problems_in
from das_adapter.core.length import RESPONSE, Responses
from das_adapter.errors import DasError
from das_adapter.files import open_without_waiting, read_file
from das_adapter.service.ledger import (
    find_actor,
    history_names,
    ledger,
    running_ledger,
)
from das_adapter.trouble import Peer, log_once, reason

logger = logging.getLogger("das_adapter")

NAME = "das_history"
"""Directory of the history inside a checkpoint."""
INDEX = "index"
"""Directory in it, with a file for each node of the run that wrote it."""
_PROMPTS = "prompts"
"""Directory beside it, with the prompts of each file's problems, under its name."""
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


SaveParts = Callable[[Path], int]
"""Writes the index to a directory, a file `0`, `1`, ... for each node, and returns how
many there are.
"""


def facts_of(scope: str, tokenizer: Any) -> Facts:
    """Return the facts of a run with this `history.scope` and tokenizer (Hugging
    Face's).
    """
    words = []
    for word, token_id in tokenizer.get_vocab().items():
        if isinstance(word, bytes):
            word = word.decode("latin-1")
        words.append((word, token_id))
    listing = json.dumps(sorted(words))
    return {"scope": scope, "tokenizer": _digest(listing.encode())}


def write(
    directory: Path, facts: Facts, lengths: Responses, save_parts: SaveParts
) -> None:
    """Write a history to a directory, in the place of what was there, all of it or
    nothing: it gets its name when everything is written.

    Raises:
        OSError: it can't be written; what was there before is left as it was.
    """
    partial = directory.with_name(f"{directory.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of a writer that was killed
        index = partial / INDEX
        index.mkdir(parents=True)
        num_parts = save_parts(index)
        # another node may have another directory of this name: then some are missing
        digests = [_digest_of_part(index / str(part)) for part in range(num_parts)]
        lengths_file = partial / _LENGTHS
        columns = lengths.view(np.uint64)
        np.save(lengths_file, columns.reshape(-1, 3))
        written = {
            **facts,
            "parts": digests,
            "lengths": _digest(lengths_file.read_bytes()),
        }
        content = json.dumps(written, indent=1) + "\n"
        (partial / _FACTS).write_text(content)
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


_MAX_FACTS_BYTES = 1 << 22
"""Maximum bytes of `_FACTS`: a digest of each of some hundred thousand nodes' parts."""
_HEADER_BYTES = 4096
"""Bytes of a part whose digest is kept: its header has a checksum of the rest."""
_MAX_NUMBER = 2**31
"""Bound of a response's tokens, and of a weight version."""


def check(directory: Path, facts: Facts, key: str, version: int = 0) -> Responses:
    """Refuse a history that can't be used in a run, after reading all of it; `key` of
    the config chose the directory. Return its lengths; their weight versions are moved
    back so that none is newer than `version`.

    Raises:
        DasError: no history lies there, it is damaged, or it has another scope or
            tokenizer.
    """
    found, lengths = read(directory, key)
    for name, own in facts.items():
        other = found.get(name)
        if other != own:
            raise DasError(
                f"{key}: the history in {str(directory)!r} was written with {name}"
                f" {other!r}, this run has {own!r}; both must be equal"
            )
    newest = lengths["version"].max(initial=version)
    lengths["version"] += version - newest
    return lengths


def read(directory: Path, key: str) -> tuple[dict[str, Any], Responses]:
    """Return the facts and the lengths of a saved history, after reading all of it;
    `key`: what chose the directory. DasError: none lies there, or it is damaged.
    """
    try:
        return _read(directory)
    except Exception as error:  # what is damaged may raise anything
        raise DasError(
            f"{key}: found no history in {str(directory)!r} ({reason(error)});"
            f" allowed: a directory {NAME!r} of a checkpoint"
        ) from None


def _read(directory: Path) -> tuple[dict[str, Any], Responses]:
    """Return the facts and the lengths of a saved history, after reading all of it; it
    may raise anything where that is damaged.
    """
    content = read_file(directory / _FACTS, _MAX_FACTS_BYTES)
    facts: dict[str, Any] = dict(json.loads(content))
    parts = facts.pop("parts")
    lengths_digest = facts.pop("lengths")
    if not isinstance(parts, list):
        raise ValueError(f"{_FACTS} has no digests of its parts: of another version")
    files = [directory / INDEX / str(number) for number in range(len(parts))]
    lengths_content = read_file(directory / _LENGTHS)
    digests = [_digest_of_part(file) for file in files]
    are_all_there = sorted(files) == index_files(directory) and digests == parts
    if not are_all_there or lengths_digest != _digest(lengths_content):
        raise ValueError(f"its files are not those that {_FACTS} tells of")
    for file in files:
        SuffixIndex.check(file)
        if len(problems_in(file)):  # else nothing was sealed
            _check_bound("weight version", newest_in(file))
    return facts, _read_lengths(lengths_content)


def _read_lengths(content: bytes) -> Responses:
    """Return the rows of a file of lengths; ValueError: a number is out of bounds."""
    file = io.BytesIO(content)
    rows: Any = np.lib.format.read_array(file, allow_pickle=False)  # type: ignore[no-untyped-call]
    lengths: Responses = rows.view(RESPONSE).reshape(-1)
    for name in ("tokens", "version"):
        column = lengths[name]
        _check_bound(name, int(column.min(initial=0)))
        _check_bound(name, int(column.max(initial=0)))
    _check_bound("tokens", int(lengths["tokens"].min(initial=0)), least=0)
    return lengths


def _check_bound(name: str, found: int, least: int = -_MAX_NUMBER) -> None:
    """Refuse a number that no run has; ValueError: it is one."""
    if not least <= found < _MAX_NUMBER:
        raise ValueError(f"found {name} {found}, allowed: {least} to {_MAX_NUMBER - 1}")


def _digest_of_part(file: Path) -> str:
    """Return the digest of the begin of a part's file, which stands for all of it."""
    descriptor = open_without_waiting(file, os.O_RDONLY)
    with open(descriptor, "rb") as part:
        return _digest(part.read(_HEADER_BYTES))


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def index_files(directory: Path) -> list[Path]:
    """Return the files of a saved history's index, one for each node that wrote it;
    OSError: there is none.
    """
    index = directory / INDEX
    return sorted(index.iterdir())


def prompts_file(part: Path) -> Path:
    """Return where the prompts lie that belong to a file of a saved history's index;
    there is no such file where no prompt was seen.
    """
    return part.parent.parent / _PROMPTS / part.name


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
    found = _choose_start(config, facts, block, resumed, version)
    if found is None:
        return
    directory, lengths = found
    try:
        service = ledger()
        newest = version
        for file in index_files(directory):
            newest = max(newest, newest_in(file))
        offset = newest - version
        start = service.start_from.remote(str(directory), offset)
        add = service.add.remote(lengths)
        ray.get([start, add], timeout=_START_S)
        logger.warning("das: the history starts with %s", directory)
    except (AttributeError, DasError, OSError, ray.exceptions.RayError) as error:
        log_once(f"das: the history does not start with {directory}", error)


def _choose_start(
    config: HistoryConfig, facts: Facts, block: str, resumed: Path | None, version: int
) -> tuple[Path, Responses] | None:
    """Return the saved history that the run starts with, and its lengths; None: it
    starts with nothing. Arguments and errors as in `begin`.
    """
    if resumed is not None:
        directory = (resumed / NAME).absolute()
        try:
            return directory, check(directory, facts, "checkpoint", version)
        except DasError as error:
            logger.error(
                "das: the checkpoint %s has no history to resume from: %s",
                resumed,
                error,
            )
    if config.load:
        directory = Path(config.load).absolute()
        key = f"{block}.history.load"
        return directory, check(directory, facts, key, version)
    return None


_saving = Peer()
"""Those whom a checkpoint waits for."""


def save(folder: Path, facts: Facts) -> None:
    """Save the run's history in a checkpoint's folder, which every node sees, wholly or
    not at all; if that fails, or takes longer than `SAVE_S`, a line in the log says so
    and the run goes on.
    """
    deadline = time.monotonic() + SAVE_S

    def wait_for(calls: Any) -> Any:
        left_s = max(0.0, deadline - time.monotonic())
        return ray.get(calls, timeout=left_s)

    def save_parts(index: Path) -> int:
        calls = []
        for number, history in enumerate(histories):
            part = index / str(number)
            calls.append(history.save.remote(str(part)))
        wait_for(calls)
        return len(calls)

    try:
        histories = [find_actor(name) for name in history_names()]
        if not histories:
            raise DasError("no node's history is running")
        if _saving.trouble:  # those that still hang are not waited for again
            pings = [history.ping.remote() for history in histories]
            ray.get(pings, timeout=_saving.patience_s(SAVE_S))
        flushes = [history.flush.remote() for history in histories]
        num_left = sum(wait_for(flushes))
        if num_left:
            logger.error(
                "das: %d files of texts do not reach their homes; the checkpoint %s"
                " lacks them",
                num_left,
                folder,
            )
        run_ledger = running_ledger()
        lengths = wait_for(run_ledger.since.remote(0))
        write(folder / NAME, facts, lengths, save_parts)
        _saving.answered()
    except Exception as error:
        message = "das: the history was not saved with the checkpoint"
        _saving.failed(message, error, f" ({folder})")
