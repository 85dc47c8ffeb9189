"""The history in NeMo-RL's checkpoints: a resumed run drafts from its first step."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from das_adapter import compat, features
from das_adapter.config import DasConfig, make_absolute
from das_adapter.config_errors import refuse_elsewhere
from das_adapter.features import feature_of
from das_adapter.nemo_rl import settings
from das_adapter.patching import patch

logger = logging.getLogger("das_adapter")


@patch(
    "nemo_rl.algorithms.grpo:setup",
    "nemo_rl.algorithms.ppo:setup",
    "nemo_rl.algorithms.distillation:setup",
    "nemo_rl.algorithms.single_controller_utils.setup:setup_single_controller",
    since="0.6.0",
    needs="master_config, tokenizer",
)
def begin_history(stock: Any) -> Any:
    """Without it a run that resumes, or that is given another run's history, starts
    without history. Remove this patch when NeMo-RL tells plug-ins that a run begins.
    """

    def setup(master_config: Any, tokenizer: Any, *args: Any, **kwargs: Any) -> Any:
        begin(master_config, tokenizer, stock.__module__)
        return stock(master_config, tokenizer, *args, **kwargs)

    return setup


@patch(
    "nemo_rl.utils.checkpoint:CheckpointManager.init_tmp_checkpoint",
    since="0.6.0",
    needs="step, training_info, run_config",
    feature="checkpoints of the history",
)
def save_history(stock: Any) -> Any:
    """Without it checkpoints have no history. NeMo-RL renames the directory when the
    checkpoint is complete. Remove this patch when NeMo-RL tells plug-ins that it saves
    a checkpoint.
    """

    def init_tmp_checkpoint(
        self: Any, step: int, training_info: Any, run_config: Any = None, *args: Any
    ) -> Any:
        folder = stock(self, step, training_info, run_config, *args)
        facts = _generation_config(run_config).get(settings.FACTS)
        if facts:
            from das_adapter.service import checkpoint

            checkpoint.save(Path(folder), facts)
        return folder

    return init_tmp_checkpoint


def begin(master_config: Any, tokenizer: Any, algorithm: str = settings.GRPO) -> None:
    """Check the block and choose what the history starts with, before anything is
    launched. The generation config gets absolute directories, and what labels and
    checkpoints need.

    Args:
        master_config: the run's config.
        tokenizer: the policy's.
        algorithm: module of NeMo-RL's algorithm.

    Raises:
        DasError: as `settings.check` and `service.checkpoint.begin` raise it.
    """
    refuse_elsewhere(master_config, settings.BLOCK)
    generation = _generation_config(master_config)
    das = settings.check(generation)
    if das is None:
        return
    _refuse_what_is_missing(das, master_config, algorithm)
    make_absolute(generation["das"], das)
    if das.history.run_ahead != "off":
        obstacle = settings.run_ahead_obstacle(algorithm, master_config)
        if obstacle is not None:
            logger.warning(
                "das: history.run_ahead=%r has no effect: %s",
                das.history.run_ahead,
                obstacle,
            )
    if not settings.logs_figures(algorithm, master_config):
        logger.warning(
            "das: no figures under das/ are logged, das/health neither: this trainer"
            " asks for none"
        )
    from nemo_rl.utils.checkpoint import CheckpointManager

    from das_adapter.service import checkpoint, ledger

    ledger.end_earlier_run()
    checkpoints = CheckpointManager(master_config.checkpointing)
    latest = checkpoints.get_latest_checkpoint_path()
    if latest is None:
        resumed = None
        step = 0
    else:
        resumed = Path(latest)
        step = int(resumed.name.removeprefix("step_"))
    generation[settings.STEP] = step
    generation[settings.SAMPLES] = settings.samples_of(master_config)
    if das.saves_history:
        facts = checkpoint.facts_of(das.history.scope, tokenizer)
        generation[settings.FACTS] = facts
        checkpoint.begin(
            das.history,
            facts=facts,
            block=settings.BLOCK,
            resumed=resumed,
            version=0,
        )


def _refuse_what_is_missing(das: DasConfig, master_config: Any, algorithm: str) -> None:
    """Refuse a run that asks for what NeMo-RL leaves out; say what it goes on
    without.
    """
    requested = {feature_of(algorithm): algorithm}
    data_plane = getattr(master_config, "data_plane", None) or {}
    if data_plane.get("enabled"):
        requested[features.DATA_PLANE] = "data_plane.enabled=true"
    run_ahead = das.history.run_ahead
    if run_ahead != "off":
        key = f"{settings.BLOCK}.history.run_ahead={run_ahead!r}"
        requested[features.RUN_AHEAD] = key
    compat.refuse_without("nemo_rl", requested)
    if das.saves_history:
        compat.warn_without("nemo_rl", [features.CHECKPOINTS])


def _generation_config(config: Any) -> dict[str, Any]:
    """Return `policy.generation` of an algorithm's config; empty where it has none."""
    policy = getattr(config, "policy", None)
    if not isinstance(policy, dict):
        return {}
    generation = policy.get("generation")
    if not isinstance(generation, dict):
        return {}
    return generation
