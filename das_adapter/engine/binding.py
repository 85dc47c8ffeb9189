"""What das-adapter changes where vLLM makes a worker: it is given its state, of its
model runner.
"""

from __future__ import annotations

from typing import Any

from das_adapter import compat, tried
from das_adapter.engine import recurrent
from das_adapter.engine.settings import history_name, hosted, runs_v2, settings
from das_adapter.errors import UnsupportedHost
from das_adapter.patching import patch
from das_adapter.protocol.engine_args import needs_v1

STATE = "_das_adapter"
"""Attribute of vLLM's worker that holds its `WorkerState`."""


@patch("vllm.v1.worker.worker_base:WorkerBase.das_rpc", since="0.24", adds=True)
def reach_workers(stock: Any) -> Any:
    """Without it `collective_rpc` does not find das-adapter in the workers. Remove this
    patch when vLLM lets a plug-in add methods to its workers beside a host's worker
    extension.
    """

    def das_rpc(self: Any, command: str, payload: dict[str, Any]) -> Any:
        state = getattr(self, STATE, None)
        if state is None:
            raise UnsupportedHost("das_rpc: this engine runs without a das: block")
        return state.call(command, payload)

    return das_rpc


@patch("vllm.v1.worker.worker_base:WorkerWrapperBase.init_device", since="0.24")
def bind_worker(stock: Any) -> Any:
    """Without it a worker knows nothing of das-adapter. Model runner, samplers and
    drafter are built by `init_device`; the model is loaded after it. An engine without
    a block is left alone. Remove this patch when vLLM tells plug-ins that a worker has
    built its model runner.
    """

    def init_device(self: Any) -> None:
        config = settings(self.vllm_config)
        on_cpu = self.vllm_config.device_config.device_type == "cpu"
        if on_cpu:
            compat.for_cpu("vllm")(config)
        if config is None:
            return stock(self)
        compat.require("vllm")
        if self.global_rank == 0:
            tried.warn("vllm")
        v2 = runs_v2(self.vllm_config) and needs_v1(config) is None
        if v2 and on_cpu:
            import vllm.v1.worker.cpu.model_runner  # noqa: F401  # it replaces parts of torch before V2's is imported
        if v2:
            from das_adapter.engine.v2 import admission
            from das_adapter.engine.v2.verification import (
                drop_drafts_beside_chosen_tokens,
                verify_by_equality,
            )

            build_speculator.apply()
            admission.admit_by_worth.apply()
            admission.capture_plain_steps.apply()
            admission.allow_no_graphs.try_apply()
            if recurrent.is_recurrent(self.vllm_config.model_config):
                recurrent.capture_any_length.apply()
                recurrent.begin_with_accepted_state.apply()
            drop_drafts_beside_chosen_tokens.apply()
            if config.keyed:
                verify_by_equality.apply()
        stock(self)
        state: Any
        if v2:
            from das_adapter.engine.v2.worker import DeviceWorkerState

            state = DeviceWorkerState(self.worker.model_runner, config)
        else:
            from das_adapter.engine.v1.worker import HostWorkerState

            state = HostWorkerState(self.worker.model_runner, config)
        state.bind()
        if v2 and config.controlled:
            admission.idle_with_one_token.apply(
                self.worker.model_runner, owner=self.worker
            )
        if state.draft_weights:
            from das_adapter.engine.draft_weights import keep_buffers_over_sleep

            keep_buffers_over_sleep.apply(
                state.draft_weights.keep_buffers, owner=self.worker
            )
        if not hosted(self.vllm_config):
            state.stand_alone(self.worker, history_name(self.vllm_config))
        setattr(self.worker, STATE, state)

    return init_device


@patch(
    "vllm.v1.worker.gpu.model_runner:init_speculator",
    since="0.29",
    needs="vllm_config, device",
)
def build_speculator(stock: Any) -> Any:
    """Without it the V2 runner builds vLLM's own look-up drafter in the place of
    das-adapter's. Remove this patch when vLLM's V2 runner loads speculators of
    plug-ins.
    """

    def init_speculator(
        vllm_config: Any,
        device: Any,
        *states: Any,
    ) -> Any:
        config = settings(vllm_config)
        if config is None or config.neural:
            return stock(vllm_config, device, *states)
        if vllm_config.speculative_config.method != "ngram_gpu":
            return stock(vllm_config, device, *states)
        if config.copies_policy:
            from das_adapter.engine.v2.copy_drafts import CopySpeculator

            return CopySpeculator(vllm_config, device, config.self.weights)
        from das_adapter.engine.v2.speculator import HistorySpeculator

        return HistorySpeculator(vllm_config, device, config)

    return init_speculator
