"""Series of numbers about acceptance, time and history, from a run's decision logs."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from das_adapter.core.length import LengthClass
from das_adapter.protocol.decision_log import LoggedRollout, RequestRecord, StepRecord
from das_adapter.protocol.metrics import faults, figures

MAX_BARS = 2000
"""Maximum number of requests that are drawn."""
MIN_BINS = 10
"""Intervals of the timeline, at least."""
MAX_BINS = 300
"""Intervals of the timeline, at most."""
MODEL_COUNTS = {"policy copy": "self_counts", "neural drafter": "neural_counts"}
"""Counters of drafted and accepted tokens of a model, by its name."""


class Rate(NamedTuple):
    """Draft tokens of one kind, and those of them that were accepted."""

    kind: str
    """Name of the kind."""
    drafted: int
    accepted: int

    @property
    def share(self) -> float:
        """Accepted share, 0 to 1."""
        return self.accepted / max(1, self.drafted)


def without_validation(rollouts: Iterable[LoggedRollout]) -> list[LoggedRollout]:
    """Return what of rollouts belongs to training; of what drafts saved the share that
    training has of the accepted draft tokens.
    """
    found = []
    for rollout in rollouts:
        steps = [step for step in rollout.steps if not step.is_validation]
        requests = [request for request in rollout.requests if request.record]
        if not steps:
            continue
        end = rollout.end
        if end is not None and len(steps) < len(rollout.steps):
            accepted = sum(step.accepted for step in rollout.steps)
            share = sum(step.accepted for step in steps) / max(1, accepted)
            end = end._replace(saved=share * end.saved)
        found.append(replace(rollout, steps=steps, requests=requests, end=end))
    return found


def validation(rollouts: Iterable[LoggedRollout]) -> dict[str, Any]:
    """Return the figures of validations: `requests`, `seconds` of decode steps, and
    `tokens_per_forward`; empty: there was none.
    """
    found = []
    for rollout in rollouts:
        steps = [step for step in rollout.steps if step.is_validation]
        requests = [request for request in rollout.requests if not request.record]
        if steps or requests:
            found.append(replace(rollout, steps=steps, requests=requests))
    if not found:
        return {}
    return {
        "requests": len(requests_of(found)),
        "seconds": sum(step.seconds for step in steps_of(found)),
        "tokens_per_forward": tokens_per_forward(found),
    }


def by_training_step(rollouts: Iterable[LoggedRollout]) -> list[dict[str, Any]]:
    """Sum up each training step over all engines, in order.

    Returns:
        A row of each step: `version`, the weight version that followed, which is the
        number of the training step, or -1: none did; `engines` and `requests`;
        `tokens_per_forward`, of the decode steps that were timed; `acceptance`, a
        `Rate`; `decode_seconds`, `saved_seconds`, and of the former `plain_seconds`, in
        which nothing was drafted; `history_hits`, the share of the requests that began
        with history, and `history_tokens`; None: not counted.
    """
    return [
        _of_training_step(version, group) for version, group in by_version(rollouts)
    ]


def _of_training_step(
    version: int, rollouts: Sequence[LoggedRollout]
) -> dict[str, Any]:
    """Return the row of a training step."""
    steps = steps_of(rollouts)
    counts = counts_of(rollouts)
    plain = [step for step in steps if not step.drafted]
    ends = [rollout.end for rollout in rollouts if rollout.end]
    history_tokens = []
    accepted = []
    for each in counts:
        accepted.append((each["draft_tokens"], each["accepted_tokens"]))
        if "history_tokens" in each:
            history_tokens.append(each["history_tokens"])
    return {
        "version": version,
        "engines": len({rollout.source for rollout in rollouts}),
        "requests": len(requests_of(rollouts)),
        "tokens_per_forward": tokens_per_forward(rollouts),
        "acceptance": _rate(str(version), accepted),
        "decode_seconds": sum(step.seconds for step in steps),
        "saved_seconds": sum(end.saved for end in ends),
        "plain_seconds": sum(step.seconds for step in plain),
        "history_hits": figures(counts).get("das/history_hits"),
        "history_tokens": max(history_tokens, default=None),
    }


def steps_of(rollouts: Iterable[LoggedRollout]) -> list[StepRecord]:
    """Return the decode steps of rollouts that were timed."""
    found = list[StepRecord]()
    for rollout in rollouts:
        found += rollout.steps
    return found


def counts_of(rollouts: Iterable[LoggedRollout]) -> list[dict[str, Any]]:
    """Return the counters of rollouts."""
    found = list[dict[str, Any]]()
    for rollout in rollouts:
        found += rollout.counts
    return found


def requests_of(rollouts: Iterable[LoggedRollout]) -> list[RequestRecord]:
    """Return the requests of rollouts."""
    found = list[RequestRecord]()
    for rollout in rollouts:
        found += rollout.requests
    return found


def tokens_per_forward(rollouts: Iterable[LoggedRollout]) -> float:
    """Return the tokens that a request got from a forward pass, mean over the decode
    steps that were timed.
    """
    steps = steps_of(rollouts)
    accepted = sum(step.accepted for step in steps)
    forwards = sum(step.requests for step in steps)
    return 1.0 + accepted / max(1, forwards)


def by_epoch(rollouts: Iterable[LoggedRollout]) -> list[Rate]:
    """Sum up the n-th visits of all problems."""
    visits = by_visit(rollouts)
    found = []
    for epoch in sorted(visits):
        pairs = [(request.drafted, request.accepted) for request in visits[epoch]]
        found.append(_rate(str(epoch), pairs))
    return found


def by_visit(rollouts: Iterable[LoggedRollout]) -> dict[int, list[RequestRecord]]:
    """Return the requests of the n-th visits of all problems, by n: a problem is
    visited once per weight version that wrote rollouts of it.
    """
    found: dict[int, list[RequestRecord]] = defaultdict(list)
    visits = Counter[int]()
    groups = list(by_version(rollouts))
    # what no weight sync followed comes last
    groups.sort(key=lambda numbered: numbered[0] < 0)
    for _, group in groups:
        requests = requests_of(group)
        visits.update({request.problem for request in requests})
        for request in requests:
            found[visits[request.problem]].append(request)
    return found


def by_source(rollouts: Iterable[LoggedRollout]) -> list[Rate]:
    """Sum up by where draft tokens came from."""
    counts = counts_of(rollouts)
    models = []
    for name, key in MODEL_COUNTS.items():
        pairs = [each[key] for each in counts if key in each]
        models.append(_rate(name, pairs))
    drafted = sum(each["draft_tokens"] for each in counts)
    accepted = sum(each["accepted_tokens"] for each in counts)
    for model in models:
        drafted -= model.drafted
        accepted -= model.accepted
    rates = (Rate("history", drafted, accepted), *models)
    return [rate for rate in rates if rate.drafted]


def notes(rollouts: Iterable[LoggedRollout]) -> list[tuple[str, str, list[int]]]:
    """Say what stood out, and in which training steps: each `alarm`, why
    `das/health` was 0, and then each `note`, why drafting stopped where that was no
    fault.
    """
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for version, group in by_version(rollouts):
        alarms = list(faults(counts_of(group)).values())
        for reason in alarms:
            found["alarm", reason].append(version)
        ends = [rollout.end for rollout in group if rollout.end]
        for stopped in {end.stopped for end in ends if end.stopped}:
            if not any(stopped in alarm for alarm in alarms):
                found["note", stopped].append(version)
    return [(*note, versions) for note, versions in sorted(found.items())]


def timeline(rollouts: Sequence[LoggedRollout]) -> dict[str, Any]:
    """Add up the engines' batches of the last rollout in which a request ended; times
    in seconds from its begin.

    Returns:
        Empty: none has, the run began just now. Else `of`: which rollout it is;
        `requests`: r rows in the order of their ends: predicted length class, begin,
        end, tokens, accepted draft tokens; `first` row to draw; `at`, float64 [2 r]:
        begin or end of a request; `running`, int64 [2 r]: requests that run from then
        on; `bins`, float64 [b + 1]: edges of equal intervals, at most 300; `accepted`
        and `rejected`, float64 [b]: draft tokens of a decode step, mean of the
        interval's steps.
    """
    versions = [rollout.version for rollout in rollouts if rollout.requests]
    if not versions:
        return {}
    last = max(versions)
    rollouts = [rollout for rollout in rollouts if rollout.version == last]
    requests = requests_of(rollouts)
    requests.sort(key=lambda request: request.end)
    begins = [rollout.steps[0].begin for rollout in rollouts]
    begins += [request.begin for request in requests]
    start = min(begins)
    events = []
    rows = []
    for request in requests:
        begin_s = request.begin - start
        end_s = request.end - start
        events += [(begin_s, 1), (end_s, -1)]
        length_class = LengthClass(request.length_class).name.lower()
        rows.append((length_class, begin_s, end_s, request.tokens, request.accepted))
    at, changes = np.array(sorted(events)).T
    if last >= 0:
        of = f"of training step {last}"
    else:
        of = "at the end of the log"
    return {
        "of": of,
        "first": max(0, len(requests) - MAX_BARS),
        "requests": rows,
        "at": at,
        "running": np.cumsum(changes).astype(np.int64),
        **_draft_tokens_over_time(steps_of(rollouts), start),
    }


def _draft_tokens_over_time(
    steps: Sequence[StepRecord], start: float
) -> dict[str, Any]:
    """Return `bins`, `accepted` and `rejected` of a `timeline`."""
    begins_s = np.array([step.begin - start for step in steps])
    drafted = np.array([step.drafted for step in steps])
    accepted = np.array([step.accepted for step in steps])
    num_bins = int(np.clip(len(steps) // 4, MIN_BINS, MAX_BINS))
    end_s = float(begins_s.max()) + 1e-9
    edges = np.linspace(0.0, end_s, num_bins + 1)
    counts, _ = np.histogram(begins_s, edges)
    counts = np.maximum(counts, 1)
    drafted_sums, _ = np.histogram(begins_s, edges, weights=drafted)
    accepted_sums, _ = np.histogram(begins_s, edges, weights=accepted)
    accepted_means = accepted_sums / counts
    return {
        "bins": edges,
        "accepted": accepted_means,
        "rejected": drafted_sums / counts - accepted_means,
    }


def by_version(
    rollouts: Iterable[LoggedRollout],
) -> Iterator[tuple[int, list[LoggedRollout]]]:
    """Group rollouts by the weight version that followed, in order; -1: none did."""
    version = attrgetter("version")
    ordered = sorted(rollouts, key=version)
    for number, group in itertools.groupby(ordered, key=version):
        yield number, list(group)


def _rate(kind: str, pairs: Iterable[Sequence[int]]) -> Rate:
    """Add up pairs of drafted and accepted tokens."""
    total_drafted = 0
    total_accepted = 0
    for drafted, accepted in pairs:
        total_drafted += drafted
        total_accepted += accepted
    return Rate(kind, total_drafted, total_accepted)
