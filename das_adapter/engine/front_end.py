"""What das-adapter changes in vLLM's front ends: the engine's config, its requests, its figures, its routes."""

from __future__ import annotations

import functools
import logging
from typing import Any

from das_adapter.config import DasConfig
from das_adapter.engine import figures
from das_adapter.engine.labels import RequestLabels
from das_adapter.engine.runner import has_triton, refuse, runner_for, set_v1
from das_adapter.engine.settings import (
    alone,
    hosted,
    prepare_standalone,
    runs_v2,
    settings,
    take_block_from_environment,
)
from das_adapter.patching import patch

logger = logging.getLogger("vllm.das_adapter")

KEYED = "_das_keyed"
"""Attribute of vLLM's speculative config: whether our keyed verification checks the drafts."""
LABELS = "_das_labels"
"""Attribute of vLLM's input processor: its `RequestLabels`; None: the engine has no block."""


@patch("vllm.engine.arg_utils:EngineArgs.create_engine_config", since="0.24")
def choose_runner(stock: Any) -> Any:
    """Without it an engine that got nothing but the block (`additional_config.das`, or `DAS_CONFIG` in its environment)
    would not speculate. Remove this patch when vLLM lets plug-ins complete its engine arguments."""

    @functools.wraps(stock)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        take_block_from_environment(self)
        config = settings(self)
        if config is None:
            return stock(self, *args, **kwargs)
        if not hosted(self):
            prepare_standalone(self, config)
        triton = has_triton()
        choice = runner_for(self, config, triton)
        if choice.v2:
            vars(self).update(choice.arguments)
            made = stock(self, *args, **kwargs)
            if runs_v2(made):
                logger.info("das: vLLM's V2 model runner: %s drafts on the device", config.drafter)
                return _checked(made, config)
            self.speculative_config = None
            choice = runner_for(self, config, triton, "vLLM cannot run V2 here (its log says why)")
        if choice.v1 is not None:
            set_v1(choice.v1, triton)
        vars(self).update(choice.arguments)
        return _checked(stock(self, *args, **kwargs), config)

    return create_engine_config


def _checked(made: Any, config: DasConfig) -> Any:
    """Return an engine's config, if its drafter can do with it."""
    refuse(config, made)
    if made.speculative_config is not None:
        ours = ("custom_class", "ngram_gpu", config.method)
        setattr(made.speculative_config, KEYED, config.keyed and made.speculative_config.method in ours)
    return made


@patch("vllm.config.vllm:VllmConfig._get_v2_model_runner_unsupported_features", since="0.31")
def allow_look_up(stock: Any) -> Any:
    """Without it vLLM 0.31 takes V1 for the look-up drafter, in whose place the history drafts. Remove this patch when
    0.32 is the oldest vLLM with a V2 runner that is supported."""

    @functools.wraps(stock)
    def unsupported(self: Any) -> Any:
        found = stock(self)
        config = settings(self)
        looked_up = config is not None and config.uses_history
        return [name for name in found if not (looked_up and "ngram_gpu" in name)]

    return unsupported


@patch("vllm.sampling_params:SamplingParams._validate_spec_decode", since="0.24", needs="speculative_config")
def allow_row_processors(stock: Any) -> Any:
    """Without it vLLM refuses min_p and logit_bias beside any drafter, because its rejection sampler does not apply
    them to drafted positions. Keyed verification does. Remove this patch when vLLM's rejection sampler applies min_p
    and logit_bias to drafted positions."""

    @functools.wraps(stock)
    def validate(self: Any, speculative_config: Any) -> None:
        if not getattr(speculative_config, KEYED, False):
            stock(self, speculative_config)

    return validate


@patch("vllm.v1.engine.input_processor:InputProcessor.process_inputs", since="0.24", needs="request_id, prompt, params")
def label_requests(stock: Any) -> Any:
    """Without it no request has a seed that all its samples and ranks agree on, requests to an engine without a host
    have no label, and a wrong label that came over HTTP is found in the middle of a step of all requests; here it is
    the error of its own request. Remove this patch when vLLM lets plug-ins check and change requests."""

    @functools.wraps(stock)
    def process_inputs(self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, LABELS):
            config = settings(self.vllm_config)
            labels = RequestLabels(config, self.vllm_config, hosted(self.vllm_config)) if config else None
            setattr(self, LABELS, labels)
        made = stock(self, request_id, prompt, params, *args, **kwargs)
        if getattr(self, LABELS) is not None:
            getattr(self, LABELS).complete(made)
        return made

    return process_inputs


@patch("vllm.v1.engine.async_llm:AsyncLLM.do_log_stats", since="0.24")
def log_figures(stock: Any) -> Any:
    """Without it das-adapter's figures of an engine without a host reach neither the log nor the Prometheus endpoint.
    Remove this patch when vLLM lets plug-ins add figures to its loggers."""

    @functools.wraps(stock)
    async def do_log_stats(self: Any) -> None:
        if self.log_stats and alone(self.vllm_config):
            await figures.log_async(self)
        await stock(self)

    return do_log_stats


@patch(
    "vllm.v1.engine.llm_engine:LLMEngine.do_log_stats", "vllm.v1.engine.llm_engine:LLMEngine.get_metrics", since="0.24"
)
def log_figures_offline(stock: Any) -> Any:
    """As `log_figures`, for `LLM(disable_log_stats=False)` and `LLM.get_metrics`, which would return the figures as
    they were logged last. Remove this patch when `log_figures` is removed."""

    @functools.wraps(stock)
    def logged(self: Any) -> Any:
        if self.log_stats and alone(self.vllm_config):
            figures.log(self)
        return stock(self)

    return logged


@patch("vllm.entrypoints.serve:register_vllm_serve_api_routers", since="0.24", needs="app")
def serve_refresh(stock: Any) -> Any:
    """Without it a trainer that writes weights where das-adapter cannot see it has to call `collective_rpc`, which vLLM
    serves in its development mode alone. Remove this patch when vLLM lets plug-ins add routes to its server."""

    @functools.wraps(stock)
    def register(app: Any) -> None:
        stock(app)
        app.add_route("/v1/das/refresh", _refresh, methods=["POST"])

    return register


async def _refresh(request: Any) -> Any:
    """Answer `POST /v1/das/refresh`: the weights have changed. Its body: nothing or `{"version": number}`."""
    from starlette.responses import JSONResponse

    engine = request.app.state.engine_client
    if settings(engine.vllm_config) is None:
        return JSONResponse({"error": "this engine has no das: block"}, 409)
    try:
        body = await request.json() if await request.body() else {}
        version = body.get("version")
        if version is not None and (not isinstance(version, int) or version < 0):
            raise ValueError
    except (ValueError, AttributeError):
        return JSONResponse({"error": 'allowed: nothing, or {"version": a whole number}'}, 400)
    await engine.collective_rpc("das_rpc", args=("refresh", {} if version is None else {"version": version}))
    return JSONResponse({"refreshed": True})
