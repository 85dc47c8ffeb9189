"""What das-adapter changes in NeMo-RL, so that NeMo-RL uses das-adapter's classes. No
file is edited; without an active `das:` block NeMo-RL is stock.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

from das_adapter.nemo_rl.checkpoint import begin_history, save_history
from das_adapter.nemo_rl.settings import WORKERS, of_generation, run_ahead_obstacle
from das_adapter.patching import patch


@patch(
    "nemo_rl.models.generation.vllm.vllm_generation:resolve_generation_worker_cls",
    since="0.6.0",
)
def choose_workers(stock: Any) -> Any:
    """Without it generations with an active block get the stock workers. Remove this
    patch when the oldest supported NeMo-RL has the key of NVIDIA-NeMo/RL#3809.
    """

    def resolve(default_cls: str, config: Any) -> str:
        chosen: str = stock(default_cls, config)
        if of_generation(config) is None:
            return chosen
        return WORKERS.get(chosen, chosen)

    return resolve


@patch(
    "nemo_rl.algorithms.grpo:VllmGeneration",
    "nemo_rl.algorithms.ppo:VllmGeneration",
    "nemo_rl.algorithms.distillation:VllmGeneration",
    "nemo_rl.algorithms.single_controller_utils.setup:VllmGeneration",
    since="0.6.0",
)
def use_our_generation(stock: Any) -> Any:
    """Without it the trainer generates without labels, length-aware dispatch and
    das-adapter's figures. Remove this patch when NeMo-RL lets the config name the
    generation class.
    """
    return _our_generation()


@patch(
    "nemo_rl.algorithms.single_controller:VllmGeneration", since="0.6.0", optional=True
)
def know_our_generation(stock: Any) -> Any:
    """Without it a module that only names the class of generations does not know
    das-adapter's. Remove this patch when `use_our_generation` is removed.
    """
    return _our_generation()


def _our_generation() -> Any:
    from das_adapter.nemo_rl.generation import DasVllmGeneration

    return DasVllmGeneration


@patch(
    "nemo_rl.algorithms.grpo:validate",
    "nemo_rl.algorithms.grpo_sync:validate_sync",
    "nemo_rl.algorithms.ppo:validate",
    "nemo_rl.algorithms.distillation:validate",
    since="0.6.0",
)
def mark_validation(stock: Any) -> Any:
    """Without it validation rollouts enter the history. Remove this patch when NeMo-RL
    marks requests of a validation.
    """
    from das_adapter.nemo_rl.generation import generations

    def validate(*args: Any, **kwargs: Any) -> Any:
        validating = list(generations)
        alone = "rollout_actor" in kwargs
        for generation in validating:
            generation.set_validating(True, alone=alone)
        try:
            return stock(*args, **kwargs)
        finally:
            for generation in validating:
                generation.set_validating(False)

    return validate


@patch(
    "nemo_rl.algorithms.grpo:grpo_train",
    since="0.6.0",
    needs="policy_generation, wrapped_dataloader, grpo_save_state, master_config",
    feature="run-ahead",
)
def look_ahead(stock: Any) -> Any:
    """Without it run-ahead has no effect. Remove this patch when NeMo-RL shows plug-ins
    the batches that come.
    """
    from das_adapter.nemo_rl.run_ahead import NemoRunAhead
    from das_adapter.service.run_ahead import LookAhead

    def grpo_train(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(stock).bind(*args, **kwargs)
        arguments = given.arguments
        generation = arguments["policy_generation"]
        config = arguments["master_config"]
        das = getattr(generation, "das", None)
        if das is None or das.history.run_ahead == "off":
            return stock(*args, **kwargs)
        if run_ahead_obstacle(stock.__module__, config):
            return stock(*args, **kwargs)
        batches = LookAhead(arguments["wrapped_dataloader"])
        arguments["wrapped_dataloader"] = batches
        trained_steps = arguments["grpo_save_state"].total_steps
        run_ahead = NemoRunAhead(generation, batches, config, trained_steps)
        generation.run_ahead = run_ahead
        try:
            return stock(*given.args, **given.kwargs)
        finally:
            run_ahead.close()

    return grpo_train


HOOKS = (
    choose_workers,
    save_history,
    use_our_generation,
    know_our_generation,
    mark_validation,
    begin_history,
    look_ahead,
)
"""The patches of NeMo-RL. The driver applies each of them when it imports the module
that is patched.
"""


def install() -> None:
    """Replace the generation class and its workers, mark validations, and put the
    history into checkpoints; a second call changes nothing.
    """
    from nemo_rl.distributed import ray_actor_environment_registry as environments

    registry = environments.ACTOR_ENVIRONMENT_REGISTRY
    for stock, ours in WORKERS.items():
        registry[ours] = registry[stock]
        # where NeMo-RL builds no environment, the user has chosen one
        if registry[stock].startswith("uv"):
            built = _built_environment(stock)
            if built is not None:
                registry[ours] = built
    for hook in HOOKS:
        hook.when_imported()


def _built_environment(worker: str) -> str | None:
    """Return the interpreter of a stock worker's virtual environment, where NeMo-RL's
    containers have built it; None: they have not. One named after das-adapter's worker
    would be built anew, without das-adapter.
    """
    from nemo_rl.utils.venvs import DEFAULT_VENV_DIR

    directory = os.environ.get("NEMO_RL_VENV_DIR", DEFAULT_VENV_DIR)
    python = Path(directory).absolute() / worker / "bin/python"
    if not python.exists():
        return None
    return str(python)
