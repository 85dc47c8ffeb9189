"""A run's history in the trainer's checkpoints, and what a run's history starts with."""

from __future__ import annotations

import logging
from pathlib import Path

import ray

from das_adapter.config import HistoryConfig
from das_adapter.service import checkpoint, node
from das_adapter.service.ledger import ledger

logger = logging.getLogger("das_adapter")

_PATIENCE_S = 600.0
"""How long a checkpoint may wait for the history to be written."""


def begin(
    config: HistoryConfig, facts: checkpoint.Facts, block: str, resumed: Path | None, resumed_by: str, version: int
) -> None:
    """Choose what the run's history starts with, before the first weight sync: the history of the checkpoint from which
    the trainer resumes, else that of `history.persist`, else nothing.

    Args:
        config: the run's `history:` block.
        facts: the run's.
        block: place of the `das:` block in the host's config.
        resumed: that checkpoint; None: the trainer starts anew.
        resumed_by: the host's key that chose it.
        version: the run's weight version; what is loaded counts as no newer.

    Raises:
        DasError: no history lies there, or it has another scope, vocabulary or tokenizer.
    """
    chosen, key = config.persist, f"{block}.history.persist"
    if resumed is not None:
        own = resumed / checkpoint.NAME
        if own.exists():
            chosen, key = str(own), resumed_by
        else:
            logger.error("das: the checkpoint %s has no history to resume from", resumed)
    if chosen is None:
        return
    directory = Path(chosen).absolute()
    checkpoint.check(directory, facts, key)
    service = ledger(config.window)
    ray.get([service.start_from.remote(str(directory)), service.add.remote(checkpoint.lengths(directory, version))])
    logger.warning("das: the history starts with %s", directory)


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
        lengths = ray.get(ledger(config.window).since.remote(0), timeout=_PATIENCE_S)
        ray.get(node.nearest().save.remote(str(target), facts, lengths), timeout=_PATIENCE_S)
        checkpoint.check(target, facts, "checkpoint")  # another node may have another directory of this name
    except Exception:
        logger.exception("das: the history was not saved with the checkpoint %s", folder)
