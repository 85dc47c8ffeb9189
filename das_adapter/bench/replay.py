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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    stats_of,
)
from das_adapter.core.index.store import HistoryStore

if TYPE_CHECKING:
    from das_adapter.sim.rollouts import RecordedResponse

CORRUPTED = (0.3, 1.0)
"""Shares of the history's tokens that are exchanged; at 1.0 it has nothing to draft."""
GROUP = 8
"""Samples of a problem."""
MIN_ROLLOUTS = 3
"""Rollouts of an arm, at least."""
MAX_ROLLOUTS = 20
"""Rollouts of an arm, at most."""
SURE_ERROR = 0.01
"""Standard error of an arm's time after which no further rollout is needed."""
ROLLOUTS_S = 16.0
"""Seconds of both engines after which no further rollout begins."""
PROMPT = 64
"""Tokens of a prompt."""
Rollouts = list[tuple[int, np.ndarray]]
"""Problem and int32 token ids of each response."""


def measure(plan: Plan, traces: Path | None) -> Iterator[Found]:
    """Measure one long-tailed batch, of stock's time: `history` over what traces have
    of its problems, over the batch itself, corrupted, and over a text that misleads.
    Both engines are there at once, and take turns.
    """
    earlier: Rollouts = []
    if traces:
        rollouts, earlier = recorded(traces, plan)
    else:
        rollouts = generated(plan)
    group_sizes = Counter(problem for problem, _ in rollouts)
    found: Found = {
        "traces": traces.name if traces else "generated",
        "tokens": _num_tokens(rollouts),
        "groups": sorted(group_sizes.values()),
        "longest": _longest(rollouts),
        "history_tokens": _num_tokens(earlier),
        "arms": {},
    }
    # nobody has siblings, whose text would help
    alone = [(i, text) for i, (_, text) in enumerate(rollouts)]
    wrong = corrupted(alone, None, plan.vocabulary)
    engines = (
        (HISTORY, rollouts, _histories(plan, rollouts, earlier)),
        (EAGER, alone, {MISLEADING: wrong, MISLED: wrong}),
    )
    with process(plan, IN_PROCESS) as stock:
        starting = [functools.partial(stock, _start, plan, None, rollouts)]
        for das, batch, histories in engines:
            with process(plan, IN_PROCESS) as ours:
                start = functools.partial(ours, _start, plan, das, batch)
                at_once(start, *starting)
                starting = []
                for name, before in histories.items():
                    once = name in ONCE
                    figures = in_turn(ours, stock, batch, before, once)
                    found["arms"][name] = figures
                    yield found


def _num_tokens(rollouts: Rollouts) -> int:
    return sum(len(text) for _, text in rollouts)


def _histories(
    plan: Plan, rollouts: Rollouts, earlier: Rollouts
) -> dict[str, Rollouts]:
    """Return what the batch is drafted from, by the name of the arm."""
    shares = CORRUPTED
    if plan.tiny:
        shares = (0.0, 1.0)
    found = {FIRST: corrupted(rollouts, shares[0], plan.vocabulary)}
    if earlier:
        found["earlier"] = earlier
    for share in shares:
        name = f"exchanged {share:.0%}"
        found[name] = corrupted(rollouts, share, plan.vocabulary)
    return found


def _longest(rollouts: Rollouts) -> list[Found]:
    """Say of the five longest responses, which decide how long a rollout takes, how
    many tokens they have, and which share of their stretches of 8 tokens is there once:
    in one that repeats itself few are.
    """
    texts = sorted((text for _, text in rollouts), key=len)
    found = []
    for text in texts[-5:]:
        if len(text) <= 8:
            continue
        stretches = np.lib.stride_tricks.sliding_window_view(text, 8)
        num_distinct = len(np.unique(stretches, axis=0))
        distinct_share = num_distinct / len(stretches)
        found.append(Found(tokens=len(text), distinct=distinct_share))
    return found


EAGER = HISTORY | {"budget": "unlimited"}
"""Drafts whatever is found, until it is seen to cost time."""
FIRST = "first"
"""An engine's first rollout: some kernels are compiled in it, and step times are not
known yet.
"""
MISLEADING = "misleading"
"""A rollout whose history has every second token exchanged."""
MISLED = "after misleading"
"""The rollout after one in which nearly all drafts were rejected, over such a history
again.
"""
ONCE = (FIRST, MISLEADING)
"""Rollouts that cannot come twice; neither is judged by its time."""


def _of_stock(arm: str) -> Callable[[Found], float]:
    """Return the figure of an arm's time, of stock's."""

    def value(found: Found) -> float:
        ratio, _ = found["arms"][arm]["of_stock"]
        return float(ratio)

    return value


def _beyond_doubt(arm: str) -> Callable[[Found], float]:
    """Return the figure of an arm's time, of stock's, less twice its error."""

    def value(found: Found) -> float:
        ratio, error = found["arms"][arm]["of_stock"]
        return float(ratio - 2.0 * error)

    return value


def _still_drafted(found: Found) -> float:
    """Return the draft tokens after a rollout that misled, of those in it."""
    before = found["arms"][MISLEADING]["draft_tokens"]
    after = found["arms"][MISLED]["draft_tokens"]
    if not before:
        return float("nan")
    return float(after / before)


def _num_unforced(found: Found) -> int:
    """Return the most responses of an arm that are not as recorded."""
    return max(arm["unforced"] for arm in found["arms"].values())


def _largest_error(found: Found) -> float:
    """Return the largest standard error of the arms' times."""
    errors = []
    for name, arm in found["arms"].items():
        if name not in ONCE:
            _, error = arm["of_stock"]
            errors.append(error)
    return float(max(errors))


def _failed(found: Found) -> bool:
    """Say whether an arm had an error."""
    return max(bool(arm.get("error")) for arm in found["arms"].values())


BARS = (
    Bar("forced tokens that were not written", 0, _num_unforced),
    Bar(
        "rollout with what the traces have of its problems, of stock's time",
        0.6,
        _of_stock("earlier"),
    ),
    Bar(
        "rollout with a recorded history, of stock's time",
        0.6,
        _of_stock("exchanged 30%"),
    ),
    Bar("standard error of what a rollout costs, at worst", 0.02, _largest_error),
    Bar(
        "rollout whose history says nothing, of stock's time, less twice its error",
        1.02,
        _beyond_doubt("exchanged 100%"),
    ),
    Bar(
        "rollout with a history that misleads, of stock's time, less twice its error",
        1.02,
        _beyond_doubt(MISLED),
    ),
    Bar(
        "draft tokens after a rollout that was misled, of those in it",
        0.1,
        _still_drafted,
    ),
    Bar(
        "waiting for the drafter, of a rollout's steps",
        0.03,
        lambda found: found["arms"]["exchanged 30%"]["propose_share"],
    ),
    Bar("errors", 0, _failed),
)


def generated(plan: Plan) -> Rollouts:
    """Make rollouts with the lengths of a GRPO step: groups of samples that share much,
    a log-normal tail.
    """
    rng = np.random.default_rng(0)
    vocabulary = plan.vocabulary
    longest = plan.longest
    num_problems = -(-plan.replayed // GROUP)
    found: Rollouts = []
    for problem in range(num_problems):
        base = rng.integers(1, vocabulary, longest, dtype=np.int32)
        scale = rng.lognormal(np.log(longest / 6), 0.7)
        for _ in range(GROUP):
            differs = rng.random(longest) < 0.2
            other = rng.integers(1, vocabulary, longest)
            ids = np.where(differs, other, base).astype(np.int32)
            drawn = scale * rng.lognormal(0, 0.25)
            length = int(np.clip(drawn, 8, longest))
            found.append((problem, ids[:length]))
    return found[: plan.replayed]


def recorded(path: Path, plan: Plan) -> tuple[Rollouts, Rollouts]:
    """Read recorded rollouts (see `sim.rollouts.read`).

    Returns:
        Responses of the last step, as many groups as fit; and what earlier steps wrote
        for the same problems, or, where there is one step only, other samples.
    """
    from das_adapter.sim.rollouts import read

    problems: dict[int, list[RecordedResponse]] = {}
    for response in read(path):
        problems.setdefault(response.problem, []).append(response)
    batch: Rollouts = []
    earlier: Rollouts = []
    for problem, group in problems.items():
        before, late = _before_and_last(group)
        for text in late[:GROUP]:
            batch.append((problem, text % plan.vocabulary))
        for text in before[-2 * GROUP :]:
            earlier.append((problem, text % plan.vocabulary))
        if len(batch) >= plan.replayed:
            break
    shortened = []
    for problem, text in batch[: plan.replayed]:
        shortened.append((problem, text[: plan.longest]))
    return shortened, earlier


def _before_and_last(
    group: Sequence[RecordedResponse],
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the texts of a problem before its last step, and those of that step; of
    one step only, its first half and the others.
    """
    last_step = max(response.step for response in group)
    before = [response.tokens for response in group if response.step != last_step]
    late = [response.tokens for response in group if response.step == last_step]
    if before:
        return before, late
    half = len(late) // 2
    return late[:half], late[half:]


def corrupted(rollouts: Rollouts, share: float | None, vocabulary: int) -> Rollouts:
    """Exchange a share of the tokens; None: every second one, so that the history finds
    the text, which then goes on otherwise.
    """
    rng = np.random.default_rng(1)
    found: Rollouts = []
    for problem, text in rollouts:
        count = len(text)
        if share is None:
            wrong = np.arange(count) % 2 == 1
        else:
            wrong = rng.random(count) < share
        other = rng.integers(1, vocabulary, count)
        exchanged = np.where(wrong, other, text).astype(np.int32)
        found.append((problem, exchanged))
    return found


def kept(
    store: HistoryStore, rollouts: Rollouts, problems: int = 0, version: int = 0
) -> dict[str, Any]:
    """Seal rollouts in a store, with the problems shifted; return the message that an
    engine gets about them at a weight sync.
    """
    from das_adapter.config import HistoryConfig
    from das_adapter.core.history import HistoryRules
    from das_adapter.protocol.messages import Published, Refresh, Trajectory, responses

    past = []
    for problem, text in rollouts:
        past.append(Trajectory(problem + problems, text.tobytes(), version))
    HistoryRules(HistoryConfig()).add_and_seal(store, past)
    history = Published(str(store.directory), store.generation)
    lengths = responses(past).tobytes()
    return Refresh(version + 1, history, lengths).payload()


def rollout(
    llm: Any, rollouts: Rollouts, problems: int = 0
) -> tuple[float, list[list[int]]]:
    """Write the batch; return the seconds and the responses. Each request writes as
    many tokens as its recording has.
    """
    asked = []
    for i in range(len(rollouts)):
        ids = [1 + i % 50, *range(1, PROMPT)]
        asked.append({"prompt_token_ids": ids})
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
    """Let both engines write the batch, in turns.

    Returns:
        The figures of each of the `rollouts`, what went wrong in any, the draft tokens
        of the first, and `of_stock`, the time that ours takes of stock's, with its
        standard error (None: of one rollout).
    """
    turns: list[Found] = []
    ratios: list[float] = []
    took_s = 0.0
    for _ in range(1 if once else MAX_ROLLOUTS):
        turn = ours(_history, rollouts, before)
        turn["stock"] = stock(_stock, rollouts)
        turns.append(turn)
        stock_s = turn["stock"]["seconds"]
        ratios.append(turn["seconds"] / stock_s)
        took_s += turn["seconds"] + stock_s
        of_stock = Measured.of(ratios)
        if len(turns) < MIN_ROLLOUTS:
            continue
        if of_stock.error <= SURE_ERROR or took_s > ROLLOUTS_S:
            break
    shares = [turn["propose_share"] for turn in turns]
    known_shares = [share for share in shares if share is not None]
    errors = [turn["error"] for turn in turns if turn["error"]]
    rates = [turn["tokens_per_forward"] for turn in turns]
    return {
        "of_stock": [of_stock.value, None if once else of_stock.error],
        "tokens_per_forward": statistics.median(rates),
        "unforced": sum(turn["unforced"] for turn in turns),
        "error": errors[0] if errors else None,
        "propose_share": max(known_shares, default=None),
        "draft_tokens": turns[0]["draft_tokens"],
        "accepted_tokens": turns[0]["accepted_tokens"],
        "rollouts": turns,
    }


def _start(plan: Plan, das: dict[str, Any] | None, rollouts: Rollouts) -> None:
    lengths = [PROMPT + 24 + len(text) for _, text in rollouts]
    blocks = 3 * BLOCK * len(lengths)
    llm = engine(plan, das, sum(lengths) + blocks, max_model_len=max(lengths))
    _note_steps(llm.llm_engine)
    short = [(problem, text[:8]) for problem, text in rollouts]
    rollout(llm, short, problems=10**6)
    if das:
        force(rollouts, stats_of(llm)["model_runner"])


_ENDS: list[float] = []
"""When the steps of this process's engine have ended, of the present rollout."""


def _note_steps(vllm: Any) -> None:
    """Let an engine note in `_ENDS` when its steps end."""
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
    took_ms = 1e3 * np.diff(_ENDS)
    longest = {}
    for step in np.argsort(-took_ms)[:5].tolist():
        longest[step] = float(took_ms[step])
    half_ms, most_ms = np.quantile(took_ms, (0.5, 0.9)).tolist()
    return {
        "steps": len(took_ms),
        "step_ms": half_ms,
        "most_ms": most_ms,
        "longest_ms": longest,
    }


def _stock(rollouts: Rollouts) -> Found:
    seconds, _ = rollout(STARTED[-1], rollouts)
    return {"seconds": seconds, **_pace()}


@functools.cache
def _past() -> HistoryStore:
    """Return the history of this process's engine."""
    folder = Path(os.environ[FOLDER])
    return HistoryStore(folder / "history")


_TURNS = itertools.count()
"""Rollouts of this process's engine."""


def _history(rollouts: Rollouts, before: Rollouts) -> Found:
    """Write the batch with drafts from `before`; return the figures of it."""
    llm = STARTED[-1]
    turn = next(_TURNS)
    shift = turn * 10**7  # of the problems, so that no rollout sees another's text
    message = kept(_past(), before, shift, 2 * turn)
    llm.collective_rpc("das_rpc", args=("refresh", message))
    stats_of(llm)
    seconds, texts = rollout(llm, rollouts, problems=shift)
    found: Found = {"seconds": seconds, **_pace()}
    stats = stats_of(llm)
    num_unforced = 0
    for text, (_, recording) in zip(texts, rollouts, strict=True):
        if text != recording.tolist():
            num_unforced += 1
    found["unforced"] = num_unforced
    # the host's waits; on V2 the device drafts
    waits_s = stats["propose_seconds"]
    found["propose_share"] = None
    if waits_s:
        found["propose_share"] = sum(waits_s) / stats["busy_seconds"]
    num_forwards = max(1, stats["request_forwards"])
    found["tokens_per_forward"] = stats["tokens"] / num_forwards
    for name in ("state", "reason", "error", "draft_tokens", "accepted_tokens"):
        found[name] = stats[name]
    return found


def force(rollouts: Rollouts, runner: int) -> None:
    """Let the request whose seed is i write recording i: the sampler draws at its full
    cost, then its token is replaced, on the device, by the recording's at that
    position.

    Args:
        runner: vLLM's model runner, 1 or 2.
    """
    import torch

    from das_adapter.engine.v1 import verification as replaced

    verification: Any = replaced
    stock = verification.keyed_sample
    recordings = _padded(rollouts)
    table = None

    def recorded_at(seeds: Any, positions: Any) -> Any:
        nonlocal table
        if table is None:
            table = torch.from_numpy(recordings).to(seeds.device)
        num_rows, num_columns = table.shape
        rows = seeds.clamp(0, num_rows - 1)
        columns = (positions + 1).clamp(max=num_columns - 1)
        return table[rows, columns]

    def forced(logits: Any, keys: Any) -> Any:
        stock(logits, keys)  # it takes its time
        return recorded_at(keys.seeds, keys.positions)

    verification.keyed_sample = forced
    if runner == 2:
        _force_on_v2(recorded_at)


def _padded(rollouts: Rollouts) -> np.ndarray:
    """Return the recordings after their prompts, int64 [requests, tokens]."""
    longest = max(len(text) for _, text in rollouts)
    padded = np.ones((len(rollouts), PROMPT + longest + 64), dtype=np.int64)
    for row, (_, text) in zip(padded, rollouts, strict=True):
        row[PROMPT : PROMPT + len(text)] = text
    return padded


def _force_on_v2(recorded_at: Callable[[Any, Any], Any]) -> None:
    """Replace the draw of vLLM's V2 runner by one of recorded tokens."""
    from vllm.v1.worker.gpu.sample import gumbel, sampler

    stock = gumbel.gumbel_sample

    def drawn(
        logits: Any,
        slots: Any,
        heat: Any,
        seeds: Any,
        positions: Any,
        *rest: Any,
        **more: Any,
    ) -> Any:
        stock(logits, slots, heat, seeds, positions, *rest, **more)
        return recorded_at(seeds[slots.clamp(min=0)], positions)

    gumbel.gumbel_sample = drawn
    sampler.gumbel_sample = drawn
