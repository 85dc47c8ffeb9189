"""`propose`: what the V1 runner's drafter does on the host in a step (index, controller), beside what the step takes on
a GPU by its data sheet. Needs no vLLM."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from engines import SHAPES, Bar, Found, Plan

GROUP, MOST = 8, 16


def propose(plan: Plan) -> Found:
    """Median milliseconds of index and controller in a step, by batch, and of the step on an H100 (roofline)."""
    from das_adapter.core.hardware import DEVICES
    from das_adapter.core.roofline import Roofline

    roof, context = Roofline.of(SHAPES[plan.shape], DEVICES["h100"].speed), min(plan.contexts)
    return {"context": context, "rows": {
        str(batch): {"propose_ms": 1e3 * _seconds(plan, batch, context),
                     "step_ms": 1e3 * float(roof.verify(batch, context, 0))}
        for batch in plan.batches
    }}  # fmt: skip


def _share(found: Found) -> float:
    row = found["rows"][max(found["rows"], key=int)]
    return float(row["propose_ms"] / row["step_ms"])


BARS = (Bar("index and controller, share of a step at the largest batch", 0.03, _share),)


def _seconds(plan: Plan, batch: int, context: int) -> float:
    """Draft in every step for a batch in groups that write the same with mistakes, over sealed rollouts of theirs."""
    from das_adapter.config import BudgetConfig, ToggleConfig
    from das_adapter.core.controller import Controller, Decoded, TimedStep
    from das_adapter.core.index import SuffixIndex

    rng, vocabulary, steps = np.random.default_rng(batch), SHAPES[plan.shape]["vocab_size"], plan.steps
    problems = -(-batch // GROUP)
    poems = rng.integers(0, vocabulary, (problems, context + steps), dtype=np.int32)

    def variation(problem: int) -> np.ndarray:
        wrong = rng.random(context + steps) < 0.1
        mistakes = rng.integers(0, vocabulary, context + steps)
        return np.where(wrong, mistakes, poems[problem]).astype(np.int32)

    index = SuffixIndex()
    for problem in range(problems):
        for _ in range(GROUP):
            index.add(problem, variation(problem), 0)
    index.seal()
    texts = [variation(slot // GROUP) for slot in range(batch)]
    handles = np.array([index.open(i // GROUP, text[:8], prefix=text[8:context]) for i, text in enumerate(texts)])
    controller = Controller(BudgetConfig(policy="unlimited", max_draft_tokens=MOST), ToggleConfig(mode="off"), 2**15)
    slots = np.array([controller.open(i // GROUP, context, 2**15) for i in range(batch)])
    one, room, times = np.ones(batch, dtype=np.int64), np.full(batch, 10**6), []
    offsets = np.arange(batch + 1, dtype=np.int64)
    for step in range(steps):
        new = np.array([text[context + step] for text in texts], dtype=np.int32)

        def look(limits: np.ndarray, floor: float, new: np.ndarray = new) -> Any:
            index.extend_many(handles, new, offsets)
            _, chances, at = index.draft_flat(handles, limits, floor)
            return chances, at

        begin = time.perf_counter()
        controller.plan(Decoded(slots, one, None, None, room), look)
        controller.timed(TimedStep(slots, one, batch, 0.01))
        times.append(time.perf_counter() - begin)
    return float(np.median(times))
