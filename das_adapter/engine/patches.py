"""What das-adapter changes in vLLM's own classes, in the order in which it is done. `worker.py` and
`drafters/neural.py` change one model runner each, `cpu_patches.py` vLLM's CPU backend."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import re
from typing import Any

from das_adapter import compat
from das_adapter.config import DasConfig
from das_adapter.engine import front_end
from das_adapter.engine.front_end import history_name, hosted, settings
from das_adapter.errors import ConfigError, UnsupportedHost
from das_adapter.patching import patch
from das_adapter.protocol.engine_args import needs_v1, v1_args, v2_speculative_config
from das_adapter.protocol.label import Label

logger = logging.getLogger("vllm.das_adapter")

STATE = "_das_adapter"
"""Attribute of vLLM's worker: its `WorkerState`; of its input processor: the `DasConfig`,
and whether the engine runs V2."""
KEYED = "_das_keyed"
"""Attribute of vLLM's speculative config: whether our keyed verification checks the drafts."""


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
            from das_adapter.engine import cpu_patches

            cpu_patches.apply_to(config)
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


def runs_v2(vllm_config: Any) -> bool:
    """Whether an engine runs vLLM's V2 model runner."""
    return bool(getattr(vllm_config, "use_v2_model_runner", False))


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
    from das_adapter.engine.v1.worker import WorkerState

    return WorkerState(runner, config)


@patch("vllm.config.vllm:VllmConfig._get_v2_model_runner_unsupported_features", since="0.31")
def allow_look_up(stock: Any) -> Any:
    """Without it vLLM 0.31 takes V1 for the look-up drafter, in whose place the history drafts (front end). Remove this
    patch when 0.32 is the oldest vLLM with a V2 runner that is supported."""

    @functools.wraps(stock)
    def unsupported(self: Any) -> Any:
        found = stock(self)
        config = settings(self)
        looked_up = config is not None and config.uses_history
        return [name for name in found if not (looked_up and "ngram_gpu" in name)]

    return unsupported


@patch("vllm.v1.worker.gpu.model_runner:init_speculator", since="0.31", needs="vllm_config, device")
def build_speculator(stock: Any) -> Any:
    """Without it the V2 runner builds vLLM's own look-up drafter in the place of the history's (worker). Remove this
    patch when vLLM's V2 runner loads speculators of plug-ins."""

    @functools.wraps(stock)
    def init_speculator(vllm_config: Any, device: Any, *states: Any) -> Any:
        config = settings(vllm_config)
        if config is None or not config.uses_history or vllm_config.speculative_config.method != "ngram_gpu":
            return stock(vllm_config, device, *states)
        from das_adapter.engine.v2.speculator import HistorySpeculator

        return HistorySpeculator(vllm_config, device, config)

    return init_speculator


@patch("vllm.engine.arg_utils:EngineArgs.create_engine_config", since="0.24")
def choose_drafter(stock: Any) -> Any:
    """Without it an engine that got nothing but the block (`additional_config.das`, or `DAS_CONFIG` in its environment)
    would not speculate (front end).

    On V1 a drafter with weights reads up to a draft and one token past a request's end: without a host `max_model_len`
    is raised by that much. And it needs its weights, where the engine starts with dummies, to be filled by the first
    weight update. Remove this patch when vLLM lets plug-ins complete its engine arguments."""

    @functools.wraps(stock)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        front_end.take_block_from_environment(self)
        config = settings(self)
        if config is None:
            return stock(self, *args, **kwargs)
        if not hosted(self):
            front_end.prepare_standalone(self, config)
        why = needs_v1(config) or (None if _has_triton() else "vLLM finds no device that Triton compiles for")
        if why is None and config.drafter != "none":
            why = _no_draft_lengths(self)
        if why is not None and getattr(getattr(self, "aux_output_config", None), "enable_return_routed_experts", False):
            raise ConfigError(
                f"das.drafter={config.drafter!r}: found enable_return_routed_experts=True, which this vLLM allows on "
                f"its V2 model runner alone, but the engine runs V1: {why}"
            )
        if self.speculative_config is None and why is None:
            self.speculative_config = v2_speculative_config(config)
            made = stock(self, *args, **kwargs)
            if runs_v2(made):
                if config.drafter != "none":
                    _refuse(config, made)
                _keyed(made, config)
                logger.info("das: vLLM's V2 model runner: %s drafts on the device", config.drafter)
                return made
            self.speculative_config, why = None, "vLLM cannot run V2 here (its log says why)"
        if config.controlled:
            if self.async_scheduling:
                raise ConfigError(
                    f"das.drafter={config.drafter!r}: found async_scheduling=True, allowed: None or False: vLLM's V1 "
                    "runner must know the tokens of a step before it drafts"
                )
            self.async_scheduling = False
        if why is not None or not hosted(self):
            why = why or "its speculative_config is not das-adapter's"
            front_end.choose_v1(why)
            logger.log(_loudness(), "das: vLLM's V1 model runner: %s", why)
        if self.speculative_config is None:
            self.speculative_config = v1_args(config).get("speculative_config")
            if config.neural and not hosted(self):
                self.load_format = "auto" if self.load_format == "dummy" else self.load_format
                if self.max_model_len:
                    self.max_model_len += config.num_draft_tokens + 1
        made = stock(self, *args, **kwargs)
        if config.drafter != "none":
            _refuse(config, made)
        _keyed(made, config)
        return made

    return create_engine_config


def _refuse(config: DasConfig, vllm_config: Any) -> None:
    """Refuse what a drafter can't do with this model or this number of ranks."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    refused = {f"pipeline_parallel_size={parallel.pipeline_parallel_size}": parallel.pipeline_parallel_size > 1}
    if config.copies_policy:
        refused |= {
            "a policy with recurrent state": model.is_hybrid,
            "LoRA adapters": vllm_config.lora_config is not None,
        }
    if config.neural and config.controlled:
        refused |= {"a multimodal policy": model.is_multimodal_model}
    if config.controlled and (config.neural or config.copies_policy):
        refused |= {
            "a policy with multimodal rotary positions (M-RoPE)": model.uses_mrope,
            f"experts over data_parallel_size={parallel.data_parallel_size}": parallel.data_parallel_size > 1
            and getattr(model, "is_moe", True),
        }
    for found, wrong in refused.items():
        if wrong:
            ways = (
                ""
                if not config.neural or config.uses_history or parallel.pipeline_parallel_size > 1
                else "; das.budget.policy=unlimited with das.toggle.mode=off does"
            )
            raise ConfigError(f"das.drafter={config.drafter!r} does not work with {found}{ways}")
    if model.is_hybrid and vllm_config.device_config.device_type == "cpu":
        raise ConfigError(
            f"das.drafter={config.drafter!r}: found a policy with recurrent state on a CPU, where vLLM's convolutions "
            "keep what rejected draft tokens left: other tokens would be written; allowed: das.drafter='none'"
        )
    if model.is_hybrid:
        logger.warning(
            "das: the policy has recurrent state: vLLM keeps 1 + %d copies of it for each request, so that drafts can "
            "be rejected; fewer draft tokens leave more room",
            config.num_draft_tokens,
        )


def _loudness() -> int:
    """How loud to say that an engine runs V1: where V2 is there, it is slower for it."""
    there = compat.numbers(compat.version("vllm") or "0") >= compat.numbers(compat.V2_RUNNER.oldest)
    return logging.WARNING if there and _has_triton() else logging.INFO


def _no_draft_lengths(engine_args: Any) -> str | None:
    """Say why vLLM's V2 runner would draft equally many tokens in every step; None: it would not."""
    if max(engine_args.data_parallel_size, int(os.environ.get("VLLM_DP_SIZE") or 1)) > 1:
        return "V2 has no draft lengths by step beside data_parallel_size > 1"
    if engine_args.async_scheduling is False and compat.missing_on_v2(compat.V2_NEURAL):
        return "its V2 runner drafts equally many tokens in every step where scheduling is synchronous"
    return None


def _has_triton() -> bool:
    from vllm.triton_utils import HAS_TRITON

    return bool(HAS_TRITON)


def _keyed(made: Any, config: DasConfig) -> None:
    if made.speculative_config is not None:
        ours = ("custom_class", "ngram_gpu", config.method)
        setattr(made.speculative_config, KEYED, config.keyed and made.speculative_config.method in ours)


@patch("vllm.sampling_params:SamplingParams._validate_spec_decode", since="0.24", needs="speculative_config")
def allow_row_processors(stock: Any) -> Any:
    """Without it vLLM refuses min_p and logit_bias beside any drafter, because its rejection sampler does not apply
    them to drafted positions. Keyed verification does (front end). Remove this patch when vLLM's rejection sampler
    applies min_p and logit_bias to drafted positions."""

    @functools.wraps(stock)
    def validate(self: Any, speculative_config: Any) -> None:
        if not getattr(speculative_config, KEYED, False):
            stock(self, speculative_config)

    return validate


@patch("vllm.v1.engine.input_processor:InputProcessor.process_inputs", since="0.24", needs="request_id, prompt, params")
def read_labels(stock: Any) -> Any:
    """Without it a label that came over HTTP and is wrong would be found in the worker, in the middle of a step of all
    requests; here it is the error of its own request. And the `n` samples of one request would all draw with the
    label's seed: as `SamplingParams.seed`, vLLM counts it on for each of them. Requests to an engine without a host are
    labelled here (front end). Remove this patch when vLLM lets plug-ins check and change requests."""

    @functools.wraps(stock)
    def process_inputs(self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, STATE):
            config = settings(self.vllm_config)
            setattr(self, STATE, (config, config is not None and runs_v2(self.vllm_config)))
        config, v2 = getattr(self, STATE)
        if config is None:
            return stock(self, request_id, prompt, params, *args, **kwargs)
        seed = Label.of(getattr(params, "extra_args", None)).seed
        made = stock(self, request_id, prompt, params, *args, **kwargs)
        if not hosted(self.vllm_config):
            front_end.label(self, config, made)
        if config.keyed and made.sampling_params is not None:
            if seed is not None:
                made.sampling_params.seed = seed
            if v2:
                made.sampling_params.seed = signed_seed(made.sampling_params.seed, made.request_id)
        return made

    return process_inputs


def signed_seed(seed: int | None, req_id: str) -> int:
    """Return the seed of a request's noise as a signed number of 64 bits, such as the V2 runner holds; one that asked
    for no particular tokens has a seed that stays with it through preemptions."""
    if seed is None:
        seed = int.from_bytes(hashlib.blake2b(req_id.encode(), digest_size=8).digest(), "little")
    return (int(seed) + 2**63) % 2**64 - 2**63


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
        from das_adapter.engine.v1.verification import MinTokens

        kinds = [
            MinTokens if config.keyed and issubclass(MinTokens, kind) else kind for kind in BUILTIN_LOGITS_PROCESSORS
        ]
        return LogitsProcessors(kind(vllm_config, device, pin_memory) for kind in kinds)

    return build


@patch("vllm.v1.core.sched.scheduler:Scheduler.__init__", since="0.24", needs="vllm_config")
def reserve_draft_slots(stock: Any) -> Any:
    """Without it a `custom_class` drafter that writes keys and values would write into another request's block: vLLM's
    scheduler reserves slots for the draft tokens of its own drafters alone. Remove this patch when vLLM reserves slots
    for `custom_class` drafters (docs/upstream/vllm/0003) and lets a worker choose the draft length."""

    @functools.wraps(stock)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        config = settings(self.vllm_config)
        if config is not None and config.copies_policy:
            self.num_lookahead_tokens = max(self.num_lookahead_tokens, config.self.max_tokens)
        if config is not None and config.drafter != "none" and runs_v2(self.vllm_config) and self.dynamic_sd_lookup:
            self.dynamic_sd_lookup = DraftLength(0)

    return init


@patch("vllm.v1.engine.async_llm:AsyncLLM.do_log_stats", since="0.24")
def log_figures(stock: Any) -> Any:
    """Without it das-adapter's figures of an engine without a host reach neither the log nor the Prometheus endpoint
    (front end). Remove this patch when vLLM lets plug-ins add figures to its loggers."""

    @functools.wraps(stock)
    async def do_log_stats(self: Any) -> None:
        if _has_figures(self):
            await front_end.log_figures_async(self)
        await stock(self)

    return do_log_stats


@patch("vllm.v1.engine.llm_engine:LLMEngine.do_log_stats", since="0.24")
def log_figures_offline(stock: Any) -> Any:
    """As `log_figures`, for `LLM(disable_log_stats=False)`. Remove this patch when `log_figures` is removed."""

    @functools.wraps(stock)
    def do_log_stats(self: Any) -> None:
        if _has_figures(self):
            front_end.log_figures(self)
        stock(self)

    return do_log_stats


@patch("vllm.v1.engine.llm_engine:LLMEngine.get_metrics", since="0.24")
def read_figures_offline(stock: Any) -> Any:
    """Without it `LLM.get_metrics` returns das-adapter's figures as they were logged last. Remove this patch when
    `log_figures` is removed."""

    @functools.wraps(stock)
    def get_metrics(self: Any) -> Any:
        if _has_figures(self):
            front_end.log_figures(self)
        return stock(self)

    return get_metrics


def _has_figures(engine: Any) -> bool:
    config = engine.vllm_config
    return bool(engine.log_stats) and settings(config) is not None and not hosted(config)


@patch("vllm.entrypoints.serve:register_vllm_serve_api_routers", since="0.24", needs="app")
def serve_refresh(stock: Any) -> Any:
    """Without it a trainer that writes weights where das-adapter cannot see it has to call `collective_rpc`, which vLLM
    serves in its development mode alone (front end). Remove this patch when vLLM lets plug-ins add routes to its
    server."""

    @functools.wraps(stock)
    def register(app: Any) -> None:
        stock(app)
        front_end.add_routes(app)

    return register


_WEIGHT_CALL = re.compile(r"(update|load|receive|sync|refit|broadcast)\w*(weight|param)|finish_weight_update")
"""Names under which trainers' worker extensions take new weights."""


@patch("vllm.v1.engine.core:EngineCore.collective_rpc", since="0.24", needs="method")
def see_weight_calls(stock: Any) -> Any:
    """Without it an engine without a host does not see that a trainer's worker extension has copied weights into the
    parameters (engine core). Remove this patch when vLLM tells plug-ins that its weights were updated."""

    @functools.wraps(stock)
    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        answers = stock(self, method, *args, **kwargs)
        config = self.vllm_config
        if isinstance(method, str) and _WEIGHT_CALL.search(method) and settings(config) and not hosted(config):
            stock(self, "das_rpc", args=("refresh", {}))
        return answers

    return collective_rpc


class DraftLength:
    """Stands where vLLM looks up how many tokens are drafted for each request of a batch of some size."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __getitem__(self, requests: int) -> int:
        return self.tokens


@patch(
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
    since="0.24",
    needs="scheduler_output, model_runner_output",
)
def hear_draft_length(stock: Any) -> Any:
    """Without it the scheduler of an engine on the V2 runner does not hear which draft length its worker has chosen.
    Remove this patch when vLLM lets a worker choose the draft length."""

    @functools.wraps(stock)
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        chosen = getattr(model_runner_output, "das_draft_length", None)
        lookup = getattr(self, "dynamic_sd_lookup", None)
        if chosen is not None and isinstance(lookup, DraftLength):
            lookup.tokens = chosen
        return stock(self, scheduler_output, model_runner_output)

    return update_from_output


AT_START = (
    *(reach_workers, bind_worker, choose_drafter),
    *(allow_row_processors, read_labels, reserve_draft_slots, hear_draft_length, see_weight_calls),
)
"""Applied in every process of vLLM, before anything is built."""
AT_START_OF_V2 = (allow_look_up,)
"""So too, where there is a V2 runner."""
IN_FRONT_ENDS = (log_figures, log_figures_offline, read_figures_offline, serve_refresh)
"""Applied when a process imports their modules: few do."""
