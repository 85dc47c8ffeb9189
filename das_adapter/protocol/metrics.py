"""What engines count between two weight syncs, and the figures of a training step made
from it; the same for every drafter, and without one.
"""

from __future__ import annotations

import hashlib
import logging
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


_LAST = 2**17
"""Steps and responses of which times are kept, the last ones: a host may never ask for
them.
"""


@dataclass
class Counters:
    """Counts since the last `take`, of training rollouts only. A request forward is one
    request's part in one decode step of the policy.
    """

    steps: int = 0
    request_forwards: int = 0
    drafted_forwards: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    tokens: int = 0
    busy_seconds: float = 0.0
    """Seconds from the begin of each step to its end, drafting included."""
    propose_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_LAST))
    error: str | None = None
    """What the drafter raised; from then on the engine decodes without it. Survives
    `take`, until the next weight sync.
    """
    alarm: str | None = None
    """What makes the drafter useless although it does not fail: its weights were not
    synced, or almost nothing is accepted. Survives `take`, until the next weight
    sync.
    """

    def step(
        self, got: npt.ArrayLike, drafts: npt.ArrayLike, seconds: float = 0.0
    ) -> None:
        """Count a decode step: how many tokens each request of the batch got (0 while
        its prompt is read), and the draft tokens that each carried into it, integers
        [b].
        """
        tokens = np.asarray(got)
        drafted = np.asarray(drafts)
        carried = np.where(tokens > 0, drafted, 0)
        accepted = np.minimum(np.maximum(tokens - 1, 0), carried)
        sums = (
            int(tokens.sum()),
            int(np.count_nonzero(carried)),
            int(carried.sum()),
            int(accepted.sum()),
        )
        self.add(int(np.count_nonzero(tokens)), 1, seconds, *sums)

    def add(
        self,
        requests: int,
        steps: int,
        seconds: float,
        tokens: int | None = None,
        drafted: int = 0,
        draft_tokens: int = 0,
        accepted: int = 0,
    ) -> None:
        """Count decode steps that took so long, in each of which so many requests got
        tokens; `tokens`: of all, None: one each; `drafted`: requests with draft
        tokens.
        """
        self.steps += steps
        self.busy_seconds += seconds
        self.request_forwards += steps * requests
        self.tokens += steps * requests if tokens is None else tokens
        self.drafted_forwards += drafted
        self.draft_tokens += draft_tokens
        self.accepted_tokens += accepted

    def take(self) -> EngineStats:
        """Return the counts as plain numbers (`figures` adds them up over workers), and
        start again at zero.
        """
        counts = {**vars(self), "propose_seconds": list(self.propose_seconds)}
        self.__init__(error=self.error, alarm=self.alarm)  # type: ignore[misc]
        return counts


class RolloutClock:
    """When a replica's rollouts of one step began and ended, a hash of their tokens,
    and the noise they drew.
    """

    def __init__(self) -> None:
        self._begin = float("inf")
        self._ends = deque[float](maxlen=_LAST)
        self._hash = 0
        self._draws = deque[int](maxlen=_LAST)
        self._ahead = np.zeros(3, dtype=np.int64)

    def finished(self, label: Label, begin: float, end: float, tokens: bytes) -> None:
        """Count one response, int32 token ids; times in seconds since the epoch. Of one
        that is not recorded only the noise counts: seed, problem, and where the text
        begins, in which no two requests of a run may agree.
        """
        if label.seed is not None:
            about = f"{label.seed}/{label.problem}/{label.start or 0}".encode()
            self._draws.append(
                int.from_bytes(hashlib.blake2b(about, digest_size=8).digest(), "little")
            )
        if not label.record:
            return
        self._begin = min(self._begin, begin)
        self._ends.append(end)
        digest = hashlib.blake2b(
            tokens, key=(label.seed or 0).to_bytes(8, "little"), digest_size=6
        ).digest()
        self._hash += int.from_bytes(digest, "little")
        if label.ahead is not None:
            written = np.frombuffer(label.ahead, np.int32)
            text = np.frombuffer(tokens, np.int32)
            both = min(len(written), len(text))
            other = np.flatnonzero(written[:both] != text[:both])
            self._ahead += 1, len(written), other[0] if len(other) else both

    def take(self) -> dict[str, Any]:
        """Return begin, ends, draws, counts of what was written ahead (responses,
        tokens, tokens that they repeat) and the hash, which does not depend on the
        order, and start again.
        """
        hashed = self._hash % 2**48
        ahead = self._ahead.tolist()
        taken = {
            "begin": self._begin,
            "ends": [*self._ends],
            "token_hash": hashed,
            "draws": [*self._draws],
        }
        taken |= {"ahead": ahead} if any(ahead) else {}
        self.__init__()  # type: ignore[misc]
        return taken


_OF_ENGINES: dict[str, Callable[[Iterable[float]], float]] = {
    **dict.fromkeys(
        ("model_runner", "requantise_s", "drafter_bytes", "self_acceptance"), max
    ),
    **dict.fromkeys(("history_tokens", "history_bytes", "live_bytes", "of_stock"), max),
    **dict.fromkeys(("time_saved_s", "drafter_passes"), sum),
}
"""Figures that engines have already, and what is logged of all."""


def figures(
    parts: Sequence[Mapping[str, Any]], told: set[str] | None = None
) -> dict[str, float]:
    """Compute a training step's figures from the reports of all engines, with the keys
    of `EngineStats` and, where a host counts responses, of `RolloutClock.take`; under
    the names the trainer logs (docs/metrics.md says what each means), empty if there is
    no report. Figures of a controller, of the history and of a policy copy are there if
    an engine has one.

    `engine` in a report names who made it, of several to one step; one without it is an
    engine's only one.

    `told`: kinds of fault that are in the log; it says why `das/health` is 0, once for
    each other kind. None: it says nothing.
    """
    if not parts:
        return {}

    def each(name: str) -> list[Any]:
        return [part[name] for part in parts if part.get(name) is not None]

    wrong = faults(parts)
    if told is not None:
        for reason in (reason for fault, reason in wrong.items() if fault not in told):
            logger.error("das: das/health is 0: %s", reason)
        told.update(wrong)
    counted = (
        "request_forwards",
        "drafted_forwards",
        "draft_tokens",
        "accepted_tokens",
        "tokens",
    )
    forwards, drafts, drafted, accepted, tokens = (sum(each(name)) for name in counted)
    metrics = {
        "das/tokens_per_forward": tokens / max(1, forwards),
        "das/tokens_per_s": tokens / max(1e-9, sum(each("busy_seconds"))),
        "das/draft_coverage": drafts / max(1, forwards),
        "das/acceptance_length": 1.0 + accepted / max(1, drafts),
        "das/verify_waste": (drafted - accepted) / max(1, forwards + drafted),
        "das/health": float(not wrong),
        "das/draft_tokens": float(drafted),
        "das/accepted_tokens": float(accepted),
        "das/drafts": float(drafts),
    }
    if seconds := [
        second for of_engine in each("propose_seconds") for second in of_engine
    ]:
        p50, p99 = np.percentile(seconds, [50, 99]) * 1e3
        metrics |= {"das/propose_ms/p50": float(p50), "das/propose_ms/p99": float(p99)}
    if errors := each("latency_model_error"):
        metrics["das/latency_model_error"] = float(np.mean(errors))
    if requests := sum(each("history_requests")):
        metrics["das/history_hits"] = sum(each("history_hits")) / requests
    if ahead := each("ahead"):
        requests, written, repeated = np.sum(ahead, axis=0).tolist()
        metrics |= {
            "das/run_ahead_requests": float(requests),
            "das/run_ahead_tokens": float(written),
        }
        metrics["das/run_ahead_repeated"] = repeated / max(1, written)
    by_engine = [
        (part.get("engine", number), part) for number, part in enumerate(parts)
    ]
    if any("reason" in part for part in parts):
        metrics["das/engines_resting"] = float(
            len({engine for engine, part in by_engine if part.get("reason")})
        )
    if behind := {
        engine: part["engines_behind"]
        for engine, part in by_engine
        if "engines_behind" in part
    }:
        # as each engine said last
        metrics["das/engines_behind"] = float(sum(behind.values()))
    if clocks := [part for part in parts if "ends" in part]:
        metrics |= _of_rollout(clocks)
    return metrics | {
        f"das/{name}": float(of(found))
        for name, of in _OF_ENGINES.items()
        if (found := each(name))
    }


def _of_rollout(clocks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return how long a rollout was, how long its last fifth of responses, and the hash
    of all.
    """
    begin = min((clock["begin"] for clock in clocks if clock["ends"]), default=0.0)
    ends = np.sort(
        np.concatenate([np.asarray(clock["ends"], dtype=float) for clock in clocks])
    )
    late = ends[max(0, int(np.ceil(0.8 * len(ends))) - 1)] if len(ends) else 0.0
    return {
        "das/rollout_s": max(0.0, float(ends[-1] - begin)) if len(ends) else 0.0,
        "das/tail_s": float(ends[-1] - late) if len(ends) else 0.0,
        "das/token_hash": float(sum(clock["token_hash"] for clock in clocks) % 2**48),
    }


def faults(parts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Say why `das/health` is 0, by kind of fault; empty: it is 1."""
    kinds = ("error", "alarm")
    found = {
        kind: str(part[kind]) for kind in kinds for part in parts if part.get(kind)
    }
    if "error" in found:
        found["error"] = f"a drafter failed: {found['error']}"
    drafts, accepted = (
        sum(part.get(name, 0) for part in parts)
        for name in ("drafted_forwards", "accepted_tokens")
    )
    if "alarm" not in found and (alarm := collapsed(drafts, accepted)):
        found["alarm"] = alarm
    draws = [draw for part in parts for draw in part.get("draws", ())]
    if copies := len(draws) - len(set(draws)):
        found["draws"] = (
            f"{copies} of {len(draws)} responses drew the noise of another request, and"
            " repeat its tokens: two requests had the same seed"
        )
    return found
