"""Run vLLM engines, each in a process of its own: read jobs as JSON, one per line, and print the results likewise.

Every job runs in a fork; what the first one imported is imported before the others. Job: `log` (file for the engine's
messages), `das` (the block, or null), `engine` (further vLLM arguments), `rounds`, `sabotage` (see `sabotage`), `env`
(environment variables; null: without this one), `standalone` (the block comes from the environment, and no host looks
after the engine), `nemo_rl` (NeMo-RL's hooks look after it), `interpreted` (V2: run the kernels that NumPy stands in
for, and compare). A round: `requests` with `prompt` and `params`, and with `image`, the seed of one, `copies` of them,
`aborted`: so many more without an end, which are aborted; and, to be done after them, if given, `refit`, `perturb`:
change the policy's weights by so much, as NeMo-RL does, or without a host; `draft_weights`: send a file as the
drafter's weights, as this `host` does; `lose_drafter`: destroy the drafter's weights; `sleep`: sleep at this level and
wake up; `refresh`: sync to this weight version; `unrecorded`: hand over none of the texts; `refused`: labels of further
requests, see `refusal`; `adapter`: directory of the LoRA adapter that writes them; `shared`: publish the texts in this
directory, instead of handing them over; `lose`: remove its `generation` or the `directory` before the engine reads it;
`visit`: hand over the texts in a file of this name, as those of problems that are at home on another node;
`fresh_copy`: compare the policy copy with a fresh one.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import itertools
import json
import os
import random
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from audit import Audit

POLICY = Path(__file__).resolve().parents[2] / "examples" / "tiny_math" / "policy"

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    MKL_CBWR="AUTO,STRICT",
    TORCHDYNAMO_DISABLE="1",  # compiling vLLM's helpers takes longer than a test
)
V2 = bool(os.environ.get("DAS_TEST_V2"))
"""Whether engines run vLLM's V2 model runner; see `v2_cpu.py`."""
NOTED: dict[str, int] = {}
"""What a sabotage has to tell."""
if V2:
    import v2_cpu


def sabotage(kind: str) -> None:
    """Break a part of das-adapter, to see that it is needed or that nothing depends on it."""
    from das_adapter.cpu import vllm_fixes

    if kind == "drafter without weights":
        return lose_loaded()
    if V2:
        return v2_cpu.sabotage(kind)
    from das_adapter.engine.history import HistorySource
    from das_adapter.engine.v1.proposer import Proposer

    def garbage(self: Any, sampled: list[list[int]], *_: Any) -> list[list[int]]:
        rng = random.Random(len(sampled))
        return [[rng.randrange(90) for _ in range(rng.randrange(17))] if tokens else [] for tokens in sampled]

    def failing(self: Any, sampled: list[list[int]], *args: Any) -> list[list[int]]:
        if self.engine.history.index.tokens or max(args[0][: len(sampled)]) > 60:
            raise RuntimeError("the drafter is broken on purpose")
        return garbage(self, sampled)

    def failing_once(self: Any, sampled: list[list[int]], *args: Any, stock: Any = Proposer.begin_drafts) -> Any:
        if max(args[0][: len(sampled)]) > 60 and not self.engine.history.index.tokens:
            self.engine.live.clear()  # whatever state it is in
            raise RuntimeError("the drafter is broken on purpose")
        return stock(self, sampled, *args)

    def lost(_: Any) -> Any:
        raise RuntimeError("the search is broken on purpose")

    if kind == "garbage drafts":
        Proposer.begin_drafts = garbage
    elif kind == "failing search":
        HistorySource.found = lost
    elif kind == "failing drafter":
        Proposer.begin_drafts = failing
    elif kind == "drafter that fails once":
        Proposer.begin_drafts = failing_once
    elif kind == "dear drafter":
        from das_adapter.core import account, plain_time

        plain_time.LEAST_STEPS, account.BASELINE_STEPS, account.LOOK_STEPS = 24, (2, 2), 1
        clock = Clock()
        Proposer.time_step = taking(clock, 0.003, Proposer.time_step)
        HistorySource.look = taking(clock, 0.03, HistorySource.look)
    elif kind == "replayed passes":
        from das_adapter.engine.v1.decode_graphs import DecodePasses

        DecodePasses.__call__ = captured_first(DecodePasses.__call__)
    elif kind == "a rank fails":
        Proposer.begin_drafts = failing_rank(Proposer.begin_drafts)
    elif kind == "a rank fails in the passes":
        from das_adapter.engine.v1.policy_copy import CopySource

        CopySource._draft = failing_pass(CopySource._draft)
    elif kind == "small chunks":
        from das_adapter.engine.v1 import verification

        verification._CHUNK_BYTES = 4 * 96 * 20  # 20 rows of the policy's vocabulary
        verification._joined = counted_parts(verification._joined)
    elif kind == "no CPU fix":
        vllm_fixes.expand_draft_parameters = SimpleNamespace(apply=lambda: None)
    elif kind in ("any draft length", "any draft length, reading along"):
        from das_adapter.engine.v1 import neural_drafts

        Proposer.begin_drafts = any_length(Proposer.begin_drafts)
        neural_drafts.KEPT_BYTES = -1 if "along" in kind else 300_000
    elif kind == "slow policy":
        Proposer.time_step = taking(Clock(), 0.03, Proposer.time_step)
    elif kind == "stale copy":
        from das_adapter.engine.v1.policy_copy import PolicyCopy

        PolicyCopy.quantise = lambda self: None
    elif kind == "no room near max_model_len":
        from das_adapter.engine.v1.worker import HostWorkerState

        HostWorkerState.draft_up_to_the_end = lambda self: None
    else:
        raise ValueError(kind)


def counted_parts(joined: Any) -> Any:
    """Note of how many chunks a step was put together at most."""

    def note(parts: Any) -> Any:
        NOTED["chunks"] = max(NOTED.get("chunks", 0), len(parts))
        return joined(parts)

    return note


def failing_pass(stock: Any) -> Any:
    """Let the second rank fail in the fifth of the drafts that all ranks make together."""

    def draft(self: Any, *args: Any) -> Any:
        self.drafted = getattr(self, "drafted", 0) + 1
        if not self._drafter.leads and self.drafted == 5:
            raise RuntimeError("the pass is broken on purpose")
        return stock(self, *args)

    return draft


def lose_loaded() -> None:
    """Let neural drafters start with noise for weights."""
    from das_adapter.engine.draft_weights import DraftWeights

    stock = DraftWeights.take_loaded

    def take_loaded(self: Any) -> None:
        stock(self)
        lose(self._runner)

    DraftWeights.take_loaded = take_loaded


def any_length(stock: Any) -> Any:
    """Ask the model for arbitrary numbers of tokens: in a few steps for some requests, then for a while for none."""

    def propose(self: Any, sampled: list[list[int]], lengths: Any, tokens: Any) -> Any:
        drafts = stock(self, sampled, lengths, tokens)
        if not self.leads:
            return drafts
        self.proposed = getattr(self, "proposed", 0) + 1
        rng = random.Random(self.proposed)
        for row, (req_id, new) in enumerate(zip(self.runner.input_batch.req_ids, sampled, strict=True)):
            room = self.engine.live[req_id].end - 1 - int(lengths[row]) if new else 0
            wanted = rng.randrange(self.config.model_tokens + 1) if self.proposed % 16 < 6 else 0
            self.model_tokens[row] = max(0, min(room, wanted))
        return drafts

    return propose


class Clock:
    """Tells das-adapter the time, so that what it decides does not depend on the machine: every look takes 0.1 ms."""

    def __init__(self) -> None:
        self.now, real = 0.0, time.perf_counter

        def perf_counter() -> float:
            if not sys._getframe(1).f_globals["__name__"].startswith("das_adapter.engine."):
                return real()
            self.now += 1e-4
            return self.now

        time.perf_counter = perf_counter


def taking(clock: Clock, seconds: float, stock: Any) -> Any:
    """Let a call take so many seconds of the clock."""

    def call(*args: Any, **named: Any) -> Any:
        clock.now += seconds
        return stock(*args, **named)

    return call


def captured_first(stock: Any) -> Any:
    """Have passes captured and replayed by what stands for vLLM's graph wrapper: it only looks whether a pass reads
    from where it read when the graph of its size was captured."""

    def wrap(model: Any, _: Any) -> Any:
        from vllm.config import CUDAGraphMode
        from vllm.forward_context import get_forward_context

        addresses: dict[int, list[int]] = {}

        def run(ids: Any, positions: Any) -> Any:
            context = get_forward_context()
            if context.cudagraph_runtime_mode == CUDAGraphMode.FULL:
                attention = next(iter(context.attn_metadata.values()))
                read = (
                    ids,
                    positions,
                    *context.slot_mapping.values(),
                    attention.block_table,
                    attention.seq_lens,
                    attention.query_start_loc,
                    attention.slot_mapping,
                )
                at = [tensor.data_ptr() for tensor in read]
                assert addresses.setdefault(len(ids), at) == at
                assert context.batch_descriptor.num_tokens == len(ids) in (1, 4, 16)
            return model(ids, positions)

        return run

    def call(self: Any, *args: Any) -> Any:
        if not self.sizes:
            self.capture([1, 4, 16], wrap)
        return stock(self, *args)

    return call


def failing_rank(stock: Any) -> Any:
    """Let the first rank fail until the first weight sync, the second one from then on."""

    def propose(self: Any, sampled: list[list[int]], *args: Any) -> Any:
        self.proposed = getattr(self, "proposed", 0) + 1
        if self.leads == (not self._synced_once) and self.proposed > 4:
            raise RuntimeError("the rank is broken on purpose")
        return stock(self, sampled, *args)

    def refresh(self: Any, message: Any, stock: Any) -> Any:
        self._synced_once = True
        return stock(self, message)

    from das_adapter.engine.v1.proposer import Proposer

    Proposer._synced_once = False
    Proposer.refresh = functools.partialmethod(refresh, stock=Proposer.refresh)
    return propose


def preload(names: list[str]) -> None:
    """Import these modules, but for those that need numba: vLLM 0.32's CPU platform fails where that came first."""
    sys.modules["numba"] = None  # type: ignore[assignment]
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    del sys.modules["numba"]


def main() -> None:
    from vllm import LLM  # noqa: F401  # imported here, before the forks, like all that it needs

    if V2:
        v2_cpu.lift_limits()
    from das_adapter import compat

    compat.missing("vllm")  # remembered, so that no fork looks again
    for first, line in zip(itertools.chain([True], itertools.repeat(False)), sys.stdin, strict=False):
        job = json.loads(line)
        heard, told = os.pipe()
        gc.freeze()  # so that forks don't collect what is here
        if child := os.fork():
            os.close(told)
            with open(heard) as names:
                imported = names.read().split()
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if code:
                print(f"FAILED {code}", flush=True)
            if first:
                preload(imported)
            continue
        try:
            known = set(sys.modules)
            log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, sys.stderr.fileno())
            print("RESULT " + json.dumps(run(job)), flush=True)
            new = (n for n in set(sys.modules) - known if n.startswith(("vllm.", "transformers.", "pandas")))
            os.write(told, "\n".join(new).encode())
            os._exit(0)  # vLLM's own teardown adds seconds and nothing to the test
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)


def run(job: dict[str, Any]) -> list[dict[str, Any]]:
    for name, value in job.get("env", {}).items():
        os.environ[name] = value or ""
        if value is None:
            del os.environ[name]
    from das_adapter.config import parse
    from das_adapter.protocol.engine_args import engine_args, engine_env

    das = parse(job.get("das"))
    arguments = engine_args(das)
    if job.get("standalone"):
        os.environ["DAS_CONFIG"] = json.dumps(job["das"])
        arguments = {}
    else:
        os.environ.update(engine_env(das))
    if V2:
        v2_cpu.stand_in(bool(job.get("interpreted")))
    if job.get("sabotage"):
        sabotage(job["sabotage"])
    if job.get("asynchronous"):
        schedule_asynchronously()
    if job.get("engine", {}).get("enable_return_routed_experts"):
        tell_routing()
    if job.get("engine", {}).get("tensor_parallel_size", 1) > 1:
        fork_workers()
    alone = job.get("engine", {}).get("tensor_parallel_size", 1) == 1  # the ranks' processes note what only they know
    audited = das is not None and das.keyed and alone and not job.get("standalone")
    audit = Audit(2 if on_v2(das) else 1) if audited else None
    from vllm import LLM, SamplingParams
    from vllm.v1.serial_utils import MsgpackEncoder

    settings = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 16,
        "seed": 0,
        "kv_cache_memory_bytes": 2**26,
    }
    if job.get("nemo_rl"):
        settings["worker_extension_cls"] = "engine.Trained"
    llm = LLM(**{"model": str(POLICY), **settings, **arguments, **job.get("engine", {})})
    hooks = hooked(llm, das) if job.get("nemo_rl") else None
    preempted = count_preemptions(llm)
    results = []
    logs = not job.get("engine", {}).get("disable_log_stats", True)
    for part in job["rounds"]:
        requests = part["requests"] * part.get("copies", 1)
        endless = {"max_tokens": 400, "ignore_eos": True, "extra_args": {"das_problem": 0, "das_seed": 0}}
        asked = requests + [{**r, "params": endless} for r in requests[: part.get("aborted", 0)]]
        if len(asked) > len(requests):
            abort_last(llm, len(asked) - len(requests))
        if audit:
            audit.clear()
        outputs = llm.generate(
            [{"prompt_token_ids": r["prompt"], **pictured(r)} for r in asked],
            [SamplingParams(**_params(r["params"])) for r in asked],
            use_tqdm=False,
            lora_request=adapter(part["adapter"]) if "adapter" in part else None,
        )
        refused = [refusal(llm, requests[0], label) for label in part.get("refused", ())]
        texts = [list(o.outputs[0].token_ids) for o in outputs]
        logprobs = [
            [step[t].logprob for t, step in zip(text, o.outputs[0].logprobs or [], strict=False)]
            for text, o in zip(texts, outputs, strict=True)
        ]
        result = {
            "tokens": texts,
            "routing": [getattr(o.outputs[0].routed_experts, "tolist", list)() for o in outputs],
            "logprobs": [] if part.get("brief") else logprobs,
            "refused": refused,
            "cached": sum(o.num_cached_tokens or 0 for o in outputs),
            "samples": [[list(s.token_ids) for s in o.outputs] for o in outputs],
            "asynchronous": llm.llm_engine.vllm_config.scheduler_config.async_scheduling,
        }
        if audit:
            result["audited"] = len(audit.drawn)
            for name in ("misplaced", "reused"):
                of = getattr(audit, name)
                result[name] = sum(of(r, text) for r, text in zip(requests, texts, strict=False))
        if logs:
            result["metrics"] = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
        if das is not None:
            result["ranks"] = hooks.report() if hooks else llm.collective_rpc("das_rpc", args=("stats", {}))
            result["stats"] = result["ranks"][0]
            MsgpackEncoder().encode(result["ranks"])  # as it crosses from process to process
            result["hello"] = llm.collective_rpc("das_rpc", args=("hello", {}))[0]
        core = llm.llm_engine.engine_core.engine_core
        driver = getattr(core.model_executor, "driver_worker", None)  # where the only rank is in this process
        runner = driver and driver.worker.model_runner
        if "refit" in part:
            llm.collective_rpc("update_weights_via_ipc_zmq", args=(part["refit"],))
            llm.reset_prefix_cache()
        if "perturb" in part:
            perturb(runner.model, part["perturb"])
            llm.reset_prefix_cache()
        if "draft_weights" in part:
            from safetensors.torch import load_file

            weights = [(name, weight.float()) for name, weight in load_file(part["draft_weights"]).items()]
            if runner.speculative_config.method == "mtp":  # hosts send it the policy's
                send(runner, weights, part.get("host"))
                if part.get("host") is None:
                    runner.drafter.model.load_weights(weights)
            else:
                send(runner, [(f"draft.{name}", weight) for name, weight in weights], part.get("host"))
        if "lose_drafter" in part:
            lose(runner)
        if "sleep" in part:
            sleep(llm, part["sleep"])
        keep = [
            (r["params"].get("extra_args", {}).get("das_problem", 0), t)
            for r, t in zip(requests, texts, strict=True)
            if not part.get("unrecorded")
        ]
        if "visit" in part:
            give(part["visit"], keep)
            result["visited"] = llm.collective_rpc("das_rpc", args=("visit", {"files": [part["visit"]]}))
        if "refresh" in part:
            if "foreign_token" in part:
                keep += [(0, [part["foreign_token"]])] * 8  # more than the problem's own texts, so that it is drafted
            trajectories = [(p, _bytes(t), part["refresh"] - 1) for p, t in keep]
            payload = {"version": part["refresh"], "trajectories": trajectories}
            if "shared" in part:
                from das_adapter.protocol.messages import Trajectory, responses

                lengths = responses(Trajectory(*t) for t in trajectories).tobytes()
                history = publish(part["shared"], trajectories, part.get("lose"))
                payload = {"version": part["refresh"], "history": history, "lengths": lengths}
            if "draft_length" in part:
                payload["draft_length"] = part["draft_length"]
            if job.get("standalone"):
                payload = {"version": part["refresh"]}
            result["refreshed"] = llm.collective_rpc("das_rpc", args=("refresh", payload))
        if "graphs" in part:
            result["graphs"], result["drafted_graphs"] = graphs(runner, part["graphs"])
        if "fresh_copy" in part and hasattr(runner, "drafter"):
            result["fresh_copy"] = copy_is_fresh(runner)
        result["preemptions"] = preempted[0]
        result["runner"] = type(runner).__module__
        result["lookahead"] = core.scheduler.num_lookahead_tokens
        result["memory"] = memory()
        result["compared"] = dict(v2_cpu.compared()) if V2 else {}
        result["noted"] = dict(NOTED)
        result["samplers"] = [type(getattr(runner, name, None)).__module__ for name in ("sampler", "rejection_sampler")]
        results.append(result)
    if runner is None:
        llm.llm_engine.engine_core.shutdown()
    if hooks:
        import ray

        ray.shutdown()
    return results


class Trained:
    """Stands for NeMo-RL's extension of vLLM's workers."""

    model_runner: Any

    def update_weights_via_ipc_zmq(self, size: float) -> bool:
        perturb(self.model_runner.model, size)
        return True


def hooked(llm: Any, das: Any) -> Any:
    """Put das-adapter's hooks of a NeMo-RL worker on an engine, and start the run's history."""
    import ray

    from das_adapter.nemo_rl.engine_hooks import SyncEngineHooks

    ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=100_000_000)
    hooks = SyncEngineHooks.attach(llm, das, source=1)
    hooks.start()
    return hooks


def pictured(request: dict[str, Any]) -> dict[str, Any]:
    """The image that belongs to a request's prompt, if there is one."""
    if "image" not in request:
        return {}
    import numpy as np
    from PIL import Image
    from tiny_models import PIXELS

    noise = np.random.default_rng(request["image"]).integers(0, 256, (PIXELS, PIXELS, 3), dtype=np.uint8)
    return {"multi_modal_data": {"image": Image.fromarray(noise)}}


def send(runner: Any, weights: list[Any], host: str | None) -> None:
    """Load weights from a trainer's stream, by NeMo-RL's code where that is the host."""
    if host != "nemo_rl":
        runner.model.load_weights(weights)
        return
    from nemo_rl.models.generation.vllm.vllm_backend import VllmInternalWorkerExtension

    worker = VllmInternalWorkerExtension()
    worker.model_runner = runner
    worker._load_weights(weights)


def on_v2(das: Any) -> bool:
    """Say whether an engine of a block runs vLLM's V2 model runner: on a CPU only where the tests prepare it."""
    import torch

    from das_adapter.protocol.engine_args import needs_v1

    return (V2 or torch.cuda.is_available()) and needs_v1(das) is None


def schedule_asynchronously() -> None:
    """Let a CPU engine schedule the next step before the present one's tokens are known, as a GPU engine does. vLLM's
    CPU platform switches that off, since nothing runs in parallel there; streams and events need not exist."""
    import torch
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.check_and_update_config.__func__

    def check(cls: Any, config: Any) -> None:
        wanted = config.scheduler_config.async_scheduling
        stock(cls, config)
        config.scheduler_config.async_scheduling = wanted

    class Event:
        def __init__(self, *_: Any, **__: Any) -> None: ...
        def record(self, *_: Any) -> None: ...
        def synchronize(self) -> None: ...
        def wait(self, *_: Any) -> None: ...
        def query(self) -> bool:
            return True

    class Stream(Event):
        def wait_stream(self, _: Any) -> None: ...
        def wait_event(self, _: Any) -> None: ...

    CpuPlatform.check_and_update_config = classmethod(check)
    torch.cuda.Event = torch.Event = Event
    torch.cuda.Stream = Stream
    torch.cuda.current_stream = lambda *_: Stream()
    torch.cuda.stream = lambda _: contextlib.nullcontext()


def tell_routing() -> None:
    """Let a CPU engine tell which experts its tokens go to, as a GPU engine's routers do: the CPU's experts choose by
    themselves, and vLLM refuses to return what they don't tell."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod as Experts
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    told: dict[int, Any] = {}

    def bind(self: Any, capturer: Any) -> None:
        runners = [module for module in self.model.modules() if isinstance(module, MoERunner)]
        told.update({id(r.routed_experts): functools.partial(capturer.capture, r.layer_id) for r in runners})

    def apply(self: Any, layer: Any, x: Any, router_logits: Any, *args: Any, **kwargs: Any) -> Any:
        if id(layer) in told:
            told[id(layer)](router_logits.topk(layer.top_k).indices)
        return stock(self, layer, x, router_logits, *args, **kwargs)

    stock, Experts.apply_monolithic = Experts.apply_monolithic, apply
    GPUModelRunner._bind_routed_experts_capturer = bind


def fork_workers() -> None:
    """Fork the workers of several ranks: they need not import vLLM again, and are sabotaged like this process."""
    import multiprocessing

    import torch
    from vllm.v1.executor import multiproc_executor

    def context() -> Any:
        if torch.cuda.is_initialized():
            raise RuntimeError("this process uses the GPU already: its forks could not")
        return multiprocessing.get_context("fork")

    multiproc_executor.get_mp_context = context


def count_preemptions(llm: Any) -> list[int]:
    """Return a list whose only entry counts preemptions from now on."""
    scheduler, counted = llm.llm_engine.engine_core.engine_core.scheduler, [0]
    preempt = scheduler._preempt_request

    def count(*args: Any, **kwargs: Any) -> Any:
        counted[0] += 1
        return preempt(*args, **kwargs)

    scheduler._preempt_request = count
    return counted


def graphs(runner: Any, most: int) -> tuple[list[str], list[str]]:
    """Return which CUDA graph vLLM would replay for each number of requests up to `most` that decode without drafts,
    and with four draft tokens each, if this engine ran on a GPU whose attention captures uniform batches."""
    from vllm.config import CUDAGraphMode

    dispatcher, length = runner.cudagraph_dispatcher, runner.uniform_decode_query_len
    compilation, mode = dispatcher.compilation_config, CUDAGraphMode.FULL_AND_PIECEWISE
    compilation.cudagraph_capture_sizes = [1, 2, 4, *range(8, 65, 8)]
    compilation.max_cudagraph_capture_size = 64
    if length > 1:
        compilation.adjust_cudagraph_sizes_for_spec_decode(length, 1)
    dispatcher.initialize_cudagraph_keys(mode, length)

    def replayed(each: int) -> list[str]:
        found = [
            dispatcher.dispatch(n * each, uniform_decode=runner._is_uniform_decode(each, length, n * each, n))
            for n in range(1, most + 1)
        ]
        return [f"{kind.name} {batch.num_tokens}" for kind, batch in found]

    return replayed(1), replayed(5)


def abort_last(llm: Any, number: int) -> None:
    """Abort the last requests after 24 steps of the engine."""
    engine = llm.llm_engine
    stock, steps, ids = type(engine).step, itertools.count(), []

    def step() -> Any:
        at = next(steps)
        if not at:
            ids.extend(list(engine.output_processor.request_states)[-number:])
        if at == 24:
            engine.abort_request(ids, internal=True)
        return stock(engine)

    engine.step = step


def refusal(llm: Any, request: dict[str, Any], label: dict[str, Any]) -> str | None:
    """Send a request with a label as a stranger may write it; return how its refusal begins."""
    from vllm import SamplingParams

    params = SamplingParams(**_params({**request["params"], "max_tokens": 1, "extra_args": label}))
    try:
        llm.generate([{"prompt_token_ids": request["prompt"]}], [params], use_tqdm=False)
    except ValueError as error:
        return str(error).partition(", allowed")[0]
    return None


def publish(directory: str, trajectories: list[tuple[int, bytes, int]], lose: str | None) -> tuple[str, int]:
    """Publish trajectories as a node's history does; return what the engine is told."""
    import shutil

    import numpy as np

    from das_adapter.core.index.store import HistoryStore

    with HistoryStore(directory) as store:
        for problem, text, version in trajectories:
            store.add(problem, np.frombuffer(text, dtype=np.int32), version)
        generation = store.seal()
        for _ in range(4 if lose == "generation" else 0):
            store.seal()
    if lose == "directory":
        shutil.rmtree(directory)
    return directory, generation


def give(file: str, texts: list[tuple[int, list[int]]]) -> None:
    """Write texts of problems as the node does on which they are at home."""
    import numpy as np

    from das_adapter.core.index.store import HistoryStore

    with HistoryStore(f"{file}-store") as store:
        for problem, text in texts:
            store.add(problem, np.asarray(text, dtype=np.int32), 0)
        store.seal()
        store.give(file, sorted({problem for problem, _ in texts}))


def perturb(policy: Any, size: float) -> None:
    """Send the policy's checkpoint as a host does, every matrix changed by `size` of its standard deviation."""
    import torch
    from safetensors.torch import load_file

    generator = torch.Generator().manual_seed(0)
    weights = load_file(POLICY / "model.safetensors")
    policy.load_weights(
        [
            (
                name,
                w.float() + (size * w.float().std() * torch.randn(w.shape, generator=generator) if w.ndim == 2 else 0),
            )
            for name, w in weights.items()
        ]
    )


def lose(runner: Any) -> None:
    """Overwrite the drafter's own weights with noise, as when their memory was given away."""
    import torch

    torch.manual_seed(0)
    shared = {p.data_ptr() for p in runner.model.parameters()}
    drafter = getattr(runner, "speculator", None) or runner.drafter
    for parameter in drafter.model.parameters():
        if parameter.is_floating_point() and parameter.data_ptr() not in shared:
            parameter.data.normal_(std=0.5)


def sleep(llm: Any, level: int) -> None:
    """Sleep and wake up; a CPU engine has no memory pool, so what level 2 discards is discarded here."""
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    llm.reset_prefix_cache()
    if level == 2:
        for parameter in runner.model.parameters():
            parameter.data.zero_()
        source = getattr(getattr(runner, "drafter", None), "model_source", None)
        for _, weight in source.copy.layers if source else ():
            for tensor in weight.tensors():
                tensor.zero_()
        perturb(runner.model, 0.0)  # what the host sends after waking up


def adapter(directory: str) -> Any:
    """Name a LoRA adapter to vLLM."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("adapter", 1, directory)


def copy_is_fresh(runner: Any) -> bool:
    """Return whether the policy copy equals one made from the policy's present weights, bit for bit."""
    import torch

    from das_adapter.engine.v1.policy_copy import PolicyCopy

    drafter = runner.drafter
    fresh = PolicyCopy(runner.model, drafter.config.self.weights)
    return all(
        torch.equal(a, b)
        for (_, x), (_, y) in zip(drafter.model_source.copy.layers, fresh.layers, strict=True)
        for a, b in zip(x.tensors(), y.tensors(), strict=True)
    )


def memory() -> int:
    """Return the resident bytes of this process, after collecting garbage."""
    import ctypes

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _params(params: dict[str, Any]) -> dict[str, Any]:
    if "logit_bias" in params:  # JSON has no integer keys
        params = {**params, "logit_bias": {int(token): bias for token, bias in params["logit_bias"].items()}}
    if "structured_outputs" in params:
        from vllm.sampling_params import StructuredOutputsParams

        params = {**params, "structured_outputs": StructuredOutputsParams(**params["structured_outputs"])}
    return {"logprobs": 0, **params}


def _bytes(tokens: list[int]) -> bytes:
    import numpy as np

    return np.asarray(tokens, dtype=np.int32).tobytes()


if __name__ == "__main__":
    main()
