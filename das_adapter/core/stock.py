"""Never slower than stock: a whole rollout's decode steps beside steps in which no drafter is asked.

Such a step does what a step of stock vLLM does. One is taken now and then where nothing is drafted anyway. A rollout
that took longer than its tokens would have taken in them is followed by one that begins without drafts, and goes on
without them until a trial of a few steps has gained time. After 1, 2, 4, ... such rollouts one begins with drafts
again, for a drafter that has read no prompts has nothing to show in a trial. Step times of a stock engine, whose
scheduling may be asynchronous, come from a calibration: no engine can measure them in itself.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from das_adapter.config import DasConfig
from das_adapter.core.latency import Floats, StepModel, StepTimes, read_calibration
from das_adapter.core.requests import with_room
from das_adapter.core.toggle import seconds_of

Ints = npt.NDArray[np.int64]

LOSS = 0.02
"""Share of the time above which a rollout has lost, beside what the scatter of the step times explains."""
LEAST_STEPS, LEAST_SAMPLES = 64, 8
"""Steps in which a drafter was asked, and in which none was, below which nothing is held against a rollout."""
SAMPLE_STEPS = 4, 64
"""Undrafted steps after which no drafter is asked in one: at first, and where such steps are well known."""
TRIAL_STEPS, TRIAL_DRAFTS = 16, 8
"""Steps of a trial at most, and before the next at least; drafted steps after which it is over."""
TRIAL_SHARE = 0.01
"""Share of a rollout's time that its trials may lose; twice as much where the batch has become half as large."""
MOST_SILENT = 16
"""Rollouts in a row that begin without drafts at most."""
PAUSE = 2.0
"""A step that took this many times what was predicted was interrupted, and counts as that long."""


class UnaskedStep(NamedTuple):
    """A decode step without drafts at whose end no drafter was asked."""

    requests: int
    seconds: float
    context: float = 0.0
    """Tokens of context that its requests have together."""


class Compared(NamedTuple):
    """Decode steps since the last weight sync in which a drafter was asked."""

    seconds: float
    """With what the drafter took in steps that also read prompts."""
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

    def __init__(self, stock: StepModel | None = None, sizes: tuple[int, ...] = ()) -> None:
        """
        Args:
            stock: of a calibration's stock engine; None: stock is what a step takes in which no drafter is asked.
            sizes: `StepModel.sizes` of the engine.
        """
        self.times = StepTimes(kinds=1, sizes=sizes)
        """Of steps in which no drafter was asked."""
        self.silent: str | None = None
        """Why no drafts are asked for, trials apart; None: they are."""
        self.slow: str | None = None
        """How much slower than stock vLLM's the last rollout's steps were, with drafts or without; None: no slower."""
        self._stock = stock
        self._samples: deque[UnaskedStep] = deque(maxlen=256)
        self._since_sample = 0
        self._since_trial, self._trial_size = 0, 0
        self._trial: _Trial | None = None
        self._silent_left, self._silent_next = 0, 1  # rollouts
        self._restart()

    @classmethod
    def of(cls, config: DasConfig, sizes: tuple[int, ...] = ()) -> StockGuard | None:
        """Make one for an engine; None where the user decides when to draft. `sizes`: see `StepModel`.

        Raises:
            DasError: `calibration` can't be read.
        """
        if config.speculate != "auto":
            return None
        return cls(read_calibration(config.calibration).stock if config.calibration else None, sizes)

    def _restart(self) -> None:
        self._seconds, self._steps, self._widest = 0.0, 0, 1
        self._requests, self._context = 0, 0  # of the steps in which one was asked: requests, tokens of their context
        self._unasked: dict[int, Floats] = defaultdict(lambda: np.zeros(3))  # by requests: steps, seconds, context
        self._shares: dict[int, float] = defaultdict(float)  # steps' tokens for each request, by requests
        self._written = np.zeros(0, dtype=np.int64)  # by slot
        self._finished: list[int] = []
        self._lost = 0.0
        """Seconds that trials took beyond plain decoding."""

    def ask(self, requests: int, drafted: bool) -> bool:
        """Decide at the end of a decode step.

        Args:
            requests: in the batch.
            drafted: whether the step has verified drafts.
        """
        if self.idle:
            self._since_trial += 1
            share = TRIAL_SHARE * (2 if requests <= self._trial_size // 2 else 1)
            if self._since_trial < TRIAL_STEPS or self._lost > share * self._passed():
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
        self.times.add(step.requests, step.requests, False, step.seconds, step.context)
        if self.times.model is None or self.times.observed % LEAST_SAMPLES == 0:
            self.times.fit()
        self._samples.append(step)
        self._unasked[step.requests] += 1.0, step.seconds, step.context

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
        self._written = with_room(self._written, int(slots.max()) + 1)
        self._written[slots] += got
        if self._trial is not None and self.times.model is not None:
            plain = self._plain(context / requests)(np.array([requests], dtype=float))[0]
            self._trial.step(seconds, tokens / requests * plain, drafted)
            if self._trial.over:
                self._end_trial(self._trial)

    def beside(self, seconds: float) -> None:
        """Take what a drafter took in a step that also read prompts."""
        self._seconds += seconds

    def close(self, slot: int) -> None:
        """Take the end of a request."""
        if slot < len(self._written):
            self._finished.append(int(self._written[slot]))
            self._written[slot] = 0

    def compare(self) -> Compared | None:
        """Compare the rollout so far with steps in which no drafter is asked; None: too little is known."""
        if self._steps < LEAST_STEPS or not self._known:
            return None
        scatter = float(np.std(self._ratios())) * (1 / len(self._samples) + 1 / self._steps) ** 0.5
        return Compared(self._seconds, self._seconds_by(self._plain(self._usual)), scatter)

    def of_stock(self) -> float | None:
        """Return the time of all decode steps since the last weight sync, those in which no drafter was asked too,
        relative to stock's; None: too little is known."""
        if not self._known:
            return None
        model, share = (self._stock, 1.0) if self._stock else (self.times.model, float(np.mean(self._ratios())))
        assert model is not None
        plain = self._seconds_by(model.at(self._usual).plain)
        for requests, (steps, _, context) in self._unasked.items():
            plain += steps * model.step(requests, requests, False, context / steps)
        return float(self._passed() / (share * plain)) if plain else None

    def sync(self) -> str | None:
        """Judge the rollout that a weight sync ends; return what has changed for the next, in words, or None. Two
        weight syncs without a step between them are one."""
        if not self._passed():
            return None
        compared, share, news = self.compare(), self.of_stock(), None
        if self.silent is not None:
            self._silent_left -= 1
            self.silent = self.silent if self._silent_left else None
        elif compared is not None and not compared.lost:
            self._silent_next = 1
        elif compared is not None:
            self._silent_left, self._silent_next = self._silent_next, min(2 * self._silent_next, MOST_SILENT)
            self.silent = (
                f"drafting lost a whole rollout: {compared.seconds:.2f} s of decode steps, "
                f"{compared.plain:.2f} s where no drafter is asked"
            )
            news = self.silent
        self.slow = None
        if compared is not None and share is not None and self._stock is not None:
            if share > 1.0 + LOSS + 3.0 * compared.scatter:
                self.slow = f"decode steps took {share:.2f} of those of the calibration's stock engine"
        self._trial, self._since_trial, self._trial_size = None, 0, 0
        self._restart()
        return news

    def take(self) -> dict[str, Any]:
        """Return the figures since the last weight sync, as plain numbers."""
        return {"of_stock": self.of_stock(), "silent": self.silent, "slow": self.slow}

    @property
    def _known(self) -> bool:
        return self.times.model is not None and len(self._samples) >= LEAST_SAMPLES

    def _passed(self) -> float:
        """Seconds of all steps since the last weight sync."""
        return self._seconds + float(sum(seconds for _, seconds, _ in self._unasked.values()))

    @property
    def _usual(self) -> float:
        """Tokens of context that a request had, on average over the steps in which a drafter was asked."""
        return self._context / max(1, self._requests)

    def _plain(self, context: float) -> Callable[[Floats], Floats]:
        """Seconds of steps in which no drafter is asked, by their requests, where each of these has so many tokens of
        context; interruptions have the share that they had in the samples."""
        assert self.times.model is not None
        model, share = self.times.model.at(context), float(np.mean(self._ratios()))
        return lambda requests: model.plain(requests) * share

    def _ratios(self) -> Floats:
        """The latest such steps' seconds over their model's, float64 [samples]."""
        assert self.times.model is not None
        requests, seconds, context = np.array(self._samples, dtype=float).T
        predicted = self.times.model.seconds(requests, requests, False, context)
        ratios: Floats = np.minimum(PAUSE, seconds / np.maximum(1e-9, predicted))
        return ratios

    def _seconds_by(self, step: Callable[[Floats], Floats]) -> float:
        """What the rollout's tokens would have taken in plain decoding: by rounds, where all requests began together,
        or at the rate of each step's batch, where they came and went; the longer of the two, in favour of drafts."""
        sizes = np.fromiter(self._shares, dtype=float, count=len(self._shares))
        rate = float(np.dot(np.fromiter(self._shares.values(), dtype=float), step(sizes))) if len(sizes) else 0.0
        return max(rate, seconds_of([*self._finished, *self._written], self._widest, step))

    def _end_trial(self, trial: _Trial) -> None:
        self._trial, self._since_trial = None, 0
        self._lost += max(0.0, trial.loss)
        if trial.gained:
            self.silent = None


class _Trial:
    """A few steps in which the drafter is asked, to see whether it gains time; the first is left out, in which it
    reads what it has missed."""

    def __init__(self) -> None:
        self._steps, self._drafted, self._seconds, self._plain = -1, 0, 0.0, 0.0
        self.loss = 0.0
        """Seconds beyond plain decoding, the first step included."""

    def step(self, seconds: float, plain: float, drafted: bool) -> None:
        """Take a step, and what its tokens would have taken without drafts, seconds."""
        self._steps += 1
        self.loss += seconds - plain
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
