"""Read the `das:` block of a veRL config, and refuse keys that contradict it."""

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
    custom = _get(rollout, "custom")
    return parse(block_of(custom, f"{ROLLOUT}.custom"))


def of_run(config: Any) -> DasConfig | None:
    """Return the block of a whole run's config; None where there is none."""
    return of_rollout(_get(config, "actor_rollout_ref", "rollout"))


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
        _get(rollout, "disaggregation", "enabled"),
        False,
        None,
    )
    given = _get(rollout, "engine_kwargs", "vllm") or {}
    refuse_arguments(das, BLOCK, f"{ROLLOUT}.engine_kwargs.vllm", given)
    _refuse_beside_drafter(das, config)
    _refuse_routers(das, rollout)
    check_files(das)
    compat.require("vllm")
    compat.require("verl")
    compat.refuse_without("verl", _requested_features(das, config))
    compat.warn_without("verl", _default_features(das, config))
    return das


def engine_arguments(config: Any) -> dict[str, Any]:
    """Return the engine arguments that veRL makes of a run's config, beside those under
    `engine_kwargs`, as far as a drafter may not work with them.
    """
    rollout = _get(config, "actor_rollout_ref", "rollout")
    model = _get(config, "actor_rollout_ref", "model")
    rank = _get(model, "lora", "rank") or _get(model, "lora_rank") or 0
    merged = _get(model, "lora", "merge")
    return {
        "tensor_parallel_size": _get(rollout, "tensor_model_parallel_size"),
        "data_parallel_size": _get(rollout, "data_parallel_size"),
        "enable_expert_parallel": (_get(rollout, "expert_parallel_size") or 1) > 1,
        "enable_lora": rank > 0 and not merged,
    }


def _refuse_beside_drafter(das: DasConfig, config: Any) -> None:
    """Refuse what veRL or vLLM cannot do beside a drafter."""
    if das.drafter == "none":
        return
    mtp = _get(config.actor_rollout_ref, "model", "mtp")
    if _get(mtp, "enable") and _get(mtp, "enable_rollout"):
        raise ConfigError(
            f"{BLOCK}.drafter={das.drafter!r} and"
            " actor_rollout_ref.model.mtp.enable_rollout=True both choose a drafter:"
            " turn one of them off"
        )
    rollout = config.actor_rollout_ref.rollout
    if _get(rollout, "checkpoint_engine", "backend") == "delta_sharded":
        raise ConfigError(
            f"{BLOCK}.drafter={das.drafter!r}: found"
            f" {ROLLOUT}.checkpoint_engine.backend='delta_sharded' beside it, whose"
            " weight syncs veRL refuses beside a drafter: choose another backend, or"
            " drafter='none'"
        )


def _refuse_routers(das: DasConfig, rollout: Any) -> None:
    """Refuse keys of veRL's that choose a router, where the block chooses one."""
    if das.routing == "host":
        return
    for key in ("router_config_path", "full_determinism"):
        if _get(rollout, key):
            raise ConfigError(
                f"{BLOCK}.routing={das.routing!r} and {ROLLOUT}.{key} both choose a"
                f" router: set {BLOCK}.routing='host', or remove the other"
            )


def _requested_features(das: DasConfig, config: Any) -> dict[str, str]:
    """Return the features that a run asks for, each with the key that asks for it."""
    requested: dict[str, str] = {}
    if _get(config, "async_training") is not None:
        requested[features.FULLY_ASYNC] = "async_training"
    elif _get(config, "trainer", "use_v1"):
        requested[features.V1_TRAINERS] = "trainer.use_v1=True"
    if das.routing != "host" and "routing" in das.model_fields_set:
        key = f"{BLOCK}.routing={das.routing!r}"
        requested[features.ROUTING] = key
    checkpoints = _checkpoint_feature(config)
    if das.history.load:
        key = f"{BLOCK}.history.load={das.history.load!r}"
        requested[checkpoints] = key
    if das.history.run_ahead != "off":
        key = f"{BLOCK}.history.run_ahead={das.history.run_ahead!r}"
        for feature in (features.RUN_AHEAD, features.ROUTING, checkpoints):
            requested[feature] = key
    return requested


def _default_features(das: DasConfig, config: Any) -> list[str]:
    """Return the features that a run has by default, and does without where veRL leaves
    them out.
    """
    expected = [features.FIGURES]
    if das.routing != "host":
        expected.append(features.ROUTING)
    if das.saves_history:
        expected.append(_checkpoint_feature(config))
    return expected


def _checkpoint_feature(config: Any) -> str:
    """Return the feature of checkpoints that have the history, with the trainers that a
    run has.
    """
    is_fully_async = _get(config, "async_training") is not None
    if _get(config, "trainer", "use_v1") and not is_fully_async:
        return features.V1_CHECKPOINTS
    return features.V0_CHECKPOINTS


def _get(node: Any, *keys: str) -> Any:
    """Return what stands under a path of keys in a config, which may be a mapping or an
    object; None: nothing does.
    """
    for key in keys:
        if node is None:
            return None
        if hasattr(node, "get"):
            node = node.get(key)
        else:
            node = getattr(node, key, None)
    return node
