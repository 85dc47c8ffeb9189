"""The `vllm.general_plugins` entry point: brings das-adapter into every engine process whose config asks for it."""

from __future__ import annotations

import functools
import os
import re
from typing import Any

from das_adapter.config import DasConfig, parse
from das_adapter.errors import UnsupportedHost
from das_adapter.protocol.engine_args import SETTINGS_KEY, engine_args

_MARK = "_das_adapter"
_WEIGHTLESS = ("custom_class", "ngram", "ngram_gpu", "suffix")


def register() -> None:
    """Hook vLLM's worker start and its request check; idempotent, and inert in an engine without a `das:` block.

    Called by vLLM in the front end, the engine core and every worker, before anything is built.
    """
    from vllm.v1.worker.worker_base import WorkerBase, WorkerWrapperBase

    if hasattr(WorkerBase, "das_rpc"):
        return
    WorkerBase.das_rpc = _das_rpc
    WorkerWrapperBase.init_device = _hook_init_device(WorkerWrapperBase.init_device)
    _allow_row_processors()
    _reserve_draft_slots()
    _choose_drafter()


def settings(vllm_config: Any) -> DasConfig | None:
    """The `das:` block of an engine, None where it has none."""
    additional = vllm_config.additional_config
    return parse(additional.get(SETTINGS_KEY)) if isinstance(additional, dict) else None


def _das_rpc(self: Any, command: str, payload: dict[str, Any]) -> Any:
    worker = getattr(self, _MARK, None)
    if worker is None:
        raise UnsupportedHost("das_rpc: this engine runs without a das: block")
    return worker.call(command, payload)


def _hook_init_device(stock: Any) -> Any:
    """The model runner, its samplers and drafter are built by `init_device`; the model is loaded after it."""

    @functools.wraps(stock)
    def init_device(self: Any) -> None:
        config = settings(self.vllm_config)
        for_verl = os.environ.get("VERL_PLATFORM") == "cpu"
        if self.vllm_config.device_config.device_type == "cpu" and (config is not None or for_verl):
            from das_adapter.engine import cpu_patches as cpu

            cpu.apply(reload_weights=for_verl, copied=config is not None and config.copies_policy)
        if config is None:
            return stock(self)
        from das_adapter import compat
        from das_adapter.engine.worker import DasWorker

        compat.require("vllm")
        if config.keyed:
            _keep_row_processors()
        stock(self)
        setattr(self.worker, _MARK, DasWorker(self.worker.model_runner, config))

    return init_device


def _choose_drafter() -> None:
    """An engine that got nothing but the block (`additional_config.das`) speculates as the block says (front end).

    A drafter with weights reads up to a draft and one token past a request's end: it gets that much more of a model
    length; hosts keep their own limit on what a request may write. And it needs its weights: a host that starts its
    engines with dummies, to be filled by the first weight sync, may not think of the drafter's."""
    from vllm.engine.arg_utils import EngineArgs

    stock = EngineArgs.create_engine_config

    @functools.wraps(stock)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.speculative_config is None and (config := settings(self)) is not None:
            self.speculative_config = engine_args(config).get("speculative_config")
            if self.speculative_config and self.speculative_config["method"] not in _WEIGHTLESS:
                self.load_format = "auto" if self.load_format == "dummy" else self.load_format
                if self.max_model_len:
                    self.max_model_len += self.speculative_config["num_speculative_tokens"] + 1
        return stock(self, *args, **kwargs)

    EngineArgs.create_engine_config = create_engine_config


def _allow_row_processors() -> None:
    """vLLM refuses min_p and logit_bias beside any drafter, because its rejection sampler does not apply them to
    drafted positions. Keyed verification does, so beside our drafter they are let through (front end)."""
    from vllm.sampling_params import SamplingParams

    stock = SamplingParams._validate_spec_decode

    @functools.wraps(stock)
    def validate(self: Any, speculative_config: Any) -> None:
        if not re.fullmatch(
            r"das_adapter\.engine\.drafters\.\w+\.Keyed\w+", str(getattr(speculative_config, "model", ""))
        ):
            stock(self, speculative_config)

    SamplingParams._validate_spec_decode = validate


def _reserve_draft_slots() -> None:
    """A drafter that writes keys and values needs slots for its tokens before they are scheduled; vLLM's scheduler
    reserves them for its own drafters alone, and a `custom_class` would write into another request's block."""
    from vllm.v1.core.sched.scheduler import Scheduler

    stock = Scheduler.__init__

    @functools.wraps(stock)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        config = settings(self.vllm_config)
        if config is not None and config.copies_policy:
            self.num_lookahead_tokens = max(self.num_lookahead_tokens, config.self.max_tokens)

    Scheduler.__init__ = init


def _keep_row_processors() -> None:
    """The other half (worker): vLLM does not even build the processors of min_p and logit_bias beside a drafter."""
    from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors
    from vllm.v1.worker import gpu_model_runner

    stock = gpu_model_runner.build_logitsprocs
    if hasattr(stock, _MARK):
        return

    @functools.wraps(stock)
    def build(vllm_config: Any, device: Any, pin_memory: bool, is_pooling_model: bool, custom: Any = ()) -> Any:
        if is_pooling_model or custom or not vllm_config.speculative_config or not settings(vllm_config):
            return stock(vllm_config, device, pin_memory, is_pooling_model, custom)
        return LogitsProcessors(kind(vllm_config, device, pin_memory) for kind in BUILTIN_LOGITS_PROCESSORS)

    setattr(build, _MARK, True)
    gpu_model_runner.build_logitsprocs = build
