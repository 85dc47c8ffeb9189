"""The history in veRL's checkpoints: a resumed run drafts from its first step.

Wrappers are plain functions: Ray ships the methods of an actor class by pickle, which strips a wrapt proxy off.
"""

from __future__ import annotations

import functools
import inspect
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from das_adapter.config import DasConfig
from das_adapter.core.history import HistoryPolicy
from das_adapter.verl import settings

logger = logging.getLogger("das_adapter")

_PATIENCE_S = 600.0
"""How long a checkpoint may wait for the history to be written."""


def after_load(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the loading of a checkpoint, at every start before the first weight sync, to choose the history as well."""
    if inspect.iscoroutinefunction(stock):

        @functools.wraps(stock)
        async def load_async(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = await stock(self, *args, **kwargs)
            _begin(self)
            return result

        return load_async

    @functools.wraps(stock)
    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(self, *args, **kwargs)
        _begin(self)
        return result

    return load


def after_save(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `_save_checkpoint` to save the history as well. If that fails, the run goes on with a line in the log."""

    @functools.wraps(stock)
    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(self, *args, **kwargs)
        das = _with_history(self.config)
        if das is not None:
            try:
                _save(self, das)
            except Exception:
                logger.exception("das: the history was not saved with the checkpoint of step %s", _step(self))
        return result

    return save


def _begin(trainer: Any) -> None:
    """Choose what the history starts with, and refuse what can't be used.

    Raises:
        DasError: no history lies there, or it has another scope, vocabulary or tokenizer.
    """
    import ray

    from das_adapter.service import checkpoint
    from das_adapter.service.ledger import ledger

    das = _with_history(trainer.config)
    if das is None:
        return
    chosen, key = das.history.persist, f"{settings.BLOCK}.history.persist"
    config, step = trainer.config.trainer, _step(trainer)
    if config.resume_mode != "disable" and step:
        resumed = config.resume_from_path if config.resume_mode == "resume_path" else _folder(trainer)
        own = Path(resumed) / checkpoint.NAME
        if own.exists():
            chosen, key = str(own), "trainer.resume_mode"
        else:
            logger.error("das: the checkpoint %s has no history to resume from", resumed)
    if chosen is None:
        return
    directory = Path(chosen).absolute()
    checkpoint.check(directory, checkpoint.Facts.of(das.history.scope, trainer.tokenizer), key)
    service = ledger(das.history.window)
    ray.get([service.start_from.remote(str(directory)), service.add.remote(checkpoint.lengths(directory, step))])
    logger.warning("das: the history starts with %s", directory)


def _save(trainer: Any, das: DasConfig) -> None:
    import ray

    from das_adapter.service import checkpoint, node
    from das_adapter.service.ledger import ledger

    folder = _folder(trainer)
    facts = checkpoint.Facts.of(das.history.scope, trainer.tokenizer)
    _, lengths = ray.get(ledger(das.history.window).since.remote(0), timeout=_PATIENCE_S)
    ray.get(node.nearest().save.remote(str(folder / checkpoint.NAME), facts, lengths), timeout=_PATIENCE_S)
    for old in folder.parent.glob("global_step_*"):  # veRL has removed its other files
        if not (old / "actor").exists():
            shutil.rmtree(old / checkpoint.NAME, ignore_errors=True)


def _with_history(config: Any) -> DasConfig | None:
    das = settings.of_run(config)
    return das if das is not None and das.uses_history and HistoryPolicy(das.history).kept else None


def _folder(trainer: Any) -> Path:
    return Path(trainer.config.trainer.default_local_dir).absolute() / f"global_step_{_step(trainer)}"


def _step(trainer: Any) -> int:
    """The trainer's step as checkpoints count it; the fully asynchronous one counts weight versions."""
    return int(getattr(trainer, "current_param_version", trainer.global_steps))
