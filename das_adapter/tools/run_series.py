"""What a run's decision logs say about acceptance, time and history, as series of numbers."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from das_adapter.core.staleness import AGES
from das_adapter.protocol.decision_log import Request, Rollout
from das_adapter.protocol.metrics import faults, merge
from das_adapter.sim import rollouts as dumps

NGRAM = 8
"""Tokens of an n-gram in `similarity`. The paper does not give its N."""
MAX_EPOCHS = 32
"""Maximum number of epochs that `similarity` compares."""


class Rate(NamedTuple):
    """Draft tokens of one kind, and those of them that were accepted."""

    kind: str
    drafted: int
    accepted: int

    @property
    def share(self) -> float:
        """Accepted share, 0 to 1."""
        return self.accepted / max(1, self.drafted)


class TrainingStep(NamedTuple):
    """What all engines did in the rollout of one training step."""

    version: int
    """Weight version that followed; the number of the training step."""
    tokens_per_forward: float
    """Of the decode steps that were timed."""
    acceptance: Rate
    decode_seconds: float
    """Sum over the engines, like `saved_seconds`."""
    saved_seconds: float
    history_hits: float | None
    """Share of the requests that began with history; None: not counted, here and below."""
    history_tokens: float | None


class Alarm(NamedTuple):
    """Why `das/health` was 0, in words."""

    versions: list[int]
    """Weight versions that followed the rollouts concerned."""
    reason: str


class Timeline(NamedTuple):
    """Batches of one rollout over time, added up over the engines; times in seconds from its begin."""

    at: npt.NDArray[np.float64]
    """Begin or end of a request, shape (2 r,)."""
    running: npt.NDArray[np.int64]
    """Requests that run from then on, shape (2 r,)."""
    bins: npt.NDArray[np.float64]
    """Edges of equal intervals, shape (b + 1,)."""
    accepted: npt.NDArray[np.float64]
    """Draft tokens accepted in a decode step, mean of the interval's steps, shape (b,)."""
    rejected: npt.NDArray[np.float64]


def by_training_step(rollouts: Iterable[Rollout]) -> list[TrainingStep]:
    """Sum up each training step, in order; a rollout that no weight sync followed is left out."""
    return [_training_step(version, group) for version, group in _by_version(rollouts) if version >= 0]


def _training_step(version: int, group: list[Rollout]) -> TrainingStep:
    decoded = [s for r in group for s in r.steps]
    counts = [c for r in group for c in r.counts]
    return TrainingStep(
        version,
        1.0 + sum(s.accepted for s in decoded) / max(1, sum(s.requests for s in decoded)),
        Rate(str(version), *_total(r.acceptance for r in group if r.acceptance)),
        sum(s.seconds for s in decoded),
        sum(r.end.saved for r in group if r.end),
        merge(counts).get("das/history_hits") if counts else None,
        max((c["history_tokens"] for c in counts if "history_tokens" in c), default=None),
    )


def by_epoch(rollouts: Sequence[Rollout]) -> list[Rate]:
    """Sum up the n-th visits of all problems: a problem is visited once per weight version that wrote rollouts of
    it."""
    tried: dict[int, list[Request]] = defaultdict(list)
    visits: dict[int, int] = defaultdict(int)
    groups = list(_by_version(rollouts))
    for _, group in sorted(groups, key=lambda g: g[0] < 0):  # what no weight sync followed comes last
        requests = [q for r in group for q in r.requests]
        for problem in {q.problem for q in requests}:
            visits[problem] += 1
        for q in requests:
            tried[visits[q.problem]].append(q)
    return [Rate(str(epoch), *_total((q.drafted, q.accepted) for q in tried[epoch])) for epoch in sorted(tried)]


def by_age(rollouts: Iterable[Rollout]) -> list[Rate]:
    """Sum up by the number of weight versions since the newest rollout of a request's problem (`staleness.AGES`)."""
    return [Rate(name, *map(int, counts)) for name, counts in zip(AGES, _staleness(rollouts), strict=True) if counts[0]]


def by_source(rollouts: Iterable[Rollout]) -> list[Rate]:
    """Sum up by where draft tokens came from."""
    rollouts = list(rollouts)
    ages, counts = _staleness(rollouts), [c for r in rollouts for c in r.counts]
    parts: dict[str, Iterable[Sequence[Any]]] = {
        "earlier rollouts": ages[1:],
        "live text only": ages[:1],
        "policy copy": [c["self_counts"] for c in counts if "self_counts" in c],
        "neural drafter": [c["neural_counts"] for c in counts if "neural_counts" in c],
    }
    rates = [Rate(name, *_total(pairs)) for name, pairs in parts.items()]
    return [rate for rate in rates if rate.drafted]


def by_length(rollouts: Iterable[Rollout]) -> list[Rate]:
    """Sum up by the tokens of the response so far, in powers of two."""
    octaves = np.sum([np.array(r.acceptance) for r in rollouts if r.acceptance] or [np.zeros((2, 0))], axis=0)
    return [Rate(str(2**i), *map(int, counts)) for i, counts in enumerate(octaves.T) if counts[0]]


def alarms(rollouts: Iterable[Rollout]) -> list[Alarm]:
    """Say why `das/health` was 0, and in which training steps; empty: it never was."""
    found: dict[str, list[int]] = defaultdict(list)
    for version, group in _by_version(rollouts):
        stopped = {r.end.stopped for r in group if r.end and r.end.stopped}
        for reason in stopped | set(faults([counts for r in group for counts in r.counts]).values()):
            found[reason].append(version)
    return [Alarm(versions, reason) for reason, versions in found.items()]


def timeline(rollouts: Sequence[Rollout]) -> Timeline:
    """Add up the engines' batches of one rollout over time, its decode steps in at most 300 intervals."""
    start = begin(rollouts)
    requests = requests_of(rollouts)
    events = sorted([(q.begin - start, 1) for q in requests] + [(q.end - start, -1) for q in requests])
    at, changes = np.array(events).T
    steps = np.array([(s.begin - start, s.drafted, s.accepted) for r in rollouts for s in r.steps])
    edges = np.linspace(0.0, float(steps[:, 0].max()) + 1e-9, int(np.clip(len(steps) // 4, 10, 300)) + 1)
    many = np.maximum(np.histogram(steps[:, 0], edges)[0], 1)
    drafted, accepted = (np.histogram(steps[:, 0], edges, weights=steps[:, i])[0] / many for i in (1, 2))
    return Timeline(at, np.cumsum(changes).astype(np.int64), edges, accepted, drafted - accepted)


def requests_of(rollouts: Iterable[Rollout]) -> list[Request]:
    """Return the requests of some rollouts by their end."""
    return sorted((q for r in rollouts for q in r.requests), key=lambda request: request.end)


def begin(rollouts: Iterable[Rollout]) -> float:
    """Return when the first request, or the first step, began, seconds since the epoch."""
    return min(t for r in rollouts for t in (r.steps[0].begin, *(q.begin for q in r.requests)))


def similarity(written: Iterable[dumps.Rollout]) -> npt.NDArray[np.float64]:
    """Compare the responses to the same problems in different epochs (DAS, Fig. 2).

    Args:
        written: recorded rollouts. The n-th step in which a problem was written is its n-th epoch.

    Returns:
        float64 [epochs, epochs]: in row a and column b the share of the n-grams (`NGRAM` tokens) written in epoch a
        that were also written in epoch b, mean over problems; on the diagonal, that siblings wrote. NaN: no problem has
        both epochs.
    """
    texts: dict[int, dict[tuple[int, int], list[npt.NDArray[np.uint64]]]] = defaultdict(lambda: defaultdict(list))
    for r in written:
        if len(r.tokens) >= NGRAM:
            texts[r.problem][r.run, r.step].append(_ngrams(r.tokens))
    epochs = min(MAX_EPOCHS, max(map(len, texts.values()), default=0))
    shares = np.full((len(texts), epochs, epochs), np.nan)
    for problem, steps in enumerate(texts.values()):
        visits = [steps[step] for step in sorted(steps)][:epochs]
        for (a, responses), (b, others) in itertools.product(enumerate(visits), repeat=2):
            if a != b:
                shares[problem, a, b] = np.isin(np.concatenate(responses), np.concatenate(others)).mean()
            elif len(responses) > 1:
                shares[problem, a, a] = _shared_by_siblings(responses)
    counts = (~np.isnan(shares)).sum(axis=0)
    return np.asarray(np.where(counts > 0, np.nansum(shares, axis=0) / np.maximum(counts, 1), np.nan))


def _ngrams(tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64]:
    """Hash the n-grams of a response, uint64 [tokens - NGRAM + 1]."""
    windows = np.lib.stride_tricks.sliding_window_view(tokens.astype(np.uint64), NGRAM)
    powers = np.array([pow(0x9E3779B97F4A7C15, i, 2**64) for i in range(NGRAM)], dtype=np.uint64)
    return np.asarray((windows * powers).sum(axis=1), dtype=np.uint64)


def _shared_by_siblings(responses: list[npt.NDArray[np.uint64]]) -> float:
    """Return the share of the n-grams that at least one sibling wrote too."""
    distinct, writers = np.unique(np.concatenate([np.unique(r) for r in responses]), return_counts=True)
    return float((writers[np.searchsorted(distinct, np.concatenate(responses))] > 1).mean())


def _by_version(rollouts: Iterable[Rollout]) -> Iterator[tuple[int, list[Rollout]]]:
    """Group rollouts by the weight version that followed, in order."""
    for version, group in itertools.groupby(sorted(rollouts, key=lambda r: r.version), key=lambda r: r.version):
        yield version, list(group)


def _total(pairs: Iterable[Sequence[Any]]) -> tuple[int, int]:
    """Add up (drafted, accepted), each a number or an array."""
    sums = [(int(np.sum(drafted)), int(np.sum(accepted))) for drafted, accepted in pairs]
    return sum(drafted for drafted, _ in sums), sum(accepted for _, accepted in sums)


def _staleness(rollouts: Iterable[Rollout]) -> npt.NDArray[np.int64]:
    """Add up (drafted, accepted) by age, int64 [ages, 2]."""
    total = np.zeros((len(AGES), 2), dtype=np.int64)
    for counts in (counts for rollout in rollouts for counts in rollout.counts):
        total += np.array(counts.get("staleness", np.zeros_like(total)), dtype=np.int64)
    return total
