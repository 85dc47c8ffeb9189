"""`propose`: what the V1 runner's drafter does on the host in a step, beside what the step takes on a GPU by its data
sheet."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from das_adapter.bench.engines import SHAPES, Bar, Found, Item, Plan, every

GROUP, MOST = 8, 16
SCHEDULER_S = 5e-6
"""What vLLM's scheduler takes for a request after a step, while the history is searched: `update_from_output` took 1.36
ms for 256 requests that ran on vLLM 0.27.1 and an AMD EPYC (median)."""
ROUNDS = 5
EVERY: dict[str, Any] = {"budget": "unlimited", "max_draft_tokens": MOST, "speculate": "always"}
"""Drafts whatever is found for every request in every step."""


def propose(plan: Plan) -> Found:
    """By batch, beside steps on an H100 (roofline): what the engine waits for a proposer that drafts for every request,
    and as its default is, over rollouts whose drafts are verified, on as many threads as on a GPU's host, beside vLLM's
    scheduler. The median of `ROUNDS` rollouts, by the share."""
    from das_adapter.core.hardware import DEVICES
    from das_adapter.core.roofline import Roofline

    roof, context = Roofline.of(SHAPES[plan.shape], DEVICES["h100"].speed), min(plan.contexts)
    rows = {}
    for batch in plan.batches:
        world = World(plan, batch, context)
        rows[str(batch)] = {
            "undrafted_step_ms": 1e3 * float(roof.seconds(batch, context, 0)),
            "verifying_step_ms": 1e3 * float(roof.seconds(batch, context, MOST)),
            "every draft": _usual(world, EVERY, roof),
            "default": _usual(world, {}, roof),
        }
    return {"context": context, "rows": rows}


def _share(found: Found, proposer: str) -> float:
    """Return the share of its steps that a proposer takes, at the batch where it is largest."""
    return every(found["rows"].values(), lambda row: float(row[proposer]["share"]))


BARS = (
    Bar("proposing, share of a rollout's steps at the worst batch", 0.03, lambda f: _share(f, "default")),
    Bar("proposing every draft, share of the steps that verify them", 0.03, lambda f: _share(f, "every draft")),
)


class Clock:
    """Sums up what the engine waits for: processor time of its thread, and of the search's what the scheduler's work
    does not cover. Other processes on the machine do not change it."""

    def __init__(self, threads: int, covered: float) -> None:
        """`threads`: of the search. `covered`: seconds of a step beside which it runs."""
        self._threads, self._covered = threads, covered
        self.waited, self.behind = list[float](), list[float]()
        """Of each step: seconds that the engine waits, and those that pass while the GPU runs."""

    def begin(self) -> None:
        """Begin a step."""
        self._own = 0.0

    def spend(self, call: Callable[[], Item]) -> Item:
        """Call something for which the engine waits."""
        begin = time.thread_time()
        result = call()
        self._own += time.thread_time() - begin
        return result

    def beside(self, call: Callable[[], None]) -> None:
        """Call something that passes while the GPU runs the forward pass. No search has begun yet."""
        begin = time.thread_time()
        call()
        self.behind.append(time.thread_time() - begin)
        self._search = time.process_time() - time.thread_time()

    def cover(self) -> None:
        """Do as vLLM's scheduler, which holds Python's lock."""
        until = time.thread_time() + self._covered
        while time.thread_time() < until:
            pass

    def end(self) -> None:
        """End a step."""
        search = time.process_time() - time.thread_time() - self._search  # of all other threads
        self.waited.append(self._own + max(0.0, search / self._threads - self._covered))


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


def _usual(world: World, more: dict[str, Any], roof: Any) -> dict[str, float]:
    rollouts = [_rollout(world, more, roof) for _ in range(ROUNDS)]
    return sorted(rollouts, key=lambda row: row["share"])[ROUNDS // 2]


def _drafter(world: World, more: dict[str, Any], roof: Any) -> Any:
    """Return a V1 proposer that knows the past and the requests of the world, but no runner."""
    from das_adapter.core.latency import StepTimes
    from das_adapter.engine.history import THREADS
    from das_adapter.engine.v1.proposer import Proposer
    from das_adapter.protocol.engine_args import SETTINGS_KEY
    from das_adapter.protocol.label import Label
    from das_adapter.protocol.messages import Refresh, Trajectory

    drafter = Proposer(
        SimpleNamespace(
            additional_config={SETTINGS_KEY: {"drafter": "history", **more}},
            speculative_config=object(),
            parallel_config=SimpleNamespace(tensor_parallel_size=1, rank=0),
            model_config=SimpleNamespace(
                max_model_len=world.texts.shape[1],
                get_vocab_size=lambda: world.vocabulary,
                enforce_eager=True,
                quantization="unknown",
            ),
            compilation_config=SimpleNamespace(cudagraph_mode=None),
        )
    )
    drafter.engine.controller.account.time.engine = StepTimes(roof.line())  # what it begins with on that GPU
    history = drafter.engine.history
    assert history is not None
    history.threads = min(THREADS, len(os.sched_getaffinity(0)))
    names = [str(slot) for slot in range(world.batch)]
    params = SimpleNamespace(max_tokens=None)
    requests = {
        name: SimpleNamespace(prompt_token_ids=text[:8].tolist(), sampling_params=params)
        for name, text in zip(names, world.texts, strict=True)
    }
    drafter.runner = SimpleNamespace(requests=requests, input_batch=SimpleNamespace(req_ids=names))
    drafter.label = lambda name: Label(problem=int(name) // GROUP)
    drafter.refresh(Refresh(1, trajectories=[Trajectory(problem, text.tobytes(), 0) for problem, text in world.past]))
    return drafter


def _rollout(world: World, more: dict[str, Any], roof: Any) -> dict[str, float]:
    """Draft as vLLM's V1 runner has it done, but for the runner, in steps that take what the roofline says; drafts are
    accepted where they are what the request writes."""
    drafter = _drafter(world, more, roof)
    names, longest = drafter.runner.input_batch.req_ids, world.texts.shape[1]
    lengths, texts = world.begins.copy(), world.texts.tolist()
    drafts: list[list[int]] = [[] for _ in names]
    now, counted = 0.0, [0, 0, 0]
    clock = Clock(drafter.engine.history.threads, SCHEDULER_S * world.batch)
    while len(clock.waited) <= world.steps and lengths.max() + MOST < longest:
        scheduled = SimpleNamespace(
            num_scheduled_tokens={name: 1 + len(draft) for name, draft in zip(names, drafts, strict=True)},
            scheduled_new_reqs=[],
            finished_req_ids=set(),
            scheduled_spec_decode_tokens={name: draft for name, draft in zip(names, drafts, strict=True) if draft},
            total_num_scheduled_tokens=world.batch + sum(map(len, drafts)),
        )
        clock.begin()
        clock.spend(partial(drafter.begin_step, scheduled, now))
        clock.beside(drafter.catch_up)
        carried = list(map(len, drafts))
        now += float(roof.seconds(world.batch, float(lengths.mean()), sum(carried) / world.batch))
        sampled = []
        for row, (draft, at) in enumerate(zip(drafts, lengths.tolist(), strict=True)):
            accepted = next((i for i, token in enumerate(draft) if token != texts[row][at + i]), len(draft))
            sampled.append(texts[row][at : at + accepted + 1])
        lengths += [len(new) for new in sampled]
        drafter.carried = carried if any(carried) else None
        drafts = clock.spend(partial(drafter.propose, sampled, lengths, world.texts))
        clock.cover()
        clock.spend(drafter.settle)
        clock.end()
        if len(clock.waited) == 1:  # in which all requests join; an engine reads their prompts meanwhile
            opened = now
            continue
        counted = [a + b for a, b in zip(counted, (len(names), sum(carried), sum(map(len, sampled))), strict=True)]
    if drafter.engine.counters.error or (more and not counted[1]):
        raise RuntimeError(drafter.engine.counters.error or "nothing was drafted")
    steps, seconds = clock.waited[1:], now - opened
    return {
        "propose_ms": 1e3 * float(np.median(steps)),
        "behind_ms": 1e3 * float(np.median(clock.behind[1:])),
        "share": sum(steps) / seconds,
        "step_ms": 1e3 * seconds / len(steps),
        "draft_tokens": counted[1] / counted[0],
        "tokens_per_forward": counted[2] / counted[0],
    }
