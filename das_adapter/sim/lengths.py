"""How many tokens the responses of a rollout have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from das_adapter.errors import DasError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Lengths(Protocol):
    """Draws response lengths."""

    def draw(self, problems: Ints, samples: int, rng: np.random.Generator) -> Ints:
        """Return lengths of at least 1, int64 [problems, samples], of problems with these numbers."""
        ...


@dataclass(frozen=True)
class Tail:
    """Log-normal lengths that end at a cap, correlated within a problem and from one visit of it to the next."""

    mean: float
    """Tokens, with the cap applied."""
    cap: int
    sigma: float = 0.8
    """Standard deviation of the logarithm, without the cap."""
    within: float = 0.5
    """Share of its variance that samples of one problem have in common."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.mean < self.cap or not 0 <= self.within <= 1 or self.sigma <= 0:
            raise DasError(
                f"rollout.lengths: found mean {self.mean}, cap {self.cap}, sigma {self.sigma}, within "
                f"{self.within}, allowed: 1 <= mean < cap, sigma > 0, 0 <= within <= 1"
            )

    @property
    def location(self) -> float:
        """Mean of the logarithm with which the capped mean is `mean`."""
        low, high = 0.0, math.log(self.cap) + 6 * self.sigma
        for _ in range(60):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if self._capped_mean(middle) < self.mean else (low, middle)
        return low

    def _capped_mean(self, location: float) -> float:
        z = (math.log(self.cap) - location) / self.sigma
        below = math.exp(location + self.sigma**2 / 2) * _normal(z - self.sigma)
        return below + self.cap * (1.0 - _normal(z))

    def draw(self, problems: Ints, samples: int, rng: np.random.Generator) -> Ints:
        """See `Lengths`."""
        z = _correlated(problems, samples, self.within, self.seed, rng)
        return np.clip(np.exp(self.location + self.sigma * z), 1, self.cap).astype(np.int64)


@dataclass(frozen=True)
class Curve:
    """Lengths whose number of running requests over time has a given shape: a digitised batch curve."""

    running: Sequence[tuple[float, float]]
    """(tokens written or time, requests that run): times rise, requests fall, in any unit."""
    longest: int
    """Tokens at the last time."""
    within: float = 0.5
    """As in `Tail`."""
    seed: int = 0

    def draw(self, problems: Ints, samples: int, rng: np.random.Generator) -> Ints:
        """See `Lengths`."""
        time, left = np.array(self.running, dtype=float).T
        if (np.diff(time) <= 0).any() or (np.diff(left) > 0).any() or left[0] <= 0:
            raise DasError(
                f"rollout.lengths.running: found {list(self.running)!r}, allowed: rising times and falling "
                "numbers of requests"
            )
        z = _correlated(problems, samples, self.within, self.seed, rng)
        ended = 1.0 - left / left[0]
        order = np.argsort(np.argsort(z, axis=None)).reshape(z.shape)
        quantile = (order + 0.5) / z.size
        tokens = np.interp(quantile, ended + 1e-12 * np.arange(len(ended)), time) / time[-1] * self.longest
        clipped: Ints = np.clip(tokens, 1, self.longest).astype(np.int64)
        return clipped


def _correlated(problems: Ints, samples: int, within: float, seed: int, rng: np.random.Generator) -> Floats:
    """Draw normal deviates [problems, samples], of whose variance those of one problem have a share in common; a
    problem's own part depends on its number alone."""
    own = np.array([np.random.default_rng((seed, int(p))).standard_normal() for p in problems])
    drawn = rng.standard_normal((len(problems), samples))
    return np.asarray(math.sqrt(within) * own[:, None] + math.sqrt(1 - within) * drawn)


def _normal(z: float) -> float:
    return 0.5 * (1.0 + math.erf(z / math.sqrt(2.0)))
