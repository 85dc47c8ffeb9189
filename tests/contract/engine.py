"""Run vLLM engines, each in a process of its own: read jobs, one per line (`jobs.py`),
and print the results as JSON.

Every job runs in a fork; what the first one imported is imported before the others.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import json
import os
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import jobs
from asking import abort_last, adapter, beside, labelled, refusal, sampling
from audit import Audit
from jobs import POLICY, Job, Request, Round

os.environ.update(jobs.ON_CPU, VLLM_ENABLE_V1_MULTIPROCESSING="0")
V2 = bool(os.environ.get("DAS_TEST_V2"))
"""Whether engines run vLLM's V2 model runner; see `v2_cpu.py`."""
SETTINGS = {
    "model": str(POLICY),
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 16,
    "seed": 0,
    "kv_cache_memory_bytes": 2**26,
}
if V2:
    import v2_cpu


def preload(names: list[str]) -> None:
    """Import these modules, but for those that need numba: vLLM 0.32's CPU platform
    fails where that came first.
    """
    sys.modules["numba"] = None  # type: ignore[assignment]
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    del sys.modules["numba"]


def main() -> None:
    from das_adapter.protocol import spool

    spool.GRACE_S = jobs.GRACE_S  # before others take it for a default
    import torch

    if V2:
        v2_cpu.lift_limits()
    from das_adapter import compat, tried

    tried.compare("vllm")
    for relied_on in ("vllm", compat.V2_RUNNER, compat.V2_NEURAL):
        compat.missing(relied_on)  # remembered, so that no fork looks again
    # vLLM collects what it had frozen when an engine ends: in a fork, all that the
    # forks have in common.
    gc.unfreeze = lambda: None  # type: ignore[assignment]
    for first, line in zip(
        itertools.chain([True], itertools.repeat(False)), sys.stdin, strict=False
    ):
        job = jobs.read(line)
        heard, told = os.pipe()
        assert not torch.cuda.is_initialized(), (
            "a process that has used a GPU can't be forked: an import has begun it"
        )
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
            log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, sys.stderr.fileno())
            print("RESULT " + json.dumps(run(job)), flush=True)
            new = (
                n
                for n in set(sys.modules) - known
                if n.startswith(("vllm.", "transformers.", "pandas"))
            )
            os.write(told, "\n".join(new).encode())
            os._exit(0)  # vLLM's own teardown adds seconds and nothing to the test
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)


def prepare(job: Job) -> Any:
    """Prepare this process for a job's engine; return the block."""
    import cpu_platform

    from das_adapter.config import parse
    from das_adapter.protocol.engine_args import needs_v1

    for name, value in job.env.items():
        (
            os.environ.pop(name, None)
            if value is None
            else os.environ.update({name: value})
        )
    das = parse(job.das)
    if job.standalone:
        os.environ["DAS_CONFIG"] = json.dumps(job.das)
    elif das is not None and needs_v1(das):  # which the tests of V2 would have on V2
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if V2:
        v2_cpu.stand_in(job.interpreted)
    if job.sabotage:
        importlib.import_module("v2_sabotage" if V2 else "sabotage").SABOTAGE[
            job.sabotage
        ]()
    if job.asynchronous:
        cpu_platform.schedule_asynchronously()
    if job.engine.get("enable_return_routed_experts"):
        cpu_platform.tell_routing()
    if job.engine.get("tensor_parallel_size", 1) > 1:
        cpu_platform.fork_workers()
    return das


def run(job: Job) -> list[dict[str, Any]]:
    """Run a job; return what each round gave."""
    engine = Engine(job)
    results = [engine.play(part) for part in job.rounds]
    engine.close()
    return results


class Engine:
    """The engine of a job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.das = prepare(job)
        self.directory = tempfile.TemporaryDirectory()
        """Of the history."""
        sleeps = any(part.sleep is not None for part in job.rounds)
        self.pools = importlib.import_module("memory_pools").lend() if sleeps else None
        # the ranks' processes note what only they know
        alone = job.engine.get("tensor_parallel_size", 1) == 1
        audited = (
            self.das is not None and self.das.keyed and alone and not job.standalone
        )
        self.audit = Audit(2 if on_v2(self.das) else 1) if audited else None
        from vllm import LLM

        from das_adapter.protocol.engine_args import engine_args

        arguments = {} if job.standalone else engine_args(self.das)
        if job.nemo_rl:
            arguments["worker_extension_cls"] = "engine.Trained"
        self.llm = LLM(**SETTINGS | arguments | job.engine)
        self.core = self.llm.llm_engine.engine_core.engine_core
        # where the only rank is in this process
        driver = getattr(self.core.model_executor, "driver_worker", None)
        self.runner = driver and driver.worker.model_runner
        self.hooks = hooked(self.llm, self.das) if job.nemo_rl else None
        self.preempted = count_preemptions(self.core.scheduler)

    def play(self, part: Round) -> dict[str, Any]:
        """Answer a round's requests, and do what is to be done after them."""
        requests = part.requests * part.copies
        if self.audit:
            self.audit.clear()
        result = self.answer(part, requests)
        texts = result["tokens"]
        if self.audit:
            result["audited"] = len(self.audit.drawn)
            for name in ("misplaced", "reused"):
                of = getattr(self.audit, name)
                result[name] = sum(
                    of(r, text) for r, text in zip(requests, texts, strict=False)
                )
        result |= self.figures()
        self.change_weights(part)
        problems = [request.label.get("das_problem", 0) for request in requests]
        result |= self.hand_over(
            part, [] if part.unrecorded else list(zip(problems, texts, strict=True))
        )
        return result | self.seen(part)

    def answer(self, part: Round, requests: list[Request]) -> dict[str, Any]:
        """Return what the engine writes."""
        from vllm import SamplingParams

        endless = {"max_tokens": 400, "ignore_eos": True}
        more = [
            Request(r.prompt, endless, {"das_problem": 0, "das_seed": 0})
            for r in requests[: part.aborted]
        ]
        if more:
            abort_last(self.llm, len(more))
        asked = requests + more
        if self.das is not None and not (self.job.standalone or self.job.nemo_rl):
            asked = [labelled(request) for request in asked]
        outputs = self.llm.generate(
            [{"prompt_token_ids": r.prompt, **beside(r)} for r in asked],
            [SamplingParams(**sampling(r)) for r in asked],
            use_tqdm=False,
            lora_request=adapter(part.adapter) if part.adapter else None,
            priority=[request.priority for request in asked],
        )
        texts = [list(o.outputs[0].token_ids) for o in outputs]
        logprobs = [
            [
                step[t].logprob
                for t, step in zip(text, o.outputs[0].logprobs or [], strict=False)
            ]
            for text, o in zip(texts, outputs, strict=True)
        ]
        return {
            "tokens": texts,
            "routing": [
                getattr(o.outputs[0].routed_experts, "tolist", list)() for o in outputs
            ],
            "logprobs": [] if part.brief else logprobs,
            "chosen": [
                [
                    {token: found.logprob for token, found in step.items()}
                    for step in o.outputs[0].logprobs
                ]
                for r, o in zip(
                    asked, outputs, strict=False
                )  # the last ones may have been aborted
                if "logprob_token_ids" in r.params
            ],
            "refused": [
                refusal(self.llm, requests[0], label) for label in part.refused
            ],
            "cached": sum(o.num_cached_tokens or 0 for o in outputs),
            "samples": [[list(s.token_ids) for s in o.outputs] for o in outputs],
        }

    def figures(self) -> dict[str, Any]:
        """Return what the engine says of itself."""
        from vllm.v1.serial_utils import MsgpackEncoder

        scheduling = self.llm.llm_engine.vllm_config.scheduler_config
        found: dict[str, Any] = {"asynchronous": scheduling.async_scheduling}
        if not self.job.engine.get("disable_log_stats", True):
            found["metrics"] = {
                m.name: m.value for m in self.llm.get_metrics() if hasattr(m, "value")
            }
        if self.das is not None:
            found["ranks"] = self.hooks.report() if self.hooks else self.rpc("stats")
            # as it crosses from process to process
            MsgpackEncoder().encode(found["ranks"])
            found |= {"stats": found["ranks"][0], "hello": self.rpc("hello")[0]}
        return found

    def change_weights(self, part: Round) -> None:
        """Change the weights of the policy or of the drafter, or sleep."""
        import between_rounds as between

        if part.refit is not None:
            self.llm.collective_rpc("update_weights_via_ipc_zmq", args=(part.refit,))
        if part.perturb is not None:
            self.llm.collective_rpc(between.perturb, args=(part.perturb,))
        if part.refit is not None or part.perturb is not None:
            self.llm.reset_prefix_cache()
        if part.send_adapter is not None:
            self.llm.llm_engine.add_lora(adapter(part.send_adapter))
        if part.draft_weights is not None:
            between.send_drafter(self.runner, part.draft_weights, part.host)
        if part.draft_files is not None:
            drafter = self.runner.speculative_config.model
            shutil.copytree(part.draft_files, drafter, dirs_exist_ok=True)
        if part.sleep is not None:
            between.sleep(self.llm, part.sleep)

    def hand_over(
        self, part: Round, texts: list[tuple[int, list[int]]]
    ) -> dict[str, Any]:
        """Hand over texts of problems, as hosts do; return what the engine answers."""
        import between_rounds as between

        answers = {}
        if part.visit is not None:
            between.give(part.visit, texts)
            self.rpc("map_guest_history", files=[part.visit])
        if part.refresh is not None:
            history = (
                self.das.history
                if self.das is not None and self.das.shares_history
                else None
            )
            where = part.shared or self.directory.name
            told = (
                {}
                if self.job.standalone
                else between.handed_over(part, texts, history, where)
            )
            answers["refreshed"] = self.rpc("refresh", **told)
        return answers

    def seen(self, part: Round) -> dict[str, Any]:
        """Return what is seen of the engine from outside."""
        import between_rounds as between
        import cpu_platform

        noted = getattr(sys.modules.get("noting"), "NOTED", {})
        compared = self.llm.collective_rpc(v2_cpu.compared) if V2 else [{}]
        found = {
            "preemptions": self.preempted[0],
            "runner": type(self.runner).__module__,
            "lookahead": self.core.scheduler.num_lookahead_tokens,
            "memory": memory(),
            "pooled": self.pools.authors() if self.pools else [],
            "compared": compared[0],
            "compared_by_rank": compared,
            "noted": dict(noted),
            "configs": configs(self.llm.llm_engine.vllm_config),
            "samplers": [
                type(getattr(self.runner, n, None)).__module__
                for n in ("sampler", "rejection_sampler")
            ],
        }
        if part.graphs is not None:
            found["graphs"], found["drafted_graphs"] = cpu_platform.graphs(
                self.runner, part.graphs
            )
        if part.fresh_copy and self.das is not None and self.das.copies_policy:
            found["fresh_copy"] = between.copy_is_fresh(self.runner)
        return found

    def rpc(self, command: str, **payload: Any) -> list[Any]:
        """Ask every rank."""
        return self.llm.collective_rpc("das_rpc", args=(command, payload))  # type: ignore[no-any-return]

    def close(self) -> None:
        """End what would outlive this process."""
        self.directory.cleanup()
        if self.runner is None:
            self.llm.llm_engine.engine_core.shutdown()
        if self.hooks:
            import ray

            ray.shutdown()


class Trained:
    """Stands for NeMo-RL's extension of vLLM's workers."""

    model_runner: Any

    def update_weights_via_ipc_zmq(self, size: float) -> bool:
        from between_rounds import perturb

        perturb(self, size)
        return True


def hooked(llm: Any, das: Any) -> Any:
    """Put das-adapter's hooks of a NeMo-RL worker on an engine, and start the run's
    history.
    """
    import ray

    from das_adapter.nemo_rl.engine_hooks import SyncEngineHooks

    ray.init(
        "local", num_cpus=2, include_dashboard=False, object_store_memory=100_000_000
    )
    hooks = SyncEngineHooks(llm, das, source="1")
    hooks.start()
    return hooks


def on_v2(das: Any) -> bool:
    """Say whether an engine of a block runs vLLM's V2 model runner: on a CPU only where
    the tests prepare it.
    """
    import torch

    from das_adapter.protocol.engine_args import needs_v1

    return (V2 or torch.cuda.is_available()) and needs_v1(das) is None


def count_preemptions(scheduler: Any) -> list[int]:
    """Return a list whose only entry counts preemptions from now on."""
    counted = [0]
    preempt = scheduler._preempt_request

    def count(*args: Any, **kwargs: Any) -> Any:
        counted[0] += 1
        return preempt(*args, **kwargs)

    scheduler._preempt_request = count
    return counted


def configs(config: Any) -> dict[str, str]:
    """Return the parts of vLLM's config that say how an engine schedules, stores and
    drafts.
    """
    return {
        part: repr(getattr(config, f"{part}_config"))
        for part in ("cache", "scheduler", "parallel", "speculative")
    }


def memory() -> int:
    """Return the resident bytes of this process, after collecting garbage."""
    import ctypes

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf(
        "SC_PAGE_SIZE"
    )


if __name__ == "__main__":
    main()
