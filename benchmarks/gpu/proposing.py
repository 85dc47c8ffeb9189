"""`propose`: what the V1 runner's drafter does on the host in a step, beside what the step takes on a GPU by its data
sheet."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
from engines import SHAPES, Bar, Found, Plan

GROUP, MOST = 8, 16
SCHEDULER_S = 5e-6
"""What vLLM's scheduler takes for a request after a step, while the history is searched: `update_from_output` took 1.36
ms for 256 requests that ran on vLLM 0.27.1 and an AMD EPYC (median)."""
EVERY: dict[str, Any] = {"budget": "unlimited", "max_draft_tokens": MOST, "speculate": "always"}
"""Drafts whatever is found for every request in every step."""


def propose(plan: Plan) -> Found:
    """By batch, beside steps on an H100 (roofline): what the engine waits for a proposer that drafts for every request,
    and as its default is, over rollouts whose drafts are verified, on as many threads as on a GPU's host, beside vLLM's
    scheduler."""
    from das_adapter.core.hardware import DEVICES
    from das_adapter.core.roofline import Roofline

    roof, context = Roofline.of(SHAPES[plan.shape], DEVICES["h100"].speed), min(plan.contexts)
    rows = {}
    for batch in plan.batches:
        world = World(plan, batch, context)
        rows[str(batch)] = {
            "undrafted_step_ms": 1e3 * float(roof.seconds(batch, context, 0)),
            "verifying_step_ms": 1e3 * float(roof.seconds(batch, context, MOST)),
            "every draft": _rollout(world, EVERY, roof),
            "default": _rollout(world, {}, roof),
        }
    return {"context": context, "rows": rows}


def _share(found: Found, proposer: str) -> float:
    """Return the share of its steps that a proposer takes at the largest batch."""
    return float(found["rows"][max(found["rows"], key=int)][proposer]["share"])


BARS = (
    Bar("proposing, share of a rollout's steps at the largest batch", 0.03, lambda f: _share(f, "default")),
    Bar("proposing every draft, share of the steps that verify them", 0.03, lambda f: _share(f, "every draft")),
)


class World:
    """A batch in groups that write the same with mistakes, each at its own place, after rollouts of theirs."""

    def __init__(self, plan: Plan, batch: int, context: int) -> None:
        self.batch, self.context, self.steps = batch, context, plan.steps
        self.vocabulary = SHAPES[plan.shape]["vocab_size"]
        rng, length = np.random.default_rng(batch), context + GROUP * plan.steps
        poems = rng.integers(0, self.vocabulary, (-(-batch // GROUP), length), dtype=np.int32)

        def variation(problem: int) -> np.ndarray:
            wrong = rng.random(length) < 0.1
            return np.where(wrong, rng.integers(0, self.vocabulary, length), poems[problem]).astype(np.int32)

        self.past = [(problem, variation(problem)) for problem in range(len(poems)) for _ in range(GROUP)]
        self.texts = np.stack([variation(slot // GROUP) for slot in range(batch)])
        self.begins = rng.integers(context // 2, context, batch, endpoint=True)
        """Tokens that each request has written already."""


def _rollout(world: World, more: dict[str, Any], roof: Any) -> dict[str, float]:
    """Draft as vLLM's V1 runner has it done, but for the runner, in steps that take what the roofline says; drafts are
    accepted where they are what the request writes."""
    from das_adapter.core.latency import StepTimes
    from das_adapter.engine.history import THREADS
    from das_adapter.engine.v1.proposer import Proposer
    from das_adapter.protocol.engine_args import SETTINGS_KEY
    from das_adapter.protocol.label import Label
    from das_adapter.protocol.messages import Refresh, Trajectory

    longest = world.texts.shape[1]
    drafter = Proposer(
        SimpleNamespace(
            additional_config={SETTINGS_KEY: {"drafter": "history", **more}},
            speculative_config=object(),
            parallel_config=SimpleNamespace(tensor_parallel_size=1, rank=0),
            model_config=SimpleNamespace(
                max_model_len=longest,
                get_vocab_size=lambda: world.vocabulary,
                enforce_eager=True,
                quantization="unknown",
            ),
            compilation_config=SimpleNamespace(cudagraph_mode=None),
        )
    )
    drafter.engine.controller.account.time.engine = StepTimes(roof.line())  # what it begins with on that GPU
    drafter.engine.history.threads = min(THREADS, len(os.sched_getaffinity(0)))
    names = [str(slot) for slot in range(world.batch)]
    params = SimpleNamespace(max_tokens=None)
    requests = {
        name: SimpleNamespace(prompt_token_ids=text[:8].tolist(), sampling_params=params)
        for name, text in zip(names, world.texts, strict=True)
    }
    drafter.runner = SimpleNamespace(requests=requests, input_batch=SimpleNamespace(req_ids=names))
    drafter.label = lambda name: Label(problem=int(name) // GROUP)
    drafter.refresh(Refresh(1, trajectories=[Trajectory(problem, text.tobytes(), 0) for problem, text in world.past]))
    lengths, texts = world.begins.copy(), world.texts.tolist()
    drafts: list[list[int]] = [[] for _ in names]
    now, times, counted = 0.0, list[float](), [0, 0, 0]
    while len(times) <= world.steps and lengths.max() + MOST < longest:
        scheduled = SimpleNamespace(
            num_scheduled_tokens={name: 1 + len(draft) for name, draft in zip(names, drafts, strict=True)},
            scheduled_new_reqs=[],
            finished_req_ids=set(),
            scheduled_spec_decode_tokens={name: draft for name, draft in zip(names, drafts, strict=True) if draft},
            total_num_scheduled_tokens=world.batch + sum(map(len, drafts)),
        )
        begin = time.perf_counter()
        drafter.begin_step(scheduled, now)
        took = time.perf_counter() - begin
        carried = list(map(len, drafts))
        now += float(roof.seconds(world.batch, float(lengths.mean()), sum(carried) / world.batch))
        sampled = []
        for row, (draft, at) in enumerate(zip(drafts, lengths.tolist(), strict=True)):
            accepted = next((i for i, token in enumerate(draft) if token != texts[row][at + i]), len(draft))
            sampled.append(texts[row][at : at + accepted + 1])
        lengths += [len(new) for new in sampled]
        drafter.carried = carried if any(carried) else None
        begin = time.perf_counter()
        drafts = drafter.propose(sampled, lengths, world.texts)
        took += time.perf_counter() - begin
        until = time.perf_counter() + SCHEDULER_S * world.batch
        while time.perf_counter() < until:
            pass  # as the scheduler, with the GIL
        begin = time.perf_counter()
        drafter.settle()
        times.append(took + time.perf_counter() - begin)
        if len(times) == 1:  # in which all requests join; an engine reads their prompts meanwhile
            opened = now
            continue
        counted = [a + b for a, b in zip(counted, (len(names), sum(carried), sum(map(len, sampled))), strict=True)]
    if drafter.engine.counters.error or (more and not counted[1]):
        raise RuntimeError(drafter.engine.counters.error or "nothing was drafted")
    steps, seconds = times[1:], now - opened
    return {
        "propose_ms": 1e3 * float(np.median(steps)),
        "share": sum(steps) / seconds,
        "step_ms": 1e3 * seconds / len(steps),
        "draft_tokens": counted[1] / counted[0],
        "tokens_per_forward": counted[2] / counted[0],
    }
