"""What a rollout's tokens would have taken in plain decoding: the one place where that
is computed.

A baseline step carries no drafts, and no drafter is asked at its end: it does what a
step of stock vLLM does. Where these are known, plain decoding takes what they take;
until then, what the engine's latency model says of steps without drafts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from das_adapter.core import tuning
from das_adapter.core.latency import StepTimes
from das_adapter.core.requests import with_slots
from das_adapter.core.steps import Floats, Ints, TimedStep

StepSeconds = Callable[[Floats], Floats]
"""Returns the seconds of plain steps, by their numbers of requests."""


@dataclass
class _StepsOfSize:
    """Steps of equally many requests."""

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
        clipped = np.clip(values, self.smallest, self.largest)
        return np.asarray(clipped)


def _no_tokens() -> Ints:
    return np.zeros(0, dtype=np.int64)


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
    rounds: dict[int, float] = field(default_factory=dict)
    """Tokens that each request got on average in steps in which a drafter was asked, by
    the steps' requests: so many plain steps would have written them.
    """
    written: Ints = field(default_factory=_no_tokens)
    """Tokens of live requests, by slot, those of baseline steps included."""
    finished: list[int] = field(default_factory=list)
    """Tokens of requests that ended."""
    baseline: dict[int, _StepsOfSize] = field(default_factory=dict)
    """Baseline steps, by their requests."""
    asked: dict[int, _StepsOfSize] = field(default_factory=dict)
    """Steps in which a drafter was asked, by their requests; its passes apart."""

    @property
    def mean_context(self) -> float:
        """Tokens of context that a request had, on average."""
        return self.context / max(1, self.requests)

    def record_tokens(self, slots: Ints, got: Ints | int) -> None:
        """Add the tokens that the requests of a step got."""
        num_requests = len(slots)
        self.max_requests = max(self.max_requests, num_requests)
        try:
            self.written[slots] += got
        except IndexError:
            largest_slot = int(slots.max())
            self.written = with_slots(self.written, largest_slot + 1)
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
        baseline_s = _total_s(_counts(self.baseline), step_s)
        return all_s - baseline_s

    def no_longer_than_asked(self, step_s: StepSeconds) -> StepSeconds:
        """Return times of plain steps, shortened to what the steps took in which a
        drafter was asked, where that is less: these do the same, and more. Baseline
        steps that were slow for another reason, such as other work beside an engine's
        start, would have it seem that drafts saved what they did not.
        """
        asked_s = sum([steps.seconds for steps in self.asked.values()])
        plain_s = _total_s(_counts(self.asked), step_s)
        if plain_s <= asked_s:
            return step_s
        share = asked_s / plain_s

        def shortened_s(requests: Floats) -> Floats:
            return share * step_s(requests)

        return shortened_s


class _Sample(NamedTuple):
    """A baseline step that was timed."""

    requests: int
    seconds: float
    context: float
    """Tokens of context of all requests."""


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
        self.baseline = StepTimes(min_step_kinds=1, sizes=sizes)
        """Times of baseline steps."""
        self._samples = deque[_Sample](maxlen=tuning.BASELINE_SAMPLES)
        """The latest baseline steps."""
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
        self._batches = deque[_Batch](maxlen=tuning.JUDGED_BATCHES)
        self._batches.append(self.batch)

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
            predicted_s = predicted + passes_s
            longest_s = tuning.INTERRUPTED_STEP * predicted_s
            seconds = min(seconds, longest_s)
        self.add_seconds(seconds)
        requests = len(step.slots)
        num_tokens = int(np.add.reduce(step.got))
        batch = self.batch
        if step.drafted:
            batch.drafted_seconds += seconds
        batch.steps += 1
        batch.requests += requests
        batch.context += step.context
        batch.record_tokens(step.slots, step.got)
        rounds = batch.rounds.get(requests, 0.0)
        mean_tokens = num_tokens / requests
        batch.rounds[requests] = rounds + mean_tokens
        of_requests = batch.asked.setdefault(requests, _StepsOfSize())
        of_requests.add(1.0, seconds - passes_s, step.context)

    def _record_baseline_step(self, step: TimedStep) -> None:
        requests = len(step.slots)
        mean_context = step.context / requests
        self.baseline.add(
            tokens=requests,
            requests=requests,
            drafted=False,
            seconds=step.seconds,
            context=step.context,
        )
        self.baseline.keep_fitted()
        sample = _Sample(
            requests=requests,
            seconds=step.seconds,
            context=step.context,
        )
        self._samples.append(sample)
        self._seen_requests.include(requests)
        self._seen_context.include(mean_context)
        sums = np.array((1.0, step.seconds, step.context))
        self.record_baseline_steps(step.slots, sums)

    def record_baseline_steps(self, slots: Ints, sums: Floats) -> None:
        """Record baseline steps, in each of which these requests got a token: their
        number, their seconds and their context, float64 [3].
        """
        steps, seconds, context = sums.tolist()
        requests = len(slots)
        batch = self.batch
        batch.record_tokens(slots, int(steps))
        of_requests = batch.baseline.setdefault(requests, _StepsOfSize())
        of_requests.add(steps, seconds, context)
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
        if slot >= len(written):
            return
        num_tokens = int(written[slot])
        self.batch.finished.append(num_tokens)
        written[slot] = 0

    def fit(self) -> None:
        """Fit the times of the engine's steps, and of the baseline steps, anew."""
        self.engine.fit()
        self.baseline.fit()

    @property
    def known(self) -> bool:
        """Whether enough baseline steps were timed."""
        return len(self._samples) >= tuning.JUDGED_SAMPLES

    def known_at(self, requests: float) -> bool:
        """Return whether enough baseline steps were timed, and some of about so many
        requests, so that what plain steps take is not extrapolated.
        """
        least = self._seen_requests.smallest / tuning.NEAR_REQUESTS
        most = self._seen_requests.largest * tuning.NEAR_REQUESTS
        return self.known and least <= requests <= most

    def plain_s(self) -> float:
        """Return what all steps would have taken in plain decoding; baseline steps
        alone where nothing is known.
        """
        plain_s = 0.0
        for batch in self._batches:
            step_s = self._plain_step_s(batch)
            if step_s is not None:
                plain_s += batch.plain_s(step_s)
        baseline = self._all_baseline()
        return baseline.seconds + plain_s

    def saved_s(self) -> float:
        """Return the seconds that drafts saved; 0 where nothing is known."""
        self.baseline.fit()
        saved = [self.batch_saved_s(batch) for batch in self._batches]
        return sum(saved)

    def batch_saved_s(self, batch: _Batch) -> float:
        """Return the seconds that drafts saved in one batch."""
        step_s = self._plain_step_s(batch)
        if step_s is None:
            return 0.0
        plain_s = batch.plain_s(step_s)
        return plain_s - batch.seconds

    def explain_loss(self) -> str | None:
        """Compare the rollout so far with what its tokens would have taken where no
        drafter is asked: say why it has lost, which it has where it took longer beyond
        doubt; empty: it has not; None: too little is known.
        """
        self.baseline.fit()
        if not self.known:
            return None
        baseline = self._all_baseline()
        asked_steps = sum([batch.steps for batch in self._batches])
        asked_s = sum([batch.seconds for batch in self._batches])
        all_steps = asked_steps + baseline.steps
        if all_steps < tuning.JUDGED_STEPS:
            return None
        asked_requests = sum([batch.requests for batch in self._batches])
        if asked_steps and not self.known_at(asked_requests / asked_steps):
            return None
        seconds = asked_s + baseline.seconds
        plain_s = self.plain_s()
        # standard error of the difference, as a share of the time
        baseline_share = baseline.seconds / max(plain_s, 1e-9)
        deviation = float(np.std(self._ratios()))
        of_samples = 1 / len(self._samples)
        of_steps = 1 / max(1, asked_steps)
        variance = of_samples + of_steps
        error = deviation * variance**0.5
        error *= 1.0 - baseline_share
        doubt = tuning.ROLLOUT_LOSS_SIGMAS * error
        allowed = 1.0 + tuning.ROLLOUT_LOSS + doubt
        if seconds <= plain_s * allowed:
            return ""
        return (
            f"drafting lost a whole rollout: {seconds:.2f} s of decode steps,"
            f" {plain_s:.2f} s where no drafter is asked"
        )

    def of_stock(self) -> float | None:
        """Return the time of all steps relative to stock's; None: too little is known.
        Baseline steps are stock's: where no drafter was asked, it is 1.
        """
        self.baseline.fit()
        if not self.known:
            return None
        baseline = self._all_baseline()
        asked_s = sum([batch.seconds for batch in self._batches])
        stock_s = self.plain_s()
        if not stock_s:
            return None
        return float((baseline.seconds + asked_s) / stock_s)

    def _all_baseline(self) -> _StepsOfSize:
        """Return the sum of all baseline steps."""
        total = _StepsOfSize()
        for batch in self._batches:
            for part in batch.baseline.values():
                total.add(part.steps, part.seconds, part.context)
        return total

    def _plain_step_s(self, batch: _Batch) -> StepSeconds | None:
        """Return what plain steps take with a batch's context; interruptions have the
        share that they had in the baseline steps.
        """
        context = batch.mean_context
        if not self.known:
            if not self.engine.known:
                return None
            model = self.engine.model.at_context(context)
            return model.plain_seconds
        baseline_step_s = self._baseline_step_s(context)
        ratios = self._ratios()
        interruptions = float(np.mean(ratios))

        def step_s(requests: Floats) -> Floats:
            seconds = baseline_step_s(requests)
            return seconds * interruptions

        return batch.no_longer_than_asked(step_s)

    def _baseline_step_s(self, context: float) -> StepSeconds:
        """Return what baseline steps take whose requests have so many tokens of context
        each.

        Beyond the requests and the context that baseline steps had, the engine's own
        steps say how times go on from the nearest of them:

            baseline(clamped) * engine(here) / engine(clamped)
        """
        engine = self.engine.model
        clamped_context = float(self._seen_context.clip(context))
        baseline = self.baseline.model.at_context(clamped_context)
        engine_clamped = engine.at_context(clamped_context)
        engine_here = engine.at_context(context)

        def step_s(requests: npt.ArrayLike) -> Floats:
            clamped = self._seen_requests.clip(requests)
            baseline_s = baseline.plain_seconds(clamped)
            here_s = engine_here.plain_seconds(requests)
            clamped_s = engine_clamped.plain_seconds(clamped)
            clamped_s = np.maximum(clamped_s, 1e-12)
            return baseline_s * here_s / clamped_s

        return step_s

    def _ratios(self) -> Floats:
        """Return the latest baseline steps' seconds over their model's, float64
        [samples].
        """
        samples = np.array(self._samples, dtype=float)
        requests, seconds, context = samples.T
        model = self.baseline.model
        predicted_s = model.seconds(requests, requests, False, context)
        predicted_s = np.maximum(1e-9, predicted_s)
        ratios = seconds / predicted_s
        return np.minimum(tuning.INTERRUPTED_STEP, ratios)


def _counts(steps: Mapping[int, _StepsOfSize]) -> dict[int, float]:
    """Return how many steps there are, by their requests."""
    return {requests: of_requests.steps for requests, of_requests in steps.items()}


def _total_s(steps: Mapping[int, float], step_s: StepSeconds) -> float:
    """Return the seconds of so many plain steps, by their requests."""
    requests = np.array(list(steps), dtype=float)
    num_steps = np.array(list(steps.values()), dtype=float)
    seconds = step_s(requests)
    total = np.dot(num_steps, seconds)
    return float(total)


def seconds_of(
    rounds: npt.ArrayLike,
    slots: int,
    step_s: StepSeconds,
) -> float:
    """Return the time of a rollout whose requests take so many rounds each, shape (n,),
    `slots` of them at a time. In plain decoding each token takes a round.

    `step_s`: returns the seconds of a round by the requests in it.
    """
    all_rounds = np.asarray(rounds, dtype=float)
    num_requests = len(all_rounds)
    if not num_requests:
        return 0.0
    ends = np.sort(all_rounds)
    # rounds between two ends, and the requests that are alive in them
    between = np.diff(ends, prepend=0.0)
    alive = np.arange(num_requests, 0, -1)
    at_once = np.minimum(alive, slots)
    waves = alive / at_once
    round_s = step_s(at_once)
    seconds = between * waves * round_s
    return float(np.sum(seconds))
