"""The history in veRL's checkpoints: a resumed run drafts from its first step.

Wrappers are plain functions: Ray ships the methods of an actor class by pickle, which strips a wrapt proxy off.
"""

from __future__ import annotations

import inspect
import logging
import shutil
from pathlib import Path
from typing import Any

from das_adapter.patching import patch
from das_adapter.verl import settings, tracking
from das_adapter.verl.ahead import Ahead

logger = logging.getLogger("das_adapter")


@patch(
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._load_checkpoint",
    "verl.trainer.ppo.ray_trainer:RayPPOTrainer._load_checkpoint",
    "verl.experimental.fully_async_policy.fully_async_trainer:FullyAsyncTrainer.load_checkpoint",
    since="0.9.1",
    optional=True,
)
def load_history(stock: Any) -> Any:
    """Without it a resumed run starts cold, and the logger does not know of the block: a checkpoint is loaded at every
    start, before the first weight sync. Remove this patch when veRL tells plug-ins that it loads a checkpoint."""
    if inspect.iscoroutinefunction(stock):

        async def load_async(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = await stock(self, *args, **kwargs)
            _begin(self)
            return result

        return load_async

    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(self, *args, **kwargs)
        _begin(self)
        return result

    return load


@patch(
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._save_checkpoint",
    "verl.trainer.ppo.ray_trainer:RayPPOTrainer._save_checkpoint",
    "verl.experimental.fully_async_policy.fully_async_trainer:FullyAsyncTrainer._save_checkpoint",
    since="0.9.1",
    optional=True,
)
def save_history(stock: Any) -> Any:
    """Without it checkpoints have no history. Remove this patch when veRL tells plug-ins that it saves a checkpoint."""

    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(self, *args, **kwargs)
        try:
            _save(self)
        except Exception:  # the trainer's checkpoint is whole
            logger.exception("das: the history was not saved with the checkpoint")
        return result

    return save


def _begin(trainer: Any) -> None:
    """Choose what the history starts with, and refuse what can't be used (see `checkpoint.begin`)."""
    das = settings.of_run(trainer.config)
    if das is not None:
        tracking.follow()
        Ahead.begin(trainer, das)
    if das is None or not das.saves_history:
        return
    from das_adapter.service import checkpoint

    config, step, resumed = trainer.config.trainer, _step(trainer), None
    if config.resume_mode != "disable" and step:
        resumed = Path(config.resume_from_path) if config.resume_mode == "resume_path" else _folder(trainer)
    facts = checkpoint.facts_of(das.history.scope, trainer.tokenizer)
    checkpoint.begin(das.history, facts, settings.BLOCK, resumed, step)


def _save(trainer: Any) -> None:
    das = settings.of_run(trainer.config)
    if das is None or not das.saves_history:
        return
    from das_adapter.service import checkpoint

    folder = _folder(trainer)
    checkpoint.save(folder, checkpoint.facts_of(das.history.scope, trainer.tokenizer))
    seen = (folder / "actor").exists()  # not where each node saves on a disk of its own
    for old in folder.parent.glob("global_step_*") if seen else ():
        if not (old / "actor").exists():  # veRL has removed it
            for left in old.glob(f"{checkpoint.NAME}*"):
                shutil.rmtree(left, ignore_errors=True)


def _folder(trainer: Any) -> Path:
    return Path(trainer.config.trainer.default_local_dir).absolute() / f"global_step_{_step(trainer)}"


def _step(trainer: Any) -> int:
    """The trainer's step as checkpoints count it; the fully asynchronous one counts weight versions."""
    return int(getattr(trainer, "current_param_version", trainer.global_steps))
