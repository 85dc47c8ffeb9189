"""Read the `das:` block of a veRL config, and refuse what it excludes there."""

from __future__ import annotations

from typing import Any

from das_adapter import compat, features
from das_adapter.config import DasConfig, block_of, check_files, parse
from das_adapter.config_errors import check_host, refuse_elsewhere
from das_adapter.errors import ConfigError
from das_adapter.protocol.engine_args import refuse_arguments, refuse_variable

ROLLOUT = "actor_rollout_ref.rollout"
BLOCK = f"{ROLLOUT}.custom.das"


def of_rollout(rollout: Any) -> DasConfig | None:
    """Return the block of a rollout config (OmegaConf node or veRL's `RolloutConfig`);
    None leaves veRL as it is.
    """
    return parse(block_of(_get(rollout, "custom"), f"{ROLLOUT}.custom"))


def of_run(config: Any) -> DasConfig | None:
    """Return the block of a whole run's config; None where there is none."""
    return of_rollout(_get(_get(config, "actor_rollout_ref"), "rollout"))


def check(config: Any) -> DasConfig | None:
    """Refuse, before anything is launched, a block that is wrong or contradicts the
    rest of the run's config, and one in the environment, also where the config has
    none.

    Raises:
        ConfigError: names the key, what was found and what is allowed.
        UnsupportedHost: vLLM or veRL lacks a symbol that das-adapter needs.
    """
    refuse_elsewhere(config, BLOCK)
    refuse_variable(BLOCK)
    das = of_run(config)
    if das is None:
        return None
    rollout = config.actor_rollout_ref.rollout
    check_host(BLOCK, f"{ROLLOUT}.name", rollout.name, "vllm")
    check_host(
        BLOCK,
        f"{ROLLOUT}.disaggregation.enabled",
        _get(_get(rollout, "disaggregation"), "enabled"),
        False,
        None,
    )
    given = _get(_get(rollout, "engine_kwargs"), "vllm") or {}
    refuse_arguments(das, BLOCK, f"{ROLLOUT}.engine_kwargs.vllm", given)
    mtp = _get(_get(config.actor_rollout_ref, "model"), "mtp")
    if das.drafter != "none" and _get(mtp, "enable") and _get(mtp, "enable_rollout"):
        raise ConfigError(
            f"{BLOCK}.drafter={das.drafter!r} and"
            " actor_rollout_ref.model.mtp.enable_rollout=True both choose a drafter:"
            " turn one of them off"
        )
    if (
        das.drafter != "none"
        and _get(_get(rollout, "checkpoint_engine"), "backend") == "delta_sharded"
    ):
        raise ConfigError(
            f"{BLOCK}.drafter={das.drafter!r}: found"
            f" {ROLLOUT}.checkpoint_engine.backend='delta_sharded' beside it, whose"
            " weight syncs veRL refuses beside a drafter: choose another backend, or"
            " drafter='none'"
        )
    for key in ("router_config_path", "full_determinism"):
        if das.routing != "host" and _get(rollout, key):
            raise ConfigError(
                f"{BLOCK}.routing={das.routing!r} and {ROLLOUT}.{key} both choose a"
                f" router: set {BLOCK}.routing='host', or remove the other"
            )
    check_files(das)
    compat.require("vllm")
    compat.require("verl")
    compat.refuse_without("verl", _asked(das, config))
    compat.warn_without("verl", _expected(das, config))
    return das


def _asked(das: DasConfig, config: Any) -> dict[str, str]:
    """Return the features that a run asks for, each with the key that does."""
    trainer = _get(config, "trainer")
    history = f"{BLOCK}.history"
    asynchronous = _get(config, "async_training") is not None
    asked: dict[str, str] = {}
    if asynchronous:
        asked[features.FULLY_ASYNC] = "async_training"
    elif _get(trainer, "use_v1"):
        asked[features.V1_TRAINERS] = "trainer.use_v1=True"
    if das.routing != "host" and "routing" in das.model_fields_set:
        asked[features.ROUTING] = f"{BLOCK}.routing={das.routing!r}"
    if das.history.load:
        asked[_checkpoints(config)] = f"{history}.load={das.history.load!r}"
    if das.history.run_ahead != "off":
        key = f"{history}.run_ahead={das.history.run_ahead!r}"
        asked |= dict.fromkeys(
            (features.RUN_AHEAD, features.ROUTING, _checkpoints(config)), key
        )
    return asked


def _expected(das: DasConfig, config: Any) -> list[str]:
    """Return the features that a run has by default, and does without where veRL leaves
    them out.
    """
    expected = [features.FIGURES]
    if das.routing != "host":
        expected.append(features.ROUTING)
    if das.saves_history:
        expected.append(_checkpoints(config))
    return expected


def _checkpoints(config: Any) -> str:
    """Return the feature of checkpoints that have the history, with the trainers that a
    run has.
    """
    v1 = (
        _get(_get(config, "trainer"), "use_v1")
        and _get(config, "async_training") is None
    )
    return features.V1_CHECKPOINTS if v1 else features.V0_CHECKPOINTS


def _get(node: Any, key: str) -> Any:
    if node is None:
        return None
    return node.get(key) if hasattr(node, "get") else getattr(node, key, None)
