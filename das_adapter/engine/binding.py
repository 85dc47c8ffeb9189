"""What das-adapter changes where vLLM makes a worker: it is given its state, of its model runner."""

from __future__ import annotations

import functools
from typing import Any

from das_adapter import compat
from das_adapter.config import DasConfig
from das_adapter.engine.settings import history_name, hosted, runs_v2, settings
from das_adapter.errors import UnsupportedHost
from das_adapter.patching import patch
from das_adapter.protocol.engine_args import needs_v1

STATE = "_das_adapter"
"""Attribute of vLLM's worker: its `WorkerState`."""


@patch("vllm.v1.worker.worker_base:WorkerBase.das_rpc", since="0.24", adds=True)
def reach_workers(stock: Any) -> Any:
    """Without it `collective_rpc` does not find das-adapter in the workers. Remove this patch when vLLM lets a plug-in
    add methods to its workers beside a host's worker extension."""

    def das_rpc(self: Any, command: str, payload: dict[str, Any]) -> Any:
        state = getattr(self, STATE, None)
        if state is None:
            raise UnsupportedHost("das_rpc: this engine runs without a das: block")
        return state.call(command, payload)

    return das_rpc


@patch("vllm.v1.worker.worker_base:WorkerWrapperBase.init_device", since="0.24")
def bind_worker(stock: Any) -> Any:
    """Without it a worker knows nothing of das-adapter. Model runner, samplers and drafter are built by `init_device`;
    the model is loaded after it. An engine without a block is left alone. Remove this patch when vLLM tells plug-ins
    that a worker has built its model runner."""

    @functools.wraps(stock)
    def init_device(self: Any) -> None:
        config = settings(self.vllm_config)
        if self.vllm_config.device_config.device_type == "cpu":
            compat.for_cpu("vllm")(config)
        if config is None:
            return stock(self)
        compat.require("vllm")
        v2 = runs_v2(self.vllm_config) and needs_v1(config) is None
        if v2:
            _prepare_v2(self.vllm_config)
        elif config.keyed:
            build_row_processors.apply()
        stock(self)
        state = _worker_state(self.worker.model_runner, config, v2)
        state.bind()
        if not hosted(self.vllm_config):
            state.stand_alone(self.worker, history_name(self.vllm_config))
        setattr(self.worker, STATE, state)

    return init_device


def _prepare_v2(vllm_config: Any) -> None:
    """Change the V2 runner's module before a runner is built."""
    if vllm_config.device_config.device_type == "cpu":
        import vllm.v1.worker.cpu.model_runner  # noqa: F401  # it replaces parts of torch before the runner is imported
    from das_adapter.engine.v2.verification import verify_by_equality

    build_speculator.apply()
    verify_by_equality.apply()


def _worker_state(runner: Any, config: DasConfig, v2: bool) -> Any:
    if v2:
        from das_adapter.engine.v2.worker import DeviceWorkerState

        return DeviceWorkerState(runner, config)
    from das_adapter.engine.v1.worker import HostWorkerState

    return HostWorkerState(runner, config)


@patch("vllm.v1.worker.gpu.model_runner:init_speculator", since="0.31", needs="vllm_config, device")
def build_speculator(stock: Any) -> Any:
    """Without it the V2 runner builds vLLM's own look-up drafter in the place of the history's. Remove this patch when
    vLLM's V2 runner loads speculators of plug-ins."""

    @functools.wraps(stock)
    def init_speculator(vllm_config: Any, device: Any, *states: Any) -> Any:
        config = settings(vllm_config)
        if config is None or not config.uses_history or vllm_config.speculative_config.method != "ngram_gpu":
            return stock(vllm_config, device, *states)
        from das_adapter.engine.v2.speculator import HistorySpeculator

        return HistorySpeculator(vllm_config, device, config)

    return init_speculator


@patch("vllm.v1.worker.gpu_model_runner:build_logitsprocs", since="0.24")
def build_row_processors(stock: Any) -> Any:
    """Without it vLLM does not even build the processors of min_p and logit_bias beside a drafter, and that of
    min_tokens counts draft tokens that may be rejected (worker). Remove this patch when vLLM's own processors apply to
    drafted positions."""
    from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors

    @functools.wraps(stock)
    def build(vllm_config: Any, device: Any, pin_memory: bool, is_pooling_model: bool, custom: Any = ()) -> Any:
        config = settings(vllm_config)
        if is_pooling_model or custom or not vllm_config.speculative_config or not config:
            return stock(vllm_config, device, pin_memory, is_pooling_model, custom)
        from das_adapter.engine.v1.processors import MinTokens

        kinds = [
            MinTokens if config.keyed and issubclass(MinTokens, kind) else kind for kind in BUILTIN_LOGITS_PROCESSORS
        ]
        return LogitsProcessors(kind(vllm_config, device, pin_memory) for kind in kinds)

    return build
