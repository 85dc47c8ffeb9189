"""`propose`: what the V1 runner's drafter does on the host in a step, beside what the step takes on a GPU by its data
sheet. Without vLLM: its index and controller alone."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
from engines import SHAPES, Bar, Found, Plan, has_vllm

GROUP, MOST = 8, 16


def propose(plan: Plan) -> Found:
    """Median milliseconds of index and controller in a step, and of the whole proposer, by batch, in processor time (a
    step waits for one thread); and of the step on an H100 (roofline)."""
    from das_adapter.core.hardware import DEVICES
    from das_adapter.core.roofline import Roofline

    roof, context = Roofline.of(SHAPES[plan.shape], DEVICES["h100"].speed), min(plan.contexts)
    rows = {}
    for batch in plan.batches:
        world = World(plan, batch, context)
        rows[str(batch)] = {
            "index_ms": 1e3 * _index_seconds(world),
            "step_ms": 1e3 * float(roof.verify(batch, context, 0)),
        }
        if has_vllm():
            rows[str(batch)]["propose_ms"] = 1e3 * _proposer_seconds(world)
    return {"context": context, "rows": rows}


def _share(found: Found) -> float:
    row = found["rows"][max(found["rows"], key=int)]
    return float(row.get("propose_ms", row["index_ms"]) / row["step_ms"])


BARS = (Bar("proposing, share of a step at the largest batch", 0.03, _share),)


class World:
    """A batch in groups that write the same with mistakes, after rollouts of theirs."""

    def __init__(self, plan: Plan, batch: int, context: int) -> None:
        self.batch, self.context, self.steps = batch, context, plan.steps
        self.vocabulary = SHAPES[plan.shape]["vocab_size"]
        rng, length = np.random.default_rng(batch), context + plan.steps
        poems = rng.integers(0, self.vocabulary, (-(-batch // GROUP), length), dtype=np.int32)

        def variation(problem: int) -> np.ndarray:
            wrong = rng.random(length) < 0.1
            return np.where(wrong, rng.integers(0, self.vocabulary, length), poems[problem]).astype(np.int32)

        self.past = [(problem, variation(problem)) for problem in range(len(poems)) for _ in range(GROUP)]
        self.texts = np.stack([variation(slot // GROUP) for slot in range(batch)])


def _index_seconds(world: World) -> float:
    """Draft in every step."""
    from das_adapter.config import BudgetConfig, ToggleConfig
    from das_adapter.core.controller import Controller, Decoded, TimedStep
    from das_adapter.core.index import SuffixIndex

    index, batch, context = SuffixIndex(), world.batch, world.context
    for problem, text in world.past:
        index.add(problem, text, 0)
    index.seal()
    handles = np.array([index.open(i // GROUP, text[:8], prefix=text[8:context]) for i, text in enumerate(world.texts)])
    controller = Controller(BudgetConfig(policy="unlimited", max_draft_tokens=MOST), ToggleConfig(mode="off"), 2**15)
    slots = np.array([controller.open(i // GROUP, context, 2**15) for i in range(batch)])
    one, room, times = np.ones(batch, dtype=np.int64), np.full(batch, 10**6), []
    offsets = np.arange(batch + 1, dtype=np.int64)
    for step in range(world.steps):
        new = np.ascontiguousarray(world.texts[:, context + step])

        def look(limits: np.ndarray, floor: float, new: np.ndarray = new) -> Any:
            index.extend_many(handles, new, offsets)
            _, chances, at = index.draft_flat(handles, limits, floor)
            return chances, at

        begin = time.process_time()
        controller.plan(Decoded(slots, one, None, None, room), look)
        controller.timed(TimedStep(slots, one, batch, 0.01))
        times.append(time.process_time() - begin)
    return float(np.median(times))


def _proposer_seconds(world: World) -> float:
    """Draft in every step as vLLM's V1 runner has it done, but for the runner."""
    from das_adapter.engine.drafters.controlled import ControlledDrafter
    from das_adapter.protocol.engine_args import SETTINGS_KEY
    from das_adapter.protocol.label import Label
    from das_adapter.protocol.messages import Refresh, Trajectory

    block = {
        "drafter": "history",
        "budget": {"policy": "unlimited", "max_draft_tokens": MOST},
        "toggle": {"mode": "off"},
    }
    most = world.texts.shape[1] + MOST + 1
    drafter = ControlledDrafter(SimpleNamespace(
        additional_config={SETTINGS_KEY: block}, speculative_config=object(),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, rank=0),
        model_config=SimpleNamespace(max_model_len=most, get_vocab_size=lambda: world.vocabulary, enforce_eager=True),
        compilation_config=SimpleNamespace(cudagraph_mode=None),
    ))  # fmt: skip
    names = [str(slot) for slot in range(world.batch)]
    params = SimpleNamespace(max_tokens=None)
    requests = {name: SimpleNamespace(prompt_token_ids=text[:8].tolist(), sampling_params=params)
                for name, text in zip(names, world.texts, strict=True)}  # fmt: skip
    drafter.runner = SimpleNamespace(requests=requests, input_batch=SimpleNamespace(req_ids=names))
    drafter.label = lambda name: Label(problem=int(name) // GROUP)
    drafter.refresh(Refresh(1, trajectories=[Trajectory(problem, text.tobytes(), 0) for problem, text in world.past]))
    tokens, times, drafted = np.zeros((world.batch, most), dtype=np.int32), [], 0
    tokens[:, : world.texts.shape[1]] = world.texts
    for step in range(world.steps):
        length = world.context + step + 1
        sampled = world.texts[:, length - 1 : length].tolist()
        scheduled = SimpleNamespace(
            num_scheduled_tokens=dict.fromkeys(names, 1), scheduled_new_reqs=[], scheduled_spec_decode_tokens={},
            total_num_scheduled_tokens=world.batch, finished_req_ids=set(),
        )  # fmt: skip
        begin = time.process_time()
        drafter.begin_step(scheduled, begin)
        drafts = drafter.propose(sampled, np.full(world.batch, length), tokens)
        times.append(time.process_time() - begin)
        drafted += sum(map(len, drafts))
    if drafter.counters.error or not drafted:
        raise RuntimeError(drafter.counters.error or "nothing was drafted")
    return float(np.median(times))
