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

from das_adapter.core import tuning
from das_adapter.core.native import native
from das_adapter.core.steps import Floats

RESPONSE = np.dtype([("problem", "<u8"), ("tokens", "<i8"), ("version", "<i8")])
"""A finished response: its problem, its length in tokens, and the weight version that
wrote it.
"""
Responses = npt.NDArray[np.void]
"""Finished responses, [n] of `RESPONSE`."""
LengthsByVersion = dict[int, bytes]
"""Lengths by the weight version that wrote them, int32: arrays would take several times
the memory.
"""

_OF_A_VERSION = 2**18
"""Maximum number of lengths that one weight version has: a server's weights may stay
as they are.
"""
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
    as `tuning.LENGTH_PRIOR_RESPONSES` of them. Each length stands for a log-normal
    around it: the next rollout of a problem is about as long, not exactly. The classes'
    bounds are quantiles of the recent lengths, computed by every `refit`.
    """

    GRID = 64
    """Points of the grid."""
    PROBLEMS = 2**18
    """Maximum number of problems that are remembered; those not seen for longest are
    forgotten first.
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
        self._lengths: OrderedDict[int, LengthsByVersion] = OrderedDict()
        self._everyone: LengthsByVersion = {}
        self._population: Floats = self._log / self._log[-1]
        """Distribution over all problems. Without history a length is as likely in one
        octave as in the next.
        """

    def observe(self, responses: Responses) -> None:
        """Add finished responses."""
        new = responses[responses["tokens"] > 0]
        by_problem = np.lexsort((new["version"], new["problem"]))
        new = new[by_problem]
        tokens = new["tokens"].astype(np.int32)
        for begin, end in _visits(new):
            problem, _, version = new[begin].item()
            lengths = self._lengths.setdefault(problem, {})
            _add_lengths(lengths, version, tokens[begin:end], tuning.HISTORY_WINDOW)
            self._lengths.move_to_end(problem)
        for version in np.unique(new["version"]).tolist():
            of_version = tokens[new["version"] == version]
            kept = tuning.POPULATION_VERSIONS
            _add_lengths(self._everyone, version, of_version, kept)
        while len(self._lengths) > self.PROBLEMS:
            self._lengths.popitem(last=False)

    def refit(self) -> None:
        """Compute the population and the classes' bounds again, at a weight sync."""
        if not self._everyone:
            return
        lengths = _join_lengths(self._everyone)
        short = float(np.quantile(lengths, tuning.SHORT_QUANTILE))
        long = float(np.quantile(lengths, tuning.LONG_QUANTILE))
        self.bounds = (short, long)
        rounded = np.round(np.log(lengths), 2)
        self._population = self._smooth(np.exp(rounded))
        both = np.broadcast_to(self._population, (2, self.GRID))
        means = _mean_beyond(both, self.edges, np.array(self.bounds))
        self.class_lengths = np.append(0.0, means)

    def cdf(self, problem: int) -> Floats:
        """Return the chance that a response of the problem is at most `edges` long,
        shape (GRID,); 1 at the last.
        """
        lengths = self.lengths_of(problem)
        num_seen = len(lengths)
        if not num_seen:
            return self._population
        prior = tuning.LENGTH_PRIOR_RESPONSES
        own = num_seen * self._smooth(lengths)
        return (own + prior * self._population) / (num_seen + prior)

    def lengths_of(self, problem: int) -> Floats:
        """Return the lengths of a problem's remembered visits."""
        return _join_lengths(self._lengths.get(problem, {}))

    def expected(self) -> dict[int, float]:
        """Return the mean length of each problem's remembered visits, shrunk towards
        that of all problems.
        """
        if not self._everyone:
            return {}
        prior = tuning.LENGTH_PRIOR_RESPONSES
        mean = float(_join_lengths(self._everyone).mean())
        prior_tokens = prior * mean
        expected = {}
        for problem in self._lengths:
            lengths = self.lengths_of(problem)
            tokens = float(lengths.sum())
            expected[problem] = (prior_tokens + tokens) / (prior + len(lengths))
        return expected

    def _smooth(self, lengths: Floats) -> Floats:
        """Return the distribution of lengths, each spread around itself, shape
        (GRID,).
        """
        centres, counts = np.unique(lengths, return_counts=True)
        distance = self._log[None, :] - np.log(centres)[:, None]
        around = np.interp(distance / tuning.LENGTH_SPREAD, _Z, _NORMAL)
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
        """Add finished responses."""
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
        kept: Responses = np.concatenate([np.zeros(0, RESPONSE), *self._log])
        kept = kept[-self.KEPT :]
        forgotten = self.count - len(kept)
        begin = 0
        if cursor <= self.count:
            begin = max(0, cursor - forgotten)
        if until is None:
            return kept[begin:]
        end = max(0, until - forgotten)
        return kept[begin:end]

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
        self.mean = tuning.UNKNOWN_LENGTH_TOKENS
        """Mean of the known lengths."""
        if lengths:
            self.mean = sum(lengths.values()) / len(lengths)

    def __contains__(self, problem: int) -> bool:
        return problem in self._lengths

    def __getitem__(self, problem: int) -> float:
        return self._lengths.get(problem, self.mean)


def chance_ended_by(
    cdf: Floats, edges: Floats, lengths: Floats, bounds: Floats
) -> Floats:
    """Return the chance that a response is at most so long, given that it is longer
    than `lengths`.

    Args:
        cdf: distribution of each request's length at `edges`, shape (b, g).
        edges: shape (g,), in geometric steps from 1.
        lengths: tokens written already, shape (b,).
        bounds: shape (b, k).

    Returns:
        Shape (b, k), 0 to 1.
    """
    ended = _cdf_at(cdf, edges, lengths[:, None])
    going_on = np.maximum(1.0 - ended, 1e-6)
    ends_by = _cdf_at(cdf, edges, bounds) - ended
    chance: Floats = np.clip(ends_by / going_on, 0.0, 1.0)
    chance[bounds >= edges[-1]] = 1.0
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
    limits = np.asarray(bounds, dtype=float)
    both = np.broadcast_to(limits, (len(lengths), 2))
    short, not_long = chance_ended_by(cdf, edges, lengths, both).T
    chances = np.stack([short, not_long - short, 1.0 - not_long])
    likely: npt.NDArray[np.int64] = np.argmax(chances, axis=0)
    already = np.searchsorted(limits, lengths, side="left")
    return np.maximum(likely, already)


def _mean_beyond(cdf: Floats, edges: Floats, lengths: Floats) -> Floats:
    """Return the mean length of responses that are longer than `lengths`, shape (b,).

    Between two edges the mass sits in the middle; of the interval that `lengths` is in,
    only what lies beyond counts.
    """
    begun = lengths[:, None]
    ended = _cdf_at(cdf, edges, begun)
    mass = np.diff(np.maximum(cdf, ended), axis=1, prepend=ended)
    mass[:, -1] += 1e-9
    low = np.concatenate([[0.0], edges[:-1]])
    centre = 0.5 * (np.maximum(low, begun) + edges)
    return (mass * centre).sum(axis=1) / mass.sum(axis=1)


def _cdf_at(cdf: Floats, edges: Floats, lengths: Floats) -> Floats:
    """Return distribution functions at lengths of shape (b, k), linear in the logarithm
    between the edges.
    """
    found = np.empty(lengths.shape)
    edges_per_log = (len(edges) - 1) / math.log(edges[-1])
    native().interpolate(cdf, edges_per_log, lengths, found)
    return found


def _visits(responses: Responses) -> list[tuple[int, int]]:
    """Return the bounds of each run of responses of one problem and weight version."""
    if not len(responses):
        return []
    problems = responses["problem"]
    versions = responses["version"]
    other_problem = problems[1:] != problems[:-1]
    other_version = versions[1:] != versions[:-1]
    first = 1 + np.flatnonzero(other_problem | other_version)
    begins = [0, *first.tolist()]
    ends = [*begins[1:], len(responses)]
    return list(zip(begins, ends, strict=True))


def _join_lengths(lengths: LengthsByVersion) -> Floats:
    """Return all of the lengths."""
    joined = b"".join(lengths.values())
    return np.frombuffer(joined, np.int32).astype(float)


def _add_lengths(
    lengths: LengthsByVersion,
    version: int,
    new: npt.NDArray[np.int32],
    max_versions: int,
) -> None:
    """Add lengths to those of their weight version; of more than so many versions the
    oldest is dropped, of more than `_OF_A_VERSION` lengths the first.
    """
    joined = lengths.get(version, b"") + new.tobytes()
    lengths[version] = joined[-4 * _OF_A_VERSION :]
    if len(lengths) > max_versions:
        del lengths[min(lengths)]
