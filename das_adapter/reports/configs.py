"""`das-adapter config`: the `das:` block of a file with every key that has an effect,
and what would run where.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from das_adapter import compat, config
from das_adapter.config import DasConfig
from das_adapter.config_errors import lacking
from das_adapter.engine.runner import Engine, refuse_engine, runner_for
from das_adapter.engine.settings import without_host
from das_adapter.errors import ConfigError
from das_adapter.protocol.engine_args import draft_lengths, engine_args
from das_adapter.reports import policies

VERL = "veRL"
NEMO_RL = "NeMo-RL"
MOST_KEYS = 8
"""Keys of a file that a message names, at most."""
OF_HOSTS = {"": ("routing",), "history": ("run_ahead", "load")}
"""Keys, by their block, that have an effect with a host alone."""
SIMILAR = 0.8
"""Similarity from which on a key is probably meant to be one of a block's."""
_TRL = {
    "model_name_or_path",
    "num_generations",
    "output_dir",
    "per_device_train_batch_size",
    "use_vllm",
    "vllm_mode",
}
"""Keys of TRL's configs, and of Hugging Face's trainers."""


def load(path: Path, overrides: Sequence[str] = ()) -> tuple[str | None, Any]:
    """Read a block (`das:` may stand above it), or a config of a host by the host's own
    code, which must be installed.

    Args:
        overrides: of the host's command line, such as
            `policy.generation.das.drafter=none`.

    Returns:
        `VERL` or `NEMO_RL` with the whole config in OmegaConf's containers; or None
        with the block.

    Raises:
        ConfigError: it can't be read.
    """
    keys = config.read_mapping(str(path))
    parents = keys.get("defaults") or []
    files = [
        parent
        for parent in ([parents] if isinstance(parents, str) else parents)
        if str(parent).endswith("ml")
    ]
    if "policy" in keys or files:
        return NEMO_RL, _merged(path, overrides)
    if {"actor_rollout_ref", "hydra", "defaults"} & keys.keys():
        return VERL, _composed(path, overrides)
    _refuse_other_configs(path, keys)
    if overrides:
        raise ConfigError(
            f"{path}: found a block alone and {overrides[0]!r}, which is for the config"
            " of a host"
        )
    return None, config.read(str(path))


def _refuse_other_configs(path: Path, keys: Mapping[str, Any]) -> None:
    """Refuse a file that is neither a block nor a config of a host: none of its keys is
    one of a block's, or nearly.
    """
    known = ["das", *DasConfig.model_fields]
    for key in keys:
        if difflib.get_close_matches(str(key), known, cutoff=SIMILAR):
            return
    if not keys:
        return
    found = ", ".join(map(str, list(keys)[:MOST_KEYS]))
    looks = ""
    if _TRL.intersection(keys):
        looks = (
            "; it looks like a training config of TRL, whose block is a file of its own"
            " that the environment variable DAS_CONFIG names"
        )
    raise ConfigError(
        f"{path}: found the keys {found}, which are no das: block and no config of veRL"
        f" (actor_rollout_ref) or NeMo-RL (policy){looks}"
    )


def _composed(path: Path, overrides: Sequence[str]) -> Any:
    """Compose a veRL config with veRL's own."""
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException

    try:
        with initialize_config_dir(str(path.parent.resolve()), version_base=None):
            return compose(path.stem, overrides=list(overrides))
    except HydraException as error:
        raise ConfigError(f"{path}: {error}") from None


def _merged(path: Path, overrides: Sequence[str]) -> Any:
    """Merge a NeMo-RL config over its parents."""
    try:
        from nemo_rl.utils.config import (
            OverridesError,
            load_config,
            parse_hydra_overrides,
        )
        from omegaconf.errors import OmegaConfBaseException
    except ImportError as error:
        raise ConfigError(
            f"{path}: found NeMo-RL's config, which NeMo-RL's own code reads: {error}"
        ) from None
    try:
        return parse_hydra_overrides(load_config(path), list(overrides))
    except (OSError, OverridesError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: {error}") from None


def effective(das: DasConfig, hosted: bool = True) -> dict[str, Any]:
    """Return a block with every key that has an effect, as plain containers: defaults
    filled in, and what null stands for where that is known before the run; `hosted`:
    whether a host reads it, without which some keys have no effect.
    """
    whole = das.model_dump(mode="json")
    if not hosted:
        for block, keys in OF_HOSTS.items():
            part = whole[block] if block else whole
            for key in keys:
                if key not in (getattr(das, block) if block else das).model_fields_set:
                    del part[key]
    whole["max_draft_tokens"] = das.num_draft_tokens if das.drafter != "none" else None
    whole["verify"]["noise"] = "keyed" if das.keyed else "stock"
    for name in ("history", "self", "draft", "verify"):
        kept = {
            k: v
            for k, v in whole.pop(name).items()
            if not any(lacking(das, config.NEEDS, f"{name}.{k}"))
        }
        whole |= {name: kept} if kept else {}
    return whole


def policy_of(host: str, content: Any) -> str | None:
    """Return the path or name of the policy in a host's config; None: it has none."""
    from omegaconf import OmegaConf

    key = "actor_rollout_ref.model.path" if host == VERL else "policy.model_name"
    found = OmegaConf.select(content, key)
    return found if isinstance(found, str) else None


def with_policy(
    das: DasConfig | None, model: str | None, arguments: Mapping[str, Any]
) -> tuple[DasConfig | None, str]:
    """Return a block as engines take it beside a policy, and what is said of that;
    empty: nothing.

    Args:
        das: the block; None: there is none.
        model: path or name of the policy; None: it is not known.
        arguments: engine arguments that the host's config gives.

    Raises:
        ConfigError: engines with this policy or these arguments refuse the block.
    """
    if das is None or das.drafter == "none":
        return das, ""
    content = policies.read(model) if model else None
    v1 = _v1(das, arguments, triton=True)
    refuse_engine(das, _engine(arguments, content or {}, v1))
    if model is None:
        return das, ""
    if content is None:
        policy = policies.named(model)
    else:
        policy = policies.recurrent(content)
    if policy is None and content is None:
        return das, _not_known(das, model)
    if policy is None:
        return das, ""
    return policies.beside_policy(das, policy, v1)


def _not_known(das: DasConfig, model: str) -> str:
    """Say what nobody can tell without a policy's config.json."""
    unknown = ["recurrent layers"]
    if das.controlled and das.by_model:
        unknown += ["experts over data-parallel ranks", "multimodal rotary positions"]
    return (
        f"not known: the config.json of {model} is not here, so that engines alone"
        f" check what {das.drafter} may not work with: {', '.join(unknown)}"
    )


def _engine(
    arguments: Mapping[str, Any], content: Mapping[str, Any], v1: str | None
) -> Engine:
    """Return what engines have, as far as the arguments and the policy's config.json
    tell; `v1`: why they run V1, None: they run V2.
    """

    def ranks(kind: str) -> int:
        return int(arguments.get(f"{kind}_parallel_size") or 1)

    has_experts = bool(arguments.get("enable_expert_parallel"))
    return Engine(
        pipeline_ranks=ranks("pipeline"),
        prefill_ranks=ranks("prefill_context"),
        context_ranks=ranks("decode_context"),
        tensor_ranks=ranks("tensor"),
        backend=arguments.get("distributed_executor_backend"),
        data_ranks=ranks("data"),
        has_experts=has_experts or policies.has_experts(content),
        has_adapters=bool(arguments.get("enable_lora")),
        balances_experts=bool(arguments.get("enable_eplb")),
        is_multimodal="vision_config" in content,
        has_mrope=policies.has_mrope(content),
        runs_v2=v1 is None,
    )


def placement(
    das: DasConfig | None,
    host: str | None,
    arguments: Mapping[str, Any],
    triton: bool | None = None,
) -> dict[str, str]:
    """Say what would run where.

    Args:
        das: the block; None: it leaves the host as it is.
        host: `VERL`, `NEMO_RL`, or None: there is none.
        arguments: engine arguments that the host's config gives.
        triton: whether vLLM finds a device that Triton compiles for; None: that is not
            known.

    Raises:
        ConfigError: one of them contradicts the block.
    """
    if das is None:
        return {"engines": f"{host or 'vLLM'} as it is: nothing of das-adapter runs"}
    v1 = _runner(das, arguments, triton is not False)
    if triton:
        where = ""
    else:
        where = ", where vLLM finds a device that Triton compiles for; else V1"
    found = {"model runner": v1 or f"V2{where}"}
    if das.in_every_step:
        found["drafts"] = f"{das.num_draft_tokens} tokens in every step, as vLLM has it"
    elif das.drafter != "none" and v1:
        if das.looked_up:
            looked_up = "; texts are searched on the host"
        else:
            looked_up = ""
        found["drafts"] = (
            f"up to {das.num_draft_tokens} tokens, each request its own"
            f" number{looked_up}"
        )
    elif das.drafter != "none":
        lengths = ", ".join(map(str, draft_lengths(das)))
        if das.keyed:
            each = "each request its own number where attention allows it, else "
        else:
            each = ""
        found["drafts"] = (
            f"made on the device; {each}one for all requests of a step: 0, {lengths}"
        )
    if das.shares_history:
        if host and das.saves_history:
            saved = "saved in checkpoints"
        else:
            saved = "in no checkpoint"
        if host:
            writer = "Ray actor"
        else:
            writer = "process"
        found["history"] = (
            f"written by one {writer} on each node, in its shared memory; {saved}"
        )
    by = {
        VERL: "das-adapter's load balancer",
        NEMO_RL: "das-adapter's generation class",
    }
    if host is None:
        found["host"] = (
            "none: an engine of vLLM's looks after itself; routing, run-ahead and"
            " histories in checkpoints are for veRL and NeMo-RL"
        )
    elif das.routing == "host":
        found["routing"] = f"{host}'s own"
    else:
        found["routing"] = f"{das.routing}, by {by[host]}"
    if host == NEMO_RL and (arguments.get("data_parallel_size") or 1) > 1:
        found["routing"] = f"{host}'s own: workers that share experts step together"
    if host is None and (refused := without_host(das)):
        found["without a host"] = f"refused: {refused}"
    return found


def _runner(das: DasConfig, arguments: Mapping[str, Any], triton: bool) -> str | None:
    """Say that engines run V1, and why; None: V2 where there is a device for it."""
    if compat.version("vllm") is None:
        return (
            "not known, for lack of vLLM here: V1 where it is older than"
            f" {compat.V2_RUNNER.oldest}"
        )
    why = _v1(das, arguments, triton)
    return why and f"V1: {why}"


def _v1(das: DasConfig, arguments: Mapping[str, Any], triton: bool) -> str | None:
    """Return why engines run V1; None: they run V2, or there is no vLLM here."""
    if compat.version("vllm") is None:
        return None
    given = {
        "speculative_config": None,
        "async_scheduling": arguments.get("async_scheduling"),
    }
    return runner_for(SimpleNamespace(**given, **engine_args(das)), das, triton).v1
