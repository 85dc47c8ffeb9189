"""When to speculate at all, and how far: the on/off switch and the draft-length ladder of EfficientRollout (sections
3.3, 3.4), and the time that speculation saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from das_adapter.config import Speculate
from das_adapter.core.latency import Floats, StepModel

MARGIN = 0.05
"""Predicted speed-up above 1 at which drafting turns on; it turns off at 1. The latency model errs by some percent: a
smaller gain would switch it to and fro."""


class Toggle:
    """Whether drafts are worth their cost in the batch as it is, with hysteresis.

    It turns on at a speed-up of 1 + `MARGIN` (`auto`), or at the number of running requests that `speculate` is. While
    no request arrives after that, the batch only becomes smaller and drafting keeps paying: it stays on until `reset`.
    Where requests still arrive, it turns off again under a speed-up of 1, or a quarter above that number.

    At the start of a rollout the batch is small only because requests are still arriving (ramp guard): it is not held
    on before `RAMP` steps without an arrival.
    """

    RAMP = 8

    def __init__(self, speculate: Speculate) -> None:
        """`speculate`: the key of the block."""
        self.speculate = speculate
        self.reset()

    def reset(self) -> None:
        """Start off again, at a weight sync (with `always`: on)."""
        self.on = self.speculate == "always"
        self._held = False
        self._quiet = 0

    def update(self, running: int, speedup: float, arrived: bool) -> bool:
        """Decide whether to speculate in one decode step.

        Args:
            running: requests in the batch.
            speedup: predicted time of plain decoding over that of speculating, for the same progress.
            arrived: whether a request joined since the last call.

        Returns:
            Whether to speculate.
        """
        if self.speculate == "always":
            return True
        self._quiet = 0 if arrived else self._quiet + 1
        if arrived:
            self._held = False
        if isinstance(self.speculate, int):
            wanted = running <= self.speculate * (1.25 if self.on else 1.0)
        else:
            wanted = speedup >= (1.0 if self.on else 1.0 + MARGIN)
        self.on = wanted or self._held
        if wanted and self._quiet >= self.RAMP:
            self._held = True
        return self.on


class Ladder:
    """Draft length in rungs, the same for all replicas: longer when nearly everything is accepted, shorter when not
    (EfficientRollout, algorithm 1). Decided where all replicas' counts come together, once per training rollout."""

    def __init__(
        self, rungs: tuple[int, ...], raise_at: float = 0.94, lower_at: float = 0.85, persistence: int = 2
    ) -> None:
        """`persistence`: rollouts in a row that must agree."""
        assert rungs and list(rungs) == sorted(set(rungs)), rungs
        self.rungs, self.raise_at, self.lower_at, self.persistence = rungs, raise_at, lower_at, persistence
        self.rung = 0
        self._up = self._down = 0

    @property
    def length(self) -> int:
        """Draft tokens per round."""
        return self.rungs[self.rung]

    def observe(self, accepted: int, drafted: int, validation: bool = False) -> int:
        """Take the counts of one rollout, summed over all replicas, and return the draft length for the next. A
        validation, or a rollout without drafts, changes nothing."""
        if validation or drafted <= 0:
            return self.length
        rate = accepted / drafted
        self._up = self._up + 1 if rate >= self.raise_at else 0
        self._down = self._down + 1 if rate <= self.lower_at else 0
        if self._up >= self.persistence:
            self.rung, self._up = min(self.rung + 1, len(self.rungs) - 1), 0
        elif self._down >= self.persistence:
            self.rung, self._down = max(self.rung - 1, 0), 0
        return self.length


@dataclass
class Savings:
    """Time that speculation saved: what the tokens written so far would have taken without it, minus what they took.

    In a synchronous rollout plain decoding takes as many rounds as the longest request has tokens, and in round r
    the requests of at least r tokens take part. Where requests arrive while others end, rounds have no common start;
    there each step's tokens are valued at plain decoding's rate for its batch. Steps without drafts count with the
    model's time on both sides, so that only the drafted steps make a difference.
    """

    spent: float = 0.0
    finished: list[int] = field(default_factory=list)
    """Tokens of requests that ended."""
    _rate: float = 0.0
    _refilled: bool = False
    _widest: int = 1
    _requests: int = 0
    """Of all steps."""
    _context: float = 0.0
    """Tokens of their context."""

    def step(
        self,
        seconds: float,
        requests: int,
        tokens: int,
        drafted: bool,
        model: StepModel,
        drafting: float = 0.0,
        context: float = 0.0,
    ) -> None:
        """Take a decode step: its time, the requests in it, the tokens they got, whether any was drafted, what passes
        of a drafter took beside it, and the tokens of context that its requests had together."""
        plain = model.step(requests, requests, False, context)
        self._requests += requests
        self._context += context
        self.spent += (seconds if drafted else plain) + drafting
        self._rate += tokens / requests * plain
        self._widest = max(self._widest, requests)

    def refilled(self) -> None:
        """Note that requests arrive while others end."""
        self._refilled = True

    def saved(self, running: npt.ArrayLike, model: StepModel) -> float:
        """Return the seconds saved so far. `running`: tokens of the requests still in the batch, shape (b,)."""
        if self._refilled:
            return self._rate - self.spent
        lengths = np.concatenate([self.finished, np.asarray(running)])
        usual = model.at(self._context / max(1, self._requests))
        return seconds_of(lengths, self._widest, usual.plain) - self.spent


def seconds_of(rounds: npt.ArrayLike, slots: int, step: Callable[[Floats], Floats]) -> float:
    """Return the time of a rollout whose requests take so many rounds each, shape (n,), `slots` of them at a time.

    `step`: returns the seconds of a round by the requests in it. In plain decoding each token takes a round.
    """
    ordered = np.sort(np.asarray(rounds, dtype=float))
    if not len(ordered):
        return 0.0
    passed = np.diff(ordered, prepend=0.0)
    alive = np.arange(len(ordered), 0, -1)
    at_once = np.minimum(alive, slots)
    return float(np.sum(passed * (alive / at_once) * step(at_once)))
