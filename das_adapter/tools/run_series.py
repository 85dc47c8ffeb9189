"""What a run's decision logs say about acceptance, time and history, as series of
numbers.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from das_adapter.core.length import LengthClass
from das_adapter.protocol.decision_log import LoggedRollout, RequestRecord
from das_adapter.protocol.metrics import faults, figures

MAX_BARS = 2000
"""Maximum number of requests drawn."""


class Rate(NamedTuple):
    """Draft tokens of one kind, and those of them that were accepted."""

    kind: str
    drafted: int
    accepted: int

    @property
    def share(self) -> float:
        """Accepted share, 0 to 1."""
        return self.accepted / max(1, self.drafted)


def by_training_step(rollouts: Iterable[LoggedRollout]) -> list[dict[str, Any]]:
    """Sum up each training step over all engines, in order.

    Returns:
        A row each: `version`, the weight version that followed, which is the number of
            the training step, or -1: none
        did; `engines` and `requests`; `tokens_per_forward`, of the decode steps that
        were timed; `acceptance`, a `Rate`; `decode_seconds`, `saved_seconds`, and of
        the former `plain_seconds`, in which nothing was drafted; `history_hits`, the
        share of the requests that began with history, and `history_tokens`; None: not
        counted.
    """
    found = []
    for version, group in by_version(rollouts):
        decoded = [s for r in group for s in r.steps]
        counts = [c for r in group for c in r.counts]
        step = {
            "version": version,
            "engines": len({r.source for r in group}),
            "requests": sum(len(r.requests) for r in group),
            "tokens_per_forward": tokens_per_forward(group),
            "acceptance": _rate(
                str(version),
                ((c["draft_tokens"], c["accepted_tokens"]) for c in counts),
            ),
            "decode_seconds": sum(s.seconds for s in decoded),
            "saved_seconds": sum(r.end.saved for r in group if r.end),
            "plain_seconds": sum(s.seconds for s in decoded if not s.drafted),
            "history_hits": figures(counts).get("das/history_hits"),
            "history_tokens": max(
                (c["history_tokens"] for c in counts if "history_tokens" in c),
                default=None,
            ),
        }
        found.append(step)
    return found


def tokens_per_forward(rollouts: Iterable[LoggedRollout]) -> float:
    """Return the tokens that a request got from a forward pass, mean over the decode
    steps that were timed.
    """
    decoded = [s for r in rollouts for s in r.steps]
    return 1.0 + sum(s.accepted for s in decoded) / max(
        1, sum(s.requests for s in decoded)
    )


def by_epoch(rollouts: Iterable[LoggedRollout]) -> list[Rate]:
    """Sum up the n-th visits of all problems."""
    tried = by_visit(rollouts)
    return [
        _rate(str(epoch), ((q.drafted, q.accepted) for q in tried[epoch]))
        for epoch in sorted(tried)
    ]


def by_visit(rollouts: Iterable[LoggedRollout]) -> dict[int, list[RequestRecord]]:
    """Return the requests of the n-th visits of all problems, by n: a problem is
    visited once per weight version that wrote rollouts of it.
    """
    tried: dict[int, list[RequestRecord]] = defaultdict(list)
    visits = Counter[int]()
    # what no weight sync followed comes last
    for _, group in sorted(by_version(rollouts), key=lambda g: g[0] < 0):
        requests = [q for r in group for q in r.requests]
        visits.update({q.problem for q in requests})
        for q in requests:
            tried[visits[q.problem]].append(q)
    return tried


def by_source(rollouts: Iterable[LoggedRollout]) -> list[Rate]:
    """Sum up by where draft tokens came from."""
    counts = [c for r in rollouts for c in r.counts]
    keys = {"policy copy": "self_counts", "neural drafter": "neural_counts"}
    models = [
        _rate(name, (c[key] for c in counts if key in c)) for name, key in keys.items()
    ]
    drafted, accepted = (
        sum(c[key] for c in counts) for key in ("draft_tokens", "accepted_tokens")
    )
    others = Rate(
        "history",
        drafted - sum(m.drafted for m in models),
        accepted - sum(m.accepted for m in models),
    )
    return [rate for rate in (others, *models) if rate.drafted]


def notes(rollouts: Iterable[LoggedRollout]) -> list[tuple[str, str, list[int]]]:
    """Say what stood out, and before which weight versions: each `alarm`, why
    `das/health` was 0, and then each `note`, why drafting stopped where that was no
    fault.
    """
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for version, group in by_version(rollouts):
        wrong = faults([counts for r in group for counts in r.counts]).values()
        stopped = {r.end.stopped for r in group if r.end and r.end.stopped}
        mere = {
            reason for reason in stopped if not any(reason in alarm for alarm in wrong)
        }
        for kind, reason in [
            *(("alarm", reason) for reason in wrong),
            *(("note", reason) for reason in mere),
        ]:
            found[kind, reason].append(version)
    return [(*note, versions) for note, versions in sorted(found.items())]


def timeline(rollouts: Sequence[LoggedRollout]) -> dict[str, Any]:
    """Add up the engines' batches of the last rollout in which a request ended; times
    in seconds from its begin.

    Returns:
        Empty: none has, the run began just now. Else `of`: which it is; `requests`: r
            rows in the order of their ends:
        predicted length class, begin, end, tokens, accepted of drafts; `first` of those
        to draw; `at`, float64 [2 r]: begin or end of a request; `running`, int64 [2 r]:
        requests that run from then on; `bins`, float64 [b + 1]: edges of equal
        intervals, at most 300; `accepted` and `rejected`, float64 [b]: draft tokens of
        a decode step, mean of the interval's steps.
    """
    last = max((r.version for r in rollouts if r.requests), default=None)
    if last is None:
        return {}
    rollouts = [r for r in rollouts if r.version == last]
    requests = sorted(
        (q for r in rollouts for q in r.requests), key=lambda request: request.end
    )
    start = min(
        t for r in rollouts for t in (r.steps[0].begin, *(q.begin for q in r.requests))
    )
    events = sorted(
        [(q.begin - start, 1) for q in requests]
        + [(q.end - start, -1) for q in requests]
    )
    at, changes = np.array(events).T
    steps = np.array(
        [(s.begin - start, s.drafted, s.accepted) for r in rollouts for s in r.steps]
    )
    edges = np.linspace(
        0.0, float(steps[:, 0].max()) + 1e-9, int(np.clip(len(steps) // 4, 10, 300)) + 1
    )
    many = np.maximum(np.histogram(steps[:, 0], edges)[0], 1)
    drafted, accepted = (
        np.histogram(steps[:, 0], edges, weights=steps[:, i])[0] / many for i in (1, 2)
    )
    return {
        "of": f"before weight version {last}" if last >= 0 else "at the end of the log",
        "first": max(0, len(requests) - MAX_BARS),
        "requests": [
            (
                LengthClass(q.length_class).name.lower(),
                q.begin - start,
                q.end - start,
                q.tokens,
                q.accepted,
            )
            for q in requests
        ],
        "at": at,
        "running": np.cumsum(changes).astype(np.int64),
        "bins": edges,
        "accepted": accepted,
        "rejected": drafted - accepted,
    }


def by_version(
    rollouts: Iterable[LoggedRollout],
) -> Iterator[tuple[int, list[LoggedRollout]]]:
    """Group rollouts by the weight version that followed, in order; -1: none did."""
    for version, group in itertools.groupby(
        sorted(rollouts, key=lambda r: r.version), key=lambda r: r.version
    ):
        yield version, list(group)


def _rate(kind: str, pairs: Iterable[Sequence[int]]) -> Rate:
    """Add up pairs of drafted and accepted tokens."""
    return Rate(kind, *np.sum([(0, 0), *pairs], axis=0).tolist())
