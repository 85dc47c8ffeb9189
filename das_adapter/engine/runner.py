"""Choose vLLM's model runner for an engine and what vLLM is told, and refuse what does
not work.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from das_adapter import compat, features
from das_adapter.config import DasConfig
from das_adapter.engine.recurrent import UNFIT_DEVICES, is_recurrent
from das_adapter.engine.settings import hosted, runs_v2
from das_adapter.errors import ConfigError
from das_adapter.protocol.engine_args import (
    RUNNER_VARIABLE,
    needs_v1,
    v1_speculative_config,
    v2_speculative_config,
)

logger = logging.getLogger("vllm.das_adapter")

ONE_LENGTH: dict[str, Callable[[Any], bool]] = {
    "LoRA adapters": lambda config: config.lora_config is not None,
    "experts' routing is returned": lambda config: any(
        getattr(getattr(config, name, None), "enable_return_routed_experts", False)
        for name in ("aux_output_config", "model_config")
    ),
    "sampling masks are returned": lambda config: getattr(
        config.model_config, "return_sampling_mask", False
    ),
    "batch-sharded sampling": lambda config: getattr(
        config.parallel_config, "enable_batch_sharded_sampling", False
    ),
    "context parallelism": lambda config: (
        max(
            config.parallel_config.decode_context_parallel_size,
            config.parallel_config.prefill_context_parallel_size,
        )
        > 1
    ),
}
"""What has all requests of a step draft equally many tokens on V2, and whether an
engine (vLLM's config) has it.
"""
HOST_PLANS = "plans by lengths that the host knows"
"""What of an engine's attention has all requests of a step draft equally many tokens on
V2; so have the next two.
"""
NO_GRAPHS = "has no full CUDA graphs for unequal lengths"
"""Attention that would run such steps without CUDA graphs."""
SMALL_HEADS = "has heads of 64 or less, with experts over data-parallel ranks"
"""Attention of small heads where data-parallel ranks share experts."""
STOCK_NOISE = "das.verify.noise=stock"
"""What of the block has all requests of a step draft equally many tokens on V2."""

_chosen = threading.Event()
"""Set while `set_v1` has chosen the runner of this process's environment."""


class Choice(NamedTuple):
    """The model runner of an engine, and what vLLM is told."""

    v1: str | None
    """Why it must run V1; None: it runs what vLLM takes, V2 if there is no
    `speculative_config` of a host.
    """
    arguments: dict[str, Any]
    """Engine arguments to change."""


def runner_for(
    args: Any,
    config: DasConfig,
    triton: bool = True,
    lacking: str | None = None,
) -> Choice:
    """Choose the model runner of an engine (vLLM's `EngineArgs`); `triton`: whether
    vLLM finds a device that Triton compiles for; `lacking`: why vLLM has not taken V2
    when it was tried, None: it was not.

    Raises:
        ConfigError: an engine argument does not work with the runner that the block
            needs.
    """
    why = lacking or needs_v1(config)
    if why is None and not triton:
        why = "vLLM finds no device that Triton compiles for"
    drafts = config.drafter != "none"
    synchronous = args.async_scheduling is False
    if why is None and drafts and synchronous and compat.missing(compat.V2_OWN_LENGTHS):
        why = (
            "its V2 runner drafts equally many tokens in every step where scheduling is"
            " synchronous"
        )
    if why is not None and config.parallel:
        raise ConfigError(
            f"das.drafter: found {config.drafter!r}, allowed on vLLM's V2 model runner"
            f" alone, from vLLM {compat.V2_RUNNER.oldest} on, but the engine runs V1:"
            f" {why}"
        )
    outputs = getattr(args, "aux_output_config", None)
    returns_experts = getattr(outputs, "enable_return_routed_experts", False)
    if why is not None and returns_experts:
        raise ConfigError(
            f"das.drafter={config.drafter!r}: found enable_return_routed_experts=True,"
            " which this vLLM allows on its V2 model runner alone, but the engine runs"
            f" V1: {why}"
        )
    _refuse_what_is_missing(args, config, why)
    if args.speculative_config is None and why is None:
        return Choice(None, {"speculative_config": v2_speculative_config(config)})
    changed: dict[str, Any] = {}
    if config.controlled:
        if args.async_scheduling:
            raise ConfigError(
                f"das.drafter={config.drafter!r}: found async_scheduling=True, allowed:"
                " None or False: vLLM's V1 runner must know the tokens of a step"
                " before it drafts"
            )
        changed["async_scheduling"] = False
    if args.speculative_config is None:
        changed["speculative_config"] = v1_speculative_config(config)
        if config.neural and not hosted(args) and args.load_format == "dummy":
            # the drafter needs its weights; the first update fills the policy's
            changed["load_format"] = "auto"
    if why is None and not hosted(args):
        why = "its speculative_config is not das-adapter's"
    return Choice(why, changed)


def _refuse_what_is_missing(
    args: Any,
    config: DasConfig,
    v1: str | None,
) -> None:
    """Refuse an engine that needs what the installed vLLM leaves out, and say what it
    goes on without; `v1`: why it runs the V1 model runner, None: it runs V2.
    """
    drafter = f"das.drafter={config.drafter!r}"
    asked = {} if v1 is None else {features.V1_RUNNER: f"V1, because {v1}"}
    if config.neural:
        asked[features.OWN_WEIGHTS] = drafter
        if v1 is not None:
            asked[features.V1_DRAFTERS] = drafter
    if config.method in ("dflash", "dspark"):
        asked[features.DFLASH] = drafter
    if config.method == "dspark":
        asked[features.DSPARK] = drafter
    compat.refuse_without("vllm" if v1 is not None else compat.V2_RUNNER, asked)
    alone = () if hosted(args) else (features.WEIGHT_CALLS, features.ADAPTERS)
    compat.warn_without("vllm", (features.ENGINE_FIGURES, features.REHEARSAL, *alone))


def set_v1(why: str) -> None:
    """Have the processes of an engine run vLLM's V1 model runner, and say why.
    ConfigError: the environment says otherwise.
    """
    if RUNNER_VARIABLE not in os.environ:
        _chosen.set()
    found = os.environ.setdefault(RUNNER_VARIABLE, "0")
    if found != "0":
        raise ConfigError(
            f"{RUNNER_VARIABLE}: found {found!r}, allowed: '0', because this engine"
            f" needs vLLM's V1 model runner ({why}): unset it"
        )
    logger.info("das: vLLM's V1 model runner: %s", why)


def forget_v1() -> None:
    """Take back what `set_v1` chose for an earlier engine, whose processes have
    started, before another one is made.
    """
    if _chosen.is_set() and os.environ.get(RUNNER_VARIABLE) == "0":
        del os.environ[RUNNER_VARIABLE]
    _chosen.clear()


class Engine(NamedTuple):
    """What an engine has that a drafter may not work with; the defaults work with
    all.
    """

    pipeline_ranks: int = 1
    prefill_ranks: int = 1
    """Of prefill context parallelism."""
    context_ranks: int = 1
    """Of decode context parallelism."""
    tensor_ranks: int = 1
    backend: Any = None
    """vLLM's `distributed_executor_backend`."""
    data_ranks: int = 1
    has_experts: bool = False
    has_adapters: bool = False
    balances_experts: bool = False
    has_watermark: bool = False
    is_recurrent: bool = False
    is_multimodal: bool = False
    has_mrope: bool = False
    """Multimodal rotary positions."""
    runs_v2: bool = True


def _engine(vllm_config: Any) -> Engine:
    """Return what an engine has, by vLLM's config."""
    parallel = vllm_config.parallel_config
    model = vllm_config.model_config
    return Engine(
        pipeline_ranks=parallel.pipeline_parallel_size,
        prefill_ranks=getattr(parallel, "prefill_context_parallel_size", 1),
        context_ranks=getattr(parallel, "decode_context_parallel_size", 1),
        tensor_ranks=parallel.tensor_parallel_size,
        backend=parallel.distributed_executor_backend,
        data_ranks=parallel.data_parallel_size,
        has_experts=getattr(model, "is_moe", True),
        has_adapters=vllm_config.lora_config is not None,
        balances_experts=parallel.enable_eplb,
        has_watermark=getattr(vllm_config, "watermark_config", None) is not None,
        is_recurrent=is_recurrent(model),
        is_multimodal=model.is_multimodal_model,
        has_mrope=model.uses_mrope,
        runs_v2=runs_v2(vllm_config),
    )


def refuse_engine(config: DasConfig, engine: Engine) -> None:
    """Refuse, with a ConfigError, what a drafter can't do with this model or this
    number of ranks.
    """
    if config.drafter == "none":
        return
    ranks = engine.tensor_ranks
    vllms_own = config.neural and not config.uses_history and not config.controlled
    refused = {
        f"pipeline_parallel_size={engine.pipeline_ranks}": engine.pipeline_ranks > 1,
        # One rank of an engine has the history, and the ranks that share its prompts
        # draft apart.
        f"prefill_context_parallel_size={engine.prefill_ranks}": (
            engine.prefill_ranks > 1 and not (config.neural and not config.uses_history)
        ),
        # Each rank has a scheduler of its own there, which knows only what its own rank
        # has drafted.
        f"tensor_parallel_size={ranks} under {engine.backend!r}": (
            ranks > 1 and engine.backend == "external_launcher" and not vllms_own
        ),
        # Its sampler draws the tokens by the watermark's key; keyed noise would leave
        # it out without a word.
        "watermark_config": config.keyed and engine.has_watermark,
        # After a step without drafts V1 goes on from before the last accepted tokens.
        f"a policy with recurrent state on vLLM's V1 model runner (V2 runs it, from"
        f" vLLM {compat.V2_RUNNER.oldest} on)": (
            engine.is_recurrent and config.controlled and not engine.runs_v2
        ),
        # Its passes would write the policy's own state.
        "a policy with recurrent state": engine.is_recurrent and config.copies_policy,
    }
    if config.copies_policy:
        refused |= {
            "LoRA adapters": engine.has_adapters,
            "enable_eplb=True": engine.balances_experts,
        }
    if config.neural and config.controlled:
        refused |= {"a multimodal policy": engine.is_multimodal}
    if config.controlled and config.by_model:
        shards = engine.context_ranks
        refused |= {
            f"decode_context_parallel_size={shards} on vLLM's V1 runner": (
                shards > 1 and not engine.runs_v2
            ),
            "a policy with multimodal rotary positions (M-RoPE)": engine.has_mrope,
            f"experts over data_parallel_size={engine.data_ranks}": (
                engine.data_ranks > 1 and engine.has_experts
            ),
        }
    for found, wrong in refused.items():
        if not wrong:
            continue
        works_uncontrolled = config.neural and not config.uses_history
        ways = ""
        if works_uncontrolled and engine.pipeline_ranks == 1:
            ways = "; das.budget=unlimited with das.speculate=always does"
        raise ConfigError(
            f"das.drafter={config.drafter!r} does not work with {found}{ways}"
        )


def refuse(config: DasConfig, vllm_config: Any) -> None:
    """Refuse, with a ConfigError, what a drafter can't do in an engine with vLLM's
    config.
    """
    if config.drafter == "none":
        return
    engine = _engine(vllm_config)
    refuse_engine(config, engine)
    plug_ins: list[str] = []
    if not engine.runs_v2:
        entries = importlib.metadata.entry_points(group="vllm.logits_processors")
        plug_ins = sorted(entry.name for entry in entries)
    if plug_ins:
        names = ", ".join(plug_ins)
        raise ConfigError(
            f"das.drafter={config.drafter!r}: found installed logits processors"
            f" ({names}), which vLLM's V1 runner leaves out beside any drafter: other"
            " tokens would be written; allowed: das.drafter='none'"
        )
    if engine.is_recurrent and vllm_config.device_config.device_type in UNFIT_DEVICES:
        raise ConfigError(
            f"das.drafter={config.drafter!r}: found a policy with recurrent state on a"
            " CPU, where vLLM's convolutions keep what rejected draft tokens left:"
            " other tokens would be written; allowed: das.drafter='none'"
        )
