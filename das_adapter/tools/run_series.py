"""What a run's decision logs say about acceptance, time and history, as series of numbers."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
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
"""Epochs that `similarity` compares at most."""


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
    steps = []
    for version, parts in itertools.groupby(sorted(rollouts, key=lambda r: r.version), key=lambda r: r.version):
        if version < 0:
            continue
        group = list(parts)
        decoded = [s for r in group for s in r.steps]
        forwards, kept = sum(s.requests for s in decoded), sum(s.accepted for s in decoded)
        drafted, accepted = _sum([r.acceptance for r in group if r.acceptance])
        counted = _figures(group)
        steps.append(
            TrainingStep(
                version,
                1.0 + kept / max(1, forwards),
                Rate(str(version), drafted, accepted),
                sum(s.seconds for s in decoded),
                sum(r.end.saved for r in group if r.end),
                counted.get("das/history_hits"),
                max((c["history_tokens"] for r in group for c in r.counts if "history_tokens" in c), default=None),
            )
        )
    return steps


def by_epoch(rollouts: Sequence[Rollout]) -> list[Rate]:
    """Sum up the n-th visits of all problems: a problem is visited once per weight version that wrote rollouts of
    it."""
    tried: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    visits: dict[int, int] = defaultdict(int)
    ordered = sorted(rollouts, key=lambda r: (r.version < 0, r.version))
    for _, group in itertools.groupby(ordered, key=lambda r: r.version):
        requests = [q for r in group for q in r.requests]
        for problem in {q.problem for q in requests}:
            visits[problem] += 1
        for q in requests:
            counts = tried[visits[q.problem]]
            counts[0] += q.drafted
            counts[1] += q.accepted
    return [Rate(str(epoch), *counts) for epoch, counts in sorted(tried.items())]


def by_age(rollouts: Iterable[Rollout]) -> list[Rate]:
    """Sum up by the number of weight versions since the newest rollout of a request's problem (`staleness.AGES`)."""
    total = _staleness(rollouts)
    return [Rate(name, *map(int, counts)) for name, counts in zip(AGES, total, strict=True) if counts[0]]


def by_source(rollouts: Iterable[Rollout]) -> list[Rate]:
    """Sum up by where draft tokens came from."""
    rollouts = list(rollouts)
    ages = _staleness(rollouts)
    copied, neural = (
        _sum([c[name] for r in rollouts for c in r.counts if name in c]) for name in ("self_counts", "neural_counts")
    )
    parts = (
        ("earlier rollouts", ages[1:].sum(axis=0)),
        ("live text only", ages[0]),
        ("policy copy", copied),
        ("neural drafter", neural),
    )
    return [Rate(name, *map(int, counts)) for name, counts in parts if counts[0]]


def by_length(rollouts: Iterable[Rollout]) -> list[Rate]:
    """Sum up by the tokens of the response so far, in powers of two."""
    octaves = np.sum([np.array(r.acceptance) for r in rollouts if r.acceptance] or [np.zeros((2, 0))], axis=0)
    return [
        Rate(f"{2**octave}", int(drafted), int(accepted))
        for octave, (drafted, accepted) in enumerate(octaves.T)
        if drafted
    ]


def alarms(rollouts: Iterable[Rollout]) -> list[Alarm]:
    """Say why `das/health` was 0, and in which training steps; empty: it never was."""
    found: dict[str, set[int]] = defaultdict(set)
    for version, parts in itertools.groupby(sorted(rollouts, key=lambda r: r.version), key=lambda r: r.version):
        group = list(parts)
        stopped = {r.end.stopped for r in group if r.end and r.end.stopped}
        for reason in stopped | set(faults([counts for r in group for counts in r.counts]).values()):
            found[reason].add(version)
    return [Alarm(sorted(versions), reason) for reason, versions in found.items()]


def timeline(rollouts: Sequence[Rollout]) -> Timeline:
    """Add up the engines' batches of one rollout over time, its decode steps in at most 300 intervals."""
    start = begin(rollouts)
    requests = requests_of(rollouts)
    events = sorted([(q.begin - start, 1) for q in requests] + [(q.end - start, -1) for q in requests])
    at = np.array([when for when, _ in events])
    running = np.cumsum([change for _, change in events])
    steps = [s for r in rollouts for s in r.steps]
    began = np.array([s.begin for s in steps]) - start
    edges = np.linspace(0.0, float(began.max()) + 1e-9, int(np.clip(len(steps) // 4, 10, 300)) + 1)
    many = np.maximum(np.histogram(began, edges)[0], 1)
    drafted, accepted = (
        np.histogram(began, edges, weights=[float(value) for value in values])[0] / many
        for values in ([s.drafted for s in steps], [s.accepted for s in steps])
    )
    return Timeline(at, running, edges, accepted, drafted - accepted)


def requests_of(rollouts: Iterable[Rollout]) -> list[Request]:
    """Return the requests of some rollouts by their end."""
    return sorted((q for r in rollouts for q in r.requests), key=lambda request: request.end)


def begin(rollouts: Iterable[Rollout]) -> float:
    """Return when the first request, or the first step, began, seconds since the epoch."""
    return min(t for r in rollouts for t in (r.steps[0].begin, *(q.begin for q in r.requests)))


def similarity(written: Iterable[dumps.Rollout]) -> npt.NDArray[np.float64]:
    """Compare what was written of the same problems in different epochs (DAS, Fig. 2).

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
    epochs = min(MAX_EPOCHS, max((len(steps) for steps in texts.values()), default=0))
    shares, counts = np.zeros((epochs, epochs)), np.zeros((epochs, epochs))
    for steps in texts.values():
        visits = [steps[step] for step in sorted(steps)][:epochs]
        for a, responses in enumerate(visits):
            for b, others in enumerate(visits):
                if a != b:
                    shares[a, b] += float(np.isin(np.concatenate(responses), np.concatenate(others)).mean())
                    counts[a, b] += 1
                elif len(responses) > 1:
                    shares[a, a] += _shared_by_siblings(responses)
                    counts[a, a] += 1
    return np.divide(shares, counts, out=np.full_like(shares, np.nan), where=counts > 0)


def _ngrams(tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64]:
    """Hash the n-grams of a response, uint64 [tokens - NGRAM + 1]."""
    windows = np.lib.stride_tricks.sliding_window_view(tokens.astype(np.uint64), NGRAM)
    powers = np.array([pow(0x9E3779B97F4A7C15, i, 2**64) for i in range(NGRAM)], dtype=np.uint64)
    return np.asarray((windows * powers).sum(axis=1), dtype=np.uint64)


def _shared_by_siblings(responses: list[npt.NDArray[np.uint64]]) -> float:
    """Return the share of the n-grams that at least one sibling wrote too."""
    distinct, writers = np.unique(np.concatenate([np.unique(r) for r in responses]), return_counts=True)
    everything = np.concatenate(responses)
    return float((writers[np.searchsorted(distinct, everything)] > 1).mean())


def _sum(pairs: Sequence[Sequence[Any]]) -> tuple[int, int]:
    """Add up (drafted, accepted), each a number or an array."""
    total = np.zeros(2, dtype=np.int64)
    for pair in pairs:
        total += [int(np.sum(part)) for part in pair]
    return int(total[0]), int(total[1])


def _staleness(rollouts: Iterable[Rollout]) -> npt.NDArray[np.int64]:
    """Add up (drafted, accepted) by age, int64 [ages, 2]."""
    total = np.zeros((len(AGES), 2), dtype=np.int64)
    for rollout in rollouts:
        for counts in rollout.counts:
            total += np.array(counts.get("staleness", np.zeros_like(total)), dtype=np.int64)
    return total


def _figures(rollouts: Iterable[Rollout]) -> dict[str, float]:
    counted = [counts for r in rollouts for counts in r.counts]
    return merge(counted) if counted else {}
