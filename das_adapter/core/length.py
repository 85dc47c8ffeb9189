"""How long a response will be: from its problem's history, and from its length so far (DAS, section 4.3)."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from das_adapter.core.native import native

Floats = npt.NDArray[np.float64]
Response = tuple[int, int, int]
"""(problem, tokens of a response, weight version that wrote it)."""

Visits = dict[int, list[int]]
"""Lengths by the weight version that wrote them."""

_Z = np.linspace(-5.0, 5.0, 1001)
_NORMAL = np.array([0.5 * (1.0 + math.erf(z / math.sqrt(2.0))) for z in _Z])


class LengthClass(IntEnum):
    """Class of a response by its predicted length."""

    SHORT = 0
    MEDIUM = 1
    LONG = 2


class LengthModel:
    """Distribution of response lengths, over all problems and per problem, on a logarithmic grid.

    A problem's own lengths are weighted by their number, the population as `POPULATION` of them. Each length
    stands for a log-normal around it: the next rollout of a problem is about as long, not exactly. The classes' bounds
    are quantiles of the recent lengths, computed by every `refit`.
    """

    GRID = 64
    POPULATION = 2.0
    SPREAD = 0.25
    """Standard deviation of the log of a length around an observed one."""
    SHORT, LONG = 0.5, 0.8
    """Quantiles that bound the classes."""
    RECENT = 16
    """Weight versions that make up the population, the newest."""
    PROBLEMS = 2**17
    """Most problems whose own lengths are remembered; those not seen for longest are forgotten first."""

    def __init__(self, limit: int, window: int = 8) -> None:
        """
        Args:
            limit: longest response there can be (max_model_len will do).
            window: visits of a problem (weight versions that wrote responses of it) whose lengths are remembered.
        """
        self.limit = max(2, limit)
        self.window = window
        self.edges: Floats = np.geomspace(1.0, float(self.limit), self.GRID)
        """Lengths at which the distribution functions are tabulated, shape (GRID,)."""
        self.bounds = (0.0, float(self.limit))
        """Longest short and longest medium response; everything is medium before there is history."""
        self._log = np.log(self.edges)
        self._lengths: OrderedDict[int, Visits] = OrderedDict()
        self._everyone: Visits = {}
        self._population: Floats = self._log / self._log[-1]
        """Distribution over all problems. Without history a length is as likely in one octave as in the next."""

    def observe(self, problem: int, length: int, version: int) -> None:
        """Take the length in tokens of a finished response, and the weight version that wrote it."""
        if length > 0:
            _note(self._lengths.setdefault(problem, {}), version, length, self.window)
            self._lengths.move_to_end(problem)
            if len(self._lengths) > self.PROBLEMS:
                self._lengths.popitem(last=False)
            _note(self._everyone, version, length, self.RECENT)

    def refit(self) -> None:
        """Compute the population and the classes' bounds again, at a weight sync."""
        if self._everyone:
            lengths = _all(self._everyone)
            self.bounds = (float(np.quantile(lengths, self.SHORT)), float(np.quantile(lengths, self.LONG)))
            self._population = self._smooth(lengths)

    def cdf(self, problem: int) -> Floats:
        """Return the chance that a response of the problem is at most `edges` long, shape (GRID,); 1 at the last."""
        visits = self._lengths.get(problem)
        if not visits:
            return self._population
        seen = _all(visits)
        own = self._smooth(seen)
        mixed: Floats = (len(seen) * own + self.POPULATION * self._population) / (len(seen) + self.POPULATION)
        return mixed

    def expected(self) -> dict[int, float]:
        """Return the mean length in tokens of a response that has not begun, by problem that has lengths of its own:
        the mean of `cdf`."""
        own = [_all(visits) for visits in self._lengths.values()]
        if not own:
            return {}
        counts = np.array([len(lengths) for lengths in own])
        lengths, which = np.unique(np.concatenate(own), return_inverse=True)
        means = _mean_beyond(self._around(lengths), self.edges, np.zeros(len(lengths)))
        sums = np.add.reduceat(means[which], np.cumsum(counts) - counts)
        everyone = _mean_beyond(self._population[None, :], self.edges, np.zeros(1))
        expected = (sums + self.POPULATION * everyone) / (counts + self.POPULATION)
        return dict(zip(self._lengths, expected.tolist(), strict=True))

    def _smooth(self, lengths: Floats) -> Floats:
        """Distribution function of log-normals around the lengths, cut off at the limit."""
        centres, counts = np.unique(lengths, return_counts=True)
        cdf: Floats = counts @ self._around(centres) / len(lengths)
        return cdf

    def _around(self, lengths: Floats) -> Floats:
        """Distribution function of the log-normal around each length, shape (n, GRID)."""
        z = (self._log[None, :] - np.log(lengths)[:, None]) / self.SPREAD
        cdf: Floats = np.interp(z, _Z, _NORMAL)
        cdf[:, -1] = 1.0
        return cdf


class LengthLog:
    """The lengths of a run's last responses, in the order in which they arrived."""

    LONGEST = 2**17
    """Tokens; a longer response counts as this long when lengths are predicted."""
    KEPT = 2**18
    """Responses whose lengths are remembered."""

    def __init__(self, window: int) -> None:
        """`window`: visits of a problem that its predicted length is made from."""
        self._model = LengthModel(self.LONGEST, window)
        self._lengths: deque[Response] = deque(maxlen=self.KEPT)
        self._count = 0

    def add(self, lengths: Iterable[Response]) -> None:
        """Take finished responses (problem, tokens, weight version)."""
        for response in lengths:
            self._model.observe(*response)
            self._lengths.append(response)
            self._count += 1

    def since(self, cursor: int) -> tuple[int, list[Response]]:
        """Return what arrived after `cursor` (0: all that is kept), and the cursor to ask with next. A cursor that lies
        ahead is that of a log which was lost: all that is kept is new."""
        cursor = 0 if cursor > self._count else cursor
        new = max(0, min(self._count - cursor, len(self._lengths)))
        return self._count, list(itertools.islice(reversed(self._lengths), new))[::-1]

    def predictions(self) -> tuple[dict[int, float], float]:
        """Predict the response length of each problem, and the length above which a problem is long; empty and
        infinite before there is history.

        The distributions are those of the engines: over a problem's own visits, shrunk towards the population.
        """
        self._model.refit()
        expected = self._model.expected()
        return expected, float(np.quantile(list(expected.values()), LengthModel.LONG)) if expected else float("inf")


def beyond(cdf: Floats, edges: Floats, lengths: Floats, at: Floats) -> Floats:
    """Return the chance that a response is at most `at` long, given that it is longer than `lengths`.

    Args:
        cdf: shape (b, g), by request, at `edges`.
        edges: shape (g,), in geometric steps from 1.
        lengths: tokens written already, shape (b,).
        at: shape (b, k).

    Returns:
        Shape (b, k), 0 to 1.
    """
    known = _at(cdf, edges, lengths[:, None])
    left = np.maximum(1.0 - known, 1e-6)
    chance: Floats = np.clip((_at(cdf, edges, at) - known) / left, 0.0, 1.0)
    chance[at >= edges[-1]] = 1.0
    return chance


def expected_remaining(cdf: Floats, edges: Floats, lengths: Floats) -> Floats:
    """Return the mean tokens still to come, given the tokens that are there, shape (b,). Arguments as in `beyond`."""
    remaining: Floats = np.maximum(_mean_beyond(cdf, edges, lengths) - lengths, 1.0)
    return remaining


def classes(cdf: Floats, edges: Floats, lengths: Floats, bounds: Sequence[float]) -> npt.NDArray[np.int64]:
    """Return the most likely `LengthClass` of each request given its history and its length so far, shape (b,).

    This is DAS's argmax over c of P(c | l, Init), with the problem's distribution in place of its majority class.
    """
    at = np.broadcast_to(np.asarray(bounds, dtype=float), (len(lengths), 2))
    short, medium = beyond(cdf, edges, lengths, at).T
    likely: npt.NDArray[np.int64] = np.argmax(np.stack([short, medium - short, 1.0 - medium]), axis=0)
    floor = np.searchsorted(np.asarray(bounds, dtype=float), lengths, side="left")
    return np.maximum(likely, floor)


def _mean_beyond(cdf: Floats, edges: Floats, lengths: Floats) -> Floats:
    # Between two edges the mass sits in the middle; of the interval that `lengths` is in, only what lies beyond counts.
    known = _at(cdf, edges, lengths[:, None])
    low = np.concatenate([[0.0], edges[:-1]])
    mass = np.diff(np.maximum(cdf, known), axis=1, prepend=known)
    centre = 0.5 * (np.maximum(low, lengths[:, None]) + edges)
    mass[:, -1] += 1e-9
    mean: Floats = (mass * centre).sum(axis=1) / mass.sum(axis=1)
    return mean


def _at(cdf: Floats, edges: Floats, lengths: Floats) -> Floats:
    """Distribution functions at lengths of shape (b, k), linear in the logarithm between the edges."""
    found = np.empty(lengths.shape)
    native().interpolate(cdf, (len(edges) - 1) / math.log(edges[-1]), lengths, found)
    return found


def _note(visits: Visits, version: int, length: int, most: int) -> None:
    """Add a length to those of its weight version; of more than `most` versions the oldest is dropped."""
    visits.setdefault(version, []).append(length)
    if len(visits) > most:
        del visits[min(visits)]


def _all(visits: Visits) -> Floats:
    return np.array(list(itertools.chain.from_iterable(visits.values())), dtype=float)
