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
    SHAPES,
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
    if traces:
        name = traces.name
        rollouts, earlier = recorded(traces, plan)
    else:
        name = "generated"
        rollouts = generated(plan)
        earlier = []
    group_sizes = Counter(problem for problem, _ in rollouts)
    found: Found = {
        "traces": name,
        "tokens": _num_tokens(rollouts),
        "groups": sorted(group_sizes.values()),
        "longest": _longest(rollouts),
        "history_tokens": _num_tokens(earlier),
        "arms": {},
    }
    # nobody has siblings, whose text would help
    alone = [(i, text) for i, (_, text) in enumerate(rollouts)]
    wrong = corrupted(alone, None, plan.vocabulary)
    histories = _histories(plan, rollouts, earlier)
    misleading = {MISLEADING: wrong, MISLED: wrong}
    engines = (
        (APART, rollouts, histories),
        (EAGER, alone, misleading),
    )
    with process(plan, IN_PROCESS) as stock:
        start_stock = functools.partial(stock, _start, plan, None, rollouts)
        starting = [start_stock]
        for das, batch, arms in engines:
            with process(plan, IN_PROCESS) as ours:
                start = functools.partial(ours, _start, plan, das, batch)
                at_once(start, *starting)
                starting = []
                for arm, before in arms.items():
                    found["arms"][arm] = in_turn(
                        ours,
                        stock,
                        rollouts=batch,
                        before=before,
                        once=arm in ONCE,
                    )
                    yield found
                steps = ours(_drafted_steps, plan, batch)
                found.setdefault("drafted_steps", steps)
                yield found


def _num_tokens(rollouts: Rollouts) -> int:
    lengths = [len(text) for _, text in rollouts]
    return sum(lengths)


def _histories(
    plan: Plan,
    rollouts: Rollouts,
    earlier: Rollouts,
) -> dict[str, Rollouts]:
    """Return what the batch is drafted from, by the name of the arm."""
    vocabulary = plan.vocabulary
    shares = CORRUPTED
    if plan.tiny:
        shares = (0.0, 1.0)
    found = {}
    found[FIRST] = corrupted(rollouts, shares[0], vocabulary)
    if earlier:
        found["earlier"] = earlier
    for share in shares:
        name = f"exchanged {share:.0%}"
        found[name] = corrupted(rollouts, share, vocabulary)
    return found


def _longest(rollouts: Rollouts) -> list[Found]:
    """Say of the five longest responses, which decide how long a rollout takes, how
    many tokens they have, and which share of their stretches of 8 tokens is there once:
    in one that repeats itself few are.
    """
    texts = [text for _, text in rollouts]
    texts.sort(key=len)
    found = []
    for text in texts[-5:]:
        if len(text) <= 8:
            continue
        stretches = np.lib.stride_tricks.sliding_window_view(text, 8)
        distinct = np.unique(stretches, axis=0)
        distinct_share = len(distinct) / len(stretches)
        figures = Found(tokens=len(text), distinct=distinct_share)
        found.append(figures)
    return found


APART = HISTORY | {"history": {"others": "off"}}
"""Drafts from a problem's own texts alone: those of other rollouts have other problems,
and the same text.
"""
EAGER = APART | {"budget": "unlimited"}
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
    arms = found["arms"]
    before = arms[MISLEADING]["draft_tokens"]
    after = arms[MISLED]["draft_tokens"]
    if not before:
        return float("nan")
    return float(after / before)


def _num_unforced(found: Found) -> int:
    """Return the most responses of an arm that are not as recorded."""
    counts = [arm["unforced"] for arm in found["arms"].values()]
    return max(counts)


def _largest_error(found: Found) -> float:
    """Return the largest standard error of the arms' times."""
    errors = []
    for name, arm in found["arms"].items():
        if name in ONCE:
            continue
        _, error = arm["of_stock"]
        errors.append(error)
    return float(max(errors))


def _failed(found: Found) -> bool:
    """Say whether an arm had an error."""
    failed = [bool(arm.get("error")) for arm in found["arms"].values()]
    return max(failed)


def _waiting_share(found: Found) -> float | None:
    """Return the share of a rollout's steps that waited for the drafter."""
    share: float | None = found["arms"]["exchanged 30%"]["propose_share"]
    return share


BARS = (
    Bar(
        "forced tokens that were not written",
        0,
        _num_unforced,
    ),
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
    Bar(
        "standard error of what a rollout costs, at worst",
        0.02,
        _largest_error,
    ),
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
        _waiting_share,
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
    log_scale = np.log(longest / 6)
    num_problems = -(-plan.replayed // GROUP)
    found: Rollouts = []
    for problem in range(num_problems):
        base = rng.integers(1, vocabulary, longest, dtype=np.int32)
        scale = rng.lognormal(log_scale, 0.7)
        for _ in range(GROUP):
            differs = rng.random(longest) < 0.2
            other = rng.integers(1, vocabulary, longest)
            ids = np.where(differs, other, base)
            text = ids.astype(np.int32)
            drawn = scale * rng.lognormal(0, 0.25)
            length = int(np.clip(drawn, 8, longest))
            found.append((problem, text[:length]))
    return found[: plan.replayed]


def recorded(path: Path, plan: Plan) -> tuple[Rollouts, Rollouts]:
    """Read recorded rollouts (see `sim.rollouts.read`).

    Returns:
        Responses of the last step, as many groups as fit, up to where they begin to
        repeat themselves; and what earlier steps wrote for the same problems, or, where
        there is one step only, other samples.
    """
    from das_adapter.sim.rollouts import read

    problems: dict[int, list[RecordedResponse]] = {}
    for response in read(path):
        group = problems.setdefault(response.problem, [])
        group.append(response)
    batch: Rollouts = []
    earlier: Rollouts = []
    for problem, group in problems.items():
        before, last = _before_and_last(group)
        for text in last[:GROUP]:
            known_ids = text[: begin_of_loop(text)] % plan.vocabulary
            shortened = known_ids[: plan.longest]
            batch.append((problem, shortened))
        for text in before[-2 * GROUP :]:
            known_ids = text % plan.vocabulary
            earlier.append((problem, known_ids))
        if len(batch) >= plan.replayed:
            break
    return batch[: plan.replayed], earlier


LOOP_PERIOD = 256
"""Tokens of the longest stretch whose repetition is seen."""
LOOP_TOKENS = 64
"""Tokens that a loop has at least."""
LOOP_ROUNDS = 3
"""Times that it comes at least."""


def begin_of_loop(text: np.ndarray) -> int:
    """Return where a response begins to write the same stretch again and again: its
    length where it does not. What is repeated once is before it.
    """
    begin = len(text)
    for period in range(1, LOOP_PERIOD + 1):
        again = text[period:] == text[:-period]
        least = max(LOOP_TOKENS, (LOOP_ROUNDS - 1) * period)
        if again.sum() < least:
            continue
        differs = np.flatnonzero(~again)
        ends = np.append(differs, len(again))
        begins = np.insert(differs + 1, 0, 0)
        runs = begins[ends - begins >= least]
        if len(runs):
            begin = min(begin, int(runs[0]) + period)
    return begin


def _before_and_last(
    group: Sequence[RecordedResponse],
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the texts of a problem before its last step, and those of that step; of
    one step only, its first half and the others.
    """
    steps = [response.step for response in group]
    last_step = max(steps)
    before = []
    last = []
    for response in group:
        if response.step == last_step:
            last.append(response.tokens)
        else:
            before.append(response.tokens)
    if before:
        return before, last
    half = len(last) // 2
    return last[:half], last[half:]


def corrupted(rollouts: Rollouts, share: float | None, vocabulary: int) -> Rollouts:
    """Exchange a share of the tokens; None: every second one, so that the history finds
    the text, which then goes on otherwise.
    """
    rng = np.random.default_rng(1)
    found: Rollouts = []
    for problem, text in rollouts:
        count = len(text)
        if share is None:
            position = np.arange(count)
            wrong = position % 2 == 1
        else:
            wrong = rng.random(count) < share
        other = rng.integers(1, vocabulary, count)
        exchanged = np.where(wrong, other, text)
        found.append((problem, exchanged.astype(np.int32)))
    return found


def kept(
    store: HistoryStore,
    rollouts: Rollouts,
    problems: int = 0,
    version: int = 0,
) -> dict[str, Any]:
    """Seal rollouts in a store, with the problems shifted; return the message that an
    engine gets about them at a weight sync.
    """
    from das_adapter.config import HistoryConfig
    from das_adapter.core.history import HistoryRules
    from das_adapter.protocol.messages import Published, Refresh, Trajectory, responses

    past = []
    for problem, text in rollouts:
        shifted = problem + problems
        trajectory = Trajectory(shifted, text.tobytes(), version)
        past.append(trajectory)
    rules = HistoryRules(HistoryConfig())
    rules.add_and_seal(store, past)
    directory = str(store.directory)
    history = Published(directory, store.generation)
    lengths = responses(past).tobytes()
    message = Refresh(version + 1, history, lengths)
    return message.payload()


def rollout(
    llm: Any,
    rollouts: Rollouts,
    problems: int = 0,
) -> tuple[float, list[list[int]]]:
    """Write the batch; return the seconds and the responses. Each request writes as
    many tokens as its recording has.
    """
    asked = []
    lengths = []
    shifted = []
    for i, (problem, text) in enumerate(rollouts):
        first = 1 + i % 50
        ids = [first, *range(1, PROMPT)]
        asked.append({"prompt_token_ids": ids})
        lengths.append(len(text))
        shifted.append(problem + problems)
    params = sampling(lengths, shifted, itertools.count())
    _ENDS.clear()
    return generate(llm, asked, params)


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
    max_turns = MAX_ROLLOUTS
    if once:
        max_turns = 1
    turns: list[Found] = []
    ratios: list[float] = []
    took_s = 0.0
    for _ in range(max_turns):
        turn = ours(_history, rollouts, before)
        turn["stock"] = stock(_stock, rollouts)
        turns.append(turn)
        ours_s = turn["seconds"]
        stock_s = turn["stock"]["seconds"]
        ratios.append(ours_s / stock_s)
        took_s += ours_s + stock_s
        of_stock = Measured.of(ratios)
        if len(turns) < MIN_ROLLOUTS:
            continue
        if of_stock.error <= SURE_ERROR or took_s > ROLLOUTS_S:
            break
    error: float | None = of_stock.error
    if once:
        error = None
    return {
        "of_stock": [of_stock.value, error],
        **_of_turns(turns),
        "rollouts": turns,
    }


def _of_turns(turns: Sequence[Found]) -> Found:
    """Return the figures of several rollouts of one engine."""
    first = turns[0]
    rates = []
    num_unforced = 0
    errors = []
    shares = []
    for turn in turns:
        rates.append(turn["tokens_per_forward"])
        num_unforced += turn["unforced"]
        if turn["error"]:
            errors.append(turn["error"])
        if turn["propose_share"] is not None:
            shares.append(turn["propose_share"])
    first_error = None
    if errors:
        first_error = errors[0]
    return {
        "tokens_per_forward": statistics.median(rates),
        "unforced": num_unforced,
        "error": first_error,
        "propose_share": max(shares, default=None),
        "draft_tokens": first["draft_tokens"],
        "accepted_tokens": first["accepted_tokens"],
    }


def _start(plan: Plan, das: dict[str, Any] | None, rollouts: Rollouts) -> None:
    lengths = [PROMPT + 24 + len(text) for _, text in rollouts]
    block_tokens = 3 * BLOCK * len(lengths)
    cache = sum(lengths) + block_tokens
    if das:
        das = das | {"log_dir": _log_dir()}
    llm = engine(plan, das, cache, max_model_len=max(lengths))
    _note_steps(llm.llm_engine)
    short = [(problem, text[:8]) for problem, text in rollouts]
    rollout(llm, short, problems=10**6)
    if das:
        stats = stats_of(llm)
        force(rollouts, stats["model_runner"])


def _log_dir() -> str:
    """Return the directory of this process's decision log."""
    return str(Path(os.environ[FOLDER]) / "decisions")


def _drafted_steps(plan: Plan, rollouts: Rollouts) -> list[Found]:
    """Return what decode steps with drafts took in this process's engine, by the tokens
    of their forward passes, up to each power of two: how many there were, the medians
    of their tokens and milliseconds, and the roofline's milliseconds for these tokens,
    behind a prompt and half of a mean response (None: the device is not in the table).
    """
    import torch

    from das_adapter.core.hardware import recognise
    from das_adapter.core.roofline import Roofline
    from das_adapter.protocol import decision_log

    device = None
    if torch.cuda.is_available():
        device = recognise(torch.cuda.get_device_name())
    roofline = None
    if device is not None:
        roofline = Roofline.from_config(SHAPES[plan.shape], device)
    context = PROMPT + _num_tokens(rollouts) / len(rollouts) / 2
    by_size: dict[int, list[decision_log.StepRecord]] = {}
    for logged in decision_log.read(Path(_log_dir())):
        for step in logged.steps:
            if step.drafted:
                size = (step.tokens - 1).bit_length()
                by_size.setdefault(size, []).append(step)
    found = []
    for size in sorted(by_size):
        steps = by_size[size]
        requests = statistics.median(step.requests for step in steps)
        tokens = statistics.median(step.tokens for step in steps)
        roofline_ms = None
        if roofline is not None:
            drafts = tokens / requests - 1
            roofline_ms = 1e3 * float(roofline.seconds(requests, context, drafts))
        found.append(
            {
                "steps": len(steps),
                "requests": requests,
                "tokens": tokens,
                "ms": 1e3 * statistics.median(step.seconds for step in steps),
                "roofline_ms": roofline_ms,
            }
        )
    return found


_ENDS: list[float] = []
"""When the steps of this process's engine have ended, of the present rollout."""


def _note_steps(vllm: Any) -> None:
    """Let an engine note in `_ENDS` when its steps end."""
    stock = vllm.step

    def step() -> Any:
        outputs = stock()
        now = time.perf_counter()
        _ENDS.append(now)
        return outputs

    vllm.step = step


def _pace() -> Found:
    """Say how many steps the rollout had, what half and nine tenths of them took at
    most, and which took longest, as where a kernel is compiled.
    """
    took_ms = 1e3 * np.diff(_ENDS)
    slowest_first = np.argsort(-took_ms)
    longest = {}
    for step in slowest_first[:5].tolist():
        longest[step] = float(took_ms[step])
    quantiles = np.quantile(took_ms, (0.5, 0.9))
    half_ms, most_ms = quantiles.tolist()
    return {
        "steps": len(took_ms),
        "step_ms": half_ms,
        "most_ms": most_ms,
        "longest_ms": longest,
    }


def _stock(rollouts: Rollouts) -> Found:
    llm = STARTED[-1]
    seconds, _ = rollout(llm, rollouts)
    return {"seconds": seconds, **_pace()}


@functools.cache
def _past() -> HistoryStore:
    """Return the history of this process's engine."""
    from das_adapter.config import HistoryConfig
    from das_adapter.core.history import HistoryRules

    folder = Path(os.environ[FOLDER])
    rules = HistoryRules(HistoryConfig())
    return rules.store(folder / "history")


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
    found["unforced"] = _differing(texts, rollouts)
    stats = stats_of(llm)
    # the host's waits; on V2 the device drafts
    waits_s = stats["propose_seconds"]
    found["propose_share"] = None
    if waits_s:
        waited_s = sum(waits_s)
        found["propose_share"] = waited_s / stats["busy_seconds"]
    num_forwards = max(1, stats["request_forwards"])
    found["tokens_per_forward"] = stats["tokens"] / num_forwards
    for name in ("state", "reason", "error", "draft_tokens", "accepted_tokens"):
        found[name] = stats[name]
    return found


def _differing(texts: list[list[int]], rollouts: Rollouts) -> int:
    """Return how many responses are not as recorded."""
    count = 0
    for text, (_, recording) in zip(texts, rollouts, strict=True):
        if text != recording.tolist():
            count += 1
    return count


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
            on_host = torch.from_numpy(recordings)
            table = on_host.to(seeds.device)
        num_rows, num_columns = table.shape
        rows = seeds.clamp(0, num_rows - 1)
        columns = positions + 1
        columns = columns.clamp(max=num_columns - 1)
        return table[rows, columns]

    def forced(logits: Any, keys: Any) -> Any:
        stock(logits, keys)  # it takes its time
        return recorded_at(keys.seeds, keys.positions)

    verification.keyed_sample = forced
    if runner == 2:
        _force_on_v2(recorded_at)


def _padded(rollouts: Rollouts) -> np.ndarray:
    """Return the recordings after their prompts, int64 [requests, tokens]."""
    lengths = [len(text) for _, text in rollouts]
    columns = PROMPT + max(lengths) + 64
    padded = np.ones((len(rollouts), columns), dtype=np.int64)
    for row, (_, text) in zip(padded, rollouts, strict=True):
        end = PROMPT + len(text)
        row[PROMPT:end] = text
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
        valid_slots = slots.clamp(min=0)
        return recorded_at(seeds[valid_slots], positions)

    gumbel.gumbel_sample = drawn
    sampler.gumbel_sample = drawn
