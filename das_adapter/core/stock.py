"""Never slower than stock: a whole rollout's decode steps beside steps in which no drafter is asked.

Such a step does what a step of stock vLLM does. One is taken now and then where nothing is drafted anyway. A rollout
that took longer than its tokens would have taken in them is followed by one that begins without drafts, and goes on
without them until a trial of a few steps has gained time. Step times of a stock engine, whose scheduling may be
asynchronous, come from a calibration: no engine can measure them in itself.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from das_adapter.config import ToggleConfig
from das_adapter.core.latency import Floats, StepModel, StepTimes, read_calibration
from das_adapter.core.toggle import seconds_of

Ints = npt.NDArray[np.int64]

LOSS = 0.02
"""Share of the time above which a rollout has lost, beside what the scatter of the step times explains."""
LEAST_STEPS, LEAST_SAMPLES = 64, 8
"""Steps in which a drafter was asked, and in which none was, below which nothing is held against a rollout."""
SAMPLE_STEPS = 4, 64
"""Undrafted steps after which no drafter is asked in one: at first, and where such steps are well known."""
TRIAL_STEPS, TRIAL_DRAFTS = 16, 8
"""Steps of a trial at most; drafted steps after which it is over."""
PAUSE = 2.0
"""A step that took this many times what was predicted was interrupted, and counts as that long."""


class UnaskedStep(NamedTuple):
    """A decode step without drafts at whose end no drafter was asked."""

    requests: int
    seconds: float


class Compared(NamedTuple):
    """Decode steps since the last weight sync in which a drafter was asked."""

    seconds: float
    plain: float
    """What their tokens would have taken in steps like stock's, seconds."""
    scatter: float
    """Relative error of `plain`, one standard deviation."""

    @property
    def lost(self) -> bool:
        """Whether they took longer beyond doubt."""
        return self.seconds > self.plain * (1.0 + LOSS + 3.0 * self.scatter)


class StockGuard:
    """Says at the end of each step whether a drafter is asked at all."""

    def __init__(self, stock: StepModel | None = None) -> None:
        """`stock`: of a calibration's stock engine; None: stock is what a step takes in which no drafter is asked."""
        self.times = StepTimes(kinds=1)
        """Of steps in which no drafter was asked."""
        self.silent: str | None = None
        """Why no drafts are asked for, trials apart; None: they are."""
        self.slow: str | None = None
        """How much slower than stock vLLM's the last rollout's steps were, with drafts or without; None: no slower."""
        self._stock = stock
        self._samples: deque[UnaskedStep] = deque(maxlen=256)
        self._since_sample = 0
        self._since_trial, self._trial_after, self._trial_size = 0, TRIAL_STEPS, 0
        self._trial: _Trial | None = None
        self._restart()

    @classmethod
    def of(cls, toggle: ToggleConfig) -> StockGuard | None:
        """Make one for an engine; None where the user decides when to draft.

        Raises:
            DasError: `toggle.calibration` can't be read.
        """
        if toggle.mode != "roofline":
            return None
        return cls(read_calibration(toggle.calibration).stock if toggle.calibration else None)

    def _restart(self) -> None:
        self._seconds, self._steps, self._widest = 0.0, 0, 1
        self._requests, self._context = 0, 0  # of all steps: requests, and the tokens of their context
        self._unasked: dict[int, list[float]] = defaultdict(list)  # seconds by requests
        self._shares: dict[int, float] = defaultdict(float)  # steps' tokens for each request, by requests
        self._written: dict[int, int] = defaultdict(int)  # by slot
        self._finished: list[int] = []

    def ask(self, requests: int, drafted: bool) -> bool:
        """Decide at the end of a decode step.

        Args:
            requests: in the batch.
            drafted: whether the step has verified drafts.
        """
        if self.idle:
            self._since_trial += 1
            smaller = requests <= self._trial_size // 2 and self._since_trial >= TRIAL_STEPS
            if self._since_trial < self._trial_after and not smaller:
                return False
            self._trial, self._trial_size = _Trial(), requests
            return True
        self._since_sample += not drafted
        first, last = SAMPLE_STEPS
        if drafted or self._trial or self._since_sample < min(last, first + self.times.plain_steps(requests)):
            return True
        self._since_sample = 0
        return False

    @property
    def idle(self) -> bool:
        """Whether no drafts are asked for, and no trial is on."""
        return self.silent is not None and self._trial is None

    def unasked(self, step: UnaskedStep) -> None:
        """Take a step in which no drafter was asked."""
        self.times.add(step.requests, step.requests, False, step.seconds)
        if self.times.model is None or self.times.observed % LEAST_SAMPLES == 0:
            self.times.fit()
        self._samples.append(step)
        self._unasked[step.requests].append(step.seconds)

    def asked(
        self, slots: Ints, got: Ints, seconds: float, drafted: bool, predicted: float | None, context: int = 0
    ) -> None:
        """Take a step in which the drafter was asked, its passes included.

        Args:
            slots, got: of its requests, and the tokens that each got, int64 [requests].
            seconds: it took.
            drafted: whether it has verified drafts.
            predicted: seconds by the engine's latency model.
            context: tokens of context that its requests have together.
        """
        requests, tokens = len(slots), int(got.sum())
        seconds = seconds if predicted is None else min(seconds, PAUSE * predicted)
        self._seconds += seconds
        self._steps += 1
        self._requests += requests
        self._context += context
        self._widest = max(self._widest, requests)
        self._shares[requests] += tokens / requests
        for slot, count in zip(slots.tolist(), got.tolist(), strict=True):
            self._written[slot] += count
        if self._trial is not None and self.times.model is not None:
            self._trial.step(seconds, tokens / requests * self._plain(np.array([requests], dtype=float))[0], drafted)
            if self._trial.over:
                self._end_trial(self._trial)

    def close(self, slot: int) -> None:
        """Take the end of a request."""
        self._finished.append(self._written.pop(slot, 0))

    def compare(self) -> Compared | None:
        """Compare the rollout so far with steps in which no drafter is asked; None: too little is known."""
        if self._steps < LEAST_STEPS or not self._known:
            return None
        scatter = float(np.std(self._ratios())) * (1 / len(self._samples) + 1 / self._steps) ** 0.5
        return Compared(self._seconds, self._seconds_by(self._plain), scatter)

    def of_stock(self) -> float | None:
        """Return the time of all decode steps since the last weight sync, those in which no drafter was asked too,
        relative to stock's; None: too little is known."""
        if not self._known:
            return None
        step = self._plain if self._stock is None else self._stock.at(self._context / max(1, self._requests)).plain
        took = sum(map(sum, self._unasked.values()))
        plain = sum(len(of) * float(step(np.array([n], dtype=float))[0]) for n, of in self._unasked.items())
        plain += self._seconds_by(step)
        return (self._seconds + took) / plain if plain else None

    def sync(self) -> str | None:
        """Judge the rollout that a weight sync ends; return what has changed for the next, in words, or None."""
        compared, share, news = self.compare(), self.of_stock(), None
        if compared is not None and compared.lost and self.silent is None:
            self.silent = (
                f"drafting lost a whole rollout: {compared.seconds:.2f} s of decode steps, "
                f"{compared.plain:.2f} s where no drafter is asked"
            )
            news = self.silent
        self.slow = None
        if compared is not None and share is not None and self._stock is not None:
            if share > 1.0 + LOSS + 3.0 * compared.scatter:
                self.slow = f"decode steps took {share:.2f} of those of the calibration's stock engine"
        self._trial, self._since_trial, self._trial_after, self._trial_size = None, 0, TRIAL_STEPS, 0
        self._restart()
        return news

    def take(self) -> dict[str, Any]:
        """Return the figures since the last weight sync, as plain numbers."""
        return {"of_stock": self.of_stock(), "silent": self.silent, "slow": self.slow}

    @property
    def _known(self) -> bool:
        return self.times.model is not None and len(self._samples) >= LEAST_SAMPLES

    def _plain(self, requests: Floats) -> Floats:
        """Seconds of steps in which no drafter is asked; interruptions have the share that they had in these."""
        assert self.times.model is not None
        return self.times.model.plain(requests) * float(np.mean(self._ratios()))

    def _ratios(self) -> Floats:
        """The latest such steps' seconds over their model's, float64 [samples]."""
        assert self.times.model is not None
        requests, seconds = np.array(self._samples, dtype=float).T
        ratios: Floats = np.minimum(PAUSE, seconds / np.maximum(1e-9, self.times.model.plain(requests)))
        return ratios

    def _seconds_by(self, step: Callable[[Floats], Floats]) -> float:
        """What the rollout's tokens would have taken in plain decoding: by rounds, where all requests began together,
        or at the rate of each step's batch, where they came and went; the longer of the two, in favour of drafts."""
        sizes = np.fromiter(self._shares, dtype=float, count=len(self._shares))
        rate = float(np.dot(np.fromiter(self._shares.values(), dtype=float), step(sizes))) if len(sizes) else 0.0
        return max(rate, seconds_of([*self._finished, *self._written.values()], self._widest, step))

    def _end_trial(self, trial: _Trial) -> None:
        self._trial, self._since_trial = None, 0
        self._trial_after *= 2
        if trial.gained:
            self.silent = None


class _Trial:
    """A few steps in which the drafter is asked, to see whether it gains time; the first is left out, in which it
    reads what it has missed."""

    def __init__(self) -> None:
        self._steps, self._drafted, self._seconds, self._plain = -1, 0, 0.0, 0.0

    def step(self, seconds: float, plain: float, drafted: bool) -> None:
        """Take a step, and what its tokens would have taken without drafts, seconds."""
        self._steps += 1
        if self._steps:
            self._drafted += drafted
            self._seconds += seconds
            self._plain += plain

    @property
    def over(self) -> bool:
        return self._steps >= TRIAL_STEPS or self._drafted >= TRIAL_DRAFTS

    @property
    def gained(self) -> bool:
        return self._drafted > 0 and self._plain > (1.0 + LOSS) * self._seconds
