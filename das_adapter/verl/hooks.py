"""What das-adapter changes in veRL. It acts only where the config has an active `das:`
block.

This module imports nothing of veRL: each patch waits until veRL itself imports the
module that it changes.
"""

from __future__ import annotations

import inspect
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from das_adapter import compat, features
from das_adapter.config import make_absolute
from das_adapter.patching import patch, when_imported
from das_adapter.verl import identity, run_ahead, settings, training

logger = logging.getLogger("das_adapter")

# Wrappers of what Ray ships are plain functions: it pickles the methods of actor
# classes and task runners, and pickle strips a wrapt proxy off.


@patch(
    "verl.utils.config:validate_config",
    "verl.trainer.main_ppo:run_ppo",
    since="0.9.1",
    needs="config",
)
def check_at_start(stock: Any) -> Any:
    """Without it a wrong `das:` block is found when engines start, or never;
    `fully_async_main` starts without `validate_config`. A second run of one process
    would go on with what the first has learned, and relative directories would be those
    of each process. Remove this patch when veRL lets plug-ins check the config of every
    pipeline.
    """

    def check_first(config: Any, *args: Any, **kwargs: Any) -> Any:
        das = settings.check(config)
        if das is not None:
            from das_adapter.service import ledger

            block = config.actor_rollout_ref.rollout.custom.das
            make_absolute(block, das)
            ledger.end_earlier_run()
        return stock(config, *args, **kwargs)

    return check_first


@patch(
    "verl.workers.rollout.llm_server:LLMServerManager._init_global_load_balancer",
    since="0.9.1",
    feature="routing",
)
def route_requests(stock: Any) -> Any:
    """Without it `routing` does nothing. Remove this patch when veRL lets the config
    choose the load balancer.
    """

    def init(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._load_balancer_cls is None:
            self._load_balancer_cls = _our_balancer(self.rollout_config)
        return stock(self, *args, **kwargs)

    return init


def _our_balancer(rollout: Any) -> type | None:
    """Return the balancer that the block of a rollout config asks for; None: veRL's
    own.
    """
    das = settings.of_rollout(rollout)
    if das is None or das.routing == "host":
        return None
    if features.ROUTING in compat.unavailable("verl"):
        # `settings.check` has said so
        return None
    from das_adapter.verl.router import balancer

    return balancer(das, rollout)


@patch(
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._load_checkpoint",
    "verl.trainer.ppo.ray_trainer:RayPPOTrainer._load_checkpoint",
    "verl.experimental.fully_async_policy.fully_async_trainer:FullyAsyncTrainer.load_checkpoint",
    since="0.9.1",
)
def load_history(stock: Any) -> Any:
    """Without it a resumed run starts cold, and the logger does not know of the block:
    a checkpoint is loaded at every start, before the first weight sync. Remove this
    patch when veRL tells plug-ins that it loads a checkpoint.
    """
    if inspect.iscoroutinefunction(stock):

        async def load_async(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = await stock(self, *args, **kwargs)
            _begin_history(self)
            return result

        return load_async

    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(self, *args, **kwargs)
        _begin_history(self)
        return result

    return load


@patch(
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._save_checkpoint",
    "verl.trainer.ppo.ray_trainer:RayPPOTrainer._save_checkpoint",
    "verl.experimental.fully_async_policy.fully_async_trainer:FullyAsyncTrainer._save_checkpoint",
    since="0.9.1",
)
def save_history(stock: Any) -> Any:
    """Without it checkpoints have no history. Remove this patch when veRL tells
    plug-ins that it saves a checkpoint.
    """

    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(self, *args, **kwargs)
        try:
            _save_history(self)
        except Exception:
            # the trainer's own checkpoint is complete
            logger.exception("das: the history was not saved with the checkpoint")
        return result

    return save


@patch(
    "verl.utils.tracking:Tracking.log",
    since="0.9.1",
    needs="data, step, backend",
    feature="figures of the rollouts in the trainer's log",
)
def log_figures(stock: Any) -> Any:
    """Without it the trainer's logger does not get the rollouts' figures. Remove this
    patch when veRL lets plug-ins add metrics to a step.
    """

    def log(self: Any, data: dict[str, Any], step: int, backend: Any = None) -> Any:
        # neither those of a validation nor those of a weight sync
        is_training_step = any(key.startswith(("actor/", "critic/")) for key in data)
        if training.trainer is not None and is_training_step:
            from das_adapter.service import ledger

            figures = ledger.metrics(step)
            data = {**data, **figures}
            run = run_ahead.VerlRunAhead.running
            if run is not None:
                run.coming.repeated = figures.get("das/run_ahead_repeated")
        return stock(self, data=data, step=step, backend=backend)

    return log


def _begin_history(trainer: Any) -> None:
    """Choose what the history of a run starts with, and look ahead in the run.

    Raises:
        DasError: the history that was asked for can't be used (see `checkpoint.begin`).
    """
    das = settings.of_run(trainer.config)
    if das is None:
        return
    training.trainer = trainer
    run_ahead.VerlRunAhead.start(trainer, das)
    if not das.saves_history:
        return
    from das_adapter.service import checkpoint

    checkpoint.begin(
        das.history,
        facts=checkpoint.facts_of(das.history.scope, trainer.tokenizer),
        block=settings.BLOCK,
        resumed=_resumed_checkpoint(trainer),
        version=training.step_of(trainer),
    )


def _resumed_checkpoint(trainer: Any) -> Path | None:
    """Return the checkpoint from which a run resumes; None: it resumes from none."""
    config = trainer.config.trainer
    if config.resume_mode == "disable" or training.step_of(trainer) == 0:
        return None
    if config.resume_mode == "resume_path":
        return Path(config.resume_from_path)
    return _checkpoint_folder(trainer)


def _save_history(trainer: Any) -> None:
    """Save the history beside a trainer's checkpoint, and remove those of checkpoints
    that veRL has removed.
    """
    das = settings.of_run(trainer.config)
    if das is None or not das.saves_history:
        return
    from das_adapter.service import checkpoint

    folder = _checkpoint_folder(trainer)
    facts = checkpoint.facts_of(das.history.scope, trainer.tokenizer)
    checkpoint.save(folder, facts)
    # veRL removes what this process has saved, but for the last ones; other checkpoints
    # are the user's.
    saved: list[Path] = vars(trainer).setdefault("_das_saved", [])
    if folder not in saved:
        saved.append(folder)
    num_kept = _num_kept_checkpoints(trainer.config.trainer) or len(saved)
    for old in saved[:-num_kept]:
        if (old / "actor").exists():
            continue
        for history in old.glob(f"{checkpoint.NAME}*"):
            shutil.rmtree(history, ignore_errors=True)


def _num_kept_checkpoints(config: Any) -> int | None:
    """Return how many checkpoints a trainer keeps; None: all."""
    if config.get("remove_previous_ckpt_in_save"):
        return 1
    kept: int | None = config.get("max_actor_ckpt_to_keep")
    return kept


def _checkpoint_folder(trainer: Any) -> Path:
    directory = Path(trainer.config.trainer.default_local_dir)
    step = training.step_of(trainer)
    return directory.absolute() / f"global_step_{step}"


HOOKS = (
    check_at_start,
    route_requests,
    load_history,
    save_history,
    log_figures,
    training.number_weights,
    run_ahead.write_ahead,
    identity.name_batches,
    identity.name_awaited_batches,
    identity.follow_samples,
    identity.label_requests,
)
"""The patches of veRL. Every process that imports veRL applies each of them when it
imports the module that is patched.
"""


def install() -> None:
    """Patch veRL's modules as they are imported; with `VERL_PLATFORM=cpu`, also add the
    platform `cpu`.
    """
    when_imported("verl.workers.rollout.replica", _register_replica)
    for hook in HOOKS:
        hook.when_imported()
    if os.environ.get("VERL_PLATFORM") == "cpu":
        compat.for_cpu("verl")()


def _register_replica(module: Any) -> None:
    """Register the replicas whose server records trajectories, and refreshes the
    drafter at each weight sync.
    """

    def load() -> type:
        from das_adapter.verl.server import DasVLLMReplica

        return DasVLLMReplica

    module.RolloutReplicaRegistry.register("vllm", load)
