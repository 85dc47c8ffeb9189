"""What das-adapter changes in veRL. It acts only where the config has an active `das:` block.

Nothing of veRL is imported here: each patch waits until veRL itself imports the module it changes.
"""

from __future__ import annotations

import os
from typing import Any

from das_adapter import compat
from das_adapter.patching import patch, when_imported
from das_adapter.verl import ahead, checkpoint, identity, settings, tracking

# Wrappers of what Ray ships are plain functions: it pickles the methods of actor classes and task runners, and pickle
# strips a wrapt proxy off.


@patch(
    "verl.utils.config:validate_config",
    "verl.trainer.main_ppo:run_ppo",
    since="0.9.1",
    needs="config",
)
def check_at_start(stock: Any) -> Any:
    """Without it a wrong `das:` block is found when engines start, or never; `fully_async_main` starts without
    `validate_config`. Remove this patch when veRL lets plug-ins check the config of every pipeline."""

    def check_first(config: Any, *args: Any, **kwargs: Any) -> Any:
        settings.check(config)
        return stock(config, *args, **kwargs)

    return check_first


@patch("verl.experimental.agent_loop.agent_loop:AgentLoopWorker.das_write_ahead", since="0.9.1", adds=True)
def write_ahead(stock: Any) -> Any:
    """Without it the trainer cannot show agent loop workers the next batch. Remove this patch when veRL lets plug-ins
    add methods to its agent loop workers."""
    return ahead.add_writing(stock)


@patch("verl.workers.rollout.llm_server:LLMServerManager._init_global_load_balancer", since="0.9.1")
def route_requests(stock: Any) -> Any:
    """Without it `routing` does nothing. Remove this patch when veRL lets the config choose the load
    balancer."""
    from das_adapter.verl.router import balancer

    def init(self: Any, *args: Any, **kwargs: Any) -> Any:
        das = settings.of_rollout(self.rollout_config)
        if das is not None and das.routing != "host" and self._load_balancer_cls is None:
            self._load_balancer_cls = balancer(das, self.rollout_config)
        return stock(self, *args, **kwargs)

    return init


HOOKS = (
    *(check_at_start, identity.name_batches, identity.name_awaited_batches, identity.follow_samples),
    *(
        identity.label_requests,
        write_ahead,
        route_requests,
        checkpoint.save_history,
        checkpoint.load_history,
        tracking.log_figures,
    ),
)
"""Applied in every process that imports veRL, each when its module is imported."""


def install() -> None:
    """Patch veRL's modules as they are imported; with `VERL_PLATFORM=cpu`, also add the platform `cpu`."""
    when_imported("verl.workers.rollout.replica", _register_replica)
    for hook in HOOKS:
        hook.when_imported()
    if os.environ.get("VERL_PLATFORM") == "cpu":
        compat.for_cpu("verl")()


def _register_replica(module: Any) -> None:
    """Register the replicas whose server harvests trajectories and refreshes the drafter at each weight sync."""

    def load() -> type:
        from das_adapter.verl.server import DasVLLMReplica

        return DasVLLMReplica

    module.RolloutReplicaRegistry.register("vllm", load)
