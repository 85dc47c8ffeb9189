"""A run's history in the trainer's checkpoints, and what a run's history starts with."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import ray

from das_adapter.config import HistoryConfig
from das_adapter.core.index.store import newest_in
from das_adapter.core.length import Responses
from das_adapter.errors import DasError
from das_adapter.service import checkpoint, node
from das_adapter.service.ledger import ledger

logger = logging.getLogger("das_adapter")

_PATIENCE_S = 600.0
"""How long a checkpoint may wait for the history to be written."""


def begin(config: HistoryConfig, facts: checkpoint.Facts, block: str, resumed: Path | None, version: int) -> None:
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
            chosen = _readable(resumed / checkpoint.NAME, facts, "checkpoint", version)
        except DasError as error:
            logger.error("das: the checkpoint %s has no history to resume from: %s", resumed, error)
    if chosen is None and config.load is not None:
        chosen = _readable(Path(config.load), facts, f"{block}.history.load", version)
    if chosen is None:
        return
    directory, lengths = chosen
    service = ledger()
    try:
        newest = max((newest_in(part) for part in checkpoint.parts(directory)), default=version)
        start = service.start_from.remote(str(directory), max(0, newest - version))
        ray.get([start, service.add.remote(lengths)], timeout=_PATIENCE_S)
        logger.warning("das: the history starts with %s", directory)
    except ray.exceptions.RayError as error:
        logger.error("das: the history does not start with %s: %r", directory, error)


def _readable(directory: Path, facts: checkpoint.Facts, key: str, version: int) -> tuple[Path, Responses]:
    """Return a saved history's directory and lengths; see `checkpoint.check` and `lengths` for what is refused."""
    directory = directory.absolute()
    checkpoint.check(directory, facts, key)
    return directory, checkpoint.lengths(directory, version)


def save(folder: Path, facts: checkpoint.Facts, config: HistoryConfig) -> None:
    """Save the run's history with a checkpoint, wholly or not at all; if that fails, a line in the log says so and the
    run goes on.

    Args:
        folder: the checkpoint's directory; every node sees it.
        facts: the run's.
        config: the run's `history:` block.
    """
    target = folder / checkpoint.NAME
    try:
        if not (histories := list(node.nodes().values())):
            raise DasError("no node's history is running")
        ray.get([history.flush.remote() for history in histories], timeout=_PATIENCE_S)
        lengths = ray.get(ledger().since.remote(0), timeout=_PATIENCE_S)

        def save_parts(index: Path) -> int:
            saved = [history.save.remote(str(index / str(part))) for part, history in enumerate(histories)]
            ray.get(saved, timeout=_PATIENCE_S)
            return len(saved)

        checkpoint.write(target, facts, lengths, save_parts)
    except Exception:
        logger.exception("das: the history was not saved with the checkpoint %s", folder)
        shutil.rmtree(checkpoint.partial_of(target), ignore_errors=True)  # of an actor that was killed
