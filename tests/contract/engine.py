"""Run vLLM engines, each in a process of its own: read jobs as JSON, one per line, and print the results likewise.

Every job runs in a fork; what the first one imported is imported before the others. Job: `log` (file for the engine's
messages), `das` (the block, or null), `engine` (further vLLM arguments), `rounds`, `sabotage` (see `sabotage`), `env`
(environment variables). A round: `requests` with `prompt` and `params`, `copies` of them, and, to be done after them,
if given, `perturb`: change the policy's weights by so much; `draft_weights`: send a file as the drafter's weights;
`lose_drafter`: destroy the drafter's weights; `sleep`: sleep at this level and wake up; `refresh`: sync to this weight
version; `unrecorded`: hand over none of the texts; `refused`: labels of further requests, see `refusal`; `shared`:
publish the texts in this directory, instead of handing them over; `lose`: remove its `generation` or the `directory`
before the engine reads it;
`fresh_copy`: compare the policy copy with a fresh one.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import json
import os
import random
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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


def sabotage(kind: str) -> None:
    """Break a part of das-adapter, to see that it is needed or that nothing depends on it."""
    from das_adapter.engine import cpu_patches
    from das_adapter.engine.drafters.controlled import ControlledDrafter

    def garbage(self: Any, sampled: list[list[int]], *_: Any) -> list[list[int]]:
        rng = random.Random(len(sampled))
        return [[rng.randrange(90) for _ in range(rng.randrange(17))] if tokens else [] for tokens in sampled]

    def failing(self: Any, sampled: list[list[int]], *args: Any) -> list[list[int]]:
        if self.history.index.tokens or max(args[0][: len(sampled)]) > 60:
            raise RuntimeError("the drafter is broken on purpose")
        return garbage(self, sampled)

    if kind == "garbage drafts":
        ControlledDrafter._propose = garbage
    elif kind == "failing drafter":
        ControlledDrafter._propose = failing
    elif kind == "no CPU fix":
        cpu_patches.expand_draft_parameters = SimpleNamespace(apply=lambda: None)
    elif kind == "drafter without weights":
        from das_adapter.engine.drafters.neural import DraftWeights

        stock = DraftWeights.take_loaded

        def take_loaded(self: Any) -> None:
            stock(self)
            lose(self._runner)

        DraftWeights.take_loaded = take_loaded
    elif kind == "stale copy":
        from das_adapter.engine.drafters.policy_copy import PolicyCopy

        PolicyCopy.quantise = lambda self: None
    elif kind == "no room near max_model_len":
        from das_adapter.engine.worker import WorkerState

        WorkerState._draft_up_to_the_end = lambda self: None
    else:
        raise ValueError(kind)


def preload(names: list[str]) -> None:
    """Import these modules, but for those that need numba: vLLM 0.32's CPU platform fails where that came first."""
    sys.modules["numba"] = None  # type: ignore[assignment]
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    del sys.modules["numba"]


def main() -> None:
    from vllm import LLM  # noqa: F401  # imported here, before the forks, like all that it needs

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
    os.environ.update(job.get("env", {}))
    from das_adapter.config import parse
    from das_adapter.protocol.engine_args import engine_args, engine_env

    das = parse(job.get("das"))
    os.environ.update(engine_env(das))
    if job.get("sabotage"):
        sabotage(job["sabotage"])
    from vllm import LLM, SamplingParams

    settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 16, "seed": 0,
                "kv_cache_memory_bytes": 2**26}  # fmt: skip
    llm = LLM(str(POLICY), **{**settings, **engine_args(das), **job.get("engine", {})})
    results = []
    for part in job["rounds"]:
        requests = part["requests"] * part.get("copies", 1)
        outputs = llm.generate(
            [{"prompt_token_ids": r["prompt"]} for r in requests],
            [SamplingParams(**_params(r["params"])) for r in requests],
            use_tqdm=False,
        )
        refused = [refusal(llm, requests[0], label) for label in part.get("refused", ())]
        texts = [list(o.outputs[0].token_ids) for o in outputs]
        logprobs = [[step[t].logprob for t, step in zip(text, o.outputs[0].logprobs or [], strict=False)]
                    for text, o in zip(texts, outputs, strict=True)]  # fmt: skip
        result = {"tokens": texts, "logprobs": [] if part.get("brief") else logprobs, "refused": refused}
        if das is not None:
            result["stats"] = llm.collective_rpc("das_rpc", args=("stats", {}))[0]
            result["hello"] = llm.collective_rpc("das_rpc", args=("hello", {}))[0]
        core = llm.llm_engine.engine_core.engine_core
        runner = core.model_executor.driver_worker.worker.model_runner
        if "perturb" in part:
            perturb(runner.model, part["perturb"])
            llm.reset_prefix_cache()
        if "draft_weights" in part:
            from safetensors.torch import load_file

            weights = load_file(part["draft_weights"])
            runner.model.load_weights([(f"draft.{name}", weight.float()) for name, weight in weights.items()])
        if "lose_drafter" in part:
            lose(runner)
        if "sleep" in part:
            sleep(llm, part["sleep"])
        if "refresh" in part:
            keep = [
                (r["params"].get("extra_args", {}).get("das_problem", 0), t)
                for r, t in zip(requests, texts, strict=True)
                if not part.get("unrecorded")
            ]
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
            llm.collective_rpc("das_rpc", args=("refresh", payload))
        if "fresh_copy" in part and hasattr(runner, "drafter"):
            result["fresh_copy"] = copy_is_fresh(runner)
        result["lookahead"] = core.scheduler.num_lookahead_tokens
        result["memory"] = memory()
        result["samplers"] = [
            type(runner.sampler).__module__,
            type(getattr(runner, "rejection_sampler", None)).__module__,
        ]
        results.append(result)
    return results


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


def perturb(policy: Any, size: float) -> None:
    """Send the policy's checkpoint as a host does, every matrix changed by `size` of its standard deviation."""
    import torch
    from safetensors.torch import load_file

    generator = torch.Generator().manual_seed(0)
    weights = load_file(POLICY / "model.safetensors")
    policy.load_weights([
        (name, w.float() + (size * w.float().std() * torch.randn(w.shape, generator=generator) if w.ndim == 2 else 0))
        for name, w in weights.items()
    ])  # fmt: skip


def lose(runner: Any) -> None:
    """Overwrite the drafter's own weights with noise, as when their memory was given away."""
    import torch

    torch.manual_seed(0)
    shared = {p.data_ptr() for p in runner.model.parameters()}
    for parameter in runner.drafter.model.parameters():
        if parameter.is_floating_point() and parameter.data_ptr() not in shared:
            parameter.data.normal_(std=0.5)


def sleep(llm: Any, level: int) -> None:
    """Sleep and wake up; a CPU engine has no memory pool, so what level 2 discards is discarded here."""
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    llm.reset_prefix_cache()
    if level == 2:
        for parameter in runner.model.parameters():
            parameter.data.zero_()
        for _, weight in runner.drafter.copy.copy.layers:
            for tensor in weight.tensors():
                tensor.zero_()
        perturb(runner.model, 0.0)  # what the host sends after waking up


def copy_is_fresh(runner: Any) -> bool:
    """Return whether the policy copy equals one made from the policy's present weights, bit for bit."""
    import torch

    from das_adapter.engine.drafters.policy_copy import PolicyCopy

    drafter = runner.drafter
    fresh = PolicyCopy(runner.model, drafter.config.self.weights)
    return all(torch.equal(a, b) for (_, x), (_, y) in zip(drafter.copy.copy.layers, fresh.layers, strict=True)
               for a, b in zip(x.tensors(), y.tensors(), strict=True))  # fmt: skip


def memory() -> int:
    """Return the resident bytes of this process, after collecting garbage."""
    import ctypes

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _params(params: dict[str, Any]) -> dict[str, Any]:
    if "logit_bias" in params:  # JSON has no integer keys
        params = {**params, "logit_bias": {int(token): bias for token, bias in params["logit_bias"].items()}}
    return {"logprobs": 0, **params}


def _bytes(tokens: list[int]) -> bytes:
    import numpy as np

    return np.asarray(tokens, dtype=np.int32).tobytes()


if __name__ == "__main__":
    main()
