"""How long a response will be: from its problem's history, and from its length so far
(DAS, section 4.3).
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from das_adapter.core import tuning
from das_adapter.core.native import native
from das_adapter.core.steps import Bools, Floats, Ints

RESPONSE = np.dtype(
    [
        ("problem", "<u8"),
        ("tokens", "<i8"),
        ("version", "<i8"),
    ]
)
"""A finished response: its problem, its length in tokens, and the weight version that
wrote it.
"""
Responses = npt.NDArray[np.void]
"""Finished responses, [n] of `RESPONSE`."""
LengthsByVersion = dict[int, bytes]
"""Lengths by the weight version that wrote them, int32: arrays would take several times
the memory.
"""

_BYTES_OF_A_VERSION = 4 * 2**18
"""Maximum bytes of the lengths that one weight version has: a server's weights may stay
as they are.
"""


def _normal_cdf(z: float) -> float:
    """Return the distribution function of the standard normal distribution."""
    scaled = z / math.sqrt(2.0)
    return 0.5 * (1.0 + math.erf(scaled))


_Z = np.linspace(-5.0, 5.0, 1001)
_NORMAL = np.array([_normal_cdf(z) for z in _Z])
"""The distribution function at `_Z`."""


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

    longest: int
    """Tokens of the longest response that there can be."""
    edges: Floats
    """Lengths at which the distribution functions are tabulated, shape (GRID,)."""
    bounds: tuple[float, float]
    """Longest short and longest medium response; everything is medium before there is
    history.
    """
    class_lengths: Floats
    """Expected length by class, of those that are not short: the mean of all that are
    at least so long.
    """
    _log: Floats
    """Logarithms of `edges`."""
    _population: Floats
    """Distribution over all problems. Without history a length is as likely in one
    octave as in the next.
    """

    def __init__(self, longest: int = 2**17) -> None:
        """`longest`: longest response there can be (max_model_len will do)."""
        self.longest = max(2, longest)
        last = float(self.longest)
        edges = np.geomspace(1.0, last, self.GRID)
        log = np.log(edges)
        longest_log = log[-1]
        self.edges = edges
        self.bounds = (0.0, last)
        self.class_lengths = np.array([0.0, 0.0, last])
        self._log = log
        self._population = log / longest_log
        self._lengths = OrderedDict[int, LengthsByVersion]()
        """Lengths of each problem, the one seen last at the end."""
        self._everyone: LengthsByVersion = {}
        """Lengths of all problems."""

    def observe(self, responses: Responses) -> None:
        """Add finished responses."""
        is_text = responses["tokens"] > 0
        new = responses[is_text]
        problems = new["problem"]
        versions = new["version"]
        by_problem = np.lexsort((versions, problems))
        new = new[by_problem]
        self._observe_problems(new)
        self._observe_everyone(new)

    def _observe_problems(self, new: Responses) -> None:
        """Add responses, ordered by problem and version, to those of their problems."""
        tokens = new["tokens"].astype(np.int32)
        for begin, end in _visits(new):
            first = new[begin]
            problem, _, version = first.item()
            lengths = self._lengths.setdefault(problem, {})
            _add_lengths(
                lengths=lengths,
                version=version,
                new=tokens[begin:end],
                max_versions=tuning.LENGTHS_WINDOW,
            )
            self._lengths.move_to_end(problem)
        while len(self._lengths) > self.PROBLEMS:
            self._lengths.popitem(last=False)

    def _observe_everyone(self, new: Responses) -> None:
        """Add responses, ordered by problem, to those of all problems."""
        tokens = new["tokens"].astype(np.int32)
        versions = new["version"]
        different = np.unique(versions)
        for version in different.tolist():
            has_version = versions == version
            _add_lengths(
                lengths=self._everyone,
                version=version,
                new=tokens[has_version],
                max_versions=tuning.POPULATION_VERSIONS,
            )

    def refit(self) -> None:
        """Compute the population and the classes' bounds again, at a weight sync."""
        if not self._everyone:
            return
        lengths = _join_lengths(self._everyone)
        longest_short = np.quantile(lengths, tuning.SHORT_QUANTILE)
        longest_medium = np.quantile(lengths, tuning.LONG_QUANTILE)
        self.bounds = (
            float(longest_short),
            float(longest_medium),
        )
        log = np.log(lengths)
        rounded_log = np.round(log, 2)
        rounded_lengths = np.exp(rounded_log)
        self._population = self._smooth(rounded_lengths)
        shape = 2, self.GRID
        population = np.broadcast_to(self._population, shape)
        bounds = np.array(self.bounds)
        means = _mean_beyond(population, self.edges, bounds)
        self.class_lengths = np.append(0.0, means)

    def cdf(self, problem: int) -> Floats:
        """Return the chance that a response of the problem is at most `edges` long,
        shape (GRID,); 1 at the last.
        """
        lengths = self.lengths_of(problem)
        num_seen = len(lengths)
        if not num_seen:
            return self._population
        own = num_seen * self._smooth(lengths)
        num_prior = tuning.LENGTH_PRIOR_RESPONSES
        prior = num_prior * self._population
        num_responses = num_seen + num_prior
        return (own + prior) / num_responses

    def lengths_of(self, problem: int) -> Floats:
        """Return the lengths of a problem's remembered visits."""
        lengths = self._lengths.get(problem, {})
        return _join_lengths(lengths)

    def expected(self) -> dict[int, float]:
        """Return the mean length of each problem's remembered visits, shrunk towards
        that of all problems.
        """
        if not self._everyone:
            return {}
        all_lengths = _join_lengths(self._everyone)
        mean = float(all_lengths.mean())
        num_prior = tuning.LENGTH_PRIOR_RESPONSES
        prior_tokens = num_prior * mean
        expected = {}
        for problem in self._lengths:
            lengths = self.lengths_of(problem)
            tokens = prior_tokens + float(lengths.sum())
            num_responses = num_prior + len(lengths)
            expected[problem] = tokens / num_responses
        return expected

    def _smooth(self, lengths: Floats) -> Floats:
        """Return the distribution of lengths, each spread around itself, shape
        (GRID,).
        """
        centres, counts = np.unique(lengths, return_counts=True)
        # one row for each of the lengths, one column for each edge
        log_centres = np.log(centres)[:, None]
        log_edges = self._log[None, :]
        distance = log_edges - log_centres
        z = distance / tuning.LENGTH_SPREAD
        around = np.interp(z, _Z, _NORMAL)
        around[:, -1] = 1.0
        num_ended = counts @ around
        return num_ended / len(lengths)


class LengthLog:
    """The lengths of a run's last responses, in the order in which they arrived."""

    KEPT = 2**18
    """Responses whose lengths are remembered."""

    def __init__(self) -> None:
        self.count = 0
        """Responses that have arrived."""
        self._model = LengthModel()
        self._log = deque[Responses]()
        self._kept = 0
        """Responses in `_log`."""

    def add(self, responses: Responses) -> None:
        """Add finished responses."""
        num_new = len(responses)
        self._model.observe(responses)
        self._log.append(responses)
        self.count += num_new
        self._kept += num_new
        while True:
            num_oldest = len(self._log[0])
            if self._kept - num_oldest < self.KEPT:
                break
            self._log.popleft()
            self._kept -= num_oldest

    def since(self, cursor: int, until: int | None = None) -> Responses:
        """Return what arrived after `cursor` others (0: all that is kept), up to
        `until` of all that arrived. A cursor that lies ahead is that of a log which was
        lost: all that is kept is new.
        """
        kept = self._all_kept()
        num_kept = len(kept)
        num_forgotten = self.count - num_kept
        begin = 0
        if cursor <= self.count:
            begin = cursor - num_forgotten
            begin = max(0, begin)
        end = num_kept
        if until is not None:
            end = until - num_forgotten
            end = max(0, end)
        return kept[begin:end]

    def _all_kept(self) -> Responses:
        """Return the last `KEPT` responses."""
        nothing = np.zeros(0, RESPONSE)
        parts = [nothing, *self._log]
        kept: Responses = np.concatenate(parts)
        return kept[-self.KEPT :]

    def predictions(self) -> dict[int, float]:
        """Predict the response length of each problem, see `LengthModel.expected`."""
        return self._model.expected()


_NO_LENGTHS: Mapping[int, float] = MappingProxyType({})


class ExpectedLengths:
    """Expected lengths of responses, in tokens; a problem that is not known counts as
    the mean of the known.
    """

    def __init__(self, lengths: Mapping[int, float] = _NO_LENGTHS) -> None:
        """`lengths`: of known problems."""
        self._lengths = lengths
        self.mean = tuning.UNKNOWN_LENGTH_TOKENS
        """Mean of the known lengths."""
        if lengths:
            tokens = sum(lengths.values())
            self.mean = tokens / len(lengths)

    def __contains__(self, problem: int) -> bool:
        return problem in self._lengths

    def __getitem__(self, problem: int) -> float:
        return self._lengths.get(problem, self.mean)


def chance_ended_by(
    cdf: Floats,
    edges: Floats,
    lengths: Floats,
    bounds: Floats,
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
    now = lengths[:, None]
    ended = _cdf_at(cdf, edges, now)
    ended_by = _cdf_at(cdf, edges, bounds)
    ends_by = ended_by - ended
    going_on = np.maximum(1.0 - ended, 1e-6)
    ratio = ends_by / going_on
    chance: Floats = np.clip(ratio, 0.0, 1.0)
    beyond_longest = bounds >= edges[-1]
    chance[beyond_longest] = 1.0
    return chance


def expected_remaining(
    cdf: Floats,
    edges: Floats,
    lengths: Floats,
) -> Floats:
    """Return the mean tokens still to come, given the tokens that are there, shape
    (b,). Arguments as in `chance_ended_by`.
    """
    mean_lengths = _mean_beyond(cdf, edges, lengths)
    return np.maximum(mean_lengths - lengths, 1.0)


def classes(
    cdf: Floats,
    edges: Floats,
    lengths: Floats,
    bounds: Sequence[float],
) -> Ints:
    """Return the most likely `LengthClass` of each request given its history and its
    length so far, shape (b,).

    This is DAS's argmax over c of P(c | l, Init), with the problem's distribution in
    place of its majority class.
    """
    class_bounds = np.asarray(bounds, dtype=float)
    shape = len(lengths), 2
    of_each = np.broadcast_to(class_bounds, shape)
    ended_by = chance_ended_by(cdf, edges, lengths, of_each)
    short, not_long = ended_by.T
    medium = not_long - short
    long = 1.0 - not_long
    chances = np.stack([short, medium, long])
    likely: Ints = np.argmax(chances, axis=0)
    already = np.searchsorted(class_bounds, lengths, side="left")
    return np.maximum(likely, already)


def _mean_beyond(
    cdf: Floats,
    edges: Floats,
    lengths: Floats,
) -> Floats:
    """Return the mean length of responses that are longer than `lengths`, shape (b,).

    Between two edges the mass sits in the middle; of the interval that `lengths` is in,
    only what lies beyond counts.
    """
    now = lengths[:, None]
    ended = _cdf_at(cdf, edges, now)
    ended_by = np.maximum(cdf, ended)
    mass = np.diff(ended_by, axis=1, prepend=ended)
    mass[:, -1] += 1e-9
    total = mass.sum(axis=1)
    lower_edges = np.append(0.0, edges[:-1])
    begins = np.maximum(lower_edges, now)
    sums = begins + edges
    middle = 0.5 * sums
    weighted = mass * middle
    tokens = weighted.sum(axis=1)
    return tokens / total


def _cdf_at(
    cdf: Floats,
    edges: Floats,
    lengths: Floats,
) -> Floats:
    """Return distribution functions at lengths of shape (b, k), linear in the logarithm
    between the edges.
    """
    values = np.empty(lengths.shape)
    num_intervals = len(edges) - 1
    longest_log = math.log(edges[-1])
    edges_per_log = num_intervals / longest_log
    native().interpolate(cdf, edges_per_log, lengths, values)
    return values


def _visits(responses: Responses) -> list[tuple[int, int]]:
    """Return the bounds of each run of responses of one problem and weight version."""
    if not len(responses):
        return []
    other_problem = _differs_from_next(responses["problem"])
    other_version = _differs_from_next(responses["version"])
    is_last = other_problem | other_version
    last = np.flatnonzero(is_last)
    first = last + 1
    bounds = [0, *first.tolist()]
    bounds.append(len(responses))
    visits = itertools.pairwise(bounds)
    return list(visits)


def _differs_from_next(values: Ints) -> Bools:
    """Return whether each value but the last differs from the next."""
    these = values[:-1]
    next_ones = values[1:]
    return next_ones != these


def _join_lengths(lengths: LengthsByVersion) -> Floats:
    """Return all of the lengths."""
    joined = b"".join(lengths.values())
    tokens = np.frombuffer(joined, np.int32)
    return tokens.astype(float)


def _add_lengths(
    lengths: LengthsByVersion,
    version: int,
    new: npt.NDArray[np.int32],
    max_versions: int,
) -> None:
    """Add lengths to those of their weight version; of more than so many versions the
    oldest is dropped, of more than `_BYTES_OF_A_VERSION` the first lengths.
    """
    before = lengths.get(version, b"")
    joined = before + new.tobytes()
    lengths[version] = joined[-_BYTES_OF_A_VERSION:]
    if len(lengths) > max_versions:
        oldest = min(lengths)
        del lengths[oldest]
