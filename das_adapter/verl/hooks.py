"""What das-adapter changes in veRL. It acts only where the config has an active `das:`
block.

Nothing of veRL is imported here: each patch waits until veRL itself imports the module
it changes.
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
from das_adapter.verl import ahead, identity, settings, training

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
        if das := settings.check(config):
            from das_adapter.service import ledger

            make_absolute(config.actor_rollout_ref.rollout.custom.das, das)
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
        das = settings.of_rollout(self.rollout_config)
        if (
            das is not None
            and das.routing != "host"
            and self._load_balancer_cls is None
        ):
            # else `settings.check` has said so
            if features.ROUTING not in compat.unavailable("verl"):
                from das_adapter.verl.router import balancer

                self._load_balancer_cls = balancer(das, self.rollout_config)
        return stock(self, *args, **kwargs)

    return init


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
)
def save_history(stock: Any) -> Any:
    """Without it checkpoints have no history. Remove this patch when veRL tells
    plug-ins that it saves a checkpoint.
    """

    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(self, *args, **kwargs)
        try:
            _save(self)
        except Exception:  # the trainer's checkpoint is whole
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
        # not of a validation or a sync
        of_training = any(key.startswith(("actor/", "critic/")) for key in data)
        if training.trainer is not None and of_training:
            from das_adapter.service import ledger

            figures = ledger.metrics(step)
            data = {**data, **figures}
            if run := ahead.Ahead.running:
                run.coming.repeated = figures.get("das/run_ahead_repeated")
        return stock(self, data=data, step=step, backend=backend)

    return log


def _begin(trainer: Any) -> None:
    """Choose what the history starts with, and refuse what can't be used (see
    `checkpoint.begin`).
    """
    das = settings.of_run(trainer.config)
    if das is not None:
        training.trainer = trainer
        ahead.Ahead.begin(trainer, das)
    if das is None or not das.saves_history:
        return
    from das_adapter.service import checkpoint

    config = trainer.config.trainer
    step = training.step_of(trainer)
    resumed = None
    if config.resume_mode != "disable" and step:
        resumed = (
            Path(config.resume_from_path)
            if config.resume_mode == "resume_path"
            else _folder(trainer)
        )
    facts = checkpoint.facts_of(das.history.scope, trainer.tokenizer)
    checkpoint.begin(das.history, facts, settings.BLOCK, resumed, step)


def _save(trainer: Any) -> None:
    das = settings.of_run(trainer.config)
    if das is None or not das.saves_history:
        return
    from das_adapter.service import checkpoint

    folder = _folder(trainer)
    settled = trainer.config.trainer
    checkpoint.save(folder, checkpoint.facts_of(das.history.scope, trainer.tokenizer))
    # veRL removes what this process has saved, but for the last ones; other checkpoints
    # are the user's.
    saved: list[Path] = vars(trainer).setdefault("_das_saved", [])
    saved += [folder] if folder not in saved else []
    kept = (
        1
        if settled.get("remove_previous_ckpt_in_save")
        else settled.get("max_actor_ckpt_to_keep") or len(saved)
    )
    for old in saved[:-kept]:
        if not (old / "actor").exists():
            for left in old.glob(f"{checkpoint.NAME}*"):
                shutil.rmtree(left, ignore_errors=True)


def _folder(trainer: Any) -> Path:
    return (
        Path(trainer.config.trainer.default_local_dir).absolute()
        / f"global_step_{training.step_of(trainer)}"
    )


HOOKS = (
    *(check_at_start, route_requests, load_history, save_history, log_figures),
    *(training.number_weights, ahead.write_ahead),
    *(
        identity.name_batches,
        identity.name_awaited_batches,
        identity.follow_samples,
        identity.label_requests,
    ),
)
"""Applied in every process that imports veRL, each when its module is imported."""


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
    """Register the replicas whose server harvests trajectories and refreshes the
    drafter at each weight sync.
    """

    def load() -> type:
        from das_adapter.verl.server import DasVLLMReplica

        return DasVLLMReplica

    module.RolloutReplicaRegistry.register("vllm", load)
