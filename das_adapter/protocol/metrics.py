"""What engines count between two weight syncs, and the figures of a training step made
from it; the same for every drafter, and without one.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from das_adapter.core.account import collapsed
from das_adapter.protocol.label import Label

logger = logging.getLogger("das_adapter")

EngineStats = dict[str, Any]
"""A worker's answer to `stats`, plain numbers by name: its `Counters`, `model_runner`
(vLLM's, 1 or 2), and what `core.account.Account.figures`,
`engine.history.HistorySource.stats` and a model that drafts add.
"""

Report = Mapping[str, Any]
"""What one engine or replica counted in a step: the keys of `EngineStats`, and, where a
host counts responses, of `RolloutClock.read_and_reset`.
"""
TokenIds = npt.NDArray[np.int32]
Figures = dict[str, float]
"""Figures of a step, under the names the trainer logs."""

_KEPT_TIMES = 2**17
"""Steps and responses of which times are kept, the last ones: a host may never ask for
them.
"""
HASH_VALUES = 2**48
"""Number of values that the hash of a rollout's tokens can have: a float holds each."""
_TAIL_BEGIN = 0.8
"""Share of a rollout's responses that have ended when its tail begins."""


@dataclass
class Counters:
    """Counts since the last `read_and_reset`, of training rollouts only. A request
    forward is one request's part in one decode step of the policy.
    """

    steps: int = 0
    request_forwards: int = 0
    drafted_forwards: int = 0
    """Request forwards that carried draft tokens."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    tokens: int = 0
    busy_seconds: float = 0.0
    """Seconds from the begin of each step to its end, drafting included."""
    propose_seconds: deque[float] = field(
        default_factory=lambda: deque(maxlen=_KEPT_TIMES)
    )
    """Seconds that each drafting took, the last ones."""
    error: str | None = None
    """What the drafter raised; from then on the engine decodes without it. Survives
    `read_and_reset`, until the next weight sync.
    """
    alarm: str | None = None
    """What makes the drafter useless although it does not fail: its weights were not
    synced, or almost nothing is accepted. Survives `read_and_reset`, until the next
    weight sync.
    """

    def count_step(
        self,
        num_tokens: npt.ArrayLike,
        num_draft_tokens: npt.ArrayLike,
        seconds: float = 0.0,
    ) -> None:
        """Count a decode step.

        Args:
            num_tokens: how many tokens each request of the batch got, integers [b]; 0
                while its prompt is read.
            num_draft_tokens: the draft tokens that each request carried into the step,
                integers [b].
            seconds: how long the step took.
        """
        got = np.asarray(num_tokens)
        decodes = got > 0
        drafted = np.asarray(num_draft_tokens)
        carried = np.where(decodes, drafted, 0)
        beyond_first = np.maximum(got - 1, 0)
        accepted = np.minimum(beyond_first, carried)
        self.add(
            requests=int(np.count_nonzero(decodes)),
            steps=1,
            seconds=seconds,
            tokens=int(got.sum()),
            drafted_forwards=int(np.count_nonzero(carried)),
            draft_tokens=int(carried.sum()),
            accepted_tokens=int(accepted.sum()),
        )

    def add(
        self,
        *,
        requests: int,
        steps: int,
        seconds: float,
        tokens: int | None = None,
        drafted_forwards: int = 0,
        draft_tokens: int = 0,
        accepted_tokens: int = 0,
    ) -> None:
        """Count decode steps of the same requests.

        Args:
            requests: how many requests got tokens in each of the steps.
            seconds: how long all steps took.
            tokens: tokens that all requests got; None: one each in every step.
            drafted_forwards: request forwards that carried draft tokens.
        """
        request_forwards = steps * requests
        if tokens is None:
            tokens = request_forwards
        self.steps += steps
        self.busy_seconds += seconds
        self.request_forwards += request_forwards
        self.tokens += tokens
        self.drafted_forwards += drafted_forwards
        self.draft_tokens += draft_tokens
        self.accepted_tokens += accepted_tokens

    def read_and_reset(self) -> EngineStats:
        """Return the counts as plain numbers (`figures` adds them up over workers), and
        start again at zero.
        """
        counts = vars(self).copy()
        counts["propose_seconds"] = list(self.propose_seconds)
        self.__init__(error=self.error, alarm=self.alarm)  # type: ignore[misc]
        return counts


class RolloutClock:
    """When a replica's rollouts of one step began and ended, a hash of their tokens,
    and the noise they drew.
    """

    def __init__(self) -> None:
        self._begin = float("inf")
        self._ends = deque[float](maxlen=_KEPT_TIMES)
        self._hash = 0
        self._draws = deque[int](maxlen=_KEPT_TIMES)
        """A hash of each response's noise: its seed, problem and begin."""
        self._ahead = np.zeros(3, dtype=np.int64)
        """Counts of what was written ahead: responses, tokens, and the tokens of them
        that were repeated.
        """

    def count_response(
        self,
        label: Label,
        begin: float,
        end: float,
        tokens: bytes,
    ) -> None:
        """Count one response. Of one that is not recorded only the noise counts: seed,
        problem, and where the text begins, in which no two requests of a run may agree.

        Args:
            begin, end: seconds since the epoch.
            tokens: int32 token ids.
        """
        seed = label.seed or 0
        start = label.start or 0
        if label.seed is not None:
            noise = f"{seed}/{label.problem}/{start}"
            draw = _hash(noise.encode(), num_bytes=8)
            self._draws.append(draw)
        if not label.record:
            return
        self._begin = min(self._begin, begin)
        self._ends.append(end)
        self._hash += response_hash(tokens, seed)
        if label.ahead is None:
            return
        written = np.frombuffer(label.ahead, np.int32)
        text = np.frombuffer(tokens, np.int32)
        self._count_ahead(written, text)

    def _count_ahead(self, written: TokenIds, text: TokenIds) -> None:
        """Count what was written ahead of a response, token ids [n], and how much of it
        the response, token ids [m], repeats from the begin on.
        """
        num_written = len(written)
        common = min(num_written, len(text))
        differs = written[:common] != text[:common]
        repeated = common
        if differs.any():
            repeated = int(differs.argmax())
        self._ahead += (1, num_written, repeated)

    def read_and_reset(self) -> dict[str, Any]:
        """Return begin, ends, draws, counts of what was written ahead (responses,
        tokens, tokens that they repeat) and the hash, which does not depend on the
        order, and start again.
        """
        report: dict[str, Any] = {
            "begin": self._begin,
            "ends": list(self._ends),
            "token_hash": self._hash % HASH_VALUES,
            "draws": list(self._draws),
        }
        ahead = self._ahead.tolist()
        if any(ahead):
            report["ahead"] = ahead
        self.__init__()  # type: ignore[misc]
        return report


def response_hash(tokens: bytes, seed: int) -> int:
    """Return the hash of a response, of which `das/token_hash` adds up those of a
    training step.

    Args:
        tokens: int32 token ids.
        seed: of its noise, 64 bits, signed or not.
    """
    key = (seed % 2**64).to_bytes(8, "little")
    return _hash(tokens, num_bytes=6, key=key)


def _hash(
    content: bytes,
    num_bytes: int,
    key: bytes = b"",
) -> int:
    """Return a hash of some bytes, of so many bytes itself."""
    hashed = hashlib.blake2b(content, key=key, digest_size=num_bytes)
    digest = hashed.digest()
    return int.from_bytes(digest, "little")


Combine = Callable[[Iterable[float]], float]
_OF_ENGINES: dict[str, Combine] = {
    "model_runner": max,
    "requantise_s": max,
    "drafter_bytes": max,
    "self_acceptance": max,
    "history_tokens": max,
    "history_bytes": max,
    "live_bytes": max,
    "of_stock": max,
    "time_saved_s": sum,
    "drafter_passes": sum,
}
"""Figures that engines have already, and what is logged of all."""


def figures(
    parts: Sequence[Report],
    told: set[str] | None = None,
) -> Figures:
    """Compute a training step's figures from the reports of all engines.

    Args:
        parts: reports with the keys of `EngineStats` and, where a host counts
            responses, of `RolloutClock.read_and_reset`. `engine` in a report names who
            made it, of several to one step; one without it is an engine's only one.
        told: faults that are in the log, by name. The log says why `das/health` is 0,
            once for each other fault, which is added. None: the log says nothing.

    Returns:
        The figures under the names the trainer logs (docs/metrics.md says what each
        means); empty if there is no report. Figures of a controller, of the history and
        of a policy copy are there if an engine has one.
    """
    if not parts:
        return {}
    reasons = faults(parts)
    if told is not None:
        for fault, reason in reasons.items():
            if fault not in told:
                logger.error("das: das/health is 0: %s", reason)
        told.update(reasons)
    metrics = _count_figures(parts, healthy=not reasons)
    metrics |= _drafting_figures(parts)
    metrics |= _run_ahead_figures(parts)
    metrics |= _engine_figures(parts)
    for name, combine in _OF_ENGINES.items():
        values = _reported(parts, name)
        if values:
            combined = combine(values)
            metrics[f"das/{name}"] = float(combined)
    rollout = _rollout_figures(parts)
    if rollout.get("das/rollout_s"):
        # where a host times the rollout, engines' decode steps alone say less
        metrics.pop("das/of_stock", None)
    return metrics | rollout


def _reported(parts: Sequence[Report], name: str) -> list[Any]:
    """Return what the reports have under a name; those without it are left out."""
    values = []
    for part in parts:
        value = part.get(name)
        if value is not None:
            values.append(value)
    return values


def _ratio(part: float, whole: float) -> float:
    """Return a share or a mean; 0 where nothing was counted."""
    whole = max(1, whole)
    return part / whole


def _count_figures(parts: Sequence[Report], healthy: bool) -> Figures:
    """Return the figures made of `Counters`."""

    def total(name: str) -> Any:
        return sum(_reported(parts, name))

    request_forwards = total("request_forwards")
    drafted_forwards = total("drafted_forwards")
    draft_tokens = total("draft_tokens")
    accepted_tokens = total("accepted_tokens")
    tokens = total("tokens")
    busy_s = total("busy_seconds")
    wasted_tokens = draft_tokens - accepted_tokens
    verified_tokens = request_forwards + draft_tokens
    return {
        "das/tokens_per_forward": _ratio(tokens, request_forwards),
        "das/tokens_per_s": tokens / max(1e-9, busy_s),
        "das/draft_coverage": _ratio(drafted_forwards, request_forwards),
        "das/acceptance_length": 1.0 + _ratio(accepted_tokens, drafted_forwards),
        "das/verify_waste": _ratio(wasted_tokens, verified_tokens),
        "das/health": float(healthy),
        "das/draft_tokens": float(draft_tokens),
        "das/accepted_tokens": float(accepted_tokens),
        "das/drafts": float(drafted_forwards),
    }


def _drafting_figures(parts: Sequence[Report]) -> Figures:
    """Return how long drafting took, how well the latency model predicts, and how many
    requests find history.
    """
    metrics: Figures = {}
    seconds: list[float] = []
    for seconds_of_engine in _reported(parts, "propose_seconds"):
        seconds.extend(seconds_of_engine)
    if seconds:
        milliseconds = np.array(seconds) * 1e3
        percentiles = np.percentile(milliseconds, [50, 99])
        p50, p99 = percentiles.tolist()
        metrics["das/propose_ms/p50"] = p50
        metrics["das/propose_ms/p99"] = p99
    errors = _reported(parts, "latency_model_error")
    if errors:
        mean_error = np.mean(errors)
        metrics["das/latency_model_error"] = float(mean_error)
    requests = sum(_reported(parts, "history_requests"))
    if requests:
        hits = sum(_reported(parts, "history_hits"))
        metrics["das/history_hits"] = hits / requests
    return metrics


def _run_ahead_figures(parts: Sequence[Report]) -> Figures:
    """Return how much was written ahead, and how much of it was repeated; empty if
    nothing was.
    """
    ahead = _reported(parts, "ahead")
    if not ahead:
        return {}
    totals = np.sum(ahead, axis=0)
    requests, written, repeated = totals.tolist()
    return {
        "das/run_ahead_requests": float(requests),
        "das/run_ahead_tokens": float(written),
        "das/run_ahead_repeated": _ratio(repeated, written),
    }


def _engine_figures(parts: Sequence[Report]) -> Figures:
    """Return how many engines rest, and how many are behind with their history."""
    can_rest = False
    resting = set[Any]()
    behind: dict[Any, int] = {}
    for number, part in enumerate(parts):
        engine = part.get("engine", number)
        if "reason" in part:
            can_rest = True
        if part.get("reason"):
            resting.add(engine)
        if "engines_behind" in part:
            # what the engine said last counts
            behind[engine] = part["engines_behind"]
    metrics: Figures = {}
    if can_rest:
        num_resting = len(resting)
        metrics["das/engines_resting"] = float(num_resting)
    if behind:
        num_behind = sum(behind.values())
        metrics["das/engines_behind"] = float(num_behind)
    return metrics


def _rollout_figures(parts: Sequence[Report]) -> Figures:
    """Return how long a rollout was, how long its last fifth of responses, and the hash
    of all; empty if no host counts responses.
    """
    clocks = [part for part in parts if "ends" in part]
    if not clocks:
        return {}
    begin = np.inf
    all_ends: list[float] = []
    token_hash = 0
    for clock in clocks:
        begin = min(begin, clock["begin"])
        all_ends.extend(clock["ends"])
        token_hash += clock["token_hash"]
    rollout_s = 0.0
    tail_s = 0.0
    of_stock: Figures = {}
    if all_ends:
        ends = np.sort(all_ends)
        end = ends[-1]
        num_before_tail = math.ceil(_TAIL_BEGIN * len(ends))
        last_before_tail = max(0, num_before_tail - 1)
        tail_begin = ends[last_before_tail]
        rollout_s = float(end - begin)
        rollout_s = max(0.0, rollout_s)
        tail_s = float(end - tail_begin)
        stock_s = _stock_rollout_s(clocks, float(begin))
        if stock_s:
            of_stock = {"das/of_stock": rollout_s / stock_s}
    return of_stock | {
        "das/rollout_s": rollout_s,
        "das/tail_s": tail_s,
        "das/token_hash": float(token_hash % HASH_VALUES),
    }


def _stock_rollout_s(clocks: Sequence[Report], begin: float) -> float | None:
    """Return how long the rollout would have been without drafts, prompts and the
    host's share included: each engine would have ended later by what its drafts saved;
    None: of one that is not known.

    What validations saved meanwhile is not told apart. So no engine saves a larger
    share of its rollout than of all its decode steps.
    """
    engine_s: dict[Any, float] = {}
    saved_s: dict[Any, float] = {}
    ratio: dict[Any, float] = {}
    for number, clock in enumerate(clocks):
        engine = clock.get("engine", number)
        if clock.get("of_stock") is None:
            return None
        ratio[engine] = max(ratio.get(engine, 0.0), clock["of_stock"])
        saved_s[engine] = saved_s.get(engine, 0.0) + clock["time_saved_s"]
        ends = clock["ends"]
        if len(ends):
            lasted_s = float(max(ends)) - begin
            engine_s[engine] = max(engine_s.get(engine, 0.0), lasted_s)
    stock_s = 0.0
    for engine, lasted_s in engine_s.items():
        bound_s = lasted_s * (1.0 / ratio[engine] - 1.0)
        least_s = min(0.0, bound_s)
        most_s = max(0.0, bound_s)
        saved = min(most_s, max(least_s, saved_s[engine]))
        stock_s = max(stock_s, lasted_s + saved)
    return stock_s


def faults(parts: Sequence[Report]) -> dict[str, str]:
    """Say why `das/health` is 0, by fault; empty: it is 1."""
    reasons: dict[str, str] = {}
    for fault in ("error", "alarm"):
        for part in parts:
            reason = part.get(fault)
            if reason:
                reasons[fault] = str(reason)
    if "error" in reasons:
        error = reasons["error"]
        reasons["error"] = f"a drafter failed: {error}"
    if "alarm" not in reasons:
        drafts = _reported(parts, "drafted_forwards")
        accepted = _reported(parts, "accepted_tokens")
        alarm = collapsed(sum(drafts), sum(accepted))
        if alarm:
            reasons["alarm"] = alarm
    draws: list[int] = []
    for draws_of_replica in _reported(parts, "draws"):
        draws.extend(draws_of_replica)
    num_draws = len(draws)
    different = set(draws)
    num_copies = num_draws - len(different)
    if num_copies:
        reasons["draws"] = (
            f"{num_copies} of {num_draws} responses drew the noise of another request,"
            " and repeat its tokens: two requests had the same seed"
        )
    return reasons
