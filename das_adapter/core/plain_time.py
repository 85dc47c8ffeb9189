"""What a rollout's tokens would have taken in plain decoding: the one place where that
is computed.

A baseline step carries no drafts, and no drafter is asked at its end: it does what a
step of stock vLLM does. Where these are known, plain decoding takes what they take;
until then, what the engine's latency model says of steps without drafts.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from das_adapter.core.latency import StepTimes
from das_adapter.core.requests import with_slots
from das_adapter.core.steps import Floats, Ints, TimedStep

Seconds = Callable[[Floats], Floats]
"""Of plain steps, by their requests."""

LOSS = 0.02
"""Share of the time above which a rollout has lost, beside what the scatter of the step
times explains.
"""
LEAST_STEPS, LEAST_SAMPLES = 64, 8
"""Steps, and baseline steps among them or before, below which nothing is held against a
rollout.
"""
PAUSE = 2.0
"""A step that took this many times what was predicted was interrupted, and counts as
that long.
"""
BATCHES = 64
"""Batches since the last weight sync that are counted, the latest."""


@dataclass
class _Batch:
    """The steps of one batch, from its first request to the end of its last; apart
    those in which it was refilled.
    """

    seconds: float = 0.0
    """Of steps in which a drafter was asked, like all but `baseline`."""
    drafted_seconds: float = 0.0
    steps: int = 0
    requests: int = 0
    """Of all steps."""
    context: float = 0.0
    """Tokens of their context."""
    max_requests: int = 1
    refilled: bool = False
    """Whether requests arrive while others end."""
    shares: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Steps' tokens for each request, by requests."""
    written: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Tokens of live requests, by slot, those of baseline steps included."""
    finished: list[int] = field(default_factory=list)
    """The same of requests that ended."""
    baseline: dict[int, Floats] = field(
        default_factory=lambda: defaultdict(lambda: np.zeros(3))
    )
    """By requests: baseline steps, their seconds and context."""

    @property
    def mean_context(self) -> float:
        """Tokens of context that a request had, on average."""
        return self.context / max(1, self.requests)

    def plain(self, step: Seconds) -> float:
        """Return the seconds of its tokens without those of baseline steps: by rounds,
        for all requests begin together, so that baseline steps are some of the rounds;
        where they come and go, at the rate of each step's batch.
        """
        if self.refilled:
            return _total(self.shares, step)
        whole = seconds_of(
            np.append(self.written, self.finished), self.max_requests, step
        )
        return whole - _total(
            {requests: kind[0] for requests, kind in self.baseline.items()}, step
        )


class PlainTime:
    """The decode steps since the last weight sync, and what they would have taken
    without drafts.
    """

    def __init__(self, engine: StepTimes, sizes: tuple[int, ...] = ()) -> None:
        """`engine`: times of its steps; `sizes`: `StepModel.sizes` of the engine."""
        self.engine = engine
        self.baseline = StepTimes(kinds=1, sizes=sizes)
        # requests, seconds, context
        self._samples: deque[tuple[int, float, float]] = deque(maxlen=256)
        # fewest and most requests of a baseline step, and context of a request
        self._seen = self._read = (
            np.inf,
            0.0,
        )
        self.restart()

    def restart(self) -> None:
        """Begin a rollout, at a weight sync."""
        self.passed_s = 0.0
        """Seconds of all steps."""
        self.batch = _Batch()
        self._batches = deque([self.batch], maxlen=BATCHES)

    def begin_batch(self, refilled: bool = False) -> None:
        """Begin another batch, or one that is `refilled`."""
        if self.batch.steps or self.batch.baseline:
            self.batch = _Batch()
            self._batches.append(self.batch)
        self.batch.refilled = refilled

    def record_step(self, step: TimedStep, predicted: float | None) -> None:
        """Take a step; `predicted`: its seconds by the engine's latency model, a
        drafter's passes apart.
        """
        slots = step.slots
        got = step.got
        requests = len(step.slots)
        batch = self.batch
        if not step.asked:
            self.baseline.add(requests, requests, False, step.seconds, step.context)
            self.baseline.keep_fitted()
            self._samples.append((requests, step.seconds, step.context))
            mean = step.context / requests
            self._seen = min(self._seen[0], requests), max(self._seen[1], requests)
            self._read = min(self._read[0], mean), max(self._read[1], mean)
            self.record_baseline_steps(
                slots, np.array((1.0, step.seconds, step.context))
            )
            return
        seconds = step.seconds + step.drafting_seconds
        passes = step.drafting_seconds
        seconds = (
            seconds if predicted is None else min(seconds, PAUSE * (predicted + passes))
        )
        self.add_seconds(seconds)
        batch.drafted_seconds += seconds * step.drafted
        batch.steps += 1
        batch.requests += requests
        batch.context += step.context
        self._write(slots, got)
        batch.shares[requests] += int(np.add.reduce(got)) / requests

    def record_baseline_steps(self, slots: Ints, steps: Floats) -> None:
        """Count baseline steps, in each of which these requests got a token: their
        number, their seconds and their context, float64 [3].
        """
        self._write(slots, int(steps[0]))
        self.batch.baseline[len(slots)] += steps
        self.passed_s += float(steps[1])

    def add_seconds(self, seconds: float) -> None:
        """Add to the time that is held against plain decoding, as of a drafter in a
        step that also read prompts.
        """
        self.batch.seconds += seconds
        self.passed_s += seconds

    def end_request(self, slot: int) -> None:
        """Take the end of a request."""
        written = self.batch.written
        if slot < len(written):
            self.batch.finished.append(int(written[slot]))
            written[slot] = 0

    @property
    def known(self) -> bool:
        """Whether enough baseline steps were timed."""
        return len(self._samples) >= LEAST_SAMPLES

    def plain_s(self) -> float:
        """Return what all steps would have taken in plain decoding; baseline steps
        alone where nothing is known.
        """
        known = (
            batch.plain(plain)
            for batch in self._batches
            if (plain := self._plain(batch.mean_context)) is not None
        )
        return self._unasked()[1] + sum(known)

    def saved_s(self) -> float:
        """Return the seconds that drafts saved; 0 where nothing is known."""
        return sum(map(self.batch_saved_s, self._batches))

    def batch_saved_s(self, batch: _Batch) -> float:
        """Return the seconds that drafts saved in one batch."""
        plain = self._plain(batch.mean_context)
        return 0.0 if plain is None else batch.plain(plain) - batch.seconds

    def explain_loss(self) -> str | None:
        """Compare the rollout so far with what its tokens would have taken where no
        drafter is asked: say why it has lost, which it has where it took longer beyond
        doubt; empty: it has not; None: too little is known.
        """
        self.baseline.fit()
        steps, seconds = (
            sum(getattr(batch, name) for batch in self._batches)
            for name in ("steps", "seconds")
        )
        unasked, baseline = self._unasked()
        if steps + unasked < LEAST_STEPS or not self.known:
            return None
        seconds = seconds + baseline
        plain = self.plain_s()
        scatter = (
            float(np.std(self._ratios()))
            * (1 / len(self._samples) + 1 / max(1, steps)) ** 0.5
        )
        scatter *= 1.0 - baseline / max(plain, 1e-9)
        if seconds <= plain * (1.0 + LOSS + 3.0 * scatter):
            return ""
        return (
            f"drafting lost a whole rollout: {seconds:.2f} s of decode steps,"
            f" {plain:.2f} s where no drafter is asked"
        )

    def of_stock(self) -> float | None:
        """Return the time of all steps relative to stock's; None: too little is
        known.
        """
        self.baseline.fit()
        if not self.known:
            return None
        model = self.baseline.model
        share = float(np.mean(self._ratios()))
        plain = 0.0
        seconds = self._unasked()[1]
        for batch in self._batches:
            seconds += batch.seconds
            plain += batch.plain(self._baseline(batch.mean_context))
            for requests, (steps, _, context) in batch.baseline.items():
                plain += steps * model.step(requests, requests, False, context / steps)
        return float(seconds / (share * plain)) if plain else None

    def _write(self, slots: Ints, got: Ints | int) -> None:
        batch = self.batch
        batch.max_requests = max(batch.max_requests, len(slots))
        try:
            batch.written[slots] += got
        except IndexError:
            batch.written = with_slots(batch.written, int(slots.max()) + 1)
            batch.written[slots] += got

    def _unasked(self) -> tuple[float, float]:
        """Baseline steps, and their seconds."""
        kinds = (kind for batch in self._batches for kind in batch.baseline.values())
        steps, seconds, _ = sum(kinds, np.zeros(3)).tolist()
        return steps, seconds

    def _plain(self, context: float) -> Seconds | None:
        """Seconds of plain steps, by their requests, where each of these has so many
        tokens of context; interruptions have the share that they had in the baseline
        steps.
        """
        if not self.known:
            return (
                self.engine.model.at_context(context).plain_seconds
                if self.engine.known
                else None
            )
        plain = self._baseline(context)
        share = float(np.mean(self._ratios()))
        return lambda requests: plain(requests) * share

    def _baseline(self, context: float) -> Seconds:
        """Seconds of baseline steps, by their requests; of fewer requests or less
        context than any of them had, or of more, as the engine's own steps say,
        relative to the nearest.
        """
        engine = self.engine.model
        read = float(np.clip(context, *self._read))
        baseline = self.baseline.model.at_context(read)
        there = engine.at_context(read)
        here = engine.at_context(context)

        def plain(requests: npt.ArrayLike) -> Floats:
            near = np.clip(requests, *self._seen)
            return (
                baseline.plain_seconds(near)
                * here.plain_seconds(requests)
                / np.maximum(there.plain_seconds(near), 1e-12)
            )

        return plain

    def _ratios(self) -> Floats:
        """The latest baseline steps' seconds over their model's, float64 [samples]."""
        requests, seconds, context = np.array(self._samples, dtype=float).T
        predicted = self.baseline.model.seconds(requests, requests, False, context)
        return np.minimum(PAUSE, seconds / np.maximum(1e-9, predicted))


def _total(steps: Mapping[int, float], step: Seconds) -> float:
    """Return the seconds of so many plain steps, by their requests."""
    sizes = np.fromiter(steps, dtype=float, count=len(steps))
    return float(
        np.dot(np.fromiter(steps.values(), dtype=float, count=len(steps)), step(sizes))
    )


def seconds_of(rounds: npt.ArrayLike, slots: int, step: Seconds) -> float:
    """Return the time of a rollout whose requests take so many rounds each, shape (n,),
    `slots` of them at a time.

    `step`: returns the seconds of a round by the requests in it. In plain decoding each
    token takes a round.
    """
    ordered = np.sort(np.asarray(rounds, dtype=float))
    if not len(ordered):
        return 0.0
    passed = np.diff(ordered, prepend=0.0)
    alive = np.arange(len(ordered), 0, -1)
    at_once = np.minimum(alive, slots)
    return float(np.sum(passed * (alive / at_once) * step(at_once)))
