"""Hooks in veRL, which act where, and only where, the config has an active `das:` block.

Nothing of veRL is imported here: each hook waits until veRL itself imports the module it changes. Nothing of veRL is
edited; without a `das:` block every hook calls the stock code.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import wrapt


def _checked(stock: Any) -> Any:
    """A plain function, not a wrapt proxy: task runners that name it are pickled by Ray, and proxies can't be."""

    @functools.wraps(stock)
    def check_first(config: Any, *args: Any, **kwargs: Any) -> Any:
        from das_adapter.verl.settings import check

        check(config)
        return stock(config, *args, **kwargs)

    return check_first


@wrapt.when_imported("verl.utils.config")
def _check_at_start(module: Any) -> None:
    """A wrong `das:` block stops the run before anything is launched."""
    module.validate_config = _checked(module.validate_config)


@wrapt.when_imported("verl.trainer.main_ppo")
def _check_at_start_of_every_pipeline(module: Any) -> None:
    """`fully_async_main` starts without `validate_config`."""
    module.run_ppo = _checked(module.run_ppo)


@wrapt.when_imported("verl.workers.rollout.replica")
def _register_replica(module: Any) -> None:
    """Rollout replicas whose server harvests trajectories and refreshes the drafter at each weight sync."""

    def load() -> type:
        from das_adapter.verl.server import DasVLLMReplica

        return DasVLLMReplica

    module.RolloutReplicaRegistry.register("vllm", load)


@wrapt.when_imported("verl.experimental.agent_loop.agent_loop")
def _follow_samples(module: Any) -> None:
    """Every agent loop, the user's own too, runs under the identity of the sample it works on."""
    from das_adapter.verl import identity

    worker = module.AgentLoopWorker
    worker._run_agent_loop = identity.around_agent_loop(worker._run_agent_loop)


@wrapt.when_imported("verl.workers.rollout.llm_server")
def _route_and_label_requests(module: Any) -> None:
    """Requests carry their identity to the engine, and the `routing:` policy picks their replica."""
    from das_adapter.verl import identity, router

    wrapt.wrap_function_wrapper(module, "LLMServerClient.generate", identity.around_generate)
    wrapt.wrap_function_wrapper(module, "LLMServerManager._init_global_load_balancer", router.around_init_load_balancer)


@wrapt.when_imported("verl.trainer.ppo.v1.trainer_base")
def _keep_history(module: Any) -> None:
    """The history is saved and loaded with the trainer's checkpoints."""
    _with_history(module.PPOTrainer, "_load_checkpoint")


@wrapt.when_imported("verl.trainer.ppo.ray_trainer")
def _keep_history_of_v0(module: Any) -> None:
    """The same for `trainer.use_v1: false` and the pipelines that build on it."""
    _with_history(module.RayPPOTrainer, "_load_checkpoint")


@wrapt.when_imported("verl.experimental.fully_async_policy.fully_async_trainer")
def _keep_history_of_fully_async(module: Any) -> None:
    """The same for a trainer that is a Ray actor; its class is inside."""
    _with_history(module.FullyAsyncTrainer.__ray_metadata__.modified_class, "load_checkpoint")


def _with_history(trainer: type, load: str) -> None:
    from das_adapter.verl import checkpoint

    setattr(trainer, load, checkpoint.after_load(getattr(trainer, load)))
    trainer._save_checkpoint = checkpoint.after_save(trainer._save_checkpoint)  # type: ignore[attr-defined]


@wrapt.when_imported("verl.utils.tracking")
def _log_metrics(module: Any) -> None:
    """The figures of the rollouts join the trainer's own."""
    from das_adapter.verl import tracking

    wrapt.wrap_function_wrapper(module, "Tracking.__init__", tracking.around_init)
    wrapt.wrap_function_wrapper(module, "Tracking.log", tracking.around_log)


if os.environ.get("VERL_PLATFORM") == "cpu":
    from das_adapter.verl.cpu import platform as cpu_platform  # noqa: F401

    @wrapt.when_imported("verl.checkpoint_engine.base")
    def _register_cpu_checkpoint_engine(module: Any) -> None:
        """Weight sync to separate rollout workers, where veRL's own backends need an accelerator."""
        from das_adapter.verl.cpu import checkpoint_engine as cpu_checkpoint  # noqa: F401
