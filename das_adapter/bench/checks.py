"""On real engines: `lossless` (tokens with and without drafts, keys), `robust` (a crowded engine, contract tests) and
`ranks` (two GPUs)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from das_adapter.bench import replay
from das_adapter.bench.engines import (
    CONTRACT,
    FP8_CAPABILITY,
    SHAPES,
    V1,
    V2,
    Bar,
    Found,
    Plan,
    apart,
    engine,
    every,
    gpus,
    prompts,
)

HALF = {"dtype": "bfloat16"}
"""What batch-invariant attention on a GPU computes in."""
ALWAYS = {"budget": "unlimited", "speculate": "always"}
POLICY = CONTRACT.parents[1] / "examples" / "tiny_math" / "policy"
DRAFTERS: dict[str, dict[str, Any]] = {
    "history": {"drafter": "history", "budget": "unlimited", "speculate": "always"},
    "draft_model": {"drafter": "draft_model", "draft": {"model": str(POLICY)}, **ALWAYS},
}
"""The last one drafts with the policy itself, under asynchronous scheduling."""


def lossless(plan: Plan) -> Iterator[Found]:
    """The tiny policy of the examples, which has real weights: equal responses and misplaced keys, with and without
    batch-invariant kernels; and the distribution of its tokens, without."""
    from das_adapter.config import DasConfig
    from das_adapter.protocol.engine_args import needs_v1

    found: Found = {"runner": plan.runner, "modes": {}}
    runner = V1 if plan.tiny or plan.runner == "V1" else V2
    drafters = [
        name for name, das in DRAFTERS.items() if runner is V1 or needs_v1(DasConfig.model_validate(das)) is None
    ]
    drafters = drafters if plan.whole else drafters[:1]
    for name, flag in (("batch-invariant", "1"), ("default", "0")):
        if plan.tiny and name == "default":  # a CPU has one kind of kernels, which do not depend on the batch
            break
        environment = replay.IN_PROCESS | runner | {"VLLM_BATCH_INVARIANT": "0" if plan.tiny else flag}
        arms = drafters if name == "batch-invariant" else ["history"]
        if name == "batch-invariant":
            found["long"] = _compare_long(plan, environment)
            yield found
        if CONTRACT.is_dir():
            found["modes"][name] = apart(plan, _compare, plan.tiny, arms, env=environment)
            yield found
    found["distribution"] = _pytest(plan, ("test_distribution.py", "test_neural.py"), SOFTMAX, {})
    yield found


SOFTMAX = "default and follow_the_softmax and not ngram and not self and not stock"
"""Tests of the distribution: with drafts from the history, and with a neural drafter."""


def _audited(found: Found, name: str) -> float:
    """Return the largest of the arms' counts."""
    arms = [arm for mode in found["modes"].values() for arm in mode.values()]
    if not all(arm["audited"] for arm in arms):
        raise LookupError("no key was noted")
    return every(arms, lambda arm: arm[name])


LOSSLESS_BARS = (
    Bar(
        "responses to long prompts that differ with batch-invariant kernels",
        0,
        lambda f: f["long"]["different"] if f["long"]["accepted_tokens"] else None,
    ),
    Bar(
        "responses that differ with batch-invariant kernels",
        0,
        lambda f: every(f["modes"]["batch-invariant"].values(), lambda arm: arm["different"]),
    ),
    Bar("tokens drawn with the key of another position", 0, lambda f: _audited(f, "misplaced")),
    Bar("keys with which not exactly one token was written", 0, lambda f: _audited(f, "reused")),
    Bar(
        "whether there is a drafter of which no token was accepted",
        0,
        lambda f: every(f["modes"]["batch-invariant"].values(), lambda arm: float(not arm["accepted_tokens"])),
    ),
    Bar("tests of the distribution: exit code", 0, lambda f: f["distribution"]["code"]),
)


LONG_REQUESTS, LONG_TEXT = 8, 192
"""Requests to the policy's shape with long prompts, and tokens that each writes."""


def _compare_long(plan: Plan, environment: dict[str, str]) -> Found:
    """Let the shape write to prompts that fill more than one tile of the attention kernels: without drafts; and with,
    from a history of these very texts with mistakes, for random weights repeat nothing."""
    keyed = {"drafter": "none", "verify": {"noise": "keyed"}}
    off = None if plan.runner == "V2" and not plan.tiny else keyed
    texts, _ = apart(plan, _written, plan, off, None, env=environment)
    past = [(i, np.array(text, dtype=np.int32)) for i, text in enumerate(texts)]
    past = replay.corrupted(past, 0.1, SHAPES[plan.shape]["vocab_size"])
    drafted, stats = apart(plan, _written, plan, DRAFTERS["history"], past, env=environment)
    different = sum(a != b for a, b in zip(texts, drafted, strict=True))
    about = {name: stats[name] for name in ("accepted_tokens", "draft_tokens", "error")}
    return {"context": max(plan.contexts), "responses": len(texts), "different": different, **about}


def _written(
    plan: Plan, das: dict[str, Any] | None, past: replay.Rollouts | None
) -> tuple[list[list[int]], dict[str, Any]]:
    from vllm import SamplingParams

    context, written = max(plan.contexts), min(LONG_TEXT, 4 * plan.steps)
    settings = {} if plan.tiny else HALF
    llm = engine(plan, das, max_model_len=context + written + 32, **settings)
    if past:
        llm.collective_rpc("das_rpc", args=("refresh", {"version": 1, "trajectories": replay.sent(past, 0, 0)}))
    params = [
        SamplingParams(
            temperature=1.0,
            max_tokens=written,
            ignore_eos=True,
            detokenize=False,
            seed=i + 1,
            extra_args={"das_problem": i, "das_seed": i + 1},
        )
        for i in range(LONG_REQUESTS)
    ]
    asked = prompts(LONG_REQUESTS, context, SHAPES[plan.shape]["vocab_size"])
    outputs = llm.generate(asked, params, use_tqdm=False)
    stats = llm.collective_rpc("das_rpc", args=("stats", {}))[0] if das else {}
    return [list(o.outputs[0].token_ids) for o in outputs], stats


def _compare(tiny: bool, drafters: list[str]) -> Found:
    """Run the contract tests' own engine, once without drafts and once with each of some drafters."""
    sys.path.insert(0, str(CONTRACT))
    from engine import run

    if not tiny:
        os.environ.pop("TORCHDYNAMO_DISABLE")  # the engine sets it for CPUs
    from jobs import Job
    from requested import OFF, PLAIN, requests, two_rounds

    rounds = two_rounds(requests(PLAIN))
    settings = {"enforce_eager": tiny, **({} if tiny else HALF)}
    off, found = run(Job(OFF, rounds, settings)), {}
    for name in drafters:
        ahead = name == "draft_model"
        scheduled = {"async_scheduling": True} if ahead else {}
        on = run(Job(DRAFTERS[name], rounds, settings | scheduled, asynchronous=ahead and tiny))
        found[name] = _difference(off, on)
    return found


def _difference(off: list[dict[str, Any]], on: list[dict[str, Any]]) -> dict[str, Any]:
    """Count the responses that differ, and say where the first tokens that differ stand and what they weigh."""
    parted = []
    for a, b in zip(off, on, strict=True):
        pairs = zip(a["tokens"], b["tokens"], a["logprobs"], b["logprobs"], strict=True)
        for x, y, p, q in pairs:
            if x != y:
                at = next(i for i, (s, t) in enumerate(zip(x, y, strict=False)) if s != t)
                parted.append([at, p[at], q[at]])
    return {
        "responses": sum(len(r["tokens"]) for r in off),
        "different": len(parted),
        "parted": parted[:20],
        "audited": min(r["audited"] for r in (*off, *on)),
        **{name: sum(r[name] for r in (*off, *on)) for name in ("misplaced", "reused")},
        "asynchronous": all(r["asynchronous"] for r in on),
        "accepted_tokens": sum(r["stats"]["accepted_tokens"] for r in on),
    }


INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}
ROBUST = "default and ((plain and failing) or (every-parameter and chunks) or failing_drafter or collapsed)"
"""Arms of the contract tests."""


def robust(plan: Plan) -> Iterator[Found]:
    """A crowded engine; some of the contract tests on this device."""
    runner = V2 if plan.runner == "V2" else V1
    found: Found = {"runner": plan.runner, "crowded": apart(plan, _crowded, plan, env=replay.IN_PROCESS | runner)}
    yield found
    found["contract"] = _pytest(plan, ("test_losslessness.py",), ROBUST, INVARIANT)
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
    das = {"drafter": "history", "budget": "unlimited", "max_draft_tokens": 16, "speculate": "always"}
    llm = engine(plan, das, max_model_len=512, **settings)
    replay.force(rollouts)
    past = replay.sent(rollouts, 0, 0)
    llm.collective_rpc("das_rpc", args=("refresh", {"version": 1, "trajectories": past}))
    begin = time.perf_counter()
    replay.rollout(llm, rollouts)
    stats = llm.collective_rpc("das_rpc", args=("stats", {}))[0]
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return {
        "error": stats["error"],
        "accepted_tokens": stats["accepted_tokens"],
        "peak_bytes": peak,
        "seconds": time.perf_counter() - begin,
    }


def ranks(plan: Plan) -> Iterator[Found]:
    """Two tensor-parallel ranks: the tokens of one, and nobody waits for one that failed."""
    capabilities = gpus()
    if not plan.tiny and len(capabilities) < 2:
        yield {"why": "fewer than two GPUs"}
        return
    able = plan.tiny or min(capabilities) >= FP8_CAPABILITY  # half a layer is too narrow for `int4`
    chosen = "default" if able else "default and two_ranks and not self"
    yield _pytest(plan, ("test_ranks.py",), chosen, INVARIANT | {"DAS_TEST_COPY": "fp8"})


RANKS_BARS = (Bar("tests of two ranks: exit code", 0, lambda f: f["code"]),)


def _pytest(plan: Plan, files: tuple[str, ...], chosen: str, environment: dict[str, str]) -> Found:
    """Run contract tests on the V1 runner, whose parts they break; on a CPU only list them."""
    if not plan.whole or not CONTRACT.is_dir():
        return {"code": None, "last_line": "" if CONTRACT.is_dir() else "a wheel has no tests: run it from the source"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "", "-k", chosen, *files]
    command += ["--collect-only"] if plan.tiny else []
    env = os.environ | V1 | ({} if plan.tiny else {"DAS_TEST_DTYPE": HALF["dtype"]} | environment)
    done = subprocess.run(command, cwd=CONTRACT, capture_output=True, text=True, check=False, env=env)
    lines = done.stdout.strip().splitlines()
    return {
        "code": None if plan.tiny else done.returncode,
        "last_line": lines[-1] if lines else "",
        "said": lines[-30:],
    }
