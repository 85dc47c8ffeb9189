"""How long a response will be: from its problem's history, and from its length so far (DAS, section 4.3)."""

from __future__ import annotations

import functools
import math
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from das_adapter.core.history import WINDOW
from das_adapter.core.latency import Capacity
from das_adapter.core.native import native
from das_adapter.core.siblings import Moments

Floats = npt.NDArray[np.float64]

RESPONSE = np.dtype([("problem", "<u8"), ("tokens", "<i8"), ("version", "<i8")])
"""A finished response: its problem, its length in tokens, and the weight version that wrote it."""
Responses = npt.NDArray[np.void]
"""Finished responses, [n] of `RESPONSE`."""
PREDICTION = np.dtype([("problem", "<u8"), ("tokens", "<f8")])
"""The expected length of a problem's response."""
Predictions = npt.NDArray[np.void]
"""Expected lengths in the order of their problems, [n] of `PREDICTION`."""

Visits = dict[int, Floats]
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
    VISITS = 2**18
    """Most visits of all problems that are remembered; the problems not seen for longest are forgotten first."""

    def __init__(self, limit: int, window: int = WINDOW) -> None:
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
        self.class_lengths: Floats = np.array([0.0, 0.0, float(self.limit)])
        """Expected length by class, of those that are not short: the mean of all that are at least so long."""
        self._log = np.log(self.edges)
        self._lengths: OrderedDict[int, Visits] = OrderedDict()
        self._visits = 0
        """Visits in `_lengths`."""
        self._everyone: Visits = {}
        self._population: Floats = self._log / self._log[-1]
        """Distribution over all problems. Without history a length is as likely in one octave as in the next."""

    def observe(self, responses: Responses) -> list[int]:
        """Take finished responses; return the problems that are forgotten for them."""
        new = responses[responses["tokens"] > 0]
        new = new[np.lexsort((new["version"], new["problem"]))]
        tokens, keys = new["tokens"].astype(float), np.stack([new["problem"], new["version"].view(np.uint64)], axis=1)
        first = np.flatnonzero(np.r_[len(new) > 0, (keys[1:] != keys[:-1]).any(axis=1)])
        bounds = [*first.tolist(), len(new)]
        for (problem, _, version), begin, end in zip(new[first].tolist(), bounds, bounds[1:], strict=False):
            visits = self._lengths.setdefault(problem, {})
            self._visits += _note(visits, version, tokens[begin:end].copy(), self.window)
            self._lengths.move_to_end(problem)
        for version in np.unique(new["version"]).tolist():
            _note(self._everyone, version, tokens[new["version"] == version], self.RECENT)
        forgotten = []
        while self._visits > self.VISITS:
            problem, visits = self._lengths.popitem(last=False)
            self._visits -= len(visits)
            forgotten.append(problem)
        return forgotten

    def refit(self) -> None:
        """Compute the population and the classes' bounds again, at a weight sync."""
        if self._everyone:
            lengths = np.concatenate(list(self._everyone.values()))
            self.bounds = (float(np.quantile(lengths, self.SHORT)), float(np.quantile(lengths, self.LONG)))
            self._population = self._smooth(np.exp(np.round(np.log(lengths), 2)))
            everyone = np.broadcast_to(self._population, (2, self.GRID))
            self.class_lengths = np.append(0.0, _mean_beyond(everyone, self.edges, np.array(self.bounds)))

    def cdf(self, problem: int) -> Floats:
        """Return the chance that a response of the problem is at most `edges` long, shape (GRID,); 1 at the last."""
        seen = self.own(problem)
        if not len(seen):
            return self._population
        mixed: Floats = (len(seen) * self._smooth(seen) + self.POPULATION * self._population) / (
            len(seen) + self.POPULATION
        )
        return mixed

    def own(self, problem: int) -> Floats:
        """Return the lengths of a problem's remembered visits."""
        return np.concatenate([np.zeros(0), *self._lengths.get(problem, {}).values()])

    def mean(self) -> float:
        """Return the mean length in tokens over all problems."""
        return float(_mean_beyond(self._population[None, :], self.edges, np.zeros(1))[0])

    def means_around(self, lengths: Floats) -> Floats:
        """Return the mean of the log-normal around each length."""
        means: Floats = np.interp(np.log(lengths), *self._means)
        return means

    @functools.cached_property
    def _means(self) -> tuple[Floats, Floats]:
        at = np.geomspace(1.0, float(self.limit), 4096)
        return np.log(at), _mean_beyond(self._around(at), self.edges, np.zeros(len(at)))

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

    def __init__(self, window: int = WINDOW) -> None:
        """`window`: visits of a problem that its predicted length is made from."""
        self.count = 0
        """Responses that have arrived."""
        self._model = LengthModel(self.LONGEST, window)
        self._log: deque[Responses] = deque()
        self._kept = 0
        """Responses in `_log`."""
        self._sums: dict[int, tuple[int, float]] = {}
        """Of the lengths of each problem's remembered visits: how many, and the sum of their means."""

    def add(self, responses: Responses) -> None:
        """Take finished responses."""
        for problem in self._model.observe(responses):
            self._sums.pop(problem, None)
        for problem in np.unique(responses["problem"]).tolist():
            if len(own := self._model.own(problem)):
                self._sums[problem] = len(own), float(self._model.means_around(own).sum())
        self._log.append(responses)
        self.count += len(responses)
        self._kept += len(responses)
        while self._kept - len(self._log[0]) >= self.KEPT:
            self._kept -= len(self._log.popleft())

    def since(self, cursor: int, until: int | None = None) -> Responses:
        """Return what arrived after `cursor` others (0: all that is kept), up to `until` of all that arrived. A cursor
        that lies ahead is that of a log which was lost: all that is kept is new."""
        at, found = self.count, deque([np.zeros(0, RESPONSE)])
        cursor = max(0 if cursor > self.count else cursor, self.count - self.KEPT)
        for some in reversed(self._log):
            if at <= cursor:
                break
            at -= len(some)
            found.appendleft(some[max(0, cursor - at) : None if until is None else max(0, until - at)])
        return np.concatenate(found)

    def predictions(self) -> Predictions:
        """Predict the response length of each problem.

        The distributions are those of the engines: over a problem's own visits, shrunk towards the population.
        """
        self._model.refit()
        problems = np.fromiter(self._sums.keys(), np.uint64, len(self._sums))
        counts, sums = np.array(list(self._sums.values()), dtype=float).reshape(-1, 2).T
        predicted = np.zeros(len(problems), PREDICTION)
        order = np.argsort(problems)
        weight = LengthModel.POPULATION
        predicted["problem"] = problems[order]
        predicted["tokens"] = ((sums + weight * self._model.mean()) / (counts + weight))[order]
        return predicted


class Expected:
    """Expected lengths of responses, in tokens; a problem that is not known counts as the mean of the known. Beside
    them, what the run's engines have shown that decides where and when a request should start."""

    def __init__(
        self,
        lengths: Mapping[int, float] | Predictions = MappingProxyType({}),
        siblings: Moments = Moments(),
        capacity: Capacity | None = None,
    ) -> None:
        """
        Args:
            lengths: of known problems.
            siblings: how many tokens requests got from a forward pass.
            capacity: what a decode step holds that takes twice as long as an empty one.
        """
        self.siblings, self.capacity = siblings, capacity
        if isinstance(lengths, Mapping):
            lengths = np.array(sorted(lengths.items()), dtype=PREDICTION)
        self._problems = np.ascontiguousarray(lengths["problem"])
        self._tokens = lengths["tokens"]
        self.mean = float(self._tokens.mean()) if len(lengths) else 1000.0
        self.spread = float(self._tokens.std()) / self.mean if len(lengths) > 1 else 1.0
        """Standard deviation among problems, relative to the mean; 1 before two are known, as in recorded rollouts that
        reason (`benchmarks/results/routing.md`)."""

    def __contains__(self, problem: int) -> bool:
        return self._find(problem) is not None

    def __getitem__(self, problem: int) -> float:
        at = self._find(problem)
        return self.mean if at is None else float(self._tokens[at])

    def _find(self, problem: int) -> int | None:
        if problem < 0:
            return None
        at = int(self._problems.searchsorted(np.uint64(problem)))
        return at if at < len(self._problems) and self._problems[at] == problem else None


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


def _note(visits: Visits, version: int, lengths: Floats, most: int) -> int:
    """Add lengths to those of their weight version; of more than `most` versions the oldest is dropped. Return how many
    versions there are more."""
    before = len(visits)
    visits[version] = np.concatenate([visits[version], lengths]) if version in visits else lengths
    if len(visits) > most:
        del visits[min(visits)]
    return len(visits) - before
