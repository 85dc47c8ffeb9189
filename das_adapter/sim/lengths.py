"""How many tokens the responses of a rollout have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from das_adapter.errors import DasError

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Lengths:
    """Draws response lengths."""

    cap: int
    """Maximum tokens."""
    within: float = 0.5
    """Share of the variance (of the logarithm) that samples of one problem have in common, also from one visit of it to
    the next."""
    seed: int = 0

    def draw(self, problems: Ints, samples: int, rng: np.random.Generator) -> Ints:
        """Return lengths of at least 1, int64 [problems, samples], of problems with these numbers."""
        own = np.array([np.random.default_rng((self.seed, int(p))).standard_normal() for p in problems])
        drawn = rng.standard_normal((len(problems), samples))
        z = math.sqrt(self.within) * own[:, None] + math.sqrt(1 - self.within) * drawn
        return np.clip(self.lengths(z), 1, self.cap).astype(np.int64)

    def lengths(self, z: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the lengths at normal deviates."""
        raise NotImplementedError


@dataclass(frozen=True)
class Tail(Lengths):
    """Log-normal lengths that end at a cap."""

    mean: float = 2000.0
    """Tokens, with the cap applied."""
    sigma: float = 0.8
    """Standard deviation of the logarithm, without the cap."""

    def __post_init__(self) -> None:
        if not 1 <= self.mean < self.cap or self.sigma <= 0:
            raise DasError(
                f"rollout.lengths: found mean {self.mean}, cap {self.cap}, sigma {self.sigma}, allowed: "
                "1 <= mean < cap, sigma > 0"
            )

    def lengths(self, z: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        low, high = 0.0, math.log(self.cap) + 6 * self.sigma  # of the logarithm's mean
        for _ in range(60):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if self._capped_mean(middle) < self.mean else (low, middle)
        return np.asarray(np.exp(low + self.sigma * z))

    def _capped_mean(self, location: float) -> float:
        z = (math.log(self.cap) - location) / self.sigma
        below = math.exp(location + self.sigma**2 / 2) * _normal(z - self.sigma)
        return below + self.cap * (1.0 - _normal(z))


@dataclass(frozen=True)
class Curve(Lengths):
    """Lengths whose number of running requests over time has a given shape: a digitised batch curve."""

    running: Sequence[tuple[float, float]] = ()
    """(tokens written or time, requests that run): times rise, requests fall, in any unit; the cap is the last."""

    def lengths(self, z: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        time, left = np.array(self.running, dtype=float).T
        if (np.diff(time) <= 0).any() or (np.diff(left) > 0).any() or left[0] <= 0:
            raise DasError(
                f"rollout.lengths.running: found {list(self.running)!r}, allowed: rising times and falling "
                "numbers of requests"
            )
        ended = 1.0 - left / left[0] + 1e-12 * np.arange(len(left))
        quantile = (np.argsort(np.argsort(z, axis=None)).reshape(z.shape) + 0.5) / z.size
        return np.asarray(np.interp(quantile, ended, time) / time[-1] * self.cap)


def _normal(z: float) -> float:
    return 0.5 * (1.0 + math.erf(z / math.sqrt(2.0)))
