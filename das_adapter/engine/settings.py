"""What an engine's config says of das-adapter: where its block comes from, and who
looks after it.
"""

from __future__ import annotations

import hashlib
import logging
import os
from typing import Any

from das_adapter.config import DasConfig, parse, read
from das_adapter.errors import ConfigError
from das_adapter.protocol.engine_args import (
    CONFIG_VARIABLE,
    REFRESHER,
    RUN_KEY,
    RUN_VARIABLE,
    SETTINGS_KEY,
)

logger = logging.getLogger("vllm.das_adapter")

HOSTS = ("verl", "nemo_rl")
"""Packages of the hosts' own extensions of vLLM's workers, with which they start every
engine.
"""


def settings(vllm_config: Any) -> DasConfig | None:
    """Read the `das:` block of an engine (vLLM's config or arguments); None where it
    has none. `log_dir` is the run's own: a host has seen to that, of an engine without
    one it is made here.
    """
    additional = vllm_config.additional_config
    if not isinstance(additional, dict):
        return None
    config = parse(additional.get(SETTINGS_KEY))
    if config is None or config.log_dir is None or hosted(vllm_config):
        return config
    if not hasattr(vllm_config, "instance_id"):  # they are arguments
        return config
    log_dir = f"{config.log_dir}/{_run(vllm_config)}"
    return config.model_copy(update={"log_dir": log_dir})


def hosted(vllm_config: Any) -> bool:
    """Return whether a host looks after an engine with a block (see
    `protocol.engine_args.REFRESHER`).
    """
    return bool(vllm_config.additional_config.get(REFRESHER) == "host")


def alone(vllm_config: Any) -> bool:
    """Return whether an engine has a block and no host."""
    return settings(vllm_config) is not None and not hosted(vllm_config)


def runs_v2(vllm_config: Any) -> bool:
    """Return whether an engine runs vLLM's V2 model runner."""
    return bool(getattr(vllm_config, "use_v2_model_runner", False))


def take_block_from_environment(args: Any) -> None:
    """Give an engine that writes, without a block of its own, the one of `DAS_CONFIG`:
    vLLM's `EngineArgs` before they are used. Not one that veRL or NeMo-RL has started,
    a reward model's too: their configs have the block, and an engine without one is
    stock. ConfigError: it can't be read.
    """
    additional = args.additional_config
    source = os.environ.get(CONFIG_VARIABLE, "")
    has_block = SETTINGS_KEY in (additional or {})
    if has_block or not source or args.runner == "pooling":
        return
    extension = args.worker_extension_cls or ""
    host, _, _ = extension.partition(".")
    if host in HOSTS:
        logger.warning(
            "das: %s in the environment has no effect on an engine that %s starts",
            CONFIG_VARIABLE,
            host,
        )
        return
    try:
        block = read(source)
    except ConfigError as error:
        raise ConfigError(f"{CONFIG_VARIABLE}: {error}") from None
    if block is None:
        return
    writes = args.runner == "generate"
    if writes or args.create_model_config().runner_type != "pooling":
        args.additional_config = {**(additional or {}), SETTINGS_KEY: block}


def prepare_standalone(args: Any, config: DasConfig) -> DasConfig:
    """Refuse, with a ConfigError, what an engine without a host can't do, and name the
    run; return the block, with which a server's clients draft from no other's text
    unless it says so.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    if config.drafter != "none" and args.speculative_config:
        raise ConfigError(
            f"das.drafter={config.drafter!r} and speculative_config both choose a"
            " drafter: remove one of them"
        )
    api_rank = getattr(args, "_api_process_rank", 0)
    has_no_python_front_end = api_rank == -1
    rust = int(os.environ.get("VLLM_USE_RUST_FRONTEND") or 0)
    if has_no_python_front_end and rust:
        raise ConfigError(
            "VLLM_USE_RUST_FRONTEND: found '1', allowed beside a das: block: '0',"
            " because vLLM's Rust front end gives requests neither labels nor seeds"
        )
    refused = without_host(config)
    if refused:
        raise ConfigError(refused)
    if isinstance(args, AsyncEngineArgs) and config.history.scope == "problem":
        # clients of a server need not know each other
        history = config.history.model_copy(update={"others": "off"})
        config = config.model_copy(update={"history": history})
        _put_block(args, config)
    run = os.environ.get(RUN_VARIABLE)
    if run:
        args.additional_config = {**args.additional_config, RUN_KEY: run}
    return config


def without_host(config: DasConfig) -> str | None:
    """Return why an engine without a host refuses a block; None: it does not."""
    history = config.history
    if not config.shares_history:
        return None
    if history.run_ahead != "off":
        return (
            f"das.history.run_ahead: found {history.run_ahead!r}, allowed: 'off',"
            " because this engine has no host that shows its next batch"
        )
    if history.load:
        return (
            f"das.history.load: found {history.load!r}, allowed: null, because this"
            f" engine has no host: set {RUN_VARIABLE} to hand a history on to the next"
            " server"
        )
    return None


def draft_less(args: Any, config: DasConfig) -> DasConfig:
    """Lower the most draft tokens to what vLLM allows beside LoRA adapters, where the
    block leaves them open; `args`: vLLM's `EngineArgs`, of which it has refused a
    config. ConfigError: the block does not, or no draft token fits.
    """
    step = args.max_num_batched_tokens
    requests = args.max_num_seqs
    fit = step // requests - 1
    sizes = f"max_num_batched_tokens={step} and max_num_seqs={requests}"
    if config.max_draft_tokens is not None or fit < 1:
        raise ConfigError(
            f"das.max_draft_tokens: found {config.num_draft_tokens}, allowed beside"
            f" LoRA adapters with {sizes}: at most {fit}, so that a step holds a draft"
            " of every request"
        )
    logger.warning("das: max_draft_tokens=%d beside LoRA adapters with %s", fit, sizes)
    return with_draft_tokens(args, config, fit)


def with_draft_tokens(args: Any, config: DasConfig, most: int) -> DasConfig:
    """Return a block with so many draft tokens at most, which all processes of an
    engine (vLLM's `EngineArgs`) then have.
    """
    changed = config.model_copy(update={"max_draft_tokens": most})
    _put_block(args, changed)
    return changed


def _put_block(args: Any, config: DasConfig) -> None:
    """Give all processes of an engine a block (vLLM's `EngineArgs`)."""
    block = config.to_dict()
    args.additional_config = {**args.additional_config, SETTINGS_KEY: block}


def history_name(vllm_config: Any) -> str:
    """Return the name of the directory of an engine's history: that of its
    data-parallel siblings too. Where all problems share one history, it is another: its
    writer would look for texts under other keys.
    """
    config = settings(vllm_config)
    kind = ""
    if config is not None and config.history.scope == "global":
        kind = "-global"
    run = _run(vllm_config)
    return f"das-history-{run}-{os.geteuid()}{kind}"


def _run(vllm_config: Any) -> str:
    """Return a name for the run of an engine without a host (vLLM's config), 12
    characters that a path may have.
    """
    run = vllm_config.additional_config.get(RUN_KEY)
    if not run:
        # Under Ray vLLM puts _dp0, _dp1, ... behind the name that data-parallel
        # siblings have.
        run, _, _ = vllm_config.instance_id.partition("_dp")
    hashed = hashlib.blake2b(run.encode(), digest_size=6)
    return hashed.hexdigest()
