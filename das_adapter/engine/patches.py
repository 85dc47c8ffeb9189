"""What das-adapter changes in vLLM's own classes, in the order in which it is done. `worker.py` and
`drafters/neural.py` change one model runner each, `cpu_patches.py` vLLM's CPU backend."""

from __future__ import annotations

import functools
from typing import Any

from das_adapter.config import DasConfig, parse
from das_adapter.errors import UnsupportedHost
from das_adapter.patching import patch
from das_adapter.protocol.engine_args import SETTINGS_KEY, engine_args
from das_adapter.protocol.label import BadLabel, Label

STATE = "_das_adapter"
"""Attribute of vLLM's worker: its `WorkerState`."""
KEYED = "_das_keyed"
"""Attribute of vLLM's speculative config: whether our keyed verification checks the drafts."""
_WEIGHTLESS = ("custom_class", "ngram", "ngram_gpu", "suffix")


def settings(vllm_config: Any) -> DasConfig | None:
    """Read the `das:` block of an engine; None where it has none."""
    additional = vllm_config.additional_config
    return parse(additional.get(SETTINGS_KEY)) if isinstance(additional, dict) else None


@patch("vllm.v1.worker.worker_base:WorkerBase.das_rpc", since="0.24", adds=True)
def reach_workers(stock: Any) -> Any:
    """Without it `collective_rpc` does not find das-adapter in the workers."""

    def das_rpc(self: Any, command: str, payload: dict[str, Any]) -> Any:
        state = getattr(self, STATE, None)
        if state is None:
            raise UnsupportedHost("das_rpc: this engine runs without a das: block")
        return state.call(command, payload)

    return das_rpc


@patch("vllm.v1.worker.worker_base:WorkerWrapperBase.init_device", since="0.24")
def bind_worker(stock: Any) -> Any:
    """Without it a worker knows nothing of das-adapter. Model runner, samplers and drafter are built by `init_device`;
    the model is loaded after it. An engine without a block is left alone."""

    @functools.wraps(stock)
    def init_device(self: Any) -> None:
        config = settings(self.vllm_config)
        if self.vllm_config.device_config.device_type == "cpu":
            from das_adapter.engine import cpu_patches

            cpu_patches.apply_to(config)
        if config is None:
            return stock(self)
        from das_adapter import compat
        from das_adapter.engine.worker import WorkerState

        compat.require("vllm")
        if config.keyed:
            build_row_processors.apply()
        stock(self)
        state = WorkerState(self.worker.model_runner, config)
        state.bind()
        setattr(self.worker, STATE, state)

    return init_device


@patch("vllm.engine.arg_utils:EngineArgs.create_engine_config", since="0.24")
def choose_drafter(stock: Any) -> Any:
    """Without it an engine that got nothing but the block (`additional_config.das`) would not speculate (front end).

    A drafter with weights reads up to a draft and one token past a request's end: `max_model_len` is raised by that
    much; hosts keep their own limit on what a request may write. And it needs its weights: a host that starts its
    engines with dummies, to be filled by the first weight sync, may not think of the drafter's."""

    @functools.wraps(stock)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = settings(self)
        if config is None:
            return stock(self, *args, **kwargs)
        if self.speculative_config is None:
            self.speculative_config = engine_args(config).get("speculative_config")
            if self.speculative_config and self.speculative_config["method"] not in _WEIGHTLESS:
                self.load_format = "auto" if self.load_format == "dummy" else self.load_format
                if self.max_model_len:
                    self.max_model_len += self.speculative_config["num_speculative_tokens"] + 1
        made = stock(self, *args, **kwargs)
        if made.speculative_config is not None:
            setattr(made.speculative_config, KEYED, config.keyed and made.speculative_config.method == "custom_class")
        return made

    return create_engine_config


@patch("vllm.sampling_params:SamplingParams._validate_spec_decode", since="0.24")
def allow_row_processors(stock: Any) -> Any:
    """Without it vLLM refuses min_p and logit_bias beside any drafter, because its rejection sampler does not apply
    them to drafted positions. Keyed verification does (front end)."""

    @functools.wraps(stock)
    def validate(self: Any, speculative_config: Any) -> None:
        if not getattr(speculative_config, KEYED, False):
            stock(self, speculative_config)

    return validate


@patch("vllm.v1.engine.input_processor:InputProcessor.process_inputs", since="0.24")
def refuse_bad_labels(stock: Any) -> Any:
    """Without it a label that came over HTTP and is wrong would be found in the worker, in the middle of a step of all
    requests; here it is the error of its own request (front end)."""

    @functools.wraps(stock)
    def process_inputs(self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            Label.of(getattr(params, "extra_args", None))
        except BadLabel:
            if settings(self.vllm_config) is not None:
                raise
        return stock(self, request_id, prompt, params, *args, **kwargs)

    return process_inputs


@patch("vllm.v1.worker.gpu_model_runner:build_logitsprocs", since="0.24")
def build_row_processors(stock: Any) -> Any:
    """Without it vLLM does not even build the processors of min_p and logit_bias beside a drafter (worker)."""
    from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors

    @functools.wraps(stock)
    def build(vllm_config: Any, device: Any, pin_memory: bool, is_pooling_model: bool, custom: Any = ()) -> Any:
        if is_pooling_model or custom or not vllm_config.speculative_config or not settings(vllm_config):
            return stock(vllm_config, device, pin_memory, is_pooling_model, custom)
        return LogitsProcessors(kind(vllm_config, device, pin_memory) for kind in BUILTIN_LOGITS_PROCESSORS)

    return build


@patch("vllm.v1.core.sched.scheduler:Scheduler.__init__", since="0.24")
def reserve_draft_slots(stock: Any) -> Any:
    """Without it a `custom_class` drafter that writes keys and values would write into another request's block: vLLM's
    scheduler reserves slots for the draft tokens of its own drafters alone."""

    @functools.wraps(stock)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        config = settings(self.vllm_config)
        if config is not None and config.copies_policy:
            self.num_lookahead_tokens = max(self.num_lookahead_tokens, config.self.max_tokens)

    return init


AT_START = (
    *(reach_workers, bind_worker, choose_drafter),
    *(allow_row_processors, refuse_bad_labels, reserve_draft_slots),
)
"""Applied in every process of vLLM, before anything is built."""
