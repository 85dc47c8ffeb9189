"""Reading the `das:` block out of a veRL config, and what it excludes there."""

from __future__ import annotations

from typing import Any

from das_adapter import compat
from das_adapter.config import DasConfig, parse
from das_adapter.errors import ConfigError

BLOCK = "actor_rollout_ref.rollout.custom.das"


def of_rollout(rollout: Any) -> DasConfig | None:
    """The block of a rollout config (OmegaConf node or veRL's `RolloutConfig`); None leaves veRL as it is."""
    custom = _get(rollout, "custom")
    return parse(_get(custom, "das"))


def of_run(config: Any) -> DasConfig | None:
    """The block of a whole run's config; None where there is none."""
    rollout = _get(_get(config, "actor_rollout_ref"), "rollout")
    return of_rollout(rollout)


def check(config: Any) -> DasConfig | None:
    """Refuse, before anything is launched, a block that is wrong or contradicts the rest of the run's config.

    Raises:
        ConfigError: names the key, what was found and what is allowed.
        UnsupportedHost: vLLM or veRL lacks a symbol we stand on.
    """
    das = of_run(config)
    if das is None:
        return None
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "vllm":
        raise ConfigError(f"{BLOCK}: found actor_rollout_ref.rollout.name={rollout.name!r}, allowed: 'vllm'")
    engine = _get(_get(rollout, "engine_kwargs"), "vllm")
    if das.drafter != "none":
        if _get(engine, "speculative_config"):
            raise ConfigError(
                f"{BLOCK}.drafter={das.drafter!r} and actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config "
                "both choose a drafter: remove one of them"
            )
        mtp = _get(_get(config.actor_rollout_ref, "model"), "mtp")
        if _get(mtp, "enable") and _get(mtp, "enable_rollout"):
            raise ConfigError(
                f"{BLOCK}.drafter={das.drafter!r} and actor_rollout_ref.model.mtp.enable_rollout=True both choose a "
                "drafter: set one of them off"
            )
        if _get(_get(rollout, "checkpoint_engine"), "backend") == "delta_sharded":
            raise ConfigError(
                f"{BLOCK}.drafter={das.drafter!r}: found rollout.checkpoint_engine.backend='delta_sharded', "
                "which refuses speculative decoding; any other backend is allowed"
            )
    if das.routing.policy != "host" and _get(rollout, "router_config_path"):
        raise ConfigError(
            f"{BLOCK}.routing.policy={das.routing.policy!r} and actor_rollout_ref.rollout.router_config_path "
            f"both choose a router: set {BLOCK}.routing.policy='host', or remove the other"
        )
    compat.require("vllm")
    compat.require("verl")
    return das


def _get(node: Any, key: str) -> Any:
    if node is None:
        return None
    return node.get(key) if hasattr(node, "get") else getattr(node, key, None)
