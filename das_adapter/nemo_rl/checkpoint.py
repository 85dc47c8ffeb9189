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
        if facts := _generation(run_config).get(settings.FACTS):
            from das_adapter.service import checkpoint

            checkpoint.save(Path(folder), facts)
        return folder

    return init_tmp_checkpoint


def begin(master_config: Any, tokenizer: Any, algorithm: str = settings.GRPO) -> None:
    """Check the block, choose what the history starts with, and leave in the generation
    config what labels and checkpoints need, and absolute directories; before anything
    is launched. Raises as `settings.check` and `checkpoint.begin`.

    `algorithm`: module of NeMo-RL's algorithm.
    """
    refuse_elsewhere(master_config, settings.BLOCK)
    generation = _generation(master_config)
    das = settings.check(generation)
    if das is None:
        return
    _refuse_what_is_missing(das, master_config, algorithm)
    make_absolute(generation["das"], das)
    if das.history.run_ahead != "off" and (
        reason := settings.no_effect(algorithm, master_config)
    ):
        logger.warning(
            "das: history.run_ahead=%r has no effect: %s", das.history.run_ahead, reason
        )
    if not settings.logs_figures(algorithm, master_config):
        logger.warning(
            "das: no figures under das/ are logged, das/health neither: this trainer"
            " asks for none"
        )
    from nemo_rl.utils.checkpoint import CheckpointManager

    from das_adapter.service import checkpoint, ledger

    ledger.end_earlier_run()
    latest = CheckpointManager(master_config.checkpointing).get_latest_checkpoint_path()
    resumed = None if latest is None else Path(latest)
    generation[settings.STEP] = (
        0 if resumed is None else int(resumed.name.removeprefix("step_"))
    )
    generation[settings.SAMPLES] = settings.samples_of(master_config)
    if das.saves_history:
        facts = checkpoint.facts_of(das.history.scope, tokenizer)
        generation[settings.FACTS] = facts
        checkpoint.begin(das.history, facts, settings.BLOCK, resumed, version=0)


def _refuse_what_is_missing(das: DasConfig, master_config: Any, algorithm: str) -> None:
    """Refuse a run that asks for what NeMo-RL leaves out; say what it goes on
    without.
    """
    asked = {feature_of(algorithm): algorithm}
    if (getattr(master_config, "data_plane", None) or {}).get("enabled"):
        asked[features.DATA_PLANE] = "data_plane.enabled=true"
    if das.history.run_ahead != "off":
        asked[features.RUN_AHEAD] = (
            f"{settings.BLOCK}.history.run_ahead={das.history.run_ahead!r}"
        )
    compat.refuse_without("nemo_rl", asked)
    if das.saves_history:
        compat.warn_without("nemo_rl", [features.CHECKPOINTS])


def _generation(config: Any) -> dict[str, Any]:
    """Return `policy.generation` of an algorithm's config; empty where it has none."""
    policy = getattr(config, "policy", None)
    found = policy.get("generation") if isinstance(policy, dict) else None
    return found if isinstance(found, dict) else {}
