"""How long a response will be: from its problem's history, and from its length so far
(DAS, section 4.3).
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from das_adapter.core.history import WINDOW
from das_adapter.core.native import native
from das_adapter.core.steps import Floats

RESPONSE = np.dtype([("problem", "<u8"), ("tokens", "<i8"), ("version", "<i8")])
"""A finished response: its problem, its length in tokens, and the weight version that
wrote it.
"""
Responses = npt.NDArray[np.void]
"""Finished responses, [n] of `RESPONSE`."""
Visits = dict[int, bytes]
"""Lengths by the weight version that wrote them, int32: arrays would take several times
the memory.
"""

_OF_A_VERSION = 2**18
"""Most lengths that one weight version has: a server's weights may stay as they are."""
_Z = np.linspace(-5.0, 5.0, 1001)
_NORMAL = np.array([0.5 * (1.0 + math.erf(z / math.sqrt(2.0))) for z in _Z])


class LengthClass(IntEnum):
    """Class of a response by its predicted length."""

    SHORT = 0
    MEDIUM = 1
    LONG = 2


class LengthModel:
    """Distribution of response lengths, over all problems and per problem, on a
    logarithmic grid.

    The lengths of a problem's last visits are weighted by their number, the population
    as `POPULATION` of them. Each length stands for a log-normal around it: the next
    rollout of a problem is about as long, not exactly. The classes' bounds are
    quantiles of the recent lengths, computed by every `refit`.
    """

    GRID = 64
    POPULATION = 2.0
    SPREAD = 0.25
    """Standard deviation of the log of a length around an observed one."""
    SHORT, LONG = 0.5, 0.8
    """Quantiles that bound the classes."""
    RECENT = 16
    """Weight versions that make up the population, the newest."""
    PROBLEMS = 2**18
    """Most problems that are remembered; those not seen for longest are forgotten
    first.
    """

    def __init__(self, limit: int = 2**17) -> None:
        """`limit`: longest response there can be (max_model_len will do)."""
        self.limit = max(2, limit)
        self.edges: Floats = np.geomspace(1.0, float(self.limit), self.GRID)
        """Lengths at which the distribution functions are tabulated, shape (GRID,)."""
        self.bounds = (0.0, float(self.limit))
        """Longest short and longest medium response; everything is medium before there
        is history.
        """
        self.class_lengths: Floats = np.array([0.0, 0.0, float(self.limit)])
        """Expected length by class, of those that are not short: the mean of all that
        are at least so long.
        """
        self._log = np.log(self.edges)
        self._lengths: OrderedDict[int, Visits] = OrderedDict()
        self._everyone: Visits = {}
        self._population: Floats = self._log / self._log[-1]
        """Distribution over all problems. Without history a length is as likely in one
        octave as in the next.
        """

    def observe(self, responses: Responses) -> None:
        """Take finished responses."""
        new = responses[responses["tokens"] > 0]
        new = new[np.lexsort((new["version"], new["problem"]))]
        tokens = new["tokens"].astype(np.int32)
        keys = np.stack([new["problem"], new["version"].view(np.uint64)], axis=1)
        first = np.flatnonzero(np.r_[len(new) > 0, (keys[1:] != keys[:-1]).any(axis=1)])
        bounds = [*first.tolist(), len(new)]
        for (problem, _, version), begin, end in zip(
            new[first].tolist(), bounds, bounds[1:], strict=False
        ):
            _note(
                self._lengths.setdefault(problem, {}),
                version,
                tokens[begin:end],
                WINDOW,
            )
            self._lengths.move_to_end(problem)
        for version in np.unique(new["version"]).tolist():
            _note(
                self._everyone, version, tokens[new["version"] == version], self.RECENT
            )
        while len(self._lengths) > self.PROBLEMS:
            self._lengths.popitem(last=False)

    def refit(self) -> None:
        """Compute the population and the classes' bounds again, at a weight sync."""
        if self._everyone:
            lengths = _all(self._everyone)
            self.bounds = (
                float(np.quantile(lengths, self.SHORT)),
                float(np.quantile(lengths, self.LONG)),
            )
            self._population = self._smooth(np.exp(np.round(np.log(lengths), 2)))
            everyone = np.broadcast_to(self._population, (2, self.GRID))
            self.class_lengths = np.append(
                0.0, _mean_beyond(everyone, self.edges, np.array(self.bounds))
            )

    def cdf(self, problem: int) -> Floats:
        """Return the chance that a response of the problem is at most `edges` long,
        shape (GRID,); 1 at the last.
        """
        seen = self.lengths_of(problem)
        if not len(seen):
            return self._population
        return (len(seen) * self._smooth(seen) + self.POPULATION * self._population) / (
            len(seen) + self.POPULATION
        )

    def lengths_of(self, problem: int) -> Floats:
        """Return the lengths of a problem's remembered visits."""
        return _all(self._lengths.get(problem, {}))

    def expected(self) -> dict[int, float]:
        """Return the mean length of each problem's remembered visits, shrunk towards
        that of all problems.
        """
        if not self._everyone:
            return {}
        prior = self.POPULATION * float(_all(self._everyone).mean())
        own = {problem: self.lengths_of(problem) for problem in self._lengths}
        return {
            problem: (prior + float(seen.sum())) / (self.POPULATION + len(seen))
            for problem, seen in own.items()
        }

    def _smooth(self, lengths: Floats) -> Floats:
        centres, counts = np.unique(lengths, return_counts=True)
        around = np.interp(
            (self._log[None, :] - np.log(centres)[:, None]) / self.SPREAD, _Z, _NORMAL
        )
        around[:, -1] = 1.0
        return counts @ around / len(lengths)


class LengthLog:
    """The lengths of a run's last responses, in the order in which they arrived."""

    KEPT = 2**18
    """Responses whose lengths are remembered."""

    def __init__(self) -> None:
        self.count = 0
        """Responses that have arrived."""
        self._model = LengthModel()
        self._log: deque[Responses] = deque()
        self._kept = 0

    def add(self, responses: Responses) -> None:
        """Take finished responses."""
        self._model.observe(responses)
        self._log.append(responses)
        self.count += len(responses)
        self._kept += len(responses)
        while self._kept - len(self._log[0]) >= self.KEPT:
            self._kept -= len(self._log.popleft())

    def since(self, cursor: int, until: int | None = None) -> Responses:
        """Return what arrived after `cursor` others (0: all that is kept), up to
        `until` of all that arrived. A cursor that lies ahead is that of a log which was
        lost: all that is kept is new.
        """
        kept: Responses = np.concatenate([np.zeros(0, RESPONSE), *self._log])[
            -self.KEPT :
        ]
        forgotten = self.count - len(kept)
        begin = max(0, cursor - forgotten) if cursor <= self.count else 0
        return kept[begin : None if until is None else max(0, until - forgotten)]

    def predictions(self) -> dict[int, float]:
        """Predict the response length of each problem, see `LengthModel.expected`."""
        return self._model.expected()


class ExpectedLengths:
    """Expected lengths of responses, in tokens; a problem that is not known counts as
    the mean of the known.
    """

    def __init__(self, lengths: Mapping[int, float] = MappingProxyType({})) -> None:
        """`lengths`: of known problems."""
        self._lengths = lengths
        self.mean = sum(lengths.values()) / len(lengths) if lengths else 1000.0

    def __contains__(self, problem: int) -> bool:
        return problem in self._lengths

    def __getitem__(self, problem: int) -> float:
        return self._lengths.get(problem, self.mean)


def chance_ended_by(cdf: Floats, edges: Floats, lengths: Floats, at: Floats) -> Floats:
    """Return the chance that a response is at most `at` long, given that it is longer
    than `lengths`.

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
    """Return the mean tokens still to come, given the tokens that are there, shape
    (b,). Arguments as in `chance_ended_by`.
    """
    return np.maximum(_mean_beyond(cdf, edges, lengths) - lengths, 1.0)


def classes(
    cdf: Floats, edges: Floats, lengths: Floats, bounds: Sequence[float]
) -> npt.NDArray[np.int64]:
    """Return the most likely `LengthClass` of each request given its history and its
    length so far, shape (b,).

    This is DAS's argmax over c of P(c | l, Init), with the problem's distribution in
    place of its majority class.
    """
    at = np.broadcast_to(np.asarray(bounds, dtype=float), (len(lengths), 2))
    short, medium = chance_ended_by(cdf, edges, lengths, at).T
    likely: npt.NDArray[np.int64] = np.argmax(
        np.stack([short, medium - short, 1.0 - medium]), axis=0
    )
    floor = np.searchsorted(np.asarray(bounds, dtype=float), lengths, side="left")
    return np.maximum(likely, floor)


def _mean_beyond(cdf: Floats, edges: Floats, lengths: Floats) -> Floats:
    # Between two edges the mass sits in the middle; of the interval that `lengths` is
    # in, only what lies beyond counts.
    known = _at(cdf, edges, lengths[:, None])
    low = np.concatenate([[0.0], edges[:-1]])
    mass = np.diff(np.maximum(cdf, known), axis=1, prepend=known)
    centre = 0.5 * (np.maximum(low, lengths[:, None]) + edges)
    mass[:, -1] += 1e-9
    return (mass * centre).sum(axis=1) / mass.sum(axis=1)


def _at(cdf: Floats, edges: Floats, lengths: Floats) -> Floats:
    """Distribution functions at lengths of shape (b, k), linear in the logarithm
    between the edges.
    """
    found = np.empty(lengths.shape)
    native().interpolate(cdf, (len(edges) - 1) / math.log(edges[-1]), lengths, found)
    return found


def _all(visits: Visits) -> Floats:
    return np.frombuffer(b"".join(visits.values()), np.int32).astype(float)


def _note(
    visits: Visits, version: int, lengths: npt.NDArray[np.int32], most: int
) -> None:
    """Add lengths to those of their weight version; of more than `most` versions the
    oldest is dropped, of more than `_OF_A_VERSION` lengths the first.
    """
    visits[version] = (visits.get(version, b"") + lengths.tobytes())[
        -4 * _OF_A_VERSION :
    ]
    if len(visits) > most:
        del visits[min(visits)]
