"""One per run: how long responses were, the engines' counts, added up to one set of figures per training step, and what
the run's history starts from."""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray

from das_adapter.core.length import LengthModel
from das_adapter.core.toggle import Ladder
from das_adapter.protocol.metrics import merge

logger = logging.getLogger("das_adapter")

NAME = "das_ledger"
_LONGEST = 2**17
"""Tokens; longer responses are taken for this long when lengths are predicted."""
_started: list[Any] = []
"""Actors end with the last of the handles that they were started through: these live as long as this process."""
Length = tuple[int, int, int]
"""(problem, tokens of a response, weight version that wrote it)."""


class Ledger:
    """Keeps the lengths of the window, in the order in which they arrived, and the figures of recent steps."""

    def __init__(self, window: int):
        self._window = window
        self._lengths: deque[Length] = deque()
        self._dropped = 0
        self._reports: dict[int, list[dict[str, Any]]] = {}
        self._saved: str | None = None
        self._ladder: Ladder | None = None
        self._climbed = 0

    def add(self, lengths: Sequence[Length]) -> None:
        """Take finished responses; those older than the window of the newest version go."""
        self._lengths.extend(lengths)
        newest = self._lengths[-1][2] if self._lengths else 0
        while self._lengths and self._lengths[0][2] < newest - self._window:
            self._lengths.popleft()
            self._dropped += 1

    def since(self, cursor: int) -> tuple[int, list[Length]]:
        """What arrived after `cursor` (0: all that is kept), and the cursor to ask with next."""
        start = max(0, cursor - self._dropped)
        return self._dropped + len(self._lengths), list(self._lengths)[start:]

    def start_from(self, saved: str | None) -> None:
        """The run's history begins with what lies in a directory (see `service.saved`)."""
        self._saved = saved

    def saved(self) -> str | None:
        """What the run's history begins with; None: nothing."""
        return self._saved

    def predictions(self) -> tuple[dict[int, float], float]:
        """Expected response length by problem, and above which a problem is long; empty before there is history.

        Distributions as the engines have them: over the versions of the window, shrunk to the population.
        """
        if not self._lengths:
            return {}, float("inf")
        lengths = LengthModel(_LONGEST, self._window)
        for problem, length, version in self._lengths:
            lengths.observe(problem, length, version)
        lengths.refit(self._lengths[-1][2])
        expected = {problem: lengths.expected(problem) for problem, *_ in self._lengths}
        return expected, float(np.quantile(list(expected.values()), LengthModel.LONG))

    def report(self, step: int, engine: dict[str, Any], rollout: dict[str, Any]) -> None:
        """Take one replica's counts of a step: `engine` from `Counters.take`, `rollout` from `RolloutClock.take`."""
        self._reports.setdefault(step, []).append({**engine, **rollout})
        for old in [s for s in self._reports if s < step - 8]:
            del self._reports[old]

    def draft_length(self, rungs: Sequence[int], step: int) -> int:
        """The length of the self-drafter's drafts in a step, the same for every replica that asks: the ladder takes
        what all of them counted in the steps before, except the last, of which some may not have reported yet."""
        self._ladder = self._ladder or Ladder(tuple(rungs))
        for past in sorted(self._reports):
            if self._climbed < past < step:
                counts = [r["self_counts"] for r in self._reports[past] if "self_counts" in r]
                drafted, accepted = np.sum(counts, axis=0).tolist() if counts else (0, 0)
                self._ladder.observe(accepted, drafted)
                self._climbed = past
        return self._ladder.length

    def metrics(self, step: int) -> dict[str, float]:
        """Figures of a step over all replicas, under the names the trainer logs; empty if nobody reported."""
        return figures(self._reports.get(step, []))


def figures(reports: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Figures of a step from one report per replica (see `Ledger.report`); empty if there is none."""
    if not reports:
        return {}
    begin = min((r["begin"] for r in reports if r["ends"]), default=0.0)
    ends = np.sort(np.concatenate([np.asarray(r["ends"], dtype=float) for r in reports]))
    late = ends[max(0, int(np.ceil(0.8 * len(ends))) - 1)] if len(ends) else 0.0
    return {
        **merge(reports),
        "das/rollout_s": max(0.0, float(ends[-1] - begin)) if len(ends) else 0.0,
        "das/tail_s": float(ends[-1] - late) if len(ends) else 0.0,
        "das/history_tokens": float(max(r.get("history_tokens", 0) for r in reports)),
        "das/history_bytes": float(max(r.get("history_bytes", 0) for r in reports)),
        "das/token_hash": float(sum(r["token_hash"] for r in reports) % 2**48),
    }


class RolloutClock:
    """When a replica's rollouts of one step began and ended, and a hash of what they say."""

    def __init__(self) -> None:
        self._begin = float("inf")
        self._ends: list[float] = []
        self._hash = 0

    def finished(self, begin: float, end: float, seed: int, tokens: bytes) -> None:
        """Count one response.

        Args:
            begin, end: seconds since the epoch.
            seed: of the request.
            tokens: int32 token ids.
        """
        self._begin = min(self._begin, begin)
        self._ends.append(end)
        digest = hashlib.blake2b(tokens, key=seed.to_bytes(8, "little"), digest_size=6).digest()
        self._hash += int.from_bytes(digest, "little")

    def take(self) -> dict[str, Any]:
        """Begin, ends and the hash, which does not depend on the order; and start again."""
        taken = {"begin": self._begin, "ends": self._ends, "token_hash": self._hash % 2**48}
        self.__init__()  # type: ignore[misc]
        return taken


def ledger(window: int) -> Any:
    """The run's ledger, started if need be. It lives as long as the process that started it."""
    actor = ray.remote(num_cpus=0, max_restarts=-1)(Ledger)
    return named(NAME, actor, window)


def named(name: str, actor: Any, *args: Any, **options: Any) -> Any:
    """The run's actor of this name, started with `args` and Ray's `options` if there is none."""
    try:
        return ray.get_actor(name)
    except ValueError:
        handle = actor.options(name=name, get_if_exists=True, **options).remote(*args)
        _started.append(handle)
        return handle


def metrics(step: int) -> dict[str, float]:
    """Figures of a step, for the trainer's logger; empty, with one warning, if the ledger does not answer."""
    try:
        figures: dict[str, float] = ray.get(ray.get_actor(NAME).metrics.remote(step), timeout=10)
        return figures
    except (ValueError, ray.exceptions.RayError) as error:
        logger.warning("das: no rollout figures for step %s: %r", step, error)
        return {}
