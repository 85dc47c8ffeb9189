"""What das-adapter changes in veRL. It acts only where the config has an active `das:` block.

Nothing of veRL is imported here: each patch waits until veRL itself imports the module it changes.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import wrapt

from das_adapter import compat
from das_adapter.patching import patch, when_imported
from das_adapter.verl import ahead, checkpoint, identity, settings, tracking

_FULLY_ASYNC = (
    "verl.experimental.fully_async_policy.fully_async_trainer:FullyAsyncTrainer.__ray_metadata__.modified_class"
)
"""The class inside a Ray actor."""

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

    @functools.wraps(stock)
    def check_first(config: Any, *args: Any, **kwargs: Any) -> Any:
        settings.check(config)
        return stock(config, *args, **kwargs)

    return check_first


@patch(
    "verl.experimental.agent_loop.agent_loop:AgentLoopManager.generate_sequences",
    "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopManagerTQ.generate_sequences",
    "verl.experimental.fully_async_policy.fully_async_rollouter:FullyAsyncAgentLoopManager.generate_sequences_single",
    since="0.9.1",
    needs="prompts",
)
def name_rows(stock: Any) -> Any:
    """Without it rows of a step that have one prompt, and no index or equal ones, draw the same samples. Remove this
    patch when veRL gives each row of a step a name that is the same in every run."""
    return identity.around_dispatch(stock)


@patch(
    "verl.experimental.agent_loop.agent_loop:AgentLoopWorker._run_agent_loop",
    since="0.9.1",
    needs="sampling_params, trajectory",
)
def follow_samples(stock: Any) -> Any:
    """Without it requests have no identity. Every agent loop, also the user's own, runs under that of its sample.
    Remove this patch when veRL passes a sample's identity with its requests."""
    return identity.around_agent_loop(stock)


@patch(
    "verl.workers.rollout.llm_server:LLMServerClient.generate",
    since="0.9.1",
    needs="request_id, prompt_ids, sampling_params",
)
def label_requests(stock: Any) -> Any:
    """Without it the identity of a sample does not reach the engine. Remove this patch when veRL passes a sample's
    identity with its requests."""
    return wrapt.FunctionWrapper(stock, identity.around_generate)


@patch("verl.experimental.agent_loop.agent_loop:AgentLoopWorker.das_write_ahead", since="0.9.1", adds=True)
def write_ahead(stock: Any) -> Any:
    """Without it the trainer cannot show agent loop workers the next batch. Remove this patch when veRL lets plug-ins
    add methods to its agent loop workers."""
    return ahead.add_writing(stock)


@patch("verl.workers.rollout.llm_server:LLMServerManager._init_global_load_balancer", since="0.9.1")
def route_requests(stock: Any) -> Any:
    """Without it `routing` does nothing. Remove this patch when veRL lets the config choose the load
    balancer."""
    from das_adapter.verl import router

    return wrapt.FunctionWrapper(stock, router.around_init_load_balancer)


@patch(
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._save_checkpoint",
    "verl.trainer.ppo.ray_trainer:RayPPOTrainer._save_checkpoint",
    f"{_FULLY_ASYNC}._save_checkpoint",
    since="0.9.1",
    optional=True,
)
def save_history(stock: Any) -> Any:
    """Without it checkpoints have no history. Remove this patch when veRL tells plug-ins that it saves a checkpoint."""
    return checkpoint.after_save(stock)


@patch(
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._load_checkpoint",
    "verl.trainer.ppo.ray_trainer:RayPPOTrainer._load_checkpoint",
    f"{_FULLY_ASYNC}.load_checkpoint",
    since="0.9.1",
    optional=True,
)
def load_history(stock: Any) -> Any:
    """Without it a resumed run starts cold, and the logger does not know of the block. Remove this patch when
    veRL tells plug-ins that it loads a checkpoint."""
    return checkpoint.after_load(stock)


@patch("verl.utils.tracking:Tracking.log", since="0.9.1", needs="data, step, backend")
def log_figures(stock: Any) -> Any:
    """Without it the trainer's logger does not get the rollouts' figures. Remove this patch when veRL lets plug-ins add
    metrics to a step."""
    return wrapt.FunctionWrapper(stock, tracking.around_log)


HOOKS = (
    *(check_at_start, name_rows, follow_samples, label_requests, write_ahead, route_requests),
    *(save_history, load_history, log_figures),
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
