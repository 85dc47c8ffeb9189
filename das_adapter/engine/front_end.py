"""The front end of an engine without a host: where its block comes from, the labels of its requests, its figures, and
what its HTTP server offers."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import threading
from collections.abc import Sequence
from typing import Any

from das_adapter.config import DasConfig, parse, read
from das_adapter.errors import ConfigError
from das_adapter.protocol.engine_args import (
    CONFIG_VARIABLE,
    REFRESHER,
    RUN_KEY,
    RUN_VARIABLE,
    RUNNER_VARIABLE,
    SETTINGS_KEY,
)
from das_adapter.protocol.engine_calls import call_workers
from das_adapter.protocol.label import Label, Labeller
from das_adapter.protocol.metrics import faults, merge

logger = logging.getLogger("vllm.das_adapter")


def settings(vllm_config: Any) -> DasConfig | None:
    """Read the `das:` block of an engine; None where it has none."""
    additional = vllm_config.additional_config
    return parse(additional.get(SETTINGS_KEY)) if isinstance(additional, dict) else None


def hosted(vllm_config: Any) -> bool:
    """Return whether a host looks after an engine with a block (see `protocol.engine_args.REFRESHER`)."""
    return bool(vllm_config.additional_config.get(REFRESHER) == "host")


def take_block_from_environment(engine_args: Any) -> None:
    """Give an engine without a block of its own the one of `DAS_CONFIG`: vLLM's `EngineArgs` before they are used.

    Raises:
        ConfigError: it can't be read.
    """
    additional = engine_args.additional_config
    source = os.environ.get(CONFIG_VARIABLE, "")
    if SETTINGS_KEY in (additional or {}) or not source or getattr(engine_args, "runner", "auto") == "pooling":
        return
    try:
        block = read(source)
    except ConfigError as error:
        raise ConfigError(f"{CONFIG_VARIABLE}: {error}") from None
    if block is not None:
        engine_args.additional_config = {**(additional or {}), SETTINGS_KEY: block}


def prepare_standalone(engine_args: Any, config: DasConfig) -> None:
    """Refuse what an engine without a host can't do, and name the run.

    Raises:
        ConfigError: names the key.
    """
    if config.shares_history and config.history.load is not None:
        raise ConfigError(
            f"das.history.load: found {config.history.load!r}, allowed: null, because this engine "
            f"has no host: set {RUN_VARIABLE} to hand a history on to the next server"
        )
    if run := os.environ.get(RUN_VARIABLE):
        engine_args.additional_config = {**engine_args.additional_config, RUN_KEY: run}


def choose_v1(why: str) -> None:
    """Have the processes of an engine run vLLM's V1 model runner; a host has mostly said so already (`engine_env`).

    Args:
        why: it does.

    Raises:
        ConfigError: the environment says otherwise.
    """
    if (found := os.environ.setdefault(RUNNER_VARIABLE, "0")) != "0":
        raise ConfigError(
            f"{RUNNER_VARIABLE}: found {found!r}, allowed: '0', because this engine needs vLLM's V1 "
            f"model runner ({why}): unset it"
        )


def history_name(vllm_config: Any) -> str:
    """Return the name of the directory of an engine's history: that of its data-parallel siblings too."""
    run = vllm_config.additional_config.get(RUN_KEY) or vllm_config.instance_id
    return f"das-history-{hashlib.blake2b(run.encode(), digest_size=6).hexdigest()}-{os.geteuid()}"


def label(processor: Any, config: DasConfig, request: Any) -> None:
    """Label a request that came without problem or seed: its prompt is its problem, and the n-th request of a prompt
    draws the same tokens in every run. Samples of one request (`n`) have consecutive seeds.

    Args:
        processor: vLLM's `InputProcessor`.
        config: of the engine.
        request: vLLM's `EngineCoreRequest`.
    """
    params, prompt = request.sampling_params, request.prompt_token_ids
    if params is None or prompt is None:
        return
    given = Label.of(params.extra_args)
    if given.problem is not None and (given.seed is not None or params.seed is not None):
        return
    labeller = vars(processor).setdefault(
        "_das_labeller", (threading.Lock(), Labeller(config.verify.seed, _source(processor)))
    )
    with labeller[0]:
        own = labeller[1].label(prompt, validate=not given.record, media=media(request))
    extra = own.extra_args()
    del extra["das_seed"]
    params.extra_args = {**extra, **(params.extra_args or {})}
    if config.keyed and given.seed is None and params.seed is None:
        params.seed = own.seed


def media(request: Any) -> list[str]:
    """Return the hashes of the images, sound and video in a request's prompt, in their order; `request`: any of vLLM's
    that has `mm_features`."""
    return [feature.mm_hash or feature.identifier for feature in getattr(request, "mm_features", None) or ()]


def _source(processor: Any) -> int:
    """Return what distinguishes this front end from others of the run, which count the same prompts: their samples must
    differ."""
    config = processor.vllm_config
    parts = (
        socket.gethostname(),
        os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        config.model_config.seed,
        config.parallel_config.data_parallel_rank,
    )
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=6).digest(), "little")


async def log_figures_async(engine: Any) -> None:
    """Log the figures since the last time, and set the Prometheus gauges: of vLLM's `AsyncLLM`."""
    try:
        _publish(engine, await call_workers(engine, "das_rpc", ("stats", {})))
    except Exception as error:
        logger.error("das: no figures of the engine: %r", error)


def log_figures(engine: Any) -> None:
    """As `log_figures_async`, of vLLM's `LLMEngine`."""
    try:
        _publish(engine, [engine.collective_rpc("das_rpc", args=("stats", {}))])
    except Exception as error:
        logger.error("das: no figures of the engine: %r", error)


def _publish(engine: Any, answers: Sequence[Sequence[dict[str, Any]]]) -> None:
    """Take the answers of each engine's ranks to `stats`."""
    parts = [max(ranks, key=lambda rank: rank.get("tokens", -1)) for ranks in answers]
    figures = merge(parts)
    for name in ("history_tokens", "history_bytes"):
        if found := [part[name] for part in parts if name in part]:
            figures[f"das/{name}"] = float(max(found))
    told: set[str] = vars(engine).setdefault("_das_told", set())
    for fault, reason in faults(parts).items():
        if fault not in told:
            told.add(fault)
            logger.error("das: das/health is 0: %s", reason)
    if sum(part["request_forwards"] for part in parts):
        _set_gauges(engine, figures)
        logger.info(
            "das: %.2f tokens per forward, acceptance length %.2f, coverage %.0f%%, history %.0f tokens, health %.0f",
            *(
                figures.get(f"das/{name}", 0.0) * scale
                for name, scale in (
                    ("tokens_per_forward", 1),
                    ("acceptance_length", 1),
                    ("draft_coverage", 100),
                    ("history_tokens", 1),
                    ("health", 1),
                )
            ),
        )


def _set_gauges(engine: Any, figures: dict[str, float]) -> None:
    from prometheus_client import Gauge

    known: dict[str, Any] = vars(engine).setdefault("_das_gauges", {})
    for key, value in figures.items():
        name = "vllm:das_" + key.removeprefix("das/").replace("/", "_")
        if name not in known:
            gauge = Gauge(
                name, f"{key} of das-adapter, since it was last logged", ["model_name"], multiprocess_mode="mostrecent"
            )
            known[name] = gauge.labels(engine.vllm_config.model_config.served_model_name or "")
        known[name].set(value)


def add_routes(app: Any) -> None:
    """Add `POST /v1/das/refresh` to vLLM's server: the weights have changed. Its body: nothing or
    `{"version": number}`."""
    from starlette.responses import JSONResponse

    async def refresh(request: Any) -> JSONResponse:
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

    app.add_route("/v1/das/refresh", refresh, methods=["POST"])
