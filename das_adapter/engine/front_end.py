"""What das-adapter changes in vLLM's front ends: the engine's config, its requests, its
figures.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from das_adapter.config import DasConfig
from das_adapter.engine.reasoning import lost_grammar
from das_adapter.engine.recurrent import shorter_drafts
from das_adapter.engine.requests import RequestLabels
from das_adapter.engine.runner import forget_v1, refuse, runner_for, set_v1
from das_adapter.engine.settings import (
    alone,
    draft_less,
    hosted,
    prepare_standalone,
    runs_v2,
    settings,
    take_block_from_environment,
    with_draft_tokens,
)
from das_adapter.errors import ConfigError
from das_adapter.patching import patch
from das_adapter.protocol.label import BadLabel
from das_adapter.protocol.messages import call_workers
from das_adapter.protocol.metrics import figures

logger = logging.getLogger("vllm.das_adapter")

VERIFIES = "_das_verifies"
"""Attribute of vLLM's speculative config: the model runner on which drafts are
verified: 1, or 2 with keyed noise.
"""
SHARDED = "_das_sharded"
"""Attribute of vLLM's speculative config: whether each rank draws for a part of the
batch.
"""
UNMASKED = "_das_unmasked"
"""Attribute of vLLM's speculative config: what structured outputs behind a model's
reasoning need, to hold for what else the step brings that ends it; None: nothing.
"""
LABELS = "_das_labels"
"""Attribute of vLLM's input processor: its `RequestLabels`; None: the engine has no
block.
"""
_gauges: dict[str, Any] = {}
"""This process's Prometheus gauges, by the figure's key."""


@patch("vllm.engine.arg_utils:EngineArgs.create_engine_config", since="0.24")
def choose_runner(stock: Any) -> Any:
    """Without it an engine that got nothing but the block (`additional_config.das`, or
    `DAS_CONFIG` in its environment) would not speculate. Remove this patch when vLLM
    lets plug-ins complete its engine arguments.
    """

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        forget_v1()
        take_block_from_environment(self)
        config = settings(self)
        if config is None:
            return stock(self, *args, **kwargs)
        if not hosted(self):
            config = prepare_standalone(self, config)
            if config.uses_history and config.history.scope == "problem":
                logger.info(
                    "das: a request drafts from texts of its whole prompt and"
                    " cache_salt alone: scope=problem"
                )
        own = self.speculative_config
        make = partial(stock, self, *args, **kwargs)
        try:
            return _checked(_made(self, config, make), config)
        except ValueError as error:
            if (
                config.drafter == "none"
                or not self.enable_lora
                or "decreasing num_speculative_tokens" not in str(error)
            ):
                raise
            self.speculative_config = own
            config = draft_less(self, config)
            return _checked(_made(self, config, make), config)
        finally:  # ours is not the caller's choice, should there be another call
            self.speculative_config = own

    return create_engine_config


def _made(
    args: Any,
    config: DasConfig,
    make: Callable[[], Any],
) -> Any:
    """Make the config of an engine with a block from its arguments (vLLM's
    `EngineArgs`) on the runner that it gets.
    """
    from vllm.triton_utils import HAS_TRITON

    choice = runner_for(args, config, HAS_TRITON)
    if choice.v1 is None and args.speculative_config is None:
        made = _with(args, choice.arguments, config, make)
        shorter = shorter_drafts(config, made)
        if shorter is not None:
            args.speculative_config = None
            return _made(args, with_draft_tokens(args, config, shorter), make)
        if runs_v2(made):
            logger.info(
                "das: vLLM's V2 model runner: %s drafts on the device", config.drafter
            )
            return _beside_slots(args, choice.arguments, config, make, made)
        args.speculative_config = None
        choice = runner_for(
            args, config, HAS_TRITON, "vLLM cannot run V2 here (its log says why)"
        )
    if choice.v1 is not None:
        set_v1(choice.v1)
    return _with(args, choice.arguments, config, make)


def _with(
    args: Any,
    changes: dict[str, Any],
    config: DasConfig,
    make: Callable[[], Any],
) -> Any:
    """Make the config of an engine whose arguments are changed. ConfigError: the model
    is a drafter's checkpoint in the speculators format, with which vLLM has replaced
    the block's drafter.
    """
    vars(args).update(changes)
    model = args.model
    asked = args.speculative_config or {}
    given = {}
    for key, value in asked.items():  # as vLLM does: a later one wins
        given[key.replace("-", "_")] = value
    made = make()
    taken = args.speculative_config
    if config.drafter != "none" and any(
        taken.get(key) != value for key, value in given.items()
    ):
        raise ConfigError(
            f"das.drafter={config.drafter!r} and the model, {model!r}, a drafter's"
            " checkpoint, both choose a drafter: set the model to its verifier,"
            f" {args.model!r}, or das.drafter to 'none'"
        )
    return made


def _beside_slots(
    args: Any,
    changes: dict[str, Any],
    config: DasConfig,
    make: Callable[[], Any],
    made: Any,
) -> Any:
    """Make the config of an engine again where its steps would hold fewer tokens than
    without drafts: vLLM takes slots for drafting from the inputs of a step for each
    request in it, whether it drafts or not.
    """
    if made.speculative_config is None:
        return made
    sizes = made.scheduler_config
    slots_each = made.speculative_config.max_num_new_slots_for_drafting
    slots = sizes.max_num_seqs * slots_each
    step_tokens = sizes.max_num_scheduled_tokens
    tokens = step_tokens + slots
    if sizes.max_num_batched_tokens >= tokens:
        return made
    logger.info(
        "das: max_num_batched_tokens=%d: steps of %d tokens, and %d slots for drafting",
        tokens,
        step_tokens,
        slots,
    )
    more = {"max_num_batched_tokens": tokens, "max_num_scheduled_tokens": step_tokens}
    own = {name: getattr(args, name) for name in more}
    try:
        return _with(args, changes | more, config, make)
    finally:
        vars(args).update(own)


def _checked(made: Any, config: DasConfig) -> Any:
    """Return an engine's config (vLLM's), with what `judge_row_processors` reads of it.
    ConfigError: the drafter does not work with it.
    """
    refuse(config, made)
    speculative = made.speculative_config
    own_methods = ("custom_class", "ngram_gpu", config.method)
    if speculative is None or speculative.method not in own_methods:
        return made
    v2 = runs_v2(made)
    if config.keyed or not v2:
        setattr(speculative, VERIFIES, 2 if v2 else 1)
    parallel = made.parallel_config
    sharded = getattr(parallel, "enable_batch_sharded_sampling", False)
    setattr(speculative, SHARDED, sharded)
    setattr(speculative, UNMASKED, lost_grammar(made))
    return made


@patch(
    "vllm.config.vllm:VllmConfig._get_v2_model_runner_unsupported_features",
    since="0.29",
)
def allow_look_up(stock: Any) -> Any:
    """Without it vLLM 0.29 to 0.31 take V1 for the look-up drafter, in whose place the
    history or the policy copy drafts. Remove this patch when 0.32 is the oldest vLLM
    with a V2 runner that is supported.
    """

    def unsupported(self: Any) -> Any:
        found = stock(self)
        config = settings(self)
        looked_up = config is not None and (config.uses_history or config.copies_policy)
        return [name for name in found if not (looked_up and "ngram_gpu" in name)]

    return unsupported


@patch(
    "vllm.config.vllm:VllmConfig._maybe_disable_dynamic_sd_for_data_parallel",
    since="0.29",
)
def keep_draft_lengths(stock: Any) -> Any:
    """Without it all steps of data-parallel engines have equally many draft tokens (V2
    runner), for the sake of drafters whose passes wait for those of other ranks;
    das-adapter refuses these. Remove this patch when vLLM lets a worker choose the
    draft length.
    """

    def disable(self: Any) -> None:
        config = settings(self)
        if config is None or not config.controlled:
            stock(self)

    return disable


@patch(
    "vllm.sampling_params:SamplingParams._validate_spec_decode",
    since="0.24",
    needs="speculative_config",
)
def judge_row_processors(stock: Any) -> Any:
    """Without it vLLM refuses min_p and logit_bias beside any drafter, although V2's
    sampler applies them to drafted positions, and allows min_tokens above 1 on V1,
    where it counts draft tokens that may be rejected, logprob_token_ids where ranks
    draw for parts of the batch, which then get none, and, before 0.27, structured
    outputs behind reasoning, which do not hold for the rest of the step that ends it.
    Remove this patch when vLLM's verification applies all five to drafted positions.
    """

    def validate(self: Any, speculative_config: Any) -> None:
        runner = getattr(speculative_config, VERIFIES, None)
        refused = None
        # a request's first token is never drafted
        if runner == 1 and self.min_tokens > 1:
            refused = (
                f"found min_tokens={self.min_tokens}, allowed beside drafts on vLLM's"
                " V1 model runner: 0, 1"
            )
        if getattr(speculative_config, SHARDED, False) and self.logprob_token_ids:
            refused = (
                "found logprob_token_ids, allowed beside drafts without"
                " enable_batch_sharded_sampling"
            )
        needed = getattr(speculative_config, UNMASKED, None)
        if needed and self.structured_outputs:
            refused = (
                "found structured_outputs, allowed beside drafts and with a"
                f" reasoning_parser {needed}"
            )
        if refused:
            from vllm.exceptions import VLLMValidationError

            raise VLLMValidationError(f"das: {refused}")
        if runner != 2:
            stock(self, speculative_config)

    return validate


@patch(
    "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
    since="0.24",
    needs="request_id, prompt, params",
)
def label_requests(stock: Any) -> Any:
    """Without it no request has a seed that all its samples and ranks agree on,
    requests to an engine without a host have no label, and a wrong label that came over
    HTTP is found in the middle of a step of all requests; here it is the error of its
    own request. So is streamed input beside drafts, whose next chunk would have another
    context. Remove this patch when vLLM lets plug-ins check and change requests.
    """

    def process_inputs(
        self: Any,
        request_id: str,
        prompt: Any,
        params: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not hasattr(self, LABELS):
            config = settings(self.vllm_config)
            labels = None
            if config is not None:
                is_hosted = hosted(self.vllm_config)
                labels = RequestLabels(config, self.vllm_config, is_hosted)
            # several threads may begin together, and one counts
            vars(self).setdefault(LABELS, labels)
        made = stock(self, request_id, prompt, params, *args, **kwargs)
        if getattr(self, LABELS) is not None:
            is_streamed = getattr(made, "resumable", False)
            if is_streamed and self.vllm_config.speculative_config is not None:
                from vllm.exceptions import VLLMValidationError

                raise VLLMValidationError(
                    "das: found a request whose input is streamed, allowed where"
                    " nothing drafts (das.drafter='none'): where a draft ends a chunk,"
                    " the next one would have another context"
                )
            try:
                getattr(self, LABELS).complete(made)
            except BadLabel as error:
                # a server answers any other class with status 500 and no message
                from vllm.exceptions import VLLMValidationError

                raise VLLMValidationError(str(error)) from None
        return made

    return process_inputs


@patch(
    "vllm.v1.engine.async_llm:AsyncLLM.do_log_stats",
    since="0.24",
    feature="figures in vLLM's log",
)
def log_figures(stock: Any) -> Any:
    """Without it das-adapter's figures of an engine without a host reach neither the
    log nor the Prometheus endpoint. Remove this patch when vLLM lets plug-ins add
    figures to its loggers.
    """

    async def do_log_stats(self: Any) -> None:
        # reading empties the engines' counters
        first = self.vllm_config.parallel_config._api_process_rank <= 0
        if self.log_stats and first and alone(self.vllm_config):
            try:
                publish(self, await call_workers(self, "stats", {}))
            except Exception as error:
                logger.error("das: no figures of the engine: %r", error)
        await stock(self)

    return do_log_stats


@patch(
    "vllm.v1.engine.llm_engine:LLMEngine.do_log_stats",
    "vllm.v1.engine.llm_engine:LLMEngine.get_metrics",
    since="0.24",
    feature="figures in vLLM's log",
)
def log_figures_offline(stock: Any) -> Any:
    """Without it `LLM(disable_log_stats=False)` logs no figures of das-adapter, and
    `LLM.get_metrics` returns them as they were logged last. Remove this patch when
    `log_figures` is removed.
    """

    def logged(self: Any) -> Any:
        if self.log_stats and alone(self.vllm_config):
            try:
                publish(self, [self.collective_rpc("das_rpc", args=("stats", {}))])
            except Exception as error:
                logger.error("das: no figures of the engine: %r", error)
        return stock(self)

    return logged


def publish(engine: Any, answers: Sequence[Sequence[dict[str, Any]]]) -> None:
    """Log the figures of an engine without a host (vLLM's `AsyncLLM` or `LLMEngine`)
    since the last time, and set its Prometheus gauges; `answers`: to `stats`, of each
    data-parallel engine's ranks.
    """
    parts = []
    for ranks in answers:
        # the rank that counts
        parts.append(max(ranks, key=lambda rank: rank.get("tokens", -1)))
    found = figures(parts, vars(engine).setdefault("_das_told", set()))
    if not sum(part["request_forwards"] for part in parts):
        return
    model = engine.vllm_config.model_config.served_model_name or ""
    for key, value in found.items():
        _gauge(key).labels(model).set(value)
    logger.info(
        "das: %.2f tokens per forward, acceptance length %.2f, coverage %.0f%%, history"
        " %.0f tokens, health %.0f",
        found.get("das/tokens_per_forward", 0.0),
        found.get("das/acceptance_length", 0.0),
        100 * found.get("das/draft_coverage", 0.0),
        found.get("das/history_tokens", 0.0),
        found.get("das/health", 0.0),
    )


def _gauge(key: str) -> Any:
    """Return this process's Prometheus gauge of a figure, registered: a new engine has
    vLLM's names removed.
    """
    from prometheus_client import REGISTRY, Gauge

    if key not in _gauges:
        name = key.removeprefix("das/").replace("/", "_")
        what = f"{key} of das-adapter, since it was last logged"
        _gauges[key] = Gauge(
            f"vllm:das_{name}",
            what,
            ["model_name"],
            registry=None,
            multiprocess_mode="mostrecent",
        )
    with suppress(ValueError):  # it is there
        REGISTRY.register(_gauges[key])
    return _gauges[key]
