"""`replay`: recorded rollouts through real forward passes. The tokens are forced, so
that real acceptance meets real step times although the weights are random.
"""

from __future__ import annotations

import functools
import itertools
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from das_adapter.bench.engines import (
    BLOCK,
    FOLDER,
    HISTORY,
    IN_PROCESS,
    STARTED,
    Bar,
    Found,
    Measured,
    Plan,
    at_once,
    engine,
    generate,
    process,
    sampling,
)
from das_adapter.core.index.store import HistoryStore

CORRUPTED = (0.3, 1.0)
"""Shares of the history's tokens that are exchanged; at 1.0 it has nothing to draft."""
GROUP = 8
FEW, MANY, SURE, ENOUGH_S = 3, 20, 0.01, 16.0
"""Rollouts of an arm, at least and at most; standard error of their time that is
enough; and seconds of both engines that are.
"""
Rollouts = list[tuple[int, np.ndarray]]
"""Problem and int32 token ids of each response."""


def measure(plan: Plan, traces: Path | None) -> Iterator[Found]:
    """Measure one long-tailed batch, of stock's time: `history` over what traces have
    of its problems, over the batch itself, corrupted, and over a text that misleads.
    Both engines are there at once, and take turns.
    """
    rollouts, earlier = recorded(traces, plan) if traces else (generated(plan), [])
    found: Found = {
        "traces": traces.name if traces else "generated",
        "tokens": sum(len(t) for _, t in rollouts),
    }
    found |= {
        "groups": sorted(Counter(problem for problem, _ in rollouts).values()),
        "longest": _longest(rollouts),
    }
    found |= {"history_tokens": sum(len(t) for _, t in earlier), "arms": {}}
    shares = CORRUPTED if not plan.tiny else (0.0, 1.0)
    histories = {FIRST: corrupted(rollouts, shares[0], plan.vocabulary)}
    histories |= {"earlier": earlier} if earlier else {}
    histories |= {
        f"exchanged {share:.0%}": corrupted(rollouts, share, plan.vocabulary)
        for share in shares
    }
    # nobody has siblings, whose text would help
    alone = [(i, text) for i, (_, text) in enumerate(rollouts)]
    wrong = corrupted(alone, None, plan.vocabulary)
    engines = (
        (HISTORY, rollouts, histories),
        (
            EAGER,
            alone,
            {"misleading": wrong, MISLED: wrong},
        ),
    )
    with process(plan, IN_PROCESS) as stock:
        starting = [functools.partial(stock, _start, plan, None, rollouts)]
        for das, batch, past in engines:
            with process(plan, IN_PROCESS) as ours:
                at_once(functools.partial(ours, _start, plan, das, batch), *starting)
                starting = []
                for name, before in past.items():
                    found["arms"][name] = in_turn(
                        ours, stock, batch, before, once=name in ONCE
                    )
                    yield found


def _longest(rollouts: Rollouts) -> list[Found]:
    """Say of the five longest responses, which decide how long a rollout takes, how
    many tokens they have, and which share of their stretches of 8 tokens is there once:
    in one that repeats itself few are.
    """
    texts = sorted((text for _, text in rollouts), key=len)[-5:]
    stretches = (
        np.lib.stride_tricks.sliding_window_view(text, 8)
        for text in texts
        if len(text) > 8
    )
    return [
        Found(tokens=len(at) + 7, distinct=len(np.unique(at, axis=0)) / len(at))
        for at in stretches
    ]


EAGER = HISTORY | {"budget": "unlimited"}
"""Drafts whatever is found, until it is seen to cost time."""
FIRST = "first"
"""An engine's first rollout: some kernels are compiled in it, and step times are not
known yet.
"""
MISLED = "after misleading"
"""The rollout after one in which nearly all drafts were rejected, over such a history
again.
"""
ONCE = (FIRST, "misleading")
"""Rollouts that cannot come twice; neither is judged by its time."""


def _beyond_doubt(found: Found, arm: str) -> float:
    """Return the time of a rollout, of stock's, less twice its error."""
    ratio, error = found["arms"][arm]["of_stock"]
    return float(ratio - 2.0 * error)


def _still_drafted(found: Found) -> float:
    """Draft tokens after a rollout that misled, of those in it."""
    before, after = (
        found["arms"][name]["draft_tokens"] for name in ("misleading", MISLED)
    )
    return float(after / before) if before else float("nan")


BARS = (
    Bar(
        "forced tokens that were not written",
        0,
        lambda f: max(arm["unforced"] for arm in f["arms"].values()),
    ),
    Bar(
        "rollout with what the traces have of its problems, of stock's time",
        0.6,
        lambda f: f["arms"]["earlier"]["of_stock"][0],
    ),
    Bar(
        "rollout with a recorded history, of stock's time",
        0.6,
        lambda f: f["arms"]["exchanged 30%"]["of_stock"][0],
    ),
    Bar(
        "standard error of what a rollout costs, at worst",
        0.02,
        lambda f: max(
            arm["of_stock"][1] for name, arm in f["arms"].items() if name not in ONCE
        ),
    ),
    Bar(
        "rollout whose history says nothing, of stock's time, less twice its error",
        1.02,
        lambda f: _beyond_doubt(f, "exchanged 100%"),
    ),
    Bar(
        "rollout with a history that misleads, of stock's time, less twice its error",
        1.02,
        lambda f: _beyond_doubt(f, MISLED),
    ),
    Bar(
        "draft tokens after a rollout that was misled, of those in it",
        0.1,
        _still_drafted,
    ),
    Bar(
        "waiting for the drafter, of a rollout's steps",
        0.03,
        lambda f: f["arms"]["exchanged 30%"]["propose_share"],
    ),
    Bar(
        "errors", 0, lambda f: max(bool(arm.get("error")) for arm in f["arms"].values())
    ),
)


def generated(plan: Plan) -> Rollouts:
    """Make rollouts with the lengths of a GRPO step: groups of samples that share much,
    a log-normal tail.
    """
    rng = np.random.default_rng(0)
    vocabulary = plan.vocabulary
    found: Rollouts = []
    for problem in range(-(-plan.replayed // GROUP)):
        base = rng.integers(1, vocabulary, plan.longest, dtype=np.int32)
        scale = rng.lognormal(np.log(plan.longest / 6), 0.7)
        for _ in range(GROUP):
            ids = np.where(
                rng.random(plan.longest) < 0.2,
                rng.integers(1, vocabulary, plan.longest),
                base,
            )
            length = int(np.clip(scale * rng.lognormal(0, 0.25), 8, plan.longest))
            found.append((problem, ids[:length].astype(np.int32)))
    return found[: plan.replayed]


def recorded(path: Path, plan: Plan) -> tuple[Rollouts, Rollouts]:
    """Read recorded rollouts (see `sim.rollouts.read`).

    Returns:
        Responses of the last step, as many groups as fit; and what earlier steps wrote
        for the same problems, or, where there is one step only, other samples.
    """
    from das_adapter.sim.rollouts import Rollout, read

    problems: dict[int, list[Rollout]] = {}
    for rollout in read(path):
        problems.setdefault(rollout.problem, []).append(rollout)
    batch: Rollouts = []
    earlier: Rollouts = []
    for problem, group in problems.items():
        last = max(rollout.step for rollout in group)
        before, late = (
            [r.tokens for r in group if (r.step == last) == of_last]
            for of_last in (False, True)
        )
        if not before:
            before = late[: len(late) // 2]
            late = late[len(late) // 2 :]
        for found, texts in ((batch, late[:GROUP]), (earlier, before[-2 * GROUP :])):
            found += [(problem, text % plan.vocabulary) for text in texts]
        if len(batch) >= plan.replayed:
            break
    return [
        (problem, text[: plan.longest]) for problem, text in batch[: plan.replayed]
    ], earlier


def corrupted(rollouts: Rollouts, share: float | None, vocabulary: int) -> Rollouts:
    """Exchange a share of the tokens; None: every second one, so that what is looked up
    is found, and goes on otherwise.
    """
    rng = np.random.default_rng(1)

    def exchanged(text: np.ndarray) -> np.ndarray:
        wrong = (
            np.arange(len(text)) % 2 if share is None else rng.random(len(text)) < share
        )
        return np.where(wrong, rng.integers(1, vocabulary, len(text)), text).astype(
            np.int32
        )

    return [(problem, exchanged(text)) for problem, text in rollouts]


def kept(
    store: HistoryStore, rollouts: Rollouts, problems: int = 0, version: int = 0
) -> dict[str, Any]:
    """Seal them in a store, with the problems shifted; return what an engine is told of
    them at a weight sync.
    """
    from das_adapter.config import HistoryConfig
    from das_adapter.core.history import HistoryRules
    from das_adapter.protocol.messages import Published, Refresh, Trajectory, responses

    past = [
        Trajectory(problem + problems, text.tobytes(), version)
        for problem, text in rollouts
    ]
    HistoryRules(HistoryConfig()).add_and_seal(store, past)
    history = Published(str(store.directory), store.generation)
    return Refresh(version + 1, history, responses(past).tobytes()).payload()


def rollout(
    llm: Any, rollouts: Rollouts, problems: int = 0
) -> tuple[float, list[list[int]]]:
    """Seconds and tokens of the batch; each request writes as many tokens as its
    recording has.
    """
    asked = [
        {"prompt_token_ids": [1 + i % 50, *range(1, 64)]} for i in range(len(rollouts))
    ]
    lengths = [len(text) for _, text in rollouts]
    shifted = [problem + problems for problem, _ in rollouts]
    _ENDS.clear()
    return generate(llm, asked, sampling(lengths, shifted, itertools.count()))


def in_turn(
    ours: Callable[..., Any],
    stock: Callable[..., Any],
    rollouts: Rollouts,
    before: Rollouts,
    once: bool,
) -> Found:
    """Let both engines write the batch, in turns. Return what they told of each of the
    `rollouts`, what went wrong in any, the draft tokens of the first, and `of_stock`,
    the time that ours takes of stock's, with its standard error (None: of one
    rollout).
    """
    turns: list[Found] = []
    for _ in range(1 if once else MANY):
        turns.append(
            ours(_history, rollouts, before) | {"stock": stock(_stock, rollouts)}
        )
        of_stock = Measured.of(
            [turn["seconds"] / turn["stock"]["seconds"] for turn in turns]
        )
        took = sum(turn["seconds"] + turn["stock"]["seconds"] for turn in turns)
        if len(turns) >= FEW and (of_stock.error <= SURE or took > ENOUGH_S):
            break
    shares = [
        turn["propose_share"] for turn in turns if turn["propose_share"] is not None
    ]
    return {
        "of_stock": [of_stock.value, None if once else of_stock.error],
        "tokens_per_forward": statistics.median(
            turn["tokens_per_forward"] for turn in turns
        ),
        "unforced": sum(turn["unforced"] for turn in turns),
        "error": next((turn["error"] for turn in turns if turn["error"]), None),
        "propose_share": max(shares, default=None),
        "draft_tokens": turns[0]["draft_tokens"],
        "accepted_tokens": turns[0]["accepted_tokens"],
        "rollouts": turns,
    }


def _start(plan: Plan, das: dict[str, Any] | None, rollouts: Rollouts) -> None:
    lengths = [64 + 24 + len(text) for _, text in rollouts]
    llm = engine(
        plan, das, sum(lengths) + 3 * BLOCK * len(lengths), max_model_len=max(lengths)
    )
    _note_steps(llm.llm_engine)
    rollout(llm, [(p, t[:8]) for p, t in rollouts], problems=10**6)
    if das:
        force(
            rollouts,
            llm.collective_rpc("das_rpc", args=("stats", {}))[0]["model_runner"],
        )


_ENDS: list[float] = []
"""When the steps of this process's engine have ended, of the present rollout."""


def _note_steps(vllm: Any) -> None:
    stock = vllm.step

    def step() -> Any:
        outputs = stock()
        _ENDS.append(time.perf_counter())
        return outputs

    vllm.step = step


def _pace() -> Found:
    """Say how many steps the rollout had, what half and nine tenths of them took at
    most, and which took longest, as where a kernel is compiled.
    """
    took = 1e3 * np.diff(_ENDS)
    longest = {int(step): float(took[step]) for step in np.argsort(-took)[:5]}
    half, most = np.quantile(took, (0.5, 0.9)).tolist()
    return Found(steps=len(took), step_ms=half, most_ms=most, longest_ms=longest)


def _stock(rollouts: Rollouts) -> Found:
    return Found(seconds=rollout(STARTED[-1], rollouts)[0], **_pace())


@functools.cache
def _past() -> HistoryStore:
    """Return the history of this process's engine."""
    return HistoryStore(Path(os.environ[FOLDER]) / "history")


_TURNS = itertools.count()
"""Rollouts of this process's engine."""


def _history(rollouts: Rollouts, before: Rollouts) -> Found:
    llm = STARTED[-1]
    turn = next(_TURNS)
    shift = turn * 10**7  # of the problems, so that no rollout sees another's text
    llm.collective_rpc(
        "das_rpc", args=("refresh", kept(_past(), before, shift, 2 * turn))
    )
    llm.collective_rpc("das_rpc", args=("stats", {}))
    seconds, texts = rollout(llm, rollouts, problems=shift)
    stats = llm.collective_rpc("das_rpc", args=("stats", {}))[0]
    waited = stats["propose_seconds"]  # of the host; on V2 the device drafts
    return {
        "seconds": seconds,
        **_pace(),
        "unforced": sum(
            text != forced.tolist()
            for text, (_, forced) in zip(texts, rollouts, strict=True)
        ),
        "propose_share": sum(waited) / stats["busy_seconds"] if waited else None,
        "tokens_per_forward": stats["tokens"] / max(1, stats["request_forwards"]),
        **{
            name: stats[name]
            for name in ("state", "reason", "error", "draft_tokens", "accepted_tokens")
        },
    }


def force(rollouts: Rollouts, runner: int) -> None:
    """Let the request whose seed is i write recording i: the sampler draws at its full
    cost, then its token is replaced, on the device, by the recording's at that
    position.
    """
    import torch

    from das_adapter.engine.v1 import verification as replaced

    verification: Any = replaced
    stock = verification.keyed_sample
    table = None
    longest = max(len(text) for _, text in rollouts)
    padded = np.ones((len(rollouts), 64 + longest + 64), dtype=np.int64)
    for row, (_, text) in zip(padded, rollouts, strict=True):
        row[64 : 64 + len(text)] = text

    def recorded_at(seeds: Any, positions: Any) -> Any:
        nonlocal table
        if table is None:
            table = torch.from_numpy(padded).to(seeds.device)
        return table[
            seeds.clamp(0, len(table) - 1),
            (positions + 1).clamp(max=table.shape[1] - 1),
        ]

    def forced(logits: Any, keys: Any) -> Any:
        stock(logits, keys)  # it takes its time
        return recorded_at(keys.seeds, keys.positions)

    verification.keyed_sample = forced
    if runner == 2:
        from vllm.v1.worker.gpu.sample import gumbel, sampler

        v2 = gumbel.gumbel_sample

        def drawn(
            logits: Any,
            slots: Any,
            heat: Any,
            seeds: Any,
            positions: Any,
            *rest: Any,
            **more: Any,
        ) -> Any:
            v2(logits, slots, heat, seeds, positions, *rest, **more)
            return recorded_at(seeds[slots.clamp(min=0)], positions)

        gumbel.gumbel_sample = sampler.gumbel_sample = drawn
