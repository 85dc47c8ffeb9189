"""Read the `das:` block of a veRL config, and refuse what it excludes there."""

from __future__ import annotations

from typing import Any

from das_adapter import compat
from das_adapter.config import DasConfig, block_of, check_files, parse
from das_adapter.config_errors import check_host, refuse_elsewhere
from das_adapter.errors import ConfigError
from das_adapter.protocol.engine_args import refuse_arguments, refuse_variable

ROLLOUT = "actor_rollout_ref.rollout"
BLOCK = f"{ROLLOUT}.custom.das"


def of_rollout(rollout: Any) -> DasConfig | None:
    """Return the block of a rollout config (OmegaConf node or veRL's `RolloutConfig`); None leaves veRL as it is."""
    return parse(block_of(_get(rollout, "custom"), f"{ROLLOUT}.custom"))


def of_run(config: Any) -> DasConfig | None:
    """Return the block of a whole run's config; None where there is none."""
    return of_rollout(_get(_get(config, "actor_rollout_ref"), "rollout"))


def check(config: Any) -> DasConfig | None:
    """Refuse, before anything is launched, a block that is wrong or contradicts the rest of the run's config, and one
    in the environment, also where the config has none.

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
        BLOCK, f"{ROLLOUT}.disaggregation.enabled", _get(_get(rollout, "disaggregation"), "enabled"), False, None
    )
    given = _get(_get(rollout, "engine_kwargs"), "vllm") or {}
    refuse_arguments(das, BLOCK, f"{ROLLOUT}.engine_kwargs.vllm", given)
    mtp = _get(_get(config.actor_rollout_ref, "model"), "mtp")
    if das.drafter != "none" and _get(mtp, "enable") and _get(mtp, "enable_rollout"):
        raise ConfigError(
            f"{BLOCK}.drafter={das.drafter!r} and actor_rollout_ref.model.mtp.enable_rollout=True both choose a "
            "drafter: turn one of them off"
        )
    if das.drafter != "none" and _get(_get(rollout, "checkpoint_engine"), "backend") == "delta_sharded":
        raise ConfigError(
            f"{BLOCK}.drafter={das.drafter!r}: found {ROLLOUT}.checkpoint_engine.backend='delta_sharded' beside it, "
            "whose weight syncs veRL refuses beside a drafter: choose another backend, or drafter='none'"
        )
    for key in ("router_config_path", "full_determinism"):
        if das.routing != "host" and _get(rollout, key):
            raise ConfigError(
                f"{BLOCK}.routing={das.routing!r} and {ROLLOUT}.{key} both choose a router: "
                f"set {BLOCK}.routing='host', or remove the other"
            )
    check_files(das)
    compat.require("vllm")
    compat.require("verl")
    return das


def _get(node: Any, key: str) -> Any:
    if node is None:
        return None
    return node.get(key) if hasattr(node, "get") else getattr(node, key, None)
