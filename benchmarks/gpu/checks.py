"""On real engines: `lossless` (tokens with and without drafts, keys), `robust` (a crowded engine, contract tests) and
`ranks` (two GPUs)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import replay
from engines import CONTRACT, V1, V2, Bar, Found, Plan, apart, engine, every

ENVIRONMENT = replay.ENVIRONMENT
HALF = {"dtype": "bfloat16"}
"""What batch-invariant attention on a GPU computes in."""
DRAFTERS: dict[str, dict[str, Any]] = {
    "history": {"drafter": "history", "budget": {"policy": "uniform", "min_chance": 0.02}, "toggle": {"mode": "off"}},
    "ngram": {"drafter": "ngram", "budget": {"policy": "uniform", "min_chance": 0.02}, "toggle": {"mode": "off"}},
}


def lossless(plan: Plan) -> Iterator[Found]:
    """The tiny policy of the examples, which has real weights: equal responses and misplaced keys, with and without
    batch-invariant kernels."""
    found: Found = {"runner": plan.runner, "modes": {}}
    runner, more = (V1, ["ngram"]) if plan.tiny or plan.runner == "V1" else (V2, [])  # V2 drafts from the history alone
    for name, flag, drafters in (("batch-invariant", "1", ["history", *more]), ("default", "0", ["history"])):
        if plan.tiny and name == "default":  # a CPU has one kind of kernels, which do not depend on the batch
            break
        environment = replay.IN_PROCESS | runner | {"VLLM_BATCH_INVARIANT": "0" if plan.tiny else flag}
        arms = apart(plan, _compare, plan.tiny, drafters[: 1 if plan.tiny else None], env=environment)
        if runner is V2:  # draws with vLLM's own sampler, whose keys nobody has noted
            arms = {drafter: arm | {"misplaced": None} for drafter, arm in arms.items()}
        found["modes"][name] = arms
        yield found


LOSSLESS_BARS = (
    Bar("responses that differ with batch-invariant kernels", 0,
        lambda f: every(f["modes"]["batch-invariant"].values(), lambda arm: arm["different"])),
    Bar("tokens drawn with the key of another position", 0,
        lambda f: every((arm for mode in f["modes"].values() for arm in mode.values()), lambda arm: arm["misplaced"])),
)  # fmt: skip


def _compare(tiny: bool, drafters: list[str]) -> Found:
    """Run the contract tests' own engine, once without drafts and once with each of some drafters."""
    sys.path.insert(0, str(CONTRACT))
    from engine import run

    if not tiny:
        os.environ.pop("TORCHDYNAMO_DISABLE")  # the engine sets it for CPUs
    from test_losslessness import OFF, PLAIN, requests, two_rounds

    rounds = two_rounds(requests(PLAIN))
    settings = {"enforce_eager": tiny, **({} if tiny else HALF)}
    off = run({"das": OFF, "engine": settings, "rounds": rounds})
    return {name: _difference(off, run({"das": DRAFTERS[name], "engine": settings, "rounds": rounds}))
            for name in drafters}  # fmt: skip


def _difference(off: list[dict[str, Any]], on: list[dict[str, Any]]) -> dict[str, Any]:
    """Count the responses that differ, and say where the first tokens that differ stand and what they weigh."""
    parted = []
    for a, b in zip(off, on, strict=True):
        pairs = zip(a["tokens"], b["tokens"], a["logprobs"], b["logprobs"], strict=True)
        for x, y, p, q in pairs:
            if x != y:
                at = next(i for i, (s, t) in enumerate(zip(x, y, strict=False)) if s != t)
                parted.append([at, p[at], q[at]])
    return {"responses": sum(len(r["tokens"]) for r in off), "different": len(parted), "parted": parted[:20],
            "misplaced": sum(r["misplaced"] for r in (*off, *on)),
            "accepted_tokens": sum(r["stats"]["accepted_tokens"] for r in on)}  # fmt: skip


def robust(plan: Plan) -> Iterator[Found]:
    """A crowded engine; some of the contract tests on this device."""
    found: Found = {"crowded": apart(plan, _crowded, plan, env=ENVIRONMENT)}
    yield found
    chosen = "default and ((plain and (failing or chunks)) or failing_drafter or collapsed)"
    found["contract"] = _pytest("test_losslessness.py", chosen, plan.tiny)
    yield found


ROBUST_BARS = (
    Bar("contract tests: exit code", 0, lambda f: f["contract"]["code"]),
    Bar("errors of the crowded engine", 0, lambda f: bool(f["crowded"]["error"])),
)


def _crowded(plan: Plan) -> dict[str, Any]:
    """As many requests as fit, each with sixteen draft tokens, in steps of 8192 tokens at nine tenths of the memory."""
    import torch

    rollouts = [(i, text[:256]) for i, (_, text) in enumerate(replay.generated(plan))]
    settings = {} if plan.tiny else {"max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.9}
    das = {"drafter": "history", "budget": {"policy": "unlimited", "max_draft_tokens": 16}, "toggle": {"mode": "off"}}
    llm = engine(plan, das, max_model_len=512, **settings)
    replay.force(rollouts)
    past = replay.corrupted(rollouts, 0.0, 2**31)
    llm.collective_rpc("das_rpc", args=("refresh", {"version": 1, "trajectories": past}))
    begin = time.perf_counter()
    replay.rollout(llm, rollouts)
    stats = llm.collective_rpc("das_rpc", args=("stats", {}))[0]
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return {"error": stats["error"], "accepted_tokens": stats["accepted_tokens"], "peak_bytes": peak,
            "seconds": time.perf_counter() - begin}  # fmt: skip


def ranks(plan: Plan) -> Iterator[Found]:
    """Two tensor-parallel ranks: the tokens of one, and nobody waits for one that failed."""
    if not plan.tiny:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
        if len(listed.stdout.splitlines()) < 2:
            yield {"why": "fewer than two GPUs"}
            return
    yield _pytest("test_ranks.py", "default", plan.tiny)


RANKS_BARS = (Bar("tests of two ranks: exit code", 0, lambda f: f["code"]),)


def _pytest(file: str, chosen: str, tiny: bool) -> Found:
    """Run contract tests, with kernels under which equal tokens can be asked for; on a CPU only list them."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", file, "-k", chosen]
    environment = {} if tiny else {"VLLM_BATCH_INVARIANT": "1", "DAS_TEST_DTYPE": HALF["dtype"]}
    command += ["--collect-only"] if tiny else []
    done = subprocess.run(
        command, cwd=CONTRACT, capture_output=True, text=True, check=False, env=os.environ | environment
    )
    lines = done.stdout.strip().splitlines()
    return {"code": None if tiny else done.returncode, "last_line": lines[-1] if lines else "", "said": lines[-30:]}
