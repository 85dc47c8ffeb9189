"""Parts 6 to 8, on real engines: `lossless` (tokens with and without drafts, distribution, keys), `robust` (contract
tests on this device, a crowded engine) and `ranks` (two GPUs)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import numpy as np
import replay
from engines import CONTRACT, Plan, apart, engine

ENVIRONMENT = replay.ENVIRONMENT
DRAFTERS: dict[str, dict[str, Any]] = {
    "history": {"drafter": "history", "budget": {"policy": "uniform", "min_chance": 0.02}, "toggle": {"mode": "off"}},
    "ngram": {"drafter": "ngram", "budget": {"policy": "uniform", "min_chance": 0.02}, "toggle": {"mode": "off"}},
}


def lossless(plan: Plan) -> dict[str, Any]:
    """The tiny policy of the examples, which has real weights: equal responses and misplaced keys, with and without
    batch-invariant kernels; chi-square of what the kernel draws on this device."""
    modes = {}
    for name, flag in (("batch-invariant", "1"), ("default", "0")):
        environment = ENVIRONMENT | {"VLLM_BATCH_INVARIANT": "0" if plan.tiny else flag}
        modes[name] = apart(plan, _compare, plan.tiny, env=environment)
        if plan.tiny:  # a CPU has one kind of kernels, which do not depend on the batch in float32
            break
    return {"modes": modes, "chi_square_p": apart(plan, _chi_square)}


def lossless_bars(found: dict[str, Any]) -> list[tuple[str, float, float]]:
    arms = [arm for mode in found["modes"].values() for arm in mode.values()]
    invariant = found["modes"]["batch-invariant"].values()
    return [
        ("responses that differ with batch-invariant kernels", sum(arm["different"] for arm in invariant), 0),
        ("tokens drawn with the key of another position", sum(arm["misplaced"] for arm in arms), 0),
        ("1e-4 over the p-value of the draws", 1e-4 / max(found["chi_square_p"], 1e-12), 1),
    ]


def _compare(tiny: bool) -> dict[str, Any]:
    """Run the contract tests' own engine, once without drafts and once with each drafter."""
    sys.path.insert(0, str(CONTRACT))
    from engine import run

    if not tiny:
        os.environ.pop("TORCHDYNAMO_DISABLE")  # the engine sets it for CPUs
    from test_losslessness import OFF, PLAIN, requests, two_rounds

    rounds = two_rounds(requests(PLAIN))
    settings = {"enforce_eager": tiny}
    off = run({"das": OFF, "engine": settings, "rounds": rounds})
    return {name: _difference(off, run({"das": DRAFTERS[name], "engine": settings, "rounds": rounds}))
            for name in list(DRAFTERS)[: 1 if tiny else None]}  # fmt: skip


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


def _chi_square(draws: int = 120_000) -> float:
    import torch
    from scipy import stats

    from das_adapter.engine.sampling.keyed_sample import Keys, keyed_sample

    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits = torch.randn(16, generator=torch.Generator().manual_seed(3)) * 1.5
    positions = torch.arange(draws, device=device)
    tokens = keyed_sample(logits.to(device).repeat(draws, 1), None, Keys(torch.zeros_like(positions), positions)).tokens
    expected = draws * logits.double().softmax(0).numpy()
    return float(stats.chisquare(np.bincount(tokens.cpu().numpy(), minlength=16), expected).pvalue)


def robust(plan: Plan) -> dict[str, Any]:
    """The contract tests on this device; a crowded engine."""
    return {
        "contract": _pytest(
            [
                "test_losslessness.py",
                "-k",
                "default and (plain or failing or collapsed)",
                *(["--collect-only"] if plan.tiny else []),
            ]
        ),
        "crowded": apart(plan, _crowded, plan, env=ENVIRONMENT),
    }


def robust_bars(found: dict[str, Any]) -> list[tuple[str, float, float]]:
    return [
        ("contract tests: exit code", found["contract"]["code"], 0),
        ("errors of the crowded engine", float(bool(found["crowded"]["error"])), 0),
    ]  # fmt: skip


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


def ranks(plan: Plan) -> dict[str, Any]:
    """Two tensor-parallel ranks: the tokens of one, and nobody waits for one that failed."""
    listed = (
        subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False) if not plan.tiny else None
    )
    if listed is not None and len(listed.stdout.splitlines()) < 2:
        return {"code": None, "why": "found fewer than two GPUs"}
    return _pytest(["test_ranks.py", "-k", "default", *(["--collect-only"] if plan.tiny else [])])


def ranks_bars(found: dict[str, Any]) -> list[tuple[str, float, float]]:
    return [] if found["code"] is None else [("tests of two ranks: exit code", found["code"], 0)]


def _pytest(arguments: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=CONTRACT, capture_output=True, text=True, check=False, env={**os.environ})
    return {"code": done.returncode, "last_line": done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""}
