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

from das_adapter.core import tuning
from das_adapter.core.latency import StepTimes
from das_adapter.core.requests import with_slots
from das_adapter.core.steps import Floats, Ints, TimedStep

StepSeconds = Callable[[Floats], Floats]
"""Returns the seconds of plain steps, by their numbers of requests."""


@dataclass
class _BaselineSteps:
    """Baseline steps of equally many requests."""

    steps: float = 0.0
    seconds: float = 0.0
    context: float = 0.0
    """Sum over the steps of the tokens of context of all requests."""

    def add(self, steps: float, seconds: float, context: float) -> None:
        self.steps += steps
        self.seconds += seconds
        self.context += context


class _Range:
    """The smallest and the largest of some values."""

    def __init__(self) -> None:
        self.smallest = np.inf
        self.largest = 0.0

    def include(self, value: float) -> None:
        self.smallest = min(self.smallest, value)
        self.largest = max(self.largest, value)

    def clip(self, values: npt.ArrayLike) -> Floats:
        """Return the nearest values in the range."""
        return np.asarray(np.clip(values, self.smallest, self.largest))


@dataclass
class _Batch:
    """The steps of one batch, from its first request to the end of its last; apart
    those in which it was refilled.
    """

    seconds: float = 0.0
    """Seconds of steps in which a drafter was asked."""
    drafted_seconds: float = 0.0
    """Seconds of steps with drafts."""
    steps: int = 0
    """Steps in which a drafter was asked."""
    requests: int = 0
    """Sum over these steps of their requests."""
    context: float = 0.0
    """Sum over these steps of the tokens of context of all requests."""
    max_requests: int = 1
    """Requests in the largest step."""
    refilled: bool = False
    """Whether requests arrive while others end."""
    rounds: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Tokens that each request got on average in steps in which a drafter was asked, by
    the steps' requests: so many plain steps would have written them.
    """
    written: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Tokens of live requests, by slot, those of baseline steps included."""
    finished: list[int] = field(default_factory=list)
    """Tokens of requests that ended."""
    baseline: dict[int, _BaselineSteps] = field(
        default_factory=lambda: defaultdict(_BaselineSteps)
    )
    """Baseline steps, by their requests."""

    @property
    def mean_context(self) -> float:
        """Tokens of context that a request had, on average."""
        return self.context / max(1, self.requests)

    def record_tokens(self, slots: Ints, got: Ints | int) -> None:
        """Add the tokens that the requests of a step got."""
        self.max_requests = max(self.max_requests, len(slots))
        try:
            self.written[slots] += got
        except IndexError:
            num_slots = int(slots.max()) + 1
            self.written = with_slots(self.written, num_slots)
            self.written[slots] += got

    def plain_s(self, step_s: StepSeconds) -> float:
        """Return the seconds that the tokens of steps in which a drafter was asked
        would have taken in plain decoding.

        All requests begin together, so that baseline steps are some of the rounds of
        plain decoding: their part is taken off. Where requests come and go, the tokens
        of each step count at the rate of its batch.
        """
        if self.refilled:
            return _total_s(self.rounds, step_s)
        tokens = np.append(self.written, self.finished)
        all_s = seconds_of(tokens, self.max_requests, step_s)
        baseline = {n: found.steps for n, found in self.baseline.items()}
        return all_s - _total_s(baseline, step_s)


class PlainTime:
    """The decode steps since the last weight sync, and what they would have taken
    without drafts.
    """

    def __init__(self, engine: StepTimes, sizes: tuple[int, ...] = ()) -> None:
        """
        Args:
            engine: times of the engine's steps.
            sizes: `StepModel.sizes` of the engine.
        """
        self.engine = engine
        self.baseline = StepTimes(kinds=1, sizes=sizes)
        """Times of baseline steps."""
        self._samples: deque[tuple[int, float, float]] = deque(
            maxlen=tuning.BASELINE_SAMPLES
        )
        """Requests, seconds and context of the latest baseline steps."""
        self._seen_requests = _Range()
        """Requests of baseline steps."""
        self._seen_context = _Range()
        """Mean context of a request in baseline steps."""
        self.restart()

    def restart(self) -> None:
        """Begin a rollout, at a weight sync."""
        self.passed_s = 0.0
        """Seconds of all steps."""
        self.batch = _Batch()
        self._batches = deque([self.batch], maxlen=tuning.JUDGED_BATCHES)

    def begin_batch(self, refilled: bool = False) -> None:
        """Begin another batch, or one that is `refilled`."""
        if self.batch.steps or self.batch.baseline:
            self.batch = _Batch()
            self._batches.append(self.batch)
        self.batch.refilled = refilled

    def record_step(self, step: TimedStep, predicted: float | None) -> None:
        """Record a step; `predicted`: its seconds by the engine's latency model, a
        drafter's passes apart.
        """
        if not step.asked:
            self._record_baseline_step(step)
            return
        passes_s = step.drafting_seconds
        seconds = step.seconds + passes_s
        if predicted is not None:
            longest = tuning.INTERRUPTED_STEP * (predicted + passes_s)
            seconds = min(seconds, longest)
        self.add_seconds(seconds)
        requests = len(step.slots)
        num_tokens = int(np.add.reduce(step.got))
        batch = self.batch
        batch.drafted_seconds += seconds * step.drafted
        batch.steps += 1
        batch.requests += requests
        batch.context += step.context
        batch.record_tokens(step.slots, step.got)
        batch.rounds[requests] += num_tokens / requests

    def _record_baseline_step(self, step: TimedStep) -> None:
        requests = len(step.slots)
        self.baseline.add(requests, requests, False, step.seconds, step.context)
        self.baseline.keep_fitted()
        self._samples.append((requests, step.seconds, step.context))
        self._seen_requests.include(requests)
        self._seen_context.include(step.context / requests)
        sums = np.array((1.0, step.seconds, step.context))
        self.record_baseline_steps(step.slots, sums)

    def record_baseline_steps(self, slots: Ints, sums: Floats) -> None:
        """Record baseline steps, in each of which these requests got a token: their
        number, their seconds and their context, float64 [3].
        """
        steps, seconds, context = sums.tolist()
        self.batch.record_tokens(slots, int(steps))
        self.batch.baseline[len(slots)].add(steps, seconds, context)
        self.passed_s += seconds

    def add_seconds(self, seconds: float) -> None:
        """Add to the time that is held against plain decoding, as of a drafter in a
        step that also read prompts.
        """
        self.batch.seconds += seconds
        self.passed_s += seconds

    def end_request(self, slot: int) -> None:
        """Count the tokens of a request that ended, and free its slot."""
        written = self.batch.written
        if slot < len(written):
            self.batch.finished.append(int(written[slot]))
            written[slot] = 0

    def fit(self) -> None:
        """Fit the times of the engine's steps, and of the baseline steps, anew."""
        self.engine.fit()
        self.baseline.fit()

    @property
    def known(self) -> bool:
        """Whether enough baseline steps were timed."""
        return len(self._samples) >= tuning.JUDGED_SAMPLES

    def plain_s(self) -> float:
        """Return what all steps would have taken in plain decoding; baseline steps
        alone where nothing is known.
        """
        plain_s = 0.0
        for batch in self._batches:
            step_s = self._plain_step_s(batch.mean_context)
            if step_s is not None:
                plain_s += batch.plain_s(step_s)
        return self._all_baseline().seconds + plain_s

    def saved_s(self) -> float:
        """Return the seconds that drafts saved; 0 where nothing is known."""
        self.baseline.fit()
        return sum(map(self.batch_saved_s, self._batches))

    def batch_saved_s(self, batch: _Batch) -> float:
        """Return the seconds that drafts saved in one batch."""
        step_s = self._plain_step_s(batch.mean_context)
        if step_s is None:
            return 0.0
        return batch.plain_s(step_s) - batch.seconds

    def explain_loss(self) -> str | None:
        """Compare the rollout so far with what its tokens would have taken where no
        drafter is asked: say why it has lost, which it has where it took longer beyond
        doubt; empty: it has not; None: too little is known.
        """
        self.baseline.fit()
        baseline = self._all_baseline()
        asked_steps = sum(batch.steps for batch in self._batches)
        asked_s = sum(batch.seconds for batch in self._batches)
        if asked_steps + baseline.steps < tuning.JUDGED_STEPS or not self.known:
            return None
        seconds = asked_s + baseline.seconds
        plain_s = self.plain_s()
        # standard error of the difference, as a share of the time
        variance = 1 / len(self._samples) + 1 / max(1, asked_steps)
        error = float(np.std(self._ratios())) * variance**0.5
        error *= 1.0 - baseline.seconds / max(plain_s, 1e-9)
        doubt = tuning.ROLLOUT_LOSS_SIGMAS * error
        if seconds <= plain_s * (1.0 + tuning.ROLLOUT_LOSS + doubt):
            return ""
        return (
            f"drafting lost a whole rollout: {seconds:.2f} s of decode steps,"
            f" {plain_s:.2f} s where no drafter is asked"
        )

    def of_stock(self) -> float | None:
        """Return the time of all steps relative to stock's; None: too little is
        known.
        """
        self.baseline.fit()
        if not self.known:
            return None
        model = self.baseline.model
        plain_s = 0.0
        seconds = self._all_baseline().seconds
        for batch in self._batches:
            seconds += batch.seconds
            plain_s += batch.plain_s(self._baseline_step_s(batch.mean_context))
            for requests, found in batch.baseline.items():
                mean_context = found.context / found.steps
                step_s = model.step(requests, requests, False, mean_context)
                plain_s += found.steps * step_s
        interruptions = float(np.mean(self._ratios()))
        return float(seconds / (interruptions * plain_s)) if plain_s else None

    def _all_baseline(self) -> _BaselineSteps:
        """Return the sum of all baseline steps."""
        total = _BaselineSteps()
        for batch in self._batches:
            for found in batch.baseline.values():
                total.add(found.steps, found.seconds, found.context)
        return total

    def _plain_step_s(self, context: float) -> StepSeconds | None:
        """Return what plain steps take whose requests have so many tokens of context
        each; interruptions have the share that they had in the baseline steps.
        """
        if not self.known:
            if not self.engine.known:
                return None
            return self.engine.model.at_context(context).plain_seconds
        step_s = self._baseline_step_s(context)
        interruptions = float(np.mean(self._ratios()))
        return lambda requests: step_s(requests) * interruptions

    def _baseline_step_s(self, context: float) -> StepSeconds:
        """Return what baseline steps take whose requests have so many tokens of context
        each.

        Beyond the requests and the context that baseline steps had, the engine's own
        steps say how times go on from the nearest of them:

            baseline(clamped) * engine(here) / engine(clamped)
        """
        clamped_context = float(self._seen_context.clip(context))
        baseline = self.baseline.model.at_context(clamped_context)
        engine_clamped = self.engine.model.at_context(clamped_context)
        engine_here = self.engine.model.at_context(context)

        def step_s(requests: npt.ArrayLike) -> Floats:
            clamped = self._seen_requests.clip(requests)
            baseline_s = baseline.plain_seconds(clamped)
            here_s = engine_here.plain_seconds(requests)
            clamped_s = engine_clamped.plain_seconds(clamped)
            return baseline_s * here_s / np.maximum(clamped_s, 1e-12)

        return step_s

    def _ratios(self) -> Floats:
        """Return the latest baseline steps' seconds over their model's, float64
        [samples].
        """
        requests, seconds, context = np.array(self._samples, dtype=float).T
        model = self.baseline.model
        predicted = model.seconds(requests, requests, False, context)
        ratios = seconds / np.maximum(1e-9, predicted)
        return np.minimum(tuning.INTERRUPTED_STEP, ratios)


def _total_s(steps: Mapping[int, float], step_s: StepSeconds) -> float:
    """Return the seconds of so many plain steps, by their requests."""
    requests = np.fromiter(steps, dtype=float, count=len(steps))
    numbers = np.fromiter(steps.values(), dtype=float, count=len(steps))
    return float(np.dot(numbers, step_s(requests)))


def seconds_of(rounds: npt.ArrayLike, slots: int, step_s: StepSeconds) -> float:
    """Return the time of a rollout whose requests take so many rounds each, shape (n,),
    `slots` of them at a time. In plain decoding each token takes a round.

    `step_s`: returns the seconds of a round by the requests in it.
    """
    ordered = np.sort(np.asarray(rounds, dtype=float))
    if not len(ordered):
        return 0.0
    passed = np.diff(ordered, prepend=0.0)
    alive = np.arange(len(ordered), 0, -1)
    at_once = np.minimum(alive, slots)
    waves = alive / at_once
    return float(np.sum(passed * waves * step_s(at_once)))
